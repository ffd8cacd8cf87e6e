"""Top-k of one segment by cosine and keywords together."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from undertow.kernels.arena.arena import Arena
from undertow.kernels.arena.vector_checks import widened
from undertow.kernels.array_types import Float16s, Float64s, Int64s
from undertow.kernels.gate.gate import Gate
from undertow.kernels.topk.combined_score import CANDIDATES, lent, raised
from undertow.kernels.topk.topk import check_allowed, top_k

Rows = NDArray[np.bool_]
Found = list[tuple[float, int]]


def hybrid_top_k(
    arena: Arena,
    segment: int,
    query: Float16s,
    k: int,
    allowed: Rows | None = None,
    shares: Float64s | None = None,
    scan: Gate | None = None,
    beside: Int64s | None = None,
) -> Found:
    """The k best (score, row) of a segment, best first, ties by row, among PRESENT (and `allowed`) rows.

    query: float16 [1, dim]; allowed: bool [rows]. Without `shares` the score is the exact cosine. `shares`:
    keyword scores, float64 [rows], in [0, 1). With them the nearest rows and those with the highest shares,
    `CANDIDATES` each or k if that is more, are scored by `raised`. `beside`: the present rows next to each
    row, int64 [rows, 2], -1 for none; with shares, the nearer one lends to the row's cosine (`lent`). In host
    memory this is one compiled call; for a device see `top_k`, which uses `scan`. The results are the same.
    ValueError as in `top_k`.
    """
    vectors = arena.vectors(segment)
    check_allowed(len(vectors), segment, allowed)
    if k <= 0 or len(vectors) == 0:
        return []
    if not isinstance(vectors, np.ndarray):
        return _best_on_device(arena, segment, query, k, allowed, shares, scan, beside)
    # Imported here: it needs numba, which a machine with a GPU may lack.
    from undertow.kernels.topk.host_rows import best_of_rows

    scores, rows = best_of_rows(vectors, arena.flags(segment), query, k, allowed, shares, beside)
    return list(zip(scores.tolist(), rows.tolist(), strict=True))


def _best_on_device(
    arena: Arena,
    segment: int,
    query: Float16s,
    k: int,
    allowed: Rows | None,
    shares: Float64s | None,
    scan: Gate | None,
    beside: Int64s | None,
) -> Found:
    if shares is None:
        return _nearest(arena, segment, query, k, allowed, scan)
    depth = max(k, CANDIDATES)
    near = _nearest(arena, segment, query, depth, allowed, scan)
    said = np.setdiff1d(most_said(shares, depth, allowed), [row for _, row in near])
    near += zip(_cosines(arena, segment, query, said), said.tolist(), strict=True)
    if beside is not None and near:
        near = _with_neighbours(arena, segment, query, near, beside)
    scored = [(raised(cosine, float(shares[row])), row) for cosine, row in near]
    return sorted(scored, key=lambda found: (-found[0], found[1]))[:k]


def _with_neighbours(arena: Arena, segment: int, query: Float16s, found: Found, beside: Int64s) -> Found:
    """The found rows, each cosine with what the row's neighbours lend."""
    around = beside[[row for _, row in found]]
    there = np.unique(around[around >= 0])
    cosine_of = dict(zip(there.tolist(), _cosines(arena, segment, query, there), strict=True)) | {-1: -np.inf}
    return [
        (lent(cosine, max(cosine_of[before], cosine_of[after])), row)
        for (cosine, row), (before, after) in zip(found, around.tolist(), strict=True)
    ]


def _cosines(arena: Arena, segment: int, query: Float16s, rows: Int64s) -> list[float]:
    """The exact cosines of some rows of a device arena."""
    if not len(rows):
        return []
    from undertow.kernels.topk.rows import DeviceRows  # needs torch

    asked = widened(query, arena.dim)
    found = DeviceRows.of(arena.vectors(segment)).scores(asked, rows.reshape(1, -1))[0]
    cosines: list[float] = found.tolist()
    return cosines


def _nearest(
    arena: Arena, segment: int, query: Float16s, k: int, allowed: Rows | None, scan: Gate | None
) -> Found:
    scores, rows = top_k(arena, segment, query, k, allowed, scan)
    return [(s, r) for s, r in zip(scores[0].tolist(), rows[0].tolist(), strict=True) if r >= 0]


def most_said(shares: Float64s, count: int, allowed: Rows | None) -> Int64s:
    """At most `count` rows with the highest keyword shares; ties go to the lower row."""
    rows = np.flatnonzero(shares if allowed is None else np.where(allowed, shares, 0.0))
    if len(rows) > count:  # sort only possible results
        rows = rows[shares[rows] >= np.partition(shares[rows], -count)[-count]]
    return rows[np.argsort(-shares[rows], kind="stable")[:count]]
