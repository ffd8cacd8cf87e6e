"""What the MCP tests share: the SDK's own client, and what its results hold."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult, TextContent

from .http import SOON_S

# the SDK's client in the newest protocol, and in that of clients with an initialize handshake
MODES = ("auto", "legacy")
TOOLS = {
    *("add_memory", "search_memories", "list_memories", "get_memory", "memory_history"),
    *("update_memory", "delete_memory", "delete_all_memories", "answer_question"),
}
EVERY_TOOL = TOOLS | {"list_tenants"}


@asynccontextmanager
async def connected(url: str, key: str | None, mode: str = "auto", **headers: str) -> AsyncIterator[Client]:
    """A session of the SDK's client at a URL."""
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    async with (
        httpx2.AsyncClient(headers=headers, timeout=SOON_S) as http,
        Client(streamable_http_client(url, http_client=http), mode=mode) as client,
    ):
        yield client


async def done(client: Client, tool: str, **arguments: Any) -> dict[str, Any]:
    """What a call that succeeds answers."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, words(result)
    content: dict[str, Any] = result.structured_content
    return content


async def refused(client: Client, tool: str, **arguments: Any) -> str:
    """What a call that fails says; it holds nothing that reads like a result."""
    result = await client.call_tool(tool, arguments)
    assert result.is_error
    assert result.structured_content is None
    return words(result)


def words(result: CallToolResult) -> str:
    (block,) = result.content
    assert isinstance(block, TextContent)
    return block.text
