"""Loads for the GPU benchmark, made from a seed: tenant sizes, vectors on the device, texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from undertow.bench.gpu.rig import Rig
from undertow.kernels.arena.arena import Arena, make_arena
from undertow.kernels.arena.row_codes import code_bytes
from undertow.kernels.array_types import Float64s, Int64s
from undertow.kernels.gate.gate import GateReadings

# Cosines of a tenant's rows lie around 0.5 with a standard deviation of 0.03: 1% of them reach this.
THETA = 0.57
K_GATE = 10
_BLOCK_ROWS = 131_072

# Tokens of a LoCoMo exchange under the MiniLM tokenizer, special tokens included: quantiles of all 1,414
# of the development conversations; the mean is 72.
_QUANTILES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
_TOKENS = (6, 12, 29, 37, 47, 55, 62, 69, 76, 84, 96, 111, 124, 149, 171)

# each is one WordPiece token of the BERT vocabularies
VOCABULARY = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work number night point home water "
    "room mother area money story fact month lot right study book eye job word business issue side kind "
    "head house service friend father power hour game line end member law car city community name team "
    "minute idea kid body information back parent face level office door health person art war history "
    "party result change morning reason research girl moment air teacher force education foot boy age "
    "music market sense plan college interest death experience effect class garden dance studio coffee "
    "paint river summer winter train guitar dinner kitchen weekend birthday dog cat bike soccer beach "
    "mountain museum movie concert recipe bread cheese doctor nurse hospital travel flight hotel camera "
    "photo brother sister uncle cousin neighbor apartment rent budget exam course pottery yoga"
)


def equal_sizes(tenants: int, total: int) -> Int64s:
    """int64 [tenants] that sum to `total` and differ by at most 1."""
    return np.diff(np.arange(tenants + 1) * total // tenants)


def zipf_sizes(tenants: int, total: int, largest: int) -> Int64s:
    """int64 [tenants], falling, the first `largest`, the i-th about largest / i**s; they sum to `total`.

    The exponent s follows from the three numbers. ValueError where no s >= 0 fits.
    """
    if not tenants + largest - 1 <= total <= tenants * largest:
        raise ValueError(f"{tenants} tenants, the largest of {largest} rows, cannot hold {total} rows")
    ranks = np.arange(1, tenants + 1, dtype=np.float64)
    low, high = 0.0, 64.0
    for _ in range(80):
        middle = (low + high) / 2
        if np.maximum(largest * ranks**-middle, 1.0).sum() > total:
            low = middle
        else:
            high = middle
    sizes = np.maximum(largest * ranks**-high, 1.0).astype(np.int64)
    sizes[0] = largest
    while (short := total - int(sizes.sum())) > 0:  # what rounding took, given back from rank 2 on
        room = np.flatnonzero(sizes[1:] < largest)[:short] + 1
        sizes[room] += 1
    return -np.sort(-sizes)


class World:
    """An arena on the rig's device with turns and episodes of many tenants, and questions about them."""

    def __init__(
        self, rig: Rig, sizes: Int64s, episodes: int, dim: int, *, spare_rows: int = 0, coded: bool = False
    ) -> None:
        """`spare_rows`: room for `grow`. `coded`: with int8 codes, on a card."""
        rows = int(sizes.sum()) + episodes * len(sizes) + spare_rows
        # slabs come in size classes, at most 1.6 times their rows
        row_bytes = 2 * dim + 16 + coded * code_bytes(dim)
        self.arena = make_arena(dim, rig.kind, 2 * rows * row_bytes + (64 << 20), coded)
        self.sizes, self.dim, self.episodes_each = sizes, dim, episodes
        self.turns = np.array([self.arena.new_segment() for _ in sizes], np.int64)
        self.episodes = np.array([self.arena.new_segment() for _ in sizes], np.int64)
        self._rig = rig
        self._random = torch.Generator(rig.device).manual_seed(0)
        centres = self._unit(len(sizes))
        self._fill(self.turns, sizes, centres)
        self._fill(self.episodes, np.full(len(sizes), episodes), centres)

    def grow(self, rows: int, topics: int) -> int:
        """A segment of `rows` rows about that many topics, of no tenant: its id."""
        segment = self.arena.new_segment()
        self._fill(np.full(topics, segment), equal_sizes(topics, rows), self._unit(topics))
        return segment

    def _unit(self, count: int) -> torch.Tensor:
        """float32 [count, dim] of length 1, in any direction."""
        drawn = torch.randn(count, self.dim, generator=self._random, device=self._rig.device)
        return torch.nn.functional.normalize(drawn, dim=1)

    def _fill(self, segments: Int64s, sizes: Int64s, centres: torch.Tensor) -> None:
        """Rows whose cosines with the others of their tenant lie around 0.5, as those of chat turns do."""
        owners = np.repeat(np.arange(len(sizes)), sizes)
        for start in range(0, len(owners), _BLOCK_ROWS):
            part = owners[start : start + _BLOCK_ROWS]
            near = centres[torch.from_numpy(part).to(self._rig.device)] + self._unit(len(part))
            rows = torch.nn.functional.normalize(near, dim=1).half()
            self.arena.extend(segments[part], rows if self._rig.cuda else rows.numpy(), live=True)

    @property
    def bytes_read(self) -> int:
        """Bytes of rows and flags that the newest turn of every tenant has to be held against."""
        rows = int(np.maximum(self.sizes - 1, 0).sum()) + len(self.sizes) * self.episodes_each
        return rows * (self.arena.row_bytes + 1)

    def questions(self, each: int, theta: float = THETA) -> dict[str, Any]:
        """Gate.read's arguments: the newest `each` turns of every tenant, as if they had just come."""
        tenant = np.repeat(np.arange(len(self.sizes)), each)
        row = np.maximum(self.sizes[tenant] - 1 - np.tile(np.arange(each), len(self.sizes)), 0)
        handles = [Arena.handle(int(s), int(r)) for s, r in zip(self.turns[tenant], row, strict=True)]
        return {
            "queries": self.arena.take(np.array(handles, np.int64)),
            "turn_segments": self.turns[tenant],
            "episode_segments": self.episodes[tenant],
            "visible": row,
            "theta": np.full(len(tenant), theta),
            "k": np.full(len(tenant), K_GATE),
        }

    def faiss_loop(self, new_index: Callable[[], Any], tenants: int) -> Callable[[], object]:
        """The newest turn of each of some tenants, looked up in two flat FAISS indexes a tenant."""

        def index_of(segment: int) -> Any:
            index = new_index()
            index.add(self.rows64(segment).astype(np.float32))
            return index

        turns, episodes = self.turns[:tenants], self.episodes[:tenants]
        indexes = [(index_of(int(t)), index_of(int(e))) for t, e in zip(turns, episodes, strict=True)]
        queries = self.arena.vector16(turns << 32 | (self.sizes[:tenants] - 1)).astype(np.float32)

        def run() -> None:
            for query, (of_turns, of_episodes) in zip(queries, indexes, strict=True):
                of_turns.search(query[None], K_GATE)
                of_episodes.search(query[None], 1)

        return run

    def rows64(self, segment: int) -> Float64s:
        """float64 [n, dim], on the host: sums of products of these are exact in any order."""
        rows = self.arena.vectors(segment)
        return np.asarray(rows.cpu() if isinstance(rows, torch.Tensor) else rows, np.float64)

    def wrong_readings(self, asked: dict[str, Any], found: GateReadings, sample: Sequence[int]) -> list[int]:
        """Those of the sampled questions that NumPy in fp64 answers otherwise than `found`, bit for bit."""
        return [i for i in sample if not self._as_numpy(asked, found, i)]

    def _as_numpy(self, asked: dict[str, Any], found: GateReadings, i: int) -> bool:
        query = np.asarray(asked["queries"][i].tolist(), np.float64)
        turns = self.rows64(int(asked["turn_segments"][i]))[: asked["visible"][i]] @ query
        rows = np.flatnonzero(turns >= asked["theta"][i])
        best = rows[np.lexsort((rows, -turns[rows]))][:K_GATE]
        episodes = self.rows64(int(asked["episode_segments"][i])) @ query
        kept = slice(found.offsets[i], found.offsets[i + 1])
        return bool(
            found.count[i] == len(rows)
            and np.array_equal(found.rows[kept], best)
            and np.array_equal(found.scores[kept], turns[best])
            and found.nearest_row[i] == (int(episodes.argmax()) if len(episodes) else -1)
            and (not len(episodes) or found.nearest_score[i] == episodes.max())
        )


def exchanges(count: int, seed: int = 0) -> list[str]:
    """Texts of two speakers with the lengths of LoCoMo exchanges, 72 tokens on average, in random words."""
    rng = np.random.default_rng(seed)
    tokens = np.interp(rng.random(count), _QUANTILES, _TOKENS)
    lengths = np.maximum(np.rint(tokens).astype(int) - 6, 1)  # less [CLS], [SEP], two names, two colons
    vocabulary = VOCABULARY.split()
    picks = rng.integers(0, len(vocabulary), int(lengths.sum()))
    texts, start = [], 0
    for length in lengths.tolist():
        words = [vocabulary[i] for i in picks[start : start + length]]
        start += length
        half = (length + 1) // 2
        texts.append(f"john: {' '.join(words[:half])}\nmary: {' '.join(words[half:])}")
    return texts
