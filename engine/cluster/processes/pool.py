"""The workers of a service: started, called, started again when they die, and closed in order."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from undertow.engine.base.model import UndertowError
from undertow.engine.base.trace import current_traceparent
from undertow.engine.cluster.processes.transport import Connection
from undertow.engine.cluster.processes.worker import CLOSE, CLOSING_S, LEAVES, READY, WorkerConfig
from undertow.engine.cluster.routing.errors import ShardExited, ShardGone
from undertow.engine.step.admission import QueueFull

log = logging.getLogger(__name__)

PROGRAM = (sys.executable, "-m", "undertow.engine.cluster.processes.worker")
# between the end of a worker and its next start: grows while it keeps dying, and starts over after a while
FIRST_PAUSE_S, LONGEST_PAUSE_S, STEADY_S = 0.05, 10.0, 30.0


class WorkerProcess:
    """One worker, started again whenever it ends. Used on its event loop alone."""

    def __init__(self, config: WorkerConfig, environment: Mapping[str, str], max_pending_calls: int) -> None:
        """`environment`: variables of the process, beside this one's."""
        self._config = config
        self._environment = {**os.environ, **environment}
        self._max_pending = max_pending_calls * len(config.lives)
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        # why the worker ends, once it has announced that
        self._reason: str | None = None
        self._ready, self._lost = asyncio.Event(), asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._closing = False

    async def start(self) -> None:
        """Start the process and wait for its shards; from then on it is started again when it ends.

        OSError; UndertowError: it has ended at once.
        """
        await self._start()
        ends = [asyncio.create_task(event.wait()) for event in (self._ready, self._lost)]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        if self._lost.is_set():
            raise UndertowError(f"the worker of {self._name} has ended at its start; it says above why")
        self._keeping = asyncio.create_task(self._keep())

    def call(self, shard: str, method: str, args: Sequence[Any]) -> asyncio.Future[Any]:
        """See ShardCalls. Cancelling it cancels the call of the shard, but for an add."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._connection is None or not self._ready.is_set():
            answer.set_exception(self._gone())
        elif len(self._pending) >= self._max_pending:
            full = f"too many calls are pending at shard {shard}. Try again shortly."
            answer.set_exception(QueueFull(full))
        else:
            number = next(self._numbers)
            gathers = method == "add"  # so one step of the shard stores the turns of several requests
            try:
                self._connection.send((number, shard, method, args, current_traceparent()), gathers=gathers)
            except Exception as error:  # noqa: BLE001 - its arguments cannot travel: the caller's, as any other
                answer.set_exception(error)
                return answer
            self._pending[number] = answer
            if not gathers:  # an add cannot be cancelled at the shard
                answer.add_done_callback(partial(self._abandon, number))
        return answer

    def _abandon(self, number: int, answer: asyncio.Future[Any]) -> None:
        known = answer.cancelled() and self._pending.pop(number, None) is not None
        if known and self._connection is not None:
            self._connection.send(number)

    async def close(self) -> None:
        """Have the worker close its engines and end; kill it if that takes too long."""
        self._closing = True
        if self._connection is not None:
            self._connection.send(CLOSE)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._lost.wait(), CLOSING_S)
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        await self._end_process(CLOSING_S if self._lost.is_set() else 0.0)

    # ---- the process

    async def _start(self) -> None:
        self._lost.clear()
        self._ready.clear()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = await asyncio.to_thread(self._spawn, theirs.fileno())
        except BaseException:  # a process that was started all the same finds its socket ended
            ours.close()
            raise
        self._reason = None
        connection = Connection(self._take, self._on_end)
        await connection.open(ours)
        connection.send(self._config)
        self._connection = connection

    def _spawn(self, fd: int) -> subprocess.Popen[bytes]:
        command = [*PROGRAM, str(fd)]
        return subprocess.Popen(
            command, pass_fds=[fd], stdin=subprocess.DEVNULL, env=self._environment, close_fds=True
        )

    async def _keep(self) -> None:
        """Start the process again whenever it has ended."""
        pause_s = FIRST_PAUSE_S
        while True:
            began_s = time.monotonic()
            await self._lost.wait()
            if self._closing:
                return
            code = await self._end_process()
            log.warning("the worker of %s has ended (%s); it is started again", self._name, code)
            steady = time.monotonic() - began_s > STEADY_S
            pause_s = FIRST_PAUSE_S if steady else min(2 * pause_s, LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)
            while True:
                try:
                    await self._start()
                    break
                except OSError as error:
                    log.error("the worker of %s cannot be started: %s", self._name, error)
                    await asyncio.sleep(LONGEST_PAUSE_S)

    async def _end_process(self, grace_s: float = 0.0) -> int | None:
        """Its exit code; it is killed if it lives on for so long without its socket."""
        if (process := self._process) is None:
            return None
        with suppress(subprocess.TimeoutExpired):
            return await asyncio.to_thread(process.wait, grace_s)
        process.kill()
        return await asyncio.to_thread(process.wait)

    # ---- its frames

    def _take(self, frame: tuple[Any, ...]) -> None:
        if frame[0] == READY:
            self._ready.set()
            return
        if frame[0] == LEAVES:
            self._reason = frame[1]
            self._ready.clear()
            self._fail_pending()
            return
        number, succeeded, value = frame
        answer = self._pending.pop(number, None)
        if answer is None or answer.done():
            return
        if succeeded:
            answer.set_result(value)
        else:
            answer.set_exception(pickle.loads(value))

    def _on_end(self) -> None:
        self._connection = None
        self._ready.clear()
        self._fail_pending()
        self._lost.set()

    def _fail_pending(self) -> None:
        pending, self._pending = self._pending, {}
        for answer in pending.values():
            if not answer.done():
                answer.set_exception(self._gone())

    def _gone(self) -> ShardGone:
        if self._reason is not None:
            return ShardExited(f"the worker of {self._name} ends: {self._reason}")
        return ShardGone(f"the worker of {self._name} has ended and is being started again")

    @property
    def _name(self) -> str:
        return ", ".join(self._config.lives)


class WorkerCalls:
    """The calls of one shard."""

    def __init__(self, worker: WorkerProcess, shard: str) -> None:
        self._worker, self._shard = worker, shard

    def call(self, method: str, *args: Any) -> asyncio.Future[Any]:
        """See ShardCalls."""
        return self._worker.call(self._shard, method, args)


class WorkerPool:
    """The workers of a root's shards."""

    def __init__(self, workers: Sequence[WorkerProcess], of_shard: Mapping[str, WorkerProcess]) -> None:
        self._workers, self._of_shard = workers, of_shard

    def calls(self, shard: str) -> WorkerCalls:
        """The calls of a shard. UndertowError: no worker has it."""
        if (worker := self._of_shard.get(shard)) is None:
            raise UndertowError(
                f"shard {shard} is newer than this service. Start the service again, so that a worker has it."
            )
        return WorkerCalls(worker, shard)

    async def start(self) -> None:
        """Start all workers, and wait until their shards are open. UndertowError: one cannot be opened."""
        await asyncio.gather(*(worker.start() for worker in self._workers))
        await asyncio.gather(*(self.calls(shard).call("ready") for shard in self._of_shard))

    async def close(self) -> None:
        """Close all engines and end all workers."""
        await asyncio.gather(*(worker.close() for worker in self._workers))
