"""Whether any shard serves, and the state of the LLM server.

A shard that is down does not make the service unready: its tenants get 503. A load balancer that removed
every replica for it would cut off all other tenants.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Literal

from undertow.engine.base.model import UndertowError

if TYPE_CHECKING:
    from undertow.serving.async_memories import AsyncMemories

LLM = Literal["ok", "trouble", "unknown", "off"]


class Readiness:
    """Checks the shards at most once in `look_every_s`, for all callers.

    A caller waits at most `patience_s` for a check, then gets the last result: a slow shard must not look
    like a dead service. A check ends by itself (Router.status).
    """

    def __init__(
        self, memories: AsyncMemories, look_every_s: float = 1.0, *, patience_s: float = 1.0, llm: bool = True
    ) -> None:
        """`llm`: whether the engines have an LLM server."""
        self._llm = llm
        self._memories = memories
        self._look_every_s = look_every_s
        self._patience_s = patience_s
        self._looked_s = -look_every_s
        self._seen: tuple[bool, LLM] = (False, "unknown")
        self._looking: asyncio.Task[None] | None = None

    async def look(self) -> tuple[bool, LLM]:
        """Whether a shard serves, and the state of the LLM."""
        if self._looking is None and time.monotonic() - self._looked_s >= self._look_every_s:
            self._looking = asyncio.create_task(self._look())
        if (looking := self._looking) is not None:
            await asyncio.wait([looking], timeout=self._patience_s)
            if looking.done():
                looking.result()
        return self._seen

    async def _look(self) -> None:
        try:
            self._seen = await self._check()
        finally:
            self._looked_s = time.monotonic()
            self._looking = None

    async def _check(self) -> tuple[bool, LLM]:
        try:
            shards = (await self._memories.status()).values()
        except UndertowError:
            return False, "unknown"
        serving = any(shard.get("state") == "serving" for shard in shards)
        if not self._llm:
            return serving, "off"
        return serving, "trouble" if any(shard.get("llm_error") for shard in shards) else "ok"
