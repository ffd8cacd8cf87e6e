"""Which theta_sim fits an encoder and its turns (spec: the thresholds belong to an embedding model).

The share of linked pairs is asked for, theta_sim is the quantile that gives it, and the gate of equation
5 is run over a sample in order, to show how often it would fire. What merges would do is a proxy only:
no LLM is asked, the centroid of a cluster stands for its episode.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undertow.engine.api.views.reports import Reports
from undertow.engine.base.model import UndertowError

PERCENTILES = (1, 10, 25, 50, 75, 90, 95, 98, 99, 99.5, 99.9)
# cosines are counted in bins of 1e-4, so that any number of pairs fits in memory
BINS = 20_000
ROWS_AT_A_TIME = 512

Vectors = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Triggers:
    """What the gate would do over a sample: fires, the turns they consolidate, merges (proxy)."""

    fires: int = 0
    consolidated: int = 0
    merges: int = 0

    def __add__(self, other: Triggers) -> Triggers:
        return Triggers(
            self.fires + other.fires, self.consolidated + other.consolidated, self.merges + other.merges
        )


@dataclass(frozen=True, slots=True)
class Step:
    """What the gate does with one turn; turns by their place in the log, clusters by that of their fire.

    `asked`: the cluster that a merge was asked of. `cluster`: the turns that fire together, this one last.
    """

    turn: int
    asked: int | None = None
    merged: bool = False
    cluster: tuple[int, ...] = ()


class PairCosines:
    """A histogram of the cosines of all pairs of turns within each tenant."""

    def __init__(self) -> None:
        self._counts = np.zeros(BINS, np.int64)

    def add(self, vectors: Vectors) -> None:
        """All pairs of one tenant's turns: float32 [n, dim], normalised."""
        for start in range(0, len(vectors), ROWS_AT_A_TIME):
            block = vectors[start : start + ROWS_AT_A_TIME]
            cosines = block @ vectors.T
            later = np.arange(len(vectors))[None, :] > (start + np.arange(len(block)))[:, None]
            bins = ((cosines[later] + 1.0) * (BINS / 2)).astype(np.int64).clip(0, BINS - 1)
            self._counts += np.bincount(bins, minlength=BINS)

    @property
    def total(self) -> int:
        return int(self._counts.sum())

    def quantile(self, q: float) -> float:
        """The cosine that a share `q` of the pairs stays below, to four digits; total must not be 0."""
        place = int(np.searchsorted(np.cumsum(self._counts), q * self.total, side="left"))
        return round(min(place + 1, BINS) * 2 / BINS - 1.0, 4)

    def share_above(self, theta: float) -> float:
        """The share of pairs that theta links, to the width of a bin; total must not be 0."""
        first = round((theta + 1.0) * BINS / 2)
        return float(self._counts[first:].sum() / self.total)


def calibrate(
    reports: Reports,
    share: float,
    theta_count: int,
    *,
    tenant: str | None = None,
    sample_turns: int = 5_000,
) -> dict[str, Any]:
    """Propose theta_sim for `share` of linked pairs, beside half and twice that share.

    Looks at whole tenants in random order (a fixed seed) until `sample_turns` turns are seen; of one
    that is longer, its first ones. ValueError: share not in (0, 1). UndertowError: nothing to compare.
    """
    if not 0.0 < share < 1.0:
        raise ValueError(f"share is {share}; give the part of pairs to link, between 0 and 1, such as 0.02")
    sample = _sample(reports, tenant, sample_turns)
    pairs = PairCosines()
    for vectors in sample:
        pairs.add(vectors)
    if pairs.total == 0:
        raise UndertowError("no tenant has two turns to compare. Ingest some conversations first.")
    shares = sorted({share / 2, share, min(share * 2, 0.99)})
    proposals = [_proposal(sample, pairs, s, theta_count) for s in shares]
    return {
        "theta_sim": pairs.quantile(1.0 - share),
        "theta_count": theta_count,
        "share": share,
        "tenants": len(sample),
        "turns": sum(len(v) for v in sample),
        "pairs": pairs.total,
        "percentiles": {str(p): pairs.quantile(p / 100) for p in PERCENTILES},
        "proposals": proposals,
    }


def _sample(reports: Reports, tenant: str | None, sample_turns: int) -> list[Vectors]:
    names = [tenant] if tenant is not None else [r["tenant"] for r in reports.tenant_sizes()]
    if tenant is None:
        random.Random(0).shuffle(names)
    sample: list[Vectors] = []
    room = sample_turns
    for name in names:
        if room <= 0:
            break
        rows = list(islice(reports.turn_vectors(name), room))
        if rows:
            sample.append(np.stack(rows).astype(np.float32))
            room -= len(rows)
    return sample


def _proposal(
    sample: Sequence[Vectors], pairs: PairCosines, share: float, theta_count: int
) -> dict[str, Any]:
    theta = pairs.quantile(1.0 - share)
    turns = sum(len(v) for v in sample)
    plain = sum((simulate(v, theta, theta_count) for v in sample), Triggers())
    merging = sum((simulate(v, theta, theta_count, merge=True) for v in sample), Triggers())
    return {
        "share": share,
        "theta_sim": theta,
        "links_per_turn": round(share * pairs.total / turns, 2),
        "triggers": plain.fires,
        "consolidated_turns": plain.consolidated,
        "proxy_merges": merging.merges,
        "proxy_triggers": merging.fires,
    }


def simulate(vectors: Vectors, theta: float, theta_count: int, *, merge: bool = False) -> Triggers:
    """What the gate would do with one tenant's turns: float32 [n, dim], normalised.

    `merge`: with the merges of `walk`, each of them granted.
    """
    steps = list(walk(vectors, theta, theta_count, theta_merge=theta if merge else None))
    fired = [len(step.cluster) for step in steps if step.cluster]
    return Triggers(len(fired), sum(fired), sum(step.merged for step in steps))


def walk(
    vectors: Vectors,
    theta_sim: float,
    theta_count: int,
    *,
    theta_merge: float | None = None,
    grants: Callable[[], bool] = lambda: True,
) -> Iterator[Step]:
    """Decide one tenant's turns in order: float32 [n, dim], normalised. One step a turn.

    Each fire consolidates its cluster. With `theta_merge`, a turn that comes so near to the centroid of an
    earlier cluster asks to join it; `grants` answers for the LLM. One that joins leaves the gates and
    moves the centroid, as a merged narrative takes up its turn; one that is refused goes on to the gate.
    """
    live = np.zeros(len(vectors), bool)
    clusters = _Centroids(len(vectors) // theta_count, vectors.shape[1])
    for i, vector in enumerate(vectors):
        asked = None if theta_merge is None else clusters.nearest(vector, theta_merge)
        if asked is not None and grants():
            clusters.join(asked, vector)
            yield Step(i, asked, merged=True)
            continue
        before = np.flatnonzero(live[:i])
        cosines = vectors[before] @ vector
        nearest = np.argsort(-cosines, kind="stable")[: 2 * theta_count]  # k_gate
        relevant = before[nearest[cosines[nearest] >= theta_sim]]
        if len(relevant) + 1 < theta_count:
            live[i] = True
            yield Step(i, asked)
            continue
        live[relevant] = False
        cluster = (*sorted(relevant.tolist()), i)
        clusters.add(vectors[list(cluster)].sum(axis=0))
        yield Step(i, asked, cluster=cluster)


class _Centroids:
    """The clusters that have fired, each as the sum of its turns and the direction of that."""

    def __init__(self, most: int, dim: int) -> None:
        self._sums = np.zeros((most, dim), np.float32)
        self._directions = np.zeros((most, dim), np.float32)
        self._count = 0

    def add(self, total: NDArray[np.float32]) -> None:
        self._count += 1
        self._set(self._count - 1, total)

    def join(self, cluster: int, vector: NDArray[np.float32]) -> None:
        self._set(cluster, self._sums[cluster] + vector)

    def nearest(self, vector: NDArray[np.float32], theta: float) -> int | None:
        """The cluster whose direction is nearest, if its cosine reaches theta."""
        if self._count == 0:
            return None
        cosines = self._directions[: self._count] @ vector
        best = int(np.argmax(cosines))
        return best if cosines[best] >= theta else None

    def _set(self, cluster: int, total: NDArray[np.float32]) -> None:
        self._sums[cluster] = total
        self._directions[cluster] = total / max(float(np.linalg.norm(total)), 1e-12)
