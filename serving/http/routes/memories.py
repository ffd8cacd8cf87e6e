"""Single memories and lists of them: get, list, update, delete, history, delete all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Query, Request, Response

from undertow.engine.base.queries import DeleteCommand, GetQuery, HistoryQuery, ListQuery, UpdateCommand
from undertow.engine.search.where import Where
from undertow.serving.auth.principal import Scope
from undertow.serving.client.results import Changed, Kind, Listed, Memory, Page
from undertow.serving.http.jobs import actions as acts
from undertow.serving.http.problems import bad_field
from undertow.serving.http.routes.access import Access, GuardedRoute
from undertow.serving.http.routes.json_pages import written
from undertow.serving.http.routes.schemas import AllDeleted, FiltersText, MomentText, UpdateRequest
from undertow.serving.http.service import Again, MemoryId, Sender, Served, Tenant

router = APIRouter(route_class=GuardedRoute, tags=["memories"])

ONE = "/v1/tenants/{tenant}/memories/{memory_id}"
ALL = "/v1/tenants/{tenant}/memories"
FILTER = "filter."


@router.get(ALL, name="list", response_model=Page)
@Access(Scope.READ)
async def list_(
    request: Request,
    tenant: Tenant,
    service: Served,
    kind: Annotated[list[Kind] | None, Query(description="Repeatable; default: all kinds.")] = None,
    filters: Annotated[FiltersText | None, Query()] = None,
    since: Annotated[MomentText | None, Query()] = None,
    until: Annotated[MomentText | None, Query()] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str | None, Query(description="The `next` of the page before.")] = None,
) -> Any:
    """A tenant's memories in creation order, page by page.

    `filter.KEY=VALUE` selects turns with that value of a metadata key, and memories made from them; repeated
    for one key it means any of the values; at most 16 keys, with 64 values each. A value that parses as a
    JSON number, true or false matches that too. `filters` takes what `filters` of a search takes, as JSON.
    """
    if limit > service.settings.max_page:
        raise bad_field("limit", f"is {limit}; ask for at most {service.settings.max_page:,}.")
    query = ListQuery(tenant, kind, since, until, _filters(request, filters) or None, limit, after)
    page = await service.memories.call(query)
    # FastAPI would check a thousand memories against their model, on the event loop
    told = await written(service.turns, tenant, page.items, {"next": page.after}, _view)
    return Response(told, media_type="application/json")


@router.get(ONE, response_model=Memory)
@Access(Scope.READ)
async def get(tenant: Tenant, memory_id: MemoryId, service: Served) -> Any:
    """One memory in its current version."""
    report = await service.memories.call(GetQuery(memory_id, tenant))
    return _view(report)


@router.get(ONE + "/history", response_model=Listed[Memory])
@Access(Scope.READ)
async def history(tenant: Tenant, memory_id: MemoryId, service: Served) -> Any:
    """Every version of one memory, oldest first, with its deletion. A deleted turn has no history: 404."""
    versions = await service.memories.call(HistoryQuery(memory_id, tenant))
    return {"results": [_view(version) for version in versions]}


@router.put(ONE, response_model=Changed)
@Access(Scope.WRITE, once=True)
async def update(
    tenant: Tenant, memory_id: MemoryId, asked: UpdateRequest, service: Served, again: Again
) -> Any:
    """Reword a memory.

    An episode or a fact gets a new version under the same id; its history stays. A turn is deleted and
    replaced by another with its session, time and metadata: the response has the new id.
    """
    wording = asked.messages if asked.text is None else asked.text
    assert wording is not None, "one of both was given"
    updated = await service.memories.call(UpdateCommand(memory_id, tenant, wording, again=again))
    return {"id": updated.id, "kind": updated.kind, "event": "UPDATE"}


@router.delete(ONE, response_model=Changed)
@Access(Scope.WRITE, once=True)
async def delete(tenant: Tenant, memory_id: MemoryId, service: Served, again: Again) -> Any:
    """Delete one memory. A turn's words are gone at once, and memories made from it are remade without it; an
    episode or a fact is deleted alone, and its history stays."""
    kind = await service.memories.call(DeleteCommand(memory_id, tenant, again=again))
    return {"id": memory_id, "kind": kind, "event": "DELETE"}


@router.delete(ALL)
@Access(Scope.ERASE, once=True, act="delete_all")
async def delete_all(tenant: Tenant, service: Served, sender: Sender, again: Again) -> AllDeleted:
    """Delete all of a tenant's memories with their history: gone from every response at once.

    Its jobs and kept responses go too; its keys stay. The next purge removes the bytes. To remove all now,
    with a certificate, erase the tenant.
    """
    await acts.delete_all(service, tenant, sender.key_id, again=again)
    return AllDeleted()


def _view(report: Mapping[str, Any]) -> dict[str, Any]:
    """A report of the engine in the field names of requests, without its tenant."""
    names = {"text": "memory", "session": "session_id"}
    return {"memory": "", **{names.get(k, k): value for k, value in report.items() if k != "tenant"}}


def _filters(request: Request, text: str | None) -> dict[str, Any]:
    """The metadata filters of a query string, beside those given as JSON. Problem 422: too many, or twice."""
    where: dict[str, list[Any]] = {}
    for name, value in request.query_params.multi_items():
        if name.startswith(FILTER):
            where.setdefault(name.removeprefix(FILTER), []).extend([value, *_scalar(value)])
    given: dict[str, Any] = orjson.loads(text) if text else {}
    if twice := [key for key in given if key in where]:
        raise bad_field(f"filter.{twice[0]}", "is given as filters too. Give it once.")
    try:
        Where.of(both := {**given, **where})
    except ValueError as error:
        raise bad_field("filter", str(error)) from None
    return both


def _scalar(text: str) -> list[Any]:
    """The JSON number, true or false that a text parses as, if any."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return []
    return [value] if isinstance(value, int | float) else []
