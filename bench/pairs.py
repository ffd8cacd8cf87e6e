"""Compare two commands by alternating pairs of runs: `python -m undertow.bench.pairs OLD NEW --figure NAME`.

Each command prints one JSON object as its last line, as the benchmarks do; `--figure` names a number in it,
with dots between levels (`gate.gb_per_s`). Both run from their own checkout, for example

    python -m undertow.bench.pairs --figure searchable.turns_per_s \
        'cd ../old && .venv/bin/python -m undertow.bench.ingest searchable' \
        '.venv/bin/python -m undertow.bench.system.ingest searchable'

The machine's speed drifts, so that only ratios of runs one right after the other mean something. The interval
of the median ratio is that of the sign test: order statistics with a coverage of 95% or more.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from statistics import median
from typing import Any

from undertow.bench.machine import describe

COVERAGE = 0.95


def interval(ratios: list[float]) -> tuple[float, float]:
    """An interval that covers the median of the ratios' distribution with COVERAGE or more.

    With five values or fewer no such interval exists; it is then everything.
    """
    n, values = len(ratios), sorted(ratios)
    for rank in range(n // 2, 0, -1):  # from the rank-th smallest to the rank-th largest
        outside = 2 * sum(math.comb(n, k) for k in range(rank)) / 2**n
        if outside <= 1 - COVERAGE:
            return values[rank - 1], values[-rank]
    return -math.inf, math.inf


def figure_of(document: Any, path: str) -> float:
    """The number at a dotted path of a JSON document. ValueError."""
    found = document
    for name in path.split("."):
        try:
            found = found[int(name)] if isinstance(found, list) else found[name]
        except (KeyError, IndexError, TypeError, ValueError):
            raise ValueError(f"the output has no figure {path!r}: {json.dumps(document)[:500]}") from None
    if not isinstance(found, int | float):
        raise ValueError(f"{path!r} is no number: {found!r:.100}")
    return float(found)


def measure(command: str, path: str) -> float:
    """Run a command in a shell and read the figure from its last line."""
    done = subprocess.run(command, shell=True, stdout=subprocess.PIPE, text=True, check=True)
    return figure_of(json.loads(done.stdout.strip().splitlines()[-1]), path)


def compare(old: str, new: str, path: str, pairs: int, name: str) -> dict[str, Any]:
    """Run both commands `pairs` times. `ratios`: new / old, in the order of the runs."""
    olds, news = [], []
    for n in range(pairs):
        for command, figures in ((old, olds), (new, news))[:: -1 if n % 2 else 1]:
            figures.append(measure(command, path))
        print(f"{name} pair {n + 1}: {olds[-1]:.4g} -> {news[-1]:.4g}", file=sys.stderr)
    ratios = [b / a for a, b in zip(olds, news, strict=True)]
    low, high = interval(ratios)
    found = {"name": name, "figure": path, "old": median(olds), "new": median(news), "ratios": ratios}
    return {**found, "median": median(ratios), "low": low, "high": high, "machine": describe()}


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("old", help="a shell command")
    options.add_argument("new", help="a shell command")
    options.add_argument("--figure", required=True, help="dotted path of the number to compare")
    options.add_argument("--pairs", type=int, default=8)
    options.add_argument("--name", default="")
    asked = options.parse_args()
    print(json.dumps(compare(asked.old, asked.new, asked.figure, asked.pairs, asked.name or asked.figure)))


if __name__ == "__main__":
    main()
