"""Search over rows in host memory: float32 rows, candidates by FAISS."""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import NDArray

from undertow.kernels.device import load_faiss
from undertow.kernels.error_bounds import error_slack

Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]

# Rows searched at a time; with a filter they are copied.
_BLOCK_ROWS = 32_768


class HostRows:
    """Rows float32 [n, dim] of the host arena: `Rows` of `kernels/topk/topk.py`."""

    def __init__(self, vectors: Float32s) -> None:
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
        near, found = faiss.knn(queries, self._vectors, take, metric=faiss.METRIC_INNER_PRODUCT)
        return near, found

    def scores(self, queries: Float32s, rows: Int64s | None) -> Float64s:
        if rows is None:
            rows = np.broadcast_to(np.arange(len(self)), (len(queries), len(self)))
        scores = np.empty(rows.shape)
        # One query at a time: fp64 copies of all candidates could be large.
        for i, query in enumerate(queries.astype(np.float64)):
            scores[i] = self._vectors[rows[i]].astype(np.float64) @ query
        return scores
