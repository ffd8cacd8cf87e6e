"""What a shard's engine has to do: calls and commands in their order, and steps between them.

A driver (drivers.py) runs the rounds, on a thread or on an event loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from undertow.engine.api.engine import Engine
from undertow.engine.base.model import UndertowError
from undertow.engine.base.pacing import Pacing, Served
from undertow.engine.base.trace import use_traceparent
from undertow.engine.cluster.shard.arrivals import Arrivals, HeldCalls, ShardClosed
from undertow.engine.cluster.shard.beside import load, loads_quickly, part_beside
from undertow.engine.cluster.shard.call_queue import CallStamp, SessionStart, TurnCall
from undertow.engine.cluster.shard.commands import REPEATED_S, Command, FairQueue, NotYet, Waiting
from undertow.engine.cluster.shard.quarantine import reason_of
from undertow.engine.cluster.shard.quick import is_at_hand, is_quick_add, never, steps_quickly, takes_turns
from undertow.engine.cluster.shard.supervisor import RETRY_S, ShardSupervisor, contained
from undertow.engine.cluster.shard.turn_calls import TurnCalls

log = logging.getLogger(__name__)

T = TypeVar("T")

# between looks at the LLM's replies while there is nothing else to do
POLL_S = 0.005


class EngineWork:
    """The commands and calls of one engine, carried out one after the other in rounds, and its steps."""

    def __init__(self, shard: str, supervisor: ShardSupervisor, queue_turns: int) -> None:
        self.supervisor = supervisor
        self.calls = TurnCalls(supervisor)
        # told of each command and call, on the thread that it came from
        self.wake: Callable[[], None] = lambda: None
        # whether a loop runs the rounds, and a thread what takes long
        self.on_loop = False
        # whether this thread may use the engine now, between two rounds
        self.is_free: Callable[[], bool] = lambda: False
        self._shard = shard
        self.arrived = Arrivals(shard, queue_turns)
        self._waits = Waiting()
        self._busy = True
        self._served = Served()
        self._deciding, self.purging = Pacing(self._served), Pacing(self._served)
        # what takes long, and quick work passes
        self._long = FairQueue(Pacing(self._served), Pacing(self._served))
        # the tenants that no search may read while a thread commits or reads; None where there is no such
        # thread, or nothing may run beside it
        self.unreadable: frozenset[str] | None = None
        self.commits = False
        # whether a thread reads the journal, and rounds go on beside it
        self.rounds_go_on = False
        # the command that it reads or purges it for, and the one that it reads a tenant for
        self._reads: Command | None = None
        self._fetches: Command | None = None
        # whether `long_part` comes next, though the round before it was not quick
        self.read_is_next = False
        self._held = HeldCalls(supervisor.open)
        # how many tenants the engine had evicted when those of all waiting turns were in memory
        self._evictions: int | None = None
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
        erases: bool = False,
        changes: bool = False,
    ) -> Future[T]:
        """Run something with the engine. The others: see Command."""

        def act() -> T | NotYet | None:
            return run(self.supervisor.open())

        command = Command(act, Future(), is_quick, wait, tenant, searches, reads, reads_journal)
        command.loads, command.settles, command.erases, command.changes = loads, settles, erases, changes
        return self._command(command)

    def ask_without(self, run: Callable[[], T]) -> Future[T]:
        """Run something that does not need the engine."""
        return self._command(Command(run, Future(), never))

    def _command(self, command: Command) -> Future[Any]:
        # beside work on a thread nobody sees what is not durable
        may_pass = self.unreadable is None or (command.searches and command.tenant not in self.unreadable)
        if self._failed is None and self.is_free() and may_pass and self._is_quick(command):
            self._obey(command)
            if not (self._waits or self.arrived or self.arrived.parts) and self.supervisor.engine is not None:
                return command.future
        else:
            self.arrived.put(command)
        self.wake()
        return command.future

    def offer(self, call: TurnCall, stamp: CallStamp) -> None:
        """Have turns stored. StaleSession; all other errors are set on the call's future."""
        self.arrived.offer(call, stamp)
        self.wake()

    def offer_next(self, call: TurnCall) -> None:
        """Have the turns of a caller in this process stored, in the order of these calls. QueueFull."""
        self.arrived.offer_next(call)
        self.wake()

    # ---- rounds, for the driver

    def round(self, *, quickly: bool = False) -> bool:
        """Carry out what waits, then one step if there is work.

        `quickly`: stop before what may take more than some milliseconds. False: it has stopped for that.
        """
        if quickly and self._failed is not None:
            return True  # `long_part` comes first
        if not quickly:
            self._evictions = None
        if not self._take(quickly):
            return False
        engine = self.supervisor.engine
        if quickly:
            # tenants that try again may have to be loaded, but that may wait for a reader beside
            loads = (
                engine is not None
                and engine.scheduler.decisions.retry_is_due
                and not engine.journal.is_read_beside
            )
            if engine is None or loads or not steps_quickly(engine) or not self._all_at_hand(engine):
                return False
            self._waits.put_off(self._is_quick, self._long)
        self._work(apart=quickly)
        return True

    def _all_at_hand(self, engine: Engine) -> bool:
        """Whether the next step loads no tenant: those of the waiting turns are ready for them.

        A thread takes turns whose tenants are not, and a full pool evicts tenants with waiting turns.
        """
        evictions = engine.tenants.evictions
        # else only turns of tenants at hand have come since, or none is stored now
        if self._evictions != evictions and (engine.server_lost or not engine.scheduler.admission_paused):
            unfed = (call.tenants for call in self.calls if not call.is_fed)
            names = chain(engine.scheduler.inbox.tenants, *unfed)
            if not all(takes_turns(engine, name) for name in names):
                return False
            self._evictions = evictions
        return True

    def long_part(self) -> Callable[[], object] | None:
        """What is left of a quick round for a thread: a commit, or one command; None: nothing.

        `end_long_part` follows it. `unreadable` is None meanwhile if nothing may run beside it.
        """
        self.read_is_next = False
        if self.commits:
            return self._commit
        if self._failed is not None:
            return self._recover_apart
        if (command := self._long.pop()) is None:
            return None
        if command.loads and self._is_quick(command):  # its tenant was loaded for another one
            self.arrived.put_first([command])
            return None
        engine = self.supervisor.engine
        if engine is not None and (part := part_beside(engine, command, self._long, self._obey)):
            self.rounds_go_on, self.read_is_next = True, bool(command.moves)
            if not command.moves:  # else the log is to move first, and it waits again
                self._reads, self._fetches = (command, None) if command.reads_journal else (None, command)
            # a move is of all tenants' turns
            return part if command.moves else self._long.pacing_of(command).measured(command.tenant)(part)
        at_hand = engine is not None and (not command.tenant or is_at_hand(engine, command.tenant))
        self.unreadable = frozenset([command.tenant]) if command.reads and at_hand else None
        return self._long.pacing_of(command).measured(command.tenant)(partial(self._load_and_obey, command))

    def _load_and_obey(self, command: Command) -> None:
        self._evictions = None
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
        if self.rounds_go_on and self.supervisor.engine is not None:
            self.supervisor.engine.journal.release()
        self.unreadable, self.rounds_go_on = None, False
        self._end_reading()
        if self.commits:
            self.commits, self._committed_last = False, True
            self._end_commit()
        while self._late_errors:
            self._inspect(self._late_errors.pop())

    def _end_reading(self) -> None:
        """The command that the journal was read for is the next one: nothing comes between the two."""
        read, fetches = self._reads, self._fetches
        self._reads = self._fetches = None
        if self._failed is None and read is not None and read in self._waits and self._is_quick(read):
            self._waits.remove(read)
            self._run_command(read)
        if fetches is not None:
            if self.supervisor.engine is not None and loads_quickly(fetches):
                load(self.supervisor.engine, fetches)
            if not fetches.fetched and self._is_quick(fetches):
                self.arrived.put_first([fetches])
            else:
                self._long.put_back(fetches)

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
        under_way = len(self.calls)
        self.calls.settle(self._release)
        self._go_on_waiting(under_way, self._is_quick)

    def _recover_apart(self) -> None:
        error, self._failed, self._evictions = self._failed, None, None
        assert error is not None, "a step has failed"
        self._recover(error)
        self.calls.settle(self._release)

    @property
    def patience_s(self) -> float | None:
        """How long the next round may wait for a command or a call; None: for as long as it takes."""
        if self.rounds_go_on and self._failed is not None:
            return None
        rest_s = None if self.rounds_go_on else self._long.rest_s
        if self._busy or self.arrived or self.arrived.parts or self._held.may_go_on or rest_s == 0.0:
            return 0.0
        if self.supervisor.has_work or self.calls or self._waits or rest_s is not None:
            return POLL_S
        engine = self.supervisor.engine
        return None if engine is not None and not engine.scheduler.decisions.refused else RETRY_S

    def end(self) -> None:
        """Close the engine; waiting calls fail, and so do all later ones."""
        try:
            self.supervisor.close()
        finally:
            error = ShardClosed(self._shard)
            self._release(self.calls.fail(error))
            left = [*self.arrived.close(), *self._held.take(all_of_them=True), *self._long.take()]
            if self._fetches is not None:
                left.append(self._fetches)
                self._fetches = None
            while self._waits:
                self._waits.popleft().future.set_exception(error)
            for late in left:
                if isinstance(late, TurnCall) or late.begin():
                    late.future.set_exception(error)

    def _take(self, quickly: bool) -> bool:
        """Take waiting commands and calls. False: the next one is not quick."""
        until_s = time.monotonic() + REPEATED_S
        # parts have half of the time of a quick round, so that what has arrived does not wait for all of them
        while self.arrived.parts and not (quickly and time.monotonic() > until_s - REPEATED_S / 2):
            part = self.arrived.parts.popleft()
            (self._obey if not quickly or self._is_quick(part) else self._long.append)(part)
        if not quickly and (deferred := self._long.pop()) is not None:
            self._busy = True  # for the next one
            if deferred.reads_journal:  # searches may go on beside it
                self._long.put_back(deferred)
                self.read_is_next = True
            else:
                self._long.pacing_of(deferred).measured(deferred.tenant)(self._obey)(deferred)
        if self._held.may_go_on or not quickly:
            self.arrived.put_first(self._held.take(all_of_them=not quickly))
        while self.arrived and not (quickly and time.monotonic() > until_s):
            command = self.arrived.take()
            if self._held.keep(command):
                continue
            if quickly and not self._is_quick(command):
                # what prepares its tenants, or it itself, for a thread; nothing: this call stays the next one
                engine = self.supervisor.engine
                later = self._held.hold(engine, command) if isinstance(command, TurnCall) else [command]
                if not later:
                    self.arrived.put_first([command])  # no call overtakes it
                    return False
                for one in later:
                    (self.arrived.put_part if self._is_quick(one) else self._long.append)(one)
            elif self.on_loop and isinstance(command, Command) and command.reads_journal:
                self._long.append(command)
                self.read_is_next = True
            elif not isinstance(command, Command):
                if self.on_loop:  # on a thread, steps are large until a query comes
                    self._served.note(next(iter(command.tenants)) if len(command.tenants) == 1 else "")
                self.calls.append(command)
                if command.alone:  # its step is next: if the process dies in it, this call is to blame
                    break
            else:
                self._busy = True
                self._obey(command)
        return True

    def _is_quick(self, command: Command | TurnCall) -> bool:
        engine = self.supervisor.engine
        if engine is None:
            return False
        if not isinstance(command, Command):
            return is_quick_add(engine, command)
        try:
            return command.is_quick(engine)
        except Exception:  # noqa: BLE001 - the command meets it again, and tells its caller
            return False

    def _obey(self, command: Command) -> None:
        """Run one command: for the first time, or again where it was put off."""
        command.forget()
        if command.tenant and not command.begun:
            self._served.note(command.tenant)
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
            if self.unreadable is None and not self.rounds_go_on:
                self._inspect(error)
            else:  # the engine is in use on two threads
                self._late_errors.append(error)
            return
        if command.wait and (value is None or isinstance(value, NotYet)):
            self._busy = self._busy or value is not None
            if self.arrived.closed:  # beside the end of the shard
                command.future.set_exception(ShardClosed(self._shard))
            else:
                (self.arrived.put_part if value is NotYet.SOON else self._waits.append)(command)
        else:
            command.future.set_result(value)

    def _work(self, apart: bool = False) -> None:
        """One step, if there is work: feed and settle calls, then repeat the waiting commands."""
        self._busy, under_way = False, len(self.calls)
        if apart and self._committed_last and self._long.rest_s == 0.0:  # it and a commit take turns
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
        self._go_on_waiting(under_way, self._is_quick if apart else lambda _: True)

    def _go_on_waiting(self, under_way: int, may_run: Callable[[Command], bool]) -> None:
        """Repeat the waiting commands. First the answers to calls are sent; so many were under way."""
        if self.on_loop and len(self.calls) < under_way and self._waits.gives_way:
            self._busy = True
        else:
            self._waits.repeat(self._run_command, may_run)

    def _step(self, apart: bool) -> None:
        """`apart`: a slow commit, and recovery from an error, are left to `long_part`."""
        try:
            engine = self.supervisor.open()
            self.calls.feed(engine)
            pacing = self._deciding if apart or self._served.any else None
            if apart and not (self.rounds_go_on or engine.journal.commits_quickly):
                self.supervisor.begin_step(engine, len(self.calls), pacing=pacing)
                if uncommitted := engine.scheduler.uncommitted:
                    self.unreadable, self.commits = uncommitted, True
                    return
                engine.commit_step()
                report = self.supervisor.end_step(engine)
            else:
                report = self.supervisor.step(engine, len(self.calls), pacing=pacing)
        except Exception as error:  # noqa: BLE001 - a shard outlives whatever a turn does to its engine
            if apart:  # opening it anew takes long
                self._failed = error
                return
            self._recover(error)
        else:
            self._busy = bool(report.admitted or report.decided)
        self.calls.settle(self._release)

    def _release(self, turns: int) -> None:
        """So many turns do not wait any more."""
        if turns:
            self._busy = True
            self.arrived.release(turns)

    def _recover(self, error: Exception) -> None:
        """After a failed step: reopen the engine without the turns that made it fail."""
        log.warning("shard %s: a step failed: %s", self._shard, reason_of(error))
        failure = self.supervisor.isolate(error, self.calls.suspects())
        if failure is not None:  # the turns are not to blame: their senders may send them again
            self.arrived.put_first(self._held.take(all_of_them=True))
            for call in self.arrived.end_sessions():
                self.calls.append(call)
            self._release(self.calls.fail(failure))

    def _inspect(self, error: Exception) -> None:
        """After a failed command: if the engine was closed for it, fill its queue again."""
        if self.supervisor.inspect(error):
            self._evictions = None
            self.calls.restore()

    def begin_session(self, client: str, map_version: int) -> SessionStart:
        """Within a round: begin a client's session, by this map or a newer one. StoreError; Removed."""
        self.supervisor.keep_up(map_version)
        return self.arrived.begin_session(client, self.supervisor.resharding.map.version)
