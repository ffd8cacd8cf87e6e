"""The gate and top-k as the spec words them, in plain loops and sorts: nothing of the kernels is used."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass
class Row:
    vector: NDArray[np.float16]
    present: bool = True
    live: bool = True


@dataclass
class Store:
    """Segments as lists of rows."""

    segments: list[list[Row]] = field(default_factory=list)


def cosine(a: NDArray[np.float16], b: NDArray[np.float16]) -> float:
    """Dot product by exact rational arithmetic; the conversion to float must lose nothing."""
    assert a.dtype == b.dtype == np.float16
    return _cosine(a.tobytes(), b.tobytes())


@lru_cache(4096)  # worlds have few vectors, each many times
def _cosine(*pair: bytes) -> float:
    # fp16 numbers are multiples of 2**-24
    vectors = (np.frombuffer(vector, np.float16).astype(np.float64) for vector in pair)
    left, right = ((vector * 2**24).astype(np.int64).tolist() for vector in vectors)
    exact = Fraction(sum(x * y for x, y in zip(left, right, strict=True)), 2**48)
    assert Fraction(float(exact)) == exact
    return float(exact)


def nearest(store: Store, segment: int, query: NDArray[np.float16]) -> tuple[int, float]:
    """The nearest present row, the lower one of equals; (-1, -inf) without one."""
    best = (-1, float("-inf"))
    for row, item in enumerate(store.segments[segment] if segment >= 0 else []):
        if item.present and cosine(query, item.vector) > best[1]:
            best = (row, cosine(query, item.vector))
    return best


def relevant(
    store: Store, segment: int, query: NDArray[np.float16], visible: int, theta: float
) -> list[tuple[float, int]]:
    """All live visible rows with a score of at least theta, best first, the lower row first of equals."""
    found = []
    for row, item in enumerate(store.segments[segment]):
        if row < visible and item.live and (score := cosine(query, item.vector)) >= theta:
            found.append((score, row))
    return sorted(found, key=lambda hit: (-hit[0], hit[1]))


def top_k(
    store: Store, segment: int, query: NDArray[np.float16], k: int, allowed: Any = None
) -> tuple[list[float], list[int]]:
    """Scores and rows of the k nearest present rows, padded with -inf and -1."""
    hits = sorted(
        (-cosine(query, item.vector), row)
        for row, item in enumerate(store.segments[segment])
        if item.present and (allowed is None or allowed[row])
    )[:k]
    short = k - len(hits)
    return [-s for s, _ in hits] + [float("-inf")] * short, [row for _, row in hits] + [-1] * short
