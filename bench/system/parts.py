"""Benchmarks of several parts: chosen by name, run in turn, and reported in one document."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from undertow.bench.machine import commit, describe

Figures = dict[str, Any]


def run_parts(bench: str, parts: Mapping[str, Callable[[Path], Figures]], names: Iterable[str]) -> Figures:
    """Runs the named parts, each in a new temporary folder, and prints their figures as they come.

    Returns the document: the machine, the figures by part, and the load averages of the last minutes.
    """
    document: Figures = {"bench": bench, "commit": commit(), "machine": describe()}
    for name in names:
        with TemporaryDirectory(prefix="undertow-bench-") as folder:
            figures = document[name] = parts[name](Path(folder))
        print(f"\n{name}", flush=True)
        for key, value in figures.items():
            print(f"  {key:34} {format(value, '>16,') if isinstance(value, int | float) else value}")
    return document | {"load": load_averages()}


def load_averages() -> list[float]:
    """The machine's load averages of the last 1, 5 and 15 minutes."""
    return [round(x, 2) for x in os.getloadavg()]


def percentiles(values: Sequence[float], digits: int = 4) -> dict[str, float]:
    """p50, p95, p99 and the maximum; empty without values."""
    if not values:
        return {}
    points = np.percentile(values, (50, 95, 99, 100)).tolist()
    return {name: round(p, digits) for name, p in zip(("p50", "p95", "p99", "max"), points, strict=True)}
