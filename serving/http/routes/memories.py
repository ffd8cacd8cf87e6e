"""Single memories and lists of them: get, list, update, delete, history, delete all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query, Request

from undertow.engine.base.queries import DeleteCommand, EraseCommand, UpdateCommand
from undertow.serving.auth.principal import Scope
from undertow.serving.http.problems import bad_field
from undertow.serving.http.routes.access import GuardedRoute, needs
from undertow.serving.http.routes.audited import audited
from undertow.serving.http.routes.dependencies import Again, MemoryId, Sender, Served, Tenant
from undertow.serving.http.schemas.base import Kind, MomentText
from undertow.serving.http.schemas.memories import (
    AllDeleted,
    Changed,
    History,
    MemoryList,
    MemoryView,
    UpdateRequest,
)

router = APIRouter(route_class=GuardedRoute, tags=["memories"])

ONE = "/v1/tenants/{tenant}/memories/{memory_id}"
ALL = "/v1/tenants/{tenant}/memories"
FILTER = "filter."


@router.get(ALL, name="list")
@needs(Scope.READ)
async def list_(
    request: Request,
    tenant: Tenant,
    service: Served,
    kind: Annotated[list[Kind] | None, Query(description="May be repeated; left out: all kinds.")] = None,
    since: Annotated[MomentText | None, Query()] = None,
    until: Annotated[MomentText | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str | None, Query(description="The `next` of the page before.")] = None,
) -> MemoryList:
    """A tenant's memories in order of birth, page by page.

    `filter.KEY=VALUE` asks for turns with that value of a metadata key, and for what rests on them; repeated
    for one key it means any of the values. A value that reads as a JSON number, true or false means that too.
    """
    if limit > service.settings.max_page:
        raise bad_field("limit", f"is {limit}; ask for at most {service.settings.max_page:,}.")
    where = _where(request)
    page = await service.memories.list(
        tenant, kinds=kind, since=since, until=until, where=where or None, limit=limit, after=after
    )
    return MemoryList(results=[view(report) for report in page.items], next=page.after)


@router.get(ONE)
@needs(Scope.READ)
async def get(tenant: Tenant, memory_id: MemoryId, service: Served) -> MemoryView:
    """One memory as it stands."""
    return view(await service.memories.get(memory_id, tenant=tenant))


@router.get(ONE + "/history")
@needs(Scope.READ)
async def history(tenant: Tenant, memory_id: MemoryId, service: Served) -> History:
    """Every version of one memory, its deletion included. Of a deleted turn nothing is left: 404."""
    versions = await service.memories.history(memory_id, tenant=tenant)
    return History(results=[view(version) for version in versions])


@router.put(ONE)
@needs(Scope.WRITE, once=True)
async def update(
    tenant: Tenant, memory_id: MemoryId, asked: UpdateRequest, service: Served, again: Again
) -> Changed:
    """Put other words in the place of a memory.

    An episode or a fact has a new version under the same id; its history stays. A turn is deleted, and
    another with its session, time and metadata takes its place under a new id: the one that is answered.
    """
    wording = asked.messages if asked.text is None else asked.text
    assert wording is not None, "one of both was given"
    updated = await service.memories.call(UpdateCommand(memory_id, tenant, wording, again=again))
    return Changed.model_validate({"id": updated.id, "kind": updated.kind, "event": "UPDATE"})


@router.delete(ONE)
@needs(Scope.WRITE, once=True)
async def delete(tenant: Tenant, memory_id: MemoryId, service: Served, again: Again) -> Changed:
    """Delete one memory. The words of a turn are gone at once, and what rests on it is remade without it; an
    episode or a fact goes alone, and its history stays."""
    kind = await service.memories.call(DeleteCommand(memory_id, tenant, again=again))
    return Changed.model_validate({"id": memory_id, "kind": kind, "event": "DELETE"})


@router.delete(ALL)
@needs(Scope.ERASE, once=True, act="delete_all")
async def delete_all(tenant: Tenant, service: Served, sender: Sender, again: Again) -> AllDeleted:
    """Delete all of a tenant's memories with their history: gone from every answer at once.

    The bytes go with the next purge; to have them gone now, with a certificate, erase the tenant.
    """
    async with audited(service.audit, "delete_all", sender, service.memories.tenant_key(tenant)):
        await service.memories.call(EraseCommand(tenant, again=again))
    return AllDeleted()


def view(report: Mapping[str, Any]) -> MemoryView:
    """A report of the engine as callers see it, in the words of requests; its tenant they know."""
    names = {"text": "memory", "session": "session_id"}
    shown = {names.get(name, name): value for name, value in report.items() if name != "tenant"}
    return MemoryView(**{"memory": "", **shown})


def _where(request: Request) -> dict[str, list[Any]]:
    """The filters of a query string."""
    where: dict[str, list[Any]] = {}
    for name, value in request.query_params.multi_items():
        if name.startswith(FILTER):
            where.setdefault(name.removeprefix(FILTER), []).extend([value, *_scalar(value)])
    return where


def _scalar(text: str) -> list[Any]:
    """What a text reads as in JSON, if that is a number, true or false."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return []
    return [value] if isinstance(value, int | float) else []
