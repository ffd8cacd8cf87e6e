"""MCP over this application: at /mcp for every tenant of a key, at /mcp/{tenant} for one; or on stdio.

A tool call becomes a request to the application itself, in process, with the caller's key. So a call counts
twice against the key's rate: as the MCP request, and as the request that it makes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
from fastapi import FastAPI
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from undertow.serving.client import AsyncClient, Retries
from undertow.serving.http.middleware.body_limits import bounded
from undertow.serving.http.middleware.front import sender_of
from undertow.serving.http.middleware.guard import key_text
from undertow.serving.http.routes.access import decode_path
from undertow.serving.http.service_settings import ServiceSettings
from undertow.serving.mcp.server import Caller, make_server

PATH = "/mcp"
# Never resolved: the transport is the application. A service without keys accepts this host.
HERE = "http://localhost"
# what the MCP library's own tasks take of the loop for a request (measured: 3 ms of 3.4)
LIBRARY_S = 0.003
# the MCP client retries, not a busy service
_NO_RETRIES = Retries(patience_s=0)


def in_process(app: FastAPI) -> httpx2.AsyncClient:
    """An HTTP client of the application itself. The application turns exceptions into responses."""
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app, raise_app_exceptions=False))


@asynccontextmanager
async def mcp_mounted(app: FastAPI, settings: ServiceSettings) -> AsyncIterator[None]:
    """Serves MCP while the application runs. Its Front must have checked each request's key."""
    async with in_process(app) as http:
        endpoint = _McpEndpoint(http, settings)
        # other methods are for sessions
        app.router.routes += [Route(path, endpoint, methods=["POST"]) for path in (PATH, PATH + "/{tenant}")]
        async with endpoint.manager.run():
            yield


class _McpEndpoint:
    """The ASGI application of both paths.

    Stateless: each request carries its own key. So no session can be hijacked or outlive a revoked key, and
    any of several processes can serve a request.
    """

    def __init__(self, http: httpx2.AsyncClient, settings: ServiceSettings) -> None:
        self._http = http
        self._settings = settings
        self.manager = StreamableHTTPSessionManager(
            make_server(self._caller_of),
            stateless=True,
            # a protection against browsers, which the front gives: it demands a key, or a loopback host
            security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),
            max_request_body_size=settings.max_body_bytes,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant, sender, service = decode_path(scope), sender_of(scope), scope["app"].state.service
        s = self._settings
        within = bounded(receive, Headers(scope=scope), s.max_body_bytes, s.body_timeout_s)
        covered = tenant is not None and sender.reach.covers(tenant)
        turn = service.turns.turn(tenant if covered else f"\0{sender.key_id}", scope)
        # the request that it makes counts for the tenant
        with service.load.share(sender.key_id, None):
            handled = self.manager.handle_request(scope, turn.after_body(within), send)
            await turn.timed(handled, LIBRARY_S)

    @asynccontextmanager
    async def _caller_of(self, request: Request) -> AsyncIterator[Caller]:
        client = AsyncClient(HERE, key_text(request.headers), http=self._http, retries=_NO_RETRIES)
        yield Caller(client, request.path_params.get("tenant"))
