"""The feed that wakes listeners."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from undertow.engine.base.queries import EventPage, EventsQuery, FlushCommand
from undertow.engine.cluster.in_process import InProcess
from undertow.serving.events import feed

from ...support.cluster.in_process import PARTS, settings
from ...support.engine import turn_of

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


def test_a_page_tells_whether_it_is_cut_though_few_of_its_rows_are_events(tmp_path: Path) -> None:
    with InProcess(tmp_path / "store", settings(), PARTS) as memories:
        memories.add_batch([turn_of("ann", n, f"word{n}") for n in range(20)])
        assert memories.call(FlushCommand("ann"))
        page = EventPage((), -1, True)
        while page.is_cut:
            page = memories.call(EventsQuery({"single": page.at}, None, 10))["single"]
            assert len(page.items) < 10
        assert memories.call(EventsQuery({"single": page.at}, None, 10))["single"].items == ()


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
