"""The records that readers yield, and checks across the records of one file."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from undertow.engine.base.model import BadInput, PackedTurn, Turn, time_key
from undertow.engine.storage.row_codec import turns_table, unpack, unpack_turn

# Sessions whose latest timestamp is kept. Evicted sessions get no warnings.
WATCHED_SESSIONS = 4_096


@dataclass(frozen=True, slots=True)
class Record:
    """One input line, row or sample: its turns, or its errors.

    `position`: the line of a JSON-lines file, the row of a Parquet file, or the sample of a LoCoMo or
    LongMemEval file, counted from 1; reading can resume after it. An error of the whole file has the position
    reached so far.
    """

    position: int
    turns: tuple[Turn, ...] = ()
    errors: tuple[BadInput, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PackedRecord:
    """A record whose turns are in the form in which they are stored."""

    position: int
    turns: tuple[PackedTurn, ...] = ()
    errors: tuple[BadInput, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TurnBlock:
    """Consecutive records of one file, their turns as columns.

    `position`: that of the last record. `turns`: a table of TURNS, in order. `positions` int64 [turns]: the
    record of each turn, ascending. `problems`: the records with errors or warnings, without their turns.
    """

    position: int
    turns: pa.Table
    positions: NDArray[np.int64]
    problems: tuple[PackedRecord, ...] = ()

    @classmethod
    def of(cls, records: Sequence[PackedRecord]) -> TurnBlock:
        """The block of some records."""
        positions = np.array([r.position for r in records for _ in r.turns], np.int64)
        turns = turns_table(turn for r in records for turn in r.turns)
        problems = tuple(replace(r, turns=()) for r in records if r.errors or r.warnings)
        return cls(records[-1].position if records else 0, turns, positions, problems)

    @classmethod
    def joined(cls, blocks: Sequence[TurnBlock]) -> TurnBlock:
        """One block of several, in their order."""
        return cls(
            blocks[-1].position,
            pa.concat_tables([block.turns for block in blocks]),
            np.concatenate([block.positions for block in blocks]),
            tuple(record for block in blocks for record in block.problems),
        )

    def records(self) -> Iterator[Record]:
        """Its records with turns, errors or warnings, one by one."""
        turns = map(PackedRecord, self.positions.tolist(), zip(unpack(self.turns), strict=True))
        place = attrgetter("position")
        for position, parts in groupby(sorted([*turns, *self.problems], key=place), place):
            found = list(parts)
            errors = tuple(error for record in found for error in record.errors)
            warnings = tuple(warning for record in found for warning in record.warnings)
            yield Record(position, tuple(unpack_turn(t) for r in found for t in r.turns), errors, warnings)

    def before(self, position: int) -> int:
        """How many of the turns are of records up to a position."""
        return int(np.searchsorted(self.positions, position, side="right"))

    def after(self, position: int) -> TurnBlock:
        """The records behind a position."""
        start = self.before(position)
        problems = tuple(record for record in self.problems if record.position > position)
        return TurnBlock(self.position, self.turns.slice(start), self.positions[start:], problems)


# The default cure: the other lines of the file are read anyway.
READ_ON = "Correct it; nothing of this record is stored."


class BadField(ValueError):
    """An invalid field. The caller adds file and line to make a `BadInput`."""

    def __init__(self, field: str | None, reason: str, cure: str = READ_ON) -> None:
        super().__init__(reason)
        self.field, self.reason, self.cure = field, reason, cure

    def within(self, outer: str) -> BadField:
        """The same error for a field within `outer`."""
        return BadField(f"{outer}.{self.field}" if self.field else outer, self.reason, self.cure)

    def at(self, source: str, line: int | None) -> BadInput:
        return BadInput(source, line, self.field, self.reason, self.cure)


class OrderWatch:
    """Detects decreasing timestamps within a tenant's session, in bounded memory."""

    def __init__(self, capacity: int = WATCHED_SESSIONS) -> None:
        self._capacity = capacity
        self._latest: OrderedDict[tuple[str, str], str] = OrderedDict()

    def check_block(self, turns: pa.Table, positions: NDArray[np.int64]) -> Iterator[tuple[int, str]]:
        """The records that have a turn which is earlier than the one before it in its session.

        `positions` int64 [turns]: the record of each turn, ascending. Yields the position of each such record
        with a warning. The comparison is with the previous timestamp, not the maximum, so that one stray date
        in the future causes a single warning.
        """
        last = -1
        for n in sorted(self._late_turns(turns)):
            if positions[n] != last:
                last = int(positions[n])
                yield last, _late(*(turns.column(c)[n].as_py() for c in ("timestamp", "session", "tenant")))
        self._forget()

    def _late_turns(self, turns: pa.Table) -> Iterator[int]:
        """The turns that are earlier than their predecessors, in no order."""
        tenants, sessions, times = (
            turns.column(n).combine_chunks() for n in ("tenant", "session", "timestamp")
        )
        tenants, sessions = tenants.dictionary_encode(), sessions.dictionary_encode()
        groups = tenants.indices.to_numpy() * np.int64(len(sessions.dictionary)) + sessions.indices.to_numpy()
        dated = np.flatnonzero(times.is_valid().to_numpy(zero_copy_only=False))
        if not len(dated):
            return
        order = dated[np.argsort(groups[dated], kind="stable")]
        times, groups = times.take(pa.array(order)), groups[order]
        starts = np.flatnonzero(np.diff(groups, prepend=-1))
        ends = np.append(starts[1:], len(groups)) - 1
        owners, chats = np.divmod(groups[starts], len(sessions.dictionary))
        keys = zip(
            tenants.dictionary.take(owners).to_pylist(),
            sessions.dictionary.take(chats).to_pylist(),
            strict=True,
        )
        firsts, lasts = times.take(starts).to_pylist(), times.take(ends).to_pylist()
        for place, key, first, last in zip(order[starts].tolist(), keys, firsts, lasts, strict=True):
            before = self._follow(key, last)
            if before is not None and _is_earlier(first, before):
                yield place
        for n in _maybe_earlier(times, groups).tolist():
            if _is_earlier(times[n].as_py(), times[n - 1].as_py()):
                yield int(order[n])

    def _follow(self, key: tuple[str, str], last: str) -> str | None:
        """Note the last timestamp of a session. Returns the one before, if it is known."""
        before = self._latest.get(key)
        self._latest[key] = last
        self._latest.move_to_end(key)
        return before

    def _forget(self) -> None:
        while len(self._latest) > self._capacity:
            self._latest.popitem(last=False)


def _late(timestamp: str, session: str, tenant: str) -> str:
    return (
        f"timestamp {timestamp} in session {session!r} of tenant {tenant!r} is earlier than the one before "
        "it; order of arrival is kept"
    )


def _maybe_earlier(times: Any, groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """The places of timestamps that may be earlier than the ones before them in their group."""
    later, earlier = times[1:], times[:-1]
    zones = [pc.utf8_slice_codeunits(part, -6) for part in (later, earlier)]
    length = pc.binary_length(later)
    zoneless = pc.less(length, len("2026-03-01T09:00:00+00:00"))
    alike = pc.and_(pc.equal(length, pc.binary_length(earlier)), pc.or_(zoneless, pc.equal(*zones)))
    ordered = pc.and_(alike, pc.greater_equal(later, earlier)).to_numpy(zero_copy_only=False)
    return 1 + np.flatnonzero((groups[1:] == groups[:-1]) & ~ordered)


def _is_earlier(timestamp: str, other: str) -> bool:
    if len(timestamp) == len(other) and timestamp[-6:] == other[-6:]:
        return timestamp < other  # of one form and zone: in the order of their texts
    return time_key(timestamp) < time_key(other)
