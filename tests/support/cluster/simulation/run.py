"""Runs one seed: the cluster is used while faults come, then healed, drained, closed and checked."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from undertow.engine.base import pacing
from undertow.engine.base.queries import DrainCommand, PurgeCommand
from undertow.engine.cluster import shard_map
from undertow.engine.cluster.routing.router import Router
from undertow.engine.cluster.settings import ClusterSettings
from undertow.engine.cluster.shard import beside, call_queue, drivers, engine_work
from undertow.engine.cluster.shard.api import answer_streams
from undertow.engine.cluster.shard_map import ShardMap
from undertow.engine.step import lag, llm_calls
from undertow.engine.storage import fenced_log, journal_reads, lance_log, tail, version_cleanup, wal
from undertow.engine.storage import journal as journal_module

from .check import check
from .clients import Client
from .disk import Files, Table, lock_of
from .virtual_time import BEGAN_S, Stuck
from .world import World

# what measures time by a default argument, which is bound when its module is loaded
MEASURING: tuple[Any, ...] = (
    call_queue.CallQueues,
    answer_streams.AnswerStream,
    lag.LagTracker,
    pacing.Served,
    pacing.Pacing,
)
# of virtual time
LONGEST_S = 600.0
POLL_S = 0.05


class Failed(AssertionError):
    """A seed has found something."""

    def __init__(self, seed: int, why: BaseException, events: list[str]) -> None:
        last = "\n".join(events)
        super().__init__(
            f"{last}\n\nseed {seed}: {type(why).__name__}: {why}\n"
            f"Run it again: python -m tests.support.cluster.simulation {seed}"
        )


@dataclass(frozen=True)
class Result:
    """The hash of all events of a seed with their times, and how often what has befallen it."""

    seed: int
    digest: str
    virtual_s: float
    counts: dict[str, int] = field(default_factory=dict)


def run(seed: int) -> Result:
    """Run one seed. Failed: something does not hold that must."""
    memory = Path("/dev/shm")  # flushes are simulated, so that no disk is needed
    folder = Path(tempfile.mkdtemp(prefix="simulation-", dir=memory if memory.is_dir() else None))
    world = World(seed, folder)
    try:
        with _simulated(world):
            world.loop.run_until_complete(_to_its_end(world))
        counts = check(world)
    except (Exception, Stuck) as error:
        raise Failed(seed, error, list(world.events)) from error
    finally:
        for task in asyncio.all_tasks(world.loop):
            task.cancel()
        world.loop.run_until_complete(asyncio.sleep(0.1))
        for process in world.processes.values():
            process.group.dead = True
            world.threads.end(process.group)
        world.loop.close()
        shutil.rmtree(folder, ignore_errors=True)
    return Result(seed, world.digest, world.loop.time() - BEGAN_S, {**world.count, **counts})


async def _to_its_end(world: World) -> None:
    """What a callback or a thread did not expect ends it too."""
    failed: asyncio.Future[None] = world.loop.create_future()

    def on_error(_: object, context: dict[str, Any]) -> None:
        error = context.get("exception")
        unheard = "never retrieved" in context["message"]
        if isinstance(error, BaseException) and not (unheard or failed.done()):
            failed.set_exception(error)

    world.loop.set_exception_handler(on_error)
    life = world.loop.create_task(_life(world))
    await asyncio.wait([life, failed], timeout=LONGEST_S, return_when=asyncio.FIRST_COMPLETED)
    if failed.done():
        life.cancel()
        failed.result()
    if not life.done():
        life.cancel()
        raise Stuck(f"it did not end within {LONGEST_S:g} s of virtual time")
    life.result()


async def _life(world: World) -> None:
    plan = world.plan
    shard_map.publish(world.root, ShardMap.new([f"s{n}" for n in range(plan.shards)]))
    world.router = Router(world.root, world.network.connect, ClusterSettings(window_calls=4), loop=world.loop)
    for shard in shard_map.load(world.root).shards:
        world.start(shard)
    careless = world.rng("careless")
    world.clients = [Client(world, f"t{n}", careless.random() < 0.3) for n in range(plan.tenants)]
    befalling = world.loop.create_task(world.nemesis())
    moving = world.loop.create_task(world.mover())
    acting = [world.loop.create_task(client.run(plan.acts)) for client in world.clients]
    try:
        await asyncio.gather(*acting)
        befalling.cancel()
        await world.heal()
        await moving
        await _settle(world)
    finally:
        for task in (befalling, moving, *acting):
            task.cancel()
    await _close(world)


async def _settle(world: World) -> None:
    """All is decided and purged, and every client finds what it was told is stored."""
    for _ in range(20):
        if await asyncio.wrap_future(world.router.begin(DrainCommand())):
            break
        await asyncio.sleep(5.0)
    else:
        raise AssertionError("what is stored is never decided")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lance_log, "READER_GRACE", lance_log.READER_GRACE * 0)
        await asyncio.wrap_future(world.router.begin(PurgeCommand()))
    for client in world.clients:
        await client.look()


async def _close(world: World) -> None:
    await world.router._stop()
    for process in world.shard_processes():
        failed = process.has_failed
        if process.is_alive and process.shard is not None:
            closed: asyncio.Future[None] = world.loop.create_future()
            world.threads.spawn(process.group, process.closing(closed))
            await closed
        process.kill("closed")
        await process.ended
        assert not failed, f"{process.name} has ended by an error that it does not expect"


@contextmanager
def _simulated(world: World) -> Iterator[None]:
    """Time, threads, disk and chance are the world's."""
    threads, plan, disk = world.threads, world.plan, world.disk
    Files.disk = Table.disk = disk
    chance: Random = world.rng("secrets")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("monotonic", "perf_counter", "thread_time"):
            patch.setattr(time, name, world.clock.read)
        patch.setattr(time, "sleep", threads.sleep)
        for measuring in MEASURING:
            patch.setattr(measuring.__init__, "__defaults__", (world.clock.read,))
        patch.setattr(secrets, "token_hex", lambda count=32: chance.randbytes(count).hex())
        for module in (drivers, journal_module, journal_reads, version_cleanup):
            patch.setattr(module, "threading", threads)
        for module in (drivers, tail):
            patch.setattr(module, "ThreadPoolExecutor", threads.ThreadPoolExecutor)
        patch.setattr(beside, "wait", threads.settle)
        patch.setattr(llm_calls, "SimpleQueue", threads.SimpleQueue)
        patch.setattr(engine_work, "POLL_S", POLL_S)
        patch.setattr(os, "fsync", disk.sync)
        for module in (lance_log, wal):
            patch.setattr(module, "fsync_path", disk.sync_path)
        for module in (fenced_log, journal_module):
            patch.setattr(module, "LanceLog", Table)
        patch.setattr(fenced_log, "WriterLock", lock_of(disk, lambda: world.process.name))
        patch.setattr(tail, "ROWS_PER_FLUSH", plan.rows_per_flush)
        patch.setattr(journal_module, "ROWS_PAST_LOG", plan.rows_past_log)
        patch.setattr(journal_module, "COMMITS_PER_COMPACTION", plan.commits_per_compaction)
        yield
