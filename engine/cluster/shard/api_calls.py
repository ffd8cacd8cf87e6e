"""The calls of MemoryApi at a shard. Slow ones wait while its thread serves others and steps the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from undertow.engine.api.answer_calls import PendingAnswer
from undertow.engine.api.engine import Engine
from undertow.engine.api.tenant_calls import PendingImport
from undertow.engine.api.transfer.import_ import ImportCancelled
from undertow.engine.base.queries import (
    AnswerQuery,
    ApiCall,
    DeleteCommand,
    DrainCommand,
    EraseCommand,
    FlushCommand,
    ImportCommand,
    MemoryCall,
    R,
    SearchQuery,
    TenantCall,
    UpdateCommand,
)
from undertow.engine.base.results import Answer, Certificate, ImportReport, SearchResult
from undertow.engine.cluster.shard import repeated_calls
from undertow.engine.cluster.shard.answer_streams import (
    AnswerStream,
    AnswerStreams,
    AnswerTicket,
    UnknownTicket,
)
from undertow.engine.cluster.shard.engine_thread import EngineThread
from undertow.engine.cluster.shard.futures import hand_on
from undertow.engine.cluster.shard.index_build import AfterIndexBuild, CallerGone, IndexBuildQueue
from undertow.engine.cluster.shard.supervisor import ShardSupervisor
from undertow.engine.cluster.wire import Status
from undertow.engine.llm.client import BrokenOff

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class RunningImport:
    """An import at this shard. `engine`: the one that began it; `cancelled`: the tenant was erased."""

    tenant: str
    engine: Engine | None = None
    pending: PendingImport | None = None
    cancelled: bool = False


class ApiCalls:
    """Begins calls, from any thread. Moved, InTransit: the tenant is not this shard's to serve."""

    def __init__(self, shard: str, supervisor: ShardSupervisor, engine_thread: EngineThread) -> None:
        self.streams = AnswerStreams(shard)
        self._supervisor = supervisor
        self._engine_thread = engine_thread
        self._ask = engine_thread.ask
        self._index_builds = IndexBuildQueue()
        self._imports: set[RunningImport] = set()

    def begin(self, call: ApiCall[R]) -> Future[R | None]:
        """Begin a call. Its result is None where a MemoryCall finds no such memory here."""
        if (handler := HANDLERS.get(type(call))) is not None:
            begun: Future[R | None] = handler(self, call)
            return begun
        if isinstance(call, MemoryCall):
            return self._ask(lambda engine: self._on_memory(engine, call))
        return self._ask(lambda engine: self._on_tenant(engine, call))

    def _on_tenant(self, engine: Engine, call: ApiCall[R]) -> R:
        if isinstance(call, TenantCall):
            self._check(call.tenant)
        return engine.call(call)

    def _on_memory(self, engine: Engine, call: MemoryCall[R]) -> R | None:
        if call.tenant is not None:
            self._check(call.tenant)
        row = engine.row_of(call.memory_id, call.tenant)
        if row is None:
            return None
        self._check(row.tenant)
        return engine.call(replace(call, tenant=row.tenant))

    def _check(self, tenant: str) -> None:
        """Moved, InTransit."""
        for refusal in self._engine_thread.refusals(frozenset([tenant])).values():
            raise refusal

    # ---- search and answers

    def _search(self, query: SearchQuery) -> Future[SearchResult]:
        return self._after_index_build(query.tenant, lambda engine: engine.call(query))

    def _after_index_build(self, tenant: str, act: Callable[[Engine], T]) -> Future[T]:
        prepared = self._prepared(tenant, act)
        return prepared.promised(self._ask(prepared, wait=True))

    def _prepared(self, tenant: str, act: Callable[[Engine], T]) -> AfterIndexBuild[T]:
        return AfterIndexBuild(self._index_builds, tenant, self._check, act)

    def _answer(self, query: AnswerQuery) -> Future[Answer]:
        """Cancelling the future cancels the LLM call."""
        asked: list[tuple[Engine, PendingAnswer]] = []
        ready = self._prepared(query.tenant, lambda engine: (engine, self._asked(engine, query)))

        def answer(engine: Engine) -> Answer | None:
            if ready.called_off:
                for opened, pending in asked:
                    opened.let_go(pending)
                raise CallerGone
            if not asked or asked[0][0] is not engine:  # an engine that was reopened has not asked yet
                if (anew := ready(engine)) is None:
                    return None
                asked[:] = [anew]
            return engine.heard(asked[0][1])

        return ready.promised(self._ask(answer, wait=True))

    def _asked(self, engine: Engine, query: AnswerQuery, stream: AnswerStream | None = None) -> PendingAnswer:
        self._check(query.tenant)
        return engine.ask(query, on_text=None if stream is None else stream.add)

    def begin_stream(self, query: AnswerQuery) -> Future[AnswerTicket]:
        """Begin an answer in pieces; see AnswerStreams. The LLM's errors come with the pieces."""
        return self._after_index_build(query.tenant, lambda engine: self._streamed(engine, query))

    def _streamed(self, engine: Engine, query: AnswerQuery) -> AnswerTicket:
        stream = AnswerStream(query.tenant)
        asked = [(engine, self._asked(engine, query, stream))]

        def hear(engine: Engine) -> Answer | None:
            stream.tick()
            opened, pending = asked[0]
            if stream.abandoned:
                opened.let_go(pending)
                raise UnknownTicket("nobody asked for the answer any more")
            if opened is not engine:  # reopened: the former engine's call is lost
                if stream.begun:
                    raise BrokenOff("the shard was opened anew in the middle of the answer. Ask again.")
                asked[0] = engine, self._asked(engine, query, stream)
            return engine.heard(asked[0][1])

        self._ask(hear, wait=True).add_done_callback(stream.end)
        return self.streams.add(stream)

    # ---- changes

    def _update(self, command: UpdateCommand) -> Future[Any]:
        return self._ask(lambda engine: self._change(engine, command, repeated_calls.updated))

    def _delete(self, command: DeleteCommand) -> Future[Any]:
        return self._ask(lambda engine: self._change(engine, command, repeated_calls.deleted))

    def _change(
        self, engine: Engine, command: Any, done_before: Callable[[Engine, Any], T | None]
    ) -> T | None:
        if command.tenant is not None:
            self._check(command.tenant)
        if command.again and (done := done_before(engine, command)) is not None:
            return done
        changed: T | None = self._on_memory(engine, command)
        return changed

    def _flush(self, command: FlushCommand) -> Future[bool]:
        """Other calls go on meanwhile. A repeat takes a flush at the log's end for its own."""
        tenant = command.tenant
        logged: list[bool] = []

        def flushed(engine: Engine) -> bool | None:
            if not logged:
                self._check(tenant)
                if not (command.again and repeated_calls.ends_in_flush(engine, tenant)):
                    engine.log_flush(tenant)
                logged.append(True)
            engine.tenants.require(tenant)
            if engine.at_rest(tenant):
                return tenant not in engine.scheduler.blocked
            return False if engine.server_lost else None

        return self._ask(flushed, wait=True)

    def _drain(self, _: DrainCommand) -> Future[bool]:
        def drained(engine: Engine) -> bool | None:
            if engine.server_lost:
                return False
            return not engine.scheduler.blocked if engine.idle and not self._engine_thread.calls else None

        return self._ask(drained, wait=True)

    def _erase(self, command: EraseCommand) -> Future[Certificate | None]:
        """A purge rewrites files of the whole store, so one purge serves all erasures that wait for it."""
        if not command.now:
            return self._ask(lambda engine: self._bury(engine, command))
        buried: list[bool] = []

        def erased(engine: Engine) -> tuple[Certificate | None] | None:
            if buried:
                self._check(command.tenant)
                return (repeated_calls.certificate(engine, command.tenant),)
            self._bury(engine, command)
            buried.append(True)
            return None  # erasures that came meanwhile are buried first

        return _unwrapped(self._ask(erased, wait=True))

    def _bury(self, engine: Engine, command: EraseCommand) -> None:
        tenant = command.tenant
        self._check(tenant)
        for running in self._imports:  # a commit that was begun before must not bring the tenant back
            running.cancelled |= running.tenant == tenant
        self.streams.forget(tenant)
        self._supervisor.parking.forget(tenant)
        if command.again and tenant not in engine.tenants:
            return
        for call in self._engine_thread.calls:
            call.withdraw(tenant, (Status.STORED, None, None, None))
        engine.erase(tenant)

    def _import(self, command: ImportCommand) -> Future[ImportReport]:
        """Other calls go on meanwhile."""
        running = RunningImport(command.tenant)

        def go_on(engine: Engine) -> ImportReport | None:
            self._check(command.tenant)
            if running.cancelled:
                raise ImportCancelled(
                    "the tenant was erased while this was taken in: nothing of it is stored."
                )
            if running.pending is None or running.engine is not engine:  # a reopened engine has not begun
                running.engine, running.pending = engine, engine.begin_import(command)
                self._imports.add(running)
            return engine.go_on_importing(running.pending)

        imported = self._ask(go_on, wait=True)
        imported.add_done_callback(lambda _: self._imports.discard(running))
        return imported


# calls that wait for something, or that know a repeat; the engine answers all others at once
HANDLERS: Mapping[type[ApiCall[Any]], Callable[[ApiCalls, Any], Future[Any]]] = {
    AnswerQuery: ApiCalls._answer,
    DeleteCommand: ApiCalls._delete,
    DrainCommand: ApiCalls._drain,
    EraseCommand: ApiCalls._erase,
    FlushCommand: ApiCalls._flush,
    ImportCommand: ApiCalls._import,
    SearchQuery: ApiCalls._search,
    UpdateCommand: ApiCalls._update,
}


def _unwrapped(wrapped: Future[tuple[T]]) -> Future[T]:
    """The tuple's item, for commands that wait: None means "not yet" to them, but may be the result."""
    future: Future[T] = Future()
    hand_on(wrapped, future, lambda result: result[0])
    return future
