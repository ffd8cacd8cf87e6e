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

    def __init__(self, is_cut: bool) -> None:
        self.asked, self._is_cut = 0, is_cut

    async def call(self, query: EventsQuery) -> dict[str, EventPage]:
        self.asked += 1
        await asyncio.sleep(0)
        events = ((self.asked, {"tenant_key": "ann"}),) if query.limit else ()
        return {"single": EventPage(events, self.asked, self._is_cut)}


@pytest.mark.parametrize("is_behind", [False, True])
async def test_it_asks_seldom_unless_it_is_behind(monkeypatch: pytest.MonkeyPatch, is_behind: bool) -> None:
    monkeypatch.setattr(feed, "POLL_S", 0.0)
    memories: Any = News(is_behind)
    with feed.Feed(memories).listening(frozenset(["ann"])) as news:
        async with asyncio.timeout(30.0):
            while memories.asked < 2:
                await asyncio.sleep(0)
            monkeypatch.setattr(feed, "POLL_S", 3_600.0)
            await news.wait()
            before = memories.asked
            for _ in range(100):
                await asyncio.sleep(0)
        assert (memories.asked > before + 1) is is_behind
