"""Engine's calls about a tenant as a whole: what it has, why, what it cost, out of a store and into one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undertow.engine.api.policy_change import check_edits, check_name, newest_policy
from undertow.engine.api.transfer.import_ import Import, ImportReport, TenantExists, earlier_import, note_row
from undertow.engine.api.views.format import Page
from undertow.engine.api.views.listing import kinds_of, list_page
from undertow.engine.api.views.reports import Report, Reports
from undertow.engine.api.views.stats import store_usage, tenant_stats
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Turn
from undertow.engine.base.timestamps import parse_timestamp
from undertow.engine.encoders.embedding_cache import EmbeddingCache
from undertow.engine.search.metadata_index import Where
from undertow.engine.search.ranking import Ranker, Window
from undertow.engine.step.admission import check_turn
from undertow.engine.step.scheduler import Scheduler
from undertow.engine.storage.journal import Journal
from undertow.engine.storage.row_codec import Control, ControlKind
from undertow.engine.tenants.registry import TenantRegistry
from undertow.engine.tenants.tenant import Tenant

# in a class with a method `list`, that name is no type
Records = list[Report]


@dataclass(frozen=True, slots=True)
class PendingImport:
    """An import under way, and what is left of it. `again`: the call is a repeat."""

    work: Import
    steps: Iterator[None]
    again: bool


class TenantCalls(ABC):
    """What Engine is made of beside its steps; see there."""

    settings: Settings
    journal: Journal
    tenants: TenantRegistry
    retrieval: Ranker
    scheduler: Scheduler
    _reports: Reports
    _texts: EmbeddingCache

    @abstractmethod
    def _check_sound(self) -> None: ...

    @abstractmethod
    def _log(self, name: str, kind: ControlKind, bodies: Sequence[Mapping[str, Any]]) -> Tenant | None: ...

    @abstractmethod
    def take_up(self, tenants: Sequence[str]) -> None: ...

    def list(
        self,
        tenant: str,
        *,
        kinds: Collection[str] | None = None,
        since: str | None = None,
        until: str | None = None,
        where: Mapping[str, Any] | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> Page:
        """A page of the tenant's turns, episodes and facts (`kinds`; None: all) in order of birth.

        The filters, as those of `search`, are applied before the limit; what a search may not find is not
        listed either. See listing.list_page. UnknownTenant; InputError; ValueError for a filter.
        """
        asked, among = Where.of(where), kinds_of(kinds)
        window = Window(since and parse_timestamp(since), until and parse_timestamp(until))
        of = self.tenants.existing(tenant)
        passing, within = self.retrieval.passing(of, asked), self.retrieval.within(of, window)
        return list_page(of, among, window, passing, within, limit=limit, after=after)

    def export_page(
        self, tenant: str, *, after: str | None = None, limit: int = 1000, vectors: bool = False
    ) -> Page:
        """As Reports.export_page."""
        return self._reports.export_page(tenant, after=after, limit=limit, vectors=vectors)

    def import_(self, tenant: str, records: Sequence[Report], *, again: bool = False) -> ImportReport:
        """Import an export (engine/api/transfer/export.py) as the memories of `tenant`, which must be empty.

        In one commit: InputError for a record that cannot be taken, TenantExists, and nothing is stored.
        `again`: the call is a repeat; that it was done already is no error.
        """
        work = self.begin_import(tenant, records, again=again)
        while (done := self.go_on_importing(work)) is None:
            pass
        return done

    def begin_import(self, tenant: str, records: Sequence[Report], *, again: bool = False) -> PendingImport:
        """For a caller that has other work until `go_on_importing` gives something. As `import_`."""
        key = self.journal.info.tenant_key(tenant)
        work = Import(tenant, key, self.tenants.incarnation_of(key), records, self.settings)
        return PendingImport(work, work.steps(partial(self._vectors, tenant)), again)

    def go_on_importing(self, importing: PendingImport) -> ImportReport | None:
        """Some of the work; what was stored, once that is all. As `import_`."""
        self._check_sound()
        work = importing.work
        if (done := self._imported_before(importing)) is not None:
            return done
        for _ in importing.steps:
            return None
        self.journal.append_stream(chain(work.rows, [note_row(work)]))
        self.tenants.add({work.key: work.tenant}, {})
        if not work.is_decided:
            self.take_up([work.tenant])
        return work.imported

    def _imported_before(self, importing: PendingImport) -> ImportReport | None:
        """What an earlier call of this one has stored; None if nothing is there. TenantExists."""
        work, tenants = importing.work, self.tenants
        tenants.require_here([work.tenant])
        # the name may have been used and erased since the import began: its ids are then of a former life
        lived = tenants.incarnation_of(work.key) != work.generation
        if not (lived or work.tenant in tenants or self.scheduler.inbox.holds(work.tenant)):
            return None
        notes = tenants.stored(work.tenant, "note") if importing.again else ()
        if (done := earlier_import(notes, work.fingerprint)) is None:
            raise TenantExists(work.tenant)
        return done

    def _vectors(self, tenant: str, texts: Sequence[str]) -> NDArray[np.float16]:
        return self._texts.encode([tenant] * len(texts), texts)

    def policy(self, tenant: str) -> Report:
        """Which policy makes the tenant's memories, and how far a change of it is; as policy_report."""
        return self._reports.policy(tenant)

    def set_policy(self, tenant: str, policy: str, *, drop_edits: bool = False) -> Report:
        """Have `policy` make the tenant's memories, from a record of its log on; durable on return.

        A tenant that has no log yet begins under it. Otherwise the log is read again from its start into a
        new generation of memories; searches see the former one until the new one has come to the record, and
        its history stays. A newer change takes the place of one under way. No effect where the tenant has the
        policy, or is to have it. As `policy`. InputError; PolicyConflict, unless `drop_edits`: users have
        reworded or deleted memories; ArenaFull: the tenant cannot be loaded now.
        """
        self._check_sound()
        check_name(policy)
        check_turn(Turn(tenant, (), ""))
        self.tenants.require_here([tenant])
        is_new = tenant not in self.tenants
        of = self.tenants.get(tenant)
        if is_new or (newest_policy(of) or self.journal.info.policy) != policy:
            if of.next_seq == 0:
                self.scheduler.begin_log(of, Control("policy", -1, {"policy": policy}))
            else:
                if not drop_edits:
                    check_edits(of)
                self._log(tenant, "policy", [{"policy": policy}])
        return self.policy(tenant)

    def explain(self, tenant: str, *, limit: int | None = None, after_seq: int = -1) -> Records:
        """As Reports.explain."""
        return self._reports.explain(tenant, limit=limit, after_seq=after_seq)

    def tenant_stats(self, tenant: str) -> dict[str, int]:
        """Counts and construction tokens of one tenant, by the names of `stats`. UnknownTenant."""
        return tenant_stats(self.tenants.existing(tenant))

    def usage(self, tenant: str | None = None) -> dict[str, dict[str, int]]:
        """LLM calls and tokens by operation, of one tenant or of all. UnknownTenant."""
        return store_usage(self.tenants, tenant)
