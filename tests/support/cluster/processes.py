"""Commands in processes of their own, and the Ray processes below them, to be killed."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from ..cli import ENV
from .forked import started

CLUSTER_ENV = {"UNDERTOW_CLUSTER_NUM_CPUS": "0.5", "UNDERTOW_CLUSTER_THREADS": "1"}


class Command:
    """`undertow ...` in a process of its own, and the Ray processes below it."""

    afresh = False

    def __init__(self, folder: Path, *args: str | Path, **env: str) -> None:
        folder.mkdir(exist_ok=True)
        self._out, self._err = folder / "out.json", folder / "err.txt"
        environment = os.environ | ENV | CLUSTER_ENV | env
        self.process = started(args, environment, self._out, self._err, afresh=self.afresh)

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def wait_until(self, holds: Callable[[], object]) -> None:
        """Wait until something holds, or the command has ended."""
        while self.running and not holds():
            time.sleep(0.05)  # many a condition opens the store, which takes time from the command

    def kill(self) -> list[psutil.Process]:
        """SIGKILL; what it leaves behind."""
        below: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            below = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait()
        return below

    def result(self) -> Any:
        """Wait for its end, which must be a good one: its JSON."""
        code = self.process.wait(timeout=600)
        assert code == 0, f"exit code {code}: {self.err[-2_000:]}"
        return json.loads(self.out)

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()


class FreshCommand(Command):
    """As users start it: by a new interpreter."""

    afresh = True


def ray_processes(of: int, kind: str) -> list[psutil.Process]:
    """The shards, or the workers that read and feed now, below a process."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(of).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                name = process.name()
                if name.startswith("ray::") and "IDLE" not in name and "Agent" not in name:
                    found += [process] * (("Shard" in name) == (kind == "shard"))
    return found


def strike(found: Sequence[psutil.Process], rng: random.Random) -> int:
    """SIGKILL for one of them; how many that were."""
    if found:
        with suppress(psutil.NoSuchProcess):
            rng.choice(found).kill()
            return 1
    return 0


def all_ended(processes: Sequence[psutil.Process]) -> int:
    """Wait for the end of what killed drivers have left; how many went on, which are ended here."""
    _, alive = psutil.wait_procs(processes, timeout=90)
    for process in alive:
        process.kill()
    return len(alive)
