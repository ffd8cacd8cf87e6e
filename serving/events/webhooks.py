"""Webhooks: where each one has come in the journals, and a task for each that tells it what follows.

A cursor goes on once its receiver has taken what comes before, so nothing is lost by a kill, or while a
webhook is disabled. Tenants stand here by their keyed hash; events themselves are read anew for each try.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar

import orjson

from undertow.engine.base.queries import EventsQuery
from undertow.engine.base.results import EventPage, Report
from undertow.serving.async_memories import AsyncMemories
from undertow.serving.events.feed import Feed, heard
from undertow.serving.events.sender import Sender, Undelivered, new_secret

log = logging.getLogger(__name__)

T = TypeVar("T")

# events read at a time, in one request at most, and requests at once, each of another tenant
PAGE, BATCH, AT_ONCE = 500, 100, 4
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 3_600.0

Place = tuple[str, str]
"""A shard and the key of a tenant there."""


class State(Protocol):
    """What is needed of the service's database."""

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T: ...


@dataclass(frozen=True, slots=True)
class Webhook:
    """One receiver. `keys`: of its tenants, None: all; `at`: up to which lsn of each shard it was told all.

    `failing_since`: seconds since 1970, of the first failed attempt after the last success; `error`: of the
    last one. `key_id`: whose it is.
    """

    id: str
    key_id: str
    url: str
    secret: str
    keys: tuple[str, ...] | None
    include_text: bool
    at: Mapping[str, int]
    created_at: str
    attempts: int = 0
    failing_since: float | None = None
    error: str | None = None
    disabled_at: str | None = None

    @property
    def tenants(self) -> frozenset[str] | None:
        return None if self.keys is None else frozenset(self.keys)


class Webhooks:
    """All webhooks of a service. `note`: told "sent" or "failed", and of how many events."""

    def __init__(
        self,
        memories: AsyncMemories,
        state: State,
        feed: Feed,
        sender: Sender,
        *,
        patience_s: float,
        note: Callable[[str, int], None] = lambda outcome, count: None,
    ) -> None:
        self.sender = sender
        self._memories, self._state, self._feed = memories, state, feed
        self._patience_s = patience_s
        self._note = note
        self._known: dict[str, Webhook] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Go on where the last service ended."""
        for (body,) in await self._state.run(lambda db: db.execute("select body from webhooks").fetchall()):
            self._launch(Webhook(**orjson.loads(body)))

    async def stop(self) -> None:
        await _cancelled(*self._tasks.values())
        self.sender.addresses.close()

    async def add(
        self, key_id: str, url: str, keys: tuple[str, ...] | None, *, include_text: bool
    ) -> Webhook:
        """A new one, durable on return: it is told what happens from now on. ValueError: the URL."""
        self.sender.addresses.checked(url)
        pages = await self._memories.call(EventsQuery({}))
        at = {home: page.at for home, page in pages.items()}
        made = Webhook(
            secrets.token_hex(16), key_id, url, new_secret(), keys, include_text, at, _iso(time.time())
        )
        await self._save(made)
        self._launch(made)
        return made

    def of(self, key_id: str | None) -> list[Webhook]:
        """Those of a key, or all, oldest first."""
        found = [hook for hook in self._known.values() if key_id in (None, hook.key_id)]
        return sorted(found, key=lambda hook: (hook.created_at, hook.id))

    async def enable(self, hook: Webhook) -> Webhook:
        """Try again now, from where it was left."""
        await self._end(hook.id)
        enabled = replace(self._known[hook.id], disabled_at=None, attempts=0, failing_since=None, error=None)
        await self._save(enabled)
        self._launch(enabled)
        return enabled

    async def remove(self, hook: Webhook) -> None:
        await self._end(hook.id)
        self._known.pop(hook.id, None)
        await self._state.run(lambda db: db.execute("delete from webhooks where id = ?", (hook.id,)))

    @property
    def lag_s(self) -> float:
        """How long the one that has failed longest, and is not disabled, has failed."""
        since = [h.failing_since for h in self._known.values() if h.failing_since and not h.disabled_at]
        return time.time() - min(since) if since else 0.0

    @property
    def disabled_count(self) -> int:
        return sum(hook.disabled_at is not None for hook in self._known.values())

    # ---- one webhook

    def _launch(self, hook: Webhook) -> None:
        self._known[hook.id] = hook
        if hook.disabled_at is None:
            self._tasks[hook.id] = asyncio.create_task(self._follow(hook))

    async def _end(self, hook_id: str) -> None:
        if (task := self._tasks.pop(hook_id, None)) is not None:
            await _cancelled(task)

    async def _follow(self, hook: Webhook) -> None:
        # what the receiver has taken beyond the cursor, while other tenants' events have failed
        taken: dict[Place, int] = {}
        with self._feed.listening(hook.tenants) as news:
            while hook.disabled_at is None:
                news.clear()
                try:
                    at = await self._tell(hook, taken)
                    is_all, is_news = at == hook.at, bool(taken) or hook.attempts > 0
                    hook = replace(hook, at=at, attempts=0, failing_since=None, error=None)
                    await self._kept(hook, durably=is_news)
                    taken.clear()
                    if is_all:
                        await heard(news)
                except Undelivered as failure:
                    self._note("failed", 1)
                    await self._kept(hook := self._failed(hook, failure))
                    await asyncio.sleep(_backoff_s(hook.attempts))
                except Exception as error:  # noqa: BLE001 - of a shard, of the disk; other webhooks go on
                    log.warning("webhook %s waits: %s", hook.id, type(error).__name__)
                    await asyncio.sleep(FIRST_RETRY_S)

    async def _tell(self, hook: Webhook, taken: dict[Place, int]) -> dict[str, int]:
        """Tell the next events of each shard; the cursor behind them. Undelivered: some were not taken."""
        query = EventsQuery(hook.at, hook.tenants, PAGE, hook.include_text)
        pages = await self._memories.call(query)
        slots = asyncio.Semaphore(AT_ONCE)

        async def tell(place: Place, events: list[tuple[int, Report]]) -> None:
            for start in range(0, len(events), BATCH):
                async with slots:
                    batch = events[start : start + BATCH]
                    await self._post(hook, [event for _, event in batch])
                    taken[place] = batch[-1][0]

        by_place = _by_place(pages, taken)
        ended = await asyncio.gather(*(tell(*item) for item in by_place.items()), return_exceptions=True)
        errors = [error for error in ended if error is not None]
        for error in sorted(errors, key=lambda error: not isinstance(error, Undelivered)):
            raise error
        return {**hook.at, **{home: page.at for home, page in pages.items()}}

    async def _post(self, hook: Webhook, events: list[Report]) -> None:
        message_id = f"{events[0]['id']}_{events[-1]['id']}"
        body = orjson.dumps({"type": "events", "data": events})
        await self.sender.post(hook.url, hook.secret, message_id, body, hook.attempts)
        self._note("sent", len(events))

    def _failed(self, hook: Webhook, failure: Undelivered) -> Webhook:
        """After a failed attempt; disabled, if it was the last."""
        now = time.time()
        since = hook.failing_since or now
        ends = failure.gone or now - since > self._patience_s
        failed = replace(hook, attempts=hook.attempts + 1, failing_since=since, error=str(failure))
        return replace(failed, disabled_at=_iso(now)) if ends else failed

    async def _kept(self, hook: Webhook, *, durably: bool = True) -> None:
        self._known[hook.id] = hook
        if durably:
            await self._save(hook)

    async def _save(self, hook: Webhook) -> None:
        row = (hook.id, orjson.dumps(asdict(hook)).decode())
        await self._state.run(lambda db: db.execute("insert or replace into webhooks values (?, ?)", row))


def _by_place(
    pages: Mapping[str, EventPage], taken: Mapping[Place, int]
) -> dict[Place, list[tuple[int, Report]]]:
    """The events that were not taken yet, in order, by shard and tenant."""
    found: defaultdict[Place, list[tuple[int, Report]]] = defaultdict(list)
    for home, page in pages.items():
        for lsn, event in page.items:
            if lsn > taken.get(place := (home, event["tenant_key"]), -1):
                found[place].append((lsn, event))
    return found


def _backoff_s(attempts: int) -> float:
    longest = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2 ** min(attempts - 1, 30))
    return longest * random.uniform(0.5, 1)


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")


async def _cancelled(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
