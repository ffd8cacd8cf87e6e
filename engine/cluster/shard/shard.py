"""A shard: one engine behind futures, which consolidates between the calls that it serves.

Failures are contained. A turn that makes the engine fail is found and quarantined. A tenant whose decisions
fail stays undecided. The error of a disk or a server goes to the callers. The engine is then reopened from
its journal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar, overload

import pyarrow as pa

from undertow.engine.base.config import Settings
from undertow.engine.base.model import UndertowError
from undertow.engine.base.queries import AnswerQuery, ApiCall, MemoryCall, R
from undertow.engine.base.results import Certificate
from undertow.engine.cluster.resharding.participant import DepartingTenant, ReshardingParticipant
from undertow.engine.cluster.root import SharedRoot
from undertow.engine.cluster.shard.answer_streams import AnswerTicket, Said
from undertow.engine.cluster.shard.api_calls import ApiCalls
from undertow.engine.cluster.shard.call_queue import CallStamp, SessionStart, TurnCall
from undertow.engine.cluster.shard.engine_thread import EngineThread, refused
from undertow.engine.cluster.shard.supervisor import EngineParts, ShardSupervisor
from undertow.engine.cluster.shard_map import ShardMap
from undertow.engine.storage.location import Location

T = TypeVar("T")


class Shard:
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
        self._api = ApiCalls(shard, self._supervisor, self._engine_thread)

    # ---- calls, from any thread

    def call(self, method: str, *args: Any) -> Future[Any]:
        """One of the methods below by its name. Observers see its name; for `ask` that of the call."""
        name = args[0].name if method == "ask" else method
        return self._supervisor.trace.watch(name, partial(getattr(self, method), *args))

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

    @overload
    def ask(self, call: MemoryCall[R]) -> Future[R | None]: ...

    @overload
    def ask(self, call: ApiCall[R]) -> Future[R]: ...

    def ask(self, call: ApiCall[R]) -> Future[R | None] | Future[R]:
        """One call of MemoryApi. The result is None if a MemoryCall finds no such memory here.

        Moved, InTransit: the tenant is not this shard's to serve. Cancelling the future of an answer cancels
        its LLM call.
        """
        return self._api.begin(call)

    def answer_begin(self, query: AnswerQuery) -> Future[AnswerTicket]:
        """Begin an answer in pieces. The LLM's errors come with `answer_more`."""
        return self._api.begin_stream(query)

    def answer_more(self, ticket_id: str, at: int) -> Future[Said]:
        """The text of a begun answer from character `at` on, and the answer once that is all.

        Waits some seconds for a piece. BrokenOff; UnknownTicket: begin anew.
        """
        return self._api.streams.more(ticket_id, at)

    def answer_drop(self, ticket_id: str) -> Future[None]:
        """Cancel a begun answer that nobody waits for any more."""
        return self._ask(lambda _: self._api.streams.drop(ticket_id))

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

    def _adopt(self, moving: ReshardingParticipant, shard_map: ShardMap) -> None:
        self._engine_thread.forget_owners()
        moving.adopt(shard_map)

    def _seal(self, moving: ReshardingParticipant, version: int, keys: Sequence[str]) -> None:
        dropped = {ticket.turn.tenant for ticket in moving.seal(version, keys)}
        refusals = moving.refusals(list(dropped))
        for call in self._engine_thread.calls:
            for tenant, refusal in refusals.items():
                call.withdraw(tenant, refused(refusal))
