"""The calls of MemoryApi at a shard. Slow ones wait while its thread serves others and steps the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from undertow.engine.api.answer_calls import PendingAnswer
from undertow.engine.api.engine import Engine
from undertow.engine.api.report_format import check_limit
from undertow.engine.api.search_calls import Search
from undertow.engine.api.transfer.import_ import Import, ImportCancelled
from undertow.engine.api.views.events import standing
from undertow.engine.api.views.listing import MAX_LISTED
from undertow.engine.base.queries import (
    AnswerQuery,
    ApiCall,
    DeleteCommand,
    DrainCommand,
    EraseCommand,
    EventPage,
    EventsQuery,
    ExplainQuery,
    ExportQuery,
    FlushCommand,
    GetQuery,
    HistoryQuery,
    ImportCommand,
    ListQuery,
    MemoriesQuery,
    MemoryCall,
    PolicyQuery,
    PurgeCommand,
    R,
    SearchQuery,
    SetPolicyCommand,
    TenantCall,
    TenantsQuery,
    TenantStatsQuery,
    TurnsByKeyQuery,
    UpdateCommand,
)
from undertow.engine.base.results import Answer, Certificate, ImportReport, Page, Report, SearchResult
from undertow.engine.cluster.shard.api import repeated_calls
from undertow.engine.cluster.shard.api.answer_streams import (
    AnswerStream,
    AnswerStreams,
    AnswerTicket,
    UnknownTicket,
)
from undertow.engine.cluster.shard.api.index_build import AfterIndexBuild, CallerGone, IndexBuildQueue
from undertow.engine.cluster.shard.api.purges import Purges, after
from undertow.engine.cluster.shard.commands import NotYet
from undertow.engine.cluster.shard.engine_work import EngineWork
from undertow.engine.cluster.shard.quick import is_at_hand, is_quick_call, logs_quickly, read_keys
from undertow.engine.cluster.shard.supervisor import ShardSupervisor
from undertow.engine.cluster.wire import Status
from undertow.engine.llm.client import BrokenOff

T = TypeVar("T")

# They read the journal, and of memory what there is of their tenant. Counts load tenants, so they are none.
READS = (MemoriesQuery, PolicyQuery, TenantsQuery, TenantStatsQuery)
# They read the journal, and of memory which tenants there are.
JOURNAL_READS = (ExplainQuery, ExportQuery, GetQuery, HistoryQuery)
# Records that are listed in about a millisecond.
LISTED_AT_ONCE = 50


@dataclass(slots=True, eq=False)
class RunningImport:
    """An import at this shard. `engine`: the one that began it; `cancelled`: the tenant was erased."""

    tenant: str
    engine: Engine | None = None
    pending: Import | None = None
    cancelled: bool = False


class ApiCalls:
    """Begins calls, from any thread. Moved, InTransit: this shard does not serve the tenant."""

    def __init__(self, shard: str, supervisor: ShardSupervisor, work: EngineWork) -> None:
        self.streams = AnswerStreams(shard)
        self._shard = shard
        self._supervisor = supervisor
        self._work = work
        self._ask = work.ask
        self._index_builds = IndexBuildQueue()
        self._imports: set[RunningImport] = set()
        self._purges = Purges(work, self._check)

    def begin(self, call: ApiCall[R]) -> Future[R | None]:
        """Begin a call. Its result is None where a MemoryCall finds no such memory here."""
        if (handler := HANDLERS.get(type(call))) is not None:
            begun: Future[R | None] = handler(self, call)
            return begun
        tenant = getattr(call, "tenant", None) or ""
        reads_journal = isinstance(call, JOURNAL_READS)
        reads = reads_journal or isinstance(call, READS)
        if isinstance(call, MemoryCall):
            return self._ask(
                lambda engine: self._on_memory(engine, call),
                tenant=tenant,
                reads=reads,
                reads_journal=reads_journal,
            )
        return self._ask(
            lambda engine: self._on_tenant(engine, call),
            is_quick=lambda engine: is_quick_call(engine, call),
            tenant=tenant,
            reads=reads,
            reads_journal=reads_journal,
            changes=isinstance(call, SetPolicyCommand),
        )

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
        for refusal in self._work.calls.refusals(frozenset([tenant])).values():
            raise refusal

    # ---- search and answers

    def _search(self, query: SearchQuery) -> Future[SearchResult]:
        begun: tuple[Engine, Search] | None = None

        def search(engine: Engine) -> SearchResult | NotYet:
            nonlocal begun
            if begun is None or begun[0] is not engine:  # a reopened engine has not begun
                begun = engine, engine.begin_search(query)
            return engine.go_on_searching(begun[1]) or NotYet.GO_ON

        return self._after_index_build(query, search)

    def _by_key(self, query: TurnsByKeyQuery) -> Future[dict[str, Report]]:
        """The keys of a loaded tenant are read in parts, as other calls would wait."""

        def found(engine: Engine) -> dict[str, Report] | NotYet:
            self._check(query.tenant)
            return engine.call(query) if read_keys(engine, query.tenant) else NotYet.SOON

        is_quick = partial(is_at_hand, tenant=query.tenant)
        return self._ask(found, wait=True, is_quick=is_quick, tenant=query.tenant, loads=True)

    def _list(self, query: ListQuery) -> Future[Page]:
        """In parts, as other calls would wait for a long page."""
        items: list[Report] = []
        after, incarnation = query.after, -1

        def go_on(engine: Engine) -> Page | NotYet:
            nonlocal after, incarnation
            self._check(query.tenant)
            check_limit("list", query.limit, MAX_LISTED)
            if (current := engine.tenants.incarnation(query.tenant)) != incarnation:
                items.clear()  # of a tenant that was erased since
                after, incarnation = query.after, current
            most = min(query.limit - len(items), LISTED_AT_ONCE)
            part = engine.call(replace(query, after=after, limit=most))
            items.extend(part.items)
            after = part.after
            return Page(tuple(items), after) if after is None or len(items) == query.limit else NotYet.GO_ON

        return self._ask(
            go_on,
            wait=True,
            is_quick=lambda engine: is_quick_call(engine, query),
            tenant=query.tenant,
            reads=True,
            loads=True,
        )

    def _events(self, query: EventsQuery) -> Future[dict[str, EventPage]]:
        """At once where nothing is new: callers ask often, and no step is to be brief for that."""
        query, engine = replace(query, home=self._shard), self._supervisor.engine
        if engine is not None and (page := standing(engine.journal, query)) is not None:
            known: Future[dict[str, EventPage]] = Future()
            known.set_result({self._shard: page})
            return known
        return self._ask(
            lambda engine: engine.call(query), tenant=query.asker, reads=True, reads_journal=True
        )

    def _after_index_build(
        self, query: SearchQuery | AnswerQuery, act: Callable[[Engine], T | NotYet]
    ) -> Future[T]:
        prepared = AfterIndexBuild(self._index_builds, query, self._check, act)
        asked = self._ask(
            prepared,
            wait=True,
            is_quick=prepared.is_quick,
            tenant=query.tenant,
            searches=isinstance(query, SearchQuery),
            loads=True,
        )
        return prepared.promised(asked)

    def _answer(self, query: AnswerQuery) -> Future[Answer]:
        """Cancelling the future cancels the LLM call."""
        asked: tuple[Engine, PendingAnswer] | None = None
        ready = AfterIndexBuild(
            self._index_builds,
            query,
            self._check,
            lambda engine: (engine, self._asked(engine, query)),
        )

        def answer(engine: Engine) -> Answer | NotYet | None:
            nonlocal asked
            if ready.cancelled:
                if asked is not None:
                    asked[0].let_go(asked[1])
                raise CallerGone
            if asked is None or asked[0] is not engine:  # a reopened engine has not asked yet
                begun = ready(engine)
                if begun is None or isinstance(begun, NotYet):
                    return begun
                asked = begun
            return engine.heard(asked[1])

        def is_quick(engine: Engine) -> bool:
            if asked is None or asked[0] is not engine:
                return ready.is_quick(engine)
            return asked[1].waits or is_quick_call(engine, query)

        asks = self._ask(answer, wait=True, is_quick=is_quick, tenant=query.tenant, loads=True)
        return ready.promised(asks)

    def _asked(self, engine: Engine, query: AnswerQuery, stream: AnswerStream | None = None) -> PendingAnswer:
        self._check(query.tenant)
        return engine.ask(query, on_text=None if stream is None else stream.add)

    def begin_stream(self, query: AnswerQuery) -> Future[AnswerTicket]:
        """Begin a streamed answer; see AnswerStreams. The LLM's errors come with its text."""
        return self._after_index_build(query, lambda engine: self._streamed(engine, query))

    def _streamed(self, engine: Engine, query: AnswerQuery) -> AnswerTicket:
        stream = AnswerStream(query.tenant)
        opened, pending = engine, self._asked(engine, query, stream)

        def hear(engine: Engine) -> Answer | None:
            nonlocal opened, pending
            stream.serve()
            if stream.abandoned:
                opened.let_go(pending)
                raise UnknownTicket("nobody asked for the answer any more")
            if opened is not engine:  # reopened: the former engine's call is lost
                if stream.begun:
                    reason = "the shard was opened anew in the middle of the answer. Ask again."
                    raise BrokenOff(reason, pending.spent)
                opened, pending = engine, self._asked(engine, query, stream)
            return engine.heard(pending)

        def is_quick(engine: Engine) -> bool:
            return (opened is engine and pending.waits) or is_quick_call(engine, query)

        heard = self._ask(hear, wait=True, is_quick=is_quick)
        heard.add_done_callback(stream.end)
        return self.streams.add(stream)

    # ---- changes

    def _edit(self, command: UpdateCommand | DeleteCommand) -> Future[Any]:
        def edit(engine: Engine) -> Any:
            if command.tenant is not None:
                self._check(command.tenant)
            if command.again and (done := repeated_calls.edited(engine, command)) is not None:
                return done
            return self._on_memory(engine, command)

        tenant = command.tenant or ""
        return self._ask(edit, tenant=tenant, loads=bool(tenant), settles=True)

    def _flush(self, command: FlushCommand) -> Future[bool]:
        """Other calls go on meanwhile. A repeat takes a flush at the log's end for its own."""
        tenant = command.tenant
        logged = False

        def flushed(engine: Engine) -> bool | None:
            nonlocal logged
            if not logged:
                self._check(tenant)
                if not (command.again and repeated_calls.ends_in_flush(engine, tenant)):
                    engine.log_flush(tenant)
                logged = True
            engine.tenants.require(tenant)
            if engine.at_rest(tenant):
                return tenant not in engine.scheduler.blocked
            return False if engine.is_stalled else None

        return self._ask(
            flushed,
            wait=True,
            is_quick=lambda engine: logged or (not command.again and logs_quickly(engine, tenant)),
            tenant=tenant,
            loads=True,
            changes=True,
        )

    def _drain(self, _: DrainCommand) -> Future[bool]:
        def drained(engine: Engine) -> bool | None:
            if engine.is_stalled:
                return False
            return not engine.scheduler.blocked if engine.idle and not self._work.calls else None

        return self._ask(drained, wait=True, is_quick=lambda _: True)

    def _purge(self, _: PurgeCommand) -> Future[dict[str, Certificate]]:
        return self._purges.purge()

    def _erase(self, command: EraseCommand) -> Future[Certificate | None]:
        tenant, bury = command.tenant, partial(self._bury, command=command)
        if not command.now:
            return self._ask(bury, tenant=tenant, settles=True, erases=True)
        buried: Future[None] = self._ask(bury, tenant=tenant, settles=True, erases=True)
        return after(buried, lambda _: self._purges.certify(tenant))

    def _bury(self, engine: Engine, command: EraseCommand) -> None:
        tenant = command.tenant
        self._check(tenant)
        for running in self._imports:  # a commit that was begun before must not bring the tenant back
            running.cancelled |= running.tenant == tenant
        self.streams.forget(tenant)
        self._supervisor.quarantine.forget(tenant)
        certifies = command.now and engine.tenants.awaits_purge(tenant)
        if certifies or (command.again and tenant not in engine.tenants):
            return
        for call in self._work.calls:
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

        imported = self._ask(go_on, wait=True, tenant=command.tenant, changes=True)
        imported.add_done_callback(lambda _: self._imports.discard(running))
        return imported


# calls that wait for something or recognise a repeat; the engine answers all others at once
HANDLERS: Mapping[type[ApiCall[Any]], Callable[[ApiCalls, Any], Future[Any]]] = {
    AnswerQuery: ApiCalls._answer,
    DeleteCommand: ApiCalls._edit,
    DrainCommand: ApiCalls._drain,
    EraseCommand: ApiCalls._erase,
    EventsQuery: ApiCalls._events,
    FlushCommand: ApiCalls._flush,
    ImportCommand: ApiCalls._import,
    ListQuery: ApiCalls._list,
    PurgeCommand: ApiCalls._purge,
    SearchQuery: ApiCalls._search,
    TurnsByKeyQuery: ApiCalls._by_key,
    UpdateCommand: ApiCalls._edit,
}
