"""Memory for Google's Agent Development Kit: a BaseMemoryService (google-adk 2.13)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from google.adk.memory.base_memory_service import BaseMemoryService, SearchMemoryResponse
from google.adk.memory.memory_entry import MemoryEntry
from google.genai import types

from undertow.engine.base.memory_api import MemoryApi
from undertow.engine.base.model import key_digest
from undertow.serving.adapters.memories import Memories, tenant_name
from undertow.serving.client import Client

if TYPE_CHECKING:
    from google.adk.events.event import Event
    from google.adk.sessions.session import Session


class UndertowMemoryService(BaseMemoryService):
    """The memories of each user of each app are those of the tenant PREFIX/APP/USER, percent-encoded.

    An event with text is one turn. It is stored once, however often its session is added, and not again after
    it was deleted. Errors are kinds of UndertowError.
    """

    def __init__(self, served: MemoryApi | Client, *, prefix: str = "adk", top_k: int = 10) -> None:
        """`served`: a router, InProcess or a Client, which stay open. `top_k`: of a search."""
        self._memories = Memories(served)
        self._prefix = prefix
        self._top_k = top_k

    async def add_session_to_memory(self, session: Session) -> None:
        """Add those events of a session that are new."""
        await self.add_events_to_memory(
            app_name=session.app_name, user_id=session.user_id, events=session.events, session_id=session.id
        )

    async def add_events_to_memory(
        self,
        *,
        app_name: str,
        user_id: str,
        events: Sequence[Event],
        session_id: str | None = None,
        custom_metadata: Mapping[str, object] | None = None,
    ) -> None:
        """Add events that are new. `custom_metadata`: plain JSON, kept with each event."""
        tenant = tenant_name(self._prefix, app_name, user_id)
        for event in events:
            if event.partial or not (text := _text(event.content)):
                continue
            role = "user" if event.author == "user" else "assistant"
            await asyncio.to_thread(
                self._memories.add,
                tenant,
                [{"role": role, "name": event.author, "content": text}],
                session_id=session_id or "",
                timestamp=datetime.fromtimestamp(event.timestamp, UTC).isoformat(),
                metadata=custom_metadata,
                key=key_digest(tenant_name("", session_id or "", event.id)) if event.id else None,
            )

    async def search_memory(self, *, app_name: str, user_id: str, query: str) -> SearchMemoryResponse:
        """The nearest turns, episodes and facts, best first. An empty query: ValueError or BadRequest."""
        tenant = tenant_name(self._prefix, app_name, user_id)
        hits = await asyncio.to_thread(self._memories.search, tenant, query, self._top_k)
        return SearchMemoryResponse(
            memories=[
                MemoryEntry(
                    id=hit.id,
                    content=types.Content(parts=[types.Part(text=hit.memory)]),
                    timestamp=hit.timestamp,
                    custom_metadata={"kind": hit.kind, "score": hit.score},
                )
                for hit in hits
            ]
        )

    async def delete_memory(self, *, app_name: str, user_id: str, memory_id: str | None = None) -> None:
        """Delete one memory by the id that a search returned. ValueError: there is none."""
        if not memory_id:
            raise ValueError("memory_id is missing. Give the id of a memory that search_memory returned.")
        tenant = tenant_name(self._prefix, app_name, user_id)
        await asyncio.to_thread(self._memories.delete, tenant, memory_id)


def _text(content: types.Content | None) -> str:
    """What was said, without thoughts, calls of functions and files."""
    parts = content.parts or [] if content is not None else []
    return "\n".join(part.text for part in parts if part.text and not part.thought).strip()
