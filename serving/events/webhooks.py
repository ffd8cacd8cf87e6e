"""Webhooks: where each one has come in the journals, and a task for each that tells it what follows.

A cursor goes on once its receiver has taken what comes before, so nothing is lost by a kill, or while a
webhook is disabled. Tenants stand here by their keyed hash; events are read anew for each try.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import sqlite3
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import orjson

from undertow.engine.base.queries import EventsQuery
from undertow.serving.async_memories import AsyncMemories
from undertow.serving.client.results import Model
from undertow.serving.events.feed import Feed, heard
from undertow.serving.events.sender import PREFIX, Sender, Undelivered
from undertow.serving.telemetry.metrics import HTTPMetrics

log = logging.getLogger(__name__)

# rows of each shard that are read for one request
BATCH = 100
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 3_600.0
GONE = "HTTP 410"
Run = Callable[[Callable[[sqlite3.Connection], Any]], Awaitable[Any]]


class WebhookView(Model):
    """`tenant_keys`: null for all. `attempts`: failed ones since `failing_since`; `error`: of the last."""

    id: str
    url: str
    tenant_keys: list[str] | None
    include_text: bool
    created_at: str
    attempts: int = 0
    failing_since: float | None = None
    error: str | None = None
    disabled_at: str | None = None


class WebhookMade(WebhookView):
    """`secret`: verifies the signatures; it is not shown again."""

    secret: str


class Webhook(WebhookMade):
    """`at`: up to which lsn of each shard the receiver has taken all; `key_id`: whose it is."""

    key_id: str
    at: dict[str, int]


class Webhooks:
    """All webhooks of a service. One that fails delays no other."""

    def __init__(
        self,
        memories: AsyncMemories,
        run: Run,
        feed: Feed,
        sender: Sender,
        metrics: HTTPMetrics,
        most_s: float,
    ) -> None:
        """`run`: of the state database. `most_s`: one that fails for longer is disabled."""
        self._memories, self._run, self._feed, self.sender = memories, run, feed, sender
        self._events, self._most_s = metrics.webhook_events, most_s
        metrics.webhook_lag.set_function(self._lag_s)
        self.known: dict[str, Webhook] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Go on where the last service ended."""
        for (body,) in await self._run(lambda db: db.execute("select body from webhooks").fetchall()):
            await self._launch(Webhook.model_validate_json(body))

    async def stop(self) -> None:
        await asyncio.gather(*map(self._end, [*self._tasks]))

    async def add(self, key_id: str, url: str, keys: list[str] | None, include_text: bool) -> Webhook:
        """A new one, durable on return: it is told what happens from now on. ValueError: the URL."""
        self.sender.checked(url)
        at = {home: page.at for home, page in (await self._memories.call(EventsQuery({}))).items()}
        made: dict[str, Any] = {"id": secrets.token_hex(16), "created_at": _now(), "at": at, "key_id": key_id}
        made["secret"] = PREFIX + b64encode(secrets.token_bytes(32)).decode()
        return await self._launch(Webhook(**made, url=url, tenant_keys=keys, include_text=include_text))

    async def enable(self, webhook_id: str) -> Webhook:
        """Try again now, from where it was left."""
        await self._end(webhook_id)
        return await self._launch(_without_failure(self.known[webhook_id]))

    async def remove(self, webhook_id: str) -> None:
        await self._end(webhook_id)
        del self.known[webhook_id]
        await self._run(lambda db: db.execute("delete from webhooks where id = ?", (webhook_id,)))

    def _lag_s(self) -> float:
        since = [h.failing_since for h in self.known.values() if h.failing_since and not h.disabled_at]
        return time.time() - min(since) if since else 0.0

    async def _launch(self, hook: Webhook) -> Webhook:
        await self._save(hook)
        self._tasks[hook.id] = asyncio.create_task(self._follow(hook))
        return hook

    async def _end(self, webhook_id: str) -> None:
        self._tasks[webhook_id].cancel()
        await asyncio.gather(self._tasks[webhook_id], return_exceptions=True)

    async def _save(self, hook: Webhook) -> Webhook:
        row = (hook.id, hook.model_dump_json())
        await self._run(lambda db: db.execute("insert or replace into webhooks values (?, ?)", row))
        self.known[hook.id] = hook
        return hook

    async def _follow(self, hook: Webhook) -> None:
        keys = None if hook.tenant_keys is None else frozenset(hook.tenant_keys)
        with self._feed.listening(keys) as news:
            while hook.disabled_at is None:
                news.clear()
                try:
                    told, at = await self._tell(hook, keys)
                    is_all, is_news = at == hook.at, told or hook.attempts
                    hook = _without_failure(hook, at=at)
                    if is_news:
                        await self._save(hook)
                    if is_all:
                        await heard(news)
                except Undelivered as failure:
                    self._events.labels("failed").inc()
                    hook = await self._save(self._failed(hook, str(failure)))
                    await asyncio.sleep(_backoff_s(hook.attempts))
                except Exception as error:  # noqa: BLE001 - of a shard, or of the disk; others go on
                    log.warning("webhook %s waits: %s", hook.id, type(error).__name__)
                    await asyncio.sleep(FIRST_RETRY_S)

    async def _tell(self, hook: Webhook, keys: frozenset[str] | None) -> tuple[int, dict[str, int]]:
        """Tell the next events: how many, and the cursor behind them. Undelivered."""
        pages = await self._memories.call(EventsQuery(hook.at, keys, BATCH, hook.include_text))
        if events := self._feed.named(pages):
            body = orjson.dumps({"type": "events", "data": events})
            message_id = f"{events[0]['id']}_{events[-1]['id']}"
            await self.sender.post(hook.url, hook.secret, message_id, body, hook.attempts)
            self._events.labels("sent").inc(len(events))
        return len(events), hook.at | {home: page.at for home, page in pages.items()}

    def _failed(self, hook: Webhook, error: str) -> Webhook:
        """After a failed attempt; disabled, if it was the last."""
        since = hook.failing_since or time.time()
        ended = _now() if error == GONE or time.time() - since > self._most_s else None
        changed = {"attempts": hook.attempts + 1, "failing_since": since, "error": error}
        return hook.model_copy(update={**changed, "disabled_at": ended})


def _without_failure(hook: Webhook, **changed: Any) -> Webhook:
    none = {"attempts": 0, "failing_since": None, "error": None, "disabled_at": None}
    return hook.model_copy(update=none | changed)


def _backoff_s(attempts: int) -> float:
    longest: float = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** min(attempts - 1, 30))
    return longest * random.uniform(0.5, 1)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
