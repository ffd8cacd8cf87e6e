"""The search for the best rows of one segment in host memory: one compiled call."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from undertow.kernels.arena.arena import PRESENT
from undertow.kernels.arena.compiled_rows import fit_rows, jit, lean
from undertow.kernels.array_types import Bytes, Float16s, Float32s, Float64s, Halves, Int64s
from undertow.kernels.error_bounds import error_slack
from undertow.kernels.gate.scan import TILE, dot64, offer, sort_heap, stream32, widen_row
from undertow.kernels.topk.combined_score import CANDIDATES, lent, raised

Rows = NDArray[np.bool_]

_EVERY_ROW = np.empty(0, np.bool_)
_NO_SHARES = np.empty(0)
_NO_NEIGHBOURS = np.empty((0, 2), np.int64)
_raised = lean(raised)
_lent = lean(lent)


def best_of_rows(
    vectors: Float16s,
    flags: Bytes,
    query: Float16s,
    k: int,
    allowed: Rows | None = None,
    shares: Float64s | None = None,
    beside: Int64s | None = None,
) -> tuple[Float64s, Int64s]:
    """`hybrid_top_k` over a host arena's rows, float16 [n, dim], and their flags, uint8 [n].

    query: float16 [1, dim]. Returns scores float64 and rows int64, [at most k] each.
    """
    count, dim = vectors.shape
    asked = fit_rows(query, dim)
    k = min(k, count)
    scores, rows = np.empty(k), np.empty(k, np.int64)
    size = _best(
        vectors.view(np.uint16),
        flags,
        asked.view(np.uint16),
        _EVERY_ROW if allowed is None else allowed,
        _NO_SHARES if shares is None else shares,
        _NO_NEIGHBOURS if beside is None else beside,
        error_slack(dim),
        scores,
        rows,
    )
    return scores[:size], rows[:size]


@jit
def _best(
    vectors: Halves,
    flags: Bytes,
    asked: Halves,
    allowed: Rows,
    shares: Float64s,
    beside: Int64s,
    slack: float,
    scores: Float64s,
    rows: Int64s,
) -> int:
    """Write the best rows to `scores` and `rows` [k]; their number.

    An empty array: all rows, no shares, no neighbours.
    """
    count, k = vectors.shape[0], scores.shape[0]
    query = np.empty(vectors.shape[1], np.float32)
    widen_row(asked, 0, query)
    cosines = np.full(count, np.nan)  # not computed yet
    if not shares.shape[0]:
        size = _nearest(vectors, flags, query, allowed, slack, cosines, scores, rows)
        sort_heap(scores, rows, 0, size)
        return size
    depth = min(max(k, CANDIDATES), count)
    near, near_rows = np.empty(depth), np.empty(depth, np.int64)
    found = _nearest(vectors, flags, query, allowed, slack, cosines, near, near_rows)
    said, said_rows = np.empty(depth), np.empty(depth, np.int64)
    told = _most_said(allowed, shares, said, said_rows)
    known = np.zeros(count, np.bool_)
    size = 0
    for i in range(found):
        known[near_rows[i]] = True
        cosine = _beside(vectors, query, beside, near_rows[i], cosines)
        score = _raised(cosine, shares[near_rows[i]])
        size = offer(scores, rows, 0, size, k, score, near_rows[i])
    for i in range(told):
        if not known[said_rows[i]]:
            score = _raised(_beside(vectors, query, beside, said_rows[i], cosines), said[i])
            size = offer(scores, rows, 0, size, k, score, said_rows[i])
    sort_heap(scores, rows, 0, size)
    return size


@lean
def _cosine(vectors: Halves, row: int, query: Float32s, cosines: Float64s) -> float:
    if np.isnan(cosines[row]):
        cosines[row] = dot64(vectors, row, query)
    return cosines[row]  # type: ignore[no-any-return]


@lean
def _beside(vectors: Halves, query: Float32s, beside: Int64s, row: int, cosines: Float64s) -> float:
    """The cosine of a row with what its neighbours lend."""
    nearest = cosine = _cosine(vectors, row, query, cosines)
    if beside.shape[0]:
        for i in range(2):
            if beside[row, i] >= 0:
                nearest = max(nearest, _cosine(vectors, beside[row, i], query, cosines))
    return _lent(cosine, nearest)


@jit
def _nearest(
    vectors: Halves,
    flags: Bytes,
    query: Float32s,
    allowed: Rows,
    slack: float,
    cosines: Float64s,
    scores: Float64s,
    rows: Int64s,
) -> int:
    """Fill a heap with the nearest rows by exact score; its size. The fp32 score rules the others out."""
    picked, fast = np.empty(TILE, np.int64), np.empty(TILE, np.float32)
    row, size = 0, 0
    while row < vectors.shape[0]:
        count = 0
        while row < vectors.shape[0] and count < TILE:
            if flags[row] & PRESENT and (not allowed.shape[0] or allowed[row]):
                picked[count] = row
                count += 1
            row += 1
        stream32(vectors, picked, count, query, fast)
        for i in range(count):
            if size < scores.shape[0] or np.float64(fast[i]) >= scores[0] - slack:
                exact = _cosine(vectors, picked[i], query, cosines)
                size = offer(scores, rows, 0, size, scores.shape[0], exact, picked[i])
    return size


@lean
def _most_said(allowed: Rows, shares: Float64s, scores: Float64s, rows: Int64s) -> int:
    """Fill a heap with the rows of the highest shares above 0; its size."""
    size = 0
    for row in range(shares.shape[0]):
        if shares[row] > 0.0 and (not allowed.shape[0] or allowed[row]):
            size = offer(scores, rows, 0, size, scores.shape[0], shares[row], row)
    return size
