"""Traffic of very many tenants with skew, and what the cluster's own router makes of it.

The heaviest tenants are routed one by one by the rendezvous hashing of `ShardMap`. The tail, whose
tenants are too small to matter alone, is spread in aggregate: an equal share, with the noise that so
many independent choices of a shard have.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from undertow.engine.cluster.shard_map import ShardMap

HEAD_TENANTS = 100_000
_CAP_ROUNDS = 20

Floats = NDArray[np.float64]


def shard_map(shards: int) -> ShardMap:
    """The router's map of `shards` shards; without a key, so that plans can be repeated."""
    return ShardMap(1, tuple(f"shard-{n:04d}" for n in range(shards)))


def tenant_name(rank: int) -> str:
    return f"tenant-{rank}"


@dataclass(frozen=True)
class Traffic:
    """`tenants` tenants; the one of rank i (from 1) sends a share proportional to i ** -skew.

    `history_turns`: turns stored a tenant, on average, shared out alike; no tenant has sent or will send
    more than `largest_turns` would be of them all.
    """

    tenants: int
    skew: float
    history_turns: float
    largest_turns: float

    def __post_init__(self) -> None:
        if self.tenants < 1 or self.skew < 0 or self.history_turns < 0:
            raise ValueError("traffic needs one tenant or more, and neither skew nor history below 0")
        if self.largest_turns < self.history_turns:
            raise ValueError(
                f"the largest tenant cannot have {self.largest_turns:g} turns where the mean is "
                f"{self.history_turns:g}"
            )

    @property
    def head(self) -> int:
        """How many tenants are counted one by one."""
        return min(self.tenants, HEAD_TENANTS)

    @cached_property
    def _scale(self) -> tuple[float, float]:
        """(weight that no tenant exceeds, sum of all weights): the one depends on the other."""
        ranks = np.arange(1, self.head + 1, dtype=np.float64) ** -self.skew
        tail = self._integral(self.tenants)
        most = self.largest_turns / (self.tenants * max(self.history_turns, 1e-9))
        cap = 1.0
        for _ in range(_CAP_ROUNDS):
            total = float(np.minimum(ranks, cap).sum()) + tail
            cap = min(cap, max(most * total, float(ranks[-1])))
        return cap, float(np.minimum(ranks, cap).sum()) + tail

    def _integral(self, to: float) -> float:
        """Sum of the weights of ranks head + 1 to `to`, by the midpoint rule."""
        low, high = self.head + 0.5, to + 0.5
        if high <= low:
            return 0.0
        if self.skew == 1.0:
            return float(np.log(high / low))
        return float((high ** (1 - self.skew) - low ** (1 - self.skew)) / (1 - self.skew))

    @cached_property
    def head_shares(self) -> Floats:
        """Share of all traffic of ranks 1 to `head`, float64 [head]."""
        cap, total = self._scale
        ranks: Floats = np.arange(1, self.head + 1, dtype=np.float64)
        return np.minimum(ranks**-self.skew, cap) / total

    @property
    def tail_share(self) -> float:
        """Share of all tenants beyond the head together."""
        return self._integral(self.tenants) / self._scale[1]

    def share(self, rank: int) -> float:
        """Share of all traffic of one tenant."""
        if rank <= self.head:
            return float(self.head_shares[rank - 1])
        return float(min(float(rank) ** -self.skew, self._scale[0]) / self._scale[1])

    def history(self, rank: int) -> float:
        """Turns that the tenant has stored so far."""
        return self.share(rank) * self.tenants * self.history_turns

    def tail_ranks(self, uniform: Floats) -> NDArray[np.int64]:
        """Ranks of tail tenants drawn by their traffic, from numbers in [0, 1)."""
        low, high = self.head + 0.5, self.tenants + 0.5
        if self.skew == 1.0:
            ranks = low * (high / low) ** uniform
        else:
            power = 1 - self.skew
            ranks = (low**power + uniform * (high**power - low**power)) ** (1 / power)
        return np.clip(np.rint(ranks), self.head + 1, self.tenants).astype(np.int64)

    def resident_rank(self, turns: float) -> int:
        """How many of the most active tenants have `turns` stored turns together: who stays in memory."""
        share = turns / max(self.tenants * self.history_turns, 1e-9)
        if share >= 1.0:
            return self.tenants
        in_head = float(self.head_shares.sum())
        if share < in_head:
            return int(np.searchsorted(np.cumsum(self.head_shares), share, side="right"))
        return int(self.tail_ranks(np.array([(share - in_head) / self.tail_share]))[0])


@dataclass(frozen=True, eq=False)
class Spread:
    """How traffic falls on the shards of a map. `shares`: float64 [shards], of all traffic; sums to 1."""

    traffic: Traffic
    owners: NDArray[np.intp]
    shares: Floats

    @classmethod
    def over(cls, traffic: Traffic, of: ShardMap, seed: int = 0) -> Spread:
        """Route the head's tenants by name, and the tail in aggregate."""
        shards = len(of.shards)
        owners = of.owner_ids([tenant_name(rank) for rank in range(1, traffic.head + 1)])
        shares = np.bincount(owners, weights=traffic.head_shares, minlength=shards).astype(np.float64)
        tail = traffic.tail_share
        if tail:
            # the k-th tenant adds its share with probability 1/n: the variance is n-1 over n^2 of all squares
            squares = _squares(traffic)
            sigma = float(np.sqrt(squares * (shards - 1))) / shards
            parts = np.maximum(np.random.default_rng(seed).normal(tail / shards, sigma, shards), 0.0)
            shares = shares + parts * (tail / parts.sum())
        return cls(traffic, owners, shares)

    @property
    def hottest(self) -> int:
        return int(self.shares.argmax())

    @property
    def median(self) -> int:
        return int(np.argsort(self.shares)[len(self.shares) // 2])

    def ranks(self, shard: int, count: int, seed: int = 0) -> NDArray[np.int64]:
        """Tenants of the next `count` turns that reach the shard, by rank, int64 [count].

        A tail tenant is drawn from the whole tail: which of its tenants live here does not matter.
        """
        rng = np.random.default_rng([seed, shard])
        mine = np.flatnonzero(self.owners == shard)
        shares = self.traffic.head_shares[mine]
        head = shares.sum() / self.shares[shard]
        ranks = self.traffic.tail_ranks(rng.random(count)) if head < 1 else np.zeros(count, np.int64)
        from_head = rng.random(count) < head
        if len(mine):
            drawn = rng.choice(mine, size=count, p=shares / shares.sum()) + 1
            ranks = np.where(from_head, drawn, ranks)
        return ranks


def _squares(traffic: Traffic) -> float:
    """Sum of the squares of the tail's shares, by the same integral."""
    low, high = traffic.head + 0.5, traffic.tenants + 0.5
    power = 1 - 2 * traffic.skew
    total = traffic._scale[1]
    if abs(power) < 1e-12:
        return float(np.log(high / low)) / total**2
    return float((high**power - low**power) / power) / total**2
