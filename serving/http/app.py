"""The application: routes over one Service, behind the middleware."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from undertow.serving.http.jobs.actions import works
from undertow.serving.http.mcp_endpoint import mcp_mounted
from undertow.serving.http.middleware.front import REFUSED, Front
from undertow.serving.http.middleware.request_observer import RequestObserver
from undertow.serving.http.openapi import TITLE, describe
from undertow.serving.http.problems import SLUG, problem_of
from undertow.serving.http.routes import add, admin, events, health, memories, search_and_answer, tenants
from undertow.serving.http.routes.access import GuardedRoute
from undertow.serving.http.routes.mem0.face import Mem0Errors, Mem0Face
from undertow.serving.http.service import Service
from undertow.serving.telemetry.tracing import Tracing


def make_app(
    service: Service, tracing: Tracing | None = None, *, extend: Callable[[FastAPI], None] | None = None
) -> FastAPI:
    """The application of a service. `tracing`: None to trace nothing.

    `extend` adds routes, and middleware before the front, which a request passes first.
    """
    app = FastAPI(
        title=TITLE,
        version=version("undertow"),
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan,
        exception_handlers={HTTPException: _problem, RequestValidationError: _problem},
        # RequestObserver has spans and metrics; FastAPI's own would be looked for at each request
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.service = service
    for routes in (add, search_and_answer, memories, tenants, events, admin, health):
        app.include_router(routes.router)
    hot = (*add.router.routes, *search_and_answer.router.routes)
    direct = [route for route in hot if isinstance(route, GuardedRoute) and route.access.direct]
    app.add_middleware(Mem0Face)
    app.add_middleware(Front, load=service.load, guard=service.guard, turns=service.turns, direct=direct)
    app.add_middleware(Mem0Errors)
    if extend is not None:
        extend(app)
    app.add_middleware(
        RequestObserver, metrics=service.metrics, tenant_key=service.memories.tenant_key, tracing=tracing
    )
    describe(app)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Resumes open jobs and webhooks at the start; leaves them for the next service at the end."""
    service: Service = app.state.service
    await service.jobs.start(works(service))
    patience_s = service.settings.webhook_patience_s
    await service.webhooks.start(service.state.run, patience_s, service.key_file)
    try:
        async with mcp_mounted(app, service.settings):
            yield
    finally:
        service.load.draining = True
        await service.webhooks.stop()
        await service.jobs.stop()
        await service.write_refusals(ended=True)


async def _problem(request: Request, error: Exception) -> Response:
    problem = problem_of(error)
    if problem.status_code in REFUSED:
        raise error  # the front refuses, when there is time for it
    request.scope[SLUG] = problem.slug
    if problem.status_code == 405:
        problem.headers = {"Allow": ", ".join(_allowed(request))}
    return problem.response


def _allowed(request: Request) -> list[str]:
    """The methods of this path's routes."""
    routes: list[Any] = request.app.routes
    return [
        method
        for method in ("DELETE", "GET", "POST", "PUT")
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in routes)
    ]
