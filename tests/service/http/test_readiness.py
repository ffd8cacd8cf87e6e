"""A readiness check answers in time, however slow the shards are."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from undertow.serving.async_memories import AsyncMemories
from undertow.serving.http.readiness import Readiness

pytestmark = pytest.mark.anyio


class Slow(AsyncMemories):
    """Memories whose shards report their status once `may` is set."""

    def __init__(self) -> None:
        self.asked = 0
        self.may = asyncio.Event()

    async def status(self) -> dict[str, dict[str, Any]]:
        self.asked += 1
        await self.may.wait()
        return {"s0": {"state": "serving"}}


async def test_a_slow_check_is_shared_and_delays_nobody() -> None:
    slow = Slow()
    readiness = Readiness(slow, 0.0, patience_s=0.0)
    assert await readiness.look() == (False, "unknown")
    slow.may.set()
    while not (await readiness.look())[0]:
        await asyncio.sleep(0)
    slow.may.clear()
    await asyncio.sleep(0)
    before = slow.asked
    looks = await asyncio.gather(*(readiness.look() for _ in range(50)))
    assert set(looks) == {(True, "ok")}, "what the last look saw"
    assert slow.asked <= before + 1
    slow.may.set()


async def test_a_quick_check_is_waited_for() -> None:
    slow = Slow()
    slow.may.set()
    assert await Readiness(slow, patience_s=60.0).look() == (True, "ok")
