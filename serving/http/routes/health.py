"""Whether the process lives, and whether it should be sent requests. No key is needed."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from undertow.serving.http.routes.access import GuardedRoute, needs
from undertow.serving.http.routes.dependencies import Served
from undertow.serving.http.schemas.service import Health

router = APIRouter(route_class=GuardedRoute, tags=["health"])

OPEN: dict[str, Any] = {"security": []}
UNREADY: dict[int | str, dict[str, Any]] = {503: {"model": Health, "description": "Not now."}}


@router.get("/health/live", openapi_extra=OPEN)
@needs(None)
async def live() -> Health:
    """The process answers."""
    return Health(status="ok")


@router.get("/health/ready", response_model=Health, responses=UNREADY, openapi_extra=OPEN)
@needs(None)
async def ready(service: Served) -> Any:
    """The store, or a shard of it, is open, and the service is not about to end.

    `llm` says how the language model's server is: ok, trouble, unknown, or off where none is set. That it is
    lost is no reason to be unready: adding and searching go on.
    """
    if service.load.draining:
        return JSONResponse({"status": "draining"}, 503)
    serving, llm = await service.readiness.look()
    status = "ok" if serving else "unready"
    return JSONResponse({"status": status, "llm": llm}, 200 if serving else 503)
