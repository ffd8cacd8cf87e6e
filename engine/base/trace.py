"""Named phases of a step, for a Chrome trace (Perfetto, chrome://tracing), NVTX ranges and observers.

Observers count phases (engine/cluster/shard/shard_metrics.py) or export them as spans of a distributed
trace. nsys and ncu show NVTX ranges and filter by them. Ranges are cheap, so the engine pushes them wherever
there is a CUDA device; the Chrome trace is recorded only on request.

The W3C traceparent of the request that the current code serves travels with calls across threads, to shards,
and into requests to the LLM server. The engine only hands it on; tracing backends interpret it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import orjson

from undertow.engine.base.model import Usage

T = TypeVar("T")

_NOTHING = nullcontext()

# around all phases of a step
STEP = "step"

_TRACEPARENT: ContextVar[str | None] = ContextVar("undertow_traceparent", default=None)


def current_traceparent() -> str | None:
    """The traceparent of the request that is being served; None where it is not traced."""
    return _TRACEPARENT.get()


class use_traceparent:
    """Work inside the block serves this request."""

    __slots__ = ("_token", "_traceparent")

    def __init__(self, traceparent: str | None) -> None:
        self._traceparent = traceparent

    def __enter__(self) -> None:
        self._token = _TRACEPARENT.set(self._traceparent)

    def __exit__(self, *_: object) -> None:
        _TRACEPARENT.reset(self._token)


class NvtxRanges(Protocol):
    """The part of `torch.cuda.nvtx` used here: a stack of named ranges per thread."""

    def range_push(self, msg: str) -> Any: ...

    def range_pop(self) -> Any: ...


@dataclass(slots=True)
class Phase:
    """A finished phase of a step. Times are of `time.perf_counter`; `count` is its number of items."""

    name: str
    count: int
    began_s: float
    ended_s: float


@dataclass(slots=True)
class ShardCall:
    """A call of a shard, from arrival to answer. `error` is the class name of the exception."""

    method: str
    began_s: float
    ended_s: float
    error: str | None


@dataclass(frozen=True, slots=True)
class LLMRequest:
    """One HTTP request to an LLM server; for `outcome` see `OnCall` in engine/llm/replies.py."""

    operation: str
    began_s: float
    ended_s: float
    usage: Usage
    outcome: str


class Observer(Protocol):
    """Receives what an engine does, in the thread that does it. Methods must be quick and must not raise.

    No tenant name and no text is passed on. In `called` and `requested`, `current_traceparent()` is that of
    the request served. One that inherits from this may leave out any method but `ended`.
    """

    def began(self, name: str) -> None:
        """A phase begins. Phases that begin before it ends are nested in it."""
        return

    def ended(self, phase: Phase) -> None:
        """The phase that began last among the open ones ends."""
        ...

    def linked(self, traceparents: Iterable[str]) -> None:
        """The current phase, and the step around it, serve these requests."""
        return

    def called(self, call: ShardCall) -> None:
        return

    def requested(self, request: LLMRequest) -> None:
        return


class Trace:
    """Spans of a run. With a path, events are kept in memory until `write`."""

    def __init__(
        self, path: Path | None = None, ranges: NvtxRanges | None = None, observers: Sequence[Observer] = ()
    ) -> None:
        """`ranges`: receives every span; without it, the engine sets its own device's (`use_ranges`)."""
        self._path = path
        self._ranges = ranges
        self._observers = tuple(observers)
        self._events: list[dict[str, object]] = []
        self._start_s = time.perf_counter()
        # of all requests to LLM servers so far
        self.spent = Usage()

    def use_ranges(self, ranges: NvtxRanges | None) -> None:
        """Send later spans to `ranges` as well, unless the trace already has ranges."""
        self._ranges = self._ranges or ranges

    def span(self, name: str, **count: int) -> AbstractContextManager[None]:
        """A named phase around a block, with its item count: one trace event and one NVTX range."""
        if self._path is None and self._ranges is None and not self._observers:
            return _NOTHING
        return _Span(self, name, count)

    def link(self, traceparents: Iterable[str | None]) -> None:
        """The current phase serves these requests, given by their traceparents."""
        if self._observers and (known := {t for t in traceparents if t is not None}):
            for observer in self._observers:
                observer.linked(known)

    def watch(self, method: str, call: Callable[[], Future[T]]) -> Future[T]:
        """Make a call of a shard, and tell the observers when it is answered."""
        if not self._observers:
            return call()
        began_s, asked_by = time.perf_counter(), current_traceparent()
        future = call()
        future.add_done_callback(lambda done: self._answered(method, began_s, asked_by, done))
        return future

    def _answered(self, method: str, began_s: float, asked_by: str | None, done: Future[Any]) -> None:
        try:
            name = None if (error := done.exception()) is None else type(error).__name__
        except CancelledError:
            name = "CancelledError"
        call = ShardCall(method, began_s, time.perf_counter(), name)
        with use_traceparent(asked_by):
            for observer in self._observers:
                observer.called(call)

    def llm_request(
        self, tenant: str, operation: str, began_s: float, ended_s: float, usage: Usage, outcome: str
    ) -> None:
        """Report one HTTP request to an LLM server; an `OnCall` of engine/llm/replies.py."""
        self.spent += usage
        request = LLMRequest(operation, began_s, ended_s, usage, outcome)
        for observer in self._observers:
            observer.requested(request)
        if self._path is not None:
            self.event(operation, began_s, ended_s, track=f"llm {tenant}", outcome=outcome, **asdict(usage))

    def event(self, name: str, began_s: float, ended_s: float, *, track: str, **args: object) -> None:
        """Record an event. Times are of `time.perf_counter`."""
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
        """Seconds spent in each phase so far. A nested span counts in both."""
        totals: dict[str, float] = {}
        for event in self._events:
            name, microseconds = str(event["name"]), float(str(event["dur"]))
            totals[name] = totals.get(name, 0.0) + microseconds / 1e6
        return totals

    def write(self) -> None:
        if self._path is not None:
            self._path.write_bytes(orjson.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}))


class _Span:
    """An open span of a trace: see `Trace.span`."""

    __slots__ = ("_began_s", "_count", "_name", "_ranges", "_trace")

    def __init__(self, trace: Trace, name: str, count: dict[str, int]) -> None:
        self._trace, self._name, self._count = trace, name, count
        self._ranges = trace._ranges  # an engine may set them while this span is open

    def __enter__(self) -> None:
        if self._ranges is not None:
            self._ranges.range_push(self._name)
        for observer in self._trace._observers:
            observer.began(self._name)
        self._began_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        ended_s = time.perf_counter()
        phase = Phase(self._name, sum(self._count.values()), self._began_s, ended_s)
        for observer in self._trace._observers:
            observer.ended(phase)
        if self._trace._path is not None:
            track = threading.current_thread().name
            self._trace.event(self._name, self._began_s, ended_s, track=track, **self._count)
        if self._ranges is not None:
            self._ranges.range_pop()
