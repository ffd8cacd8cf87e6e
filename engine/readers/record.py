"""What a reader yields, and the checks that span several records of one file."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from undertow.engine.base.model import BadInput, Turn, time_key

# sessions whose latest timestamp is remembered; an evicted one is only not warned about
WATCHED_SESSIONS = 4_096


@dataclass(frozen=True, slots=True)
class Record:
    """One input line, row or sample: its turns, or why it was not taken.

    `position`: where to resume after: the line of a JSON-lines file, the row of a Parquet file, the
    sample of a LoCoMo or LongMemEval file, each counted from 1. An error about a file as a whole
    carries the position that reading had reached.
    """

    position: int
    turns: tuple[Turn, ...] = ()
    errors: tuple[BadInput, ...] = ()
    warnings: tuple[str, ...] = ()


# what to do where a file is read, whose good lines are taken all the same
READ_ON = "Correct it; the rest is read as it is."


class BadField(ValueError):
    """One field that cannot be taken; whoever knows the file and the line makes a `BadInput` of it."""

    def __init__(self, field: str | None, reason: str, cure: str = READ_ON) -> None:
        super().__init__(reason)
        self.field, self.reason, self.cure = field, reason, cure

    def within(self, outer: str) -> BadField:
        """The same, for a field that stands inside `outer`."""
        return BadField(f"{outer}.{self.field}" if self.field else outer, self.reason, self.cure)

    def at(self, source: str, line: int | None) -> BadInput:
        return BadInput(source, line, self.field, self.reason, self.cure)


class OrderWatch:
    """Notices timestamps that run backwards within a tenant's session, in bounded memory."""

    def __init__(self, capacity: int = WATCHED_SESSIONS) -> None:
        self._capacity = capacity
        self._latest: OrderedDict[tuple[str, str], datetime] = OrderedDict()

    def check(self, turns: Sequence[Turn]) -> str | None:
        """A warning about the first of `turns` that is earlier than the one before it, if any is.

        Compared with the previous timestamp, not the greatest, so that one stray date far in the
        future is one warning and not one for every turn after it.
        """
        warning = None
        for turn in turns:
            if turn.timestamp is None:
                continue
            key = (turn.tenant, turn.session_id)
            moment = time_key(turn.timestamp)
            before = self._latest.get(key)
            if before is not None and moment < before and warning is None:
                warning = (
                    f"timestamp {turn.timestamp} in session {turn.session_id!r} of tenant "
                    f"{turn.tenant!r} is earlier than the one before it; order of arrival is kept"
                )
            self._latest[key] = moment
            self._latest.move_to_end(key)
        while len(self._latest) > self._capacity:
            self._latest.popitem(last=False)
        return warning
