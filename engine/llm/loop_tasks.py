"""Coroutines on one event loop, begun from any thread, and futures made of others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, TypeVar
from weakref import ref

from undertow.engine.base.model import UndertowError

S = TypeVar("S")
T = TypeVar("T")


class LoopTasks:
    """The tasks of a router or a client, on a given event loop or on one of its own, which a thread runs."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None, name: str) -> None:
        """`name`: of the thread, and in the error that says what was closed."""
        # guards `closed`: a task that began after the end would wait for a loop that has ended
        self._closing = threading.Lock()
        self.closed = False
        self._name = name
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = loop or asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        if loop is None:
            self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
            self._thread.start()

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin a task. Cancelling its future cancels it. UndertowError: this was closed."""
        begun: Future[T] = Future()
        with self._closing:
            if self.closed:
                work.close()
                raise UndertowError(f"the {self._name} was closed. Open it again.")
            if asyncio._get_running_loop() is self._loop:
                self._run(work, begun)
            else:
                self._loop.call_soon_threadsafe(self._run, work, begun)
        return begun

    def run(self, begin: Callable[[], Future[T]]) -> Future[T]:
        """What `begin` begins: on the loop's thread at once, elsewhere in a task.

        Its errors are set on the future. UndertowError: this was closed.
        """

        async def begun() -> T:
            return await in_loop(begin())

        if asyncio._get_running_loop() is not self._loop or self.closed:
            return self.begin(begun())
        try:
            return begin()
        except Exception as error:  # noqa: BLE001 - the caller's
            return refused(error)

    def _run(self, work: Coroutine[Any, Any, T], begun: Future[T]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)

        def settle(done: asyncio.Task[T]) -> None:
            self._tasks.discard(done)
            hand_on(done, begun)

        def abandon(future: Future[T]) -> None:
            if future.cancelled() and not task.done():
                self._loop.call_soon_threadsafe(task.cancel)

        task.add_done_callback(settle)
        begun.add_done_callback(abandon)

    async def cancel(self) -> None:
        """Cancel all tasks that have not ended."""
        late = list(self._tasks)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Do one last thing, and nothing after it. Call this on another thread than the loop's."""
        with self._closing:
            closed, self.closed = self.closed, True
        if closed:
            last.close()
            return
        asyncio.run_coroutine_threadsafe(last, self._loop).result()
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


def refused(error: Exception) -> Future[Any]:
    """A future that has failed."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def hand_on(
    done: Future[Any] | asyncio.Task[Any], to: Future[T], take: Callable[[Any], T] = lambda result: result
) -> None:
    """End `to` as `done` has, unless it was cancelled: with what `take` makes of the result, or the error."""
    # looked at in any case: a task reports an error that nobody has looked at
    failure = None if done.cancelled() else done.exception()
    if done.cancelled():
        to.cancel()
    if not to.set_running_or_notify_cancel():
        return
    if failure is not None:
        to.set_exception(failure)
        return
    try:
        to.set_result(take(done.result()))
    except Exception as error:  # noqa: BLE001 - the caller's
        to.set_exception(error.with_traceback(None))  # its frames have the future that has it


def then(asked: Future[S], take: Callable[[S], T]) -> Future[T]:
    """A future of what `take` makes of the result. Cancelling it cancels `asked`."""
    taken: Future[T] = Future()

    def cancel(done: Future[T]) -> None:
        if done.cancelled() and (source := begun()) is not None:
            source.cancel()

    begun = ref(asked)  # weak, as `asked` has the callback, and so `taken`: they would live on
    asked.add_done_callback(partial(hand_on, to=taken, take=take))
    taken.add_done_callback(cancel)
    return taken


def in_loop(begun: Future[T]) -> asyncio.Future[T]:
    """An awaitable of the running loop for a future; as asyncio.wrap_future, and quicker on one thread.

    Where this loop's thread sets the result, nothing has to wake it.
    """
    loop, thread = asyncio.get_running_loop(), threading.get_ident()
    waiting: asyncio.Future[T] = loop.create_future()

    # of the future it is called with: one that a closure holds would be part of a cycle, and live on

    def settle(done: Future[T]) -> None:
        if waiting.done():
            return
        try:
            error = done.exception()
        except CancelledError:
            waiting.cancel()
            return
        if error is not None:
            waiting.set_exception(error)
        else:
            waiting.set_result(done.result())

    def settled(done: Future[T]) -> None:
        if threading.get_ident() == thread:
            settle(done)
        elif not loop.is_closed():
            loop.call_soon_threadsafe(settle, done)

    begun.add_done_callback(settled)
    waiting.add_done_callback(lambda done: begun.cancel() if done.cancelled() else None)
    return waiting
