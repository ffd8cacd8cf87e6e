"""What the routes work with, made once for each application."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import Request

from undertow.engine.base.model import AnswerMode
from undertow.serving.auth.audit import AuditLog
from undertow.serving.auth.key_file import KeyFile
from undertow.serving.auth.principal import Principal
from undertow.serving.http.jobs import JobQueue
from undertow.serving.http.middleware.front import asked_of
from undertow.serving.http.middleware.guard import Guard
from undertow.serving.http.middleware.idempotency import IdempotencyStore
from undertow.serving.http.middleware.load_limits import LoadLimits
from undertow.serving.http.middleware.token_budget import TokenBudgets
from undertow.serving.http.readiness import Readiness
from undertow.serving.http.routes.receipts import AddCalls
from undertow.serving.http.service_settings import ServiceSettings
from undertow.serving.http.state_db import StateDb
from undertow.serving.telemetry.metrics import HTTPMetrics

if TYPE_CHECKING:
    from undertow.serving.async_memories import AsyncMemories


@dataclass(frozen=True, slots=True)
class Service:
    """The parts of one service. `key_file`: where erased names are to go, if keys are demanded.

    `answer_tokens`: the most that one answer may take of the LLM, by its mode; None: the usual one.
    """

    memories: AsyncMemories
    guard: Guard
    budgets: TokenBudgets
    audit: AuditLog
    key_file: KeyFile | None
    settings: ServiceSettings
    load: LoadLimits
    adding: AddCalls
    once: IdempotencyStore
    jobs: JobQueue
    state: StateDb
    readiness: Readiness
    metrics: HTTPMetrics
    answer_tokens: Callable[[AnswerMode | None], int]
    max_message_bytes: int


async def service_of(request: Request) -> Service:
    """Of a request's application. (Asynchronous, as FastAPI would call it in a thread otherwise.)"""
    service: Service = request.app.state.service
    return service


async def principal_of(request: Request) -> Principal:
    """Who sends a request; at a route that lets nobody pass without that."""
    principal = asked_of(request.scope).principal
    assert principal is not None, "only open paths have none"
    return principal
