"""The application: routes over one `AsyncMemories`, behind one guard."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from undertow.engine.base.config import Settings
from undertow.serving.auth.audit import AuditLog
from undertow.serving.auth.key_file import KeyFile
from undertow.serving.auth.limits import answer_tokens
from undertow.serving.http.job_actions import works
from undertow.serving.http.jobs import JobQueue
from undertow.serving.http.middleware.front import Front
from undertow.serving.http.middleware.guard import Guard
from undertow.serving.http.middleware.idempotency import IdempotencyStore
from undertow.serving.http.middleware.load_limits import LoadLimits
from undertow.serving.http.middleware.token_budget import TokenBudgets
from undertow.serving.http.openapi import TITLE, describe
from undertow.serving.http.problems import SLUG, problem_of
from undertow.serving.http.readiness import Readiness
from undertow.serving.http.routes import add as adding
from undertow.serving.http.routes import admin, health, tenants
from undertow.serving.http.routes import memories as memories_routes
from undertow.serving.http.routes import search_and_answer as asking
from undertow.serving.http.routes.receipts import AddCalls
from undertow.serving.http.service_settings import ServiceSettings
from undertow.serving.http.services import Service
from undertow.serving.http.state_db import StateDb
from undertow.serving.mcp.http_mount import mcp_mounted
from undertow.serving.telemetry.metrics import HTTPMetrics
from undertow.serving.telemetry.request_observer import RequestObserver
from undertow.serving.telemetry.tracing import Tracing

if TYPE_CHECKING:
    from undertow.serving.async_memories import AsyncMemories


def make_app(
    memories: AsyncMemories,
    *,
    guard: Guard,
    budgets: TokenBudgets,
    audit: AuditLog,
    state: StateDb,
    key_file: KeyFile | None = None,
    settings: ServiceSettings | None = None,
    engine: Settings | None = None,
    tracing: Tracing | None = None,
) -> FastAPI:
    """The service's application. What it is given stays the caller's, who closes it after the application.

    `key_file`: where the names of erased tenants are to go; `engine`: the settings of the engines behind;
    `tracing`: None where nothing is traced.
    """
    settings, engine = settings or ServiceSettings(), engine or Settings()
    service = Service(
        memories=memories,
        guard=guard,
        budgets=budgets,
        audit=audit,
        key_file=key_file,
        settings=settings,
        load=LoadLimits(settings),
        adding=AddCalls(memories),
        once=IdempotencyStore(state, settings.keep_s),
        jobs=JobQueue(state, settings),
        state=state,
        readiness=Readiness(memories, llm=engine.llm_url is not None),
        metrics=HTTPMetrics(),
        answer_tokens=partial(answer_tokens, engine),
        max_message_bytes=engine.max_message_bytes,
    )
    app = FastAPI(
        title=TITLE,
        version=version("undertow"),
        redirect_slashes=False,
        redoc_url=None,
        lifespan=_lifespan,
        exception_handlers={HTTPException: _problem, RequestValidationError: _problem},
    )
    app.state.service = service
    for part in (adding, asking, memories_routes, tenants, admin, health):
        app.include_router(part.router)
    app.add_middleware(Front, load=service.load, guard=service.guard)
    app.add_middleware(
        RequestObserver, metrics=service.metrics, tenant_key=memories.tenant_key, tracing=tracing
    )
    describe(app)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Jobs are taken up when the application starts, and left for the next one when it ends."""
    service: Service = app.state.service
    await service.jobs.start(works(service))
    try:
        async with mcp_mounted(app, service.settings):
            yield
    finally:
        service.load.draining = True
        await service.jobs.stop()


async def _problem(request: Request, error: Exception) -> Response:
    problem = problem_of(error)
    request.scope[SLUG] = problem.slug
    if problem.status_code == 405:
        problem.headers = {"Allow": ", ".join(_allowed(request))}
    return problem.response


def _allowed(request: Request) -> list[str]:
    """The methods that the routes of this path know."""
    routes: list[Any] = request.app.routes
    methods: set[str] = set()
    for method in ("GET", "POST", "PUT", "DELETE"):
        scope = {**request.scope, "method": method}
        if any(route.matches(scope)[0] is Match.FULL for route in routes):
            methods.add(method)
    return sorted(methods)
