"""Exact top-k by inner product over arena slabs.

A gate's scan, if given, is exact by itself and reads many segments, or some rows of one, in one pass. In host
memory other searches read one segment after the other (`host_rows.py`). On a device those with k above the
scan's limit go through a segment block by block (`rows.py`): fast arithmetic finds candidates, and fp64
orders them. The fast sums are fp32 in an order that depends on the machine and the number of queries, so
near-equal scores may come in any order. The candidates are therefore scored again in fp64 (exact for
fp16-valued vectors, see `kernels/error_bounds.py`), and more are fetched until no other row can belong to the
k best.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from undertow.kernels.arena.arena import PRESENT, Arena
from undertow.kernels.arena.vector_checks import widened
from undertow.kernels.array_types import Float16s, Float32s, Float64s, Int64s, Uint8s
from undertow.kernels.gate.gate import Gate

if TYPE_CHECKING:  # rows in host memory need no torch
    import torch

    from undertow.kernels.topk.rows import DeviceRows

Queries = Float16s

# A scan keeps its best rows by insertion, which for a large k costs more than reading.
_SCAN_K = 256
# Candidates fetched beyond k, so that rounding rarely forces a second fetch.
_SPARE = 16


def top_k(
    arena: Arena,
    segment: int,
    queries: Queries,
    k: int,
    allowed: NDArray[np.bool_] | None = None,
    scan: Gate | None = None,
) -> tuple[Float64s, Int64s]:
    """The k rows of a segment nearest to each query, among PRESENT (and `allowed`) rows.

    queries: float16 [q, dim], norms at most 4; allowed: bool [rows of the segment]. scan: a gate over the
    same arena, used for k up to 256. It makes one pass, copies nothing, and reads only allowed rows. Returns
    scores float64 [q, k] and rows int64 [q, k], by score descending, then row ascending, also at the cut at
    k. Missing rows are -inf and -1. Scores are exact. ValueError for wrong shapes, dtypes or segments.
    """
    wide = widened(queries, arena.dim)
    check_allowed(arena.length(segment), segment, allowed)
    if scan is not None and 0 < k <= _SCAN_K:
        return scanned(scan, np.full(len(wide), segment), queries, k, allowed)
    vectors, flags = arena.vectors(segment), arena.flags(segment)
    if isinstance(vectors, np.ndarray):
        return _search_host(vectors, flags, queries, k, allowed)
    from undertow.kernels.topk.rows import DeviceRows

    present = flags & PRESENT != 0
    wanted = present if allowed is None else present & allowed
    return _search(DeviceRows.of(vectors), np.flatnonzero(wanted), wide, k)


def check_allowed(length: int, segment: int, allowed: NDArray[np.bool_] | None) -> None:
    """ValueError unless `allowed` is bool [length] or None: an entry for each row of a segment."""
    if allowed is not None and (np.shape(allowed) != (length,) or np.asarray(allowed).dtype != np.bool_):
        raise ValueError(f"allowed must be bool [{length}], one entry a row of segment {segment}")


def top_k_many(
    arena: Arena, segments: ArrayLike, queries: Queries, k: int, scan: Gate | None = None
) -> tuple[Float64s, Int64s]:
    """`top_k` of queries[i] in segments[i]: segments int64 [q], queries [q, dim]. Same results as `top_k`.

    With a scan all segments are read in one pass; otherwise one after the other.
    """
    wide = widened(queries, arena.dim)
    owners = np.asarray(segments)
    if owners.shape != (len(wide),) or (len(owners) and owners.dtype.kind not in "iu"):
        raise ValueError(f"segments must be {len(wide)} integers, one a query")
    if scan is not None and 0 < k <= _SCAN_K:
        return scanned(scan, owners, queries, k)
    scores, rows = _padded(len(wide), k)
    order = np.argsort(owners, kind="stable")
    ids, starts = np.unique(owners[order], return_index=True)
    for segment, start, stop in zip(ids, starts, [*starts[1:], len(order)], strict=False):
        members = order[start:stop]
        scores[members], rows[members] = top_k(arena, int(segment), queries[members], k)
    return scores, rows


def scanned(
    scan: Gate,
    segments: Int64s,
    queries: Queries,
    k: int,
    allowed: NDArray[np.bool_] | torch.Tensor | None = None,
) -> tuple[Float64s, Int64s]:
    """`top_k_many` by one scan; `allowed` is `wanted` of `Gate.nearest`."""
    offsets, found, near = scan.nearest(
        queries=queries, segments=segments, k=np.full(len(queries), k), wanted=allowed
    )
    scores, rows = _padded(len(queries), k)
    query = np.repeat(np.arange(len(queries)), np.diff(offsets))
    place = np.arange(len(found)) - offsets[query]
    scores[query, place], rows[query, place] = near, found
    return scores, rows


def _search_host(
    vectors: Float16s,
    flags: Uint8s,
    queries: Queries,
    k: int,
    allowed: NDArray[np.bool_] | None,
) -> tuple[Float64s, Int64s]:
    # Imported here: it needs numba, which a machine with a GPU may lack.
    from undertow.kernels.topk.host_rows import best_of_rows

    scores, rows = _padded(len(queries), k)
    for i in range(len(queries)):
        near, found = best_of_rows(vectors, flags, queries[i : i + 1], k, allowed)
        scores[i, : len(near)], rows[i, : len(near)] = near, found
    return scores, rows


def _padded(count: int, k: int) -> tuple[Float64s, Int64s]:
    if k < 0:
        raise ValueError(f"k must not be negative, and is {k}")
    return np.full((count, k), -np.inf), np.full((count, k), -1, np.int64)


def _search(rows: DeviceRows, wanted: Int64s, queries: Float32s, k: int) -> tuple[Float64s, Int64s]:
    """Exact top-k over the wanted rows (ascending), block by block, each block exact by itself."""
    scores, places = _padded(len(queries), k)
    step = rows.block_rows(len(queries))
    for start in range(0, len(wanted) if k and len(queries) else 0, step):
        ids = wanted[start : start + step]
        gapless = ids[-1] - ids[0] + 1 == len(ids)
        block = rows.part(int(ids[0]), int(ids[-1]) + 1) if gapless else rows.pick(ids)
        near, found = _block(block, queries, min(k, len(ids)))
        joined = np.concatenate((scores, near), axis=1)
        rows_found = np.concatenate((places, ids[found]), axis=1)
        # A stable sort keeps rows of equal scores ascending, since earlier blocks come first.
        order = np.argsort(-joined, axis=1, kind="stable")[:, :k]
        scores, places = np.take_along_axis(joined, order, 1), np.take_along_axis(rows_found, order, 1)
    return scores, places


def _block(block: DeviceRows, queries: Float32s, k: int) -> tuple[Float64s, Int64s]:
    """Exact scores and rows [q, k] within one block of at least k rows."""
    scores, rows = _padded(len(queries), k)
    pending = np.arange(len(queries))
    slack, take = block.slack, k + _SPARE
    while len(pending) and take * 4 < len(block):
        near, found = block.nearest(queries[pending], take)
        scores[pending], rows[pending] = _best(block, queries[pending], np.sort(found, axis=1), k)
        # Any other row has a fast score of at most near[:, -1], so its exact score is at most slack higher.
        pending = pending[near[:, -1] + slack >= scores[pending, -1]]
        take *= 4
    if len(pending):
        scores[pending], rows[pending] = _best(block, queries[pending], None, k)
    return scores, rows


def _best(block: DeviceRows, queries: Float32s, candidates: Int64s | None, k: int) -> tuple[Float64s, Int64s]:
    """The k best of the candidates [q, c] (ascending), or of all rows, by exact score, then row."""
    scores = block.scores(queries, candidates)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    rows = order if candidates is None else np.take_along_axis(candidates, order, 1)
    return np.take_along_axis(scores, order, 1), rows
