"""Virtual time: an event loop whose clock jumps to the next timer, and threads that it runs one at a time.

A simulated thread is a real one that runs only while the loop waits for it, until it waits for something
itself: a lock, an event, a future, a moment. So a thread can be stopped in the middle of its work while all
others go on, and what runs next depends on the seed alone.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from queue import Empty
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from random import Random

# between two looks at the clock at most, as work takes time
LONGEST_WORK_S = 0.0004
BEGAN_S = 1_000.0


class Crash(SystemExit):
    """The process ends here. No `except Exception` and no guard against panics stops it."""


# how long a thread may run, in real time, before it waits again
REAL_S = 300.0


class Stuck(AssertionError):
    """Nothing will ever happen any more, and somebody waits."""


class Clock:
    """The time of all processes. Looking at it takes time, so that measured work takes some."""

    def __init__(self, rng: Random) -> None:
        self.now_s = BEGAN_S
        self._rng = rng

    def read(self) -> float:
        self.now_s += LONGEST_WORK_S * self._rng.random()
        return self.now_s


class _Jump(selectors.SelectSelector):
    """Waits for nothing: the clock jumps to the end of the wait."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stuck("nothing will ever happen any more")
        self._clock.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: Clock, rng: Random) -> None:
        super().__init__(_Jump(clock))
        self._clock, self._rng = clock, rng

    def time(self) -> float:
        return self._clock.now_s

    call_soon_threadsafe = asyncio.SelectorEventLoop.call_soon

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:  # type: ignore[override]
        """What another thread would do is done at one moment, some time from now."""
        done = self.create_future()

        def act() -> None:
            try:
                done.set_result(func(*args))
            except Exception as error:  # noqa: BLE001 - the caller's
                done.set_exception(error)

        self.call_later(self._rng.random() * 0.004, act)
        return done


@dataclass(eq=False)
class Group:
    """The threads of one process: they end, and are stopped, together."""

    name: str
    dead: bool = False
    paused: bool = False
    threads: list[SimThread] = field(default_factory=list)
    held: list[Callable[[], None]] = field(default_factory=list)


class SimThread:
    """One thread of a process. `run` is called on it once it is resumed for the first time."""

    def __init__(self, threads: Threads, group: Group, run: Callable[[], object]) -> None:
        self.group, self.done, self.parks = group, False, 0
        self._threads, self._run = threads, run
        self._go = threading.Lock()
        self._go.acquire()
        group.threads.append(self)
        threading.Thread(target=self._main, name=group.name, daemon=True).start()

    def resume(self) -> None:
        """Run it until it waits again. On the loop's thread."""
        threads = self._threads
        assert threads.current is None
        if not self.done:
            threads.current = self
            self._go.release()
            if not threads.back.acquire(timeout=REAL_S):
                raise Stuck(f"a thread of {self.group.name} waits for something that is not simulated")
            threads.current = None
            if threads.errors:
                raise threads.errors.pop()

    def park(self) -> None:
        """Wait until somebody resumes it. On the thread itself. Crash."""
        self.parks += 1
        if self.group.dead:
            raise Crash
        self._threads.back.release()
        self._go.acquire()
        if self.group.dead:
            raise Crash

    def _main(self) -> None:
        self._go.acquire()
        try:
            if not self.group.dead:
                self._run()
        except Crash:
            pass
        except BaseException as error:  # noqa: BLE001 - raised on the loop's thread
            self._threads.errors.append(error)
        finally:
            self.done = True
            self.group.threads.remove(self)
            self._threads.back.release()


class Threads:
    """All threads of one simulation. `current`: the one that runs; None: the loop does."""

    def __init__(self, loop: VirtualLoop, rng: Random) -> None:
        self.loop = loop
        self.current: SimThread | None = None
        self.back = threading.Lock()
        self.back.acquire()
        self.errors: list[BaseException] = []
        self._rng = rng

    @property
    def running(self) -> SimThread:
        assert self.current is not None, "the loop would have to wait"
        return self.current

    def spawn(self, group: Group, run: Callable[[], object]) -> SimThread:
        thread = SimThread(self, group, run)
        self.loop.call_later(0.0002 * self._rng.random(), self._wake, thread, 0)
        return thread

    def wait(self, begin: Callable[[Callable[[], object]], object]) -> None:
        """Stop the running thread until the function that `begin` is given was called."""
        thread = self.running
        at = thread.parks + 1
        begin(lambda: self.loop.call_soon(self._wake, thread, at))
        thread.park()

    def sleep(self, seconds: float) -> None:
        self.wait(lambda wake: self.loop.call_later(seconds, wake))

    def result(self, future: Future[Any], timeout: float | None = None) -> Any:
        """The result of any future, waited for on a simulated thread."""
        self.settle([future])
        return Future.result(future, 0)

    def settle(self, futures: Iterable[Future[Any]], timeout: float | None = None) -> None:
        for future in futures:
            while not future.done():
                self.wait(lambda wake, of=future: of.add_done_callback(lambda _: wake()))  # type: ignore[misc]

    def _wake(self, thread: SimThread, at: int) -> None:
        if thread.done or thread.parks != at:
            return
        if thread.group.paused:
            thread.group.held.append(lambda: self._wake(thread, at))
        else:
            thread.resume()

    def pause(self, group: Group, seconds: float) -> None:
        """None of its threads goes on for so long."""
        group.paused = True
        self.loop.call_later(seconds, self.go_on, group)

    def go_on(self, group: Group) -> None:
        group.paused = False
        held, group.held = group.held, []
        for wake in held:
            self.loop.call_soon(wake)

    def end(self, group: Group) -> None:
        """End all of its threads where they stand. On the loop's thread."""
        group.dead = True
        for thread in list(group.threads):
            thread.resume()

    # ---- what the product uses of `threading`, `concurrent.futures` and `queue`

    def Thread(self, target: Callable[[], object], **_: Any) -> ThreadHandle:
        return ThreadHandle(self, target)

    def Lock(self) -> SimLock:
        return SimLock(self)

    def Event(self) -> SimEvent:
        return SimEvent(self)

    def SimpleQueue(self) -> SimQueue:
        return SimQueue(self)

    def ThreadPoolExecutor(self, *_: Any, **__: Any) -> SimExecutor:
        return SimExecutor(self)

    get_ident = staticmethod(threading.get_ident)


class SimFuture(Future[Any]):
    def __init__(self, threads: Threads) -> None:
        super().__init__()
        self._threads = threads

    def result(self, timeout: float | None = None) -> Any:
        return self._threads.result(self)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._threads.settle([self])
        return super().exception(0)


class ThreadHandle:
    def __init__(self, threads: Threads, target: Callable[[], object]) -> None:
        self._threads, self._target = threads, target
        self._ended = SimFuture(threads)

    def start(self) -> None:
        def run() -> None:
            try:
                self._target()
            finally:
                self._ended.set_result(None)

        self._threads.spawn(self._threads.running.group, run)

    def is_alive(self) -> bool:
        return not self._ended.done()

    def join(self, timeout: float | None = None) -> None:
        if timeout is None:
            self._ended.result()


class SimLock:
    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._held = False
        self._waiting: deque[Callable[[], object]] = deque()

    def __enter__(self) -> None:
        while self._held:
            self._threads.wait(self._waiting.append)
        self._held = True

    def __exit__(self, *_: object) -> None:
        self._held = False
        if self._waiting:
            self._waiting.popleft()()


class SimEvent:
    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._set = False
        self._waiting: list[Callable[[], object]] = []

    def set(self) -> None:
        self._set = True
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set and timeout != 0.0:
            self._threads.wait(lambda wake: self._begin(wake, timeout))
        return self._set

    def _begin(self, wake: Callable[[], object], timeout: float | None) -> None:
        self._waiting.append(wake)
        if timeout is not None:
            self._threads.loop.call_later(timeout, wake)


class SimQueue:
    def __init__(self, threads: Threads) -> None:
        self._items: deque[Any] = deque()
        self._news = SimEvent(threads)

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._news.set()

    def get(self, timeout: float) -> Any:
        if not self._items:
            self._news.clear()
            self._news.wait(timeout)
        return self.get_nowait()

    def get_nowait(self) -> Any:
        if not self._items:
            raise Empty
        return self._items.popleft()


class SimExecutor:
    """One thread, begun anew for each piece of work."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._last: SimFuture | None = None
        self._ended = False

    def submit(self, work: Callable[..., Any], *args: Any) -> SimFuture:
        if self._ended:
            raise RuntimeError("cannot schedule new futures after shutdown")
        before, future = self._last, SimFuture(self._threads)
        self._last = future
        context = copy_context()

        def run() -> None:
            if before is not None:
                self._threads.settle([before])
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = context.run(work, *args)
            except Exception as error:  # noqa: BLE001 - told to whoever waits for the work
                future.set_exception(error)
            else:
                future.set_result(result)

        self._threads.spawn(self._threads.running.group, run)
        return future

    def shutdown(self, wait: bool = True) -> None:
        self._ended = True
        if wait and self._last is not None:
            with suppress(Exception):
                self._last.result()
