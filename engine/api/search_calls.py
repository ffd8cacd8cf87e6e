"""Engine's calls that read: what is near a question, and what is stored."""

from __future__ import annotations

from abc import ABC
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from undertow.engine.api.views.dedupe_lookup import turns_by_key
from undertow.engine.api.views.reports import Report, Reports
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Memory, unknown_memory
from undertow.engine.base.timestamps import parse_timestamp
from undertow.engine.base.trace import Trace
from undertow.engine.encoders.embedding_cache import EmbeddingCache
from undertow.engine.policies.base import Learns, Tiers
from undertow.engine.policies.registry import Policies
from undertow.engine.search.metadata_index import Where
from undertow.engine.search.ranking import ANY_TIME, EVERYWHERE, Ranker, SearchResult, Window, with_words
from undertow.engine.storage.journal import Journal, Row
from undertow.engine.tenants.registry import TenantRegistry
from undertow.engine.tenants.tenant import Tenant


class SearchCalls(ABC):
    """What Engine is made of beside its steps; see there."""

    settings: Settings
    journal: Journal
    tenants: TenantRegistry
    retrieval: Ranker
    trace: Trace
    _policies: Policies
    _reports: Reports
    _texts: EmbeddingCache

    def search(
        self,
        tenant: str,
        query: str,
        *,
        k_sub: int | None = None,
        k_epi: int | None = None,
        k_sem: int | None = None,
        since: str | None = None,
        until: str | None = None,
        where: Mapping[str, Any] | None = None,
    ) -> SearchResult:
        """The nearest turns, episodes and facts; counts default to the settings, then to the tenant's policy.

        `where`: only turns whose metadata has this value of a key, or one of a list of them, and episodes
        and facts that rest on such a turn. ValueError: see metadata.Where.of.
        """
        window = Window(since and parse_timestamp(since), until and parse_timestamp(until))
        own = self._tiers_of(tenant)
        tiers = replace(
            own,
            k_sub=own.k_sub if k_sub is None else k_sub,
            k_epi=own.k_epi if k_epi is None else k_epi,
            k_sem=own.k_sem if k_sem is None else k_sem,
            consolidated=True,
        )
        return self._search(tenant, query, tiers, window, Where.of(where))

    def _search(
        self, tenant: str, query: str, tiers: Tiers, window: Window = ANY_TIME, where: Where = EVERYWHERE
    ) -> SearchResult:
        of = self._tenant(tenant)
        if not query.strip():
            raise ValueError("the query is empty. Give some words to search for.")
        with self.trace.span("encode_query", texts=1):
            vector = self._texts.encode([tenant], [query])[0]
        with self.trace.span("rank", asks=1):
            return self.retrieval.search(
                of,
                vector,
                k_sub=tiers.k_sub,
                k_epi=tiers.k_epi,
                k_sem=tiers.k_sem,
                window=window,
                where=where,
                words=query if self.settings.search == "hybrid" else "",
                consolidated=tiers.consolidated,
            )

    def recall(self, tenant: str, question: str) -> SearchResult:
        """What an answer is given: the tiers as the policy wants them, see policies.base.Tiers."""
        tiers = self._tiers_of(tenant)
        found = self._search(tenant, question, tiers)
        return with_words(self._tenant(tenant), found, tiers.raw_of_best)

    def _tiers_of(self, tenant: str) -> Tiers:
        return self._policies.tiers(self._policy_shown(tenant))

    def _learns_of(self, tenant: str) -> Learns:
        """What the policy that has made what is searched wants to know of an answer."""
        return self._policies.named(self._policy_shown(tenant)).learns

    def _settings_of(self, tenant: str) -> Settings:
        """The settings as they hold under the policy that has made what is searched."""
        return self._policies.settings_of(self._policy_shown(tenant))

    def _policy_shown(self, tenant: str) -> str:
        return self._tenant(tenant).shown.policy or self.journal.info.policy

    def is_ready(self, tenant: str) -> bool:
        """Whether a search by words of this tenant has little to do first, as Retrieval.is_ready.

        UnknownTenant.
        """
        return self.settings.search != "hybrid" or self.retrieval.is_ready(self._tenant(tenant))

    def prepare(self, tenant: str) -> int:
        """As Retrieval.prepare. UnknownTenant."""
        return self.retrieval.prepare(self._tenant(tenant))

    def get_all(self, tenant: str) -> list[Memory]:
        """All current episodes and facts, in order of birth."""
        of = self._tenant(tenant)
        return [*of.current("episode"), *of.current("fact")]

    def get(self, memory_id: str, *, tenant: str | None = None) -> Report:
        """One turn, episode or fact as it stands, as plain data; if given only one of this tenant.

        UndertowError: there is none of this id, or it was deleted; Moved, InTransit.
        """
        return self._reports.get(memory_id, self._stored(memory_id, tenant).tenant_key)

    def history(self, memory_id: str, *, tenant: str | None = None) -> list[Report]:
        """Every version of one memory, its deletion included, oldest first. As `get`, of deleted ones too.

        Of a deleted turn nothing is left.
        """
        return self._reports.history(memory_id, self._stored(memory_id, tenant).tenant_key)

    def turns_by_key(self, tenant: str, keys: Collection[str]) -> dict[str, Report]:
        """As repeats.turns_by_key: of a call that is repeated, what the first one has stored."""
        return turns_by_key(self._tenant(tenant), keys) if tenant in self.tenants else {}

    def row_of(self, memory_id: str, tenant: str | None = None) -> Row | None:
        """A row of a turn, an episode or a fact by its id, where there is one; without its vector.

        `tenant`: one of this tenant, which is found without looking through all others.
        """
        keys = None if tenant is None else [self.journal.info.tenant_key(tenant)]
        kinds = ["turn", "episode", "fact"]
        rows = self.journal.read(tenant_keys=keys, ids=[memory_id], kinds=kinds, vectors=False)
        return next((row for row in rows if not self.tenants.is_erased(row)), None)

    def _stored(self, memory_id: str, tenant: str | None) -> Row:
        """As `row_of`, which must be there. UndertowError; Moved, InTransit: its tenant leaves."""
        row = self.row_of(memory_id, tenant)
        if row is None:
            raise unknown_memory(memory_id, tenant)
        self.tenants.require_here([row.tenant])
        return row

    def _tenant(self, name: str) -> Tenant:
        return self.tenants.existing(name)
