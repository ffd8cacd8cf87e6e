"""Keeps a local vLLM server running: starts it, checks its health, starts it again with backoff."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from undertow.serving.vllm.local_server import LocalServerError, LocalVLLM

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
STEADY_S = 300.0
"""A server that ran so long before it failed is started again after the first pause."""
MOST_MISSES = 3


@dataclass(frozen=True, slots=True)
class ServerState:
    """`starts` counts attempts; `error` is the latest trouble, kept after the server is back."""

    url: str
    ready: bool
    starts: int
    pid: int | None
    error: str | None


class ServerKeeper:
    """Owns a `LocalVLLM` from a thread of its own; the public methods may be called from any thread."""

    def __init__(self, server: LocalVLLM, *, check_s: float = 5.0) -> None:
        """`check_s`: time between two checks of its health. Starts nothing."""
        self._server = server
        self._check_s = check_s
        self._starts = 0
        self._failed_starts = 0
        self._error: str | None = None
        self._ready = False
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="vllm-keeper", daemon=True)

    def begin(self) -> None:
        """Start the server and watch over it, in the background."""
        self._thread.start()

    def ready(self, timeout_s: float) -> str:
        """The server's URL, once it answers.

        Raises LocalServerError with the last log lines when a start fails meanwhile, or if the time is up.
        The keeper goes on trying in any case.
        """
        with self._changed:
            failed_before = self._failed_starts
            self._changed.wait_for(
                lambda: self._ready or self._failed_starts > failed_before or self._stopping.is_set(),
                timeout_s,
            )
            if self._ready:
                return self._server.url
            raise LocalServerError(self._error or f"the vLLM server did not answer in {timeout_s:.0f} s")

    @property
    def state(self) -> ServerState:
        with self._changed:
            url = self._server.url if self._ready else ""
            return ServerState(url, self._ready, self._starts, self._server.pid, self._error)

    def stop(self) -> None:
        """End the server and the watch over it. It cannot begin again."""
        self._stopping.set()
        while self._thread.is_alive():
            self._server.stop()  # ends a start that is under way, too
            self._thread.join(0.2)
        self._server.stop()

    def _keep(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stopping.is_set():
            began_s = time.monotonic()
            if self._start():
                self._watch()
            if time.monotonic() - began_s > STEADY_S:
                pause_s = FIRST_PAUSE_S
            self._stopping.wait(pause_s)
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    def _start(self) -> bool:
        with self._changed:
            self._starts += 1
        try:
            self._server.start()
        except (LocalServerError, OSError) as error:
            self._note(str(error), failed_start=True)
            return False
        with self._changed:
            self._ready = True
            self._changed.notify_all()
        return True

    def _watch(self) -> None:
        """Returns when the server is dead, does not answer, or is to end."""
        misses = 0
        while not self._stopping.wait(self._check_s):
            try:
                self._server.check_alive()
            except LocalServerError as death:
                self._note(str(death))
                break
            misses = 0 if self._server.healthy() else misses + 1
            if misses >= MOST_MISSES:
                self._note(f"{self._server.root_url}/health was not answered {misses} times in a row")
                break
        with self._changed:
            self._ready = False
        self._server.stop()

    def _note(self, error: str, *, failed_start: bool = False) -> None:
        if self._stopping.is_set():
            return
        log.warning("%s", error)
        with self._changed:
            self._error = error
            self._failed_starts += failed_start
            self._changed.notify_all()
