"""Engine's calls about a tenant as a whole, and about all of them: at a shard, and over all shards."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # who only sends turns to shards is to load no torch
    from undertow.engine.api.engine import Engine
    from undertow.engine.api.erasure import Certificate
    from undertow.engine.api.tenant_calls import PendingImport
    from undertow.engine.api.transfer.import_ import ImportReport
    from undertow.engine.api.views.format import Page
    from undertow.engine.api.views.reports import Report
    from undertow.engine.cluster.shard.engine_thread import EngineThread
    from undertow.engine.cluster.shard.supervisor import ShardSupervisor

T = TypeVar("T")
# in a class with a method `list`, that name is no type
Names = list[str]
Records = list["Report"]
Usages = dict[str, dict[str, int]]


@dataclass(slots=True, eq=False)
class ImportCall:
    """An import that a shard has been asked for; `engine` is that which has begun it."""

    tenant: str
    engine: Engine | None = None
    importing: PendingImport | None = None
    called_off: bool = False


class ShardTenantCalls:
    """Calls of a shard, from any thread; all that name a tenant: Moved, InTransit."""

    _engine_thread: EngineThread
    _supervisor: ShardSupervisor
    # those under way
    _imports: set[ImportCall]

    def list(self, tenant: str, **how: Any) -> Future[Page]:
        """As Engine.list."""
        return self._of(tenant, lambda engine: engine.list(tenant, **how))

    def export_page(self, tenant: str, **how: Any) -> Future[Page]:
        """As Engine.export_page."""
        return self._of(tenant, lambda engine: engine.export_page(tenant, **how))

    def import_(self, tenant: str, records: Sequence[Report], *, again: bool = False) -> Future[ImportReport]:
        """As Engine.import_, while other calls go on. CalledOff: an erasure of the tenant was among them."""
        from undertow.engine.api.transfer.import_ import ImportCancelled

        call = ImportCall(tenant)

        def go_on(engine: Engine) -> ImportReport | None:
            self._checked(tenant)
            if call.called_off:
                raise ImportCancelled(
                    "the tenant was erased while this was taken in: nothing of it is stored."
                )
            if call.importing is None or call.engine is not engine:  # one opened anew has none under way
                call.engine, call.importing = engine, engine.begin_import(tenant, records, again=again)
                self._imports.add(call)
            return engine.go_on_importing(call.importing)

        imported = self._engine_thread.ask(go_on, wait=True)
        imported.add_done_callback(lambda _: self._imports.discard(call))
        return imported

    def _call_off_imports(self, tenant: str) -> None:
        """What an erasure has answered for must not come back with a commit that was begun before it."""
        for call in self._imports:
            call.called_off |= call.tenant == tenant

    def policy(self, tenant: str) -> Future[Report]:
        """As Engine.policy."""
        return self._of(tenant, lambda engine: engine.policy(tenant))

    def set_policy(self, tenant: str, policy: str, *, drop_edits: bool = False) -> Future[Report]:
        """As Engine.set_policy, which may be repeated."""
        return self._of(tenant, lambda engine: engine.set_policy(tenant, policy, drop_edits=drop_edits))

    def explain(self, tenant: str, **how: Any) -> Future[Records]:
        """As Engine.explain."""
        return self._of(tenant, lambda engine: engine.explain(tenant, **how))

    def tenant_stats(self, tenant: str) -> Future[dict[str, int]]:
        """As Engine.tenant_stats."""
        return self._of(tenant, lambda engine: engine.tenant_stats(tenant))

    def usage(self, tenant: str | None = None) -> Future[Usages]:
        """As Engine.usage."""
        if tenant is None:
            return self._engine_thread.ask(lambda engine: engine.usage())
        return self._of(tenant, lambda engine: engine.usage(tenant))

    def tenants(self, prefix: str = "", limit: int = 1000, after: str = "") -> Future[Names]:
        """Names of tenants that have something here, sorted: see listing.names_page."""
        from undertow.engine.api.views.listing import names_page

        return self._engine_thread.ask(
            lambda engine: names_page(engine.tenants.names(), prefix, limit, after)
        )

    def purge(self) -> Future[dict[str, Certificate]]:
        """As Engine.purge."""
        return self._engine_thread.ask(lambda engine: engine.purge())

    def _of(self, tenant: str, act: Callable[[Engine], T]) -> Future[T]:
        def checked(engine: Engine) -> T:
            self._checked(tenant)
            return act(engine)

        return self._engine_thread.ask(checked)

    def _checked(self, tenant: str) -> str:
        """The tenant, if it is this shard's to serve. Moved, InTransit."""
        for refusal in self._engine_thread.refusals(frozenset([tenant])).values():
            raise refusal
        return tenant


class RouterTenantCalls(ABC):
    """The same calls over all shards."""

    @abstractmethod
    def _await(self, work: Coroutine[Any, Any, T]) -> T: ...

    @abstractmethod
    async def _ask_owner(self, method: str, tenant: str, *args: Any, **kwargs: Any) -> Any: ...

    @abstractmethod
    async def _ask_together(self, method: str, *args: Any) -> Any: ...

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
        """As Engine.list."""
        filters = {"kinds": kinds, "since": since, "until": until, "where": where}
        page: Page = self._await(self._ask_owner("list", tenant, **filters, limit=limit, after=after))
        return page

    def export_page(
        self, tenant: str, *, after: str | None = None, limit: int = 1000, vectors: bool = False
    ) -> Page:
        """As Engine.export_page."""
        how = {"after": after, "limit": limit, "vectors": vectors}
        page: Page = self._await(self._ask_owner("export_page", tenant, **how))
        return page

    def import_(self, tenant: str, records: Sequence[Report]) -> ImportReport:
        """As Engine.import_."""
        imported: ImportReport = self._await(self._ask_owner("import_", tenant, records))
        return imported

    def policy(self, tenant: str) -> Report:
        """As Engine.policy."""
        told: Report = self._await(self._ask_owner("policy", tenant))
        return told

    def set_policy(self, tenant: str, policy: str, *, drop_edits: bool = False) -> Report:
        """As Engine.set_policy."""
        told: Report = self._await(self._ask_owner("set_policy", tenant, policy, drop_edits=drop_edits))
        return told

    def explain(self, tenant: str, *, limit: int | None = None, after_seq: int = -1) -> Records:
        """As Engine.explain."""
        records: Records = self._await(self._ask_owner("explain", tenant, limit=limit, after_seq=after_seq))
        return records

    def tenant_stats(self, tenant: str) -> dict[str, int]:
        """As Engine.tenant_stats."""
        figures: dict[str, int] = self._await(self._ask_owner("tenant_stats", tenant))
        return figures

    def usage(self, tenant: str | None = None) -> Usages:
        """As Engine.usage; each shard counts at a moment of its own."""
        if tenant is not None:
            spent: Usages = self._await(self._ask_owner("usage", tenant))
            return spent
        totals: Usages = self._await(self._ask_together("usage"))
        return totals

    def tenants(self, *, prefix: str = "", limit: int = 1000, after: str = "") -> Names:
        """The first names, sorted, that begin with `prefix` and stand behind `after`. InputError.

        While tenants move, one on its way may be missing.
        """
        names: Names = self._await(self._ask_together("tenants", prefix, limit, after))
        return names

    def purge(self) -> dict[str, Certificate]:
        """As Engine.purge, at every shard."""
        certificates: dict[str, Certificate] = self._await(self._ask_together("purge"))
        return certificates
