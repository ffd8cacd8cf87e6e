"""Counters and histograms of a shard since its start, as plain data for exporters of metrics."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from undertow.engine.base.trace import STEP, LLMRequest, Observer, Phase, ShardCall

if TYPE_CHECKING:
    from undertow.engine.step.scheduler import StepReport

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(slots=True)
class Histogram:
    """`counts[n]` durations were at most BOUNDS_S[n] and above the bound before it; the last, above all."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds


class ShardMetrics(Observer):
    """An Observer that counts. It outlives the shard's engines. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: Counter[str] = Counter()
        self._decisions: Counter[str] = Counter()
        self._phases: defaultdict[str, Histogram] = defaultdict(Histogram)
        self._work: Counter[str] = Counter()
        self._calls: defaultdict[str, Histogram] = defaultdict(Histogram)
        self._call_failures: Counter[str] = Counter()
        self._requests: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._request_s: defaultdict[str, Histogram] = defaultdict(Histogram)
        self._tokens: defaultdict[str, Counter[str]] = defaultdict(Counter)

    # ---- as an Observer

    def ended(self, phase: Phase) -> None:
        """Count a phase. One without items, such as an idle step's commit, is not counted."""
        if not phase.count and phase.name != STEP:
            return
        with self._lock:
            self._phases[phase.name].add(phase.ended_s - phase.began_s)
            self._work[phase.name] += phase.count

    def called(self, call: ShardCall) -> None:
        with self._lock:
            self._calls[call.method].add(call.ended_s - call.began_s)
            self._call_failures[call.method] += call.error is not None

    def requested(self, request: LLMRequest) -> None:
        with self._lock:
            self._requests[request.operation][request.outcome] += 1
            self._request_s[request.operation].add(request.ended_s - request.began_s)
            self._tokens[request.operation].update(
                {name: count for name, count in asdict(request.usage).items() if name != "calls"}
            )

    def stepped(self, report: StepReport) -> None:
        """Count the turns and decisions of a step."""
        if report.admitted or report.duplicates or report.decisions:
            with self._lock:
                self._turns["stored"] += report.admitted
                self._turns["duplicate"] += report.duplicates
                self._decisions.update({str(decision): n for decision, n in report.decisions.items()})

    # ---- as plain data

    def report(self) -> dict[str, Any]:
        """All counts. A histogram is {"counts": [...], "total_s"}; see Histogram."""
        with self._lock:
            return {
                "turns": dict(self._turns),
                "decisions": dict(self._decisions),
                "phases": {name: {**asdict(s), "work": self._work[name]} for name, s in self._phases.items()},
                "calls": {
                    name: {**asdict(s), "failures": self._call_failures[name]}
                    for name, s in self._calls.items()
                },
                "llm": {
                    operation: {
                        **asdict(self._request_s[operation]),
                        "outcomes": dict(outcomes),
                        "tokens": dict(self._tokens[operation]),
                    }
                    for operation, outcomes in self._requests.items()
                },
            }
