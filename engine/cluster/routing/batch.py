"""A router's pending adds, split into batches for one shard each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from undertow.engine.base.model import PackedTurn
from undertow.engine.base.trace import current_traceparent
from undertow.engine.cluster.wire import RETURNED, Outcome, Status, receipts_table, turns_table

Key = TypeVar("Key", bound=Hashable)
Rows = NDArray[np.int64]
# A few turns are a list, with a list of receipts or wire.RECEIPTS. Many are wire.TURNS, with wire.RECEIPTS.
Turns: TypeAlias = Sequence[PackedTurn] | pa.Table
Receipts: TypeAlias = Sequence[Outcome] | pa.Table

_RETURNED = pa.array([str(status) for status in RETURNED], pa.string())


class PendingAdd:
    """One call of a user: its receipts come in parts, as its batches are stored."""

    def __init__(self, count: int, result_of: Callable[[Receipts], Any] = receipts_table) -> None:
        """`count`: its turns. `result_of`: makes the future's result."""
        self.future: Future[Any] = Future()
        self._result_of = result_of
        self.future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        self.traceparent = current_traceparent()
        self._missing = count
        self._parts: list[tuple[Rows, Receipts]] = []
        if not count:
            self._complete(receipts_table([]))

    def give(self, rows: Rows, receipts: Receipts) -> None:
        """Take the receipts of some turns, `rows` int64 [n]; the last ones complete the call, in order."""
        if self.future.done() or not len(rows):
            return
        self._parts.append((rows, receipts))
        self._missing -= len(rows)
        if self._missing:
            return
        if len(self._parts) == 1:
            self._complete(receipts)
            return
        places = np.concatenate([rows for rows, _ in self._parts])
        together = pa.concat_tables([receipts_table(part) for _, part in self._parts])
        self._complete(together.take(pa.array(np.argsort(places))))

    def _complete(self, receipts: Receipts) -> None:
        try:
            self.future.set_result(self._result_of(receipts))
        except Exception as error:  # noqa: BLE001 - its sender must learn of any error
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Some turns cannot be stored. Batches under way go on; their receipts are dropped."""
        if not self.future.done():
            self.future.set_exception(error)


class ReturnedRows(NamedTuple):
    """The turns of a batch that a shard has not taken.

    `moved`: the new shards of moved tenants; `in_transit`: tenants that are being moved.
    """

    batch: ShardBatch
    moved: dict[str, str]
    in_transit: set[str]


@dataclass(slots=True, eq=False)
class ShardBatch:
    """Turns of one PendingAdd for one shard: `turns` holds its turns `rows`, in order.

    `suspected`: it was under way when the shard's process died. `tried_in`: the process that it was alone
    in when it got lost; empty: none. `deaths`: of processes that it was alone in. `back_since_s`: since
    when (monotonic) shards have been returning its turns; None: none has.
    """

    pending: PendingAdd
    rows: Rows
    turns: Turns
    suspected: bool = False
    tried_in: str = ""
    deaths: int = 0
    back_since_s: float | None = None
    _tenants: list[str] | None = field(default=None, init=False)
    _encoded: pa.DictionaryArray | None = field(default=None, init=False)

    @classmethod
    def of(cls, turns: Turns, result_of: Callable[[Receipts], Any] = receipts_table) -> Self:
        """All turns of one call; for `result_of` see PendingAdd."""
        return cls(PendingAdd(len(turns), result_of), np.arange(len(turns)), turns)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def table(self) -> pa.Table:
        """Its turns as wire.TURNS."""
        return self.turns if isinstance(self.turns, pa.Table) else turns_table(self.turns)

    @property
    def tenants(self) -> list[str]:
        """Each of its tenants once, in the order of their first turns."""
        if self._tenants is None:
            if isinstance(self.turns, pa.Table):
                self._tenants = self.encoded.dictionary.to_pylist()
            else:
                self._tenants = list(dict.fromkeys(turn.tenant for turn in self.turns))
        return self._tenants

    @property
    def encoded(self) -> pa.DictionaryArray:
        """The tenant of each turn, as its place in `tenants`."""
        if self._encoded is None:
            self._encoded = self.table.column("tenant").combine_chunks().dictionary_encode()
        return self._encoded

    def settle(self, receipts: Receipts) -> ReturnedRows | None:
        """Pass the receipts on. The turns that the shard has returned; None: none."""
        if not isinstance(receipts, pa.Table) and not any(status in RETURNED for status, *_ in receipts):
            self.pending.give(self.rows, receipts)
            return None
        receipts = receipts_table(receipts)
        status = receipts.column("status")
        back = pc.is_in(status, value_set=_RETURNED)
        if not pc.any(back).as_py():
            self.pending.give(self.rows, receipts)
            return None
        mask = back.to_numpy()
        self.pending.give(self.rows[~mask], receipts.filter(pc.invert(back)))
        table, moved = self.table, pc.equal(status, str(Status.MOVED))
        tenants = table.column("tenant")
        names, places = tenants.filter(moved).to_pylist(), receipts.column("detail").filter(moved).to_pylist()
        in_transit = tenants.filter(pc.equal(status, str(Status.IN_TRANSIT))).to_pylist()
        batch = ShardBatch(self.pending, self.rows[mask], table.filter(back), back_since_s=self.back_since_s)
        return ReturnedRows(batch, dict(zip(names, places, strict=True)), set(in_transit))

    def part(self, places: Rows) -> ShardBatch:
        """Some of its turns, by position; copied, as Arrow would send the whole table with a slice."""
        if isinstance(self.turns, pa.Table):
            return replace(self, rows=self.rows[places], turns=self.turns.take(pa.array(places)))
        return replace(self, rows=self.rows[places], turns=[self.turns[n] for n in places])

    def halves(self) -> list[ShardBatch]:
        """Two batches of half its turns each. After one more death a half is split again."""
        middle = len(self) // 2
        halves = [self.part(np.arange(middle)), self.part(np.arange(middle, len(self)))]
        for half in halves:
            half.deaths = 1 if len(half) > 1 else 0
        return halves


def split(
    batch: ShardBatch, keys_of: Callable[[Sequence[str]], Sequence[Key]], most_turns: int
) -> list[tuple[Key, ShardBatch]]:
    """Split a batch by the key of each tenant, into even parts of at most `most_turns` turns; in order."""
    names = batch.tenants
    keys = keys_of(names)
    of_key: dict[Key, list[str]] = {key: [] for key in keys}
    if len(of_key) == 1 and len(batch) <= most_turns:
        return [(keys[0], batch)]
    number = {key: n for n, key in enumerate(of_key)}
    for name, key in zip(names, keys, strict=True):
        of_key[key].append(name)
    of_tenant = np.array([number[key] for key in keys], dtype=np.int64)
    of_turn = of_tenant[batch.encoded.indices.to_numpy(zero_copy_only=False)]
    parts = []
    for key, n in number.items():
        places = np.flatnonzero(of_turn == n)
        for some in np.array_split(places, -(-len(places) // most_turns)):
            part = batch.part(some)
            if len(part) == len(places):
                part._tenants = of_key[key]
            parts.append((key, part))
    return parts
