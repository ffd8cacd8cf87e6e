"""What the GPU benchmark reports: goals, figures, and how they become a table, Markdown and JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np


class NotMeasured(Exception):
    """A part, or a figure, cannot be measured here; the text says why and what would help."""


class WrongResults(Exception):
    """The timed code gave wrong answers, so the timing means nothing."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value with its limit and target in the same unit. None: not measured, the note says why."""

    key: str
    what: str
    unit: str
    value: float | None = None
    lower: bool = True  # whether lower is better
    limit: float | None = None
    target: float | None = None
    note: str = ""

    @property
    def fraction(self) -> float | None:
        """Share of the limit that is reached: 1 is as good as can be."""
        if self.value is None or self.limit is None or not self.value or not self.limit:
            return None
        return self.limit / self.value if self.lower else self.value / self.limit

    @property
    def reached(self) -> bool | None:
        """Whether the target is met; None without a value or a target."""
        if self.value is None or self.target is None:
            return None
        return self.value <= self.target if self.lower else self.value >= self.target

    def record(self) -> dict[str, Any]:
        return {**asdict(self), "fraction": self.fraction, "reached": self.reached}


def _at_most(key: str, what: str, unit: str, target: float | None = None) -> Figure:
    return Figure(key, what, unit, target=target)


def _at_least(key: str, what: str, unit: str, target: float) -> Figure:
    return Figure(key, what, unit, lower=False, target=target)


GATE_SHARE = 0.85
"""Of the copy bandwidth that the same run measures: what the gate's kernels are to reach."""

GOALS = {
    "gate": (
        _at_most("gate_kernel", "gate kernels, 10 k x 1 k x 384, one query a tenant", "ms"),
        _at_least("gate_bandwidth", "their bytes read, of copy bandwidth", "%", 100 * GATE_SHARE),
        _at_most("gate_skew", "the same bytes in Zipf-skewed tenants, time over equal ones", "x", 1.15),
        _at_least("gate_over_loop", "a per-tenant faiss-gpu loop over the whole gate call", "x", 100.0),
    ),
    "topk": (_at_most("topk_p95", "top-k of 256 tenants' queries at 10 k tenants, p95", "ms", 5.0),),
    "encoder": (
        _at_least("encoder_device", "encoder on the device, MiniLM class", "Mtok/s", 12.0),
        _at_least("encoder_to_arena", "text to arena, of the rate on the device", "%", 80.0),
    ),
    "ingest": (_at_least("ingest", "exchanges of 72 tokens to durable and searchable", "k/s", 165.0),),
}
"""What to reach on one card, by part of the benchmark. The gate's is a share of the run's copy bandwidth."""

PARTS = tuple(GOALS)
_GOAL = {goal.key: goal for goals in GOALS.values() for goal in goals}


@dataclass(slots=True)
class Part:
    """The results of one part: figures for the table, details for the JSON line."""

    figures: list[Figure] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    def reach(
        self,
        key: str,
        value: float | None,
        limit: float | None = None,
        note: str = "",
        target: float | None = None,
    ) -> None:
        """Adds the figure of one of the GOALS; without a value, the note says why.

        `target`: where it depends on the card, and so is not in GOALS.
        """
        goal = _GOAL[key]
        if target is not None:
            goal = replace(goal, target=target)
        self.figures.append(replace(goal, value=value, limit=limit, note=note))


def unmeasured(part: str, reason: str) -> Part:
    """A part without any measurement."""
    return Part([replace(goal, note=reason) for goal in GOALS[part]])


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Median, p95, p99, least and most of some timings, in milliseconds, and their count."""
    values = np.asarray(seconds, np.float64) * 1e3
    names = ("p50_ms", "p95_ms", "p99_ms", "min_ms", "max_ms")
    quantiles = np.quantile(values, (0.5, 0.95, 0.99, 0.0, 1.0)).tolist()
    return {**{n: round(q, 4) for n, q in zip(names, quantiles, strict=True)}, "count": len(values)}


COLUMNS = ("figure", "measured", "limit", "of limit", "target", "reached")


def rows_of(figures: Iterable[Figure]) -> list[tuple[str, ...]]:
    """The table's cells in the order of COLUMNS, which come first; notes follow their figure's name."""
    rows = [
        (
            f.what + (f" [{f.note}]" if f.note and f.value is not None else ""),
            f.note if f.value is None else f"{_number(f.value)} {f.unit}",
            "" if f.limit is None else f"{_number(f.limit)} {f.unit}",
            "" if f.fraction is None else f"{f.fraction:.0%}",
            "" if f.target is None else f"{'<=' if f.lower else '>='} {_number(f.target)} {f.unit}",
            {None: "", True: "yes", False: "no"}[f.reached],
        )
        for f in figures
    ]
    return [COLUMNS, *rows]


def as_text(figures: Iterable[Figure]) -> str:
    """The table for a terminal."""
    rows = rows_of(figures)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def as_markdown(result: dict[str, Any], figures: Iterable[Figure]) -> str:
    """A page for docs/results: the card and the machine, and the table."""
    card, limits = result["card"], result["limits"]
    facts = [
        ("card", card.get("name", "unknown")),
        ("driver / CUDA", f"{card.get('driver', 'unknown')} / {result['cuda']}"),
        ("copy bandwidth", f"{limits['copy_gb_per_s']:,.0f} GB/s"),
        ("bf16 matrix product", f"{limits['matmul_tflop_per_s']:,.0f} TFLOP/s"),
        ("host", f"{result['machine']['cpu']}, {result['machine']['cores']} cores"),
        ("packages", ", ".join(f"{n} {v}" for n, v in result["versions"].items())),
        ("commit", result["commit"] or "unknown"),
        ("date", result["date"]),
    ]
    title = f"# GPU benchmark: {facts[0][1]}{' (quick run)' if result['quick'] else ''}"
    about = (
        "Made by `undertow bench gpu`; how to read it: `docs/gpu.md`. "
        "Each part was measured in a process of its own; medians, p95 where the name says so."
    )
    head, *rows = rows_of(figures)
    tables = (_markdown([("", ""), *facts]), _markdown([head, *rows]))
    return "\n\n".join([title, about, *tables]) + "\n"


def _markdown(rows: Sequence[tuple[str, ...]]) -> str:
    rule = ("---",) * len(rows[0])
    return "\n".join("| " + " | ".join(row) + " |" for row in (rows[0], rule, *rows[1:]))


def _number(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2
    return f"{value:,.{digits}f}"
