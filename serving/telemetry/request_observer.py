"""Every HTTP request seen from outside: counted, logged in one line, and drawn as a span.

A pure ASGI layer around the whole application, so that refusals and failures are seen as well. It looks at
nothing that a caller has written but the method, the key's id and, hashed, the tenant.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from undertow.serving.http.middleware.front import FRONT, TENANT
from undertow.serving.http.problems import SLUG
from undertow.serving.telemetry.metrics import HTTPMetrics
from undertow.serving.telemetry.tracing import RequestSpan, Tracing

log = logging.getLogger(__name__)

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
# asked by machines, every few seconds: counted, not logged
QUIET = frozenset({"/health/live", "/health/ready", "/metrics"})
UNMATCHED = "unmatched"
# the client went away before an answer began (nginx's number for it)
GONE = 499


@dataclass(frozen=True, slots=True)
class RequestEntry:
    """One request that was answered or cut off. `tenant` is the keyed hash, `problem` the error's slug."""

    method: str
    route: str
    status: int
    ms: float
    request_id: str
    key_id: str | None
    tenant: str | None
    problem: str | None


class RequestObserver:
    """ASGI middleware: outermost."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: HTTPMetrics,
        tenant_key: Callable[[str], str],
        tracing: Tracing | None = None,
    ) -> None:
        """`tenant_key`: the keyed hash that stands for a tenant; `tracing`: None where nothing is traced."""
        self._app = app
        self._metrics = metrics
        self._tenant_key = tenant_key
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer, began_s = _Answer(send), time.perf_counter()
        with self._metrics.in_flight.track_inprogress():
            if self._tracing is None:
                await self._serve(scope, receive, answer, began_s, None)
            else:
                with self._tracing.request(_method(scope), Headers(scope=scope)) as span:
                    await self._serve(scope, receive, answer, began_s, span)

    async def _serve(
        self, scope: Scope, receive: Receive, answer: _Answer, began_s: float, span: RequestSpan | None
    ) -> None:
        try:
            await self._app(scope, receive, answer)
        finally:
            served = self._served(scope, answer, time.perf_counter() - began_s)
            self._metrics.note(served.method, served.route, served.status, served.ms / 1e3, served.problem)
            if span is not None:
                span.end(served.method, served.route, served.status, served.tenant, served.problem)
            if served.route not in QUIET:
                told = {name: value for name, value in asdict(served).items() if value is not None}
                log.info("request", extra={"fields": told | ({} if span is None else span.ids)})

    def _served(self, scope: Scope, answer: _Answer, seconds: float) -> RequestEntry:
        asked = scope.get(FRONT)
        principal = None if asked is None else asked.principal
        tenant = scope.get(TENANT)
        return RequestEntry(
            method=_method(scope),
            route=getattr(scope.get("route"), "path", UNMATCHED),
            status=answer.status or GONE,
            ms=round(seconds * 1e3, 3),
            request_id=answer.request_id,
            key_id=None if principal is None else principal.key_id,
            tenant=None if tenant is None else self._tenant_key(tenant),
            problem=scope.get(SLUG),
        )


class _Answer:
    """`send`, which notes the status and the id that the request was given."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None
        self.request_id = ""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.request_id = Headers(raw=message["headers"]).get("x-request-id", "")
        await self._send(message)


def _method(scope: Scope) -> str:
    method: str = scope["method"]
    return method if method in METHODS else "other"
