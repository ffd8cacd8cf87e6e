"""Liveness and readiness. No key is needed."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from undertow.serving.http.routes.access import Access, GuardedRoute
from undertow.serving.http.routes.schemas import Health
from undertow.serving.http.service import Served

router = APIRouter(route_class=GuardedRoute, tags=["health"])

OPEN: dict[str, Any] = {"security": []}
UNREADY: dict[int | str, dict[str, Any]] = {503: {"model": Health, "description": "Not now."}}


@router.get("/health/live", openapi_extra=OPEN)
@Access(None)
async def live() -> Health:
    """The process responds to requests."""
    return Health(status="ok")


@router.get("/health/ready", response_model=Health, responses=UNREADY, openapi_extra=OPEN)
@Access(None)
async def ready(service: Served) -> Any:
    """At least one shard serves, and the service is not shutting down.

    `llm`: the state of the language model's server: ok, trouble, unknown, or off if none is configured. A
    lost LLM does not make the service unready: adding and searching continue.
    """
    if service.load.draining:
        return JSONResponse({"status": "draining"}, 503)
    serving, llm = await service.readiness.look()
    return JSONResponse({"status": "ok" if serving else "unready", "llm": llm}, 200 if serving else 503)
