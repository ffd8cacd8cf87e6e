"""The parts of one service, and the arguments that endpoints take from a request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Header, Path, Request

from undertow.engine.base.config import Settings
from undertow.engine.base.model import AnswerMode
from undertow.serving.auth.audit import AuditLog, AuditOutcome, Entry, RefusalCounts
from undertow.serving.auth.key_file import KeyFile
from undertow.serving.auth.limits import answer_tokens
from undertow.serving.auth.principal import Principal
from undertow.serving.events import sender, webhooks
from undertow.serving.events.feed import Feed
from undertow.serving.http.jobs.queue import JobQueue
from undertow.serving.http.middleware.admission import Admission
from undertow.serving.http.middleware.fair_turns import FairTurns
from undertow.serving.http.middleware.front import sender_of
from undertow.serving.http.middleware.guard import Guard
from undertow.serving.http.middleware.idempotency import AGAIN, IdempotencyStore
from undertow.serving.http.middleware.load_limits import LoadLimits
from undertow.serving.http.middleware.token_budget import TokenBudgets
from undertow.serving.http.readiness import Readiness
from undertow.serving.http.routes.add_batches import AddCalls
from undertow.serving.http.service_settings import ServiceSettings
from undertow.serving.http.state_db import StateDb
from undertow.serving.telemetry.metrics import HTTPMetrics

if TYPE_CHECKING:
    from undertow.serving.async_memories import AsyncMemories


class Service:
    """What the routes of one application share. The caller closes what it passes in, after the application.

    `answer_tokens`: the most LLM tokens that one answer may cost, by its mode; None: the default mode.
    """

    def __init__(
        self,
        memories: AsyncMemories,
        state: StateDb,
        *,
        guard: Guard,
        budgets: TokenBudgets,
        audit: AuditLog,
        key_file: KeyFile | None = None,
        settings: ServiceSettings | None = None,
        engine: Settings | None = None,
    ) -> None:
        """`key_file`: erasures remove the tenant's name from it; `engine`: the settings of the engines."""
        engine = engine or Settings()
        self.settings = settings or ServiceSettings()
        self.memories = memories
        self.state = state
        self.guard = guard
        self.budgets = budgets
        self.audit = audit
        self.refusals = RefusalCounts()
        self.key_file = key_file
        self.load = LoadLimits(self.settings)
        self.turns = FairTurns()
        self.adding = AddCalls(memories, self.load)
        self.once = IdempotencyStore(state, self.settings.keep_s)
        self.jobs = JobQueue(state, self.settings)
        self.readiness = Readiness(memories, llm=engine.llm_url is not None)
        self.metrics = HTTPMetrics()
        self.admission = Admission(self.settings, self.metrics.note_unread)
        self.feed = Feed(memories)
        send = sender.Sender(self.settings.webhook_networks)
        self.webhooks = webhooks.Webhooks(memories, self.feed, send, self.metrics)
        self.answer_tokens: Callable[[AnswerMode | None], int] = partial(answer_tokens, engine)
        self.max_message_bytes = engine.max_message_bytes

    @asynccontextmanager
    async def audited(self, act: str, key_id: str, tenant: str | None = None) -> AsyncIterator[Entry]:
        """As AuditLog.act, off the event loop. AuditError: the act was not begun."""
        entry = Entry(act, key_id, tenant_key=None if tenant is None else self.memories.tenant_key(tenant))
        await asyncio.to_thread(self.audit.write, entry, AuditOutcome.BEGUN)
        try:
            yield entry
        except BaseException as error:
            failed, name = AuditOutcome.FAILED, type(error).__name__
            await asyncio.to_thread(self.audit.write_end, entry, failed, error=name)
            raise
        await asyncio.to_thread(self.audit.write_end, entry, AuditOutcome.DONE)

    async def refused(self, act: str, key_id: str, tenant: str | None = None) -> None:
        """As AuditLog.refused, off the event loop, for as many as RefusalCounts lets through. AuditError."""
        if (counts := self.refusals.take(act, key_id)) is not None:
            key = None if tenant is None else self.memories.tenant_key(tenant)
            await asyncio.to_thread(self.audit.refused, act, key_id, tenant_key=key, counts=counts)
        await self.write_refusals()

    async def write_refusals(self, *, ended: bool = False) -> None:
        """Write the lines that are due, see RefusalCounts. If that fails, the process's log says so."""
        due = self.refusals.overdue(ended=ended)
        for act, key_id, counts in due if ended else islice(due, 2):  # each waits for the disk
            entry = Entry(act, key_id, counts=counts)
            await asyncio.to_thread(self.audit.write_end, entry, AuditOutcome.REFUSED)


# FastAPI would call these in a thread if they were not asynchronous


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _principal(request: Request) -> Principal:
    return sender_of(request.scope)


async def _is_again(request: Request) -> bool:
    return bool(request.scope.get(AGAIN, False))


async def _is_async(
    prefer: Annotated[
        str | None,
        Header(description="`respond-async`: 202 with a job, at once.", examples=["respond-async"]),
    ] = None,
) -> bool:
    return any(part.strip().lower() == "respond-async" for part in (prefer or "").split(","))


Served = Annotated[Service, Depends(_service)]
# whose key the request carries
Sender = Annotated[Principal, Depends(_principal)]
# whether a service that has ended since began this request, under its Idempotency-Key
Again = Annotated[bool, Depends(_is_again)]
# whether the Prefer header (RFC 7240) asks for a job
RespondAsync = Annotated[bool, Depends(_is_async)]
Tenant = Annotated[str, Path(min_length=1, description="Whose memories; percent-encoded.")]
MemoryId = Annotated[str, Path(min_length=1, description="A turn, an episode or a fact.")]
