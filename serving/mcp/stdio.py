"""The MCP server on standard input and output, for one caller."""

from __future__ import annotations

from contextlib import nullcontext

from mcp.server.stdio import stdio_server

from undertow.serving.mcp.server import Caller, make_server


async def serve_stdio(caller: Caller) -> None:
    """Serve until standard input ends. What else writes to standard output meanwhile goes to stderr."""
    server = make_server(lambda _: nullcontext(caller))
    async with stdio_server() as (asked, answered):
        await server.run(asked, answered, server.create_initialization_options())
