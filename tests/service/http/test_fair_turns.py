"""The turns of requests on the event loop: their order, how many begin at once, and who is held."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable
from typing import Any

import pytest

from undertow.serving.http.middleware import fair_turns
from undertow.serving.http.middleware.fair_turns import FairTurns, Turn

pytestmark = pytest.mark.anyio


class World:
    """Turns with a clock of their own, and requests that note when they begin."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.turns = FairTurns(lambda: self.now_s)
        self.begun: list[str] = []

    def used(self, tenant: str, seconds: float) -> None:
        self.turns.use_of(tenant).add(seconds, self.now_s)

    async def request(self, tenant: str, until: asyncio.Event | None = None) -> None:
        async def work(turn: Turn) -> None:
            await turn.begin()
            self.begun.append(tenant)
            if until is not None:
                await until.wait()

        turn = self.turns.turn(tenant)
        await turn.timed(work(turn))

    def start(self, *tenants: str) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self.request(tenant)) for tenant in tenants]


def fill(world: World) -> None:
    """Requests that come now find no room in this iteration."""
    world.turns._schedule()
    world.turns._left_s = 0.0


async def iterations(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_whoever_has_used_the_loop_least_is_next_and_its_oldest_request() -> None:
    world = World()
    world.used("much", 1.0)
    world.used("some", 0.1)
    world.turns.use_of("much").typical_s = fair_turns.ITERATION_S  # one of its requests fills an iteration
    tasks = world.start("much", "much", "much", "some", "new")
    await asyncio.gather(*tasks)
    # the first came while nobody waited; the two that came last are served before those that came before
    assert world.begun[0] == "much"
    assert set(world.begun[1:3]) == {"some", "new"}
    assert world.begun[3:] == ["much", "much"]


async def test_tenants_that_have_used_the_loop_about_alike_take_turns() -> None:
    world = World()
    for n in range(4):
        world.used(f"{n}", 0.2 - 0.04 * n)
    world.used("far more", 2.0)
    tasks = world.start(*"0000", *"1111", *"2222", *"3333", "far more")
    fill(world)
    await asyncio.gather(*tasks)
    assert world.begun == ["0", "1", "2", "3"] * 4 + ["far more"]


async def test_use_is_forgotten_with_time() -> None:
    world = World()
    world.used("long ago", 8.0)
    world.now_s = 10 * fair_turns.HALF_LIFE_S
    world.used("just now", 0.1)
    assert world.turns.use_of("long ago").rank < world.turns.use_of("just now").rank


async def test_a_few_requests_begin_in_one_iteration() -> None:
    world = World()
    tasks = world.start(*["ann"] * 40)
    at_once = int(fair_turns.ITERATION_S / fair_turns.LEAST_S)
    before = 0
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        assert len(world.begun) - before <= at_once + 1
        before = len(world.begun)
    assert len(world.begun) == 40


async def test_a_heavy_tenant_waits_for_requests_of_others_that_have_just_begun() -> None:
    world, served = World(), asyncio.Event()
    world.used("heavy", 5.0)
    other = asyncio.create_task(world.request("light", served))
    await iterations(3)
    held = world.start("heavy", "heavy")
    fill(world)
    await iterations(20)
    assert world.begun == ["light"], "they are held"
    served.set()
    await other
    await iterations(6)
    assert all(task.done() for task in held), "nobody else is being served"


async def test_a_request_that_takes_long_without_the_loop_holds_nobody_for_long() -> None:
    world, served = World(), asyncio.Event()
    world.used("heavy", 5.0)
    long = asyncio.create_task(world.request("light", served))
    await iterations(3)
    held = world.start(*["heavy"] * 10)
    fill(world)
    await iterations(20)
    assert world.begun == ["light"]
    world.now_s = fair_turns.HELD_S
    async with asyncio.timeout(10):
        await asyncio.gather(*held)
    assert not long.done()
    served.set()
    await long


async def test_a_few_requests_are_refused_in_one_iteration_and_each_in_the_end() -> None:
    world = World()
    done: list[None] = []

    async def refuse() -> None:
        done.append(await world.turns.refusal())  # type: ignore[func-returns-value]

    tasks = [asyncio.create_task(refuse()) for _ in range(50)]
    tasks[20].cancel()
    before = 0
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        assert len(done) - before <= 2 * fair_turns.REFUSED_AT_ONCE
        before = len(done)
    assert len(done) == 49
    await iterations(3)
    assert world.turns._refusals_left == fair_turns.REFUSED_AT_ONCE


async def test_a_request_that_was_cancelled_takes_no_turn() -> None:
    world = World()
    first, second = world.start("ann", "ann")
    fill(world)
    await asyncio.sleep(0)
    first.cancel()
    await second
    assert world.begun == ["ann"]
    assert not world.turns._served, "nothing is being served any more"


async def test_work_beside_the_loop_is_done_one_at_a_time_for_whoever_used_it_least() -> None:
    world = World()
    world.used("much", 1.0)
    running, order = 0, []

    def work(tenant: str) -> str:
        nonlocal running
        running += 1
        assert running == 1
        order.append(tenant)
        running -= 1
        return tenant

    told: list[Awaitable[Any]] = [
        world.turns.aside(tenant, work, tenant) for tenant in ("first", "much", "some", "much")
    ]
    assert await asyncio.gather(*told) == ["first", "much", "some", "much"]
    assert order == ["first", "some", "much", "much"]
    with pytest.raises(ZeroDivisionError):
        await world.turns.aside("ann", lambda: 1 // 0)
    assert await world.turns.aside("ann", work, "ann") == "ann", "the error has not kept its place"


async def test_work_beside_the_loop_goes_on_when_one_that_was_called_is_cancelled() -> None:
    turns = World().turns
    go, running, most = threading.Event(), 0, 0

    def work(held: bool) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        assert not held or go.wait(10)
        time.sleep(0.002)
        running -= 1

    first, second, third = (
        asyncio.create_task(turns.aside(tenant, work, tenant == "first")) for tenant in ("first", "b", "c")
    )
    await iterations(3)
    first.add_done_callback(lambda _: second.cancel())  # in the iteration in which it is called
    first.add_done_callback(lambda _: late.append(asyncio.create_task(turns.aside("late", work, False))))
    late: list[asyncio.Task[None]] = []
    go.set()
    async with asyncio.timeout(10):
        await first
        await third
        await iterations(1)
        await asyncio.gather(*late)
    assert most == 1 and not turns._is_busy


async def test_errors_and_cancellation_reach_the_work_and_the_caller() -> None:
    world, seen = World(), []

    async def waits(turn: Turn) -> None:
        await turn.begin()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def fails(turn: Turn) -> None:
        await turn.begin()
        raise LookupError("nothing there")

    turn = world.turns.turn("ann")
    task = asyncio.ensure_future(asyncio.wait_for(turn.timed(waits(turn)), 0.01))
    with pytest.raises(TimeoutError):
        await task
    assert seen == ["cancelled"]
    turn = world.turns.turn("ann")
    with pytest.raises(LookupError):
        await turn.timed(fails(turn))
    assert not world.turns._served
