"""What every request passes before any route sees it, as plain ASGI: nothing here reads a body.

It gets an id, the service's load counts it, its sender is told by the key, and whatever is raised on its way
becomes one problem. No key is needed for OPEN_PATHS alone.
"""

from __future__ import annotations

import logging
import re
import secrets
from dataclasses import dataclass
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from undertow.serving.auth.principal import Principal
from undertow.serving.http.middleware.guard import Guard
from undertow.serving.http.middleware.load_limits import LoadLimits
from undertow.serving.http.problems import SLUG, problem_of
from undertow.serving.telemetry.exception_sites import tell

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health/live", "/health/ready", "/openapi.json", "/docs"})
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
FRONT = "undertow.front"
# in a request's scope: the tenant that it is about, once its name has been decoded
TENANT = "undertow.tenant"


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What is known of a request before a route sees it. `principal` is None at an open path."""

    request_id: str
    principal: Principal | None


def asked_of(scope: Scope) -> RequestContext:
    """What the front has found out of a request. KeyError where it did not pass the front."""
    asked: RequestContext = scope[FRONT]
    return asked


class Front:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, load: LoadLimits, guard: Guard) -> None:
        self._app = app
        self._load = load
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        answer = _Answer(send, request_id)
        scope["path"] = undecoded_path(scope)
        try:
            await self._pass(scope, headers, request_id, receive, answer)
        except Exception as error:  # noqa: BLE001 - the boundary of a request: its sender is told, others go on
            if answer.begun:  # all that can be done is to leave it cut off
                tell(log, error)
            else:
                problem = problem_of(error)
                scope[SLUG] = problem.slug
                await problem.response(scope, receive, answer)

    async def _pass(
        self, scope: Scope, headers: Headers, request_id: str, receive: Receive, send: Send
    ) -> None:
        if scope["path"] in OPEN_PATHS:
            scope[FRONT] = RequestContext(request_id, None)
            await self._app(scope, receive, send)
            return
        with self._load.request():
            scope[FRONT] = RequestContext(request_id, self._guard.admit(headers))
            await self._app(scope, receive, send)


class _Answer:
    """`send` with the headers that every response has; it knows whether a response has begun."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._request_id = request_id
        self.begun = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = self._request_id
            headers["x-content-type-options"] = "nosniff"
            headers.setdefault("cache-control", "no-store")
        await self._send(message)


def undecoded_path(scope: Scope) -> str:
    """The path as it was sent: a tenant's name may hold "/", which stands there as %2F."""
    raw: bytes | None = scope.get("raw_path")
    return quote(scope["path"], safe="/:@!$&'()*+,;=~") if raw is None else raw.decode("latin-1")
