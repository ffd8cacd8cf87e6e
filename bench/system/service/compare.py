"""The same loads on two services in turn: this checkout's, and another's, mem0ai's, or one with workers."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from undertow.bench.pairs import figure_of
from undertow.bench.system.service.parts import Figures, Filled

# dotted names in the figures of `cost_part` and `llm_part`; a ratio above 1 says that ours is higher
COMPARED = (
    "closed_loop.answered_per_s",
    "closed_loop.latency_ms.p50",
    "closed_loop.service_cpu_ms_per_request",
    "open_loop.answered_per_s",
    "open_loop.service_cpu_ms_per_request",
    *(f"open_loop.{kind}_ms.{point}" for kind in ("search", "add") for point in ("p50", "p95", "p99")),
    *(f"until_decided.{name}" for name in ("llm_calls", "prompt_tokens", "completion_tokens", "cpu_s")),
)


def compare(ours: Filled, theirs: Filled, cost: Callable[[Filled], Figures], rounds: int) -> Figures:
    """Alternates the two sides, each time on a fresh copy of its store, with the same requests."""
    runs: dict[str, list[Figures]] = {"ours": [], "theirs": []}
    for _ in range(rounds):
        for name, filled in (("ours", ours), ("theirs", theirs)):
            runs[name].append(cost(filled))
    return {**runs, "ours_over_theirs": ratios(runs["ours"], runs["theirs"])}


def ratios(ours: list[Figures], theirs: list[Figures]) -> dict[str, float | None]:
    """The median over the rounds of each figure's ratio; None where a side lacks it, or it is 0."""
    found: dict[str, float | None] = {}
    for path in COMPARED:
        try:
            pairs = [(figure_of(a, path), figure_of(b, path)) for a, b in zip(ours, theirs, strict=True)]
            found[path] = round(median(a / b for a, b in pairs), 3)
        except (ValueError, ZeroDivisionError):
            found[path] = None
    return found
