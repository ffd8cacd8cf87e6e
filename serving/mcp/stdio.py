"""The MCP server on standard input and output, for one caller."""

from __future__ import annotations

from contextlib import nullcontext

from mcp.server.stdio import stdio_server

from undertow.serving.client import AsyncClient, AuthError, Retries, ServiceError
from undertow.serving.mcp.server import Caller, make_server

# an agent waits for each call, and may retry it itself
_RETRIES = Retries(patience_s=10)
_LOOK_S = 5.0


async def refuses(url: str, key: str | None) -> bool | None:
    """Whether a service wants another key, or one at all. None if none responds: it may start later."""
    async with AsyncClient(url, key, timeout_s=_LOOK_S, retries=Retries(patience_s=0)) as client:
        try:
            async for _ in client.tenants():
                break
        except AuthError as refused:
            return refused.status == 401
        except ServiceError as failed:
            return None if failed.status is None else False
    return False


async def serve_stdio(caller: Caller) -> None:
    """Serve until standard input ends. Other output to stdout goes to stderr meanwhile."""
    server = make_server(lambda _: nullcontext(caller))
    async with stdio_server() as (asked, answered):
        await server.run(asked, answered, server.create_initialization_options())


async def serve_remote(url: str, key: str | None, tenant: str | None) -> None:
    """As `serve_stdio`, for a remote service. ValueError: the URL or the key is invalid."""
    async with AsyncClient(url, key, retries=_RETRIES) as client:
        await serve_stdio(Caller(client, tenant))
