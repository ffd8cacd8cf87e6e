"""Coroutines on one event loop, begun from any thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from undertow.engine.base.model import UndertowError

T = TypeVar("T")


class LoopTasks:
    """The tasks of a router, on a given event loop or on one of its own, which a thread runs."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None) -> None:
        # guards `_closed`: a task that began after the end would wait for a loop that has ended
        self._closing = threading.Lock()
        self._closed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = loop or asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        if loop is None:
            self._thread = threading.Thread(target=self._loop.run_forever, name="router", daemon=True)
            self._thread.start()

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin a task. Cancelling its future cancels it. UndertowError: the router was closed."""
        begun: Future[T] = Future()
        with self._closing:
            if self._closed:
                work.close()
                raise UndertowError("the router was closed. Open it again.")
            if asyncio._get_running_loop() is self._loop:
                self._run(work, begun)
            else:
                self._loop.call_soon_threadsafe(self._run, work, begun)
        return begun

    def _run(self, work: Coroutine[Any, Any, T], begun: Future[T]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)

        def settle(done: asyncio.Task[T]) -> None:
            self._tasks.discard(done)
            error = None if done.cancelled() else done.exception()
            if done.cancelled():
                begun.cancel()
            if not begun.set_running_or_notify_cancel():
                return
            if error is not None:
                begun.set_exception(error)
            else:
                begun.set_result(done.result())

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
            closed, self._closed = self._closed, True
        if closed:
            last.close()
            return
        asyncio.run_coroutine_threadsafe(last, self._loop).result()
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
