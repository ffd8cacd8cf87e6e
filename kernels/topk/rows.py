"""The search for the nearest rows of one segment on a device; `host_rows.py` is the one in host memory.

FAISS's GPU part or torch finds candidates. FAISS's brute-force search on a GPU reads the slab in place. It
needs rows without gaps; padded rows qualify if their zeros count as values. It ignores selectors, so filtered
rows are gathered first. It returns at most 2,048 rows; beyond that, and without FAISS, a matrix product and
torch's top-k do the same work. Everything runs on torch's current stream.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any, Self

import torch

from undertow.kernels.array_types import Float32s, Float64s, Int64s
from undertow.kernels.device import load_faiss_gpu
from undertow.kernels.error_bounds import tensor_core_slack

# FAISS's limit of k on a GPU.
MAX_FAISS_K = 2048
# By default FAISS would reserve 1.5 GiB of GPU memory.
_TEMP_BYTES = 64 << 20
# Gathered rows of a block: 100 MB at 384 dimensions.
_BLOCK_ROWS = 131_072
# FAISS and torch hold the scores of a block: 16 MiB of fp32, which fit twice into FAISS's temporary memory.
_BLOCK_SCORES = 4 << 20
# Values converted to fp64 at a time.
_WIDE_VALUES = 4 << 20
# FAISS's resources serve one search at a time.
_faiss_lock = threading.Lock()


class DeviceRows:
    """Rows float16 [n, width] of the device arena, zeros beyond `dim`."""

    def __init__(self, rows: torch.Tensor, dim: int) -> None:
        self._rows = rows
        self._dim = dim

    @classmethod
    def of(cls, vectors: torch.Tensor) -> Self:
        """From an arena's view float16 [n, dim], whose row stride may exceed `dim`."""
        count, dim = vectors.shape
        width = max(vectors.stride(0), dim)
        return cls(vectors.as_strided((count, width), (width, 1)), dim)

    def __len__(self) -> int:
        return len(self._rows)

    def block_rows(self, queries: int) -> int:
        """The number of rows to search at a time for this many queries."""
        return max(min(_BLOCK_ROWS, _BLOCK_SCORES // max(queries, 1)), 1024)

    def part(self, start: int, stop: int) -> Self:
        """A view of some of these rows."""
        return type(self)(self._rows[start:stop], self._dim)

    def pick(self, rows: Int64s) -> Self:
        """A copy of some of these rows."""
        return type(self)(self._rows.index_select(0, self._tensor(rows)), self._dim)

    @property
    def slack(self) -> float:
        """The maximum error of the scores of `nearest`."""
        return tensor_core_slack(self._dim)

    def nearest(self, queries: Float32s, take: int) -> tuple[Float32s, Int64s]:
        """The `take` nearest rows by fast arithmetic, and their scores, [q, take], by score descending."""
        asked = self._rows.new_zeros((len(queries), self._rows.shape[1]))
        asked[:, : self._dim] = self._tensor(queries)
        faiss = load_faiss_gpu() if self._rows.is_cuda and take <= MAX_FAISS_K else None
        if faiss is None:
            near, found = search_by_torch(self._rows, asked, take)
        else:
            near, found = search_by_faiss(faiss, self._rows, asked, take)
        return near.cpu().numpy(), found.cpu().numpy()

    def scores(self, queries: Float32s, rows: Int64s | None) -> Float64s:
        """[q, c]: exact scores of rows [q, c], or of all rows."""
        # Products and sums, no matrix product: BLAS may emulate fp64 with narrower arithmetic.
        asked = self._tensor(queries).double()
        scores = self._scores_of_all(asked) if rows is None else self._scores_of(asked, self._tensor(rows))
        found: Float64s = scores.cpu().numpy()
        return found

    def _scores_of_all(self, asked: torch.Tensor) -> torch.Tensor:
        step = max(_WIDE_VALUES // self._dim, 1)
        parts = []
        for start in range(0, len(self), step):
            wide = self._rows[start : start + step, : self._dim].double()
            parts.append(torch.stack([(wide * query).sum(1) for query in asked]))
        return torch.cat(parts, dim=1)

    def _scores_of(self, asked: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        step = max(_WIDE_VALUES // (self._dim * rows.shape[1]), 1)
        parts = []
        for start in range(0, len(rows), step):
            wide = self._rows[rows[start : start + step], : self._dim].double()
            parts.append((wide * asked[start : start + step, None]).sum(2))
        return torch.cat(parts)

    def _tensor(self, values: Float32s | Int64s) -> torch.Tensor:
        return torch.tensor(values, device=self._rows.device)


def search_by_torch(
    rows: torch.Tensor, queries: torch.Tensor, take: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores float32, rows int64) [q, take] of float16 rows [n, d] and queries [q, d], best first.

    In fp32. TF32, which torch may use for it, also keeps all bits of fp16 values.
    """
    near, found = torch.topk(queries.float() @ rows.float().T, take, dim=1)
    return near, found


def search_by_faiss(
    faiss: Any, rows: torch.Tensor, queries: torch.Tensor, take: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `search_by_torch`, by FAISS in place; the rows must be contiguous."""
    device = rows.device.index or 0
    with _faiss_lock:
        near, found = faiss.knn_gpu(
            _resources(faiss, device), queries, rows, take, metric=faiss.METRIC_INNER_PRODUCT, device=device
        )
    return near, found


@cache
def _resources(faiss: Any, device: int) -> Any:
    """FAISS's memory, handles and streams of one device, made once; `knn_gpu` uses torch's stream."""
    resources = faiss.StandardGpuResources()
    resources.setTempMemory(_TEMP_BYTES)
    resources.setPinnedMemory(0)  # for copies from the host, which do not occur
    return resources
