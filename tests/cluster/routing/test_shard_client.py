"""A router's way to one shard, over a shard that is made up: order, windows, deaths and who is to blame."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from undertow.engine.base.model import UndertowError
from undertow.engine.cluster.routing.batch import PendingAdd, ShardBatch, split
from undertow.engine.cluster.settings import ClusterSettings
from undertow.engine.cluster.shard.call_queue import CallStamp, SessionStart
from undertow.engine.cluster.shard_map import Removed
from undertow.engine.cluster.wire import Status, pack, pack_turn, receipts_table, unpack, unpack_receipts
from undertow.engine.step.admission import QueueFull
from undertow.engine.storage.location import StoreError

from ...support.cluster.fake_shard import FakeShard, said
from ...support.cluster.shard_client import Sent, put, with_client
from ...support.engine import turn_of

pytestmark = pytest.mark.usefixtures("hasty")


def test_calls_are_stored_in_order_and_a_bounded_number_is_under_way() -> None:
    shard = FakeShard(full=7)

    async def work(sent: Sent) -> None:
        for found in [put(sent, f"a{n}", f"b{n}") for n in range(30)]:
            assert await found == ["stored", "stored"]

    with_client(shard, work)
    assert shard.stored == said(*(text for n in range(30) for text in (f"a{n}", f"b{n}")))
    assert shard.most_under_way == 2  # of two turns each
    assert shard.hellos == 1


@pytest.mark.parametrize("window", [{"window_calls": 4}, {}])
def test_small_calls_leave_places_at_the_shard_for_all_others(window: dict[str, Any]) -> None:
    """Ray refuses calls beyond `max_pending_calls`: later ones must not take the places of one refused."""
    shard = FakeShard()
    settings = ClusterSettings(max_pending_calls=16, patience_s=5, **window)
    add, places = shard.add, asyncio.Semaphore(settings.max_pending_calls)

    async def limited(table: Any, stamp: CallStamp) -> Any:
        if places.locked():
            raise QueueFull("too many calls are pending")
        async with places:
            return await add(table, stamp)

    shard.add = limited  # type: ignore[method-assign]

    async def work(sent: Sent) -> None:
        for found in [put(sent, f"a{n}") for n in range(700)]:
            assert await found == ["stored"]

    with_client(shard, work, settings)
    assert shard.stored == said(*(f"a{n}" for n in range(700)))
    assert shard.most_under_way == 4


def test_a_stopped_client_fails_what_waits() -> None:
    async def never(table: Any, stamp: CallStamp) -> Any:
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

    with_client(shard, work)


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

    with_client(shard, work)
    assert shard.stored == said(*(f"a{n}" for n in range(20)))
    assert not shard.parked


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

    with_client(shard, work)


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

    with_client(shard, work)
    for letter in "ab":
        mine = [t for t in shard.stored if f" {letter}" in t]
        assert mine == said(*(f"{letter}{n}" for n in range(10)))


def test_turns_that_come_back_for_longer_than_our_patience_fail_with_the_cure() -> None:
    shard = FakeShard(away={"bob": (Status.IN_TRANSIT, "s1")})

    async def work(sent: Sent) -> None:
        sent.stays_away = True
        with pytest.raises(UndertowError, match="cluster move"):
            await put(sent, "b", tenant="bob")
        assert await put(sent, "a") == ["stored"]

    with_client(shard, work, ClusterSettings(patience_s=0.02))


@pytest.mark.parametrize("place", ["no_map", "no_way"])
def test_returned_turns_that_find_no_way_fail_and_the_client_goes_on(place: str) -> None:
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

    with_client(shard, work)
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

    with_client(shard, work)
    assert shard.stored == said("b0", "b1")


def test_a_client_that_fails_fails_all_its_batches() -> None:
    shard = FakeShard()

    async def work(sent: Sent) -> None:
        sent.shard_client._regroup = Mock(side_effect=RuntimeError("a bug"))  # type: ignore[method-assign]
        shard.broken = StoreError("disk full")
        calls = [put(sent, f"a{n}") for n in range(8)]
        failed = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(failed[0], StoreError)
        assert all(isinstance(one, UndertowError) for one in failed)
        assert "a bug" in str(failed[-1])
        assert sent.shard_client.ended

    with_client(shard, work)


def test_a_list_of_turns_is_split_and_returned_like_a_table() -> None:
    names = ["ann", "bob", "cyd", "bob"]
    whole = ShardBatch.of([pack_turn(turn_of(name, n, f"w{n}")) for n, name in enumerate(names)])
    assert whole.tenants == ["ann", "bob", "cyd"]
    assert split(whole, lambda tenants: ["x"] * len(tenants), 4) == [("x", whole)]
    bobs, others = (part for _, part in split(whole, lambda ts: [t != "bob" for t in ts], 4)[::-1])
    back = others.settle([(Status.STORED, "id-0", 0, None), (Status.MOVED, None, None, "s1")])
    assert back is not None and back.moved == {"cyd": "s1"} and back.batch.tenants == ["cyd"]
    assert bobs.settle([(Status.STORED, "id-1", 0, None), (Status.DUPLICATE, None, None, None)]) is None
    assert not whole.pending.future.done()
    assert back.batch.settle(receipts_table([(Status.STORED, "id-2", 0, None)])) is None
    receipts = unpack_receipts(whole.pending.future.result(0), names)
    assert [(r.tenant, r.id, r.duplicate) for r in receipts] == [
        ("ann", "id-0", False),
        ("bob", "id-1", False),
        ("cyd", "id-2", False),
        ("bob", None, True),
    ]


def test_a_batch_is_split_by_shard_and_size_and_its_receipts_are_joined() -> None:
    names = ["ann", "bob", "cyd"] * 5
    pending = PendingAdd(15)
    whole = ShardBatch(
        pending, np.arange(15), pack([turn_of(name, n, f"w{n}") for n, name in enumerate(names)])
    )
    key_of = {"ann": "x", "bob": "y", "cyd": "x"}
    parts = split(whole, lambda tenants: [key_of[tenant] for tenant in tenants], 4)
    assert [(key, len(part)) for key, part in parts] == [("x", 4), ("x", 3), ("x", 3), ("y", 3), ("y", 2)]
    for _, part in reversed(parts):
        assert not pending.future.done()
        rows = [(Status.STORED, turn.text, None, None) for turn in unpack(part.table)]
        assert part.settle(receipts_table(rows)) is None
    ids = pending.future.result(0).column("id").to_pylist()
    assert ids == said(*(f"w{n}" for n in range(15)))
