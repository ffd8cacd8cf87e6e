"""Events of memories: as a stream to whoever reads it, and by webhooks to other systems."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import StreamingResponse

from undertow.engine.base.model import UndertowError
from undertow.engine.base.queries import TenantEventsQuery
from undertow.engine.base.results import Page
from undertow.serving.auth.principal import Principal, Scope
from undertow.serving.client.results import Listed
from undertow.serving.events.feed import heard
from undertow.serving.events.webhooks import Webhook
from undertow.serving.http.problems import Problem, bad_field
from undertow.serving.http.routes.access import FORBIDDEN, Access, GuardedRoute, TenantAccess
from undertow.serving.http.routes.schemas import WebhookMade, WebhookRequest, WebhookView
from undertow.serving.http.service import Sender, Served, Service, Tenant

router = APIRouter(route_class=GuardedRoute, tags=["events"])

EVENT_STREAM = "text/event-stream"
EXAMPLE = 'id: 5f0c...\nevent: memory.created\ndata: {"id": "5f0c...", "type": "memory.created", ...}\n\n'
STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Server-sent events; lines with an `id` alone move the cursor.",
        "content": {EVENT_STREAM: {"schema": {"type": "string"}, "example": EXAMPLE}},
    }
}
EVENTS_AT_ONCE = 200
HEARTBEAT_S = 15.0
HEARTBEAT = b": still here\n\n"
OF_ALL = "name the tenants: this key is bound to a prefix of their names."


@router.get(
    "/v1/tenants/{tenant}/events",
    response_class=StreamingResponse,
    responses=STREAM,
)
@Access(Scope.READ, streams=True)
async def events(
    request: Request,
    tenant: Tenant,
    service: Served,
    after: Annotated[
        str | None, Query(description="An event's id, or `latest`; default: the beginning.")
    ] = None,
    last_event_id: Annotated[str | None, Header(description="As `after`, and before it.")] = None,
    follow: Annotated[bool, Query(description="False: end with the last event that there is.")] = True,
    include_text: Annotated[bool, Query(description="With the memories' texts.")] = False,
) -> Any:
    """What happens to a tenant's memories, as server-sent events, in order; from where `Last-Event-ID` says.

    Types: memory.created, memory.updated, memory.deleted, turn.parked, tenant.erased. A stream ends when the
    service does, after an hour, or when the key is revoked: connect again with the last id.
    """
    query = TenantEventsQuery(tenant, last_event_id or after, EVENTS_AT_ONCE, include_text)
    first = await service.memories.call(query)
    return StreamingResponse(_stream(service, request, query, first, follow), media_type=EVENT_STREAM)


async def _stream(
    service: Service, request: Request, query: TenantEventsQuery, page: Page, follow: bool
) -> AsyncIterator[bytes]:
    """The events, page by page: what the reader does not take yet is not read yet."""
    ends_s = time.monotonic() + service.settings.stream_s
    key = frozenset([service.memories.tenant_key(query.tenant)])
    with service.feed.listening(key) as news, service.metrics.event_streams.track_inprogress():
        news.clear()
        while True:
            yield b"".join(map(_lines, page.items)) + b"id: %s\n\n" % (page.after or "").encode()
            is_all, query = page.after == query.after, replace(query, after=page.after)
            while is_all:
                left_s = min(HEARTBEAT_S, ends_s - time.monotonic())
                if not follow or left_s <= 0 or service.load.draining:
                    return
                if await heard(news, left_s):
                    break
                if not _may_go_on(service, request, query.tenant):
                    return
                yield HEARTBEAT
            try:
                page = await service.memories.call(query)
            except UndertowError:
                return  # the reader asks again from its last id, and is told what is wrong


def _lines(event: Any) -> bytes:
    kind: str = event["type"]
    return b"id: %s\nevent: %s\ndata: %s\n\n" % (event["id"].encode(), kind.encode(), orjson.dumps(event))


def _may_go_on(service: Service, request: Request, tenant: str) -> bool:
    """Whether the key still holds."""
    try:
        return service.guard.admit(request.headers).may(Scope.READ, tenant)
    except Problem:
        return False


# ---- webhooks


@router.post("/v1/webhooks", response_model=WebhookMade)
@Access(Scope.ADMIN, reaches=TenantAccess.ANY, once=True, act="webhook")
async def create_webhook(asked: WebhookRequest, service: Served, sender: Sender) -> Any:
    """Have events posted to a URL from now on, signed as Standard Webhooks. The secret is shown here alone.

    Without `tenants`: of those that the key names, or of all, with a key for all. The key needs the scope
    `read` for them too. What was posted is posted again until it was answered with 2xx.
    """
    names = asked.tenants or sender.reach.tenants
    if not names and not sender.reach.all_tenants:
        raise bad_field("tenants", OF_ALL)
    if not all(sender.may(Scope.READ, name) for name in names or (None,)):
        raise Problem(403, "forbidden", FORBIDDEN.format(scope="read", reaches="these tenants"))
    if len(service.webhooks.of(None)) >= service.settings.max_webhooks:
        raise Problem(429, "webhooks", "There are as many webhooks as may be. Delete some.")
    keys = {name: service.memories.tenant_key(name) for name in names}
    async with service.audited("webhook", sender.key_id):
        try:
            made = await service.webhooks.add(
                sender.key_id,
                asked.url,
                tuple(keys.values()) if names else None,
                include_text=asked.include_text,
            )
        except ValueError as error:
            raise bad_field("url", str(error)) from None
    return {**_view(made), "secret": made.secret, "tenants": keys}


@router.get("/v1/webhooks", response_model=Listed[WebhookView])
@Access(Scope.ADMIN, reaches=TenantAccess.ANY)
async def list_webhooks(service: Served, sender: Sender) -> Any:
    """The webhooks made with this key; with a key for all tenants, all. A disabled one says why."""
    return {"results": [_view(hook) for hook in _own(service, sender)]}


@router.post("/v1/webhooks/{webhook_id}/enable", response_model=WebhookView)
@Access(Scope.ADMIN, reaches=TenantAccess.ANY, once=True, act="webhook")
async def enable_webhook(webhook_id: str, service: Served, sender: Sender) -> Any:
    """Go on with a webhook that was disabled, or waits, from where it was left: nothing is left out."""
    async with service.audited("webhook", sender.key_id):
        return _view(await service.webhooks.enable(_one(service, sender, webhook_id)))


@router.delete("/v1/webhooks/{webhook_id}", response_model=WebhookView)
@Access(Scope.ADMIN, reaches=TenantAccess.ANY, once=True, act="webhook")
async def delete_webhook(webhook_id: str, service: Served, sender: Sender) -> Any:
    """Delete a webhook. A request that is under way is cut off."""
    async with service.audited("webhook", sender.key_id):
        await service.webhooks.remove(hook := _one(service, sender, webhook_id))
    return _view(hook)


def _own(service: Service, sender: Principal) -> list[Webhook]:
    return service.webhooks.of(None if sender.reach.all_tenants else sender.key_id)


def _one(service: Service, sender: Principal, webhook_id: str) -> Webhook:
    """Problem 404: there is none, or it is another key's."""
    if found := [hook for hook in _own(service, sender) if hook.id == webhook_id]:
        return found[0]
    raise Problem(404, "unknown-webhook", "This key has no such webhook. GET /v1/webhooks lists them.")


def _view(hook: Webhook) -> dict[str, Any]:
    state = "disabled" if hook.disabled_at else "failing" if hook.attempts else "active"
    shown = ("id", "url", "include_text", "created_at", "attempts", "error", "disabled_at")
    return {**{name: getattr(hook, name) for name in shown}, "tenant_keys": hook.keys, "state": state}
