"""Chrome trace of the step's phases and the LLM calls (open it in Perfetto or chrome://tracing)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson


class Trace:
    """Complete events, kept in memory until `write`. Without a path nothing is recorded."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._events: list[dict[str, object]] = []
        self._start_s = time.perf_counter()

    @contextmanager
    def span(self, name: str, **args: object) -> Iterator[None]:
        """Record the time spent inside as one event."""
        if self._path is None:
            yield
            return
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self.event(name, began_s, time.perf_counter(), track=threading.current_thread().name, **args)

    def event(self, name: str, began_s: float, ended_s: float, *, track: str, **args: object) -> None:
        """One event from two readings of `time.perf_counter`."""
        if self._path is not None:
            self._events.append(
                {
                    "name": name,
                    "ph": "X",
                    "ts": (began_s - self._start_s) * 1e6,
                    "dur": (ended_s - began_s) * 1e6,
                    "pid": os.getpid(),
                    "tid": track,
                    "args": args,
                }
            )

    def write(self) -> None:
        if self._path is not None:
            self._path.write_bytes(orjson.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}))
