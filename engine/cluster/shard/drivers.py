"""What runs the rounds of a shard's engine: a thread of its own, or an event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context
from typing import Protocol

from undertow.engine.cluster.shard.engine_work import EngineWork
from undertow.engine.cluster.shard.quarantine import reason_of

log = logging.getLogger(__name__)

# Of the loop between two rounds. A request that a round has ended needs so many until its response is sent;
# what comes meanwhile waits for them.
ITERATIONS = 6


class Driver(Protocol):
    """Runs rounds of an EngineWork until it is closed, or a round ends in an unexpected error."""

    def close(self) -> None:
        """End the work; waiting calls fail. Safe to repeat."""
        ...

    def join(self, timeout_s: float | None) -> bool:
        """Whether the work has ended within the time."""
        ...


class ThreadDriver:
    """A thread that waits for work."""

    def __init__(self, name: str, work: EngineWork) -> None:
        self._work = work
        self._news = threading.Event()
        self._stopping = False
        work.wake = self._news.set
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping = True
        self._news.set()
        self._thread.join()

    def join(self, timeout_s: float | None) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopping:
                if (patience_s := self._work.patience_s) != 0.0:
                    self._news.wait(patience_s)
                self._news.clear()
                self._work.round()
        finally:
            self._work.end()


class LoopDriver:
    """An event loop that runs rounds between its other callbacks.

    A search or an add then costs no change of threads. What takes longer than some milliseconds runs on a
    thread, and the loop goes on serving connections; there is one round at a time.
    """

    def __init__(self, name: str, work: EngineWork, loop: asyncio.AbstractEventLoop) -> None:
        """May be called on any thread."""
        self._work = work
        self._loop = loop
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        # a step is no part of the request that woke it: its trace is its own
        self._context = Context()
        self._next: asyncio.Handle | None = None
        self._next_is_due = False
        self._under_way: Future[None] | None = None
        self._in_round = False
        self._stopping = False
        self._ended = threading.Event()
        self._loop_thread = 0
        work.wake = self._wake
        work.is_free, work.on_loop = self._is_free, True
        loop.call_soon_threadsafe(self._begin)

    def close(self) -> None:
        """On any thread but the loop's, while the loop runs; else at once, without a round under way."""
        self._stopping = True
        if self._loop.is_running() and threading.get_ident() != self._loop_thread:
            self._loop.call_soon_threadsafe(self._wake)
            self._ended.wait()
        else:
            self._pool.shutdown()
            self._end()

    def join(self, timeout_s: float | None) -> bool:
        return self._ended.is_set() or (timeout_s != 0.0 and self._ended.wait(timeout_s))

    def _begin(self) -> None:
        self._loop_thread = threading.get_ident()
        self._wake()

    def _wake(self) -> None:
        if threading.get_ident() != self._loop_thread:
            self._loop.call_soon_threadsafe(self._wake)
        elif not (self._next_is_due or self._in_round or self._ended.is_set()) and self._may_go_on:
            self._schedule(0.0)

    @property
    def _may_go_on(self) -> bool:
        """Whether a round may run: the engine has one owner at a time, or a thread reads its journal."""
        return self._under_way is None or (self._work.rounds_go_on and not self._stopping)

    def _is_free(self) -> bool:
        """Whether this is the loop's thread, and no round is under way."""
        return (
            threading.get_ident() == self._loop_thread
            and (self._may_go_on or self._work.unreadable is not None)
            and not (self._in_round or self._stopping or self._ended.is_set())
        )

    def _schedule(self, after_s: float | None, iterations: int = 0) -> None:
        """The next round: None: at the next wake; 0: after so many iterations of the loop."""
        if self._next is not None:
            self._next.cancel()
        self._next_is_due = after_s == 0.0
        if after_s is None:
            self._next = None
        elif self._next_is_due:
            self._next = self._loop.call_soon(self._round, iterations, context=self._context)
        else:
            self._next = self._loop.call_later(after_s, self._round, context=self._context)

    def _round(self, iterations: int = 0) -> None:
        if iterations:
            self._next = self._loop.call_soon(self._round, iterations - 1, context=self._context)
            return
        self._next, self._next_is_due = None, False
        if self._ended.is_set() or not self._may_go_on:
            return
        if self._stopping:
            self._under_way = self._pool.submit(self._end)
            return
        self._end_at_an_error(self._quick_round)

    def _quick_round(self) -> None:
        self._in_round = True
        try:
            done = self._work.round(quickly=True)
        finally:
            self._in_round = False
        if self._under_way is not None:  # what takes long comes after it
            if done or self._work.arrived.parts:
                self._schedule(self._work.patience_s, ITERATIONS)
            return
        part = self._work.long_part() if done or self._work.read_is_next else self._work.round
        if part is None:
            self._schedule(self._work.patience_s, ITERATIONS)
            return
        self._under_way = self._pool.submit(self._end_at_an_error, part)
        self._under_way.add_done_callback(
            lambda _: self._loop.call_soon_threadsafe(self._go_on, context=self._context)
        )
        if self._may_go_on:
            self._schedule(self._work.patience_s, ITERATIONS)

    def _go_on(self) -> None:
        self._under_way = None
        if not self._ended.is_set():
            self._end_at_an_error(self._work.end_long_part)
        if not self._ended.is_set():
            self._schedule(0.0 if self._stopping else self._work.patience_s)

    def _end_at_an_error(self, part: Callable[[], object]) -> None:
        """What a round does not expect ends the shard, and not the event loop with it."""
        try:
            part()
        except Exception as error:  # noqa: BLE001 - the boundary between the loop and the shard
            log.error("the shard's work has ended: %s. The next call begins it anew.", reason_of(error))
            self._end()

    def _end(self) -> None:
        try:
            self._work.end()
        finally:
            self._ended.set()
            self._pool.shutdown(wait=False)


def driver_of(name: str, work: EngineWork, loop: asyncio.AbstractEventLoop | None) -> Driver:
    """The loop, or a thread of this name."""
    return ThreadDriver(name, work) if loop is None else LoopDriver(name, work, loop)
