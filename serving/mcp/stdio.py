"""The MCP server on standard input and output, for one caller."""

from __future__ import annotations

from contextlib import nullcontext

from mcp.server.stdio import stdio_server

from undertow.serving.client import AsyncClient, Retries
from undertow.serving.mcp.server import Caller, make_server

# an agent waits for each call, and may well try again itself
_RETRIES = Retries(patience_s=10)


async def serve_stdio(caller: Caller) -> None:
    """Serve until standard input ends. What else writes to standard output meanwhile goes to stderr."""
    server = make_server(lambda _: nullcontext(caller))
    async with stdio_server() as (asked, answered):
        await server.run(asked, answered, server.create_initialization_options())


async def serve_remote(url: str, key: str | None, tenant: str | None) -> None:
    """As `serve_stdio`, for a service elsewhere. ValueError: the URL or the key cannot be one."""
    async with AsyncClient(url, key, retries=_RETRIES) as client:
        await serve_stdio(Caller(client, tenant))
