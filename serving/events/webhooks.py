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
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import orjson
from pydantic import Field

from undertow.engine.base.queries import EventsQuery
from undertow.engine.base.results import Report
from undertow.serving.async_memories import AsyncMemories
from undertow.serving.auth.key_file import KeyFile, utc_now
from undertow.serving.auth.principal import Scope
from undertow.serving.client.results import Model
from undertow.serving.events.feed import Feed
from undertow.serving.events.sender import PREFIX, Sender, Undelivered
from undertow.serving.telemetry.metrics import HTTPMetrics

log = logging.getLogger(__name__)

# rows of each shard that are read for one request
BATCH = 100
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 3_600.0
# a webhook that was not woken looks for itself
LOOK_S = 60.0
GONE = "HTTP 410"
ENDED = "its key has ended"
PRIVATE = {"secret", "key_id", "at"}
SOUND: dict[str, Any] = {"attempts": 0, "failing_since": None, "error": None, "disabled_at": None}
SAVE = "insert or replace into webhooks values (?1, ?2)"
# by a task, which may be behind a deletion
UPDATE = "update webhooks set body = ?2 where id = ?1"
Run = Callable[[Callable[[sqlite3.Connection], Any]], Awaitable[Any]]


class Webhook(Model):
    """`tenant_keys`: null for all. `attempts`: failed ones since `failing_since`; `error`: of the last.

    Not shown: `key_id`, of who made it, and `at`, up to which lsn of each shard its receiver has taken all.
    """

    id: str
    url: str
    tenant_keys: list[str] | None
    include_text: bool
    created_at: str
    attempts: int = 0
    failing_since: float | None = None
    error: str | None = None
    disabled_at: str | None = None
    secret: str = ""
    key_id: str = ""
    at: dict[str, int] = Field(default_factory=dict)


class Webhooks:
    """All webhooks of a service. One that fails delays no other."""

    def __init__(self, memories: AsyncMemories, feed: Feed, sender: Sender, metrics: HTTPMetrics) -> None:
        self._memories, self._feed, self.sender = memories, feed, sender
        self.changing = asyncio.Lock()
        """Held from the look at what is known to the end of `add`, `enable` or `remove`."""
        self._events = metrics.webhook_events
        metrics.webhook_lag.set_function(self._lag_s)
        self.known: dict[str, Webhook] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, run: Run, most_s: float, keys: KeyFile | None) -> None:
        """Go on where the last service ended. `run`: of the state database; `most_s`: of failure in a row."""
        self._run, self.most_s, self._keys = run, most_s, keys
        for (body,) in await run(lambda db: db.execute("select body from webhooks").fetchall()):
            await self._launch(Webhook.model_validate_json(body))

    async def stop(self) -> None:
        await asyncio.gather(*map(self._end, self._tasks))

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
        return await self._launch(self.known[webhook_id].model_copy(update=SOUND))

    async def remove(self, webhook_id: str) -> None:
        await self._end(webhook_id)
        await self._run(lambda db: db.execute("delete from webhooks where id = ?", (webhook_id,)))
        del self.known[webhook_id], self._tasks[webhook_id]

    def may_tell(self, hook: Webhook, events: Sequence[Report] = ()) -> bool:
        """Whether the key that made it is in force and may read these events. Reads a file. KeyFileError."""
        if self._keys is None:
            return True
        key = self._keys.read().get(hook.key_id)
        if key is None or key.state(utc_now()) != "active" or not {Scope.ADMIN, Scope.READ} <= {*key.scopes}:
            return False
        if hook.tenant_keys is None:
            return key.reach.all_tenants
        # an erased tenant's name is unknown
        return all(key.reach.covers(e["tenant"]) for e in events if e["tenant"] is not None)

    def _lag_s(self) -> float:
        since = [h.failing_since for h in self.known.values() if h.failing_since and not h.disabled_at]
        return time.time() - min(since) if since else 0.0

    async def _launch(self, hook: Webhook) -> Webhook:
        await self._save(hook, SAVE)
        self._tasks[hook.id] = asyncio.create_task(self._follow(hook))
        return hook

    async def _end(self, webhook_id: str) -> None:
        task = self._tasks[webhook_id]
        while not task.done():  # a cancellation is lost where a call inside ends at the same moment
            task.cancel()
            await asyncio.wait([task], timeout=0.1)

    async def _save(self, hook: Webhook, statement: str) -> None:
        await self._run(lambda db: db.execute(statement, (hook.id, hook.model_dump_json())))
        self.known[hook.id] = hook

    async def _follow(self, hook: Webhook) -> None:
        keys = None if hook.tenant_keys is None else frozenset(hook.tenant_keys)
        with self._feed.listening(keys) as news:
            while hook.disabled_at is None:
                news.clear()
                try:
                    before, hook = hook, await self._tried(hook, keys)
                    if hook.attempts:
                        await asyncio.sleep(_backoff_s(hook.attempts))
                    elif hook.at == before.at:
                        with suppress(TimeoutError):
                            await asyncio.wait_for(news.wait(), LOOK_S)
                except Exception as error:  # noqa: BLE001 - of a shard, or of the disk; others go on
                    log.warning("webhook %s waits: %s", hook.id, type(error).__name__)
                    await asyncio.sleep(FIRST_RETRY_S)

    async def _tried(self, hook: Webhook, keys: frozenset[str] | None) -> Webhook:
        """The webhook after an attempt to tell what follows, as it is stored."""
        try:
            told, at = await self._tell(hook, keys)
        except Undelivered as failure:
            self._events.labels("failed").inc()
            after = self._failed(hook, str(failure))
        else:
            after = hook.model_copy(update={**SOUND, "at": at})
            if not told and not hook.attempts:
                return after
        await self._save(after, UPDATE)
        return after

    async def _tell(self, hook: Webhook, keys: frozenset[str] | None) -> tuple[int, dict[str, int]]:
        """Tell the next events: how many, and the cursor behind them. Undelivered."""
        pages = await self._memories.call(EventsQuery(hook.at, keys, BATCH, hook.include_text))
        if events := self._feed.named(pages):
            if not await asyncio.to_thread(self.may_tell, hook, events):
                raise Undelivered(ENDED)
            body = orjson.dumps({"type": "events", "data": events})
            message_id = f"{events[0]['id']}_{events[-1]['id']}"
            await self.sender.post(hook.url, hook.secret, message_id, body, hook.attempts)
            self._events.labels("sent").inc(len(events))
        return len(events), hook.at | {home: page.at for home, page in pages.items()}

    def _failed(self, hook: Webhook, error: str) -> Webhook:
        """After a failed attempt; disabled, if it was the last."""
        since = hook.failing_since or time.time()
        ended = _now() if error in (GONE, ENDED) or time.time() - since > self.most_s else None
        changed = {"attempts": hook.attempts + 1, "failing_since": since, "error": error}
        return hook.model_copy(update={**changed, "disabled_at": ended})


def _backoff_s(attempts: int) -> float:
    longest: float = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** min(attempts - 1, 30))
    return longest * random.uniform(0.5, 1)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
