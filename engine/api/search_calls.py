"""The engine's queries: search, and reading what is stored. MemoryApi documents them."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson

from undertow.engine.api.views.reports import Reports
from undertow.engine.base.config import Settings
from undertow.engine.base.limits import MAX_QUERY_CHARS
from undertow.engine.base.model import Memory, unknown_memory
from undertow.engine.base.pacing import Pacing
from undertow.engine.base.queries import (
    AnswerQuery,
    GetQuery,
    HistoryQuery,
    ListQuery,
    MemoriesQuery,
    SearchQuery,
    TurnsByKeyQuery,
)
from undertow.engine.base.results import Hit, Report, SearchResult
from undertow.engine.base.timestamps import parse_timestamp
from undertow.engine.base.trace import Trace
from undertow.engine.encoders.embedding_cache import EmbeddingCache
from undertow.engine.encoders.outage import EncoderDown
from undertow.engine.llm.client import LLMClient
from undertow.engine.policies.base import Learns, PromptBudget, Tiers
from undertow.engine.policies.registry import Policies
from undertow.engine.search.companions import as_words, with_companions
from undertow.engine.search.explain import explained
from undertow.engine.search.packing import as_told, packed
from undertow.engine.search.ranking import (
    ANY_TIME,
    EVERYWHERE,
    Ranked,
    Ranker,
    Window,
    blended,
    live_turns,
    turn_hits,
)
from undertow.engine.search.rerank import Rerank, Reranker, reordered
from undertow.engine.search.where import Where
from undertow.engine.step.answer_feedback import FeedbackQueue
from undertow.engine.step.scheduler import Scheduler, StepReport
from undertow.engine.storage.journal import Journal, Row
from undertow.engine.storage.row_codec import ControlKind
from undertow.engine.tenants.registry import TenantRegistry
from undertow.engine.tenants.tenant import Tenant

# How long a step waits for a reply where there is nothing else to do.
WAIT_FOR_REPLY_S = 0.05
# Turns whose hits are read in about a millisecond.
HITS_AT_ONCE = 100


@dataclass(slots=True)
class Search:
    """A search whose hits are read in parts: those of `read` turns that it has found.

    `deleted`: how many turns of the tenant were deleted when it began.
    """

    query: SearchQuery
    tenant: Tenant
    deleted: int
    ranked: Ranked
    hits: list[Hit] = field(default_factory=list)
    read: int = 0


class SearchCalls(ABC):
    """A part of Engine. It declares what this part and those that extend it need of the engine."""

    settings: Settings
    journal: Journal
    tenants: TenantRegistry
    ranker: Ranker
    scheduler: Scheduler
    trace: Trace
    _policies: Policies
    _reports: Reports
    _texts: EmbeddingCache
    _feedback: FeedbackQueue
    _llm: LLMClient | None
    _reranker: Reranker | None
    _budget: PromptBudget
    _failure: BaseException | None

    @property
    @abstractmethod
    def server_lost(self) -> bool: ...

    @abstractmethod
    def _check_sound(self) -> None: ...

    @abstractmethod
    def _log(self, name: str, kind: ControlKind, bodies: Sequence[Mapping[str, Any]]) -> Tenant | None: ...

    @abstractmethod
    def step(
        self, wait_s: float = 0.0, *, storing: bool = False, pacing: Pacing | None = None
    ) -> StepReport: ...

    @abstractmethod
    def take_up(self, tenants: Sequence[str]) -> None: ...

    def _search(self, query: SearchQuery) -> SearchResult:
        of = self._tenant(query.tenant)
        return _whole(of, self._ranked_by(query, of))

    def begin_search(self, query: SearchQuery) -> Search:
        """Begin a search, for a caller that works on it in parts with `go_on_searching`."""
        tenant = self._tenant(query.tenant)
        return Search(query, tenant, tenant.counts["deleted"], self._ranked_by(query, tenant))

    def go_on_searching(self, search: Search) -> SearchResult | None:
        """Read some of the hits. Returns the result once it has all.

        It begins anew if the tenant was evicted meanwhile, or a turn deleted. UnknownTenant.
        """
        tenant = self._tenant(search.query.tenant)
        if tenant is not search.tenant or tenant.counts["deleted"] != search.deleted:
            search.tenant, search.deleted = tenant, tenant.counts["deleted"]
            search.ranked, search.hits, search.read = self._ranked_by(search.query, tenant), [], 0
        found, start = search.ranked.turns, search.read
        search.read += HITS_AT_ONCE
        search.hits += turn_hits(tenant, found[start : search.read])
        return search.ranked.result(search.hits) if search.read >= len(found) else None

    def _ranked_by(self, query: SearchQuery, of: Tenant) -> Ranked:
        where, window = _filters(query)
        counts = {"k_sub": query.k_sub, "k_epi": query.k_epi, "k_sem": query.k_sem}
        given: dict[str, Any] = {name: count for name, count in counts.items() if count is not None}
        for name, count in given.items():
            if count < 0:
                raise ValueError(f"{name} is {count}. Give 0 or more, or leave it out.")
        tiers = self._policies.tiers(self._policy_shown(of))
        if given:
            tiers = replace(tiers, **given)
        return self._rank(of, query.text, tiers, window, where, explain=query.explain, dense=query.dense)

    def _rank(
        self,
        of: Tenant,
        text: str,
        tiers: Tiers,
        window: Window = ANY_TIME,
        where: Where = EVERYWHERE,
        *,
        explain: bool = False,
        dense: bool = False,
    ) -> Ranked:
        if not text.strip():
            raise ValueError("the query is empty. Give some words to search for.")
        if len(text) > MAX_QUERY_CHARS:
            raise ValueError(f"the query has {len(text):,} characters. Ask in at most {MAX_QUERY_CHARS:,}.")
        hybrid = self.settings.search == "hybrid" and not dense
        terms = self.ranker.terms(of, text) if hybrid else ()
        telling = self.ranker.telling_words(of, text, terms)
        outage = None
        try:
            with self.trace.span("encode_query", texts=1 if telling is None else 2):
                texts = [text] if telling is None else [text, telling]
                vector, *rest = self._texts.encode_queries(of.name, texts)
                vector = blended(vector, *rest) if rest else vector
        except EncoderDown as down:
            if not (hybrid and self.ranker.by_words(of) and math.isfinite(down.silent_s)):
                raise
            outage, vector = down, np.zeros(self.journal.info.dim, np.float16)
        with self.trace.span("rank", asks=1):
            ranked = self.ranker.rank(
                of,
                vector,
                k_sub=tiers.k_sub,
                k_epi=tiers.k_epi,
                k_sem=tiers.k_sem,
                window=window,
                where=where,
                terms=terms,
                consolidated=tiers.consolidated,
            )
        if outage is not None:
            ranked = ranked.by_words()
            if not (ranked.turns or ranked.episodes or ranked.facts):
                raise outage  # it may be there in other words
        if not explain:
            return ranked
        with self.trace.span("explain"):
            asked: dict[str, Any] = {"words": text if hybrid else "", "terms": terms, "telling": telling}
            counts = {"k_sub": tiers.k_sub, "k_epi": tiers.k_epi, "k_sem": tiers.k_sem}
            return explained(
                self.ranker, of, vector, ranked, **asked, window=window, where=where, counts=counts
            )

    def recall(self, tenant: str, question: str, rerank: Rerank | None = None) -> SearchResult:
        """The memories that an answer is given, see policies.base.Tiers, in the order of a rerank if any."""
        of = self._tenant(tenant)
        tiers = self._policies.answer_tiers(self._policy_shown(of))
        found = _whole(of, self._rank(of, question, tiers))
        if rerank is not None:
            found = reordered(found, rerank.order)
        if not tiers.tokens:
            return with_companions(of, found, tiers)
        is_whole = len(found.turns) == live_turns(of)
        found = found if tiers.narratives else as_words(of, found)
        return packed(as_told(of, found), tiers.tokens, is_whole=is_whole)

    def reranked(self, query: str, found: SearchResult) -> SearchResult:
        """The result with its best candidates ranked anew, however long it takes; as it is if that is off."""
        hits = found.ranked(self.settings.rerank_candidates)
        if self._reranker is None or not hits:
            return found
        rerank = Rerank(hits, self._reranker.submit(query, [hit.memory for hit in hits]), math.inf)
        return reordered(found, rerank.wait().order)

    def begin_rerank(self, tenant: str, question: str) -> Rerank | None:
        """Begin to rerank the candidates of an answer; None: reranking is off, or nothing was found."""
        if self._reranker is None:
            return None
        of = self._tenant(tenant)
        tiers = self._policies.answer_tiers(self._policy_shown(of))
        found = _whole(of, self._rank(of, question, tiers))
        hits = found.ranked(self.settings.rerank_candidates)
        if not hits:
            return None
        scores = self._reranker.submit(question, [hit.memory for hit in hits])
        return Rerank(hits, scores, time.monotonic() + self.settings.rerank_ms / 1_000)

    def _learns_of(self, tenant: str) -> Learns:
        """What the policy that made the searched memories learns from an answer."""
        return self._policies.named(self._policy_shown(self._tenant(tenant))).learns

    def _settings_of(self, tenant: str) -> Settings:
        """The settings under the policy that made the searched memories."""
        return self._policies.settings_of(self._policy_shown(self._tenant(tenant)))

    def _policy_shown(self, of: Tenant) -> str:
        return of.shown.policy or self.journal.info.policy

    def is_ready(self, query: SearchQuery | AnswerQuery | ListQuery) -> bool:
        """Whether the indexes that a query needs are built, or nearly; see Ranker.is_ready. UnknownTenant."""
        tenant = self._tenant(query.tenant)
        hybrid = self.settings.search == "hybrid" and not isinstance(query, ListQuery)
        return self.ranker.is_ready(tenant, *_filters(query), words=hybrid)

    def prepare(self, query: SearchQuery | AnswerQuery) -> int:
        """Build some of the indexes that a query needs; see Ranker.prepare. UnknownTenant."""
        tenant, hybrid = self._tenant(query.tenant), self.settings.search == "hybrid"
        return self.ranker.prepare(tenant, *_filters(query), words=hybrid)

    def _get_all(self, query: MemoriesQuery) -> list[Memory]:
        of = self._tenant(query.tenant)
        return [*of.current("episode"), *of.current("fact")]

    def _get(self, query: GetQuery) -> Report:
        return self._reports.get(query.memory_id, self._stored(query.memory_id, query.tenant).tenant_key)

    def _history(self, query: HistoryQuery) -> list[Report]:
        return self._reports.history(query.memory_id, self._stored(query.memory_id, query.tenant).tenant_key)

    def _turns_by_key(self, query: TurnsByKeyQuery) -> dict[str, Report]:
        return _turns_by_key(self._tenant(query.tenant), query.keys) if query.tenant in self.tenants else {}

    def row_of(self, memory_id: str, tenant: str | None = None) -> Row | None:
        """The row of a turn, an episode or a fact by its id, without its vector; None if there is none.

        With `tenant`, only that tenant's rows are read.
        """
        keys = None if tenant is None else [self.journal.info.tenant_key(tenant)]
        kinds = ["turn", "episode", "fact"]
        rows = self.journal.read(tenant_keys=keys, ids=[memory_id], kinds=kinds, vectors=False)
        return next((row for row in rows if not self.tenants.is_erased(row)), None)

    def _stored(self, memory_id: str, tenant: str | None) -> Row:
        """The row of a memory. UnknownMemory; Moved, InTransit: its tenant is leaving this shard."""
        row = self.row_of(memory_id, tenant)
        if row is None:
            raise unknown_memory(memory_id, tenant)
        self.tenants.require_here([row.tenant])
        return row

    def _tenant(self, name: str) -> Tenant:
        return self.tenants.existing(name)


def _whole(of: Tenant, ranked: Ranked) -> SearchResult:
    return ranked.result(turn_hits(of, ranked.turns))


def _filters(query: SearchQuery | AnswerQuery | ListQuery) -> tuple[Where, Window]:
    """The filters of a query. ValueError."""
    if isinstance(query, AnswerQuery):
        return EVERYWHERE, ANY_TIME
    return Where.of(query.where) if query.where else EVERYWHERE, window_of(query.since, query.until)


def window_of(since: str | None, until: str | None) -> Window:
    """The window between two timestamps as users write them. ValueError."""
    if since is until is None:
        return ANY_TIME
    return Window(since and parse_timestamp(since), until and parse_timestamp(until))


def _turns_by_key(tenant: Tenant, keys: Collection[str]) -> dict[str, Report]:
    """What is stored of the turns that came under these keys, by key; keys of none are left out.

    Each with `id` and `seq`; and with its session, timestamp, messages and metadata, unless it was deleted
    since.
    """
    found: dict[str, Report] = {}
    for key in keys:
        seq = tenant.seq_of(key)
        if seq is None:
            continue
        place = {"id": tenant.turn_id(seq), "seq": seq}
        if not tenant.exists(seq):
            found[key] = place
            continue
        body = orjson.loads(tenant.payload(seq))
        del body["key"]
        found[key] = {**place, "timestamp": None, "metadata": {}, **body}
    return found
