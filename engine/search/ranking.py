"""Search over the three tiers by vectors and keywords, and the answering prompt (RecMem, section 3.5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from undertow.engine.base.model import AnswerStyle, Memory, time_key
from undertow.engine.base.results import Explanation, Hit, SearchResult
from undertow.engine.base.timestamps import in_words
from undertow.engine.policies.base import PromptBudget, PromptTooLong
from undertow.engine.search.analyzer import terms_of
from undertow.engine.search.keyword_index import KeywordIndex
from undertow.engine.search.metadata_index import MetadataIndex
from undertow.engine.search.score_parts import PartsOfScores
from undertow.engine.search.time_index import TimeIndex
from undertow.engine.search.where import Where
from undertow.engine.storage.row_codec import said_in
from undertow.engine.tenants.tenant import Tenant
from undertow.kernels.arena.arena import Arena
from undertow.kernels.array_types import Float64s, Int64s
from undertow.kernels.gate.gate import Gate
from undertow.kernels.topk.hybrid import hybrid_top_k
from undertow.prompts.builders import Prompt, ShownMemory, answer_prompt

if TYPE_CHECKING:  # only very large tenants need torch for an index
    from undertow.kernels.topk.ivf import IvfIndex, IvfReport

# A selection of a segment's rows: bool [rows].
Rows = NDArray[np.bool_]

EVERYWHERE = Where()

# The weight of the words that tell turns apart in a query's vector; docs/decisions/0023 has the figures.
TELLING_SHARE = 0.7

# A search of more turns and memories takes over five milliseconds: without filters, and with them, which
# look at each memory.
QUICK_ROWS, QUICK_FILTERED = 20_000, 4_000
# Rows whose fields are indexed at a time for a filter: less than a millisecond.
FILTER_ROWS = 128


@dataclass(frozen=True, slots=True)
class Window:
    """Time filter with inclusive ends; a date alone means the whole day.

    If either end is set, undated items do not match.
    """

    since: str | None = None
    until: str | None = None

    def allows(self, timestamp: str | None) -> bool:
        if self.open:
            return True
        if timestamp is None:
            return False
        start, end = self.ends
        return start <= time_key(timestamp) <= end

    @property
    def ends(self) -> tuple[datetime, datetime]:
        """Start and end, both inclusive."""
        return (
            time_key(self.since) if self.since else datetime.min,
            _end(self.until) if self.until else datetime.max,
        )

    @property
    def open(self) -> bool:
        return self.since is None and self.until is None


ANY_TIME = Window()


def _end(until: str) -> datetime:
    moment = time_key(until)
    if len(until) > len("2026-01-31"):
        return moment
    return moment.replace(hour=23, minute=59, second=59, microsecond=999_999)


@dataclass(frozen=True, slots=True)
class Ranked:
    """What a search has found: hits, and of turns score and seq, nearest first."""

    episodes: tuple[Hit, ...]
    facts: tuple[Hit, ...]
    turns: Sequence[tuple[float, int]]
    turn_recall: float
    words_only: bool = False
    explanation: Explanation | None = None

    def result(self, turns: Sequence[Hit]) -> SearchResult:
        """With the hits of its turns, once they are read."""
        return SearchResult(
            self.episodes,
            self.facts,
            tuple(turns),
            self.turn_recall,
            words_only=self.words_only,
            explanation=self.explanation,
        )

    def by_words(self) -> Ranked:
        """What was found by words alone: under a query vector of zeros it is what has a score at all."""
        episodes, facts = (tuple(h for h in hits if h.score > 0) for hits in (self.episodes, self.facts))
        turns = [found for found in self.turns if found[0] > 0]
        return replace(self, episodes=episodes, facts=facts, turns=turns, turn_recall=1.0, words_only=True)


@dataclass(frozen=True, slots=True)
class Query:
    """A query's vector, float16 [1, dim], and its terms. Without terms only the vector counts."""

    vector: NDArray[np.float16]
    terms: Sequence[int]


class Ranker:
    """Search over the tiers of any tenant of one arena.

    Searches are exact with one exception: a tenant with more than `ivf_rows` turns has an index for them. It
    is used unless a filter on time or metadata is set, or consolidated turns are excluded: the lists that an
    index opens might contain no matching turn.
    """

    def __init__(
        self, arena: Arena, gate: Gate, ivf_rows: int, words_rows: int, *, retain_consolidated: bool = True
    ) -> None:
        self._arena = arena
        self._gate = gate
        self._ivf_rows = ivf_rows
        self._words_rows = min(words_rows, ivf_rows)
        self._retain_consolidated = retain_consolidated
        # Weak keys: an index is freed with its tenant's live state, when that is evicted or erased.
        self._indexes: WeakKeyDictionary[Tenant, IvfIndex] = WeakKeyDictionary()
        self._metadata: WeakKeyDictionary[Tenant, MetadataIndex] = WeakKeyDictionary()
        self._times: WeakKeyDictionary[Tenant, TimeIndex] = WeakKeyDictionary()
        self._keyword_indexes: WeakKeyDictionary[Tenant, KeywordIndex] = WeakKeyDictionary()

    def rank(
        self,
        tenant: Tenant,
        query: NDArray[np.float16],
        *,
        k_sub: int,
        k_epi: int,
        k_sem: int,
        window: Window,
        where: Where = EVERYWHERE,
        terms: Sequence[int] = (),
        consolidated: bool = True,
    ) -> Ranked:
        """The nearest k_sub turns, k_epi episodes and k_sem facts to `query`, float16 [dim].

        By cosine; with `terms`, those of the query, by cosine and keywords (`raised`).
        `consolidated`: whether turns that were consolidated into memories may be found.
        Filters apply before the ranking, so that each tier returns k hits if it has them. An episode or fact
        passes `where` if one of its source turns does; its timestamp is its own.
        A tenant's first search that needs an index builds it. The keyword index can be built before, see
        `prepare`.
        """
        every_turn = consolidated and self._retain_consolidated
        anywhere = window.open and where.open and every_turn
        index = self._index_of(tenant) if anywhere else None
        passing = self.passing(tenant, where)
        asked = Query(query.reshape(1, -1), terms)
        self._keyword_index_of(tenant).end_slices()
        return Ranked(
            tuple(self._memories(tenant, "episode", asked, k_epi, window, passing)),
            tuple(self._memories(tenant, "fact", asked, k_sem, window, passing)),
            self._turns(tenant, asked, k_sub, window, passing, index, every_turn=every_turn),
            1.0 if index is None else index.recall(k_sub),
        )

    def terms(self, tenant: Tenant, text: str) -> Sequence[int]:
        """The terms of a query; none for a tenant that is searched by cosine alone."""
        return terms_of(text) if self.by_words(tenant) else ()

    def telling_words(self, tenant: Tenant, text: str, terms: Sequence[int]) -> str | None:
        """See TurnWords.telling."""
        if not terms:
            return None
        index = self._keyword_index_of(tenant)
        index.end_slices()
        return index.turns.telling(tenant, text, terms)

    def parts_of_scores(self, tenant: Tenant, query: NDArray[np.float16], words: str) -> PartsOfScores:
        """What the scores of `rank` are made of, for the same query and words."""
        index, words = self._keyword_index_of(tenant), words if self.by_words(tenant) else ""
        return PartsOfScores(self._arena, self._gate, tenant, index, query.reshape(1, -1), words)

    def is_quick(self, tenant: Tenant, *, filters: bool) -> bool:
        """Whether a search takes some milliseconds at most, once it `is_ready`."""
        most = QUICK_ROWS if self._retain_consolidated and not filters else QUICK_FILTERED
        return size_of(tenant) <= most

    def is_ready(self, tenant: Tenant, where: Where, window: Window, *, words: bool) -> bool:
        """Whether a search can run at once: the indexes that it needs lack little or nothing."""
        if words and self.by_words(tenant) and not self._keyword_index_of(tenant).is_close(tenant):
            return False
        return all(
            len(tenant.seq_by_row) - rows <= FILTER_ROWS for rows in self._filtered(tenant, where, window)
        )

    def prepare(self, tenant: Tenant, where: Where, window: Window, *, words: bool) -> int:
        """Add a slice of rows to the first index that lacks many. Returns how many rows all of them have."""
        keyword_index = self._keyword_index_of(tenant)
        by_words = words and self.by_words(tenant)
        if by_words and not keyword_index.is_close(tenant):
            keyword_index.index_slice(tenant)
        elif not where.open and len(tenant.seq_by_row) - self._metadata_of(tenant).rows(where) > FILTER_ROWS:
            self._metadata_of(tenant).index_slice(tenant, where, FILTER_ROWS)
        else:
            self._times_of(tenant).follow(tenant, FILTER_ROWS)
        return (len(keyword_index) if by_words else 0) + sum(self._filtered(tenant, where, window))

    def _filtered(self, tenant: Tenant, where: Where, window: Window) -> list[int]:
        """The number of rows of each index that the filters need."""
        rows = [] if where.open else [self._metadata_of(tenant).rows(where)]
        return rows if window.open else [*rows, len(self._times_of(tenant))]

    def by_words(self, tenant: Tenant) -> bool:
        """Whether a tenant is searched by keywords too, under a hybrid search: a small one."""
        return size_of(tenant) <= self._words_rows

    def passing(self, tenant: Tenant, where: Where) -> Rows | None:
        """Which of the tenant's turns match the metadata filter, bool [turns] by arena row; None: all."""
        if where.open:
            return None
        return self._metadata_of(tenant).passing(tenant, where)

    def within(self, tenant: Tenant, window: Window) -> Rows | None:
        """Which of the tenant's turns match the time filter, bool [turns] by arena row; None: all."""
        if window.open:
            return None
        return self._times_of(tenant).within(tenant, *window.ends)

    def indexes(self) -> dict[str, IvfReport]:
        """Method, size and measured recall of each loaded index, by tenant."""
        return {tenant.name: index.report for tenant, index in self._indexes.items()}

    def _index_of(self, tenant: Tenant) -> IvfIndex | None:
        """The tenant's index, up to date; None if the tenant is small enough for exact search."""
        if live_turns(tenant) <= self._ivf_rows or tenant.awaiting:
            self._indexes.pop(tenant, None)  # vectors that come later would be in the wrong lists
            return None
        index = self._indexes.get(tenant)
        if index is None:
            from undertow.kernels.topk.ivf import IvfIndex

            index = self._indexes[tenant] = IvfIndex(self._arena, tenant.turns_segment, self._gate)
        else:
            index.refresh()
        return index

    def _turns(
        self,
        tenant: Tenant,
        query: Query,
        k: int,
        window: Window,
        passing: Rows | None,
        index: IvfIndex | None,
        *,
        every_turn: bool,
    ) -> list[tuple[float, int]]:
        """Score and seq of the best turns."""
        allowed = passing
        if (within := self.within(tenant, window)) is not None:
            allowed = within if passing is None else within & passing
        if not every_turn:
            kept = tenant.not_consolidated()
            allowed = kept if allowed is None else allowed & kept
        shares = beside = None
        if query.terms:
            _, shares, beside = self._keyword_index_of(tenant).turns.shares(tenant, query.terms)
        best = self._best(tenant.turns_segment, query, k, allowed, shares, index, beside)
        return [(score, tenant.seq_by_row[row]) for score, row in best]

    def _memories(
        self,
        tenant: Tenant,
        kind: Literal["episode", "fact"],
        query: Query,
        k: int,
        window: Window,
        passing: Rows | None,
    ) -> list[Hit]:
        tier = tenant.tiers[kind]
        if not tier.rows:
            return []
        allowed = None
        if not window.open or passing is not None or tenant.counts["deleted"] or tenant.may_change:
            allowed = np.array(
                [
                    m is not None and shows(tenant, m, window) and rests_on(tenant, m, passing)
                    for m in tier.rows
                ],
                dtype=bool,
            )
        words = self._keyword_index_of(tenant).memories[kind]
        shares = words.shares(tier.rows, query.terms) if query.terms else None
        found: list[tuple[float, Memory]] = [
            (score, memory)
            for score, row in self._best(tier.segment, query, k, allowed, shares)
            if (memory := tier.rows[row]) is not None
        ]
        return [Hit(m.id, kind, m.text, score, m.timestamp, m.source_seqs) for score, m in found]

    def _metadata_of(self, tenant: Tenant) -> MetadataIndex:
        return self._metadata.setdefault(tenant, MetadataIndex())

    def _times_of(self, tenant: Tenant) -> TimeIndex:
        return self._times.setdefault(tenant, TimeIndex())

    def _keyword_index_of(self, tenant: Tenant) -> KeywordIndex:
        if (index := self._keyword_indexes.get(tenant)) is None:
            index = self._keyword_indexes[tenant] = KeywordIndex()
        return index

    def _best(
        self,
        segment: int,
        query: Query,
        k: int,
        allowed: Rows | None,
        shares: Float64s | None,
        index: IvfIndex | None = None,
        beside: Int64s | None = None,
    ) -> list[tuple[float, int]]:
        """The k best (score, row), best first, ties by row. `shares`, `beside`: see hybrid_top_k."""
        if index is None or shares is not None:
            return hybrid_top_k(self._arena, segment, query.vector, k, allowed, shares, self._gate, beside)
        if k == 0:
            return []
        scores, rows = index.search(query.vector, k)
        return [(s, r) for s, r in zip(scores[0].tolist(), rows[0].tolist(), strict=True) if r >= 0]


def blended(query: NDArray[np.float16], telling: NDArray[np.float16]) -> NDArray[np.float16]:
    """The vector of a query, float16 [dim], with that of its telling words: of length 1 as they are."""
    mean = (1 - TELLING_SHARE) * query.astype(np.float64) + TELLING_SHARE * telling.astype(np.float64)
    length = float(np.sqrt(np.square(mean).sum()))
    return query if length == 0.0 else (mean / length).astype(np.float16)


def turn_hits(tenant: Tenant, found: Sequence[tuple[float, int]]) -> list[Hit]:
    """The hits of turns, given by score and seq; those that were deleted since are left out."""
    hits = []
    for score, seq in found:
        if payload := tenant.payload(seq):
            text, timestamp = said_in(payload)
            hits.append(Hit(tenant.turn_id(seq), "turn", text, score, timestamp, (seq,)))
    return hits


def live_turns(tenant: Tenant) -> int:
    return len(tenant.seq_by_row) - tenant.counts["deleted"]


def size_of(tenant: Tenant) -> int:
    """The number of turns and memories."""
    return live_turns(tenant) + sum([len(tier.rows) for tier in tenant.tiers.values()])


def shows(tenant: Tenant, memory: Memory, window: Window) -> bool:
    """Whether a memory may be found or listed.

    A deleted turn hides what may contain its words until that is remade: an episode, and the facts written
    with the episode in the prompt. A user's deletion or update hides a memory until the cursor reaches the
    record.
    """
    return (
        window.allows(memory.timestamp)
        and not tenant.is_changing(memory)
        and _is_whole(tenant, memory)
        and ((episode := tenant.episode_of(memory)) is None or _is_whole(tenant, episode))
    )


def _is_whole(tenant: Tenant, memory: Memory) -> bool:
    return all(tenant.exists(seq) for seq in memory.source_seqs) and all(
        tenant.exists(seq) for seq in memory.shown_seqs
    )


def rests_on(tenant: Tenant, memory: Memory | Hit, passing: Rows | None) -> bool:
    """Whether one of the memory's source turns passes; None: all turns pass."""
    return passing is None or any(passing[tenant.row_by_seq[seq]] for seq in memory.source_seqs)


def question_prompt(
    question: str, found: SearchResult, as_of: str | None, budget: PromptBudget, style: AnswerStyle
) -> Prompt:
    """The answering prompt over a search result, each tier sorted by relevance, each line dated.

    If not everything fits into the context, it has the most relevant items that fit, and quotes of episodes
    last. PromptTooLong if the question alone does not fit.
    """

    def prompt_of(kept: Sequence[Hit]) -> Prompt:
        episodes, facts, turns = (
            shown_lines([hit for hit in tier if hit in kept])
            for tier in (found.episodes, found.facts, found.turns)
        )
        shown = (episodes, facts, turns)
        return answer_prompt(question, *shown, as_of and in_words(as_of), order=found.order, style=style)

    ranked = sorted(found.ranked(), key=lambda hit: hit.kind == "turn" and hit.source_seqs[0] in found.quoted)
    prompt = prompt_of(budget.select_fitting(ranked, prompt_of))
    if not budget.fits(prompt):
        raise PromptTooLong(f"the question alone needs about {prompt.size_tokens} tokens")
    return prompt


def shown_lines(hits: Sequence[Hit]) -> list[ShownMemory]:
    # Dates as people write them: answers repeat the form that they are shown.
    return [
        ShownMemory(n, hit.timestamp and in_words(hit.timestamp), hit.memory) for n, hit in enumerate(hits, 1)
    ]
