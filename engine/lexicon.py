"""One tenant's texts as BM25 knows them: made when first searched by words, from and beside its live state.

A tenant has indexes of its own, so that nobody's words weigh in another's scores.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
import orjson
from numpy.typing import NDArray

from undertow.engine.model import Memory, MemoryKind, spoken
from undertow.engine.records import messages_of
from undertow.engine.tenants import Tenant
from undertow.engine.terms import Terms, day_in_words
from undertow.kernels.bm25 import Bm25, Float64s

# what the turns right before and after in a session count for beside a turn's own words: an answer often
# does not repeat the words of what it answers
NEIGHBOUR_SHARE = 0.3

_NONE = -1
Int64s = NDArray[np.int64]


class TurnWords:
    """The turns, each with its day, and who follows whom in a session."""

    def __init__(self) -> None:
        self._index = Bm25()
        self._session_numbers: dict[str, int] = {}
        # by arena row
        self._session = array("i")
        self._pairs: tuple[Int64s, Int64s] | None = None
        self._deleted = 0

    def shares(self, tenant: Tenant, query: Sequence[int]) -> Float64s:
        """[rows]: Bm25.scores of each turn, and a part of its neighbours'."""
        self._follow(tenant)
        own = self._index.scores(query, len(self._session))
        if self._pairs is None:
            self._pairs = neighbours(np.frombuffer(self._session, np.int32))
        before, after = self._pairs
        shares = own.copy()
        shares[after] += NEIGHBOUR_SHARE * own[before]
        shares[before] += NEIGHBOUR_SHARE * own[after]
        return shares

    def _follow(self, tenant: Tenant) -> None:
        known = len(self._session)
        if known < len(tenant.seq_by_row) or tenant.counts["deleted"] != self._deleted:
            self._pairs = None
        if tenant.counts["deleted"] != self._deleted:
            for row in range(known):
                if not tenant.exists(tenant.seq_by_row[row]):
                    self._index.drop(row)
                    self._session[row] = _NONE
            self._deleted = tenant.counts["deleted"]
        terms = Terms()
        for row, seq in enumerate(tenant.seq_by_row[known:], known):
            self._take_in(row, tenant.records[seq], terms)

    def _take_in(self, row: int, record: object, terms: Terms) -> None:
        if not isinstance(record, bytes):
            self._session.append(_NONE)
            return
        turn = orjson.loads(record)
        text = spoken(messages_of(turn))
        if (timestamp := turn.get("timestamp")) is not None:
            text = f"{text}\n{day_in_words(timestamp)}"
        self._index.put(row, terms.of(text))
        number = self._session_numbers.setdefault(turn["session"], len(self._session_numbers))
        self._session.append(number)


def neighbours(session: NDArray[np.int32]) -> tuple[Int64s, Int64s]:
    """Pairs of rows that follow each other in one session: (the earlier ones, the later ones).

    Deleted turns have no session, so those around them are neighbours.
    """
    order = np.argsort(session, kind="stable")
    order = order[session[order] != _NONE]
    follows = session[order[1:]] == session[order[:-1]]
    return order[:-1][follows], order[1:][follows]


class MemoryWords:
    """The episodes or the facts.

    Each word counts once: how often a memory repeats it says how many turns are retold there. Else an
    episode of six turns would outdo the very turn that was asked for.
    """

    def __init__(self) -> None:
        self._index = Bm25()
        self._seen: list[Memory | None] = []

    def shares(self, rows: Sequence[Memory | None], query: Sequence[int]) -> Float64s:
        """[rows]: Bm25.scores of each memory. A new version counts in the place of the old one."""
        if rows != self._seen:
            terms = Terms()
            for row, (memory, seen) in enumerate(zip_longest(rows, self._seen)):
                if memory is None:
                    self._index.drop(row)
                elif memory is not seen:
                    self._index.put(row, set(terms.of(memory.text)))
            self._seen = list(rows)
        return self._index.scores(query, len(rows))


class Lexicon:
    """All of a tenant's tiers."""

    def __init__(self) -> None:
        self.turns = TurnWords()
        self.memories: dict[MemoryKind, MemoryWords] = {"episode": MemoryWords(), "fact": MemoryWords()}
