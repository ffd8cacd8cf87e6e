"""The turns of requests on the event loop: their order, how many begin at once, who is held or refused."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import orjson
import pytest

from undertow.serving.http.middleware import admission, fair_turns
from undertow.serving.http.middleware.admission import LEAST_WAITING, Admission
from undertow.serving.http.middleware.fair_turns import FairTurns, Turn
from undertow.serving.http.protocol import tenant_in
from undertow.serving.http.routes.json_pages import AT_ONCE, written
from undertow.serving.http.service_settings import ServiceSettings

from ...support.llm_servers import wait_until
from ...support.service.http import SOON_S, Running, at, is_problem, said, serving
from ...support.service.wire import Wire, request_head

pytestmark = pytest.mark.anyio
BOUNDS = {"body_timeout_s": 1.0}


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
    await asyncio.gather(*world.start("much", "much", "much", "some", "new"))
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


async def test_long_work_gives_way_to_lighter_requests_that_have_just_begun() -> None:
    world, served = World(), asyncio.Event()
    world.used("heavy", 5.0)
    await asyncio.wait_for(world.turns.give_way("heavy"), SOON_S)  # to nobody
    light = asyncio.create_task(world.request("light", served))
    await iterations(3)
    await asyncio.wait_for(world.turns.give_way("light"), SOON_S)
    held = asyncio.create_task(world.turns.give_way("heavy"))
    await asyncio.sleep(20 * fair_turns.GIVE_WAY_S)
    assert not held.done()
    served.set()
    await asyncio.wait_for(held, SOON_S)
    light = asyncio.create_task(world.request("light", asyncio.Event()))
    await iterations(3)
    held = asyncio.create_task(world.turns.give_way("heavy"))
    await iterations(3)
    assert not held.done()
    world.now_s = fair_turns.HELD_S
    await asyncio.wait_for(held, SOON_S)
    assert not light.done(), "nobody is given way to for longer"
    await asyncio.wait_for(world.turns.give_way("heavy"), SOON_S)  # nor at once again
    light.cancel()


async def test_parts_of_one_tenant_begin_in_iterations_of_their_own_and_count_as_its_use() -> None:
    world, parts, most = World(), list[int](), 0
    tasks = [asyncio.create_task(world.turns.give_way("heavy", 0.1)) for _ in range(10)]
    for task in tasks:
        task.add_done_callback(lambda _: parts.append(1))
    while not all(task.done() for task in tasks):
        before = len(parts)
        await asyncio.sleep(0)
        most = max(most, len(parts) - before)
    assert most == 1
    assert world.turns.use_of("heavy").rank == pytest.approx(math.log2(1.0), abs=1e-3)


async def test_a_large_answer_is_written_in_parts_between_which_it_gives_way() -> None:
    world = World()
    for count in (0, 1, AT_ONCE, AT_ONCE + 1, 5 * AT_ONCE):
        results, seen = [{"n": n, "text": "the “boat”"} for n in range(count)], list[int]()
        asyncio.get_running_loop().call_soon(seen.append, 1)
        for rest in ({}, {"next": None, "more": [1]}):
            written_in_parts = await written(world.turns, "ann", results, rest)
            assert written_in_parts == orjson.dumps({"results": results, **rest})
        shown = await written(world.turns, "ann", results, {}, lambda one: one["n"])
        assert orjson.loads(shown) == {"results": [*range(count)]}
        assert bool(seen) == (count > AT_ONCE), "others' callbacks have run in between"


async def test_a_few_requests_are_refused_in_one_iteration_and_each_in_the_end() -> None:
    world = World()
    done: list[None] = []

    async def refuse() -> None:
        done.append(await world.turns.refusal(""))  # type: ignore[func-returns-value]

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


@pytest.mark.parametrize(("each_s", "most"), [(0.0005, 96), (0.002, 50), (0.1, LEAST_WAITING)])
def test_so_many_may_wait_as_the_loop_begins_in_the_time(
    each_s: float, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, limits = 0.0, Admission(ServiceSettings(), print)
    monkeypatch.setattr(admission, "perf_counter", lambda: now_s)
    for count in (round(1 / each_s), 200):
        for leave in [limits.enter(b"ann") for _ in range(count)]:
            now_s += each_s
            leave()
        now_s += 3_600.0  # idle, which says nothing of the rate
    assert limits.most == pytest.approx(most, rel=0.05)


async def test_a_tenant_with_few_waiting_requests_is_not_refused_for_those_of_others() -> None:
    limits = Admission(ServiceSettings(), print)
    while not limits.refuses(b"hostile"):
        limits.enter(b"hostile")
    names = [b"%d" % n for n in range(10 * limits.most)]
    for n, name in enumerate(names):
        if not (refused := limits.refuses(name)):
            limits.enter(name)
        assert n > 10 or not refused
    assert limits.refuses(b"hostile") and limits.refuses(b"new")
    assert limits.waiting.total() <= 2 * limits.most


async def test_refusals_are_counted_and_told_together(caplog: pytest.LogCaptureFixture) -> None:
    told: list[int] = []
    limits = Admission(ServiceSettings(), told.append)
    leave, *_ = [limits.enter(b"ann") for _ in range(limits.most)]
    assert all(limits.refuses(b"ann") for _ in range(1_000)) and not caplog.records
    limits.tell()
    assert told == [record.fields["refused"] for record in caplog.records] == [1_000]  # type: ignore[attr-defined]
    leave()
    leave()
    assert limits.waiting.total() == limits.most - 1, "a place is left once"


def test_a_tenant_s_name_is_the_same_however_it_is_written() -> None:
    assert tenant_in(b"/v1/tenants/ann/search") == tenant_in(b"/v1/tenants/%61nn") == b"ann"
    assert tenant_in(b"/v1/tenants/a%2Fb/stats") == b"a/b"
    assert tenant_in(b"/mcp/%61nn") == b"ann"
    assert tenant_in(b"/v1/tenants") == tenant_in(b"/v1/tenants/") == tenant_in(b"/mcp") == b""


@pytest.fixture
def full(running: Running) -> Iterator[None]:
    """As many requests wait as may, each of another tenant: a stand-in for a loop with much to do."""
    limits = running.service.admission
    others = {b"waiting %d" % n: 1 for n in range(4_096)}
    limits.waiting.update(others)
    yield
    limits.waiting.subtract(others)
    limits.waiting += Counter()  # without those of none


BODY = b'{"query": "boat"}'


def asked(key: str, *more: str, method: str = "POST") -> bytes:
    headers = f"Content-Length: {len(BODY)}", "Content-Type: application/json", *more
    return request_head(key, *headers, path=at("ann", "/search"), method=method) + BODY


def hear(wire: Wire, line: bytes, count: int) -> None:
    """Responses to requests that were sent together, up to so many with this line."""
    heard = b""
    while heard.count(line) < count:
        part = wire.socket.recv(65_536)
        assert part, heard
        heard += part


@pytest.mark.usefixtures("full")
def test_in_overload_a_request_is_refused_unread_and_its_connection_goes_on(running: Running) -> None:
    refused = running.client().post(at("ann", "/search"), content=b" " * 100_000)
    assert is_problem(refused, 429, "overload")["detail"] == "Too many requests are under way. Try again."
    assert refused.headers["retry-after"] == "1"
    before = {*(connections := running.server.server_state.connections)}  # type: ignore[union-attr]
    with Wire(running) as wire:
        for _ in range(2):
            wire.socket.sendall(asked("no key, which is not looked at") * 2)
            hear(wire, b"HTTP/1.1 429", 2)
        wire.socket.sendall(asked("none", method="HEAD"))
        assert wire.socket.recv(65_536).endswith(b"\r\n\r\n")
        wire.socket.sendall(asked("none", "Connection: close"))
        assert wire.until_end().startswith(b"HTTP/1.1 429")
        wait_until(lambda: connections <= before)
    with Wire(running) as wire:
        wire.head("none", "Content-Length: 1000000")
        hear(wire, b"HTTP/1.1 429", 1)
        wire.socket.sendall(b"a")  # the rest of the body does not come in time
        wire.until_end()


@pytest.mark.usefixtures("full")
def test_in_overload_a_broken_request_that_is_refused_gets_one_response(running: Running) -> None:
    with Wire(running) as wire:
        wire.head("none", "Transfer-Encoding: chunked")
        wire.socket.sendall(b"no size of a chunk\r\n")
        assert wire.until_end().count(b"HTTP/1.1 ") == 1


def test_in_overload_who_reads_no_answers_is_cut_off(tmp_path: Path) -> None:
    """Refusals are longer than requests: they would fill the memory."""
    requests = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 10_000
    with serving(tmp_path, read_timeout_s=0.5) as running, Wire(running) as wire:
        running.service.admission.waiting.update({b"waiting %d" % n: 1 for n in range(4_096)})
        with pytest.raises(ConnectionError):
            for _ in range(100):  # far more than fits in the buffers of both sides
                wire.socket.sendall(requests)


@pytest.mark.usefixtures("full")
def test_in_overload_health_and_metrics_are_answered_and_tell_of_the_refusals(running: Running) -> None:
    client = running.client()
    for path in ("/health/live", "/health/ready", "/v1/status", "/metrics", "/metrics?x=1"):
        assert client.get(path).status_code == 200
    assert client.get("/v1/tenants").status_code == 429
    wait_until(lambda: 'undertow_http_refused_total{reason="overload"}' in client.get("/metrics").text)


def test_refusals_keep_no_places(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[int] = []
    told = AsyncMock(side_effect=lambda _: waiting.append(running.service.admission.waiting.total()))
    monkeypatch.setattr(FairTurns, "refusal", told)
    monkeypatch.setitem(running.service.load._counts, ("tenant", "ann"), 32)
    with Wire(running) as wire:
        for key, line in (("no key", b"HTTP/1.1 401"), (running.key(), b"HTTP/1.1 429")):
            wire.socket.sendall(asked(key))
            hear(wire, line, 1)
    assert waiting == [0, 0]


def test_requests_leave_their_places_whatever_becomes_of_them(running: Running) -> None:
    client = running.client()
    client.post(at("ann", "/memories"), json={"messages": said("the boat")})
    for path in ("/search", "/nowhere", "/export"):
        for by in (client, running.client_of(None)):
            by.post(at("ann", path), json={"query": "x"})
            by.get(at("ann", path))
    with Wire(running) as wire:
        wire.socket.sendall(asked(running.key()) * 3)
        hear(wire, b"HTTP/1.1 200", 3)
    wait_until(lambda: not running.service.admission.waiting)
