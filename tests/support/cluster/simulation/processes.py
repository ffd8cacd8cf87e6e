"""The simulated processes of a cluster, each with one shard, and the network between them and the router."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any

from undertow.engine.cluster.routing.errors import ShardExited, ShardGone
from undertow.engine.cluster.shard.arrivals import ShardClosed
from undertow.engine.cluster.shard.shard import Shard
from undertow.engine.cluster.shard.supervisor import EngineUnusable
from undertow.engine.cluster.shard_map import Removed
from undertow.engine.storage.journal import Fenced

from .virtual_time import Group, SimThread

if TYPE_CHECKING:
    from .world import World


class Callback:
    """A callback of a process's event loop."""

    def __init__(self, run: Callable[..., object], args: tuple[Any, ...], context: Context | None) -> None:
        self._run, self._args, self._context = run, args, context or copy_context()
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True

    def __call__(self) -> None:
        if not self._cancelled:
            self._context.run(self._run, *self._args)


class Process:
    """A process with one event loop, on a simulated thread. It is what a shard takes for its event loop."""

    def __init__(self, world: World, name: str) -> None:
        self.name, self.group = name, Group(name)
        self.ended: asyncio.Future[None] = world.loop.create_future()
        self._world = world
        self._due: deque[Callback] = deque()
        self._idle, self._kicked = True, False
        self._main: SimThread | None = None
        world.processes[name] = self

    @property
    def is_alive(self) -> bool:
        return not self.group.dead

    def is_running(self) -> bool:
        return self.is_alive

    def call_soon(self, run: Callable[..., object], *args: Any, context: Context | None = None) -> Callback:
        callback = Callback(run, args, context)
        self._due.append(callback)
        self._kick()
        return callback

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay_s: float, run: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Callback:
        callback = Callback(run, args, context)

        def due() -> None:
            self._due.append(callback)
            self._kick()

        self._world.loop.call_later(delay_s, due)
        return callback

    def _kick(self) -> None:
        if self._idle and not self._kicked and self.is_alive:
            self._kicked = True
            self._world.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._kicked = False
        if not self.is_alive:
            return
        if self.group.paused:
            self.group.held.append(self._kick)
        elif self._main is None:
            self._main = SimThread(self._world.threads, self.group, self._serve)
            self._main.resume()
        elif self._idle:
            self._main.resume()

    def _serve(self) -> None:
        assert self._main is not None
        while True:
            self._idle = False
            while self._due:
                self._due.popleft()()
            self._idle = True
            self._main.park()

    def kill(self, why: str) -> None:
        """On any thread. Nothing of it goes on; its locks are free."""
        if self.is_alive:
            self.group.dead = True
            self._world.note("dies", self.name, why)
            self._world.disk.unlock(self.name)
            self._world.loop.call_soon(self._bury)

    def _bury(self) -> None:
        self._world.threads.end(self.group)
        if not self.ended.done():
            self.ended.set_result(None)


class ShardProcess(Process):
    """A process with a shard, as engine/cluster/processes and engine/cluster/ray make them."""

    def __init__(self, world: World, shard: str, number: int) -> None:
        super().__init__(world, f"{shard}.{number}")
        self.id = shard
        self.shard: Shard | None = None
        world.note("starts", self.name)
        self.call_soon(self._begin)

    def _begin(self) -> None:
        world = self._world
        loop: Any = self if world.plan.loop_driver else None
        self.shard = Shard(
            world.root, self.id, world.settings, world.parts, life=f"life-{self.id}", loop=loop
        )
        if loop is None:
            self.shard.ready()

    @property
    def has_failed(self) -> bool:
        """Whether the shard has ended by an error that it does not expect."""
        return self.is_alive and self.shard is not None and self.shard.join(0.0)

    def closing(self, closed: asyncio.Future[None]) -> Callable[[], None]:
        """What closes the shard, on a thread of its own."""

        def close() -> None:
            assert self.shard is not None
            self.shard.close()
            self._world.loop.call_soon(closed.set_result, None)

        return close

    def call(self, method: str, args: tuple[Any, ...]) -> asyncio.Future[Any]:
        """Begin one call of Shard. Cancelling it skips what has not begun."""
        answer: asyncio.Future[Any] = self._world.loop.create_future()
        begun: list[Future[Any]] = []

        def begin() -> None:
            assert self.shard is not None
            try:
                begun.append(self.shard.call(method, *args))
            except Exception as error:  # noqa: BLE001 - the caller's, as in worker.py
                begun.append(Future())
                begun[0].set_exception(error)
            begun[0].add_done_callback(lambda done: self._world.loop.call_soon(settle, done))

        def settle(done: Future[Any]) -> None:
            if not answer.done() and not done.cancelled():
                if (error := done.exception()) is not None:
                    answer.set_exception(error)
                else:
                    answer.set_result(done.result())

        def abandon(of: asyncio.Future[Any]) -> None:
            if of.cancelled() and begun:
                self.call_soon(begun[0].cancel)

        answer.add_done_callback(abandon)
        self.call_soon(begin)
        return answer


class Network:
    """Carries calls to the shards. It delays them, loses answers, and is cut for a while."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rng("network")
        self.cut_until_s: dict[str, float] = {}
        self.lost = 0

    def connect(self, shard: str) -> Link:
        return Link(self, shard)

    async def delay(self) -> None:
        rng, slow = self._rng, self._world.faults_on and self._rng.random() < 0.05
        await asyncio.sleep(rng.expovariate(1 / (0.2 if slow else 0.001)))

    def is_cut(self, shard: str) -> bool:
        return self._world.loop.time() < self.cut_until_s.get(shard, 0.0)

    def loses(self) -> bool:
        return self._world.faults_on and self._rng.random() < self._world.plan.loss


class Link:
    """The calls of one shard, as ShardCalls."""

    def __init__(self, network: Network, shard: str) -> None:
        self._network, self._shard, self._world = network, shard, network._world

    async def call(self, method: str, *args: Any) -> Any:
        network, world = self._network, self._world
        await network.delay()
        process = world.running.get(self._shard)
        if network.is_cut(self._shard):
            raise ShardGone(f"shard {self._shard} cannot be reached")
        if process is None:  # a new shard, or one that was removed
            process = world.start(self._shard)
        if not process.is_alive:
            raise ShardGone(f"shard {self._shard} is down")
        answer = process.call(method, args)
        try:
            await asyncio.wait([answer, process.ended], return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not answer.done():
                answer.cancel()
        if not answer.done() or answer.cancelled():
            await network.delay()
            raise ShardGone(f"shard {self._shard} has died")
        error = answer.exception()
        world.note("answers", process.name, method, world.brief(error or answer.result()))
        if isinstance(error, Fenced | EngineUnusable | ShardClosed | Removed):
            process.kill(type(error).__name__)
            if not isinstance(error, Removed):
                gone = ShardGone if isinstance(error, ShardClosed) else ShardExited
                raise gone(f"shard {self._shard} ends: {error}")
        await network.delay()
        if network.is_cut(self._shard) or network.loses():
            network.lost += 1
            world.note("lost", process.name, method)
            raise ShardGone(f"the answer of shard {self._shard} got lost")
        return answer.result()
