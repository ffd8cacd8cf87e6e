"""Engine's calls about a tenant as a whole: what it has, why, what it cost, out of a store and into one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from undertow.engine.figures import store_usage, tenant_stats
from undertow.engine.importing import Imported
from undertow.engine.listing import kinds_of, list_page
from undertow.engine.metadata import Where
from undertow.engine.reports import Report, Reports
from undertow.engine.retrieval import Retrieval, Window
from undertow.engine.shown import Page
from undertow.engine.tenants import Tenants
from undertow.engine.timestamps import parse_timestamp

# in a class with a method `list`, that name is no type
Records = list[Report]


class Tenancy:
    """What Engine is made of beside its steps; see there."""

    tenants: Tenants
    retrieval: Retrieval
    _reports: Reports

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
        return list_page(of, among, window, self.retrieval.passing(of, asked), limit=limit, after=after)

    def export_page(
        self, tenant: str, *, after: str | None = None, limit: int = 1000, vectors: bool = False
    ) -> Page:
        """As Reports.export_page."""
        return self._reports.export_page(tenant, after=after, limit=limit, vectors=vectors)

    def import_(self, tenant: str, records: Sequence[Report], *, again: bool = False) -> Imported:
        """Take in an export (engine/exporting.py) as the memories of `tenant`, which has nothing here.

        In one commit: InputError for a record that cannot be taken, TenantExists, and nothing is stored.
        `again`: the call is a repeat; that it was done already is no error.
        """
        raise NotImplementedError

    def explain(self, tenant: str, *, limit: int | None = None, after_seq: int = -1) -> Records:
        """As Reports.explain."""
        return self._reports.explain(tenant, limit=limit, after_seq=after_seq)

    def tenant_stats(self, tenant: str) -> dict[str, int]:
        """Counts and construction tokens of one tenant, by the names of `stats`. UnknownTenant."""
        return tenant_stats(self.tenants.existing(tenant))

    def usage(self, tenant: str | None = None) -> dict[str, dict[str, int]]:
        """LLM calls and tokens by operation, of one tenant or of all. UnknownTenant."""
        return store_usage(self.tenants, tenant)
