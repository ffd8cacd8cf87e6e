"""Wakes streams and webhooks when there are new events, and gives events their ids.

A wake-up is a hint: a listener reads the journal behind its cursor when it is woken, and after a timeout too.
An id does not reveal how many events other tenants have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from undertow.engine.base.model import UndertowError
from undertow.engine.base.queries import EventPage, EventsQuery
from undertow.engine.base.results import Report
from undertow.serving.async_memories import AsyncMemories

PAGE = 500
# between two questions to all shards: where something is new, each has the log moved to Lance, to read it
POLL_S = 0.5


class Feed:
    """Used on the event loop only. It polls the shards only while there are listeners."""

    def __init__(self, memories: AsyncMemories) -> None:
        self._memories = memories
        # each with the keys of its tenants; None: all
        self._listeners: dict[asyncio.Event, frozenset[str] | None] = {}
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def listening(self, keys: frozenset[str] | None) -> Iterator[asyncio.Event]:
        """An event that is set when these tenants may have news; None: all. Clear it before you read."""
        self._listeners[news := asyncio.Event()] = keys
        self._task = self._task or asyncio.create_task(self._poll())
        try:
            yield news
        finally:
            del self._listeners[news]
            if not self._listeners and self._task is not None:
                self._task.cancel()
                self._task = None

    def wake(self, changed: frozenset[str] | None = None) -> None:
        """Wake those who listen to these tenants; None: all."""
        for news, keys in self._listeners.items():
            if changed is None or (changed if keys is None else keys & changed):
                news.set()

    async def _poll(self) -> None:
        at: Mapping[str, int] = {}
        while True:
            is_behind = False
            with suppress(UndertowError):  # a shard is down: later
                pages = await self._memories.call(EventsQuery(at, None, PAGE if at else 0))
                told = frozenset(e["tenant_key"] for page in pages.values() for _, e in page.items)
                # what came before the end of a shard that was not known was not looked at
                self.wake(told if pages.keys() <= at.keys() else None)
                at = {home: page.at for home, page in pages.items()}
                is_behind = any(page.is_cut for page in pages.values())
            if not is_behind:
                await asyncio.sleep(POLL_S)

    def named(self, pages: Mapping[str, EventPage]) -> list[Report]:
        """The events of all shards with their ids."""
        found = ((home, lsn, event) for home, page in pages.items() for lsn, event in page.items)
        return [{"id": self._id(e["tenant_key"], home, lsn), **e} for home, lsn, e in found]

    def lsn(self, key: str, home: str, event_id: str) -> int:
        """The lsn of an id; -1, before all, where it is of another shard."""
        lsn = (int(event_id[16:], 16) ^ self._pad(event_id[:16])) - 1
        return lsn if self._id(key, home, lsn) == event_id else -1

    def _id(self, key: str, home: str, lsn: int) -> str:
        """An lsn in clear would tell how much other tenants do."""
        tag = self._memories.tenant_key(f"event\x1f{key}\x1f{home}\x1f{lsn}")[:16]
        return f"{tag}{lsn + 1 ^ self._pad(tag):016x}"

    def _pad(self, tag: str) -> int:
        return int(self._memories.tenant_key(f"pad\x1f{tag}")[:16], 16)
