"""What a shard's engine has to do: calls and commands in their order, and steps between them.

A driver (drivers.py) runs the rounds, on a thread or on an event loop.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from undertow.engine.api.engine import Engine
from undertow.engine.base.model import UndertowError
from undertow.engine.base.trace_context import use_traceparent
from undertow.engine.cluster.shard.beside import load, loads_quickly, part_beside
from undertow.engine.cluster.shard.call_queue import CallQueues, CallStamp, SessionStart, TurnCall
from undertow.engine.cluster.shard.commands import Command, FairQueue, NotYet, put_off
from undertow.engine.cluster.shard.quarantine import reason_of
from undertow.engine.cluster.shard.quick import (
    is_at_hand,
    is_quick_add,
    may_be_held,
    never,
    steps_quickly,
)
from undertow.engine.cluster.shard.supervisor import RETRY_S, ShardSupervisor, contained
from undertow.engine.cluster.shard.turn_calls import TurnCalls
from undertow.engine.step.admission import QueueFull

log = logging.getLogger(__name__)

T = TypeVar("T")

# between looks at the LLM's replies while there is nothing else to do
POLL_S = 0.005
# so long after a query a step decides for a few milliseconds only, as the next query would wait for it
SERVING_S = 1.0
# commands are taken on a loop, and those that wait are repeated for so long in one round
REPEATED_S = 0.002


class ShardClosed(UndertowError):
    """The shard has ended: it was closed, or met an unexpected error."""

    def __init__(self, shard: str) -> None:
        super().__init__(shard)
        self.shard = shard

    def __str__(self) -> str:
        return f"shard {self.shard} was closed. Open it again."


class EngineWork:
    """The commands and calls of one engine, carried out one after the other in rounds, and its steps."""

    def __init__(self, shard: str, supervisor: ShardSupervisor, queue_turns: int) -> None:
        self.supervisor = supervisor
        self.calls = TurnCalls(supervisor)
        # told of each command and call, on the thread that it came from
        self.wake: Callable[[], None] = lambda: None
        # whether this thread may use the engine now, between two rounds
        self.is_free: Callable[[], bool] = lambda: False
        self._shard = shard
        self._commands: deque[Command | TurnCall] = deque()
        # guards the queues, the count of turns and `_closed`
        self._lock = threading.Lock()
        self._queue_turns = queue_turns
        self._queues = CallQueues(queue_turns)
        self.waiting_turns = 0
        self._closed = False
        self._waits: deque[Command] = deque()
        self._busy = True
        self._asked_s = 0.0
        # what takes long, and quick work passes
        self._long = FairQueue()
        # the tenants that no search may read while a thread commits or reads; None where there is no such
        # thread, or nothing may run beside it
        self.unreadable: frozenset[str] | None = None
        self.commits = False
        # whether a thread reads the journal, and rounds go on beside it
        self.reads_aside = False
        # the command that it does so for
        self._beside: Command | None = None
        # calls that wait, in order, until the tenants that they add to are loaded; whose they are
        self._held: deque[TurnCall] = deque()
        self._held_of: set[str] = set()
        self._loading: set[str] = set()
        self._committed_last = False
        self._commit_error: Exception | None = None
        # of a step on the loop: a thread is to recover from it
        self._failed: Exception | None = None
        # of commands while a thread used the engine, its own too: they are looked at when it has ended
        self._late_errors: list[Exception] = []

    # ---- from any thread

    def ask(
        self,
        run: Callable[[Engine], T | NotYet | None],
        *,
        wait: bool = False,
        is_quick: Callable[[Engine], bool] = never,
        tenant: str = "",
        searches: bool = False,
        reads: bool = False,
        reads_journal: bool = False,
        loads: bool = False,
        settles: bool = False,
    ) -> Future[T]:
        """Run something with the engine. The others: see Command."""

        def act() -> T | NotYet | None:
            return run(self.supervisor.open())

        command = Command(act, Future(), is_quick, wait, tenant, searches, reads, reads_journal)
        command.loads, command.settles = loads, settles
        return self._command(command)

    def ask_without(self, run: Callable[[], T]) -> Future[T]:
        """Run something that does not need the engine."""
        return self._command(Command(run, Future(), never))

    def _command(self, command: Command) -> Future[Any]:
        # beside work on a thread nobody sees what is not durable
        may_pass = self.unreadable is None or (command.searches and command.tenant not in self.unreadable)
        if self._failed is None and self.is_free() and may_pass and self._is_quick(command):
            self._obey(command)
            if not self._waits and self.supervisor.engine is not None:
                return command.future
        else:
            with self._lock:
                self._put(command)
        self.wake()
        return command.future

    def offer(self, call: TurnCall, stamp: CallStamp) -> None:
        """Have turns stored. StaleSession; all other errors are set on the call's future."""
        with self._lock:
            self._accept(self._queues.accept(call, stamp, self.waiting_turns))
        self.wake()

    def offer_next(self, call: TurnCall) -> None:
        """Have the turns of a caller in this process stored, in the order of these calls. QueueFull."""
        with self._lock:
            if self.waiting_turns and self.waiting_turns + len(call) > self._queue_turns:
                raise QueueFull(f"{self._queue_turns} turns wait to be stored. Try again in a moment.")
            self._accept([call])
        self.wake()

    def _accept(self, calls: Sequence[TurnCall]) -> None:
        """With the lock held."""
        self.waiting_turns += sum(map(len, calls))
        for call in calls:
            self._put(call)

    def trial(self, client: str) -> str | None:
        """See CallQueues.trial."""
        with self._lock:
            return self._queues.trial(client, self.waiting_turns)

    def _put(self, command: Command | TurnCall) -> None:
        """With the lock held."""
        if self._closed:
            command.future.set_exception(ShardClosed(self._shard))
        else:
            self._commands.append(command)

    # ---- rounds, for the driver

    def round(self, *, quickly: bool = False) -> bool:
        """Carry out what waits, then one step if there is work.

        `quickly`: stop before what may take more than some milliseconds. False: it has stopped for that.
        """
        if quickly and self._failed is not None:
            return True  # `long_part` comes first
        if not self._take(quickly):
            return False
        engine = self.supervisor.engine
        if quickly:
            # tenants that try again may have to be loaded, but that may wait for a reader beside
            loads = engine is not None and engine.scheduler.decisions.retry_is_due and not self.reads_aside
            if engine is None or loads or not steps_quickly(engine):
                return False
            put_off(self._waits, self._is_quick, self._long)
        self._work(apart=quickly)
        return True

    def long_part(self) -> Callable[[], object] | None:
        """What is left of a quick round for a thread: a commit, or one command; None: nothing.

        `end_long_part` follows it. `unreadable` is None meanwhile if nothing may run beside it.
        """
        if self.commits:
            return self._commit
        if self._failed is not None:
            return self._recover_apart
        if (command := self._long.pop()) is None:
            return None
        if command.loads and self._is_quick(command):  # its tenant was loaded for another one
            with self._lock:
                self._commands.appendleft(command)
            return None
        engine = self.supervisor.engine
        if engine is not None and (part := part_beside(engine, command, self._long, self._obey)):
            self.reads_aside, self._beside = True, command
            return part
        at_hand = engine is not None and (not command.tenant or is_at_hand(engine, command.tenant))
        self.unreadable = frozenset([command.tenant]) if command.reads and at_hand else None
        return partial(self._load_and_obey, command)

    def _load_and_obey(self, command: Command) -> None:
        if self.supervisor.engine is not None:
            load(self.supervisor.engine, command)
        self._obey(command)

    def _commit(self) -> None:
        engine = self.supervisor.engine
        assert engine is not None, "a step was begun"
        try:
            with contained():
                engine.commit_step()
        except Exception as error:  # noqa: BLE001 - as in _step
            self._commit_error = error

    def end_long_part(self) -> None:
        """What a thread has done is over."""
        self.unreadable, self.reads_aside = None, False
        self._end_loading()
        if self.commits:
            self.commits, self._committed_last = False, True
            self._end_commit()
        while self._late_errors:
            self._inspect(self._late_errors.pop())

    def _end_loading(self) -> None:
        """After a tenant's rows were read for a command: it is the next one."""
        command, self._beside = self._beside, None
        if command is None or command.fetched is None:
            return
        if self.supervisor.engine is not None and loads_quickly(command):
            load(self.supervisor.engine, command)
            with self._lock:
                self._commands.appendleft(command)
        else:
            self._long.put_back(command)

    def _end_commit(self) -> None:
        error, self._commit_error = self._commit_error, None
        try:
            if error is not None:
                raise error
            assert self.supervisor.engine is not None, "a step was begun"
            self.supervisor.end_step(self.supervisor.engine)
        except Exception as failure:  # noqa: BLE001 - as in _step
            self._failed = failure
            return
        self._busy = True
        self._release(self.calls.settle())
        self._repeat_waiting()

    def _recover_apart(self) -> None:
        error, self._failed = self._failed, None
        assert error is not None, "a step has failed"
        self._recover(error)
        self._release(self.calls.settle())

    @property
    def patience_s(self) -> float | None:
        """How long the next round may wait for a command or a call; None: for as long as it takes."""
        if self.reads_aside and self._failed is not None:
            return None
        may_go_on = self._commands or (self._held and not self._loading)
        if self._busy or may_go_on or (self._long and not self.reads_aside):
            return 0.0
        if self.supervisor.has_work or self.calls or self._waits:
            return POLL_S
        engine = self.supervisor.engine
        return None if engine is not None and not engine.scheduler.decisions.refused else RETRY_S

    @property
    def _serving(self) -> bool:
        return time.monotonic() - self._asked_s < SERVING_S

    def end(self) -> None:
        """Close the engine; waiting calls fail, and so do all later ones."""
        try:
            self.supervisor.close()
        finally:
            error = ShardClosed(self._shard)
            with self._lock:
                self._closed = True
            self._release(self.calls.fail(error))
            for command in self._waits:
                command.future.set_exception(error)
            while (deferred := self._long.pop()) is not None:
                self._commands.append(deferred)
            if self._beside is not None and not self._beside.reads_journal:
                self._commands.append(self._beside)
            self._take_held()
            while self._commands:
                late = self._commands.popleft()
                if isinstance(late, TurnCall) or late.begin():
                    late.future.set_exception(error)
            self.waiting_turns = 0

    def _take(self, quickly: bool) -> bool:
        """Take waiting commands and calls. False: the next one is not quick."""
        if not quickly and (deferred := self._long.pop()) is not None:
            self._busy = True  # for the next one
            self._obey(deferred)
        if self._held and not (quickly and self._loading):
            with self._lock:
                self._take_held()
        until_s = time.monotonic() + REPEATED_S
        while self._commands and not (quickly and time.monotonic() > until_s):
            command = self._commands.popleft()
            if isinstance(command, TurnCall) and not self._held_of.isdisjoint(command.tenants):
                self._put_held(command)
            elif quickly and not self._is_quick(command):
                if not isinstance(command, TurnCall):
                    self._long.append(command)
                elif not self._hold(command):  # none overtakes it
                    self._commands.appendleft(command)
                    return False
            elif isinstance(command, TurnCall):
                self.calls.append(command)
                if command.alone:  # its step is next: if the process dies in it, this call is to blame
                    break
            else:
                self._busy = True
                self._obey(command)
        return True

    def _hold(self, call: TurnCall) -> bool:
        """Have the tenants of a call loaded before it is taken. False: it is none that may wait for that."""
        engine = self.supervisor.engine
        if engine is None or call.held or not may_be_held(engine, call):
            return False
        call.held = True
        for tenant in call.tenants:
            if not is_at_hand(engine, tenant):
                self._loading.add(tenant)
                done, at_hand = partial(self._loading.discard, tenant), partial(is_at_hand, tenant=tenant)
                self._long.append(Command(done, Future(), at_hand, tenant=tenant, loads=True))
        self._put_held(call)
        return True

    def _put_held(self, call: TurnCall) -> None:
        self._held.append(call)
        self._held_of |= call.tenants

    def _take_held(self) -> None:
        """With the lock held: those that were held come before all others."""
        self._commands.extendleft(reversed(self._held))
        self._held.clear()
        self._held_of.clear()

    def _is_quick(self, command: Command | TurnCall) -> bool:
        engine = self.supervisor.engine
        if engine is None:
            return False
        return is_quick_add(engine, command) if isinstance(command, TurnCall) else command.is_quick(engine)

    def _obey(self, command: Command) -> None:
        """Run one command: for the first time, or again where it was put off."""
        command.forget_fetched()
        if not command.future.running():
            self._asked_s = time.monotonic()
        if command.begin():
            self._run_command(command)

    def _run_command(self, command: Command) -> None:
        """Its error is the caller's."""
        try:
            with use_traceparent(command.traceparent), contained():
                value = command.run()
        except Exception as error:  # noqa: BLE001 - the boundary between callers and the engine
            if isinstance(error, UndertowError):
                # the frames of its traceback have the future that has the error, and would live on
                error = error.with_traceback(None)
            command.future.set_exception(error)
            if self.unreadable is None and not self.reads_aside:
                self._inspect(error)
            else:  # the engine is in use on two threads
                self._late_errors.append(error)
            return
        if command.wait and (value is None or value is NotYet.GO_ON):
            self._busy = self._busy or value is NotYet.GO_ON
            self._waits.append(command)
        else:
            command.future.set_result(value)

    def _work(self, apart: bool = False) -> None:
        """One step, if there is work: feed and settle calls, then repeat the waiting commands."""
        self._busy = False
        if apart and self._long and self._committed_last:  # a commit and what else takes long take turns
            self._committed_last = False
        elif self.calls or self.supervisor.has_work:
            self._step(apart)
            if self.commits or self._failed is not None:
                return
        elif self.supervisor.due:
            self._busy = True
            try:
                self.supervisor.open()
            except Exception as error:  # noqa: BLE001 - the status shows it, and the next call raises it
                log.warning("shard %s cannot be opened: %s", self._shard, error)
        self._repeat_waiting()

    def _repeat_waiting(self) -> None:
        until_s = time.monotonic() + REPEATED_S
        for _ in range(len(self._waits)):
            if time.monotonic() > until_s:
                return
            self._run_command(self._waits.popleft())

    def _step(self, apart: bool) -> None:
        """`apart`: a slow commit, and recovery from an error, are left to `long_part`."""
        try:
            engine = self.supervisor.open()
            self.calls.feed(engine)
            brief = apart or self._serving
            if apart and not (self.reads_aside or engine.journal.commits_quickly):
                self.supervisor.begin_step(engine, len(self.calls), brief=brief)
                if uncommitted := engine.scheduler.uncommitted:
                    self.unreadable, self.commits = uncommitted, True
                    return
                engine.commit_step()
                report = self.supervisor.end_step(engine)
            else:
                report = self.supervisor.step(engine, len(self.calls), brief=brief)
        except Exception as error:  # noqa: BLE001 - a shard outlives whatever a turn does to its engine
            if apart:  # opening it anew takes long
                self._failed = error
                return
            self._recover(error)
        else:
            self._busy = bool(report.admitted or report.decided)
        self._release(self.calls.settle())

    def _release(self, turns: int) -> None:
        """So many turns do not wait any more."""
        if turns:
            self._busy = True
            with self._lock:
                self.waiting_turns -= turns

    def _recover(self, error: Exception) -> None:
        """After a failed step: reopen the engine without the turns that made it fail."""
        log.warning("shard %s: a step failed: %s", self._shard, reason_of(error))
        failure = self.supervisor.isolate(error, self.calls.suspects())
        if failure is not None:  # the turns are not to blame: their senders may send them again
            with self._lock:
                self._queues.end_all()  # later calls would be out of order
                self._take_calls()  # and so would those that have come since
            self._release(self.calls.fail(failure))

    def _take_calls(self) -> None:
        """With the lock held: take the waiting calls; commands stay, in their order."""
        self._take_held()
        for late in self._commands:
            if isinstance(late, TurnCall):
                self.calls.append(late)
        self._commands = deque(late for late in self._commands if not isinstance(late, TurnCall))

    def _inspect(self, error: Exception) -> None:
        """After a failed command: if the engine was closed for it, fill its queue again."""
        if self.supervisor.inspect(error):
            self.calls.restore()

    def begin_session(self, client: str, map_version: int) -> SessionStart:
        """Within a round: begin a client's session, by this map or a newer one. StoreError; Removed."""
        self.supervisor.keep_up(map_version)
        with self._lock:
            token = self._queues.begin(client)
        return SessionStart(token, self.supervisor.resharding.map.version, self._queues.process)
