"""Memory for the OpenAI Agents SDK: a session that also remembers (openai-agents 0.24)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agents.memory import Session, SessionABC

from undertow.engine.base.memory_api import MemoryApi
from undertow.engine.base.results import Hit
from undertow.serving.adapters.memories import Memories
from undertow.serving.client import Client

if TYPE_CHECKING:
    from agents.items import TResponseInputItem
    from agents.memory.session_settings import SessionSettings

REMEMBERED = ("user", "assistant")


class UndertowSession(SessionABC):
    """Another session, which has the exact items, and the memories of a tenant, which has what was said.

    What the session drops stays remembered. All else that the other session has is reached through this one.
    """

    def __init__(self, session: Session, served: MemoryApi | Client, tenant: str) -> None:
        """`served`: a router, InProcess or a Client, which stay open."""
        self._session = session
        self._memories = Memories(served)
        self._tenant = tenant
        self.session_id = session.session_id

    @property
    def session_settings(self) -> SessionSettings | None:
        return self._session.session_settings

    @session_settings.setter
    def session_settings(self, value: SessionSettings | None) -> None:
        self._session.session_settings = value

    def __getattr__(self, name: str) -> Any:
        if name == "_session":
            raise AttributeError(name)
        return getattr(self._session, name)

    async def get_items(self, limit: int | None = None) -> list[TResponseInputItem]:
        """The items of the session, oldest first; with a limit, the last ones."""
        return await self._session.get_items(limit)

    async def add_items(self, items: list[TResponseInputItem]) -> None:
        """Add the items to the session, then remember the texts of user and assistant.

        UndertowError: they are in the session, and not remembered.
        """
        await self._session.add_items(items)
        said = [message for item in items if (message := _said(item))]
        if said:
            add = self._memories.add
            await asyncio.to_thread(add, self._tenant, said, session_id=self.session_id)

    async def pop_item(self) -> TResponseInputItem | None:
        """Take the last item out of the session. It stays remembered."""
        return await self._session.pop_item()

    async def clear_session(self) -> None:
        """Empty the session. It stays remembered: to forget, delete memories or erase the tenant."""
        await self._session.clear_session()

    async def search(self, query: str, *, top_k: int = 10) -> list[Hit]:
        """The nearest memories of the tenant, from all its sessions, best first; for a tool of the agent."""
        return await asyncio.to_thread(self._memories.search, self._tenant, query, top_k)


def _said(item: Any) -> dict[str, str] | None:
    """A message with the text of an item; None for calls, results, instructions and what has no text."""
    if not isinstance(item, Mapping) or item.get("role") not in REMEMBERED:
        return None
    content = item.get("content")
    parts = [content] if isinstance(content, str) else [part.get("text") for part in content or ()]
    text = "\n".join(part for part in parts if part).strip()
    return {"role": item["role"], "content": text} if text else None
