"""Whether anything can be served, and how the LLM's server is.

One shard that is down is no reason to be unready: its tenants are told 503, and a balancer that then took
every replica away would cut off all others.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Literal

from undertow.engine.model import UndertowError

if TYPE_CHECKING:
    from undertow.serving.memories import Memories

LLM = Literal["ok", "trouble", "unknown", "off"]


class Readiness:
    """Looks once in `look_every_s` at most, whoever asks."""

    def __init__(self, memories: Memories, look_every_s: float = 1.0, *, llm: bool = True) -> None:
        """`llm`: the engines have a server for it."""
        self._llm = llm
        self._memories = memories
        self._look_every_s = look_every_s
        self._looked_s = -look_every_s
        self._seen: tuple[bool, LLM] = (False, "unknown")
        self._looking = asyncio.Lock()

    async def look(self) -> tuple[bool, LLM]:
        """Whether a shard serves, and how the LLM is."""
        async with self._looking:
            now_s = time.monotonic()
            if now_s - self._looked_s >= self._look_every_s:
                self._seen = await self._ask()
                self._looked_s = now_s
        return self._seen

    async def _ask(self) -> tuple[bool, LLM]:
        try:
            shards = (await self._memories.status()).values()
        except UndertowError:
            return False, "unknown"
        serving = any(shard.get("state") == "serving" for shard in shards)
        if not self._llm:
            return serving, "off"
        return serving, "trouble" if any(shard.get("llm_error") for shard in shards) else "ok"
