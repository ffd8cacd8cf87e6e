"""Tenants whose long calls and decisions have taken much of a shard's time let others go first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from undertow.engine.api.erasure import remove_bytes
from undertow.engine.base.pacing import Pacing, Served
from undertow.engine.base.queries import (
    ApiCall,
    DeleteCommand,
    EraseCommand,
    EventsQuery,
    ExplainQuery,
    FlushCommand,
    SearchQuery,
    SetPolicyCommand,
)
from undertow.engine.cluster.shard import beside, engine_work
from undertow.engine.cluster.shard.api import purges
from undertow.engine.cluster.shard.commands import MOST_GONE, Command, FairQueue, Waiting
from undertow.engine.cluster.shard.engine_work import EngineWork
from undertow.engine.cluster.shard.quick import never
from undertow.engine.tenants.registry import UnknownTenant
from undertow.serving.async_memories import AsyncMemories

from ...support.cluster.shard import some
from .test_drivers import SOON_S, engine_of, opened, word

pytestmark = pytest.mark.anyio
# far more than a burst, and what ends the rest after it
MUCH_S, LATER_S = 0.5, 60.0


class World:
    """A shard on the loop, of ann and bob. Its clock stands still."""

    def __init__(self, memories: AsyncMemories) -> None:
        self.memories, self.now_s = memories, 0.0
        self.work: EngineWork = memories._router._shard._work  # type: ignore[union-attr]
        self.work._served = served = Served(self.clock_s)
        self.work._deciding, self.work.purging = (Pacing(served, self.clock_s) for _ in range(2))
        self.work._long.pacing, self.work._long.erasing = (Pacing(served, self.clock_s) for _ in range(2))

    def clock_s(self) -> float:
        return self.now_s

    async def ask(self, tenant: str) -> None:
        assert (await self.memories.call(word(1, tenant))).turns

    async def had_much(self) -> None:
        """Ann has had much of the shard's time for long calls, and bob is served meanwhile."""
        self.work._long.pacing.worked("ann", MUCH_S)
        await self.ask("bob")

    def evict(self) -> None:
        """Ann's turns are decided and she is not in memory: a call that needs her there is not quick."""
        engine_of(self.memories).flush("ann")
        engine_of(self.memories).tenants.evict("ann")

    async def rounds(self) -> None:
        """Time enough for whatever may be done."""
        for _ in range(25):
            await asyncio.sleep(0.002)

    def explain(self, tenant: str) -> asyncio.Task[Any]:
        return asyncio.create_task(self.memories.call(ExplainQuery(tenant)))


@asynccontextmanager
async def shard(store: Path) -> AsyncIterator[World]:
    async with opened(store, theta_count=1_000) as memories:
        await memories.add([*some("ann", 1), *some("bob", 1)])
        async with asyncio.timeout(SOON_S):
            yield World(memories)


async def test_long_calls_of_who_had_many_wait_while_others_are_served(tmp_path: Path) -> None:
    async with shard(tmp_path) as world:
        await world.had_much()
        heavy = [world.explain("ann") for _ in range(3)]
        await world.rounds()
        assert [record["seq"] for record in await world.explain("bob")] == [0]
        await world.ask("ann")  # what is quick does not wait
        assert not any(task.done() for task in heavy)
        world.now_s += LATER_S
        for records in await asyncio.gather(*heavy):
            assert [record["seq"] for record in records] == [0]


@pytest.mark.parametrize(
    "call",
    [
        lambda key: SearchQuery("ann", "word", explain=True),
        lambda key: EventsQuery({}, frozenset([key]), 100, asker="ann"),
    ],
)
async def test_an_explained_search_and_a_reading_of_events_are_such_calls(
    tmp_path: Path, call: Callable[[str], ApiCall[Any]]
) -> None:
    async with shard(tmp_path) as world:
        await world.had_much()
        heavy = asyncio.create_task(world.memories.call(call(world.memories.tenant_key("ann"))))
        await world.rounds()
        assert not heavy.done()
        world.now_s += LATER_S
        assert await heavy


async def test_they_wait_beside_a_call_of_theirs_that_began_and_was_put_off(tmp_path: Path) -> None:
    async with shard(tmp_path) as world:
        quick, results = [True], iter([None, None, None, 7])
        await world.had_much()
        begun = world.work.ask(lambda _: next(results), wait=True, is_quick=lambda _: quick[0], tenant="ann")
        quick[0] = False
        heavy = [world.explain("ann") for _ in range(3)]
        await world.rounds()
        assert begun.result(SOON_S) == 7
        assert not any(task.done() for task in heavy)
        world.now_s += LATER_S
        await asyncio.gather(*heavy)


async def test_a_call_that_has_begun_comes_behind_what_was_put_back_and_before_the_others() -> None:
    queue = FairQueue(Pacing(Served()), Pacing(Served()))
    first, other, begun = (Command(lambda: None, Future(), never, tenant="ann") for _ in range(3))
    queue.append(first)
    queue.append(other)
    assert queue.pop() is first and begun.begin()
    queue.put_back(first)
    queue.append(begun)
    assert [queue.pop() for _ in range(3)] == [first, begun, other]


async def test_they_do_not_wait_where_nobody_else_is_served(tmp_path: Path) -> None:
    async with shard(tmp_path) as world:
        world.now_s += LATER_S  # since the turns were added
        world.work._long.pacing.worked("ann", MUCH_S)
        await world.ask("ann")
        assert await world.explain("ann")


async def test_a_call_in_several_parts_is_not_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = beside._fetch
    async with shard(tmp_path) as world:

        def much(*args: Any) -> None:
            world.work._long.pacing.worked("ann", MUCH_S)
            read(*args)

        monkeypatch.setattr(beside, "_fetch", much)
        monkeypatch.setattr(engine_work, "loads_quickly", lambda _: False)  # nor on the loop
        world.evict()
        await world.ask("bob")
        await world.ask("ann")
        assert world.work._long.pacing.rest_s("ann"), "the tenant was read, and then searched"


async def test_calls_with_turns_of_others_do_not_wait_for_who_rests(tmp_path: Path) -> None:
    async with shard(tmp_path) as world:
        world.evict()
        await world.had_much()
        heavy = world.explain("ann")
        await world.rounds()
        await world.memories.add([*some("ann", 2), *some("bob", 2)])
        assert world.work._long.pacing.rest_s("ann")
        await world.memories.call(EraseCommand("ann"))  # nor does an erasure, which goes before it
        assert not heavy.done()
        world.now_s += LATER_S
        with pytest.raises(UnknownTenant):
            await heavy


async def test_an_erasure_waits_after_many_of_them(tmp_path: Path) -> None:
    async with shard(tmp_path) as world:
        world.work._long.erasing.worked("ann", MUCH_S)
        await world.ask("bob")
        erased = asyncio.create_task(world.memories.call(EraseCommand("ann")))
        await world.rounds()
        assert not erased.done() and await world.explain("bob")
        await world.memories.call(EraseCommand("bob"))
        world.now_s += LATER_S
        await erased


async def test_an_erasure_goes_before_readings_and_behind_changes() -> None:
    queue = FairQueue(Pacing(Served()), Pacing(Served()))
    change, imported, read, answer, erasure, load = (
        Command(lambda: None, Future(), never, tenant="ann") for _ in range(6)
    )
    change.settles = imported.changes = read.reads = erasure.erases = erasure.settles = True
    load.rests = False
    for command in (change, imported, read, answer, erasure, load):
        queue.append(command)
    assert [queue.pop() for _ in range(6)] == [change, imported, erasure, load, read, answer]


@pytest.mark.parametrize(
    "call", [SetPolicyCommand("ann", "a-mem"), FlushCommand("ann"), DeleteCommand("0" * 32, "ann")]
)
async def test_no_change_is_overtaken_by_an_erasure(tmp_path: Path, call: ApiCall[Any]) -> None:
    async with shard(tmp_path) as world:
        world.evict()
        await world.had_much()
        changed = asyncio.create_task(world.memories.call(call))
        await world.rounds()
        erased = asyncio.create_task(world.memories.call(EraseCommand("ann")))
        await world.rounds()
        assert not (changed.done() or erased.done())
        world.now_s += LATER_S
        await asyncio.gather(changed, erased, return_exceptions=True)
        assert "ann" not in engine_of(world.memories).tenants


async def test_calls_that_were_cancelled_do_not_pile_up_and_their_moves_count(tmp_path: Path) -> None:
    async with shard(tmp_path) as world:
        await world.had_much()
        for call in (ExplainQuery("ann"), SearchQuery("ann", "word", explain=True)) * 100:
            asked = asyncio.create_task(world.memories.call(call))
            await asyncio.sleep(0)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
        (waiting,) = world.work._long._by_tenant.values()
        assert len(waiting) <= MOST_GONE + 1
        waiting[0].moves, rest_s = 1, world.work._long.pacing.rest_s("ann")
        world.now_s += LATER_S
        assert world.work._long.pop() is None and world.work._long.rest_s is None
        assert rest_s and world.work._long.pacing._full_s["ann"] > world.now_s


async def test_an_erasure_comes_between_two_parts_of_an_import(tmp_path: Path) -> None:
    async with shard(tmp_path) as world:
        imported: Future[Any] = world.work.ask(lambda _: None, wait=True, tenant="ann", changes=True)
        await world.rounds()
        await world.memories.call(EraseCommand("ann"))
        assert imported.running()


async def test_what_is_no_longer_quick_is_not_repeated_on_the_loop() -> None:
    ran: list[Command] = []
    waiting = Waiting(Command(lambda: None, Future(), never) for _ in range(3))
    first, *others = waiting
    waiting.repeat(ran.append, lambda _: not ran)
    assert ran == [first] and list(waiting) == others


async def test_who_had_many_purges_waits_for_the_next_one_or_for_another_tenants(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with shard(tmp_path) as world:

        def slow(*args: Any) -> Any:
            world.now_s += MUCH_S
            return remove_bytes(*args)

        monkeypatch.setattr(purges, "remove_bytes", slow)
        world.work.purging.worked("ann", MUCH_S)
        await world.ask("bob")
        certified = asyncio.create_task(world.memories.call(EraseCommand("ann", now=True)))
        await world.rounds()
        assert not certified.done()
        with pytest.raises(UnknownTenant):
            await world.memories.call(word(1, "ann"))
        assert await world.memories.call(EraseCommand("bob", now=True)) and await certified
        assert world.work.purging.rest_s("bob"), "that was its purge"


async def test_decisions_of_who_had_many_wait_while_others_are_served(tmp_path: Path) -> None:
    async with shard(tmp_path) as world:
        lag = engine_of(world.memories).scheduler.decisions

        async def decided(*tenants: str) -> None:
            while any(lag.is_active(tenant) for tenant in tenants):
                await asyncio.sleep(0.001)

        await decided("ann", "bob")
        world.work._deciding.worked("ann", MUCH_S)
        for n in range(2, 6):
            await world.memories.add([*some("ann", n), *some("bob", n)])
        await decided("bob")
        await world.rounds()
        assert engine_of(world.memories).lag.undecided_turns == 4 and lag.is_active("ann")
        await world.ask("ann")  # stored and searchable all the same
        world.now_s += LATER_S
        await decided("ann")
