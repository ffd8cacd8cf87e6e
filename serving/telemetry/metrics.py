"""Prometheus metrics: of the HTTP service, counted here, and of the engines, from their shards' status.

Shards count in plain data (engine/cluster/shard/shard_metrics.py), which is part of their status: the same
for a shard in this process, in another, and on Ray. A shard that does not respond is reported as down. No
metric has a tenant label.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from undertow.engine.cluster.shard.shard_metrics import BOUNDS_S

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# statuses that refuse a request, though its content may be valid
REFUSALS = frozenset({401, 403, 408, 413, 429, 503})

Status = Mapping[str, Mapping[str, Any]]

# the creation time of each counter and histogram, which would be a second series
prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]


class HTTPMetrics:
    """Metrics of HTTP requests, in a registry of this service."""

    def __init__(self) -> None:
        self.registry = prometheus.CollectorRegistry()
        self._requests = prometheus.Counter(
            "undertow_http_requests",
            "HTTP requests answered, by route, method and class of status.",
            ["route", "method", "status"],
            registry=self.registry,
        )
        self._seconds = prometheus.Histogram(
            "undertow_http_request_seconds",
            "From a request's headers to the end of its answer.",
            ["route", "method"],
            buckets=BOUNDS_S,
            registry=self.registry,
        )
        self._refused = prometheus.Counter(
            "undertow_http_refused",
            "Requests refused for their sender, their size or pace, or for the service's state.",
            ["reason"],
            registry=self.registry,
        )
        # by route, method and class of status
        self._answered: dict[tuple[str, str, int], tuple[prometheus.Counter, prometheus.Histogram]] = {}
        self.under_way = 0
        prometheus.Gauge(
            "undertow_http_requests_in_flight", "HTTP requests under way.", registry=self.registry
        ).set_function(lambda: self.under_way)
        self.event_streams = prometheus.Gauge(
            "undertow_event_streams", "Streams of events that are open.", registry=self.registry
        )
        words = "Events that webhooks were told (sent), and attempts at some (failed)."
        self.webhook_events = prometheus.Counter(
            "undertow_webhook_events", words, ["outcome"], registry=self.registry
        )
        words = "How long the webhook that has failed longest has failed; 0: none does, or it is disabled."
        self.webhook_lag = prometheus.Gauge("undertow_webhook_lag_seconds", words, registry=self.registry)
        prometheus.ProcessCollector(registry=self.registry)

    def note(self, method: str, route: str, status: int, seconds: float, problem: str | None) -> None:
        """Count one completed request; `problem`: the slug of its error."""
        kind = route, method, status // 100
        if (counted := self._answered.get(kind)) is None:
            requests = self._requests.labels(route, method, f"{status // 100}xx")
            counted = self._answered[kind] = requests, self._seconds.labels(route, method)
        counted[0].inc()
        counted[1].observe(seconds)
        if status in REFUSALS:
            self._refused.labels(problem or str(status)).inc()

    def note_unread(self, count: int) -> None:
        """Count requests that were refused unread, for overload; their routes are not known."""
        self._requests.labels("unread", "other", "4xx").inc(count)
        self._refused.labels("overload").inc(count)

    def exposition(self, status: Status) -> bytes:
        """All metrics in Prometheus' text format; `status`: the current Router.status."""
        scrape = prometheus.CollectorRegistry()
        scrape.register(self.registry)
        scrape.register(ShardCollector(status))
        return prometheus.generate_latest(scrape)


class ShardCollector:
    """A prometheus_client Collector over the shards' status."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        families = {
            name: kind(name, words, labels=["shard", *labels])
            for name, (kind, words, *labels) in SHARD_METRICS.items()
        }
        for shard, state in self._status.items():
            for name, labels, value in _samples(state):
                family = families[name]
                if isinstance(family, HistogramMetricFamily):
                    family.add_metric([shard, *labels], _buckets(value["counts"]), value["total_s"])
                else:
                    family.add_metric([shard, *labels], float(value))
        return families.values()


COUNTER, GAUGE, HISTOGRAM = CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

# gauges by their key in the status
GAUGES: dict[str, tuple[str, str]] = {
    "waiting_turns": ("undertow_waiting_turns", "Turns that a shard has accepted and not stored yet."),
    "undecided_turns": ("undertow_undecided_turns", "Consolidation lag: turns stored and not decided."),
    "oldest_undecided_s": (
        "undertow_oldest_undecided_seconds",
        "Consolidation lag: how long the engine, since it was opened, has had the oldest of it.",
    ),
    "running_jobs": ("undertow_running_jobs", "Consolidations that wait for the LLM."),
    "blocked_tenants": ("undertow_blocked_tenants", "Tenants whose consolidation is blocked."),
    "parked": ("undertow_parked_turns", "Turns set aside because the engine failed at them."),
    "llm_in_flight": ("undertow_llm_requests_in_flight", "Requests at the LLM servers."),
    "arena_bytes": ("undertow_arena_bytes", "Memory of the arena of vectors."),
    "journal_rows": ("undertow_journal_rows", "Rows in the journal."),
    "reopened": ("undertow_engine_reopened", "How often the shard has reopened its engine."),
    "uptime_s": ("undertow_shard_uptime_seconds", "Time since the shard started."),
}
# each with its kind, its help text, and its labels besides the shard
SHARD_METRICS: dict[str, tuple[Any, ...]] = {
    "undertow_shard_up": (GAUGE, "Whether the shard responds and its engine is open (1) or not (0)."),
    **{name: (GAUGE, words) for name, words in GAUGES.values()},
    "undertow_llm_reachable": (
        GAUGE,
        "0 while the LLM server is silent: it failed, and has not answered since.",
    ),
    "undertow_turns": (COUNTER, "Turns that steps took in: stored, or known already.", "outcome"),
    "undertow_decisions": (COUNTER, "Records of tenants' logs decided, by kind.", "decision"),
    "undertow_phase_seconds": (
        COUNTER,
        "Spent in phases of steps and searches; decide includes gate, admit includes encode.",
        "phase",
    ),
    "undertow_journal_committed_rows": (COUNTER, "Rows committed to the journal."),
    "undertow_journal_commit_seconds": (HISTOGRAM, "One commit to the journal."),
    "undertow_step_seconds": (HISTOGRAM, "One step of the engine: admit, decide, commit, dispatch."),
    "undertow_shard_call_failures": (COUNTER, "Calls of shards that ended in an error.", "call"),
    "undertow_shard_call_seconds": (HISTOGRAM, "Calls of shards, including time in the queue.", "call"),
    "undertow_llm_requests": (COUNTER, "HTTP requests to LLM servers.", "operation", "outcome"),
    "undertow_llm_tokens": (COUNTER, "Tokens that LLM servers report.", "operation", "kind"),
    "undertow_llm_request_seconds": (HISTOGRAM, "One request to an LLM server.", "operation"),
}
# cached tokens are also counted as prompt tokens
TOKENS = {
    "prompt": "prompt_tokens",
    "cached_prompt": "cached_prompt_tokens",
    "completion": "completion_tokens",
}

Sample = tuple[str, tuple[str, ...], Any]
"""A metric's name, its labels besides the shard, and its value; of a histogram {"counts", "total_s"}."""


def _samples(state: Mapping[str, Any]) -> Iterator[Sample]:
    yield "undertow_shard_up", (), state.get("state") == "serving"
    for key, (name, _) in GAUGES.items():
        if (value := state.get(key)) is not None:
            yield name, (), len(value) if isinstance(value, list) else value
    if "llm_silent_s" in state:
        yield "undertow_llm_reachable", (), state["llm_silent_s"] is None
    if "tally" in state:
        yield from _step_samples(state["tally"])
        yield from _call_samples(state["tally"])


def _step_samples(tally: Mapping[str, Any]) -> Iterator[Sample]:
    for outcome in ("stored", "duplicate"):
        yield "undertow_turns", (outcome,), tally["turns"].get(outcome, 0)
    for decision, count in tally["decisions"].items():
        yield "undertow_decisions", (decision,), count
    for phase, spent in tally["phases"].items():
        yield "undertow_phase_seconds", (phase,), spent["total_s"]
        if phase == "step":
            yield "undertow_step_seconds", (), spent
        if phase == "commit":
            yield "undertow_journal_commit_seconds", (), spent
            yield "undertow_journal_committed_rows", (), spent["work"]


def _call_samples(tally: Mapping[str, Any]) -> Iterator[Sample]:
    for call, spent in tally["calls"].items():
        yield "undertow_shard_call_failures", (call,), spent["failures"]
        yield "undertow_shard_call_seconds", (call,), spent
    for operation, spent in tally["llm"].items():
        yield "undertow_llm_request_seconds", (operation,), spent
        for outcome, count in spent["outcomes"].items():
            yield "undertow_llm_requests", (operation, outcome), count
        for kind, name in TOKENS.items():
            yield "undertow_llm_tokens", (operation, kind), spent["tokens"].get(name, 0)


def _buckets(counts: Iterable[int]) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound."""
    return list(zip([*map(str, BOUNDS_S), "+Inf"], map(float, accumulate(counts)), strict=True))
