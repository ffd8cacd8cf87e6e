"""What the tests of resharding share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from undertow.engine.base.model import PolicyName, Turn
from undertow.engine.cluster.shard_map import publish

from ...support.cluster.in_process import cluster_state
from ...support.faults.harness import State, turns_of
from ...support.faults.moving import Shards

# the tenants of shards a and b, and those that a third shard c takes from each
STAY = ("ada", "dan", "bob", "hal")
LEAVE_A, LEAVE_B = ("cleo", "lea", "pam"), ("eve", "gil", "zoe")
TENANTS = (*STAY, *LEAVE_A, *LEAVE_B)
# for the policies beside RecMem: some of each kind, and all that the tests look at
FEW = (STAY[0], STAY[2], *LEAVE_A, LEAVE_B[0])
TURNS = 10


def logged(log: Path, policy: PolicyName) -> list[Turn]:
    """The log's turns, the tenants by turns; those of FEW for the policies beside RecMem."""
    every = [turn for of_tenant in zip(*turns_of(log).values(), strict=True) for turn in of_tenant]
    return [turn for turn in every if policy == "recmem" or turn.tenant in FEW]


def where(shards: Shards) -> dict[str, str]:
    return {name: shard for shard in shards.map.shards for name in shards(shard)._engine.tenants.names()}


def adopt(shards: Shards) -> None:
    """Let all shards adopt the newest map."""
    for shard in shards.map.all_shards:
        shards(shard).adopt(shards.map)


def begin_move(shards: Shards) -> None:
    """Publish the map that brings in shard c."""
    publish(shards.root, shards.map.toward(["a", "b", "c"]))
    adopt(shards)


def advance(shards: Shards) -> None:
    """Publish the next phase."""
    publish(shards.root, shards.map.after())
    adopt(shards)


def finished(shards: Shards, turns: Sequence[Turn]) -> State:
    """What they have stored once these turns are in, all is decided and they are closed."""
    assert shards.add(turns) == []
    shards.drain()
    shards.close()
    return cluster_state(shards.root)


def keys_of(shards: Shards, names: Sequence[str]) -> list[str]:
    return [shards.map.tenant_key(name) for name in names]
