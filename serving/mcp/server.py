"""An MCP server over a client of the service. It keeps nothing between two requests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
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
from undertow.serving.mcp.arguments import TENANT, Arguments, Tenant
from undertow.serving.mcp.results import UNTRUSTED, Result
from undertow.serving.mcp.tools import TOOLS, Tool
from undertow.serving.telemetry.exception_sites import tell

log = logging.getLogger(__name__)

INSTRUCTIONS = (
    "Long-term memory. Search it before you answer what may depend on earlier conversations, and add what "
    f"should be known later. {UNTRUSTED}"
)
FAILED = "The memory service's MCP server failed at this call; its log says where."
_TENANT_NAME: TypeAdapter[str] = TypeAdapter(Tenant)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request: the client that speaks for them, and the one tenant they are bound to, if any."""

    client: AsyncClient
    tenant: str | None


CallerOf = Callable[[Any], AbstractAsyncContextManager[Caller]]
"""The caller behind a request of the transport; None on stdio."""


class ToolRefused(Exception):
    """A call that cannot be made; its text is for the LLM that made it."""


def make_server(caller_of: CallerOf) -> Server[Any]:
    """A server whose tools do what each caller's client may do."""
    face = _Face(caller_of)
    return Server(
        "undertow",
        title="Undertow memory",
        version=undertow.__version__,
        instructions=INSTRUCTIONS,
        on_list_tools=face.list_tools,
        on_call_tool=face.call_tool,
    )


class _Face:
    """Answers the two requests that tools need."""

    def __init__(self, caller_of: CallerOf) -> None:
        self._caller_of = caller_of

    async def list_tools(
        self, context: ServerRequestContext[Any, Any], _: PaginatedRequestParams | None
    ) -> ListToolsResult:
        async with self._caller_of(context.request) as caller:
            bound = caller.tenant is not None
        return ListToolsResult(
            tools=[tool.described(bound=bound) for tool in TOOLS.values() if tool.of_tenant or not bound]
        )

    async def call_tool(
        self, context: ServerRequestContext[Any, Any], params: CallToolRequestParams
    ) -> CallToolResult:
        async with self._caller_of(context.request) as caller:
            tool = TOOLS.get(params.name)
            if tool is None or (caller.tenant is not None and not tool.of_tenant):
                raise MCPError(INVALID_PARAMS, f"no tool is called {params.name[:64]!r}; list the tools")
            try:
                return _success(await _run(tool, caller, params.arguments or {}))
            except (ToolRefused, ServiceError) as error:
                return _failure(str(error))
            except Exception as error:  # noqa: BLE001 - a call's boundary: the SDK would send its words out
                tell(log, error, f"the tool {tool.name}")
                return _failure(FAILED)


async def _run(tool: Tool, caller: Caller, arguments: Mapping[str, Any]) -> Result:
    """ToolRefused, ServiceError."""
    given = dict(arguments)
    tenant = caller.tenant or ""
    if tool.of_tenant and caller.tenant is None:
        tenant = _checked_tenant(given.pop(TENANT, None))
    elif TENANT in given:
        raise ToolRefused(f"{TENANT}: this server is for one tenant's memories alone. Call it without.")
    try:
        return await tool.run(caller.client, tenant, _checked(tool.takes, given))
    except ValidationError:  # a flaw of ours
        raise
    except ValueError as error:  # the client's: what no name, or no JSON, can hold
        raise ToolRefused(str(error)) from error


def _checked_tenant(name: Any) -> str:
    try:
        return _TENANT_NAME.validate_python(name, strict=True)
    except ValidationError as error:
        raise ToolRefused(
            f"{TENANT}: {error.errors()[0]['msg']}. Give the name of the memories' owner."
        ) from error


def _checked(takes: type[Arguments], given: Mapping[str, Any]) -> Arguments:
    try:
        return takes.model_validate(given)
    except ValidationError as error:
        flaws = [f"{'.'.join(map(str, flaw['loc']))}: {flaw['msg']}" for flaw in error.errors()[:5]]
        raise ToolRefused(f"{'; '.join(flaws)}. The tool's schema says what it takes.") from error


def _success(result: Result) -> CallToolResult:
    document = result.model_dump_json()
    return CallToolResult(
        content=[TextContent(type="text", text=document)],
        structured_content=result.model_dump(mode="json"),
    )


def _failure(words: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=words)], is_error=True)
