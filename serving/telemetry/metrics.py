"""Prometheus metrics: of the HTTP face from here, of the engines from what their shards say of themselves.

Shards count in plain data (engine/step/shard_metrics.py), which comes with their status. So a shard in this
process and one on Ray report alike; a shard that does not answer is reported as down, the others as usual.
No metric has a tenant's label.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector

from undertow.engine.step.shard_metrics import BOUNDS_S

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# why a request was refused though nothing was wrong with it
REFUSALS = frozenset({401, 403, 408, 413, 429, 503})

Status = Mapping[str, Mapping[str, Any]]

# of each counter and histogram a second series, with the moment when it was made: nobody asks for it
disable_created_metrics()  # type: ignore[no-untyped-call]


class HTTPMetrics:
    """What is counted of requests, in a registry of this service's own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "undertow_http_requests",
            "HTTP requests answered, by route, method and class of status.",
            ["route", "method", "status"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "undertow_http_request_seconds",
            "From a request's headers to the end of its answer.",
            ["route", "method"],
            buckets=BOUNDS_S,
            registry=self.registry,
        )
        self._refused = Counter(
            "undertow_http_refused",
            "Requests refused for who sent them, for their size or pace, or for the service's state.",
            ["reason"],
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "undertow_http_requests_in_flight", "HTTP requests under way.", registry=self.registry
        )
        ProcessCollector(registry=self.registry)

    def note(self, method: str, route: str, status: int, seconds: float, problem: str | None) -> None:
        """One request that has ended; `problem`: the slug of its error."""
        self._requests.labels(route, method, f"{status // 100}xx").inc()
        self._seconds.labels(route, method).observe(seconds)
        if status in REFUSALS:
            self._refused.labels(problem or str(status)).inc()

    def exposition(self, status: Status) -> bytes:
        """All metrics in Prometheus' text format; `status` is what Router.status says now."""
        return generate_latest(_Scrape(self.registry, status))


class _Scrape(CollectorRegistry):
    """One scrape: the registry's metrics, then the shards'."""

    def __init__(self, registry: CollectorRegistry, status: Status) -> None:
        super().__init__()
        self.register(registry)
        self.register(ShardCollector(status))


class ShardCollector:
    """A prometheus_client Collector over what shards have said."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        up = _gauge("undertow_shard_up", "Whether the shard answers and has its engine open (1) or not (0).")
        for shard, state in self._status.items():
            up.add_metric([shard], float(state.get("state") == "serving"))
        yield up
        yield from self._gauges()
        yield from self._steps()
        yield from self._calls()
        yield from self._llm()

    @property
    def _tallies(self) -> list[tuple[str, Mapping[str, Any]]]:
        return [(shard, state["tally"]) for shard, state in self._status.items() if "tally" in state]

    def _gauges(self) -> Iterator[Metric]:
        for name, key, words in GAUGES:
            gauge = _gauge(name, words)
            for shard, state in self._status.items():
                if (value := _number(state.get(key))) is not None:
                    gauge.add_metric([shard], value)
            yield gauge
        reachable = _gauge(
            "undertow_llm_reachable",
            "0 while the LLM server is silent: it has failed, and not answered since.",
        )
        for shard, state in self._status.items():
            if "llm_silent_s" in state:
                reachable.add_metric([shard], float(state["llm_silent_s"] is None))
        yield reachable

    def _steps(self) -> Iterator[Metric]:
        turns = _counter("undertow_turns", "Turns taken in by steps: stored, or known already.", "outcome")
        decisions = _counter("undertow_decisions", "Records of tenants' logs decided, by kind.", "decision")
        phases = _counter(
            "undertow_phase_seconds",
            "Spent in phases of steps and searches; decide holds gate, admit encode.",
            "phase",
        )
        rows = _counter("undertow_journal_committed_rows", "Rows committed to the journal.")
        commit_s = _histogram("undertow_journal_commit_seconds", "One commit to the journal.")
        step_s = _histogram("undertow_step_seconds", "One step of the engine: admit, decide, commit, ask.")
        for shard, tally in self._tallies:
            for outcome in ("stored", "duplicate"):
                turns.add_metric([shard, outcome], tally["turns"].get(outcome, 0))
            for decision, count in tally["decisions"].items():
                decisions.add_metric([shard, decision], count)
            for phase, spent in tally["phases"].items():
                phases.add_metric([shard, phase], spent["total_s"])
            _add_spread(step_s, [shard], tally["phases"].get("step"))
            if (spent := tally["phases"].get("commit")) is not None:
                _add_spread(commit_s, [shard], spent)
                rows.add_metric([shard], spent["work"])
        yield from (turns, decisions, phases, rows, commit_s, step_s)

    def _calls(self) -> Iterator[Metric]:
        failures = _counter(
            "undertow_shard_call_failures",
            "Calls of shards that ended in an error.",
            "call",
        )
        seconds = _histogram(
            "undertow_shard_call_seconds",
            "Calls of shards, their waiting included.",
            "call",
        )
        for shard, tally in self._tallies:
            for call, spent in tally["calls"].items():
                failures.add_metric([shard, call], spent["failures"])
                _add_spread(seconds, [shard, call], spent)
        yield from (failures, seconds)

    def _llm(self) -> Iterator[Metric]:
        requests = _counter("undertow_llm_requests", "HTTP requests to LLM servers.", "operation", "outcome")
        tokens = _counter("undertow_llm_tokens", "Tokens that LLM servers report.", "operation", "kind")
        seconds = _histogram("undertow_llm_request_seconds", "One request to an LLM server.", "operation")
        for shard, tally in self._tallies:
            for operation, spent in tally["llm"].items():
                for outcome, count in spent["outcomes"].items():
                    requests.add_metric([shard, operation, outcome], count)
                for kind, name in TOKENS.items():
                    tokens.add_metric([shard, operation, kind], spent["tokens"].get(name, 0))
                _add_spread(seconds, [shard, operation], spent)
        yield from (requests, tokens, seconds)


# of the status: metric, key, what it says
GAUGES = (
    ("undertow_waiting_turns", "waiting_turns", "Turns that a shard has taken and not stored yet."),
    (
        "undertow_undecided_turns",
        "undecided_turns",
        "Consolidation lag: turns stored and not decided.",
    ),
    (
        "undertow_oldest_undecided_seconds",
        "oldest_undecided_s",
        "Consolidation lag: how long the engine, since it was opened, has had the oldest of it.",
    ),
    ("undertow_running_jobs", "running_jobs", "Consolidations that wait for the LLM."),
    (
        "undertow_blocked_tenants",
        "blocked_tenants",
        "Tenants whose deciding has stopped.",
    ),
    ("undertow_parked_turns", "parked", "Turns set aside as they made the engine fail."),
    ("undertow_llm_requests_in_flight", "llm_in_flight", "Requests at the LLM servers."),
    ("undertow_arena_bytes", "arena_bytes", "Memory of the arena of vectors."),
    ("undertow_journal_rows", "journal_rows", "Rows in the journal."),
    (
        "undertow_engine_reopened",
        "reopened",
        "How often the shard has opened its engine anew.",
    ),
    ("undertow_shard_uptime_seconds", "uptime_s", "Since the shard began."),
)

# cached ones are among the prompt's
TOKENS = {
    "prompt": "prompt_tokens",
    "cached_prompt": "cached_prompt_tokens",
    "completion": "completion_tokens",
}


def _gauge(name: str, words: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, words, labels=["shard"])


def _counter(name: str, words: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(name, words, labels=["shard", *labels])


def _histogram(name: str, words: str, *labels: str) -> HistogramMetricFamily:
    return HistogramMetricFamily(name, words, labels=["shard", *labels])


def _add_spread(
    family: HistogramMetricFamily, labels: Sequence[str], spent: Mapping[str, Any] | None
) -> None:
    if spent is None:
        return
    bounds = [*(str(bound) for bound in BOUNDS_S), "+Inf"]
    family.add_metric(labels, list(zip(bounds, accumulate(spent["counts"]), strict=True)), spent["total_s"])


def _number(value: Any) -> float | None:
    """A count, or how many there are of what is listed."""
    if isinstance(value, list):
        return float(len(value))
    return None if value is None else float(value)
