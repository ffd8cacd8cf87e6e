"""A worker: the shards of one process, which ends when its service ends.

    python -m undertow.engine.cluster.processes.worker FD

FD is an inherited socket, whose first frame is the worker's configuration.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from undertow.engine.base.process_tuning import settle_in, without_pandas
from undertow.engine.base.trace import use_traceparent

with without_pandas():
    from undertow.engine.cluster.processes.transport import Connection, pack_error

if TYPE_CHECKING:
    from undertow.engine.base.config import Settings
    from undertow.engine.cluster.shard.shard import Shard

# how long a worker may take to close its engines before it ends all the same
CLOSING_S = 30.0
# how often a worker looks whether one of its shards has ended by an error
LOOK_S = 1.0

# frames to a worker beside calls, which are (number, shard, method, arguments, traceparent)
CLOSE = "close"
# The first word of the frames by which a worker announces that its shards are open, or why they cannot be
# opened now, and that it ends, with the reason. All others are (number, whether the call succeeded, the value
# or the error of `pack_error`).
READY, LEAVES = "ready", "leaves"


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a worker serves. `lives`: the shards, each with its life (engine/storage/fencing.py).

    `parts`: a pickle of `EngineParts`, which must not be loaded before the rest. `begin`: called first, as
    to set up the log.
    """

    root: str
    lives: Mapping[str, str]
    settings: Settings
    parts: bytes
    begin: Callable[[], object] | None = None


class Worker:
    """Answers the frames of a service with the calls of its shards. Used on its event loop alone."""

    def __init__(self) -> None:
        # of its own accord: a new process must take over
        self.failed = False
        self._ending, self._lost = asyncio.Event(), asyncio.Event()
        self._connection = Connection(self._take, self._on_end)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._shards: dict[str, Shard] = {}
        self._opening: asyncio.Task[None] | None = None
        self._pending: dict[int, Future[Any]] = {}

    async def serve(self, end: socket.socket) -> None:
        """Serve until the service closes this worker or has ended, or a shard needs a new process."""
        await self._connection.open(end)
        watching = asyncio.create_task(self._watch())
        await self._ending.wait()
        watching.cancel()
        _exit_after(CLOSING_S)
        if not self.failed:
            await asyncio.gather(*(asyncio.to_thread(shard.close) for shard in self._shards.values()))
        self._connection.close()
        await self._lost.wait()

    def _on_end(self) -> None:
        self._ending.set()
        self._lost.set()

    async def _watch(self) -> None:
        """End the process if a shard has ended by an unexpected error: a new process takes over."""
        while not any(shard.join(0.0) for shard in self._shards.values()):
            await asyncio.sleep(LOOK_S)
        os._exit(1)

    def _take(self, frame: Any) -> None:
        if isinstance(frame, tuple):
            self._call(*frame)
        elif isinstance(frame, int):
            if (abandoned := self._pending.pop(frame, None)) is not None:
                abandoned.cancel()
        elif frame == CLOSE:
            self._ending.set()
        else:
            self._begin(frame)

    def _begin(self, config: WorkerConfig) -> None:
        with without_pandas():
            from undertow.engine.cluster.shard.shard import Shard
        from undertow.engine.storage.location import Location

        if config.begin is not None:
            config.begin()
        parts, root = pickle.loads(config.parts), Location.of(config.root)
        settle_in()
        self._shards = {
            shard: Shard(root, shard, config.settings, parts, life=life, loop=self._loop)
            for shard, life in config.lives.items()
        }
        self._opening = asyncio.create_task(self._announce())

    async def _announce(self) -> None:
        opened = (asyncio.wrap_future(shard.ready()) for shard in self._shards.values())
        await asyncio.gather(*opened, return_exceptions=True)  # a call gets the error of its shard
        self._connection.send((READY,))

    def _call(self, number: int, shard: str, method: str, args: tuple[Any, ...], cause: str | None) -> None:
        try:
            with use_traceparent(cause):
                answered = self._shards[shard].call(method, *args)
        except Exception as error:  # noqa: BLE001 - the boundary between processes: the caller's
            self._refuse(number, error)
            return
        if answered.done():
            self._answer(number, answered)
        else:
            self._pending[number] = answered
            answered.add_done_callback(lambda done: self._answered(number, done))

    def _answered(self, number: int, done: Future[Any]) -> None:
        """On any thread."""
        if threading.get_ident() == self._thread:
            self._answer(number, done)
        else:
            self._loop.call_soon_threadsafe(self._answer, number, done)

    def _answer(self, number: int, done: Future[Any]) -> None:
        self._pending.pop(number, None)
        if done.cancelled():
            return
        if (error := done.exception()) is not None:
            self._refuse(number, error)
        else:
            try:
                self._connection.send((number, True, done.result()))
            except Exception as unsent:  # noqa: BLE001 - a result that does not travel is an error of the call
                self._refuse(number, unsent)

    def _refuse(self, number: int, error: BaseException) -> None:
        from undertow.engine.cluster.shard.arrivals import ShardClosed
        from undertow.engine.cluster.shard.supervisor import EngineUnusable
        from undertow.engine.storage.journal import Fenced

        if isinstance(error, ShardClosed):
            if not self._ending.is_set():  # by an unexpected error: as if the process had died of it
                os._exit(1)
            return
        if isinstance(error, Fenced | EngineUnusable):
            # only a new process can take the journal over again, or regain a device
            self._connection.send((LEAVES, str(error)))
            self.failed = True
            self._ending.set()
        else:
            self._connection.send((number, False, pack_error(error)))


def new_loop() -> asyncio.AbstractEventLoop:
    """An event loop of uvloop where it is installed."""
    try:
        from uvloop import new_event_loop
    except ModuleNotFoundError:
        return asyncio.new_event_loop()
    return new_event_loop()


def _exit_after(seconds: float) -> None:
    """End this process after some time if it has not ended by then."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()


def main() -> None:
    """Serve the socket that the first argument names."""
    for number in (signal.SIGINT, signal.SIGTERM):  # those of a terminal reach all of its processes
        signal.signal(number, signal.SIG_IGN)
    end = socket.socket(fileno=int(sys.argv[1]))
    end.set_inheritable(False)

    async def serve() -> None:
        worker = Worker()
        await worker.serve(end)
        if worker.failed:  # its engines are not closed
            os._exit(1)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(serve())


if __name__ == "__main__":
    main()
