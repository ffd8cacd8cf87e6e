"""The MCP server inside the HTTP service: at /mcp for all that a key may, at /mcp/{tenant} for one tenant.

A tool's call is a request to the service itself, in process, with the key of the one who called it. So a
call counts twice at the key's rate: as the request that brings it, and as the one that it makes.
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
from undertow.serving.http.middleware.front import asked_of
from undertow.serving.http.middleware.guard import key_text
from undertow.serving.http.routes.access import decode_path
from undertow.serving.http.service_settings import ServiceSettings
from undertow.serving.mcp.server import Caller, make_server

PATH = "/mcp"
# never resolved: the transport is the application. A service without keys answers to this host.
_HERE = "http://localhost"
# a caller can wait better than a service that is busy
_NO_RETRIES = Retries(patience_s=0)


@asynccontextmanager
async def mcp_mounted(app: FastAPI, settings: ServiceSettings) -> AsyncIterator[None]:
    """Around an application's life: it serves MCP too. Its front must have checked each request's key."""
    # exceptions are the front's to answer; what passes it is a 500 for this face as for any
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport) as http:
        face = _McpFace(http, settings)
        # other methods are for sessions
        app.router.routes += [Route(path, face, methods=["POST"]) for path in (PATH, PATH + "/{tenant}")]
        async with face.manager.run():
            yield


class _McpFace:
    """The ASGI application of both paths.

    Without sessions: each request stands for itself, with its own key. So none can be taken over or outlive
    a revoked key, and it is of no matter which of several processes a request reaches.
    """

    def __init__(self, http: httpx2.AsyncClient, settings: ServiceSettings) -> None:
        self._http = http
        self._settings = settings
        self.manager = StreamableHTTPSessionManager(
            make_server(self._caller_of),
            stateless=True,
            # against requests that a web page has a browser send: the front demands a key, or this host
            security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),
            max_request_body_size=settings.max_body_bytes,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        decode_path(scope)
        s = self._settings
        service = scope["app"].state.service
        principal = asked_of(scope).principal
        assert principal is not None, "/mcp is no open path"
        within = bounded(receive, Headers(scope=scope), s.max_body_bytes, s.body_timeout_s)
        # of no tenant: the call that it makes counts for that
        with service.load.share(principal.key_id, None):
            await self.manager.handle_request(scope, within, send)

    @asynccontextmanager
    async def _caller_of(self, request: Request) -> AsyncIterator[Caller]:
        key = key_text(request.headers)
        client = AsyncClient(_HERE, key, http=self._http, retries=_NO_RETRIES)
        yield Caller(client, request.path_params.get("tenant"))
