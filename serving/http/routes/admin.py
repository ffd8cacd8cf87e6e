"""The store as a whole, for administrators."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from undertow.serving.auth.principal import Principal, Scope
from undertow.serving.http.job_actions import certified
from undertow.serving.http.routes.access import GuardedRoute, needs
from undertow.serving.http.routes.access_rules import TenantAccess
from undertow.serving.http.routes.audited import audited
from undertow.serving.http.routes.dependencies import Sender, Served
from undertow.serving.http.schemas.admin import Purged, Replayed, TenantList
from undertow.serving.http.services import Service
from undertow.serving.telemetry.metrics import CONTENT_TYPE

EXPOSITION: dict[int | str, dict[str, Any]] = {
    200: {"description": "The metrics.", "content": {"text/plain": {"schema": {"type": "string"}}}}
}

router = APIRouter(route_class=GuardedRoute, tags=["administration"])


@router.get("/v1/tenants")
@needs(Scope.ADMIN, reaches=TenantAccess.ANY)
async def tenants(
    service: Served,
    sender: Sender,
    prefix: Annotated[str, Query(description="Only names that begin so.")] = "",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str, Query(description="The `next` of the page before.")] = "",
) -> TenantList:
    """The tenants that have memories, by name: of those that the key is for."""
    names = await _covered(service, sender, prefix, limit, after)
    return TenantList(results=names, next=names[-1] if len(names) == limit else None)


async def _covered(service: Service, sender: Principal, prefix: str, limit: int, after: str) -> list[str]:
    reach, memories = sender.reach, service.memories
    if reach.tenants:
        named = sorted(name for name in reach.tenants if name.startswith(prefix) and name > after)
        there = [name for name in named if name in await memories.tenant_names(name, limit=1)]
        return there[:limit]
    own = reach.prefix or ""
    if not (own.startswith(prefix) or prefix.startswith(own)):
        return []
    return await memories.tenant_names(prefix=max(own, prefix, key=len), limit=limit, after=after)


@router.get("/v1/stats", response_model=dict[str, int])
@needs(Scope.ADMIN, reaches=TenantAccess.STORE)
async def stats(service: Served) -> Any:
    """Counts over all tenants."""
    return await service.memories.stats()


@router.get("/v1/usage", response_model=dict[str, dict[str, int]])
@needs(Scope.ADMIN, reaches=TenantAccess.STORE)
async def usage(service: Served) -> Any:
    """Calls of the language model and their tokens over all tenants, by operation."""
    return await service.memories.usage(None)


@router.get("/v1/status", response_model=dict[str, dict[str, Any]])
@needs(Scope.ADMIN, reaches=TenantAccess.STORE)
async def status(service: Served) -> Any:
    """What each shard says of itself; of one that cannot be reached, why."""
    return await service.memories.status()


@router.get("/metrics", response_class=Response, responses=EXPOSITION)
@needs(Scope.ADMIN, reaches=TenantAccess.STORE)
async def metrics(service: Served) -> Response:
    """Metrics in Prometheus' text format, none by tenant. A shard that does not answer is told as down."""
    return Response(service.metrics.exposition(await service.memories.status()), media_type=CONTENT_TYPE)


@router.post("/v1/purge")
@needs(Scope.ADMIN, reaches=TenantAccess.STORE, once=True, act="purge")
async def purge(service: Served, sender: Sender) -> Purged:
    """Remove the bytes of all that was erased or deleted, and certify it."""
    async with audited(service.audit, "purge", sender) as entry:
        certificates = await service.memories.purge()
        entry.counts["tenants_purged"] = len(certificates)
    return Purged.model_validate({"certificates": [certified(c) for c in certificates.values()]})


@router.post("/v1/replay")
@needs(Scope.ADMIN, reaches=TenantAccess.STORE, once=True, act="replay")
async def replay(service: Served, sender: Sender) -> Replayed:
    """Ask the language model again what it had no usable answer to (parked jobs)."""
    async with audited(service.audit, "replay", sender) as entry:
        count = await service.memories.replay_jobs()
        entry.counts["jobs"] = count
    return Replayed(replayed=count)
