"""A simulated cluster, and what befalls it: what happens, and when, follows from a seed."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from undertow.engine.base.model import UndertowError
from undertow.engine.cluster import shard_map
from undertow.engine.cluster.resharding.coordinator import reshard, resume
from undertow.engine.cluster.routing.router import Router
from undertow.engine.cluster.shard.supervisor import EngineParts
from undertow.engine.encoders.hashing import HashingEncoder

from ...engine import settings_of
from ...faults.harness import THETA, WINDOWS
from .disk import Disk, Files
from .llm import SimLLM
from .processes import Network, Process, ShardProcess
from .virtual_time import Clock, Crash, Threads, VirtualLoop

if TYPE_CHECKING:
    from .clients import Client

ENCODER = HashingEncoder(64)
# how long processes that were replaced go on
AFTERWARDS_S = 8.0
LAST_EVENTS = 60


class Plan:
    """What a seed has in it."""

    def __init__(self, rng: Random) -> None:
        self.shards = rng.choice((1, 2, 2, 3))
        self.tenants = rng.randint(2, 4)
        self.acts = rng.randint(5, 10)
        # a shard's work is on its event loop, as in a service, or on a thread, as in an actor
        self.loop_driver = rng.random() < 0.6
        self.durability = rng.choice(("commit", "commit", "fsync"))
        self.loss = rng.choice((0.0, 0.02, 0.08))
        self.crash = rng.choice((0.0, 0.001, 0.004))
        self.pause = rng.choice((0.0, 0.001, 0.004))
        self.batch_turns = rng.choice((4, 16, None))
        self.blocks = rng.choice((0.0, 0.0, 0.03))
        self.moves = rng.choice((0, 1, 1, 2))
        self.crashes = 6
        self.rows_per_flush = rng.choice((8, 24, 32_768))
        self.rows_past_log = rng.choice((6, 12, 4_096))
        self.commits_per_compaction = rng.choice((3, 16))


class WorldDisk(Disk):
    def __init__(self, world: World) -> None:
        super().__init__(world.rng("disk"))
        self._world = world

    def effect(self, name: str) -> None:
        self._world.effect(name)


class World:
    """A cluster, its clients, and what befalls them."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed, self.folder = seed, folder
        self.plan = Plan(self.rng("plan"))
        self.clock = Clock(self.rng("clock"))
        self.loop = VirtualLoop(self.clock, self.rng("loop"))
        self.threads = Threads(self.loop, self.rng("threads"))
        self.disk = WorldDisk(self)
        self.root = Files(str(folder / "root"))
        durability, most = self.plan.durability, self.plan.batch_turns
        self.settings = settings_of(
            **THETA, **WINDOWS, durability=durability, batch_turns=most, llm_patience_s=20.0
        )
        self.parts: Any = EngineParts(encoder=lambda _: ENCODER, llm=self._llm)
        self.network = Network(self)
        # all that there ever were, by name; and of each shard the one that calls go to
        self.processes: dict[str, Process] = {}
        self.running: dict[str, ShardProcess] = {}
        self.faults_on = True
        self.llm_down_since_s: float | None = None
        self.parked: list[str] = []
        self.clients: list[Client] = []
        self.router: Router
        self.count = dict.fromkeys(("crashes", "takeovers", "power failures", "moves", "cuts"), 0)
        self.events: deque[str] = deque(maxlen=LAST_EVENTS)
        self._hash = hashlib.blake2b(digest_size=16)
        self._faults = self.rng("faults")
        self._started = 0

    def rng(self, purpose: str) -> Random:
        return Random(f"{self.seed} {purpose}")

    def note(self, *event: object) -> None:
        line = f"{self.clock.now_s:.9f} {' '.join(map(str, event))}"
        self.events.append(line)
        self._hash.update(line.encode())

    @property
    def digest(self) -> str:
        """Of all events so far, with their times."""
        return self._hash.hexdigest()

    @staticmethod
    def brief(answer: object) -> str:
        if isinstance(answer, pa.Table):
            return " ".join(answer.column("status").to_pylist())
        return type(answer).__name__

    def _llm(self, _: object) -> SimLLM:
        return SimLLM(self, self.process)

    @property
    def process(self) -> Process:
        """That of the thread that runs."""
        return self.processes[self.threads.running.group.name]

    # ---- processes

    def start(self, shard: str) -> ShardProcess:
        self._started += 1
        process = self.running[shard] = ShardProcess(self, shard, self._started)
        self.loop.create_task(self._watch(process))
        return process

    async def _watch(self, process: ShardProcess) -> None:
        """Start it again when it has ended, unless its shard was removed."""
        await process.ended
        await asyncio.sleep(self._faults.expovariate(1 / 0.3))
        if self.running.get(process.id) is process:
            del self.running[process.id]
            if process.id in shard_map.load(self.root).all_shards:
                self.start(process.id)

    async def replace(self, process: ShardProcess) -> None:
        """Somebody takes a process for dead: another one takes its shard over. The first one goes on."""
        await asyncio.sleep(self._faults.expovariate(1 / 0.2))
        if process.is_alive and self.running.get(process.id) is process:
            self.count["takeovers"] += 1
            self.note("is replaced", process.name)
            self.start(process.id)

    def effect(self, name: str) -> None:
        """Before and after all that a process does to its files. On its thread. Crash."""
        thread = self.threads.current
        if thread is None:
            return
        group, rng = thread.group, self._faults
        if group.dead:
            raise Crash
        self.note(group.name, name)
        if self.faults_on:
            self._befall(group.name, rng.random())
        if group.dead:
            raise Crash
        if group.paused or rng.random() < 0.25:
            self.threads.sleep(rng.expovariate(1 / 0.002))

    def _befall(self, name: str, chance: float) -> None:
        process, plan = self.processes[name], self.plan
        if chance < plan.crash:
            self.crash(process, "at an effect")
        elif chance < plan.crash + plan.pause and isinstance(process, ShardProcess):
            self.note("is paused", name)
            self.threads.pause(process.group, self._faults.expovariate(1 / 2.0))
            self.loop.call_soon(lambda: self.loop.create_task(self.replace(process)))

    def crash(self, process: Process, why: str) -> None:
        """The process is killed; with fsync its machine may fail with it."""
        if self.count["crashes"] >= self.plan.crashes or not process.is_alive:
            return
        self.count["crashes"] += 1
        process.kill(why)
        if not isinstance(process, ShardProcess) or self._faults.random() < 0.4:
            return
        alone = not any(other.is_alive for other in self.of_shard(process.id))
        if alone and self.plan.durability == "fsync":
            self.count["power failures"] += 1
            store = Path(str(self.root / "shards" / process.id))
            process.ended.add_done_callback(lambda _: self.disk.fail_power(store))

    def shard_processes(self) -> list[ShardProcess]:
        """All that there ever were."""
        return [p for p in self.processes.values() if isinstance(p, ShardProcess)]

    def of_shard(self, shard: str) -> list[ShardProcess]:
        return [process for process in self.shard_processes() if process.id == shard]

    async def heal(self) -> None:
        """From here on nothing befalls anybody. Who was replaced goes on, and then ends."""
        self.faults_on, self.llm_down_since_s = False, None
        self.network.cut_until_s.clear()
        self.note("heals")
        for process in self.shard_processes():
            self.threads.go_on(process.group)
        await asyncio.sleep(AFTERWARDS_S)
        for process in self.shard_processes():
            if process.is_alive and self.running.get(process.id) is not process:
                process.kill("was replaced")

    # ---- what befalls them

    async def nemesis(self) -> None:
        rng = self.rng("nemesis")
        while True:
            await asyncio.sleep(rng.expovariate(1 / 1.5))
            shard = rng.choice(sorted(self.running) or ["s0"])
            process = self.running.get(shard)
            match rng.randrange(5):
                case 0 if process is not None:
                    self.crash(process, "by a signal")
                case 1 if process is not None and process.is_alive:
                    self.note("is paused", process.name)
                    self.threads.pause(process.group, rng.expovariate(1 / 2.0))
                    await self.replace(process)
                case 2:
                    self.count["cuts"] += 1
                    self.network.cut_until_s[shard] = self.loop.time() + rng.expovariate(1 / 0.7)
                case 3:
                    self.llm_down_since_s = self.loop.time()
                    await asyncio.sleep(rng.expovariate(1 / 2.0))
                    self.llm_down_since_s = None

    async def mover(self) -> None:
        """Adds and removes shards. The process that does it may be killed; another one goes on."""
        rng = self.rng("mover")
        for _ in range(self.plan.moves):
            await asyncio.sleep(rng.expovariate(1 / 1.5))
            now = shard_map.load(self.root)
            more = len(now.shards) == 1 or rng.random() < 0.6
            fewer = rng.sample(now.shards, len(now.shards) - 1)
            wanted = sorted([*now.shards, f"s{now.version}m"] if more else fewer)
            self.note("moves", *wanted)
            self.count["moves"] += 1
            while (now := shard_map.load(self.root)).before or now.shards != tuple(wanted):
                await self._coordinate(wanted)
                await asyncio.sleep(rng.expovariate(1 / 0.5))

    async def _coordinate(self, wanted: list[str]) -> None:
        self._started += 1
        admin = Process(self, f"admin.{self._started}")
        done: asyncio.Future[None] = self.loop.create_future()

        def ask(shard: str, method: str, *args: Any) -> Any:
            return self.threads.result(self.router.begin_at(shard, method, *args))

        def run() -> None:
            try:
                if shard_map.load(self.root).before is None:
                    reshard(self.root, wanted, ask)
                else:
                    resume(self.root, ask)
            except UndertowError as error:  # the next one goes on
                self.note("moving ends", type(error).__name__)
            self.loop.call_soon(done.set_result, None)

        admin.call_soon(run)
        await asyncio.wait([done, admin.ended], return_when=asyncio.FIRST_COMPLETED)
