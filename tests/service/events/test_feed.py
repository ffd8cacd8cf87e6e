"""The feed that wakes listeners."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from undertow.engine.base.queries import EventPage, EventsQuery
from undertow.serving.events import feed

pytestmark = pytest.mark.anyio


class News:
    """A shard that has something new at each question."""

    def __init__(self, events: int) -> None:
        self.asked, self._events = 0, events

    async def call(self, query: EventsQuery) -> dict[str, EventPage]:
        self.asked += 1
        await asyncio.sleep(0)
        events = ((self.asked, {"tenant_key": "ann"}) for _ in range(min(self._events, query.limit)))
        return {"single": EventPage(tuple(events), self.asked)}


@pytest.mark.parametrize("events, goes_on", [(1, False), (feed.PAGE, True)])
async def test_it_asks_seldom_unless_it_is_behind(
    monkeypatch: pytest.MonkeyPatch, events: int, goes_on: bool
) -> None:
    monkeypatch.setattr(feed, "POLL_S", 0.0)
    memories: Any = News(events)
    with feed.Feed(memories).listening(frozenset(["ann"])) as news:
        async with asyncio.timeout(30.0):
            while memories.asked < 2:
                await asyncio.sleep(0)
            monkeypatch.setattr(feed, "POLL_S", 3_600.0)
            await news.wait()
            before = memories.asked
            for _ in range(100):
                await asyncio.sleep(0)
        assert (memories.asked > before + 1) is goes_on
