"""A tenant as a whole: flush, export, import, erase, its policy, its figures, and its jobs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from undertow.serving.auth.principal import Scope
from undertow.serving.http import job_actions as acts
from undertow.serving.http.jobs import ServiceJob
from undertow.serving.http.problems import bad_field
from undertow.serving.http.routes.access import GuardedRoute, needs
from undertow.serving.http.routes.audited import audited
from undertow.serving.http.routes.dependencies import Again, Prefer, Sender, Served, Tenant, is_async
from undertow.serving.http.schemas.tenants import (
    Accepted,
    CertificateView,
    Flushed,
    Imported,
    JobList,
    JobView,
    PolicyRequest,
    PolicyView,
    Records,
)

router = APIRouter(route_class=GuardedRoute, tags=["tenants"])

NDJSON = "application/x-ndjson"
LINES = {NDJSON: {"schema": {"type": "string", "format": "binary"}}}
CHUNK_BYTES = 64 << 10
LOST_WITH_KEY = (
    "this key names the tenant, which it will no more once that is erased, so it could not ask for the job. "
    "Leave respond-async out and wait for the certificate."
)
ACCEPTED: dict[int | str, dict[str, Any]] = {
    202: {
        "model": Accepted,
        "description": "With Prefer: respond-async: the job is accepted, and will be done.",
        "headers": {"Location": {"description": "Of the job.", "schema": {"type": "string"}}},
    }
}


@router.post("/v1/tenants/{tenant}/flush", response_model=Flushed, responses=ACCEPTED)
@needs(Scope.WRITE, once=True, long=True)
async def flush(
    request: Request, tenant: Tenant, service: Served, sender: Sender, again: Again, prefer: Prefer = None
) -> Any:
    """Wait until all that was added is decided: consolidated into episodes and facts, or left to wait."""
    if is_async(prefer):
        key = service.memories.tenant_key(tenant)
        return _accepted(request, await service.jobs.accept("flush", tenant, key, sender.key_id))
    return await acts.flush(service, tenant, again=again)


@router.get(
    "/v1/tenants/{tenant}/export",
    response_class=StreamingResponse,
    responses={200: {"description": "One record a line.", "content": LINES}},
)
@needs(Scope.READ, long=True)
async def export(
    tenant: Tenant,
    service: Served,
    vectors: Annotated[bool, Query(description="With the vectors, as lists of numbers.")] = False,
) -> Response:
    """Everything that is kept of a tenant, every version included: what an import takes.

    Streamed as fast as it is read. An export that cannot be read to its end is cut off: its last line is then
    not the record `end`.
    """
    lines = _lines(service.memories.export(tenant, vectors=vectors))
    first = await anext(lines, b"")  # what goes wrong before it is a problem with a status of its own
    return StreamingResponse(_from(first, lines), media_type=NDJSON)


async def _lines(records: AsyncGenerator[Mapping[str, Any]]) -> AsyncGenerator[bytes]:
    """JSON lines, some at a time."""
    chunk = bytearray()
    async with aclosing(records) as stream:
        async for record in stream:
            chunk += orjson.dumps(record) + b"\n"
            if len(chunk) >= CHUNK_BYTES:
                yield bytes(chunk)
                chunk.clear()
    if chunk:
        yield bytes(chunk)


async def _from(first: bytes, rest: Any) -> AsyncIterator[bytes]:
    async with aclosing(rest):
        yield first
        async for chunk in rest:
            yield chunk


@router.post(
    "/v1/tenants/{tenant}/import",
    response_model=Imported,
    responses=ACCEPTED,
    openapi_extra={"requestBody": {"required": True, "content": LINES}},
)
@needs(Scope.WRITE, once=True, imports=True)
async def import_(
    request: Request, tenant: Tenant, service: Served, sender: Sender, again: Again, prefer: Prefer = None
) -> Any:
    """Take back an export, into a tenant that has nothing: 409 where it has something.

    All of it is stored or nothing. The tenant may have another name than the one that was exported.
    """
    body = await request.body()
    if is_async(prefer):
        key = service.memories.tenant_key(tenant)
        return _accepted(request, await service.jobs.accept("import", tenant, key, sender.key_id, body))
    return await acts.import_(service, tenant, body, again=again)


@router.get("/v1/tenants/{tenant}/policy", response_model=PolicyView)
@needs(Scope.READ)
async def policy(tenant: Tenant, service: Served) -> Any:
    """What makes a tenant's memories of its turns, and how far a change of that is."""
    return await service.memories.policy(tenant)


@router.put("/v1/tenants/{tenant}/policy", response_model=PolicyView)
@needs(Scope.ADMIN, once=True, act="policy")
async def set_policy(tenant: Tenant, service: Served, sender: Sender, asked: PolicyRequest) -> Any:
    """Give a tenant a policy of its own. The answer does not wait for what follows.

    A tenant without turns begins under it. For any other all its turns are read again, which costs the
    language model's calls for each; until that is done searches find the former memories, then the new ones
    alone. 409 where memories were reworded or deleted by hand, unless `drop_edits`. The policy that a tenant
    has already is no change.
    """
    memories = service.memories
    async with audited(service.audit, "policy", sender, memories.tenant_key(tenant)):
        return await memories.set_policy(tenant, asked.policy, drop_edits=asked.drop_edits)


@router.delete("/v1/tenants/{tenant}", response_model=CertificateView, responses=ACCEPTED)
@needs(Scope.ERASE, once=True, act="erase")
async def erase(
    request: Request, tenant: Tenant, service: Served, sender: Sender, prefer: Prefer = None
) -> Any:
    """Erase a tenant: memories, vectors, history, jobs and kept answers, every byte, now.

    The certificate says what was removed and what is out of reach. Keys that named this tenant alone are
    gone too, those that named it among others name it no more.

    As a job it is done when its turn comes: until it has ended, the tenant can be read, and what is added
    goes too. A key that names the tenant could not ask for the certificate afterwards: with such a key it
    must be waited for.
    """
    if is_async(prefer):
        if sender.reach.tenants:
            raise bad_field("Prefer", LOST_WITH_KEY)
        key = service.memories.tenant_key(tenant)
        return _accepted(request, await service.jobs.accept("erase", tenant, key, sender.key_id))
    return await acts.erase(service, tenant, sender.key_id)


@router.get("/v1/tenants/{tenant}/stats", response_model=dict[str, int])
@needs(Scope.READ)
async def stats(tenant: Tenant, service: Served) -> Any:
    """How much a tenant has, and what is still undecided."""
    return await service.memories.tenant_stats(tenant)


@router.get("/v1/tenants/{tenant}/usage", response_model=dict[str, dict[str, int]])
@needs(Scope.READ)
async def usage(tenant: Tenant, service: Served) -> Any:
    """Calls of the language model and their tokens, by operation, since the tenant is there."""
    return await service.memories.usage(tenant)


@router.get("/v1/tenants/{tenant}/explain")
@needs(Scope.READ)
async def explain(
    tenant: Tenant,
    service: Served,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
    after_seq: Annotated[int, Query(ge=-1, le=2**53)] = -1,
) -> Records:
    """For each turn what was decided, on what grounds, and what it made."""
    records = await service.memories.explain(tenant, limit=limit, after_seq=after_seq)
    more = len(records) == limit
    return Records(results=records, next_after_seq=records[-1]["seq"] if more else None)


@router.get("/v1/tenants/{tenant}/jobs", response_model=JobList)
@needs(Scope.READ)
async def list_jobs(tenant: Tenant, service: Served) -> Any:
    """A tenant's jobs: open ones, and those that ended in the last day (by default)."""
    jobs = await service.jobs.of_tenant(service.memories.tenant_key(tenant))
    return {"results": [job.document for job in jobs]}


@router.get("/v1/tenants/{tenant}/jobs/{job_id}", response_model=JobView)
@needs(Scope.READ)
async def get_job(tenant: Tenant, job_id: str, service: Served) -> Any:
    """How a job is; of one that is done, what the operation answers."""
    return (await service.jobs.get(service.memories.tenant_key(tenant), job_id)).document


def _accepted(request: Request, job: ServiceJob) -> Response:
    """202; the tenant stands in the Location as it was sent."""
    tenant = request.scope["path"].split("/")[3]
    headers = {"Location": f"/v1/tenants/{tenant}/jobs/{job.id}", "Preference-Applied": "respond-async"}
    return JSONResponse({"id": job.id, "status": job.status}, 202, headers)
