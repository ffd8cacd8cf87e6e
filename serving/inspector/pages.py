"""The pages, as guarded routes over the calls of the API. They change nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from pydantic import BeforeValidator

from undertow.engine.api.views.listing import after_record
from undertow.engine.base import queries as calls
from undertow.engine.base.limits import MAX_QUERY_CHARS
from undertow.engine.base.results import Report
from undertow.serving.auth.principal import Principal, Scope, check_name
from undertow.serving.http.middleware.guard import key_text
from undertow.serving.http.problems import Problem, bad_field
from undertow.serving.http.routes.access import Access, GuardedRoute, TenantAccess
from undertow.serving.http.routes.admin import covered_names
from undertow.serving.http.routes.schemas import MomentText
from undertow.serving.http.service import MemoryId, Sender, Served, Service, Tenant
from undertow.serving.inspector import views
from undertow.serving.inspector.gate import COOKIE, ROOT, SIGN_IN, SIGNED_IN, InspectorGate, set_cookie
from undertow.serving.inspector.sessions import Sessions
from undertow.serving.inspector.views import at, page

ONE = ROOT + "/tenants/{tenant}"
TURNS_A_PAGE = 50
NAMES_A_PAGE = 100
# whose words a memory's page shows; the others are links
MOST_SOURCES = 20

router = APIRouter(route_class=GuardedRoute, include_in_schema=False)

# an empty field of a form is none
Moment = Annotated[MomentText | None, BeforeValidator(lambda text: text or None), Query()]


def inspector(app: FastAPI) -> None:
    """Add the pages to the application of a service."""
    app.state.inspector_sessions = sessions = Sessions()
    app.include_router(router)
    app.add_middleware(InspectorGate, sessions=sessions)


class Pages:
    """Renders a page for the sender of a request."""

    def __init__(self, request: Request, service: Service, sender: Principal) -> None:
        self.service, self.sender, self.call = service, sender, service.memories.call
        self._signed_in = COOKIE in request.cookies

    async def show(self, name: str, title: str, tenant: str = "", **values: Any) -> Response:
        """Rendered beside the event loop, in the tenant's turn: what is shown may be long."""
        health = self.sender.may(Scope.ADMIN, None)
        own = {"title": title, "signed_in": self._signed_in, "sees_health": health}
        shown = partial(page, name, sender=self.sender, tenant=tenant, **own, **values)
        return HTMLResponse(await self.service.turns.aside(tenant, shown, paced=False))

    async def turns(self, tenant: str, seqs: Sequence[int]) -> list[tuple[int, Report | None]]:
        """The turns at some records; None for one that is deleted."""
        asked = [calls.ListQuery(tenant, ("turn",), limit=1, after=after_record(seq - 1)) for seq in seqs]
        listed = await asyncio.gather(*map(self.call, asked))
        found = {turn["seq"]: turn for one in listed for turn in one.items}
        return [(seq, found.get(seq)) for seq in seqs]


async def _shown(request: Request, service: Served, sender: Sender) -> Pages:
    return Pages(request, service, sender)


Shown = Annotated[Pages, Depends(_shown)]


@router.get(ROOT)
@Access(Scope.READ, reaches=TenantAccess.ANY)
async def start(pages: Shown, after: str = "") -> Response:
    """The tenants that the key covers: all with memories for an administrator, else those that it names."""
    names, more = sorted(pages.sender.reach.tenants), None
    if Scope.ADMIN in pages.sender.scopes:
        names = await covered_names(pages.service, pages.sender, "", NAMES_A_PAGE, after)
        more = names[-1] if len(names) == NAMES_A_PAGE else None
    return await pages.show("start", "Tenants", names=names, after=after, more=more)


@router.post(SIGN_IN)
@Access(Scope.READ, reaches=TenantAccess.ANY)
async def sign_in(request: Request) -> Response:
    """Open a session for the key of this request."""
    response, key = RedirectResponse(f"{ROOT}?{SIGNED_IN}", 303), key_text(request.headers)
    if key is not None:  # else the service asks for none
        if (token := request.app.state.inspector_sessions.open(key)) is None:
            words = "Too many sessions are open. Wait until some have ended."
            raise Problem(429, "sessions", words, retry_after_s=60.0)
        set_cookie(response, request.headers, token)
    return response


@router.get(ROOT + "/open")
@Access(Scope.READ, reaches=TenantAccess.ANY)
async def open_tenant(tenant: str) -> Response:
    """Where the form that names a tenant leads."""
    try:
        check_name(tenant)
    except ValueError as error:
        raise bad_field("tenant", str(error)) from None
    return RedirectResponse(at(tenant), 303)


@router.get(ONE)
@Access(Scope.READ)
async def timeline(
    pages: Shown, tenant: Tenant, after: Annotated[int, Query(ge=-1, le=2**53)] = -1, newest: bool = False
) -> Any:
    """A tenant's turns in order, with what was decided for each and why."""
    if newest:
        last = await pages.call(calls.ExplainQuery(tenant, -TURNS_A_PAGE))
        return RedirectResponse(f"{at(tenant)}?after={last[0]['seq'] - 1 if last else -1}", 303)
    explained, turns, stats, policy, usage = await asyncio.gather(
        pages.call(calls.ExplainQuery(tenant, TURNS_A_PAGE + 1, after)),
        pages.call(calls.ListQuery(tenant, ("turn",), limit=TURNS_A_PAGE, after=after_record(after))),
        pages.call(calls.TenantStatsQuery(tenant)),
        pages.call(calls.PolicyQuery(tenant)),
        pages.call(calls.TenantUsageQuery(tenant)),
    )
    lines = views.timeline(explained[:TURNS_A_PAGE], turns.items, policy["policy"])
    more = lines[-1]["seq"] if len(explained) > TURNS_A_PAGE else None
    given = {"lines": lines, "stats": stats, "policy": policy, "usage": usage, "after": after, "more": more}
    return await pages.show("timeline", f"Timeline of {tenant}", tenant=tenant, **given)


@router.get(ONE + "/memories/{memory_id}")
@Access(Scope.READ)
async def memory(pages: Shown, tenant: Tenant, memory_id: MemoryId) -> Response:
    """One memory: its versions, each against the one before, and the turns that it rests on."""
    history = await pages.call(calls.HistoryQuery(memory_id, tenant))
    versions = await pages.service.turns.aside(tenant, views.versions, history, paced=False)
    newest, lines = history[-1], []
    if newest["kind"] == "turn":
        explained = await pages.call(calls.ExplainQuery(tenant, 1, newest["seq"] - 1))
        lines = views.timeline(explained, [newest], "")
    seqs = sorted(newest.get("source_seqs", ()))
    sources = await pages.turns(tenant, seqs[:MOST_SOURCES])
    given = {"memory": newest, "versions": versions, "older": len(history) - len(versions)}
    given |= {"sources": sources, "others": seqs[MOST_SOURCES:], "lines": lines}
    return await pages.show("memory", f"{newest['kind']} {memory_id[:8]}", tenant=tenant, **given)


@router.get(ONE + "/search")
@Access(Scope.READ)
async def search(
    pages: Shown,
    tenant: Tenant,
    q: Annotated[str, Query(max_length=MAX_QUERY_CHARS)] = "",
    k: Annotated[int, Query(ge=1, le=50)] = 5,
    since: Moment = None,
    until: Moment = None,
) -> Response:
    """A search by cosine and words, explained, beside one by cosine alone."""
    asked, hybrid, dense = (tenant, q, k, k, k, since, until), None, None
    if q.strip():
        hybrid = await pages.call(calls.SearchQuery(*asked, explain=True))
        if not hybrid.words_only:
            dense = await pages.call(calls.SearchQuery(*asked, dense=True))
    else:  # 404 for an unknown tenant
        await pages.call(calls.TenantStatsQuery(tenant))
    places = [views.places(found.ranked()) if found else {} for found in (hybrid, dense)]
    given = {"q": q, "k": k, "since": since, "until": until, "hybrid": hybrid, "dense": dense}
    return await pages.show("search", f"Search in {tenant}", tenant=tenant, places=places, **given)


@router.get(ROOT + "/health")
@Access(Scope.ADMIN, reaches=TenantAccess.STORE)
async def health(pages: Shown, spend: bool = False) -> Response:
    """The shards. `spend`: with the tokens of all tenants, for which each of them is read."""
    service = pages.service
    shards, (_, llm) = await service.memories.status(), await service.readiness.look()
    usage: Any = await pages.call(calls.UsageQuery()) if spend else None
    given = {"usage": usage, "left": await service.budgets.left(pages.sender), "load": service.load}
    return await pages.show("health", "Health", shards=shards, llm=llm, **given)
