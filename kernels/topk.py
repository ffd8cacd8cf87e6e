"""Exact top-k by inner product over arena slabs: FAISS finds candidates, fp64 orders them.

FAISS sums in fp32, in an order that depends on the machine and on the number of queries, so near-equal
scores may come in any order. Its candidates are therefore scored again in fp64 (exact for fp16-valued
vectors, see `kernels/exact.py`) and more are fetched until nothing left out can belong to the k best.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from undertow.kernels.arena import PRESENT, Arena, widened
from undertow.kernels.device import load_faiss
from undertow.kernels.exact import error_slack

Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]
Queries = NDArray[np.float16] | Float32s

# rows that are searched, and where a filter demands it copied, at a time
_BLOCK_ROWS = 32_768
# candidates fetched beyond k: enough that rounding alone rarely forces a second fetch
_SPARE = 16


def top_k(
    arena: Arena, segment: int, queries: Queries, k: int, allowed: NDArray[np.bool_] | None = None
) -> tuple[Float64s, Int64s]:
    """The k rows of a segment nearest to each query, among PRESENT (and `allowed`) rows.

    queries: float16 or float32 [q, dim], norms at most 4; allowed: bool [rows of the segment].
    Returns scores float64 [q, k] and rows int64 [q, k], by score descending, then row ascending, the
    cut at k included; where there are fewer rows, the rest is -inf and -1. Scores are exact for
    fp16-valued queries; for other float32 queries they are fp64 sums. Raises ValueError for wrong
    shapes, dtypes or segments, ImportError without FAISS.
    """
    wide = widened(queries, arena.dim, np.float16, np.float32)
    vectors, present = arena.vectors(segment), arena.flags(segment) & PRESENT != 0
    if allowed is not None:
        if np.shape(allowed) != present.shape or np.asarray(allowed).dtype != np.bool_:
            raise ValueError(f"allowed must be bool [{len(present)}], one entry a row of segment {segment}")
        present = present & allowed
    return _search(vectors, present, wide, k)


def top_k_many(arena: Arena, segments: ArrayLike, queries: Queries, k: int) -> tuple[Float64s, Int64s]:
    """`top_k` of queries[i] in segments[i]: segments int64 [q], queries [q, dim]; results as there."""
    queries = widened(queries, arena.dim, np.float16, np.float32)
    owners = np.asarray(segments)
    if owners.shape != (len(queries),) or (len(owners) and owners.dtype.kind not in "iu"):
        raise ValueError(f"segments must be {len(queries)} integers, one a query")
    scores, rows = _padded(len(queries), k)
    order = np.argsort(owners, kind="stable")
    ids, starts = np.unique(owners[order], return_index=True)
    for segment, start, stop in zip(ids, starts, [*starts[1:], len(order)], strict=False):
        members = order[start:stop]
        scores[members], rows[members] = top_k(arena, int(segment), queries[members], k)
    return scores, rows


def _padded(count: int, k: int) -> tuple[Float64s, Int64s]:
    if k < 0:
        raise ValueError(f"k must not be negative, and is {k}")
    return np.full((count, k), -np.inf), np.full((count, k), -1, np.int64)


def _search(
    vectors: Float32s, wanted: NDArray[np.bool_], queries: Float32s, k: int
) -> tuple[Float64s, Int64s]:
    """Exact top-k over the wanted rows, block by block; each block's answer is exact by itself."""
    scores, rows = _padded(len(queries), k)
    for start in range(0, len(vectors) if k else 0, _BLOCK_ROWS):
        block, mask = vectors[start : start + _BLOCK_ROWS], wanted[start : start + _BLOCK_ROWS]
        ids = np.flatnonzero(mask)
        if len(ids) < len(block):
            block = block[ids]
        near, found = _block(block, queries, min(k, len(ids)))
        joined = np.concatenate((scores, near), axis=1)
        places = np.concatenate((rows, ids[found] + start), axis=1)
        # a stable sort keeps the rows of equal scores ascending, as earlier blocks come first
        order = np.argsort(-joined, axis=1, kind="stable")[:, :k]
        scores, rows = np.take_along_axis(joined, order, 1), np.take_along_axis(places, order, 1)
    return scores, rows


def _block(block: Float32s, queries: Float32s, k: int) -> tuple[Float64s, Int64s]:
    """Exact scores and rows [q, k] within one block of at least k rows."""
    scores, rows = _padded(len(queries), k)
    pending = np.arange(len(queries) if k else 0)
    slack, take = error_slack(block.shape[1]), k + _SPARE
    while len(pending) and take * 4 < len(block):
        near, found = load_faiss().knn(
            queries[pending], block, take, metric=load_faiss().METRIC_INNER_PRODUCT
        )
        for i, candidates in zip(pending, found, strict=True):
            scores[i], rows[i] = _best(block, candidates, queries[i], k)
        # a row left out has an fp32 score of at most near[:, -1], so an exact one of at most slack more
        pending = pending[near[:, -1] + slack >= scores[pending, -1]]
        take *= 4
    for i in pending:
        scores[i], rows[i] = _best(block, np.arange(len(block)), queries[i], k)
    return scores, rows


def _best(block: Float32s, candidates: Int64s, query: Float32s, k: int) -> tuple[Float64s, Int64s]:
    """The k best of some rows, by exact score, then row."""
    scores = block[candidates].astype(np.float64) @ query.astype(np.float64)
    order = np.lexsort((candidates, -scores))[:k]
    return scores[order], candidates[order]
