"""A router's way to one shard, over a shard that is made up: order, windows, deaths and who is to blame."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from undertow.engine.base.model import UndertowError
from undertow.engine.cluster.routing import errors as reach
from undertow.engine.cluster.routing import shard_client as shard_clients
from undertow.engine.cluster.routing.batch import PendingAdd, ShardBatch, split
from undertow.engine.cluster.routing.errors import ShardDown, ShardExited, ShardGone
from undertow.engine.cluster.routing.shard_client import ShardClient
from undertow.engine.cluster.settings import ClusterSettings
from undertow.engine.cluster.shard.call_queue import CallStamp, SessionStart, TurnCall
from undertow.engine.cluster.shard_map import Removed
from undertow.engine.cluster.wire import Status, pack, receipts_table, unpack
from undertow.engine.step.admission import QueueFull
from undertow.engine.storage.location import StoreError

from ..support.cluster.fake_shard import FakeShard, always_full, said
from ..support.engine import turn_of

SETTINGS = ClusterSettings(window_turns=4, patience_s=5)


@dataclass
class Sent:
    """A lane in use: what was put, and what came back for other shards."""

    shard_client: ShardClient
    returned: list[tuple[list[str], dict[str, str]]] = field(default_factory=list)
    in_transit: set[str] = field(default_factory=set)
    # whether tenants are still away when their turns are sent anew
    stays_away: bool = False
    held: int = 0
    # what reading the map, and sending parcels anew, fails with
    no_map: Exception | None = None
    no_way: Exception | None = None


def in_use(shard: FakeShard, client: str, settings: ClusterSettings) -> Sent:
    def change(parcel: ShardBatch, others: Any) -> None:
        sent.held += len(others) - 1

    async def read_map() -> None:
        await asyncio.sleep(0)
        if sent.no_map is not None:
            raise sent.no_map

    def anew(parcels: Any, moved: dict[str, str], in_transit: AbstractSet[str]) -> None:
        if sent.no_way is not None:
            sent.held -= len(parcels)
            raise sent.no_way
        sent.returned.append(([t.text for p in parcels for t in unpack(p.table)], moved))
        sent.in_transit |= in_transit
        if not sent.stays_away:
            shard.away.clear()
        for parcel in parcels:
            sent.shard_client.put(parcel)

    shard_client = ShardClient(
        "s0",
        shard,
        client,
        settings,
        map_version=lambda: 1,
        on_change=change,
        read_map=read_map,
        on_returned=anew,
    )
    sent = Sent(shard_client)
    return sent


def with_lanes(
    shard: FakeShard,
    work: Callable[..., Coroutine[Any, Any, None]],
    *clients: str,
    settings: ClusterSettings = SETTINGS,
) -> None:
    """Run `work` with a lane to the shard for each client."""

    async def run() -> None:
        every = [in_use(shard, client, settings) for client in clients]
        try:
            await asyncio.wait_for(work(*every), 20)
            for sent in every:
                assert sent.shard_client.waiting_turns == 0
                assert sent.held == 0
        finally:
            for sent in every:
                await sent.shard_client.stop()

    asyncio.run(run())


def with_lane(
    shard: FakeShard, work: Callable[[Sent], Coroutine[Any, Any, None]], settings: ClusterSettings = SETTINGS
) -> None:
    with_lanes(shard, work, "client", settings=settings)


def put(sent: Sent, *texts: str, tenant: str = "ann") -> asyncio.Future[list[str]]:
    table = pack([turn_of(tenant, n, text) for n, text in enumerate(texts)])
    delivery = PendingAdd(len(texts))
    sent.held += 1
    sent.shard_client.put(ShardBatch(delivery, np.arange(len(texts)), table))

    async def statuses() -> list[str]:
        receipts = await asyncio.wrap_future(delivery.future)
        found: list[str] = receipts.column("status").to_pylist()
        return found

    return asyncio.ensure_future(statuses())


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_clients, "PROBATION_S", 0.02)
    monkeypatch.setattr(shard_clients, "COURTESY_S", 0.001)
    monkeypatch.setattr(reach, "SHORTEST_PAUSE_S", 0.001)
    monkeypatch.setattr(shard_clients, "REFUSAL_PATIENCE_S", 0.02)


def test_calls_are_stored_in_order_and_a_bounded_number_is_under_way() -> None:
    shard = FakeShard(full=7)

    async def work(sent: Sent) -> None:
        for found in [put(sent, f"a{n}", f"b{n}") for n in range(30)]:
            assert await found == ["stored", "stored"]

    with_lane(shard, work)
    assert shard.stored == said(*(text for n in range(30) for text in (f"a{n}", f"b{n}")))
    assert shard.most_under_way == 2  # of two turns each
    assert shard.hellos == 1


def test_small_calls_leave_places_at_the_shard_for_all_others() -> None:
    """Ray refuses calls beyond `max_pending_calls`: later ones must not take the places of one refused."""
    shard = FakeShard()
    add, pending = shard.add, [0]
    settings = ClusterSettings(max_pending_calls=16, window_calls=4, patience_s=5)

    async def limited(table: pa.Table, stamp: CallStamp) -> pa.Table:
        if pending[0] == settings.max_pending_calls:
            raise QueueFull("too many calls are pending")
        pending[0] += 1
        try:
            return await add(table, stamp)
        finally:
            pending[0] -= 1

    shard.add = limited  # type: ignore[method-assign]

    async def work(sent: Sent) -> None:
        for found in [put(sent, f"a{n}") for n in range(700)]:
            assert await found == ["stored"]

    with_lane(shard, work, settings)
    assert shard.stored == said(*(f"a{n}" for n in range(700)))
    assert shard.most_under_way == 4


def test_who_waits_for_a_lane_that_is_stopped_is_told() -> None:
    async def never(table: pa.Table, stamp: CallStamp) -> pa.Table:
        await asyncio.sleep(60)

    shard = FakeShard()
    shard.add = never  # type: ignore[method-assign]

    async def work(sent: Sent) -> None:
        waiting = [put(sent, f"a{n}") for n in range(8)]
        await asyncio.sleep(0.05)
        await sent.shard_client.stop()
        told = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(one, UndertowError) and "closed" in str(one) for one in told)
        sent.shard_client.waiting_turns = sent.held = 0

    with_lane(shard, work)


def test_what_was_under_way_at_a_death_is_sent_again_before_all_else() -> None:
    shard = FakeShard()
    fatal = {said("a5")[0], said("a11")[0]}

    def once(texts: list[str]) -> bool:
        found = fatal & set(texts)
        fatal.difference_update(found)
        return bool(found)

    shard.kill_when = once

    async def work(sent: Sent) -> None:
        for found in [put(sent, f"a{n}") for n in range(20)]:
            assert await found == ["stored"]
        assert sent.shard_client.deaths == 2

    with_lane(shard, work)
    assert shard.stored == said(*(f"a{n}" for n in range(20)))
    assert not shard.parked


@pytest.mark.parametrize("place", [0, 3, 7])
def test_the_turn_that_kills_is_found_among_others_and_parked(place: int) -> None:
    shard = FakeShard()
    texts = ["badger" if n == place else f"a{n}" for n in range(8)]

    async def work(sent: Sent) -> None:
        calls = [put(sent, "first"), put(sent, *texts), put(sent, "last")]
        assert await calls[1] == ["parked" if n == place else "stored" for n in range(8)]
        assert [await calls[0], await calls[2]] == [["stored"], ["stored"]]

    with_lane(shard, work)
    assert shard.parked == said("badger")
    assert shard.stored == said("first", *(t for t in texts if t != "badger"), "last")
    # one with the others under way, then: the parcel alone, its halves, and the turn three times
    assert shard.deaths <= 2 + 2 + 1 + 3


def test_a_shard_that_dies_without_a_turn_too_has_the_turn_acquitted() -> None:
    shard = FakeShard(dies_idle=1)
    left = [4]

    def four_times(texts: list[str]) -> bool:
        left[0] -= 1
        return left[0] >= 0

    shard.kill_when = four_times

    async def work(sent: Sent) -> None:
        assert await put(sent, "innocent") == ["stored"]

    with_lane(shard, work)
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


def test_two_lanes_whose_shard_dies_blame_only_the_turn_that_kills_it() -> None:
    shard = Entangled()

    async def work(guilty: Sent, innocent: Sent) -> None:
        calls = [put(guilty, "badger"), put(innocent, "b0"), put(innocent, "b1")]
        calls += [put(guilty, "a1"), put(innocent, "b2")]
        assert [await found for found in calls] == [
            ["parked"], ["stored"], ["stored"], ["stored"], ["stored"]
        ]  # fmt: skip

    with_lanes(shard, work, "guilty", "innocent")
    assert shard.parked == said("badger")
    assert sorted(shard.stored) == said("a1", "b0", "b1", "b2")
    assert shard.deaths == 1 + shard_clients.DEATHS + 1


def test_two_lanes_find_their_own_culprits() -> None:
    shard = Entangled()

    async def work(*both: Sent) -> None:
        calls = [put(one, f"x{n}", f"badger {n}", f"y{n}") for n, one in enumerate(both)]
        assert [await found for found in calls] == [["stored", "parked", "stored"]] * 2

    with_lanes(shard, work, "one", "other")
    assert sorted(shard.parked) == said("badger 0", "badger 1")


def test_losses_that_are_no_deaths_blame_no_turn() -> None:
    shard = FakeShard(loses=2 * shard_clients.DEATHS + 2)

    async def work(sent: Sent) -> None:
        assert await put(sent, "a") == ["duplicate"]
        assert sent.shard_client.deaths == 0

    with_lane(shard, work)
    assert not shard.parked


def test_a_process_that_says_why_it_ends_blames_no_turn() -> None:
    shard = FakeShard()
    left = [3 * shard_clients.DEATHS]

    def leave(texts: list[str]) -> bool:
        if left[0]:
            left[0] -= 1
            with pytest.raises(ShardGone):
                shard.die()
            raise ShardExited("fenced")
        return False

    shard.kill_when = leave

    async def work(sent: Sent) -> None:
        assert await put(sent, "a") == ["stored"]

    with_lane(shard, work)
    assert shard.deaths == 3 * shard_clients.DEATHS
    assert not shard.trials and not shard.parked


def test_turns_for_a_shard_that_was_removed_find_their_way_anew() -> None:
    shard = FakeShard()
    removed = [Removed("s0", 5)]

    async def gone(client: str, map_version: int) -> SessionStart:
        if removed:
            raise removed.pop()
        return await FakeShard.hello(shard, client, map_version)

    shard.hello = gone  # type: ignore[method-assign]

    async def work(sent: Sent) -> None:
        calls = [put(sent, "a0"), put(sent, "a1")]
        assert [await found for found in calls] == [["stored"]] * 2
        assert [texts for texts, _ in sent.returned] == [said("a0", "a1")]

    with_lane(shard, work)


def test_returned_turns_are_sent_anew_in_order_with_all_that_waits() -> None:
    shard = FakeShard(away={"bob": (Status.MOVED, "s1")})

    async def work(sent: Sent) -> None:
        calls = []
        for n in range(10):
            calls += [put(sent, f"a{n}"), put(sent, f"b{n}", tenant="bob")]
        for found in calls:
            assert await found == ["stored"]
        ((texts, moved),) = sent.returned
        assert moved == {"bob": "s1"}
        assert [t for t in texts if " b" in t] == said(*(f"b{n}" for n in range(10)))

    with_lane(shard, work)
    for letter in "ab":
        mine = [t for t in shard.stored if f" {letter}" in t]
        assert mine == said(*(f"{letter}{n}" for n in range(10)))


def test_turns_in_transit_are_sent_again_to_the_same_shard() -> None:
    shard = FakeShard(away={"bob": (Status.IN_TRANSIT, "s1")})

    async def work(sent: Sent) -> None:
        calls = [put(sent, "a0"), put(sent, "b0", tenant="bob"), put(sent, "b1", tenant="bob")]
        assert [await found for found in calls] == [["stored"]] * 3
        assert sent.returned[0][1] == {}
        assert sent.in_transit == {"bob"}

    with_lane(shard, work)
    assert shard.stored == said("a0", "b0", "b1")


def test_turns_that_come_back_for_longer_than_our_patience_fail_with_the_cure() -> None:
    shard = FakeShard(away={"bob": (Status.IN_TRANSIT, "s1")})

    async def work(sent: Sent) -> None:
        sent.stays_away = True
        with pytest.raises(UndertowError, match="cluster move"):
            await put(sent, "b", tenant="bob")
        assert await put(sent, "a") == ["stored"]

    with_lane(shard, work, ClusterSettings(patience_s=0.02))


def test_an_error_of_the_shard_fails_what_is_behind_too_and_then_it_goes_on() -> None:
    shard = FakeShard(broken=StoreError("disk full"))

    async def work(sent: Sent) -> None:
        for found in [put(sent, f"a{n}") for n in range(8)]:
            with pytest.raises(StoreError, match="disk full"):
                await found
        shard.broken = None
        assert await put(sent, "b") == ["stored"]

    with_lane(shard, work)
    assert shard.stored == said("b")


def test_a_call_that_the_shard_never_takes_fails_those_that_wait_for_it_there() -> None:
    shard = FakeShard()
    add, refusals = shard.add, [ValueError("no turns")]

    async def refuse(table: pa.Table, stamp: CallStamp) -> pa.Table:
        if refusals:
            raise refusals.pop()
        return await add(table, stamp)

    shard.add = refuse  # type: ignore[method-assign]

    async def work(sent: Sent) -> None:
        for found in [put(sent, f"a{n}") for n in range(6)]:
            with pytest.raises(ValueError, match="no turns"):
                await found
        assert await put(sent, "b") == ["stored"]

    with_lane(shard, work)
    assert shard.stored == said("b")


def test_a_shard_that_has_no_room_and_stores_nothing_fails_its_calls() -> None:
    shard = FakeShard()
    always_full(shard)

    async def work(sent: Sent) -> None:
        for found in [put(sent, "a"), put(sent, "b")]:
            with pytest.raises(QueueFull, match=r"s0 has had no room for 0\.01 s.*cluster status"):
                await found

    with_lane(shard, work, ClusterSettings(patience_s=0.01))


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

    with_lane(shard, work, ClusterSettings(patience_s=0.01))
    assert len(shard.stored) == 4


def test_a_shard_that_is_never_there_fails_its_calls_by_name() -> None:
    shard = FakeShard()

    async def hello(client: str, map_version: int) -> SessionStart:
        return await asyncio.Future[SessionStart]()

    shard.hello = hello  # type: ignore[method-assign]

    async def work(sent: Sent) -> None:
        with pytest.raises(ShardDown, match=r"shard s0 .*does not answer.*ray status"):
            await put(sent, "a")

    with_lane(shard, work, ClusterSettings(patience_s=0.02))


def test_a_shard_that_says_why_it_cannot_serve_fails_its_calls_with_that() -> None:
    shard = FakeShard()

    async def refuse(client: str, map_version: int) -> SessionStart:
        raise StoreError("no such bucket")

    shard.hello = refuse  # type: ignore[method-assign]

    async def work(sent: Sent) -> None:
        with pytest.raises(UndertowError, match="no such bucket"):
            await put(sent, "a")

    with_lane(shard, work)


@pytest.mark.parametrize("place", ["no_map", "no_way"])
def test_returned_turns_that_find_no_way_fail_and_the_lane_goes_on(place: str) -> None:
    shard = FakeShard(away={"bob": (Status.MOVED, "s1")})

    async def work(sent: Sent) -> None:
        setattr(sent, place, StoreError("503"))
        calls = [put(sent, "b0", tenant="bob"), put(sent, "a0"), put(sent, "b1", tenant="bob")]
        calls += [put(sent, f"c{n}", tenant="bob") for n in range(8)]
        failed = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(one, StoreError) for one in failed] == [n != 1 for n in range(11)]
        shard.away.clear()
        setattr(sent, place, None)
        assert await put(sent, "b0", "b1", tenant="bob") == ["stored", "stored"]
        assert not sent.returned

    with_lane(shard, work)
    assert shard.stored == said("a0", "b0", "b1")


def test_turns_put_while_the_map_is_read_stay_behind_those_that_came_back() -> None:
    shard = FakeShard(away={"bob": (Status.MOVED, "s1")})

    async def work(sent: Sent) -> None:
        later: list[asyncio.Future[list[str]]] = []

        async def read_map() -> None:
            later.append(put(sent, "b1", tenant="bob"))
            await asyncio.sleep(0.01)

        sent.shard_client._read_map = read_map
        assert await put(sent, "b0", tenant="bob") == ["stored"]
        assert [await found for found in later] == [["stored"]]
        assert [texts for texts, _ in sent.returned] == [said("b0", "b1")]

    with_lane(shard, work)
    assert shard.stored == said("b0", "b1")


def test_a_turn_that_can_be_neither_stored_nor_parked_fails_what_is_behind_it() -> None:
    shard = FakeShard()

    async def refuse(table: pa.Table, reason: str) -> int:
        raise StoreError("disk full")

    shard.park = refuse  # type: ignore[method-assign]

    async def work(sent: Sent) -> None:
        for found in [put(sent, "badger"), put(sent, "a0"), put(sent, "a1")]:
            with pytest.raises(StoreError, match="disk full"):
                await found
        assert await put(sent, "b") == ["stored"]

    with_lane(shard, work)
    assert shard.stored == said("b")


def test_a_lane_that_fails_leaves_nobody_waiting() -> None:
    shard = FakeShard()

    async def work(sent: Sent) -> None:
        def broken() -> None:
            raise RuntimeError("a bug")

        sent.shard_client._regroup = broken  # type: ignore[assignment]
        shard.broken = StoreError("disk full")
        calls = [put(sent, f"a{n}") for n in range(8)]
        failed = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(failed[0], StoreError)
        assert all(isinstance(one, UndertowError) for one in failed)
        assert "a bug" in str(failed[-1])
        assert sent.shard_client.ended

    with_lane(shard, work)


def test_a_parcel_is_cut_by_shard_and_size_and_its_receipts_put_together() -> None:
    names = ["ann", "bob", "cyd"] * 5
    delivery = PendingAdd(15)
    whole = ShardBatch(
        delivery, np.arange(15), pack([turn_of(name, n, f"w{n}") for n, name in enumerate(names)])
    )
    key_of = {"ann": "x", "bob": "y", "cyd": "x"}
    parts = split(whole, lambda tenants: [key_of[tenant] for tenant in tenants], 4)
    assert [(key, len(part)) for key, part in parts] == [("x", 4), ("x", 4), ("x", 2), ("y", 4), ("y", 1)]
    for _, part in reversed(parts):
        assert not delivery.future.done()
        rows = [(Status.STORED, turn.text, None, None) for turn in unpack(part.table)]
        assert part.settle(receipts_table(rows)) is None
    ids = delivery.future.result(0).column("id").to_pylist()
    assert ids == said(*(f"w{n}" for n in range(15)))
