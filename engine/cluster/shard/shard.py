"""A shard: one engine behind futures, which consolidates between the calls that it serves.

Failures are contained. A turn that makes the engine fail is found and quarantined. A tenant whose decisions
fail stays undecided. The error of a disk or a server goes to the callers. The engine is then reopened from
its journal.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, overload

import pyarrow as pa

from undertow.engine.base.config import Settings
from undertow.engine.base.model import PackedTurn, UndertowError
from undertow.engine.base.queries import AnswerQuery, ApiCall, MemoryCall, R
from undertow.engine.base.results import Receipt
from undertow.engine.cluster.root import SharedRoot
from undertow.engine.cluster.shard.api.answer_streams import AnswerTicket, Said
from undertow.engine.cluster.shard.api.calls import ApiCalls
from undertow.engine.cluster.shard.call_queue import CallStamp, LocalCall, SessionStart, TableCall, sent_call
from undertow.engine.cluster.shard.drivers import driver_of
from undertow.engine.cluster.shard.engine_work import EngineWork
from undertow.engine.cluster.shard.supervisor import EngineParts, ShardSupervisor
from undertow.engine.storage.location import Location

# calls of ReshardingParticipant (engine/cluster/resharding/participant.py)
RESHARDING = {"adopt", "clear", "leaving", "pull", "release", "seal"}


class Shard:
    """The engine of one shard; safe to call from several threads.

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
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Opens the journal in the background. In a cluster's root it takes it over from any other writer.

        `loop`: the event loop that does the shard's work, between its other callbacks; None: a thread does.

        `life`: the same whenever this shard is restarted, and no other's; see engine/storage/fencing.py.
        """
        self.id = shard
        self._began_s = time.monotonic()
        self._supervisor = ShardSupervisor(
            SharedRoot.of(where), shard, settings, parts or EngineParts(), life
        )
        self._work = EngineWork(shard, self._supervisor, settings.queue_turns)
        self._driver = driver_of(f"shard-{shard}", self._work, loop)
        self._ask = self._work.ask
        self._api = ApiCalls(shard, self._supervisor, self._work)

    # ---- calls, from any thread

    def call(self, method: str, *args: Any) -> Future[Any]:
        """One of the methods below, or of ReshardingParticipant, by its name.

        Observers see that name; for `ask` the name of the ApiCall, for `add_here` that of `add`.
        """
        name = args[0].name if method == "ask" else method.removesuffix("_here")
        act = partial(self._reshard, method) if method in RESHARDING else getattr(self, method)
        return self._supervisor.trace.watch(name, partial(act, *args))

    def hello(self, client: str, map_version: int) -> Future[SessionStart]:
        """Begin a client's session of adds; the shard has read the map of this version when it answers.

        StoreError, JournalError: the journal cannot be opened now.
        """
        return self._ask(lambda _: self._work.begin_session(client, map_version))

    def trial(self, client: str) -> Future[str | None]:
        """See CallQueues.trial."""
        return self._ask(lambda _: self._work.arrived.trial(client))

    def add(self, turns: Sequence[PackedTurn] | pa.Table, stamp: CallStamp) -> Future[Any]:
        """Store turns: a list, or wire.TURNS. The outcome of each, in order: a list, or wire.RECEIPTS.

        Turns of tenants that are elsewhere are returned as MOVED, those of tenants in transit as IN_TRANSIT;
        the others are stored. If the stamp names a newer map, that is read first.
        ValueError for another table; StaleSession, QueueFull: see CallQueues.accept.
        """
        try:
            call = sent_call(turns, stamp, self._supervisor.dim)
            self._work.offer(call, stamp)
        except (ValueError, UndertowError) as error:
            refused: Future[Any] = Future()
            refused.set_exception(error)
            return refused
        return call.future

    def add_here(self, turns: Sequence[PackedTurn]) -> Future[list[Receipt]]:
        """Store turns of a caller in this process, in the order of these calls. QueueFull."""
        call = LocalCall(turns)
        self._work.offer_next(call)
        return call.future

    @overload
    def ask(self, call: MemoryCall[R]) -> Future[R | None]: ...

    @overload
    def ask(self, call: ApiCall[R]) -> Future[R]: ...

    def ask(self, call: ApiCall[R]) -> Future[R | None] | Future[R]:
        """One call of MemoryApi. The result is None if a MemoryCall finds no such memory here.

        Moved, InTransit: this shard does not serve the tenant. Cancelling the future of an answer cancels
        its LLM call.
        """
        return self._api.begin(call)

    def answer_begin(self, query: AnswerQuery) -> Future[AnswerTicket]:
        """Begin a streamed answer. The LLM's errors come with `answer_more`."""
        return self._api.begin_stream(query)

    def answer_more(self, ticket_id: str, at: int) -> Future[Said]:
        """The text of a streamed answer from character `at` on, and the answer once that is all.

        Waits some seconds for text. BrokenOff; UnknownTicket: begin anew.
        """
        return self._api.streams.more(ticket_id, at)

    def answer_drop(self, ticket_id: str) -> Future[None]:
        """Cancel a streamed answer whose caller has gone."""
        return self._ask(lambda _: self._api.streams.drop(ticket_id))

    def park(self, table: pa.Table, reason: str) -> Future[int]:
        """Quarantine turns that are known to end the shard's process; their number. StoreError."""
        turns = TableCall(table).turns
        return self._ask(lambda _: self._supervisor.park_all(turns, reason))

    def _reshard(self, method: str, *args: Any) -> Future[Any]:
        return self._ask(lambda _: self._work.calls.reshard(method, *args))

    # ---- the shard itself

    def ready(self) -> Future[None]:
        """Done once the engine is open, with its error if it cannot be opened now."""
        return self._ask(lambda _: None)

    def status(self) -> Future[dict[str, Any]]:
        """The shard's state as plain data, also if the engine cannot be opened."""
        return self._work.ask_without(self._status)

    def look(self) -> Future[int]:
        """The version of the newest map. StoreError; Removed: this shard is not in it."""
        return self._work.ask_without(lambda: self._supervisor.newest_map().version)

    def ping(self) -> Future[None]:
        """Done at once: the process is alive, however busy the engine is."""
        pong: Future[None] = Future()
        pong.set_result(None)
        return pong

    @property
    def waiting_turns(self) -> int:
        """Turns that are not stored yet."""
        return self._work.arrived.turns

    def close(self) -> None:
        """Close the engine; calls under way fail. With a loop: on another thread than the loop's."""
        self._driver.close()

    def join(self, timeout_s: float | None = None) -> bool:
        """Whether the shard has ended within the time: by `close`, or by an unexpected error."""
        return self._driver.join(timeout_s)

    def _status(self) -> dict[str, Any]:
        return {
            "waiting_turns": self._work.arrived.turns,
            "uptime_s": round(time.monotonic() - self._began_s, 1),
            **self._supervisor.report(),
        }
