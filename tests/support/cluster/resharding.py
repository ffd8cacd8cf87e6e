"""What test_resharding.py and test_resharding_refusals.py share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from undertow.engine.base.model import PolicyName, Turn
from undertow.engine.cluster.shard_map import publish

from ...support.faults.harness import turns_of
from ...support.faults.moving import (
    Shards,
)

# of a, of b, and those that a third shard c takes from each
STAY = ("ada", "dan", "bob", "hal")


LEAVE_A, LEAVE_B = ("cleo", "lea", "pam"), ("eve", "gil", "zoe")


TENANTS = (*STAY, *LEAVE_A, *LEAVE_B)


# with the policies beside RecMem: of each kind some, and all that the tests look at
FEW = (STAY[0], STAY[2], *LEAVE_A, LEAVE_B[0])


TURNS = 10


def logged(log: Path, policy: PolicyName) -> list[Turn]:
    """The log's turns, the tenants by turns; of few of them for the policies beside RecMem."""
    every = [turn for of_tenant in zip(*turns_of(log).values(), strict=True) for turn in of_tenant]
    return [turn for turn in every if policy == "recmem" or turn.tenant in FEW]


def where(shards: Shards) -> dict[str, str]:
    return {name: shard for shard in shards.map.shards for name in shards(shard)._engine.tenants.names()}


def advance(shards: Shards) -> None:
    publish(shards.root, shards.map.after())
    for shard in shards.map.everyone:
        shards(shard).adopt(shards.map)


def keys_of(shards: Shards, names: Sequence[str]) -> list[str]:
    return [shards.map.tenant_key(name) for name in names]
