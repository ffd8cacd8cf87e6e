"""Events of memories: as a stream, and by webhooks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import nullcontext, suppress
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Header, Query
from fastapi.responses import StreamingResponse

from undertow.engine.base.queries import EventsQuery
from undertow.serving.auth.oidc import TOKEN_ID
from undertow.serving.auth.principal import Principal, Scope
from undertow.serving.client.results import Listed
from undertow.serving.events.webhooks import PRIVATE, Webhook
from undertow.serving.http.problems import Problem, bad_field
from undertow.serving.http.routes.access import Access, GuardedRoute, TenantAccess
from undertow.serving.http.routes.schemas import WebhookRequest
from undertow.serving.http.routes.streaming import started
from undertow.serving.http.service import Sender, Served, Service, Tenant

router = APIRouter(route_class=GuardedRoute, tags=["events"])

EVENT_STREAM = "text/event-stream"
PAGE, HEARTBEAT_S = 200, 15.0
LINES = b"id: %s\nevent: %s\ndata: %s\n\n"
EVENT_ID = Header(pattern="^[0-9a-f]{32}$", description="Of the last event you have; default: none.")
LISTED = {"results": {"__all__": PRIVATE}}
MANAGES = Access(Scope.ADMIN, reaches=TenantAccess.ANY, once=True, act="webhook")


@router.get(
    "/v1/tenants/{tenant}/events",
    response_class=StreamingResponse,
    responses={200: {"content": {EVENT_STREAM: {"schema": {"type": "string"}}}}},
)
@Access(Scope.READ, streams=True)
async def events(
    tenant: Tenant,
    service: Served,
    last_event_id: Annotated[str | None, EVENT_ID] = None,
    follow: Annotated[bool, Query(description="False: end with the last event.")] = True,
    include_text: Annotated[bool, Query(description="With the memories' texts.")] = False,
) -> Any:
    """What happens to a tenant's memories, as server-sent events in order, from the beginning or behind
    `Last-Event-ID`: memory.created, memory.updated, memory.deleted, turn.parked, tenant.erased.

    A stream ends after some minutes, and with the service: connect again with the last id.
    """
    stream = _stream(service, tenant, last_event_id, follow, include_text)
    return StreamingResponse(await started(stream), media_type=EVENT_STREAM)


async def _stream(
    service: Service, tenant: str, last: str | None, follow: bool, text: bool
) -> AsyncGenerator[bytes]:
    """Page by page: what the client has not taken yet keeps the next one from being read."""
    ends_s = time.monotonic() + service.settings.stream_s
    feed, call, key = service.feed, service.memories.call, service.memories.tenant_key(tenant)
    at = {} if last is None else {home: feed.lsn(key, home, last) for home in await call(EventsQuery({}))}
    listening = feed.listening(frozenset([key])) if follow else nullcontext(asyncio.Event())
    with listening as news, service.metrics.event_streams.track_inprogress():
        while True:
            news.clear()
            pages = await call(EventsQuery(at, frozenset([key]), PAGE, text, asker=tenant))
            told = [event | {"tenant": tenant} for event in feed.named(pages)]
            lines = (LINES % (e["id"].encode(), e["type"].encode(), orjson.dumps(e)) for e in told)
            yield b"".join(lines) or b":\n\n"
            before, at = at, {home: page.at for home, page in pages.items()}
            left_s = min(HEARTBEAT_S, ends_s - time.monotonic())
            if at == before:
                if not follow or left_s <= 0 or service.load.draining:
                    return
                with suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), left_s)


# without an Idempotency-Key: its answer would be kept, and the secret in it
@router.post("/v1/webhooks", response_model=Webhook, response_model_exclude={"key_id", "at"})
@Access(Scope.ADMIN, reaches=TenantAccess.ANY, act="webhook")
async def create_webhook(asked: WebhookRequest, service: Served, sender: Sender) -> Any:
    """Have events posted to a URL from now on, signed as Standard Webhooks. The secret is shown here alone.

    Of the `tenants`; by default of those that the key names, or of all. The key needs `read` for them too.
    """
    if sender.key_id.startswith(TOKEN_ID):
        words = "A token ends, and a webhook does not. Use a key, from `undertow keys create`."
        raise Problem(403, "needs-key", words)
    names = asked.tenants or sender.reach.tenants
    if not all(sender.may(Scope.READ, name) for name in names or (None,)):
        raise Problem(403, "forbidden", "This key may not read these tenants. Name some that it may read.")
    keys = [service.memories.tenant_key(name) for name in names] or None
    async with service.webhooks.changing:
        _require_room(service, sender.key_id)
        async with service.audited("webhook", sender.key_id):
            try:
                return await service.webhooks.add(sender.key_id, asked.url, keys, asked.include_text)
            except ValueError as error:
                raise bad_field("url", str(error)) from None


@router.get("/v1/webhooks", response_model=Listed[Webhook], response_model_exclude=LISTED)
@Access(Scope.ADMIN, reaches=TenantAccess.ANY)
async def list_webhooks(service: Served, sender: Sender) -> Any:
    """The webhooks made with this key; with a key for all tenants, all. A disabled one says why."""
    return {"results": _own(service, sender)}


@router.post("/v1/webhooks/{webhook_id}/enable", response_model=Webhook, response_model_exclude=PRIVATE)
@MANAGES
async def enable_webhook(webhook_id: str, service: Served, sender: Sender) -> Any:
    """Go on with a webhook that is disabled, or waits, from where it was left: nothing is left out."""
    async with service.audited("webhook", sender.key_id), service.webhooks.changing:
        hook = _one(service, sender, webhook_id)
        if not await asyncio.to_thread(service.webhooks.may_tell, hook):
            raise Problem(409, "key-ended", "The key of this webhook has ended. Delete it, and make another.")
        return await service.webhooks.enable(hook.id)


@router.delete("/v1/webhooks/{webhook_id}", response_model=Webhook, response_model_exclude=PRIVATE)
@MANAGES
async def delete_webhook(webhook_id: str, service: Served, sender: Sender) -> Any:
    """Delete a webhook. A request of it that is under way is cut off."""
    async with service.audited("webhook", sender.key_id), service.webhooks.changing:
        await service.webhooks.remove((hook := _one(service, sender, webhook_id)).id)
    return hook


def _require_room(service: Service, key_id: str) -> None:
    """Problem 429: there are as many webhooks, or of this key, as may be."""
    settings, made = service.settings, [hook.key_id for hook in service.webhooks.known.values()]
    of_key = made.count(key_id) >= settings.max_key_webhooks
    if of_key or len(made) >= settings.max_webhooks:
        words = f"There are as many webhooks{' of this key' * of_key} as may be. Delete some."
        raise Problem(429, "webhooks", words, retry_after_s=60)


def _own(service: Service, sender: Principal) -> list[Webhook]:
    known = service.webhooks.known.values()
    return [hook for hook in known if sender.reach.all_tenants or hook.key_id == sender.key_id]


def _one(service: Service, sender: Principal, webhook_id: str) -> Webhook:
    """Problem 404: there is none, or it is another key's."""
    for hook in _own(service, sender):
        if hook.id == webhook_id:
            return hook
    raise Problem(404, "unknown-webhook", "This key has no such webhook. GET /v1/webhooks lists them.")
