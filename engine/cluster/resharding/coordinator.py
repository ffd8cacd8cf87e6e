"""Adds and removes shards: publishes one map after the other and moves tenants in between.

All state lies in the maps and in the journals of the shards (see `participant`), and every call can be
repeated. So `resume` finishes a resharding that was interrupted anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from undertow.engine.base.model import UndertowError
from undertow.engine.base.results import Certificate
from undertow.engine.cluster.shard_map import STORES, ShardMap, load, publish
from undertow.engine.storage.location import Location
from undertow.engine.tenants.migration_records import NotYet

if TYPE_CHECKING:  # a driver must not load torch
    from undertow.engine.cluster.resharding.participant import DepartingTenant

# bounds of a batch: its tenants can be neither read nor written while it moves
ROWS_PER_BATCH = 16_384
TENANTS_PER_BATCH = 2_048
# how long to retry while the other shard's journal is being taken over or purged
PATIENCE_S = 60.0
PAUSE_S = 0.2
# over the departing tenants of a shard while it still takes new ones; the rest leave in the next phase
PASSES_WHILE_OPEN = 2


class AskShard(Protocol):
    """Calls a method of ReshardingParticipant at a running shard."""

    def __call__(self, shard: str, method: str, /, *args: Any) -> Any: ...


@dataclass(slots=True)
class ReshardReport:
    """What a resharding has done: the map now in force, and what this call moved.

    `certificates`, by tenant key: of erasures whose bytes were removed with the purge of their shards.
    `left_over`: folders of removed shards, purged but for files of interrupted appends. They can be removed
    by hand.
    """

    shard_map: ShardMap
    tenants: int = 0
    rows: int = 0
    left_over: Sequence[str] = ()
    certificates: dict[str, Certificate] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MoveProgress:
    """How many tenants have left one shard, of how many."""

    shard: str
    moved: int
    total: int


def reshard(
    root: Location,
    shards: Sequence[str],
    ask: AskShard,
    *,
    on_progress: Callable[[MoveProgress], None] = lambda _: None,
) -> ReshardReport:
    """Move to these shards. Tenants that belong to the same shard as before stay where they are.

    A new shard is first called once the new map is in force. MapConflict: another process is changing the
    cluster; UndertowError: an earlier resharding has not ended.
    """
    now = load(root)
    if now.before is not None:
        raise UndertowError(
            f"the cluster is still moving tenants from {', '.join(now.before)} to {', '.join(now.shards)}. "
            "Resume that first."
        )
    if now.shards != tuple(sorted(shards)):
        publish(root, now.toward(shards))
    return resume(root, ask, on_progress=on_progress)


def resume(
    root: Location,
    ask: AskShard,
    *,
    on_progress: Callable[[MoveProgress], None] = lambda _: None,
) -> ReshardReport:
    """Finish the resharding that is under way, if there is one."""
    now = load(root)
    done = ReshardReport(now)
    for name in now.all_shards:
        ask(name, "adopt", now)
    while now.began is not None:
        for name in now.before or ():
            if now.phase == "clearing":
                done.certificates.update(ask(name, "clear", now.began))
            else:
                passes = PASSES_WHILE_OPEN if now.phase == "moving" else None
                _move_out(name, now.began, ask, done, on_progress, passes)
        now = done.shard_map = now.after()
        publish(root, now)
        for name in now.all_shards:  # removed shards end by themselves
            ask(name, "adopt", now)
    done.left_over = [name for name in root.children(STORES) if name not in now.all_shards]
    return done


def _move_out(
    shard: str,
    version: int,
    ask: AskShard,
    done: ReshardReport,
    on_progress: Callable[[MoveProgress], None],
    passes: int | None,
) -> None:
    """Move the tenants that must leave one shard, in so many passes; None: until none is left."""
    moved = 0
    for _ in count() if passes is None else range(passes):
        leaving: Sequence[DepartingTenant] = ask(shard, "leaving")
        if not leaving:
            return
        total = moved + len(leaving)
        for to, keys in batches(leaving):
            ask(shard, "seal", version, keys)
            done.rows += _retried(partial(ask, to, "pull", version, shard, keys))
            _retried(partial(ask, shard, "release", version, keys))
            done.tenants += len(keys)
            moved += len(keys)
            on_progress(MoveProgress(shard, moved, total))


def _retried(step: Callable[[], Any]) -> Any:
    """Run a step that reads the other shard's journal; retry while that cannot be read. MoveError."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return step()
        except NotYet:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(PAUSE_S)


def batches(leaving: Sequence[DepartingTenant]) -> Iterator[tuple[str, list[str]]]:
    """The tenants by destination, as many at a time as the bounds allow (a larger tenant goes alone)."""
    for to in sorted({tenant.to for tenant in leaving}):
        keys: list[str] = []
        rows = 0
        for tenant in (one for one in leaving if one.to == to):
            if keys and (rows + tenant.rows > ROWS_PER_BATCH or len(keys) == TENANTS_PER_BATCH):
                yield to, keys
                keys, rows = [], 0
            keys.append(tenant.key)
            rows += tenant.rows
        if keys:
            yield to, keys
