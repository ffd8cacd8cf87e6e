"""The BM25 index of one tenant: built on its first keyword search, from its live state.

Each tenant has its own index, so that no tenant's texts affect another's scores.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from undertow.engine.base.model import Memory, MemoryKind
from undertow.engine.base.timestamps import day_in_words
from undertow.engine.search.analyzer import Analyzer
from undertow.engine.search.related_words import related
from undertow.engine.storage.row_codec import spoken_in
from undertow.engine.tenants.tenant import Tenant
from undertow.kernels.array_types import Float64s, Int64s
from undertow.kernels.bm25 import Bm25, add_context, place_rows

# The weight of the turns right before and after in a session: an answer often does not repeat the words of
# its question.
NEIGHBOUR_SHARE = 0.3
# The weight of the best turn in the same stretch of the session, at most the turn's own score: people stay
# with a topic for a while, but a turn without any word of the query is not about it.
STRETCH_SHARE = 0.3
# Above the longest session of LoCoMo (22), and small enough for endless sessions.
STRETCH_TURNS = 32

# Turns and memories indexed at a time while other calls wait: some milliseconds, for texts of a paragraph.
SLICE_ROWS = 32

_NONE = -1


class TurnWords:
    """The turns, each with its day, and their order in sessions."""

    def __init__(self) -> None:
        self._index = Bm25()
        self._session_numbers: dict[str, int] = {}
        # By arena row: the number of the session.
        self._session = array("i")
        self._places: Places | None = None
        self._deleted = 0

    def shares(self, tenant: Tenant, query: Sequence[int]) -> TurnShares:
        """The score of each turn, alone and in the context of its session."""
        self.follow(tenant)
        session = np.frombuffer(self._session, np.int32)
        own = self._index.scores(query, len(session), related)
        if self._places is None:
            self._places = places(session)
        return TurnShares(own, in_context(own, self._places), self._places.beside)

    def telling(self, tenant: Tenant, query: str, terms: Sequence[int]) -> str | None:
        """The words of a query, of these terms, that tell turns apart; None if all of its words do, or none.

        A word in more than half of the turns, such as the name of one who speaks in all, tells none apart,
        but has a large part in the query's vector.
        """
        self.follow(tenant)
        common = self._index.common(terms)
        return (common and Analyzer().without(query, common)) or None

    def __len__(self) -> int:
        """The number of indexed arena rows."""
        return len(self._session)

    def follow(self, tenant: Tenant, count: int | None = None) -> None:
        """Follow the log: drop deleted turns, and index at most `count` new ones."""
        known = len(self._session)
        if known < len(tenant.seq_by_row) or tenant.counts["deleted"] != self._deleted:
            self._places = None
        if tenant.counts["deleted"] != self._deleted:
            for row in range(known):
                if not tenant.exists(tenant.seq_by_row[row]):
                    self._index.drop(row)
                    self._session[row] = _NONE
            self._deleted = tenant.counts["deleted"]
        terms = Analyzer()
        stop = None if count is None else known + count
        for row, seq in enumerate(tenant.seq_by_row[known:stop], known):
            self._put(row, tenant.payload(seq), terms)
        if count is not None:
            self._index.sort_in()

    def _put(self, row: int, payload: bytes, terms: Analyzer) -> None:
        if not payload:  # deleted
            self._session.append(_NONE)
            return
        turn = orjson.loads(payload)
        self._index.put(row, terms.of(indexed_text(turn)))
        number = self._session_numbers.setdefault(turn["session"], len(self._session_numbers))
        self._session.append(number)


def indexed_text(turn: Mapping[str, Any]) -> str:
    """The words of a turn (its payload, decoded) that a search can find it by."""
    text, timestamp = spoken_in(turn), turn.get("timestamp")
    return text if timestamp is None else f"{text}\n{day_in_words(timestamp)}"


class TurnShares(NamedTuple):
    """Scores of turns by arena row, float64 [rows]: by their `own` words (Bm25.scores), and `in_context`.

    `beside`: see `Places`.
    """

    own: Float64s
    in_context: Float64s
    beside: Int64s


class Places(NamedTuple):
    """The positions of rows in their sessions. Deleted rows have none, so their neighbours become adjacent.

    `stretch`, int64 [rows]: the number of a row's stretch, -1 for none. `beside`, int64 [rows, 2]: the rows
    before and after each, -1 for none.
    """

    stretch: Int64s
    beside: Int64s


def places(session: NDArray[np.int32]) -> Places:
    """The positions of rows. session [rows]: the number of each row's session, below `rows`; -1 for none."""
    found = Places(np.empty(len(session), np.int64), np.empty((len(session), 2), np.int64))
    place_rows(session, STRETCH_TURNS, *found)
    return found


def in_context(
    own: Float64s,
    places: Places,
    *,
    neighbour_share: float = NEIGHBOUR_SHARE,
    stretch_share: float = STRETCH_SHARE,
) -> Float64s:
    """float64 [rows]: each turn's own score, plus parts of its neighbours' and of its stretch's best."""
    shares = own.copy()
    add_context(own, *places, neighbour_share, stretch_share, shares)
    return shares


class MemoryWords:
    """The episodes, or the facts.

    Each word counts once per memory: its frequency only reflects how many turns were retold. Otherwise an
    episode of six turns would outrank the very turn that was asked for.
    """

    def __init__(self) -> None:
        self._index = Bm25()
        self._seen: list[Memory | None] = []

    def __len__(self) -> int:
        """The number of indexed arena rows."""
        return len(self._seen)

    def follow(self, rows: Sequence[Memory | None], count: int) -> None:
        """Index at most `count` new memories."""
        terms = Analyzer()
        for memory in rows[len(self._seen) : len(self._seen) + count]:
            if memory is not None:
                self._index.put(len(self._seen), set(terms.of(memory.indexed)))
            self._seen.append(memory)
        self._index.sort_in()

    def shares(self, rows: Sequence[Memory | None], query: Sequence[int]) -> Float64s:
        """float64 [rows]: Bm25.scores of each memory. A new version replaces the old one."""
        if rows != self._seen:
            terms = Analyzer()
            for row, (memory, seen) in enumerate(zip_longest(rows, self._seen)):
                if memory is None:
                    self._index.drop(row)
                elif memory is not seen:
                    self._index.put(row, set(terms.of(memory.indexed)))
            self._seen = list(rows)
        return self._index.scores(query, len(rows), related)


class KeywordIndex:
    """The keyword index over all tiers of a tenant.

    A search indexes missing rows itself. If other calls would wait for that, they are indexed before, slice
    by slice, while the tenant changes. The scores are bit-identical either way.
    """

    def __init__(self) -> None:
        self.turns = TurnWords()
        self.memories: dict[MemoryKind, MemoryWords] = {"episode": MemoryWords(), "fact": MemoryWords()}
        # The tenant's size at the last slice, while slices are being indexed.
        self._rows_before: int | None = None

    def __len__(self) -> int:
        """The number of indexed arena rows of all tiers."""
        return len(self.turns) + sum(map(len, self.memories.values()))

    def is_close(self, tenant: Tenant) -> bool:
        """Whether a search has to index at most a slice."""
        return _rows_of(tenant) - len(self) <= self._slice_of(tenant)

    def index_slice(self, tenant: Tenant) -> None:
        """Index a slice of the missing rows."""
        goal = len(self) + self._slice_of(tenant)
        self._rows_before = _rows_of(tenant)
        self.turns.follow(tenant, goal - len(self))
        for kind, words in self.memories.items():
            words.follow(tenant.tiers[kind].rows, goal - len(self))

    def end_slices(self) -> None:
        """A search indexes the rest now."""
        self._rows_before = None

    def _slice_of(self, tenant: Tenant) -> int:
        """A slice plus the rows that arrived since the last one, so that slices always catch up."""
        before = self._rows_before
        return SLICE_ROWS + (0 if before is None else _rows_of(tenant) - before)


def _rows_of(tenant: Tenant) -> int:
    return len(tenant.seq_by_row) + sum([len(tier.rows) for tier in tenant.tiers.values()])
