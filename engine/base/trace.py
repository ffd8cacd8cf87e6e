"""The phases of a step, named once: a Chrome trace of them (Perfetto, chrome://tracing), NVTX ranges, and
whatever observers make of them: counts (engine/step/shard_metrics.py), spans of a distributed trace.

NVTX ranges are what nsys and ncu show and filter by. They are pushed wherever there is a CUDA device, as
an unobserved one costs nothing worth counting; the Chrome trace is recorded only when it was asked for.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import orjson

from undertow.engine.base.model import Usage
from undertow.engine.base.trace_context import cause, caused_by

T = TypeVar("T")

_NOTHING = nullcontext()

# around all phases of a step
STEP = "step"


class NvtxRanges(Protocol):
    """What is used of `torch.cuda.nvtx`: a stack of named ranges, one a thread."""

    def range_push(self, msg: str) -> Any: ...

    def range_pop(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a step that has ended. Times of `time.perf_counter`; `count`: what it had to do."""

    name: str
    count: int
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class ShardCall:
    """A call of a shard, from its arrival to its answer; `error` is the name of the exception's class."""

    method: str
    began_s: float
    ended_s: float
    error: str | None


@dataclass(frozen=True, slots=True)
class LLMRequest:
    """One HTTP request to an LLM server; for `outcome` see llm_outcomes.OnCall."""

    operation: str
    began_s: float
    ended_s: float
    usage: Usage
    outcome: str


class Observer(Protocol):
    """Who is told what an engine does, by the thread that does it: to be quick, and to raise nothing.

    No tenant and no text is told of. For whom something is done, `cause()` says at calls and LLM requests.
    """

    def began(self, name: str) -> None:
        """A phase of a step; those that begin before it has ended are inside it."""
        ...

    def ended(self, phase: Phase) -> None:
        """The last phase that began and has not ended yet."""
        ...

    def linked(self, causes: Iterable[str]) -> None:
        """The phase under way, and the step around it, work for these requests (traceparents)."""
        ...

    def called(self, call: ShardCall) -> None: ...

    def requested(self, request: LLMRequest) -> None: ...


class Trace:
    """Spans of a run. Complete events are kept in memory until `write`; without a path none are kept."""

    def __init__(
        self, path: Path | None = None, ranges: NvtxRanges | None = None, observers: Sequence[Observer] = ()
    ) -> None:
        """`ranges`: receives every span; without it, the engine sets its own device's (`use_ranges`)."""
        self._path = path
        self._ranges = ranges
        self._observers = tuple(observers)
        self._events: list[dict[str, object]] = []
        self._start_s = time.perf_counter()

    def use_ranges(self, ranges: NvtxRanges | None) -> None:
        """Send later spans to `ranges` as well, unless the trace already has ranges."""
        self._ranges = self._ranges or ranges

    def span(self, name: str, **count: int) -> AbstractContextManager[None]:
        """Names what is done inside, and how much of what: one event of the trace, and one NVTX range."""
        if self._path is None and self._ranges is None and not self._observers:
            return _NOTHING
        return self._span(name, count)

    @contextmanager
    def _span(self, name: str, count: dict[str, int]) -> Iterator[None]:
        ranges = self._ranges  # an engine may set them while this span is open
        if ranges is not None:
            ranges.range_push(name)
        for observer in self._observers:
            observer.began(name)
        began_s = time.perf_counter()
        try:
            yield
        finally:
            ended_s = time.perf_counter()
            phase = Phase(name, sum(count.values()), began_s, ended_s)
            for observer in self._observers:
                observer.ended(phase)
            self.event(name, began_s, ended_s, track=threading.current_thread().name, **count)
            if ranges is not None:
                ranges.range_pop()

    def link(self, causes: Iterable[str | None]) -> None:
        """The phase under way works for these requests; see engine/base/trace_context.py."""
        if self._observers and (known := {cause for cause in causes if cause is not None}):
            for observer in self._observers:
                observer.linked(known)

    def watch(self, method: str, call: Callable[[], Future[T]]) -> Future[T]:
        """Make a call of a shard; observers are told once it is answered."""
        if not self._observers:
            return call()
        began_s, asked_by = time.perf_counter(), cause()
        future = call()
        future.add_done_callback(lambda done: self._answered(method, began_s, asked_by, done))
        return future

    def _answered(self, method: str, began_s: float, asked_by: str | None, done: Future[Any]) -> None:
        error = None if done.cancelled() else done.exception()
        name = "CancelledError" if done.cancelled() else None if error is None else type(error).__name__
        call = ShardCall(method, began_s, time.perf_counter(), name)
        with caused_by(asked_by):
            for observer in self._observers:
                observer.called(call)

    def llm_request(
        self, tenant: str, operation: str, began_s: float, ended_s: float, usage: Usage, outcome: str
    ) -> None:
        """An `OnCall`."""
        request = LLMRequest(operation, began_s, ended_s, usage, outcome)
        for observer in self._observers:
            observer.requested(request)
        if self._path is not None:
            self.event(operation, began_s, ended_s, track=f"llm {tenant}", outcome=outcome, **asdict(usage))

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
