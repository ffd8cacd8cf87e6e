"""A shard client whose shard dies, refuses or fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any
from unittest.mock import AsyncMock

import pyarrow as pa
import pytest

from undertow.engine.base.model import UndertowError
from undertow.engine.cluster.routing import shard_client as shard_clients
from undertow.engine.cluster.routing.batch import ShardBatch
from undertow.engine.cluster.routing.errors import ShardDown, ShardExited, ShardGone
from undertow.engine.cluster.settings import ClusterSettings
from undertow.engine.cluster.shard.call_queue import CallQueues, CallStamp, SessionStart, TurnCall
from undertow.engine.cluster.wire import pack_turn
from undertow.engine.step.admission import QueueFull
from undertow.engine.storage.location import StoreError

from ...support.cluster.fake_shard import FakeShard, always_full, said
from ...support.cluster.shard_client import SETTINGS, Sent, in_use, put, with_client, with_clients
from ...support.engine import turn_of

pytestmark = pytest.mark.usefixtures("hasty")


@pytest.mark.parametrize("place", [0, 3, 7])
def test_the_turn_that_kills_is_found_among_others_and_parked(place: int) -> None:
    shard = FakeShard()
    texts = ["badger" if n == place else f"a{n}" for n in range(8)]

    async def work(sent: Sent) -> None:
        calls = [put(sent, "first"), put(sent, *texts), put(sent, "last")]
        assert await calls[1] == ["parked" if n == place else "stored" for n in range(8)]
        assert [await calls[0], await calls[2]] == [["stored"], ["stored"]]

    with_client(shard, work)
    assert shard.parked == said("badger")
    assert shard.stored == said("first", *(t for t in texts if t != "badger"), "last")
    # one with the others under way, then: the batch alone, its halves, and the turn three times
    assert shard.deaths <= 2 + 2 + 1 + 3


def test_a_shard_that_dies_without_a_turn_too_has_the_turn_acquitted() -> None:
    shard, four_times = FakeShard(dies_idle=1), iter([True] * 4)
    shard.kill_when = lambda _: next(four_times, False)

    async def work(sent: Sent) -> None:
        assert await put(sent, "innocent") == ["stored"]

    with_client(shard, work)
    assert not shard.parked
    assert shard.deaths == 5


class Entangled(FakeShard):
    """Dies of its word only while a call of another client is there too, if one comes at all.

    And an innocent call takes for as long as a deadly one is there.
    """

    async def is_due(self, client: str, call: TurnCall) -> bool:
        if not self._kills(call):
            entangled = any(self._kills(other) for _, other in self.inside)
            return not entangled and await super().is_due(client, call)
        for _ in range(20):
            if any(other != client for other, _ in self.inside):
                break
            await asyncio.sleep(0.001)
        return call in self.ready

    def _kills(self, call: TurnCall) -> bool:
        return any(self.deadly in turn.text for turn in call.turns)


class Gapped(FakeShard):
    """A call never comes to it, while the next one waits there for that; nor does the first hello then."""

    gaps = 2

    async def add(self, table: pa.Table, stamp: CallStamp) -> pa.Table:
        if self.gaps == 2:
            self.gaps -= 1
            while not self.inside:
                await asyncio.sleep(0.001)
            raise ShardGone("lost on its way")
        return await super().add(table, stamp)

    async def hello(self, client: str, map_version: int) -> SessionStart:
        if self.gaps == 1:
            self.gaps -= 1
            raise ShardGone("lost on its way")
        return await super().hello(client, map_version)


def test_a_call_that_never_comes_holds_its_successors_up_only_for_a_while() -> None:
    shard = Gapped()

    async def work(sent: Sent) -> None:
        first, second = put(sent, "a"), put(sent, "b")
        assert await first + await second == ["stored", "stored"]

    with_client(shard, work)
    assert shard.stored == said("a", "b")


def test_two_clients_whose_shard_dies_blame_only_the_turn_that_kills_it() -> None:
    shard = Entangled()

    async def work(guilty: Sent, innocent: Sent) -> None:
        calls = [put(guilty, "badger"), put(innocent, "b0"), put(innocent, "b1")]
        calls += [put(guilty, "a1"), put(innocent, "b2")]
        assert [await found for found in calls] == [["parked"], *4 * [["stored"]]]

    with_clients(shard, work, "guilty", "innocent")
    assert shard.parked == said("badger")
    assert sorted(shard.stored) == said("a1", "b0", "b1", "b2")
    assert shard.deaths == 1 + shard_clients.DEATHS + 1


def test_two_clients_find_their_own_culprits() -> None:
    shard = Entangled()

    async def work(*both: Sent) -> None:
        calls = [put(one, f"x{n}", f"badger {n}", f"y{n}") for n, one in enumerate(both)]
        assert [await found for found in calls] == [["stored", "parked", "stored"]] * 2

    with_clients(shard, work, "one", "other")
    assert sorted(shard.parked) == said("badger 0", "badger 1")


def test_losses_that_are_no_deaths_blame_no_turn() -> None:
    shard = FakeShard(loses=2 * shard_clients.DEATHS + 2)

    async def work(sent: Sent) -> None:
        assert await put(sent, "a") == ["duplicate"]
        assert sent.shard_client.deaths == 0

    with_client(shard, work)
    assert not shard.parked


def test_a_process_that_says_why_it_ends_blames_no_turn() -> None:
    shard, ends = FakeShard(), iter([True] * 3 * shard_clients.DEATHS)

    def leave(texts: list[str]) -> bool:
        if next(ends, False):
            with pytest.raises(ShardGone):
                shard.die()
            raise ShardExited("fenced")
        return False

    shard.kill_when = leave

    async def work(sent: Sent) -> None:
        assert await put(sent, "a") == ["stored"]

    with_client(shard, work)
    assert shard.deaths == 3 * shard_clients.DEATHS
    assert not shard.trials and not shard.parked


def failing(part: str) -> FakeShard:
    shard, error = FakeShard(), StoreError("disk full")
    setattr(shard, part, error if part == "broken" else AsyncMock(side_effect=error))
    return shard


@pytest.mark.parametrize("part", ["broken", "hello"])
def test_who_learns_of_an_error_may_add_again_at_once(part: str) -> None:
    async def work(sent: Sent) -> None:
        first, again = (ShardBatch.of([pack_turn(turn_of("ann", n, "a"))]) for n in range(2))
        first.pending.future.add_done_callback(lambda _: sent.shard_client.put(again))
        sent.held += 2
        sent.shard_client.put(first)
        for batch in (first, again):
            with pytest.raises(UndertowError, match="disk full"):
                await asyncio.wrap_future(batch.pending.future)

    with_client(failing(part), work)


@pytest.mark.parametrize("part", ["broken", "park"])
def test_an_error_of_the_shard_fails_what_is_behind_too_and_then_it_goes_on(part: str) -> None:
    shard = failing(part)

    async def work(sent: Sent) -> None:
        first = "badger" if part == "park" else "a"
        for found in [put(sent, text) for text in (first, *(f"a{n}" for n in range(7)))]:
            with pytest.raises(StoreError, match="disk full"):
                await found
        shard.broken = None
        assert await put(sent, "b") == ["stored"]

    with_client(shard, work)
    assert shard.stored == said("b")


def test_a_call_that_the_shard_never_takes_fails_those_that_wait_for_it_there() -> None:
    shard = FakeShard()
    add, refusals = shard.add, [ValueError("no turns")]

    async def refuse(table: Any, stamp: CallStamp) -> Any:
        if refusals:
            raise refusals.pop()
        return await add(table, stamp)

    shard.add = refuse  # type: ignore[method-assign]

    async def work(sent: Sent) -> None:
        for found in [put(sent, f"a{n}") for n in range(6)]:
            with pytest.raises(ValueError, match="no turns"):
                await found
        assert await put(sent, "b") == ["stored"]

    with_client(shard, work)
    assert shard.stored == said("b")


def test_a_shard_that_has_no_room_and_stores_nothing_fails_its_calls() -> None:
    shard = FakeShard()
    always_full(shard)

    async def work(sent: Sent) -> None:
        for found in [put(sent, "a"), put(sent, "b")]:
            with pytest.raises(QueueFull, match=r"s0 has had no room for 0\.01 s.*cluster status"):
                await found

    with_client(shard, work, ClusterSettings(patience_s=0.01))


def test_a_shard_that_has_no_room_but_stores_what_others_sent_is_waited_for() -> None:
    shard, add = FakeShard(), FakeShard.add
    always_full(shard)

    async def status() -> dict[str, Any]:
        shard.stored.append("another's")
        if len(shard.stored) == 3:
            shard.add = lambda *args: add(shard, *args)  # type: ignore[method-assign]
        return {"journal_rows": len(shard.stored)}

    shard.status = status  # type: ignore[method-assign]

    async def work(sent: Sent) -> None:
        assert await put(sent, "a") == ["stored"]

    with_client(shard, work, ClusterSettings(patience_s=0.01))
    assert len(shard.stored) == 4


def test_calls_at_a_process_that_was_replaced_and_never_answers_go_to_its_successor() -> None:
    shard, add = FakeShard(), FakeShard.add
    silent: list[str] = []

    async def stuck(table: Any, stamp: CallStamp) -> Any:
        if shard.stored and len(silent) < 2:
            silent.append(stamp.token)
            shard.lines = CallQueues(100)  # of another process, which takes all later calls
            await asyncio.sleep(60)
        return await add(shard, table, stamp)

    shard.add = stuck  # type: ignore[method-assign]

    async def work(sent: Sent) -> None:
        assert await put(sent, "0") == ["stored"]
        await asyncio.sleep(0.12)  # what comes next is sent by a client that has long waited for nothing
        for found in [put(sent, "a", "b"), put(sent, "c")]:
            assert set(await found) == {"stored"}

    with_client(shard, work, ClusterSettings(patience_s=0.05))
    assert shard.stored == said("0", "a", "b", "c") and len(silent) == 2


def test_a_shard_that_is_never_there_fails_its_calls_by_name() -> None:
    shard = FakeShard()
    shard.hello = lambda *_: asyncio.Future()  # type: ignore[assignment, method-assign]

    async def work(sent: Sent) -> None:
        with pytest.raises(ShardDown, match=r"shard s0 .*does not answer.*ray status"):
            await put(sent, "a")

    with_client(shard, work, ClusterSettings(patience_s=0.02))


@pytest.mark.parametrize("rounds", range(6))
def test_a_client_that_is_stopped_while_its_shard_answers_ends(rounds: int) -> None:
    """`wait_for` of Python 3.11 loses a cancellation that comes in the same moment as the answer."""

    async def stop_after(rounds: int) -> None:
        shard, loop = FakeShard(), asyncio.get_running_loop()
        answer = loop.create_future()
        answers = iter([answer])
        shard.hello = lambda *_: next(answers, loop.create_future())  # type: ignore[assignment, method-assign]
        sent = in_use(shard, "client", SETTINGS)
        found = put(sent, "a")
        for _ in range(5):
            await asyncio.sleep(0)
        answer.set_result(SessionStart("token", 1, "process"))
        for _ in range(rounds):
            await asyncio.sleep(0)
        await asyncio.wait_for(sent.shard_client.stop(), 5)
        with pytest.raises(UndertowError, match="closed"):
            await found

    asyncio.run(stop_after(rounds))


@pytest.mark.parametrize("rounds", range(4))
@pytest.mark.parametrize("error", [QueueFull("full"), ShardGone("gone")])
def test_a_client_that_is_stopped_as_a_call_fails_leaves_nothing_running(
    error: Exception, rounds: int
) -> None:
    """The call is over, so that it cannot be cancelled, and what follows it has not begun."""

    async def work() -> None:
        shard, loop = FakeShard(), asyncio.get_running_loop()
        answers = [loop.create_future(), loop.create_future()]
        waiting = iter(answers)

        def call(method: str, *args: Any) -> Awaitable[Any]:
            shard.calls.append(method)
            return next(waiting) if method == "add" else getattr(shard, method)(*args)

        shard.call = call  # type: ignore[method-assign, assignment]
        sent = in_use(shard, "client", SETTINGS)
        found = [put(sent, "a"), put(sent, "b")]
        while shard.calls.count("add") < 2:
            await asyncio.sleep(0)
        stopping = asyncio.create_task(sent.shard_client.stop())
        for _ in range(rounds):
            await asyncio.sleep(0)
        if not answers[0].done():
            answers[0].set_exception(error)
        await asyncio.wait_for(stopping, 5)
        for one in found:
            with pytest.raises(UndertowError, match="closed"):
                await one
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert shard.calls.count("add") == 2 and sent.shard_client.waiting_turns == 0

    asyncio.run(work())


def test_a_shard_that_says_why_it_cannot_serve_fails_its_calls_with_that() -> None:
    shard = FakeShard()
    shard.hello = AsyncMock(side_effect=StoreError("no such bucket"))  # type: ignore[method-assign]

    async def work(sent: Sent) -> None:
        with pytest.raises(UndertowError, match="no such bucket"):
            await put(sent, "a")

    with_client(shard, work)
