"""The search for the nearest rows of one segment in host memory: FAISS finds candidates in fp32 copies."""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import NDArray

from undertow.kernels.arena.compiled_rows import halves_at, jit, widen_rows
from undertow.kernels.arena.vector_checks import Float16s
from undertow.kernels.device import load_faiss
from undertow.kernels.error_bounds import error_slack
from undertow.kernels.gate.cpu_gate import dot64

Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]

# Rows searched at a time: their fp32 copies should stay in a cache.
_BLOCK_ROWS = 8192


@jit
def score_rows(
    address: int, shape: tuple[int, int], queries: Float32s, picked: Int64s, scores: Float64s
) -> None:
    """scores[i, j] = the fp64 score of queries[i] with row picked[i, j] of the fp16 array at `address`."""
    rows = halves_at(address, shape)
    for i in range(picked.shape[0]):
        for j in range(picked.shape[1]):
            scores[i, j] = dot64(rows, picked[i, j], queries[i])


class HostRows:
    """Rows float16 [n, dim] of the host arena, contiguous, with the methods of `DeviceRows`."""

    def __init__(self, vectors: Float16s) -> None:
        self._vectors = vectors

    def __len__(self) -> int:
        return len(self._vectors)

    def block_rows(self, queries: int) -> int:
        return _BLOCK_ROWS

    def part(self, start: int, stop: int) -> Self:
        return type(self)(self._vectors[start:stop])

    def pick(self, rows: Int64s) -> Self:
        return type(self)(self._vectors.take(rows, axis=0))

    def slack(self, queries: Float32s) -> Float64s:
        return np.full(len(queries), error_slack(self._vectors.shape[1]))

    def nearest(self, queries: Float32s, take: int) -> tuple[Float32s, Int64s]:
        faiss = load_faiss()
        wide = np.empty(self._vectors.shape, np.float32)
        widen_rows(self._vectors.ctypes.data, wide)
        near, found = faiss.knn(queries, wide, take, metric=faiss.METRIC_INNER_PRODUCT)
        return near, found

    def scores(self, queries: Float32s, rows: Int64s | None) -> Float64s:
        if rows is None:  # one query at a time: the numbers of all rows for every query could be large
            every = np.arange(len(self))[None]
            return np.concatenate([self.scores(query[None], every) for query in queries])
        scores = np.empty(rows.shape)
        asked, picked = np.ascontiguousarray(queries), np.ascontiguousarray(rows)
        score_rows(self._vectors.ctypes.data, self._vectors.shape, asked, picked, scores)
        return scores
