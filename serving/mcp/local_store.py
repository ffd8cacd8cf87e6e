"""The MCP server over a store of this machine, without a service: the same application, in process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx2

from undertow.engine.base.config import Settings
from undertow.serving.async_memories import AsyncMemories
from undertow.serving.client import AsyncClient
from undertow.serving.http.hosting import Files, hosted
from undertow.serving.http.service_settings import ServiceSettings
from undertow.serving.mcp.server import Caller
from undertow.serving.mcp.stdio import serve_stdio

# never resolved; an application without keys answers to this host
_HERE = "http://localhost"


async def serve_store(
    open_memories: Callable[[], AsyncMemories],
    files: Files,
    tenant: str | None,
    settings: ServiceSettings,
    engine: Settings,
) -> None:
    """Serve until standard input ends. UndertowError: the store cannot be opened."""
    async with await asyncio.to_thread(open_memories) as memories:
        with hosted(memories, files, settings, engine) as app:
            # exceptions are the application's to answer
            transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
            async with app.router.lifespan_context(app), httpx2.AsyncClient(transport=transport) as http:
                await serve_stdio(Caller(AsyncClient(_HERE, http=http), tenant))
