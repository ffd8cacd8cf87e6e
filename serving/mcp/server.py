"""An MCP server over a client of the service. It is stateless between requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any

from mcp.server import Server, ServerRequestContext
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
)
from pydantic import TypeAdapter, ValidationError

import undertow
from undertow.serving.client import AsyncClient, ServiceError
from undertow.serving.mcp.schemas import TENANT, UNTRUSTED, Result, Tenant
from undertow.serving.mcp.tools import TOOLS, Tool
from undertow.serving.telemetry.logs import log_failure

log = logging.getLogger(__name__)

INSTRUCTIONS = (
    "Long-term memory. Search it before you answer what may depend on earlier conversations, and add what "
    f"should be known later. {UNTRUSTED}"
)
FAILED = "The memory service's MCP server failed at this call; its log says where."
_TENANT_NAME: TypeAdapter[str] = TypeAdapter(Tenant)


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request: a client with their key, and the one tenant they are bound to, if any."""

    client: AsyncClient
    tenant: str | None


CallerOf = Callable[[Any], AbstractAsyncContextManager[Caller]]
"""The caller behind a request of the transport; None on stdio."""


class ToolRefused(Exception):
    """An invalid call; its message is for the LLM that made it."""


def make_server(caller_of: CallerOf) -> Server[Any]:
    """A server whose tools do what each caller's client may do."""

    async def list_tools(
        context: ServerRequestContext[Any, Any], _: PaginatedRequestParams | None
    ) -> ListToolsResult:
        async with caller_of(context.request) as caller:
            return _listed(caller.tenant is not None)

    async def call_tool(
        context: ServerRequestContext[Any, Any], params: CallToolRequestParams
    ) -> CallToolResult:
        async with caller_of(context.request) as caller:
            tool = TOOLS.get(params.name)
            if tool is None or (caller.tenant is not None and not tool.of_tenant):
                raise MCPError(INVALID_PARAMS, f"no tool is called {params.name[:64]!r}; list the tools")
            try:
                return _success(await _run(tool, caller, params.arguments or {}))
            except (ToolRefused, ServiceError) as error:
                return _failure(str(error))
            except Exception as error:  # noqa: BLE001 - the boundary of a call: the SDK would send its message
                log_failure(log, error, f"the tool {tool.name}")
                return _failure(FAILED)

    return Server(
        "undertow",
        title="Undertow memory",
        version=undertow.__version__,
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


@cache
def _listed(bound: bool) -> ListToolsResult:
    tools = (tool for tool in TOOLS.values() if tool.of_tenant or not bound)
    return ListToolsResult(tools=[tool.described(bound=bound) for tool in tools])


async def _run(tool: Tool, caller: Caller, arguments: Mapping[str, Any]) -> Result:
    """ToolRefused, ServiceError."""
    given = dict(arguments)
    tenant = caller.tenant or ""
    if tool.of_tenant and caller.tenant is None:
        tenant = _checked_tenant(given.pop(TENANT, None))
    elif TENANT in given:
        raise ToolRefused(f"{TENANT}: this server is for one tenant's memories alone. Call it without.")
    try:
        checked = tool.takes.model_validate(given)
    except ValidationError as error:
        flaws = [f"{'.'.join(map(str, flaw['loc']))}: {flaw['msg']}" for flaw in error.errors()[:5]]
        raise ToolRefused(f"{'; '.join(flaws)}. The tool's schema says what it takes.") from error
    try:
        return await tool.run(caller.client, tenant, checked.model_dump())
    except ValidationError:  # of a result: a bug
        raise
    except ValueError as error:  # of the client: a name or a value that JSON cannot hold
        raise ToolRefused(str(error)) from error


def _checked_tenant(name: Any) -> str:
    try:
        return _TENANT_NAME.validate_python(name, strict=True)
    except ValidationError as error:
        raise ToolRefused(
            f"{TENANT}: {error.errors()[0]['msg']}. Give the name of the memories' owner."
        ) from error


def _success(result: Result) -> CallToolResult:
    document = result.model_dump_json()
    return CallToolResult(
        content=[TextContent(type="text", text=document)], structured_content=result.model_dump(mode="json")
    )


def _failure(words: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=words)], is_error=True)
