"""Thresholds that a share of a tenant's pairs of turns tells, over the whole log in plain integers."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import ceil

import numpy as np

from undertow.engine.base.config import Settings

from .run import Whole

# What the engine has as THETA_TURNS and SAMPLE_TURNS: turns between two times, turns that are compared.
TURNS, SAMPLE = 64, 256
WORD = (1 << 64) - 1


def mixed(seq: int) -> int:
    """The first number of a splitmix64 generator with this seed."""
    z = (seq + 0x9E3779B97F4A7C15) & WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def least_linking(vectors: Mapping[int, Whole], share: float) -> float | None:
    """The greatest cosine that this share of the pairs has: of `SAMPLE` turns, by seq. None: no pair."""
    drawn = sorted(vectors, key=mixed)[:SAMPLE]
    if len(drawn) < 2:
        return None
    rows = np.stack([vectors[seq] for seq in drawn])
    dots = (rows @ rows.T).tolist()  # exact: less than 2^63
    found = sorted((dots[i][j] for i in range(len(drawn)) for j in range(i)), reverse=True)
    linked = max(1, ceil(share * len(found)))
    return min(1.0, max(-1.0, float(Fraction(found[linked - 1], 2**48))))


class ToldThetas:
    """What the turns have told so far; forgotten once the settings state something else."""

    def __init__(self) -> None:
        self._stated: tuple[float | None, ...] = ()
        self._shares: dict[str, float] = {}
        self._told: dict[str, float] = {}

    def in_force(self, settings: Settings) -> dict[str, float]:
        """theta_sim and theta_merge for the next turn."""
        thetas = {"theta_sim": settings.similarity_threshold, "theta_merge": settings.merge_threshold}
        shares = {"theta_sim": settings.sim_share, "theta_merge": settings.merge_share}
        stated = (*thetas.values(), *shares.values(), settings.recurrence_count)
        if stated != self._stated:
            self._stated, self._told = stated, {}
            self._shares = {name: share for name, share in shares.items() if share is not None}
        return {**thetas, **self._told}

    def told_after(self, vectors: Mapping[int, Whole]) -> tuple[tuple[str, float], ...]:
        """What the turns so far tell, if it is time: in a log of 2^k turns or more every 2^k / 8 of them."""
        count = len(vectors)
        step = max(TURNS, 2 ** (len(bin(count)) - 3) // 8)
        if not self._shares or count < TURNS or (self._told and count % step):
            return ()
        found = {name: least_linking(vectors, share) for name, share in self._shares.items()}
        self._told = {name: theta for name, theta in found.items() if theta is not None}
        return tuple(sorted(self._told.items()))
