"""A whole tenant: flush, export, import, erase, its policy, statistics and jobs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from undertow.engine.base.queries import (
    ExplainQuery,
    PolicyQuery,
    SetPolicyCommand,
    TenantStatsQuery,
    TenantUsageQuery,
)
from undertow.serving.auth.principal import Principal, Scope
from undertow.serving.client.results import Decided, Listed, Policy, Records
from undertow.serving.http.jobs import actions as acts
from undertow.serving.http.jobs.queue import Operation
from undertow.serving.http.problems import bad_field
from undertow.serving.http.routes.access import Access, GuardedRoute
from undertow.serving.http.routes.json_pages import written
from undertow.serving.http.routes.schemas import Accepted, CertificateView, Imported, JobView, PolicyRequest
from undertow.serving.http.routes.streaming import started
from undertow.serving.http.service import Again, RespondAsync, Sender, Served, Service, Tenant

router = APIRouter(route_class=GuardedRoute, tags=["tenants"])

NDJSON = "application/x-ndjson"
LINES = {NDJSON: {"schema": {"type": "string", "format": "binary"}}}
CHUNK_BYTES = 64 << 10
LOST_WITH_KEY = (
    "erasing the tenant removes it from this key, so the key could not ask for the job. "
    "Leave respond-async out and wait for the certificate."
)
ACCEPTED: dict[int | str, dict[str, Any]] = {
    202: {
        "model": Accepted,
        "description": "With Prefer: respond-async: the job is accepted, and will be carried out.",
        "headers": {"Location": {"description": "The job's path.", "schema": {"type": "string"}}},
    }
}


@dataclass
class OperationRequest:
    """A request for an operation that can run as a job."""

    request: Request
    tenant: str
    service: Service
    sender: Principal
    respond_async: bool

    async def accept(self, operation: Operation, body: bytes | None = None) -> Response:
        """Accept a job: 202, with a Location that spells the tenant as the request did."""
        key = self.service.memories.tenant_key(self.tenant)
        job = await self.service.jobs.accept(operation, self.tenant, key, self.sender.key_id, body)
        sent = self.request.scope["path"].split("/")[3]
        headers = {"Location": f"/v1/tenants/{sent}/jobs/{job.id}", "Preference-Applied": "respond-async"}
        return JSONResponse({"id": job.id, "status": job.status}, 202, headers)


async def _asked(
    request: Request, tenant: Tenant, service: Served, sender: Sender, respond_async: RespondAsync
) -> OperationRequest:
    return OperationRequest(request, tenant, service, sender, respond_async)


Asked = Annotated[OperationRequest, Depends(_asked)]


@router.post("/v1/tenants/{tenant}/flush", response_model=Decided, responses=ACCEPTED)
@Access(Scope.WRITE, once=True, long=True)
async def flush(asked: Asked, again: Again) -> Any:
    """Wait until every added turn is decided: consolidated into episodes and facts, or kept as a turn."""
    if asked.respond_async:
        return await asked.accept("flush")
    return await acts.flush(asked.service, asked.tenant, again=again)


@router.get(
    "/v1/tenants/{tenant}/export",
    response_class=StreamingResponse,
    responses={200: {"description": "One record a line.", "content": LINES}},
)
@Access(Scope.READ, long=True)
async def export(
    tenant: Tenant,
    service: Served,
    vectors: Annotated[bool, Query(description="With the vectors, as lists of numbers.")] = False,
) -> Response:
    """Everything stored for a tenant, all versions included: the input of an import.

    Streamed as fast as it is read. An export that fails midway is cut off: its last line is then not the
    record `end`.
    """
    records = service.memories.export(tenant, vectors=vectors)
    lines = await started(_lines(records, partial(service.turns.give_way, tenant)))
    return StreamingResponse(lines, media_type=NDJSON)


async def _lines(
    records: AsyncGenerator[Mapping[str, Any]], give_way: Callable[[float], Awaitable[None]]
) -> AsyncGenerator[bytes]:
    """JSON lines, in chunks of about CHUNK_BYTES, each after it has given way to others."""
    chunk, used_s = bytearray(), 0.0
    async with aclosing(records) as stream:
        async for record in stream:
            began_s = perf_counter()
            chunk += orjson.dumps(record) + b"\n"
            used_s += perf_counter() - began_s
            if len(chunk) >= CHUNK_BYTES:
                await give_way(used_s)
                used_s = 0.0
                yield bytes(chunk)
                chunk.clear()
    if chunk:
        yield bytes(chunk)


@router.post(
    "/v1/tenants/{tenant}/import",
    response_model=Imported,
    responses=ACCEPTED,
    openapi_extra={"requestBody": {"required": True, "content": LINES}},
)
@Access(Scope.WRITE, once=True, imports=True)
async def import_(asked: Asked, again: Again) -> Any:
    """Import an export into a tenant without memories; 409 if it has any.

    Everything is stored, or nothing. The tenant's name may differ from the exported one. An export that sets
    a policy, or other thresholds than this store's, needs a key that has the scope `admin` as well.
    """
    body = await asked.request.body()
    if asked.respond_async:
        return await asked.accept("import", body)
    key_id, admin = asked.sender.key_id, Scope.ADMIN in asked.sender.scopes
    return await acts.import_(asked.service, asked.tenant, body, key_id, as_admin=admin, again=again)


@router.get("/v1/tenants/{tenant}/policy", response_model=Policy)
@Access(Scope.READ)
async def policy(tenant: Tenant, service: Served) -> Any:
    """The policy that makes a tenant's memories, and the progress of a change."""
    return await service.memories.call(PolicyQuery(tenant))


@router.put("/v1/tenants/{tenant}/policy", response_model=Policy)
@Access(Scope.ADMIN, once=True, act="policy")
async def set_policy(tenant: Tenant, service: Served, sender: Sender, asked: PolicyRequest) -> Any:
    """Change a tenant's policy. The response does not wait for the change.

    A tenant without turns starts with it. Otherwise all turns are read again, which costs language model
    calls for each; searches find the former memories until that is done, then only the new ones. 409 if users
    have reworded or deleted memories, unless `drop_edits`. Setting the current policy has no effect.
    """
    async with service.audited("policy", sender.key_id, tenant):
        return await service.memories.call(SetPolicyCommand(tenant, asked.policy, asked.drop_edits))


@router.delete("/v1/tenants/{tenant}", response_model=CertificateView, responses=ACCEPTED)
@Access(Scope.ERASE, once=True, act="erase")
async def erase(asked: Asked) -> Any:
    """Erase a tenant: memories, vectors, history, jobs and kept responses, every byte, now.

    The certificate says what was removed and what is out of reach. Keys for this tenant alone are removed;
    keys for several tenants no longer name it.

    As a job it runs later: until it ends, the tenant can be read, and turns added meanwhile are erased too. A
    key that names the tenant could not fetch the certificate afterwards, so it must wait for the response.
    """
    if asked.respond_async:
        if asked.sender.reach.tenants:
            raise bad_field("Prefer", LOST_WITH_KEY)
        return await asked.accept("erase")
    return await acts.erase(asked.service, asked.tenant, asked.sender.key_id)


@router.get("/v1/tenants/{tenant}/stats", response_model=dict[str, int])
@Access(Scope.READ)
async def stats(tenant: Tenant, service: Served) -> Any:
    """Counts of a tenant's memories and of its undecided turns."""
    return await service.memories.call(TenantStatsQuery(tenant))


@router.get("/v1/tenants/{tenant}/usage", response_model=dict[str, dict[str, int]])
@Access(Scope.READ)
async def usage(tenant: Tenant, service: Served) -> Any:
    """Language model calls and tokens of a tenant, by operation, since its creation."""
    return await service.memories.call(TenantUsageQuery(tenant))


@router.get("/v1/tenants/{tenant}/explain", response_model=Records)
@Access(Scope.READ)
async def explain(
    tenant: Tenant,
    service: Served,
    limit: Annotated[int, Query(ge=1, le=1000)] = 1000,
    after_seq: Annotated[int, Query(ge=-1, le=2**53)] = -1,
) -> Any:
    """For each turn the decision, its reasons, and the memories made."""
    records = await service.memories.call(ExplainQuery(tenant, limit, after_seq))
    after = {"next_after_seq": records[-1]["seq"] if len(records) == limit else None}
    # FastAPI would check a thousand records against their model, on the event loop
    return Response(await written(service.turns, tenant, records, after), media_type="application/json")


@router.get("/v1/tenants/{tenant}/jobs", response_model=Listed[JobView])
@Access(Scope.READ)
async def list_jobs(tenant: Tenant, service: Served) -> Any:
    """A tenant's jobs, newest first: open ones, and those that ended within a day (by default)."""
    jobs = await service.jobs.of_tenant(service.memories.tenant_key(tenant))
    return {"results": [job.document for job in jobs]}


@router.get("/v1/tenants/{tenant}/jobs/{job_id}", response_model=JobView)
@Access(Scope.READ)
async def get_job(tenant: Tenant, job_id: str, service: Served) -> Any:
    """The state of a job; once done, with the operation's response."""
    return (await service.jobs.get(service.memories.tenant_key(tenant), job_id)).document
