"""Adding and removing shards: one map after the other, and between them the moves that they ask for.

Each phase of a resharding (see `ShardMap`) is put in force, known to every shard, worked off, and followed
by the next. All state lies in the maps and in the journals of the shards (see `participant`), and every call
can be repeated; so `resume` finishes a resharding that was interrupted anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Protocol, TypeVar

from undertow.engine.base.model import UndertowError
from undertow.engine.base.results import Certificate
from undertow.engine.cluster.resharding.participant import DepartingTenant
from undertow.engine.cluster.shard_map import STORES, ShardMap, load, publish
from undertow.engine.storage.location import Location
from undertow.engine.tenants.migration_records import NotYet

# of a batch: its tenants can be neither read nor written while it is on its way
ROWS_PER_BATCH = 16_384
TENANTS_PER_BATCH = 2_048
# with a journal that is being taken over or purged
PATIENCE_S = 60.0
PAUSE_S = 0.2
# over those who must leave while new ones still come; who remains leaves in the next phase
PASSES_WHILE_OPEN = 2

T = TypeVar("T")


class ReshardingCalls(Protocol):
    """What a resharding asks of a shard: the calls of `Moving`, however they get there.

    `version` is that of the map that began the resharding.
    """

    def adopt(self, shard_map: ShardMap, /) -> object: ...

    def leaving(self) -> Sequence[DepartingTenant]: ...

    def seal(self, version: int, keys: Sequence[str], /) -> object: ...

    def pull(self, version: int, source: str, keys: Sequence[str], /) -> int: ...

    def release(self, version: int, keys: Sequence[str], /) -> object: ...

    def clear(self, version: int, /) -> Mapping[str, Certificate]: ...


@dataclass(slots=True)
class ReshardReport:
    """What a resharding has done: the map now in force, and what was moved by this call.

    `certificates`, by tenant key: of erasures whose bytes went when the shards that gave were purged.
    `left_over`: folders of shards that are gone, purged but for files of appends that were cut off just
    before; they can be removed by hand.
    """

    shard_map: ShardMap
    tenants: int = 0
    rows: int = 0
    left_over: Sequence[str] = ()
    certificates: dict[str, Certificate] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MoveProgress:
    """Of one shard that gives tenants away: how many of them have left, of how many."""

    shard: str
    moved: int
    total: int


def reshard(
    root: Location,
    shards: Sequence[str],
    calls: Callable[[str], ReshardingCalls],
    *,
    on_progress: Callable[[MoveProgress], None] = lambda _: None,
) -> ReshardReport:
    """Go over to these shards. Tenants that belong to the same shard as before stay where they are.

    `calls` gives a running shard by its id; a new one is asked for once the new map is in force. MapConflict
    where another process is changing the cluster; UndertowError while an earlier change has not ended.
    """
    now = load(root)
    if now.before is not None:
        raise UndertowError(
            f"the cluster is still moving tenants from {', '.join(now.before)} to {', '.join(now.shards)}. "
            "Resume that first."
        )
    if now.shards != tuple(sorted(shards)):
        publish(root, now.toward(shards))
    return resume(root, calls, on_progress=on_progress)


def resume(
    root: Location,
    calls: Callable[[str], ReshardingCalls],
    *,
    on_progress: Callable[[MoveProgress], None] = lambda _: None,
) -> ReshardReport:
    """End the resharding that is under way, if there is one."""
    now = load(root)
    running = {shard: calls(shard) for shard in now.everyone}
    done = ReshardReport(now)
    for shard in running.values():
        shard.adopt(now)
    while now.began is not None:
        for name in now.before or ():
            if now.phase == "clearing":
                done.certificates.update(running[name].clear(now.began))
            else:
                passes = PASSES_WHILE_OPEN if now.phase == "moving" else None
                _give_away(name, now.began, running, done, on_progress, passes)
        now = done.shard_map = now.after()
        publish(root, now)
        for name in now.everyone:  # those that are gone end by themselves
            running[name].adopt(now)
    done.left_over = [name for name in root.children(STORES) if name not in now.everyone]
    return done


def _give_away(
    shard: str,
    version: int,
    running: Mapping[str, ReshardingCalls],
    done: ReshardReport,
    on_progress: Callable[[MoveProgress], None],
    passes: int | None,
) -> None:
    """Move those that must leave one shard: in so many passes over them, None: until there is nobody."""
    source, moved = running[shard], 0
    for _ in count() if passes is None else range(passes):
        if not (leavers := source.leaving()):
            return
        total = moved + len(leavers)
        for to, keys in batches(leavers):
            source.seal(version, keys)
            done.rows += _patiently(partial(running[to].pull, version, shard, keys))
            _patiently(partial(source.release, version, keys))
            done.tenants += len(keys)
            moved += len(keys)
            on_progress(MoveProgress(shard, moved, total))


def _patiently(step: Callable[[], T]) -> T:
    """A step that reads the other shard's journal, and may have to wait for that one's writer. MoveError."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return step()
        except NotYet:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(PAUSE_S)


def batches(leavers: Sequence[DepartingTenant]) -> Iterator[tuple[str, list[str]]]:
    """The tenants by where they go, as many at a time as the bounds allow (a larger tenant goes alone)."""
    for to in sorted({leaver.to for leaver in leavers}):
        keys: list[str] = []
        rows = 0
        for leaver in (one for one in leavers if one.to == to):
            if keys and (rows + leaver.rows > ROWS_PER_BATCH or len(keys) == TENANTS_PER_BATCH):
                yield to, keys
                keys, rows = [], 0
            keys.append(leaver.key)
            rows += leaver.rows
        if keys:
            yield to, keys
