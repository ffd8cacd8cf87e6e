"""A shard: one engine behind futures, which goes on consolidating between the calls that reach it.

What fails is contained: a turn that makes the engine fail is found and parked, a tenant whose deciding
fails is left undecided, a disk or server that fails is told to whoever calls, and the engine is opened
again from its journal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa

from undertow.engine.api.answer_calls import Answer, PendingAnswer
from undertow.engine.api.engine import Engine
from undertow.engine.api.erasure import Certificate
from undertow.engine.api.memory_updates import Updated, Wording
from undertow.engine.api.views.reports import Report
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Memory, UndertowError
from undertow.engine.cluster.resharding.participant import DepartingTenant, ReshardingParticipant
from undertow.engine.cluster.root import SharedRoot
from undertow.engine.cluster.shard.answer_streams import (
    AnswerStream,
    AnswerStreams,
    AnswerTicket,
    Said,
    UnknownTicket,
)
from undertow.engine.cluster.shard.call_queue import CallStamp, SessionStart, TurnCall
from undertow.engine.cluster.shard.engine_thread import EngineThread, refused
from undertow.engine.cluster.shard.futures import hand_on
from undertow.engine.cluster.shard.index_build import AfterIndexBuild, CallerGone, IndexBuildQueue
from undertow.engine.cluster.shard.supervisor import EngineParts, ShardSupervisor
from undertow.engine.cluster.shard.tenant_calls import ShardTenantCalls
from undertow.engine.cluster.shard_map import ShardMap
from undertow.engine.cluster.wire import Status
from undertow.engine.llm.client import BrokenOff
from undertow.engine.search.ranking import SearchResult
from undertow.engine.storage.location import Location

T = TypeVar("T")


class Shard(ShardTenantCalls):
    """The engine of one shard of a site; safe to call from several threads.

    Errors of a call are set on its future. Close it to release the journal.
    """

    def __init__(
        self,
        where: SharedRoot | Location,
        shard: str,
        settings: Settings,
        parts: EngineParts | None = None,
        *,
        life: str = "",
    ) -> None:
        """Opens the journal in the background; one of a cluster's root, taking it over from any other writer.

        `life`: the same whenever this shard is restarted, and no other's; see engine/storage/fencing.py.
        """
        self.id = shard
        self._began_s = time.monotonic()
        self._supervisor = ShardSupervisor(
            SharedRoot.of(where), shard, settings, parts or EngineParts(), life
        )
        self._engine_thread = EngineThread(shard, self._supervisor, settings.queue_turns)
        self._ask = self._engine_thread.ask
        self._answers = AnswerStreams(shard)
        self._preparing = IndexBuildQueue()
        self._imports = set()

    # ---- calls, from any thread

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """One of the calls below by its name, which observers are told of."""
        return self._supervisor.trace.watch(method, partial(getattr(self, method), *args, **kwargs))

    def hello(self, client: str, map_version: int) -> Future[SessionStart]:
        """Begin a client's line of adds; the shard has read the map of this version when it answers.

        StoreError, JournalError: the journal cannot be opened now.
        """
        return self._ask(lambda _: self._greet(client, map_version))

    def trial(self, client: str) -> Future[str | None]:
        """As Lines.trial."""
        return self._ask(lambda _: self._engine_thread.trial(client))

    def add(self, table: pa.Table, stamp: CallStamp) -> Future[pa.Table]:
        """Store turns (wire.TURNS): receipts (wire.RECEIPTS), one a turn, in order.

        Turns of tenants that are elsewhere come back as MOVED, those of one that is on its way as
        IN_TRANSIT; the others are stored. Where the stamp knows a newer map, that is read first.
        ValueError for a table of something else; StaleSession, QueueFull: see `Lines.accept`.
        """
        try:
            call = TurnCall(table, stamp.map_version)
            self._engine_thread.offer(call, stamp)
        except (ValueError, UndertowError) as error:
            refused_call: Future[pa.Table] = Future()
            refused_call.set_exception(error)
            return refused_call
        return call.future

    def search(self, tenant: str, query: str, **how: Any) -> Future[SearchResult]:
        """As Engine.search; while its index of words is made, other calls go on. Moved, InTransit."""
        return self._searching(tenant, lambda engine: engine.search(self._checked(tenant), query, **how))

    def answer(self, tenant: str, question: str, **how: Any) -> Future[Answer]:
        """As Engine.answer, while other calls go on; to cancel it gives the LLM call up. Moved, InTransit."""
        asked: list[tuple[Engine, PendingAnswer]] = []

        def ask(engine: Engine) -> tuple[Engine, PendingAnswer]:
            return engine, engine.ask(self._checked(tenant), question, **how)

        ready = self._prepared(tenant, ask)

        def answer(engine: Engine) -> Answer | None:
            if ready.called_off:
                for opened, call in asked:
                    opened.let_go(call)
                raise CallerGone
            if not asked or asked[0][0] is not engine:  # one that was opened anew has not asked yet
                if (anew := ready(engine)) is None:
                    return None
                asked[:] = [anew]
            return engine.heard(asked[0][1])

        return ready.promised(self._ask(answer, wait=True))

    def answer_begin(self, tenant: str, question: str, **how: Any) -> Future[AnswerTicket]:
        """Begin an answer that is told in pieces. As `answer`; the LLM's errors come with `answer_more`."""
        return self._searching(tenant, lambda engine: self._begin_answer(engine, tenant, question, how))

    def answer_more(self, ticket_id: str, at: int) -> Future[Said]:
        """The text of a begun answer from the character `at` on, and the answer once that is all.

        Waits for a piece for some seconds. As Engine.heard; BrokenOff; UnknownTicket: begin anew.
        """
        return self._answers.more(ticket_id, at)

    def answer_drop(self, ticket_id: str) -> Future[None]:
        """Nobody waits for a begun answer any more: its LLM call is given up."""
        return self._ask(lambda _: self._answers.drop(ticket_id))

    def get_all(self, tenant: str) -> Future[list[Memory]]:
        """As Engine.get_all. Moved, InTransit."""
        return self._ask(lambda engine: engine.get_all(self._checked(tenant)))

    def get(self, tenant: str | None, memory_id: str) -> Future[Report | None]:
        """As Engine.get, of anyone's if `tenant` is None; None: no such memory is here. Moved, InTransit."""
        return self._ask(lambda engine: self._of_memory(tenant, memory_id, engine.get))

    def history(self, tenant: str | None, memory_id: str) -> Future[list[Report] | None]:
        """As Engine.history; else as `get`."""
        return self._ask(lambda engine: self._of_memory(tenant, memory_id, engine.history))

    def turns_by_key(self, tenant: str, keys: Collection[str]) -> Future[dict[str, Report]]:
        """As Engine.turns_by_key. Moved, InTransit."""
        return self._ask(lambda engine: engine.turns_by_key(self._checked(tenant), keys))

    def update(
        self, tenant: str | None, memory_id: str, text: Wording, *, again: bool = False
    ) -> Future[Updated | None]:
        """As Engine.update, of anyone's if `tenant` is None; None: no such memory is here.

        `again`: the call is a repeat; that it was done already is no error. Moved, InTransit.
        """
        return self._ask(lambda engine: self._update(engine, tenant, memory_id, text, again))

    def delete(self, tenant: str | None, memory_id: str, *, again: bool = False) -> Future[str | None]:
        """As Engine.delete, of anyone's if `tenant` is None; None: no such memory is here.

        `again`: the call is a repeat; that it was done already is no error. Moved, InTransit.
        """
        return self._ask(lambda engine: self._delete(engine, tenant, memory_id, again))

    def flush(self, tenant: str, *, again: bool = False) -> Future[bool]:
        """As Engine.flush, while other calls go on. `again`: a flush at the log's end is taken for it."""
        logged: list[bool] = []

        def flushed(_: Engine) -> bool | None:
            if not logged:
                self._supervisor.log_flush(self._checked(tenant), again=again)
                logged.append(True)
            return self._supervisor.decided(tenant)

        return self._ask(flushed, wait=True)

    def erase(self, tenant: str, *, now: bool = False, again: bool = False) -> Future[Certificate | None]:
        """As Engine.erase, its parked turns included. `again`: the call is a repeat. NotCertified.

        A purge rewrites files of the whole store, so it is one for all erasures that wait for it.
        """
        if not now:
            return self._ask(lambda engine: self._bury(engine, tenant, again))
        buried: list[bool] = []

        def erased(engine: Engine) -> tuple[Certificate | None] | None:
            if buried:
                self._checked(tenant)
                return (self._supervisor.certificate(tenant),)
            self._bury(engine, tenant, again)
            buried.append(True)
            return None  # the others that have come by now are buried first

        return _unwrapped(self._ask(erased, wait=True))

    def stats(self) -> Future[dict[str, int]]:
        """As Engine.stats."""
        return self._ask(lambda engine: engine.stats())

    def replay_jobs(self) -> Future[int]:
        """As Engine.replay_jobs."""
        return self._ask(lambda engine: engine.replay_jobs())

    def drain(self) -> Future[bool]:
        """True once everything is decided; False: something is blocked, or the LLM server is lost."""
        return self._ask(lambda engine: self._drained(engine), wait=True)

    def park(self, table: pa.Table, reason: str) -> Future[int]:
        """Set turns aside that are known to end the shard's process; their number. StoreError."""
        turns = TurnCall(table).turns
        return self._ask(lambda _: self._supervisor.park_all(turns, reason))

    # ---- resharding: see engine/cluster/resharding/participant.py

    def leaving(self) -> Future[list[DepartingTenant]]:
        """As Moving.leaving."""
        return self._move(lambda moving: moving.leaving())

    def seal(self, version: int, keys: Sequence[str]) -> Future[None]:
        """As Moving.seal; turns that were queued go back to their senders as IN_TRANSIT."""
        return self._move(lambda moving: self._seal(moving, version, keys))

    def pull(self, version: int, source: str, keys: Sequence[str]) -> Future[int]:
        """As Moving.pull."""
        return self._move(lambda moving: moving.pull(version, source, keys))

    def release(self, version: int, keys: Sequence[str]) -> Future[None]:
        """As Moving.release."""
        return self._move(lambda moving: moving.release(version, keys))

    def clear(self, version: int) -> Future[dict[str, Certificate]]:
        """As Moving.clear."""
        return self._move(lambda moving: moving.clear(version))

    def adopt(self, shard_map: ShardMap) -> Future[None]:
        """As Moving.adopt."""
        return self._move(lambda moving: self._adopt(moving, shard_map))

    def _move(self, step: Callable[[ReshardingParticipant], T]) -> Future[T]:
        return self._ask(lambda _: self._moved(step))

    # ---- the shard itself

    def ready(self) -> Future[None]:
        """Done once the engine is open. Its error, where it cannot be opened now."""
        return self._ask(lambda _: None)

    def status(self) -> Future[dict[str, Any]]:
        """What the shard is doing, as plain data; it comes also where the engine cannot be opened."""
        return self._engine_thread.ask_without(self._status)

    def look(self) -> Future[int]:
        """The version of the newest map. StoreError; Removed: it does without this shard."""
        return self._engine_thread.ask_without(lambda: self._supervisor.newest_map().version)

    def sign(self) -> Future[None]:
        """Done at once: the process is there, whatever its thread is busy with."""
        sign: Future[None] = Future()
        sign.set_result(None)
        return sign

    def close(self) -> None:
        """Close the engine and end the thread; calls under way fail."""
        self._engine_thread.close()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the shard has ended: by `close`, or by an error that it should have outlived."""
        return self._engine_thread.join(timeout_s)

    def _status(self) -> dict[str, Any]:
        return {
            "waiting_turns": self._engine_thread.waiting_turns,
            "uptime_s": round(time.monotonic() - self._began_s, 1),
            **self._supervisor.report(),
        }

    # ---- on the keeper's thread

    def _greet(self, client: str, map_version: int) -> SessionStart:
        self._engine_thread.keep_up(map_version)
        token, map_version = self._engine_thread.begin_line(client), self._supervisor.moving.map.version
        return SessionStart(token, map_version, self._engine_thread.process)

    def _moved(self, step: Callable[[ReshardingParticipant], T]) -> T:
        self._supervisor.site.check_moves()
        return step(self._supervisor.moving)

    def _begin_answer(
        self, engine: Engine, tenant: str, question: str, how: Mapping[str, Any]
    ) -> AnswerTicket:
        telling = AnswerStream(tenant)

        def ask(engine: Engine) -> tuple[Engine, PendingAnswer]:
            asked = engine.ask(self._checked(tenant), question, **how, on_text=telling.add)
            return engine, asked

        asked = [ask(engine)]

        def hear(engine: Engine) -> Answer | None:
            telling.tick()
            opened, call = asked[0]
            if telling.abandoned:
                opened.let_go(call)
                raise UnknownTicket("nobody asked for the answer any more")
            if opened is not engine:  # opened anew: what the former had asked is lost
                if telling.begun:
                    raise BrokenOff("the shard was opened anew in the middle of the answer. Ask again.")
                asked[0] = ask(engine)
            return engine.heard(asked[0][1])

        self._ask(hear, wait=True).add_done_callback(telling.end)
        return self._answers.add(telling)

    def _searching(self, tenant: str, act: Callable[[Engine], T]) -> Future[T]:
        prepared = self._prepared(tenant, act)
        return prepared.promised(self._ask(prepared, wait=True))

    def _prepared(self, tenant: str, act: Callable[[Engine], T]) -> AfterIndexBuild[T]:
        return AfterIndexBuild(self._preparing, lambda: self._checked(tenant), act)

    def _adopt(self, moving: ReshardingParticipant, shard_map: ShardMap) -> None:
        self._engine_thread.forget_owners()
        moving.adopt(shard_map)

    def _seal(self, moving: ReshardingParticipant, version: int, keys: Sequence[str]) -> None:
        dropped = {ticket.turn.tenant for ticket in moving.seal(version, keys)}
        refusals = moving.refusals(list(dropped))
        for call in self._engine_thread.calls:
            for tenant, refusal in refusals.items():
                call.withdraw(tenant, refused(refusal))

    def _delete(self, engine: Engine, tenant: str | None, memory_id: str, again: bool) -> str | None:
        if tenant is not None:
            self._checked(tenant)
        if again and (kind := self._supervisor.deleted(memory_id, tenant)) is not None:
            return kind
        return self._of_memory(tenant, memory_id, engine.delete)

    def _update(
        self, engine: Engine, tenant: str | None, memory_id: str, text: Wording, again: bool
    ) -> Updated | None:
        if tenant is not None:
            self._checked(tenant)
        if again and (done := self._supervisor.updated(memory_id, text, tenant)) is not None:
            return done
        return self._of_memory(tenant, memory_id, partial(engine.update, text=text))

    def _of_memory(self, tenant: str | None, memory_id: str, act: Callable[..., T]) -> T | None:
        """`act` with a memory that is here, and its tenant served here. Moved, InTransit."""
        if tenant is not None:
            self._checked(tenant)
        holder = self._supervisor.holder(memory_id, tenant)
        return None if holder is None else act(memory_id, tenant=self._checked(holder))

    def _bury(self, engine: Engine, tenant: str, again: bool) -> None:
        self._checked(tenant)
        self._call_off_imports(tenant)
        self._answers.forget(tenant)
        self._supervisor.parking.forget(tenant)
        if again and tenant not in engine.tenants:
            return
        for call in self._engine_thread.calls:
            call.withdraw(tenant, (Status.STORED, None, None, None))
        engine.erase(tenant)

    def _drained(self, engine: Engine) -> bool | None:
        if engine.server_lost:
            return False
        return not engine.scheduler.blocked if engine.idle and not self._engine_thread.calls else None


def _unwrapped(wrapped: Future[tuple[T]]) -> Future[T]:
    """What stands in the tuple: of calls that wait, for which None means "not yet", but may give None."""
    future: Future[T] = Future()
    hand_on(wrapped, future, lambda result: result[0])
    return future
