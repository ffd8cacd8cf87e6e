"""Errors of shards that died or are full, and how long a router waits for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, Protocol

from undertow.engine.base.model import UndertowError
from undertow.engine.step.admission import QueueFull

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5


class ShardGone(UndertowError):
    """The shard's process died or cannot be reached; whether the call was carried out is unknown."""


class ShardExited(ShardGone):
    """The shard's process announced that it ends, for a reason of its own: no turn is to blame."""


class ShardDown(UndertowError):
    """A shard was down for longer than the router's patience."""

    def __init__(self, shard: str, waited_s: float, why: object) -> None:
        super().__init__(shard, waited_s, why)
        self.shard, self.waited_s, self.why = shard, waited_s, why

    def __str__(self) -> str:
        why = str(self.why).rstrip(".")
        return (
            f"shard {self.shard} could not be used for {self.waited_s:.0f} s: {why}. `undertow cluster "
            "status` shows how it is, on Ray `ray status` whether there is room for it. Mend that and try "
            "again; UNDERTOW_CLUSTER_PATIENCE_S is how long calls wait."
        )


class ShardCalls(Protocol):
    """The methods of `Shard` by name. With the awaitable come ShardGone, QueueFull, its own errors."""

    def call(self, method: str, *args: Any) -> Awaitable[Any]: ...


class Backoff:
    """Waits that grow, up to a deadline."""

    def __init__(self, patience_s: float) -> None:
        self._began_s = time.monotonic()
        self._patience_s = patience_s
        self._next_s = SHORTEST_PAUSE_S

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def left_s(self) -> float:
        return self._patience_s - self.waited_s

    async def __call__(self) -> bool:
        """Wait a little. False: the patience has run out."""
        if self.left_s <= 0:
            return False
        await asyncio.sleep(min(self._next_s, self.left_s))
        self._next_s = min(2 * self._next_s, LONGEST_PAUSE_S)
        return True


class CapacityWait:
    """Waits for room at a shard for as long as that shard stores anything."""

    def __init__(self, shard: str, calls: ShardCalls, patience_s: float) -> None:
        self._shard, self._calls, self._patience_s = shard, calls, patience_s
        self._pause = Backoff(patience_s)
        self._rows: int | None = None

    async def wait(self, why: object) -> None:
        """Wait a little. QueueFull: nothing was stored there within the patience; ShardGone."""
        if await self._pause():
            return
        rows: int | None = (await self._calls.call("status")).get("journal_rows")
        if rows == self._rows:
            raise QueueFull(
                f"shard {self._shard} has had no room for {self._patience_s:g} s, and stored nothing "
                f"meanwhile: {why} `undertow cluster status` shows what it waits for."
            )
        self._rows, self._pause = rows, Backoff(self._patience_s)

    async def repeat(self, full: QueueFull, method: str, *args: Any) -> Any:
        """Repeat a call that was refused until there is room. For other errors see `wait`."""
        while True:
            await self.wait(full)
            try:
                return await self._calls.call(method, *args)
            except QueueFull as still:
                full = still
