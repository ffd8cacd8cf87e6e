"""Observes every HTTP request: metrics, one log line, one span.

A pure ASGI layer around the whole application, so that it sees refusals and failures too. Of the request it
records only the method, the key's id and the tenant's hash.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from undertow.serving.http.middleware.front import PRINCIPAL, REQUEST_ID, TENANT
from undertow.serving.http.problems import SLUG
from undertow.serving.telemetry.metrics import HTTPMetrics
from undertow.serving.telemetry.tracing import RequestSpan, Tracing

log = logging.getLogger(__name__)

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
# polled by machines every few seconds: counted, not logged
QUIET = frozenset({"/health/live", "/health/ready", "/metrics"})
UNMATCHED = "unmatched"
UNTRACED = nullcontext()
# the client disconnected before the response began (nginx's number for it)
GONE = 499


class RequestObserver:
    """The outermost ASGI middleware."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: HTTPMetrics,
        tenant_key: Callable[[str], str],
        tracing: Tracing | None = None,
    ) -> None:
        """`tenant_key`: the keyed hash of a tenant's name; `tracing`: None to trace nothing."""
        self._app = app
        self._metrics = metrics
        self._tenant_key = tenant_key
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, began_s, tracing = GONE, time.perf_counter(), self._tracing

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with tracing.request(_method(scope), Headers(scope=scope)) if tracing else UNTRACED as span:
            self._metrics.under_way += 1
            try:
                await self._app(scope, receive, watched)
            finally:
                self._metrics.under_way -= 1
                self._record(scope, status, time.perf_counter() - began_s, span)

    def _record(self, scope: Scope, status: int, seconds: float, span: RequestSpan | None) -> None:
        method, route = _method(scope), getattr(scope.get("route"), "path", UNMATCHED)
        principal, problem, name = scope.get(PRINCIPAL), scope.get(SLUG), scope.get(TENANT)
        tenant = None if name is None else self._tenant_key(name)
        self._metrics.note(method, route, status, seconds, problem)
        if span is not None:
            span.end(method, route, status, tenant, problem)
        if route in QUIET:
            return
        fields = {
            "method": method,
            "route": route,
            "status": status,
            "ms": round(seconds * 1e3, 3),
            "request_id": scope.get(REQUEST_ID, ""),
            "key_id": principal and principal.key_id,
            "tenant": tenant,
            "problem": problem,
            **(span.ids if span else {}),
        }
        log.info("request", extra={"fields": {k: value for k, value in fields.items() if value is not None}})


def _method(scope: Scope) -> str:
    method: str = scope["method"]
    return method if method in METHODS else "other"
