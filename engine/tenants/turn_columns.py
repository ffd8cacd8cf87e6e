"""Turns as columns: how a batch of them gets its seqs and becomes rows of the journal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from undertow.engine.base.model import PackedTurn
from undertow.engine.storage.journal_rows import SCHEMA, Row, Rows, binary_vectors
from undertow.engine.storage.row_codec import TURNS, given_vectors, stamped

if TYPE_CHECKING:  # callers that only pack turns for a shard must not load torch
    from undertow.engine.encoders.base import Float16
    from undertow.engine.tenants.tenant import Tenant


V = TypeVar("V")

# So many turns take longer as single rows than as a record batch.
FEW_TURNS = 16


class TurnColumns(NamedTuple):
    """Turns in order of arrival, one entry a turn in each column; the fields of PackedTurn.

    `vectors` float16 [n, dim]: given ones, a row of zeros for a turn without; None: no turn has one.
    """

    tenants: Sequence[str]
    keys: Sequence[str]
    sessions: Sequence[str]
    timestamps: Sequence[str | None]
    texts: Sequence[str]
    payloads: Sequence[bytes]
    vectors: Float16 | None = None

    @classmethod
    def of(cls, turns: Collection[PackedTurn]) -> Self:
        columns: list[Any] = list(zip(*turns, strict=True)) or [()] * len(TURNS)
        given = any(vector is not None for vector in columns[-1])
        columns[-1] = given_vectors(pa.array(columns[-1], pa.binary())) if given else None
        return cls(*columns)

    @classmethod
    def of_table(cls, turns: pa.Table) -> Self:
        """The turns of a table of TURNS."""
        columns: list[Any] = [column.to_pylist() for column in turns.columns[:-1]]
        columns.append(given_vectors(turns.column("vector")))
        return cls(*columns)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """All turns of the parts, in order."""
        if len(parts) == 1:
            return parts[0]
        columns: list[Any] = [list(chain(*column)) for column in zip(*(p[:-1] for p in parts), strict=True)]
        dims = [part.vectors.shape[1] for part in parts if part.vectors is not None]
        if dims:
            none = [np.zeros((part.size, dims[0]), np.float16) for part in parts]
            given = [n if p.vectors is None else p.vectors for n, p in zip(none, parts, strict=True)]
            columns.append(np.concatenate(given))
        return cls(*columns)

    @property
    def size(self) -> int:
        """The number of turns."""
        return len(self.tenants)

    def part(self, start: int, stop: int) -> Self:
        """The turns from place `start` up to `stop`."""
        columns: list[Any] = [column if column is None else column[start:stop] for column in self]
        return type(self)(*columns)

    def without(self, tenant: str) -> Self:
        """All turns but those of a tenant."""
        kept = [place for place, name in enumerate(self.tenants) if name != tenant]
        vectors = None if self.vectors is None else self.vectors[kept]
        columns: list[Any] = [*(_taken(column, kept) for column in self[:-1]), vectors]
        return type(self)(*columns)


@dataclass(slots=True)
class PlacedTurns:
    """The new turns of a batch, duplicates left out, each with its tenant and place in that tenant's log.

    `places`: their positions in the batch. `owners`, int64 [n]: the tenant of each, as its position in
    `tenants`. `hashes`, int64 [n]: those of their keys. `timestamps`: the effective ones.
    """

    tenants: Sequence[Tenant]
    places: Sequence[int]
    owners: NDArray[np.int64]
    hashes: NDArray[np.int64]
    timestamps: Sequence[str | None]
    texts: Sequence[str]
    sessions: Sequence[str]
    payloads: Sequence[bytes]

    @classmethod
    def plan(cls, turns: TurnColumns, tenants: Sequence[Tenant]) -> Self:
        """Drop duplicates and resolve missing timestamps. Changes nothing.

        A turn without a timestamp inherits the previous one of its session.
        """
        # Imported here, as in `append`: callers that only pack turns must not load numba.
        from undertow.kernels.key_table import may_hold

        count, number = len(turns.keys), {tenant.name: n for n, tenant in enumerate(tenants)}
        owners = np.fromiter(map(number.__getitem__, turns.tenants), np.int64, count)
        hashes = np.fromiter(map(tenants[0].key_hash, turns.keys) if count else (), np.int64, count)
        fresh = ~may_hold([tenant.keys for tenant in tenants], owners, hashes)
        if not fresh.all():
            for place in np.flatnonzero(~fresh).tolist():
                fresh[place] = tenants[owners[place]].seq_of(turns.keys[place]) is None
        # equal keys of one tenant have equal sums; so may others, by chance
        if count > 1 and len(np.unique(hashes + owners)) < count:
            fresh &= _are_first(zip(turns.tenants, turns.keys, strict=True))
        places = fresh.nonzero()[0]
        owners, taken = owners[places], places.tolist()
        own, sessions = _taken(turns.timestamps, taken), _taken(turns.sessions, taken)
        timestamps, payloads = own, _taken(turns.payloads, taken)
        if None in own:
            timestamps = _inherited(own, sessions, owners.tolist(), [t.last_timestamp for t in tenants])
        if timestamps is not own:
            payloads = [
                payload if given == effective else stamped(payload, effective)
                for payload, given, effective in zip(payloads, own, timestamps, strict=True)
            ]
        texts = _taken(turns.texts, taken)
        return cls(tenants, taken, owners, hashes[places], timestamps, texts, sessions, payloads)

    @classmethod
    def single(cls, turn: PackedTurn, tenant: Tenant) -> Self:
        """One turn. It keeps its own timestamp and inherits none."""
        hashes = np.array([tenant.key_hash(turn.dedupe_key)], np.int64)
        columns = ([turn.timestamp], [turn.text], [turn.session_id], [turn.payload])
        return cls([tenant], [0], np.zeros(1, np.int64), hashes, *columns)

    def __len__(self) -> int:
        return len(self.places)

    @property
    def segments(self) -> NDArray[np.int64]:
        """The arena segment of each turn, int64 [n]."""
        return np.array([tenant.turns_segment for tenant in self.tenants], dtype=np.int64)[self.owners]

    def append(self) -> NDArray[np.int64]:
        """Append the turns to the logs of their tenants. Returns their seqs, int64 [n]."""
        from undertow.kernels.key_table import add_keys

        seqs, keys = np.empty(len(self), np.int64), [tenant.keys for tenant in self.tenants]
        alone = len(self.tenants) == 1
        order = np.arange(len(self)) if alone else np.argsort(self.owners, kind="stable")
        counts = np.bincount(self.owners, minlength=len(self.tenants)).tolist()
        for tenant, count, end in zip(self.tenants, counts, accumulate(counts), strict=True):
            if count == 0:
                continue
            own = order[end - count : end]
            seqs[own] = np.arange(tenant.next_seq, tenant.next_seq + count)
            mine = own.tolist()
            tenant.add_turns(
                _taken(self.payloads, mine), _taken(self.sessions, mine), _taken(self.timestamps, mine)
            )
        add_keys(keys, self.owners, self.hashes)
        return seqs

    def rows(
        self, seqs: NDArray[np.int64], vectors: Float16, missing: NDArray[np.bool_] | None
    ) -> tuple[Sequence[str], Sequence[Rows]]:
        """The ids of the turns, and their rows of the journal, whose lsn and epoch are yet to be set.

        `missing`, bool [n]: the turns that have no vector yet; None: all have one. Few turns are single rows:
        they become one record batch with the other rows of their commit.
        """
        of = [self.tenants[owner] for owner in self.owners.tolist()]
        ids = [tenant.turn_id(seq) for tenant, seq in zip(of, seqs.tolist(), strict=True)]
        if len(self) <= FEW_TURNS:
            own = list(vectors) if missing is None else _where_made(vectors, missing)
            turns = zip(of, seqs.tolist(), self.payloads, ids, self.timestamps, own, strict=True)
            return ids, [Row("turn", owner.name, owner.key, *turn) for owner, *turn in turns]
        count, owners = len(self), pa.array(self.owners)
        unset = pa.array(np.zeros(count, np.int64))
        columns = {
            "kind": pa.repeat("turn", count),
            "tenant": pa.array([t.name for t in self.tenants], pa.string()).take(owners),
            "tenant_key": pa.array([t.key for t in self.tenants], pa.string()).take(owners),
            "seq": pa.array(seqs),
            "lsn": unset,
            "epoch": unset,
            "id": pa.array(ids, pa.string()),
            "timestamp": pa.array(self.timestamps, pa.string()),
            "vector": binary_vectors(vectors, missing),
            "payload": pa.array(self.payloads, pa.binary()),
        }
        return ids, [pa.RecordBatch.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)]


def _where_made(vectors: Float16, missing: NDArray[np.bool_]) -> list[Float16 | None]:
    return [None if is_missing else vector for vector, is_missing in zip(vectors, missing, strict=True)]


def _taken(column: Sequence[V], places: Sequence[int]) -> Sequence[V]:
    """The entries of a column at these places, which ascend."""
    if len(places) == len(column):
        return column
    return [column[place] for place in places]


def _are_first(keys: Iterable[tuple[str, str]]) -> NDArray[np.bool_]:
    """Which keys are none of those before them: bool [n]."""
    seen: set[tuple[str, str]] = set()
    first = []
    for key in keys:
        first.append(key not in seen)
        seen.add(key)
    return np.array(first, np.bool_)


def _inherited(
    timestamps: Sequence[str | None],
    sessions: Sequence[str],
    owners: Sequence[int],
    before: Sequence[Mapping[str, str]],
) -> Sequence[str | None]:
    """The effective timestamp of each turn: its own, or the previous one of its session.

    `before`: by owner, the last one of each session.
    """
    if not any(before) and not any(timestamps):
        return timestamps
    latest: dict[tuple[int, str], str] = {}
    effective = []
    for timestamp, session, owner in zip(timestamps, sessions, owners, strict=True):
        if timestamp is None:
            timestamp = latest.get((owner, session)) or before[owner].get(session)
        if timestamp is not None:
            latest[owner, session] = timestamp
        effective.append(timestamp)
    return effective
