"""The thread that owns a shard's engine: feeds it turns, steps it, and runs commands with it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from undertow.engine.api.engine import Engine
from undertow.engine.base.model import PackedTurn, UndertowError
from undertow.engine.base.trace_context import current_traceparent, use_traceparent
from undertow.engine.cluster.shard.call_queue import CallQueues, CallStamp, Outcome, SessionStart, TurnCall
from undertow.engine.cluster.shard.quarantine import reason_of
from undertow.engine.cluster.shard.supervisor import RETRY_S, ShardSupervisor
from undertow.engine.cluster.shard_map import ShardMap
from undertow.engine.cluster.wire import Status
from undertow.engine.tenants.migration_records import InTransit, Moved

log = logging.getLogger(__name__)

T = TypeVar("T")

# between looks at the LLM's replies while there is nothing else to do
POLL_S = 0.005


class ShardClosed(UndertowError):
    """The shard's thread has ended: it was closed, or met an unexpected error."""

    def __init__(self, shard: str) -> None:
        super().__init__(shard)
        self.shard = shard

    def __str__(self) -> str:
        return f"shard {self.shard} was closed. Open it again."


@dataclass(slots=True)
class _Command:
    """Something to do with the engine. `wait`: repeated until its result is not None.

    It runs in the trace of its caller: see engine/base/trace_context.py.
    """

    run: Callable[[], Any]
    future: Future[Any]
    wait: bool = False
    traceparent: str | None = field(default_factory=current_traceparent)


class EngineThread:
    """Runs commands and calls one after the other, on a thread of its own, and steps the engine."""

    def __init__(self, shard: str, supervisor: ShardSupervisor, queue_turns: int) -> None:
        self.supervisor = supervisor
        # calls whose turns are not all stored yet, in order
        self.calls: deque[TurnCall] = deque()
        self._shard = shard
        self._commands: SimpleQueue[_Command | TurnCall] = SimpleQueue()
        # guards the queues, the count of turns and `_closed`
        self._lock = threading.Lock()
        self._queues = CallQueues(queue_turns)
        self.waiting_turns = 0
        self._closed = False
        self._waits: deque[_Command] = deque()
        # tenants known to be served here under this map, which moves nobody
        self._served: set[str] = set()
        self._served_by: ShardMap | None = None
        self._busy = True
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"shard-{shard}", daemon=True)
        self._thread.start()

    # ---- from any thread

    def ask(self, run: Callable[[Engine], T | None], *, wait: bool = False) -> Future[T]:
        """Run something with the engine. `wait`: repeat it until its result is not None."""
        return self._command(lambda: run(self.supervisor.open()), wait)

    def ask_without(self, run: Callable[[], T]) -> Future[T]:
        """Run something that does not need the engine."""
        return self._command(run, False)

    def _command(self, run: Callable[[], T | None], wait: bool) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            self._put(_Command(run, future, wait))
        return future

    def offer(self, call: TurnCall, stamp: CallStamp) -> None:
        """Have turns stored. StaleSession; all other errors are set on the call's future."""
        with self._lock:
            ready = self._queues.accept(call, stamp, self.waiting_turns)
            self.waiting_turns += sum(map(len, ready))
            for accepted in ready:
                self._put(accepted)

    def trial(self, client: str) -> str | None:
        """See CallQueues.trial."""
        with self._lock:
            return self._queues.trial(client, self.waiting_turns)

    def close(self) -> None:
        """Close the engine and end the thread; waiting calls fail."""
        if self._thread.is_alive():
            with self._lock:
                self._stopping = True
            self._commands.put(_Command(lambda: True, Future()))
            self._thread.join()

    def join(self, timeout_s: float | None) -> bool:
        """Whether the thread has ended within the time: by `close`, or by an unexpected error."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _put(self, command: _Command | TurnCall) -> None:
        """With the lock held."""
        if self._closed:
            command.future.set_exception(ShardClosed(self._shard))
        else:
            self._commands.put(command)

    # ---- the thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take()
                self._work()
        finally:
            self.supervisor.close()
            with self._lock:
                self._closed = True
            self._fail_all(ShardClosed(self._shard))

    def _take(self) -> None:
        """Take waiting commands and calls; wait for one when there is nothing to do."""
        try:
            command = self._commands.get(timeout=self._patience_s)
            while True:
                if isinstance(command, TurnCall):
                    self.calls.append(command)
                    if command.alone:  # its step is next: if the process dies in it, this call is to blame
                        return
                else:
                    self._obey(command)
                command = self._commands.get_nowait()
        except Empty:
            return

    @property
    def _patience_s(self) -> float | None:
        if self._busy:
            return 0.0
        if self.supervisor.has_work or self.calls or self._waits:
            return POLL_S
        return None if self.supervisor.engine is not None else RETRY_S

    def _obey(self, command: _Command) -> None:
        """Run one command for the first time."""
        self._busy = True
        if command.future.set_running_or_notify_cancel():
            self._run_command(command)

    def _run_command(self, command: _Command) -> None:
        """Its error is the caller's."""
        try:
            with use_traceparent(command.traceparent):
                value = command.run()
        except Exception as error:  # noqa: BLE001 - the boundary between callers and the thread
            command.future.set_exception(error)
            self._inspect(error)
            return
        except BaseException:  # a library's panic: the thread ends, and no caller may wait for it
            command.future.set_exception(ShardClosed(self._shard))
            raise
        if command.wait and value is None:
            self._waits.append(command)
        else:
            command.future.set_result(value)

    def _work(self) -> None:
        """One step, if there is work: feed and settle calls, then repeat the waiting commands."""
        self._busy = False
        if self.calls or self.supervisor.has_work:
            self._step()
        elif self.supervisor.due:
            self._open()
        for _ in range(len(self._waits)):
            self._run_command(self._waits.popleft())

    def _open(self) -> None:
        try:
            self.supervisor.open()
        except Exception as error:  # noqa: BLE001 - the status shows it, and the next call raises it
            log.warning("shard %s cannot be opened: %s", self._shard, error)
        self._busy = True

    def _step(self) -> None:
        try:
            engine = self.supervisor.open()
            self._feed(engine)
            report = self.supervisor.step(engine, len(self.calls))
        except Exception as error:  # noqa: BLE001 - a shard outlives whatever a turn does to its engine
            self._recover(error)
        else:
            self._busy = bool(report.admitted or report.decided)
        self._settle()

    def _feed(self, engine: Engine) -> None:
        """Offer the calls' turns to the engine; none overtakes an earlier turn of its tenant."""
        quarantine = self.supervisor.quarantine
        waiting: set[str] = set()  # tenants with turns that had no room yet
        for call in self.calls:
            if waiting.isdisjoint(call.tenants):
                # else it might refuse a turn and take later ones
                self.supervisor.keep_up(call.map_version)
                elsewhere = {name: _refused(why) for name, why in self.refusals(call.tenants).items()}
                looks_at_each = elsewhere or quarantine.concerns(call.tenants)
                call.feed(engine.scheduler.inbox, partial(self._refuse, elsewhere) if looks_at_each else None)
            if not call.is_fed:
                waiting |= call.tenants

    def _refuse(self, elsewhere: dict[str, Outcome], turn: PackedTurn) -> Outcome | None:
        """The outcome of a turn that is not to be stored here; None: it is."""
        if (outcome := elsewhere.get(turn.tenant)) is not None:
            return outcome
        reason = self.supervisor.quarantine.reason(turn)
        return None if reason is None else (Status.PARKED, None, None, reason)

    def _settle(self) -> None:
        open_calls: deque[TurnCall] = deque()
        for call in self.calls:
            if call.settle():
                self._release(call)
            else:
                open_calls.append(call)
        self.calls = open_calls

    def _release(self, call: TurnCall) -> None:
        self._busy = True
        with self._lock:
            self.waiting_turns -= len(call)

    def _recover(self, error: Exception) -> None:
        """After a failed step: reopen the engine without the turns that made it fail."""
        log.warning("shard %s: a step failed: %s", self._shard, reason_of(error))
        suspects = [(call, place, call.turns[place]) for call in self.calls for place in call.recall()]
        failure = self.supervisor.isolate(error, suspects)
        if failure is not None:  # the turns are not to blame: their senders may send them again
            with self._lock:
                self._queues.end_all()  # later calls would be out of order
                self._take_calls()  # and so would those that have come since
            self._fail_calls(failure)

    def _take_calls(self) -> None:
        """With the lock held: take the waiting calls; commands stay, in their order."""
        for _ in range(self._commands.qsize()):
            late = self._commands.get_nowait()
            if isinstance(late, TurnCall):
                self.calls.append(late)
            else:
                self._commands.put(late)

    def _inspect(self, error: Exception) -> None:
        """After a failed command: if the engine was closed for it, fill its queue again."""
        if self.supervisor.inspect(error):
            for call in self.calls:
                call.restore(call.recall())

    def _fail_calls(self, error: Exception) -> None:
        for call in self.calls:
            call.fail(error)
            self._release(call)
        self.calls.clear()

    def _fail_all(self, error: Exception) -> None:
        self._fail_calls(error)
        for command in self._waits:
            command.future.set_exception(error)
        while not self._commands.empty():
            late = self._commands.get_nowait()
            if isinstance(late, TurnCall) or late.future.set_running_or_notify_cancel():
                late.future.set_exception(error)

    # ---- sessions and resharding, on the engine thread

    def begin_session(self, client: str, map_version: int) -> SessionStart:
        """Begin a client's session, by this map or a newer one. StoreError; Removed."""
        self.supervisor.keep_up(map_version)
        with self._lock:
            token = self._queues.begin(client)
        return SessionStart(token, self.supervisor.resharding.map.version, self._queues.process)

    def reshard(self, method: str, *args: Any) -> Any:
        """One call of ReshardingParticipant; queued turns of sealed tenants are returned as IN_TRANSIT."""
        self.supervisor.root.check_moves()
        moving = self.supervisor.resharding
        if method != "seal":
            return getattr(moving, method)(*args)
        refusals = moving.refusals(moving.seal(*args))
        for call in self.calls:
            for tenant, refusal in refusals.items():
                call.withdraw(tenant, _refused(refusal))
        return None

    def refusals(self, tenants: frozenset[str]) -> dict[str, Moved | InTransit]:
        """See ReshardingParticipant.refusals; cached for served tenants until the map changes."""
        moving = self.supervisor.resharding
        if moving.map is not self._served_by:
            self._served, self._served_by = set(), moving.map
        names = tenants - self._served
        if not names:
            return {}
        refusals = moving.refusals(list(names))
        if moving.map.before is None:
            self._served |= names - refusals.keys()
        return refusals


def _refused(refusal: Moved | InTransit) -> Outcome:
    """The outcome of a turn whose tenant is not served here."""
    return Status.MOVED if isinstance(refusal, Moved) else Status.IN_TRANSIT, None, None, refusal.to
