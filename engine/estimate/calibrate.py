"""Which thresholds fit an encoder and a store (spec: the thresholds belong to an embedding model).

The user gives the share of linked pairs; theta_sim is the quantile that yields it. The gate of equation 5
runs over a sample in order, to show how often it would fire if no turn were merged; what a theta costs with
merges is for `estimate`, which runs the engine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
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
# a threshold with fewer pairs above it says nothing
FEWEST_LINKED = 10

Vectors = NDArray[np.float32]


class PairCosines:
    """A histogram of the cosines of pairs of texts within each tenant."""

    def __init__(self) -> None:
        self._counts = np.zeros(BINS, np.int64)

    def count(self, cosines: NDArray[np.float32]) -> None:
        """Count cosines, float32 [n]."""
        bins = ((cosines + 1.0) * (BINS / 2)).astype(np.int64).clip(0, BINS - 1)
        self._counts += np.bincount(bins, minlength=BINS)

    def add(self, vectors: Vectors, groups: NDArray[np.intp] | None = None) -> None:
        """All pairs of one tenant's texts, without those within one of the `groups`.

        float32 [n, dim], normalised; int [n].
        """
        for start in range(0, len(vectors), ROWS_AT_A_TIME):
            block = vectors[start : start + ROWS_AT_A_TIME]
            cosines = block @ vectors.T
            pairs = np.arange(len(vectors))[None, :] > (start + np.arange(len(block)))[:, None]
            if groups is not None:
                pairs &= groups[None, :] != groups[start : start + len(block), None]
            self.count(cosines[pairs])

    @property
    def total(self) -> int:
        return int(self._counts.sum())

    def quantile(self, q: float) -> float:
        """The cosine that a share `q` of the pairs stays below, to four digits; total must not be 0."""
        place = int(np.searchsorted(np.cumsum(self._counts), q * self.total, side="left"))
        return round(min(place + 1, BINS) * 2 / BINS - 1.0, 4)


def calibrate(
    reports: Reports,
    share: float,
    theta_count: int,
    *,
    tenant: str | None = None,
    sample_turns: int = 5_000,
) -> dict[str, Any]:
    """Propose theta_sim for `share` of linked pairs, beside half and twice that share.

    Reads tenants in random order (a fixed seed), up to `sample_turns` turns. ValueError: share not in
    (0, 1). UndertowError: too few turns to tell.
    """
    if not 0.0 < share < 1.0:
        raise ValueError(f"share is {share}; give the part of pairs to link, between 0 and 1, such as 0.02")
    sample = _sample(reports, tenant, sample_turns)
    pairs = PairCosines()
    for vectors in sample:
        pairs.add(vectors)
    if share * pairs.total < FEWEST_LINKED:
        raise UndertowError(
            f"too few turns to propose a threshold: they make {pairs.total:,} pairs, and a share of "
            f"{share:g} needs {FEWEST_LINKED / share:,.0f}. Ingest more conversations."
        )
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


def calibrate_memories(
    reports: Reports, share: float, *, tenant: str | None = None, sample_memories: int = 5_000
) -> dict[str, Any]:
    """Propose the thresholds between a store's memories: each links `share` of its pairs within tenants.

    theta_merge (RecMem): an episode and a turn that is none of its sources. theta_evoke (NEMORI's tau): an
    episode and a fact that was not made with it. theta_compare (NEMORI): two facts that were not made with
    one episode. None: the store has no such pair yet.
    """
    merges, evokes, compares, room = PairCosines(), PairCosines(), PairCosines(), sample_memories
    for name in _names(reports, tenant):
        episodes = list(islice(reports.memory_vectors(name, "episode"), max(0, room)))
        facts = list(islice(reports.memory_vectors(name, "fact"), max(0, room)))
        room -= len(episodes) + len(facts)
        if episodes:
            of_episodes = np.stack([vector for _, vector in episodes]).astype(np.float32)
            for seq, vector in reports.turns_with_vectors(name):
                others = [seq not in memory["source_seqs"] for memory, _ in episodes]
                merges.count(of_episodes[others] @ vector.astype(np.float32))
            for fact, vector in facts:
                others = [fact["episode_id"] != memory["id"] for memory, _ in episodes]
                evokes.count(of_episodes[others] @ vector.astype(np.float32))
        if facts:
            of_facts = np.stack([vector for _, vector in facts]).astype(np.float32)
            made_with = [fact["episode_id"] or fact["id"] for fact, _ in facts]
            compares.add(of_facts, np.unique(made_with, return_inverse=True)[1])
    found = {"theta_merge": merges, "theta_evoke": evokes, "theta_compare": compares}
    return {
        **{name: pairs.quantile(1.0 - share) if pairs.total else None for name, pairs in found.items()},
        "turn_episode_pairs": merges.total,
        "episode_fact_pairs": evokes.total,
        "fact_pairs": compares.total,
    }


def _names(reports: Reports, tenant: str | None) -> list[str]:
    """The tenants in random order (a fixed seed), or the only one."""
    names = [tenant] if tenant is not None else [r["tenant"] for r in reports.tenant_sizes()]
    random.Random(0).shuffle(names)
    return names


def _sample(reports: Reports, tenant: str | None, sample_turns: int) -> list[Vectors]:
    sample: list[Vectors] = []
    room = sample_turns
    for name in _names(reports, tenant):
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
    fired = [cluster for v in sample for cluster in walk(v, theta, theta_count)]
    return {
        "share": share,
        "theta_sim": theta,
        "links_per_turn": round(share * pairs.total / turns, 2),
        "triggers": len(fired),
        "consolidated_turns": sum(map(len, fired)),
    }


def walk(vectors: Vectors, theta: float, theta_count: int) -> Iterator[tuple[int, ...]]:
    """Decide one tenant's turns in order: float32 [n, dim], normalised. Yields each cluster that fires."""
    live = np.zeros(len(vectors), bool)
    for i, vector in enumerate(vectors):
        before = np.flatnonzero(live[:i])
        cosines = vectors[before] @ vector
        nearest = np.argsort(-cosines, kind="stable")[: 2 * theta_count]  # k_gate
        relevant = before[nearest[cosines[nearest] >= theta]]
        if len(relevant) + 1 < theta_count:
            live[i] = True
        else:
            live[relevant] = False
            yield (*sorted(relevant.tolist()), i)
