"""`undertow ...` in processes that are forked from one that has imported it.

A start takes three seconds of CPU for its imports, a fork milliseconds. No thread has begun before a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ..cli import PROGRAM

ROOT = Path(__file__).resolve().parents[3]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "undertow.serving.cli",
        "undertow.serving.http.hosting",
        "undertow.serving.streams.consumer",
        "undertow.bench.quality.run.evaluate",
        "openai.resources.chat",
        "undertow.kernels.topk.host_rows",
        "undertow.kernels.gate.cpu_gate",
        "scipy.linalg",
    ]
)


def started(
    args: Sequence[str | Path],
    env: Mapping[str, str],
    out: Path,
    err: Path,
    *,
    files: int | None = None,
    afresh: bool = False,
) -> Forked | subprocess.Popen[bytes]:
    """The command, see `Forked`. `afresh`: by a new interpreter, as users start it."""
    if not afresh:
        for file in (out, err):
            file.write_text("")
        return Forked(args, env, out, err, files)
    with out.open("w") as to_out, err.open("w") as to_err:  # no pipe: orphans would hold it open
        return subprocess.Popen([*PROGRAM, *map(str, args)], env=env, stdout=to_out, stderr=to_err)


class Forked:
    """One command. The methods are those of subprocess.Popen."""

    def __init__(
        self,
        args: Sequence[str | Path],
        env: Mapping[str, str],
        out: Path,
        err: Path,
        files: int | None = None,
        folder: Path | None = None,
    ) -> None:
        """`out`, `err`: files that its output is added to. `files`: how many it may open; half at first."""
        words = [str(arg) for arg in args]
        self._process = fork(run_program, words, dict(env), str(out), str(err), files, folder)

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None, "it was started"
        return pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("undertow", timeout or 0.0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def fork(target: Callable[..., None], *args: Any) -> BaseProcess:
    """A process that calls it; started."""
    process: BaseProcess = FORKS.Process(target=target, args=args, daemon=True)
    sys.path.append(str(ROOT))  # it unpickles `target` by the name of its module
    try:
        process.start()
    finally:
        sys.path.remove(str(ROOT))
    return process


def settle(env: Mapping[str, str], out: str, err: str, folder: Path | None) -> None:
    """In the fork: its environment, the files of its output and its folder; this folder if None."""
    for name, stream in ((out, 1), (err, 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_APPEND), stream)
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(env)
    if folder is not None:
        os.chdir(folder)


def run_program(
    args: list[str], env: dict[str, str], out: str, err: str, files: int | None, folder: Path | None
) -> None:
    """In the fork: what `python -m undertow.serving.cli` does."""
    settle(env, out, err, folder)
    if files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files // 2, files))
    sys.argv = ["undertow", *args]
    from undertow.serving.cli import main

    main()
