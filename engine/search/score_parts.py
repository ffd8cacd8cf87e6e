"""What the scores of single turns, episodes and facts are made of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import orjson
from numpy.typing import NDArray

from undertow.engine.base.results import HitKind, ScoreParts
from undertow.engine.search.analyzer import Analyzer
from undertow.engine.search.keyword_index import NEIGHBOUR_SHARE, KeywordIndex, indexed_text
from undertow.engine.search.related_words import related
from undertow.engine.tenants.tenant import Tenant
from undertow.kernels.arena.arena import Arena
from undertow.kernels.gate.gate import Gate
from undertow.kernels.topk.hybrid import hybrid_top_k

Vector = NDArray[np.float16]


class PartsOfScores:
    """Reads the parts of a query's scores for items of one tenant.

    vector: float16 [1, dim]. `words`: the query's text, "" where only the vector counts.
    """

    def __init__(
        self, arena: Arena, gate: Gate, tenant: Tenant, index: KeywordIndex, vector: Vector, words: str
    ) -> None:
        self._arena, self._gate, self._tenant, self._index = arena, gate, tenant, index
        self._vector = vector
        self._analyzer = Analyzer()
        self._asked = self._analyzer.by_term(words)
        # by term, the words that it stands for: the number of each, and its place among the related terms of
        # that word; a word's own term has place -1
        self._stands_for: dict[int, list[tuple[int, int]]] = {t: [(n, -1)] for n, t in enumerate(self._asked)}
        near, closeness = related(np.fromiter(self._asked, np.uint32))
        for n, place in np.argwhere(closeness > 0).tolist():
            self._stands_for.setdefault(int(near[n, place]), []).append((n, place))

    def of(self, kind: HitKind, rows: Sequence[int]) -> list[ScoreParts]:
        """The parts of each of these arena rows of a kind."""
        if not rows:
            return []
        return self._of_turns(rows) if kind == "turn" else self._of_memories(kind, rows)

    def _of_turns(self, rows: Sequence[int]) -> list[ScoreParts]:
        tenant, segment = self._tenant, self._tenant.turns_segment
        if not self._asked:
            return [ScoreParts(cosine) for cosine in self._cosines(segment, rows).values()]
        own, in_context, beside = self._index.turns.shares(tenant, list(self._asked))
        cosine_of = self._cosines(segment, [*rows, *np.unique(beside[list(rows)]).tolist()])
        parts = []
        for row in rows:
            around = [at for at in beside[row].tolist() if at >= 0]
            neighbour_words = NEIGHBOUR_SHARE * float(own[around].sum())
            parts.append(
                ScoreParts(
                    cosine_of[row],
                    max((cosine_of[at] for at in around), default=None),
                    float(own[row]),
                    neighbour_words,
                    max(0.0, float(in_context[row] - own[row]) - neighbour_words),
                    self._matched(indexed_text(orjson.loads(tenant.payload(tenant.seq_by_row[row])))),
                )
            )
        return parts

    def _of_memories(self, kind: HitKind, rows: Sequence[int]) -> list[ScoreParts]:
        assert kind != "turn"
        tier = self._tenant.tiers[kind]
        cosine_of = self._cosines(tier.segment, rows)
        if not self._asked:
            return [ScoreParts(cosine_of[row]) for row in rows]
        shares = self._index.memories[kind].shares(tier.rows, list(self._asked))
        return [
            ScoreParts(cosine_of[row], words=float(shares[row]), matched=self._matched(memory.indexed))
            for row in rows
            if (memory := tier.rows[row]) is not None
        ]

    def _cosines(self, segment: int, rows: Sequence[int]) -> dict[int, float]:
        """The exact cosine of each row, in the order of `rows`."""
        wanted = np.zeros(len(self._arena.vectors(segment)), bool)
        wanted[[row for row in rows if row >= 0]] = True
        found = hybrid_top_k(self._arena, segment, self._vector, len(rows), wanted, scan=self._gate)
        cosine_of = {row: score for score, row in found}
        # a row whose vector is awaited has none
        return {row: cosine_of.get(row, 0.0) for row in rows if row >= 0}

    def _matched(self, text: str) -> tuple[str, ...]:
        """The words of the query that a text has, or a related word of."""
        held = self._analyzer.by_term(text)
        nearest: dict[int, tuple[int, str]] = {}
        for term, word in held.items():
            for n, place in self._stands_for.get(term, ()):
                nearest[n] = min(nearest.get(n, (place, word)), (place, word))
        asked = list(self._asked.values())
        return tuple(
            asked[n] if place < 0 else f"{asked[n]} ~ {word}" for n, (place, word) in sorted(nearest.items())
        )
