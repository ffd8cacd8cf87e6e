"""Keeps a local vLLM server running: starts it, checks its health, restarts it with backoff."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

from undertow.serving.vllm.local_server import LocalServerError, LocalVLLM

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
STEADY_S = 300.0
"""A server that ran so long before it failed is restarted after the first pause."""
MOST_MISSES = 3


@dataclass(frozen=True, slots=True)
class ServerState:
    """`url`: empty while the server does not answer. `starts`, `failed_starts`: attempts so far.
    `error`: the latest one, kept after the server is back."""

    url: str = ""
    starts: int = 0
    failed_starts: int = 0
    pid: int | None = None
    error: str | None = None

    @property
    def ready(self) -> bool:
        return bool(self.url)


class ServerSupervisor:
    """Owns a `LocalVLLM` in a thread of its own; the public methods may be called from any thread."""

    def __init__(self, server: LocalVLLM, *, check_s: float = 5.0) -> None:
        """Starts the server in the background. `check_s`: time between two checks of its health."""
        self._server = server
        self._check_s = check_s
        self._state = ServerState()
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="vllm-supervisor", daemon=True)
        self._thread.start()

    def ready(self, timeout_s: float) -> str:
        """The server's URL, once it answers.

        Raises LocalServerError with the last log lines if a start fails meanwhile, or after `timeout_s`.
        It goes on trying in any case.
        """
        with self._changed:
            failed_before = self._state.failed_starts
            self._changed.wait_for(
                lambda: (
                    self._state.ready or self._state.failed_starts > failed_before or self._stopping.is_set()
                ),
                timeout_s,
            )
            if self._state.ready:
                return self._state.url
            raise LocalServerError(
                self._state.error or f"the vLLM server did not answer in {timeout_s:.0f} s"
            )

    def state(self) -> ServerState:
        return replace(self._state, pid=self._server.pid)

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
            self._update(starts=self._state.starts + 1)
            try:
                self._server.start()
                self._update(url=self._server.url)
                self._watch()
            except (LocalServerError, OSError) as error:
                self._note(str(error))
            self._update(url="")
            self._server.stop()
            if time.monotonic() - began_s > STEADY_S:
                pause_s = FIRST_PAUSE_S
            self._stopping.wait(pause_s)
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    def _watch(self) -> None:
        """Returns when the supervisor stops. LocalServerError: the server is dead or does not answer."""
        misses = 0
        while not self._stopping.wait(self._check_s):
            self._server.check_alive()
            misses = 0 if self._server.healthy() else misses + 1
            if misses >= MOST_MISSES:
                raise LocalServerError(
                    f"{self._server.root_url}/health was not answered {misses} times in a row"
                )

    def _note(self, error: str) -> None:
        if not self._stopping.is_set():
            log.warning("%s", error)
            failed_starts = self._state.failed_starts + (not self._state.ready)
            self._update(error=error, failed_starts=failed_starts)

    def _update(self, **values: Any) -> None:
        with self._changed:
            self._state = replace(self._state, **values)
            self._changed.notify_all()
