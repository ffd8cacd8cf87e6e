"""Whether anything can be served, and how the LLM's server is.

One shard that is down is no reason to be unready: its tenants are told 503, and a balancer that then took
every replica away would cut off all others.
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
    """Looks once in `look_every_s` at most, whoever asks.

    Who asks waits for a look for `patience_s` at most, then is told what the last one saw: a shard that is
    slow to answer is not to look like a service that is dead. A look ends by itself (Router.status).
    """

    def __init__(
        self,
        memories: AsyncMemories,
        look_every_s: float = 1.0,
        *,
        patience_s: float = 1.0,
        llm: bool = True,
    ) -> None:
        """`llm`: the engines have a server for it."""
        self._llm = llm
        self._memories = memories
        self._look_every_s = look_every_s
        self._patience_s = patience_s
        self._looked_s = -look_every_s
        self._seen: tuple[bool, LLM] = (False, "unknown")
        self._looking: asyncio.Task[None] | None = None

    async def look(self) -> tuple[bool, LLM]:
        """Whether a shard serves, and how the LLM is."""
        if self._looking is None and time.monotonic() - self._looked_s >= self._look_every_s:
            self._looking = asyncio.create_task(self._look())
        if (looking := self._looking) is not None:
            await asyncio.wait([looking], timeout=self._patience_s)
            if looking.done():
                looking.result()
        return self._seen

    async def _look(self) -> None:
        try:
            self._seen = await self._ask()
        finally:
            self._looked_s = time.monotonic()
            self._looking = None

    async def _ask(self) -> tuple[bool, LLM]:
        try:
            shards = (await self._memories.status()).values()
        except UndertowError:
            return False, "unknown"
        serving = any(shard.get("state") == "serving" for shard in shards)
        if not self._llm:
            return serving, "off"
        return serving, "trouble" if any(shard.get("llm_error") for shard in shards) else "ok"
