"""The records that readers yield, and checks across the records of one file."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from undertow.engine.base.model import BadInput, PackedTurn, Turn, time_key
from undertow.engine.storage.row_codec import pack_turn

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

    @classmethod
    def of(cls, record: Record | PackedRecord) -> PackedRecord:
        if isinstance(record, PackedRecord):
            return record
        return cls(record.position, tuple(map(pack_turn, record.turns)), record.errors, record.warnings)


# The default cure: the other lines of the file are read anyway.
READ_ON = "Correct it; the rest is read as it is."


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

    def check(self, turns: Sequence[Turn | PackedTurn]) -> str | None:
        """A warning about the first of `turns` that is earlier than its predecessor, if any.

        The comparison is with the previous timestamp, not the maximum, so that one stray date in the future
        causes a single warning.
        """
        warning = None
        for turn in turns:
            if turn.timestamp is None:
                continue
            key = (turn.tenant, turn.session_id)
            before = self._latest.get(key)
            if before is not None and warning is None and _is_earlier(turn.timestamp, before):
                warning = (
                    f"timestamp {turn.timestamp} in session {turn.session_id!r} of tenant "
                    f"{turn.tenant!r} is earlier than the one before it; order of arrival is kept"
                )
            self._latest[key] = turn.timestamp
            self._latest.move_to_end(key)
        while len(self._latest) > self._capacity:
            self._latest.popitem(last=False)
        return warning


def _is_earlier(timestamp: str, other: str) -> bool:
    if len(timestamp) == len(other) and timestamp[-6:] == other[-6:]:
        return timestamp < other  # of one form and zone: in the order of their texts
    return time_key(timestamp) < time_key(other)
