"""Our side of a peer: its runner as a process, asked by JSON lines, several requests at a time."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from undertow.bench.machine import ROOT
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Turn, UndertowError, Usage

PYTHON = ROOT / ".venv-peers" / "bin" / "python"
RUNNERS = {"mem0": "mem0_runner", "langmem": "langmem_runner"}
API_KEY = "UNDERTOW_PEER_API_KEY"  # as runner.py reads it, which cannot be imported here

OPERATION = "add"
_SHOWN_LOG_LINES = 12
_CLOSE_S = 30


class PeerError(UndertowError):
    """A peer failed, or is not there. `spent`: what the request that failed has cost all the same."""

    def __init__(self, reason: str, spent: Spent | None = None) -> None:
        super().__init__(reason)
        self.spent = spent


@dataclass(frozen=True, slots=True)
class Spent:
    """What a request has cost; `complaints`: errors that the peer logged or passed over, not raised."""

    usage: Usage
    complaints: tuple[str, ...]

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Self:
        counts = {name: told[name] for name in Usage.__slots__}
        return cls(Usage(**counts), tuple(told["complaints"]))


@dataclass(frozen=True, slots=True)
class Reply:
    result: Any
    spent: Spent


def command_of(name: str, settings: Settings, folder: Path, threads: int = 1) -> list[str]:
    """How a peer's runner is started. PeerError: it cannot be, and why."""
    if not PYTHON.exists():
        raise PeerError(f"{name} needs an environment of its own, which is not there. Run: make setup-peers")
    url = settings.llm_url or ""
    if not url.startswith("http") or "," in url:
        raise PeerError(f"{name} asks one LLM server: give one URL, not {url or 'none'!r}.")
    command = [str(PYTHON), "-m", f"undertow.bench.peers.{RUNNERS[name]}"]
    command += ["--url", url, "--encoder", encoder_of(settings), "--folder", str(folder.absolute())]
    command += ["--model", settings.llm_model or "", "--threads", str(threads)]
    return [*command, "--timeout-s", str(settings.llm_timeout_s)]


def encoder_of(settings: Settings) -> str:
    """The settings' encoder as a runner is told it: hash:DIM, or the model's folder."""
    if settings.encoder.startswith("hash:"):
        return settings.encoder
    from undertow.engine.encoders.model_files import model_folder

    return str(model_folder(settings.encoder))


def added(turn: Turn) -> dict[str, Any]:
    """A turn as the fields of a runner's `add` request."""
    messages = [{"role": m.role, "speaker": m.speaker, "content": m.content} for m in turn.messages]
    return {"tenant": turn.tenant, "messages": messages, "date": turn.timestamp}


class PeerProcess(AbstractContextManager["PeerProcess"]):
    """A runner at work. Use as a context manager; `ask` may be called from one thread."""

    def __init__(self, name: str, command: Sequence[str], folder: Path, *, api_key: str = "none") -> None:
        """PeerError: it does not start. Its log is written to `folder`. `api_key`: of the LLM server."""
        self._name = name
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / f"{name}.log"
        self._waiting: dict[int, Future[Reply]] = {}
        self._count = 0
        self._lock = threading.Lock()
        self._ended = False
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                env=os.environ
                | {"PYTHONPATH": str(ROOT / "src"), "TOKENIZERS_PARALLELISM": "false", API_KEY: api_key},
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        ready = self._from.readline()
        if not ready:
            raise self._dead()
        self.version: str = json.loads(ready)["ready"]
        self._reader = threading.Thread(target=self._hear, name=f"{name}-replies", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, op: str, **fields: Any) -> Future[Reply]:
        """The future raises PeerError where the peer raised anything, or ended."""
        future: Future[Reply] = Future()
        with self._lock:
            if self._ended:
                raise self._dead()
            self._count += 1
            number = self._count
            self._waiting[number] = future
        try:
            self._to.write(json.dumps({"id": number, "op": op, **fields}) + "\n")
            self._to.flush()
        except BrokenPipeError:
            raise self._dead() from None
        return future

    def _hear(self) -> None:
        for line in self._from:
            told = json.loads(line)
            with self._lock:
                future = self._waiting.pop(told["id"])
            spent = Spent.of(told["spent"])
            if "error" in told:
                future.set_exception(PeerError(f"{self._name} failed: {told['error']}", spent))
            else:
                future.set_result(Reply(told["result"], spent))
        with self._lock:
            self._ended = True
            lost, self._waiting = list(self._waiting.values()), {}
        for future in lost:
            future.set_exception(self._dead())

    def _dead(self) -> PeerError:
        code = self._process.wait()
        last = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LOG_LINES:]
        told = "\n".join(last)
        return PeerError(f"{self._name} ended with {code}; the end of {self._log}:\n{told}")

    def close(self) -> None:
        """Let it finish what it was asked, then end it."""
        if not self._ended:
            self._to.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._from.close()

    def __exit__(self, *_: object) -> None:
        self.close()
