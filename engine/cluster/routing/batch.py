"""A router's pending adds, split into batches for one shard each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from undertow.engine.base.trace import current_traceparent
from undertow.engine.cluster.wire import FEW_ROWS, RETURNED, Status, receipts_table, tenants_of

Key = TypeVar("Key", bound=Hashable)
Rows = NDArray[np.int64]

_RETURNED = pa.array([str(status) for status in RETURNED], pa.string())


class PendingAdd:
    """One call of a user: its receipts come in parts, as its batches are stored."""

    def __init__(self, count: int) -> None:
        """`count`: its turns."""
        self.future: Future[pa.Table] = Future()
        self.traceparent = current_traceparent()
        self._missing = count
        self._parts: list[tuple[Rows, pa.Table]] = []
        if not count:
            self.future.set_result(receipts_table([]))

    def give(self, rows: Rows, receipts: pa.Table) -> None:
        """Take the receipts of some turns, `rows` int64 [n]; the last ones complete the call, in order."""
        if self.future.done() or not len(rows):
            return
        self._parts.append((rows, receipts))
        self._missing -= len(rows)
        if self._missing:
            return
        if len(self._parts) == 1:
            self.future.set_result(receipts)
            return
        places = np.concatenate([rows for rows, _ in self._parts])
        together = pa.concat_tables([part for _, part in self._parts])
        self.future.set_result(together.take(pa.array(np.argsort(places))))

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
    """Turns of one PendingAdd for one shard: `table` holds its turns `rows`, in order.

    `suspected`: it was under way when the shard's process died. `tried_in`: the process that it was alone
    in when it got lost; empty: none. `deaths`: of processes that it was alone in. `back_since_s`: since
    when (monotonic) shards have been returning its turns; None: none has.
    """

    pending: PendingAdd
    rows: Rows
    table: pa.Table
    suspected: bool = False
    tried_in: str = ""
    deaths: int = 0
    back_since_s: float | None = None
    _tenants: list[str] | None = field(default=None, init=False)
    _encoded: pa.DictionaryArray | None = field(default=None, init=False)

    @classmethod
    def of(cls, table: pa.Table) -> Self:
        """All turns of one call."""
        return cls(PendingAdd(table.num_rows), np.arange(table.num_rows), table)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def tenants(self) -> list[str]:
        """Each of its tenants once, in the order of their first turns."""
        if self._tenants is None:
            few = len(self) <= FEW_ROWS
            self._tenants = tenants_of(self.table) if few else self.encoded.dictionary.to_pylist()
        return self._tenants

    @property
    def encoded(self) -> pa.DictionaryArray:
        """The tenant of each turn, as its place in `tenants`."""
        if self._encoded is None:
            self._encoded = self.table.column("tenant").combine_chunks().dictionary_encode()
        return self._encoded

    def settle(self, receipts: pa.Table) -> ReturnedRows | None:
        """Pass the receipts on. The turns that the shard has returned; None: none."""
        status = receipts.column("status")
        if len(status) <= FEW_ROWS and not any(name in RETURNED for name in status.to_pylist()):
            self.pending.give(self.rows, receipts)
            return None
        back = pc.is_in(status, value_set=_RETURNED)
        if not pc.any(back).as_py():
            self.pending.give(self.rows, receipts)
            return None
        mask = back.to_numpy()
        self.pending.give(self.rows[~mask], receipts.filter(pc.invert(back)))
        tenants, moved = self.table.column("tenant"), pc.equal(status, str(Status.MOVED))
        names, places = tenants.filter(moved).to_pylist(), receipts.column("detail").filter(moved).to_pylist()
        in_transit = tenants.filter(pc.equal(status, str(Status.IN_TRANSIT))).to_pylist()
        batch = ShardBatch(
            self.pending, self.rows[mask], self.table.filter(back), back_since_s=self.back_since_s
        )
        return ReturnedRows(batch, dict(zip(names, places, strict=True)), set(in_transit))

    def part(self, places: Rows) -> ShardBatch:
        """Some of its turns, by position; copied, as Arrow would send the whole table with a slice."""
        table = self.table.take(pa.array(places))
        return replace(self, rows=self.rows[places], table=table)

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
