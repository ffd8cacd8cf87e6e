"""Memory for LlamaIndex: a block of its Memory (llama-index-core 0.14)."""

from __future__ import annotations

import asyncio
from html import escape
from typing import Any

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.memory import BaseMemoryBlock
from pydantic import Field, PrivateAttr

from undertow.engine.base.memory_api import MemoryApi
from undertow.serving.adapters.memories import Memories
from undertow.serving.client import Client

REMEMBERED = ("user", "assistant")


class UndertowMemoryBlock(BaseMemoryBlock[str]):
    """Remembers messages that leave the short-term memory, and finds those of all sessions of a tenant."""

    name: str = "undertow"
    tenant: str = Field(description="Whose memories.")
    top_k: int = Field(default=10, description="How many memories to show.")
    _memories: Memories = PrivateAttr()

    def __init__(self, served: MemoryApi | Client, tenant: str, **more: Any) -> None:
        """`served`: a router, InProcess or a Client, which stay open. `more`: the other fields."""
        super().__init__(**{**more, "tenant": tenant})
        self._memories = Memories(served)

    async def _aget(self, messages: list[ChatMessage] | None = None, **block_kwargs: Any) -> str:
        """The memories nearest to the user's last message, one a paragraph; "" without such a message.

        Their text is escaped, as Memory puts it between tags of a system message.
        """
        asked = [text for m in messages or () if m.role == "user" and (text := _text(m))]
        if not asked:
            return ""
        hits = await asyncio.to_thread(self._memories.search, self.tenant, asked[-1], self.top_k)
        return "\n\n".join(escape(hit.memory, quote=False) for hit in hits)

    async def _aput(self, messages: list[ChatMessage]) -> None:
        """Remember what user and assistant said, by session."""
        said: dict[str, list[dict[str, str]]] = {}
        for message in messages:
            if message.role in REMEMBERED and (text := _text(message)):
                session = str(message.additional_kwargs.get("session_id", ""))
                said.setdefault(session, []).append({"role": message.role.value, "content": text})
        for session, of_session in said.items():
            add = self._memories.add
            await asyncio.to_thread(add, self.tenant, of_session, session_id=session)


def _text(message: ChatMessage) -> str:
    return (message.content or "").strip()
