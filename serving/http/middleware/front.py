"""The front of the application, as plain ASGI that reads no body.

It gives each request an id, counts it in the load, authenticates it, and turns any exception into a problem
document. Only OPEN_PATHS need no key.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Sequence
from urllib.parse import quote

from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from undertow.serving.auth.principal import Principal
from undertow.serving.http.middleware.admission import leave
from undertow.serving.http.middleware.fair_turns import FairTurns
from undertow.serving.http.middleware.guard import Guard
from undertow.serving.http.middleware.load_limits import LoadLimits
from undertow.serving.http.openapi import PAGE_PATHS
from undertow.serving.http.problems import MEDIA_TYPE, PROBLEM_MEDIA, SLUG, problem_of
from undertow.serving.telemetry.logs import log_failure

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health/live", "/health/ready", "/openapi.json", *PAGE_PATHS})
# statuses of requests that were refused before their turn
REFUSED = frozenset({401, 403, 429})
VALID_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
# in a request's scope: the id in its response; its sender, if it needs a key; its tenant, once decoded
REQUEST_ID = "undertow.request_id"
PRINCIPAL = "undertow.principal"
TENANT = "undertow.tenant"


def sender_of(scope: Scope) -> Principal:
    """The authenticated sender of a request. KeyError: an open path, which has none."""
    principal: Principal = scope[PRINCIPAL]
    return principal


class Front:
    """ASGI middleware around the whole application."""

    def __init__(
        self, app: ASGIApp, load: LoadLimits, guard: Guard, turns: FairTurns, direct: Sequence[APIRoute] = ()
    ) -> None:
        """`direct`: routes of POST that take their requests from here, past the framework's own layers."""
        self._app = app
        self._direct = direct
        self._load = load
        self._guard = guard
        self._turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        scope[REQUEST_ID] = request_id = given if VALID_ID.fullmatch(given) else secrets.token_hex(8)
        scope["path"] = undecoded_path(scope)
        begun = False

        async def answer(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                own = MutableHeaders(scope=message)
                own["x-request-id"] = request_id
                own["x-content-type-options"] = "nosniff"
                own.setdefault("cache-control", "no-store")
            await send(message)

        try:
            await self._pass(scope, headers, receive, answer)
        except Exception as error:  # noqa: BLE001 - the boundary of a request: it fails, others continue
            leave(scope)  # a refusal may wait for long, and the tenant may be another's
            if begun:  # the response can only be left incomplete
                log_failure(log, error)
            else:
                problem = problem_of(error)
                scope[SLUG] = problem.slug
                if problem.status_code in REFUSED:
                    error.__traceback__ = None  # its frames have the request's body
                    await self._turns.refusal(_sender(scope))
                await problem.response_as(scope.get(PROBLEM_MEDIA, MEDIA_TYPE))(scope, receive, answer)
            # its frames have what has the error: they would live on until the collector stops the loop
            error.__traceback__ = None
        finally:
            leave(scope)

    async def _pass(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        with self._load.request():
            scope[PRINCIPAL] = self._guard.admit(headers)
            for route in self._direct:
                if scope["method"] == "POST" and (found := route.path_regex.match(scope["path"])):
                    scope.update(route=route, path_params=found.groupdict())
                    await route.handle(scope, receive, send)
                    return
            await self._app(scope, receive, send)


def _sender(scope: Scope) -> str:
    """Whose refusals wait for each other: of one key and one tenant that it covers; without a key, of all."""
    if PRINCIPAL not in scope:
        return ""
    sender, tenant = sender_of(scope), scope.get("path_params", {}).get("tenant", "")
    return f"{sender.key_id} {tenant if sender.reach.covers(tenant) else ''}"


def undecoded_path(scope: Scope) -> str:
    """The path as it was sent: a tenant's name may contain "/", sent as %2F."""
    raw: bytes | None = scope.get("raw_path")
    return quote(scope["path"], safe="/:@!$&'()*+,;=~") if raw is None else raw.decode("latin-1")
