"""The store as a whole, for administrators."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from undertow.engine.base.queries import PurgeCommand, ReplayJobsCommand, StatsQuery, TenantsQuery, UsageQuery
from undertow.serving.auth.principal import Principal, Scope
from undertow.serving.client.results import Replayed, Results
from undertow.serving.http.jobs.actions import NAMED_IN_KEYS, OUT_OF_REACH, certified
from undertow.serving.http.routes.access import Access, GuardedRoute, TenantAccess
from undertow.serving.http.routes.schemas import Purged
from undertow.serving.http.service import Sender, Served, Service
from undertow.serving.telemetry.metrics import CONTENT_TYPE

EXPOSITION: dict[int | str, dict[str, Any]] = {
    200: {"description": "The metrics.", "content": {"text/plain": {"schema": {"type": "string"}}}}
}

router = APIRouter(route_class=GuardedRoute, tags=["administration"])


@router.get("/v1/tenants")
@Access(Scope.ADMIN, reaches=TenantAccess.ANY)
async def tenants(
    service: Served,
    sender: Sender,
    prefix: Annotated[str, Query(description="Only names that begin with it.")] = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str, Query(description="The `next` of the page before.")] = "",
) -> Results[str]:
    """The names of the tenants that have memories and that the key covers, sorted."""
    names = await covered_names(service, sender, prefix, limit, after)
    more = len(names) == limit and await covered_names(service, sender, prefix, 1, names[-1])
    return Results(results=tuple(names), next=names[-1] if more else None)


async def covered_names(
    service: Service, sender: Principal, prefix: str, limit: int, after: str
) -> list[str]:
    """The first names of tenants with memories that a key covers, sorted, as of TenantsQuery."""
    reach, call = sender.reach, service.memories.call
    if reach.tenants:
        named = sorted(name for name in reach.tenants if name.startswith(prefix) and name > after)
        return [name for name in named if name in await call(TenantsQuery(name, 1))][:limit]
    own = reach.prefix or ""
    if not (own.startswith(prefix) or prefix.startswith(own)):
        return []
    return await call(TenantsQuery(max(own, prefix, key=len), limit, after))


@router.get("/v1/stats", response_model=dict[str, int])
@Access(Scope.ADMIN, reaches=TenantAccess.STORE)
async def stats(service: Served) -> Any:
    """Counts over all tenants."""
    return await service.memories.call(StatsQuery())


@router.get("/v1/usage", response_model=dict[str, dict[str, int]])
@Access(Scope.ADMIN, reaches=TenantAccess.STORE)
async def usage(service: Served) -> Any:
    """Language model calls and tokens over all tenants, by operation."""
    return await service.memories.call(UsageQuery())


@router.get("/v1/status", response_model=dict[str, dict[str, Any]])
@Access(Scope.ADMIN, reaches=TenantAccess.STORE)
async def status(service: Served) -> Any:
    """The status report of each shard; for an unreachable one, why."""
    return await service.memories.status()


@router.get("/metrics", response_class=Response, responses=EXPOSITION)
@Access(Scope.ADMIN, reaches=TenantAccess.STORE)
async def metrics(service: Served) -> Response:
    """Metrics in Prometheus' text format, none by tenant. An unreachable shard is reported as down."""
    return Response(service.metrics.exposition(await service.memories.status()), media_type=CONTENT_TYPE)


@router.post("/v1/purge", response_model=Purged)
@Access(Scope.ADMIN, reaches=TenantAccess.STORE, once=True, act="purge")
async def purge(service: Served, sender: Sender) -> Any:
    """Remove the bytes of everything erased or deleted, and certify it."""
    async with service.audited("purge", sender.key_id) as entry:
        certificates = await service.memories.call(PurgeCommand())
        entry.counts["tenants_purged"] = len(certificates)
    more = (*OUT_OF_REACH, NAMED_IN_KEYS)
    return {"certificates": [certified(certificate, more) for certificate in certificates.values()]}


@router.post("/v1/replay")
@Access(Scope.ADMIN, reaches=TenantAccess.STORE, once=True, act="replay")
async def replay(service: Served, sender: Sender) -> Replayed:
    """Run the parked jobs again, for which the language model gave no usable reply."""
    async with service.audited("replay", sender.key_id) as entry:
        count = await service.memories.call(ReplayJobsCommand())
        entry.counts["jobs"] = count
    return Replayed(replayed=count)
