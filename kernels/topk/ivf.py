"""Approximate top-k over one large segment: an inverted file (IVF) of row numbers, for search only.

The rows are shared out among lists, each row to the nearest of as many centroids (spherical k-means,
Sivic and Zisserman 2003 for the inverted file). A search scores only the rows of the lists whose
centroids are nearest to the query. The lists hold row numbers and no vectors: the rows stay in the
arena, where the gate's scan reads those that the lists name. So the index costs 12 bytes a row, it
works alike over host and device memory, a redacted row is gone at once, and what a search returns has
exact scores. All it can do wrong is to miss a row whose list was not opened; how often that happens is
measured against exact search when the index is made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from undertow.kernels.arena.arena import PRESENT, Arena
from undertow.kernels.arena.tensors import to_tensor
from undertow.kernels.arena.vector_checks import widened
from undertow.kernels.array_types import Float16s, Float32s, Float64s, Int32s, Int64s
from undertow.kernels.gate.gate import Gate
from undertow.kernels.topk.topk import scanned, top_k

# k-means: rows of the sample for each list, and rounds
_SAMPLE_ROWS = 64
_ROUNDS = 10
# rows that are assigned to lists at a time
_BLOCK_ROWS = 16_384
# rows that may wait outside the lists; a search takes them all in
_TAIL_ROWS = 4096
# how many nearest rows recall is measured at; a search for more than the last of them is exact
_MEASURED_K = (10, 100)
_MEASURED_QUERIES = 256
# of them at a time: beside the rows there may be little memory left on a card
_MEASURED_AT_A_TIME = 32
# on the half of the queries that settles how many lists to open: the other half shall reach the target
_MARGIN = 0.01


@dataclass(frozen=True)
class Probe:
    """How many lists a search for at most `k` rows opens, and the recall that was measured with it."""

    k: int
    lists: int
    recall: float


@dataclass(frozen=True)
class IvfReport:
    """What an index is and how good: recall@k of held-out rows of the segment against exact search."""

    method: str
    rows: int
    lists: int
    probes: tuple[Probe, ...]
    queries: int


class IvfIndex:
    """The inverted file of one segment, whose rows may be appended and redacted but not rewritten.

    Made from the rows that are PRESENT; ValueError where there are none. The same rows, target and seed
    give the same index on the same machine and device. Rows that came later are found at once: they wait
    outside the lists, and every search takes them in, until `refresh` lists them or, once the segment
    has doubled, trains anew. One owner calls it, as it does the arena.
    """

    def __init__(
        self, arena: Arena, segment: int, scan: Gate, *, target: float = 0.95, seed: int = 0
    ) -> None:
        self.segment = segment
        self._arena = arena
        self._scan = scan
        self._target = target
        self._seed = seed
        self._train()

    @property
    def report(self) -> IvfReport:
        return IvfReport("ivf", len(self._list_of), len(self._centroids), self._probes, self._queries)

    def recall(self, k: int) -> float:
        """The measured recall of a search for k rows, at the nearest k measured; 1.0 where it is exact."""
        probe = self._probe(k)
        return 1.0 if probe is None else probe.recall

    def search(self, queries: Float16s, k: int) -> tuple[Float64s, Int64s]:
        """Up to k rows near each query [q, dim], as `top_k` returns them: exact scores, some rows missed.

        Exact where k is above the largest that recall was measured at, or the lists do not hold k rows.
        """
        probe = self._probe(k)
        if probe is None:
            return top_k(self._arena, self.segment, queries, k, scan=self._scan)
        opened = _nearest_lists(self._centroids, widened(queries, self._arena.dim))[:, : probe.lists]
        scores, rows = np.empty((len(queries), k)), np.empty((len(queries), k), np.int64)
        segment = np.array([self.segment])
        for i, lists in enumerate(opened):
            query = queries[i : i + 1]
            near, found = scanned(self._scan, segment, query, k, self._rows_in(lists))
            if (found < 0).any():  # the lists do not hold k rows
                near, found = top_k(self._arena, self.segment, query, k, scan=self._scan)
            scores[i : i + 1], rows[i : i + 1] = near, found
        return scores, rows

    def refresh(self) -> bool:
        """Take new rows into the lists once enough of them wait; whether the lists changed.

        ValueError where a segment that doubled has no row left to train on.
        """
        length = self._arena.length(self.segment)
        if length >= 2 * self._trained_rows:
            self._train()
            return True
        if length - len(self._list_of) < _TAIL_ROWS:
            return False
        self._list(np.concatenate((self._list_of, self._assign(len(self._list_of), length))))
        return True

    # -- inside

    def _probe(self, k: int) -> Probe | None:
        return next((probe for probe in self._probes if k <= probe.k), None)

    def _rows_in(self, lists: Int64s) -> NDArray[np.bool_] | torch.Tensor:
        """bool [rows of the segment], where its flags are: the rows in these lists or in none yet."""
        order = self._order
        wanted = torch.zeros(self._arena.length(self.segment), dtype=torch.bool, device=order.device)
        opened = [order[self._start[one] : self._start[one + 1]] for one in lists]
        wanted.index_fill_(0, torch.cat(opened), True)
        wanted[len(self._list_of) :] = True
        return wanted if isinstance(self._arena.held_flags(self.segment), torch.Tensor) else wanted.numpy()

    def _train(self) -> None:
        """Centroids, lists and measured recall, from the rows as they are."""
        rows = np.flatnonzero(self._arena.flags(self.segment) & PRESENT)
        if len(rows) == 0:
            raise ValueError(f"segment {self.segment} has no row to train an index on")
        rng = np.random.default_rng(self._seed)
        self._trained_rows = self._arena.length(self.segment)
        lists = max(round(math.sqrt(len(rows))), 1)
        sample = np.sort(rng.choice(rows, min(len(rows), lists * _SAMPLE_ROWS), replace=False))
        vectors = widened(self._read(sample), self._arena.dim)
        self._centroids = _kmeans(vectors, lists, rng, self._arena.device)
        self._list(self._assign(0, self._trained_rows))
        self._measure(np.sort(rng.choice(rows, min(len(rows), _MEASURED_QUERIES), replace=False)))

    def _read(self, rows: Int64s) -> Float16s:
        vectors: Float16s = self._arena.vector16(np.int64(self.segment) << 32 | rows)
        return vectors

    def _assign(self, start: int, stop: int) -> Int32s:
        """The list of each row in [start, stop); of redacted rows too, which no search takes."""
        vectors = self._arena.vectors(self.segment)[start:stop]
        return _nearest(vectors, self._centroids)[0].astype(np.int32)

    def _list(self, list_of: Int32s) -> None:
        self._list_of = list_of
        # on the device, so that a search there makes no pass over the rows here
        self._order = torch.from_numpy(np.argsort(list_of, kind="stable")).to(self._arena.device)
        counts = np.bincount(list_of, minlength=len(self._centroids))
        self._start = np.concatenate(([0], np.cumsum(counts)))

    def _measure(self, rows: Int64s) -> None:
        """Settle how many lists to open on one half of the rows as queries; the other half's recall counts.

        A row is found exactly when its list is opened, so the ranks of the lists of the true nearest
        rows tell the recall for every number of lists. The query itself is not among its nearest.
        """
        queries = self._read(rows)
        near = np.concatenate(
            [
                top_k(self._arena, self.segment, block, _MEASURED_K[-1] + 1, scan=self._scan)[1]
                for block in np.split(queries, range(_MEASURED_AT_A_TIME, len(queries), _MEASURED_AT_A_TIME))
            ]
        )
        lists_of = _nearest_lists(self._centroids, widened(queries, self._arena.dim))
        ranks = np.argsort(lists_of, axis=1)
        needed = []
        for own, found, rank in zip(rows, near, ranks, strict=True):
            others = found[(found >= 0) & (found != own)]
            needed.append(rank[self._list_of[others]])
        settle, count = needed[::2], needed[1::2] or needed[::2]
        probes = []
        for k in _MEASURED_K:
            to_open = np.sort(np.concatenate([ranks_of[:k] for ranks_of in settle]))
            at = math.ceil(min(self._target + _MARGIN, 1.0) * len(to_open))
            lists = int(to_open[at - 1]) + 1 if at else 1
            held_out = np.concatenate([ranks_of[:k] for ranks_of in count])
            probes.append(Probe(k, lists, float(np.mean(held_out < lists)) if len(held_out) else 1.0))
        self._probes, self._queries = tuple(probes), len(count)


def _kmeans(vectors: Float32s, lists: int, rng: np.random.Generator, device: str) -> Float32s:
    """Centroids float32 [lists, dim] of unit length: spherical k-means from random rows.

    A centroid that no row is nearest to moves to the row that is farthest from its own centroid.
    """
    centroids = _unit(vectors[np.sort(rng.choice(len(vectors), lists, replace=False))])
    where_compared = to_tensor(vectors).to(device)
    for _ in range(_ROUNDS):
        near, scores = _nearest(where_compared, centroids)
        order = np.argsort(near, kind="stable")
        found, starts = np.unique(near[order], return_index=True)
        centroids[found] = np.add.reduceat(vectors[order], starts, axis=0)
        unused = np.setdiff1d(np.arange(lists), found)
        centroids[unused] = vectors[np.argsort(scores, kind="stable")[: len(unused)]]
        centroids = _unit(centroids)
    return centroids


def _unit(vectors: Float32s) -> Float32s:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: Float32s = vectors / np.maximum(lengths, np.float32(1e-12))
    return scaled


def _nearest(vectors: Float32s | Float16s | torch.Tensor, centroids: Float32s) -> tuple[Int64s, Float32s]:
    """The nearest centroid of each vector, and their scores; computed where the vectors are."""
    device = vectors.device if isinstance(vectors, torch.Tensor) else "cpu"
    columns = torch.from_numpy(centroids).to(device).T
    lists, scores = np.empty(len(vectors), np.int64), np.empty(len(vectors), np.float32)
    for start in range(0, len(vectors), _BLOCK_ROWS):
        block = vectors[start : start + _BLOCK_ROWS]
        rows = block if isinstance(block, torch.Tensor) else to_tensor(block)
        best = (rows.float() @ columns).max(dim=1)
        lists[start : start + len(block)] = best.indices.cpu().numpy()
        scores[start : start + len(block)] = best.values.cpu().numpy()
    return lists, scores


def _nearest_lists(centroids: Float32s, queries: Float32s) -> Int64s:
    """All lists for each query, nearest first: int64 [q, lists]."""
    return np.argsort(-(queries @ centroids.T), axis=1, kind="stable")
