"""The phases of a step, named once: a Chrome trace of them (Perfetto, chrome://tracing), and NVTX ranges.

NVTX ranges are what nsys and ncu show and filter by. They are pushed wherever there is a CUDA device, as
an unobserved one costs nothing worth counting; the Chrome trace is recorded only when it was asked for.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import orjson

from undertow.kernels.device import HAS_CUDA

_NOTHING = nullcontext()


class Ranges(Protocol):
    """What is used of `torch.cuda.nvtx`: a stack of named ranges, one a thread."""

    def range_push(self, msg: str) -> Any: ...

    def range_pop(self) -> Any: ...


def nvtx() -> Ranges | None:
    """`torch.cuda.nvtx` where there is a CUDA device, else None."""
    if not HAS_CUDA:
        return None
    from torch.cuda import nvtx as ranges

    return ranges


class Trace:
    """Spans of a run. Complete events are kept in memory until `write`; without a path none are kept."""

    def __init__(self, path: Path | None = None, ranges: Ranges | None = None) -> None:
        """`ranges`: told of every span; NVTX where there is a CUDA device, unless given."""
        self._path = path
        self._ranges = ranges or nvtx()
        self._events: list[dict[str, object]] = []
        self._start_s = time.perf_counter()

    def span(self, name: str, **args: object) -> AbstractContextManager[None]:
        """Names what is done inside: one event of the trace, and one NVTX range."""
        if self._path is None and self._ranges is None:
            return _NOTHING
        return self._span(name, args)

    @contextmanager
    def _span(self, name: str, args: dict[str, object]) -> Iterator[None]:
        if self._ranges is not None:
            self._ranges.range_push(name)
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self.event(name, began_s, time.perf_counter(), track=threading.current_thread().name, **args)
            if self._ranges is not None:
                self._ranges.range_pop()

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

    def seconds(self) -> dict[str, float]:
        """Seconds spent under each name so far; spans inside a span count in both."""
        totals: dict[str, float] = {}
        for event in self._events:
            name, microseconds = str(event["name"]), float(str(event["dur"]))
            totals[name] = totals.get(name, 0.0) + microseconds / 1e6
        return totals

    def write(self) -> None:
        if self._path is not None:
            self._path.write_bytes(orjson.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}))
