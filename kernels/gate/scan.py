"""The compiled parts of a scan: scores of a query with rows, and a heap of the best rows.

For the error of fp32 scores see `kernels/error_bounds.py`.
"""

from __future__ import annotations

import numpy as np

from undertow.kernels.arena.compiled_rows import lean, prefetch_rows, sums, to_float
from undertow.kernels.array_types import Float32s, Float64s, Halves, Int64s

# rows that are put to all queries of a segment before the next ones: a multiple of 4, and few
# enough that the rows stay in the core's cache
TILE = 64
# how many rows ahead of their use rows are fetched: the processor's own prefetching stops at each page
AHEAD = 8


@lean
def widen_row(rows: Halves, r: int, query: Float32s) -> None:
    """query = row r."""
    for c in range(query.shape[0]):
        query[c] = to_float(rows[r, c])


@sums
def stream32(rows: Halves, picked: Int64s, count: int, query: Float32s, scores: Float32s) -> None:
    """scores[i] = the fp32 score of the query with row picked[i], for i below `count`; rows from memory.

    One row after the other: the processor reads ahead in one stream of rows, and loses track of four.
    """
    for i in range(count):
        r = picked[i]
        prefetch_rows(rows, r + AHEAD, min(r + AHEAD + 1, rows.shape[0]))
        total = np.float32(0.0)
        for c in range(rows.shape[1]):
            total += to_float(rows[r, c]) * query[c]
        scores[i] = total


@sums
def cached32(rows: Halves, picked: Int64s, count: int, query: Float32s, scores: Float32s) -> None:
    """As `stream32`, for rows that the cache holds: four abreast keep more sums in flight."""
    last = count - 1
    for i in range(0, count, 4):
        r0, r1 = picked[i], picked[min(i + 1, last)]
        r2, r3 = picked[min(i + 2, last)], picked[min(i + 3, last)]
        s0, s1, s2, s3 = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
        for c in range(rows.shape[1]):
            value = query[c]
            s0 += to_float(rows[r0, c]) * value
            s1 += to_float(rows[r1, c]) * value
            s2 += to_float(rows[r2, c]) * value
            s3 += to_float(rows[r3, c]) * value
        scores[i], scores[i + 1], scores[i + 2], scores[i + 3] = s0, s1, s2, s3


@sums
def dot64(rows: Halves, r: int, query: Float32s) -> np.float64:
    total = np.float64(0.0)
    for c in range(rows.shape[1]):
        total += np.float64(to_float(rows[r, c])) * np.float64(query[c])
    return total


# The k best rows are a heap in [base, base + size) with the worst at its root. Rows are ordered by
# (score descending, row ascending); that order is total, so the result does not depend on the order
# in which rows are offered.


@lean
def _worse(scores: Float64s, rows: Int64s, a: int, b: int) -> bool:
    return bool(scores[a] < scores[b] or (scores[a] == scores[b] and rows[a] > rows[b]))


@lean
def _swap(scores: Float64s, rows: Int64s, a: int, b: int) -> None:
    scores[a], scores[b] = scores[b], scores[a]
    rows[a], rows[b] = rows[b], rows[a]


@lean
def _sift_down(scores: Float64s, rows: Int64s, base: int, size: int) -> None:
    node = 0
    while 2 * node + 1 < size:
        child = 2 * node + 1
        if child + 1 < size and _worse(scores, rows, base + child + 1, base + child):
            child += 1
        if not _worse(scores, rows, base + child, base + node):
            return
        _swap(scores, rows, base + child, base + node)
        node = child


@lean
def offer(scores: Float64s, rows: Int64s, base: int, size: int, room: int, score: float, row: int) -> int:
    """Offer a row to a heap with space for `room` rows; the new size."""
    if size < room:
        node = size
        scores[base + node], rows[base + node] = score, row
        while node > 0 and _worse(scores, rows, base + node, base + (node - 1) // 2):
            _swap(scores, rows, base + node, base + (node - 1) // 2)
            node = (node - 1) // 2
        return size + 1
    if room > 0 and (score > scores[base] or (score == scores[base] and row < rows[base])):
        scores[base], rows[base] = score, row
        _sift_down(scores, rows, base, size)
    return size


@lean
def sort_heap(scores: Float64s, rows: Int64s, base: int, size: int) -> None:
    """Turn a heap into a list, best row first."""
    for last in range(size - 1, 0, -1):
        _swap(scores, rows, base, base + last)
        _sift_down(scores, rows, base, last)
