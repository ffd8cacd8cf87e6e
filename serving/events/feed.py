"""Wakes who follows events once there are some: one question to each shard at a time, whoever listens.

It is a hint alone. Who is woken reads the journal behind a cursor, and so does who has waited for long.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from undertow.engine.base.model import UndertowError
from undertow.engine.base.queries import EventsQuery
from undertow.engine.base.results import EventPage
from undertow.serving.async_memories import AsyncMemories

log = logging.getLogger(__name__)

# between two questions: without news a shard answers from memory
POLL_S = 0.5
# of more tenants than this, news are looked for among all
MOST_KEYS = 256
# who listens looks for itself at last after this time
LOOK_S = 60.0


class Feed:
    """Used on the event loop only. Without listeners it asks nothing."""

    def __init__(self, memories: AsyncMemories) -> None:
        self._memories = memories
        # each with the keys of its tenants; None: all
        self._listeners: dict[asyncio.Event, frozenset[str] | None] = {}
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def listening(self, keys: frozenset[str] | None) -> Iterator[asyncio.Event]:
        """An event that is set now and whenever tenants may have news; clear it before you read."""
        news = asyncio.Event()
        news.set()
        self._listeners[news] = keys
        if self._task is None:
            self._task = asyncio.create_task(self._poll())
        try:
            yield news
        finally:
            del self._listeners[news]
            if not self._listeners and self._task is not None:
                self._task.cancel()
                self._task = None

    def wake(self) -> None:
        """Wake all listeners."""
        for news in self._listeners:
            news.set()

    async def _poll(self) -> None:
        at: Mapping[str, int] = {}
        while True:
            asked = dict(self._listeners)
            try:
                pages = await self._memories.call(EventsQuery(at, _all_keys(asked)))
            except UndertowError as error:
                log.warning("no news of events: %s", type(error).__name__)
            else:
                self._wake(asked, pages, is_new=not pages.keys() <= at.keys())
                at = {home: page.at for home, page in pages.items()}
            await asyncio.sleep(POLL_S)

    def _wake(
        self,
        asked: Mapping[asyncio.Event, frozenset[str] | None],
        pages: Mapping[str, EventPage],
        *,
        is_new: bool,
    ) -> None:
        """`is_new`: there is a shard whose end was not known; what came before it was not looked at."""
        changed = frozenset[str]().union(*(page.changed for page in pages.values()))
        for news, keys in self._listeners.items():
            if is_new or news not in asked or (changed if keys is None else keys & changed):
                news.set()


def _all_keys(asked: Mapping[asyncio.Event, frozenset[str] | None]) -> frozenset[str] | None:
    keys: set[str] = set()
    for wanted in asked.values():
        keys |= wanted or ()
        if wanted is None or len(keys) > MOST_KEYS:
            return None
    return frozenset(keys)


async def heard(news: asyncio.Event, within_s: float = LOOK_S) -> bool:
    """Whether there may be news within a time; the event is cleared."""
    with suppress(TimeoutError):
        await asyncio.wait_for(news.wait(), within_s)
    told = news.is_set()
    news.clear()
    return told
