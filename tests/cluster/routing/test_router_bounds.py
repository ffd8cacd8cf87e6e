"""Routers over made-up shards: transit, patience, circles."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from undertow.engine.base.queries import DrainCommand, SearchQuery
from undertow.engine.cluster import shard_map
from undertow.engine.cluster.routing import router as routers
from undertow.engine.cluster.routing import shard_pool
from undertow.engine.cluster.routing.errors import ShardDown
from undertow.engine.cluster.routing.router import Router
from undertow.engine.cluster.settings import ClusterSettings
from undertow.engine.cluster.shard_map import Removed
from undertow.engine.cluster.wire import Status, pack
from undertow.engine.step.admission import QueueFull
from undertow.engine.storage.location import Location
from undertow.engine.tenants.migration_records import Moved

from ...support.cluster.fake_shard import FakeShard, said
from ...support.cluster.in_process import LocalShards, begin, settings
from ...support.cluster.router import SOON_S, meanwhile, routed, statuses
from ...support.engine import turn_of

# ---- bounds, and shards that do not answer


def owned(root: Location, shard: str) -> str:
    keys = shard_map.load(root)
    return next(name for n in range(100) if keys.owner(name := f"tenant-{n}") == shard)


def test_a_shard_that_hangs_does_not_stall_the_others(tmp_path: Path) -> None:
    root = begin(tmp_path / "root", 2)
    stuck, free = owned(root, "s0"), owned(root, "s1")
    with LocalShards(root, settings()) as shards, routed(root, shards, lane_turns=32) as router:
        shards.held.add("s0")
        waiting = [router.submit_table(pack([turn_of(stuck, n, f"w{n}")])) for n in range(32)]
        with pytest.raises(QueueFull):
            router.submit_table(pack([turn_of(stuck, 99, "x")]))
        with pytest.raises(QueueFull):
            router.begin_add([turn_of(stuck, 99, "x")]).result(SOON_S)
        for n in range(40):
            assert not router.add_batch([turn_of(free, n, f"w{n}")])[0].duplicate
        assert router.search(free, "w3").turns
        assert not any(future.done() for future in waiting)
        late: list[Any] = []
        with meanwhile(lambda: late.extend(router.add_batch([turn_of(stuck, 32, "last")]))):
            time.sleep(0.05)
            assert not late
            shards.held.clear()
        seqs = [future.result(SOON_S).column("seq")[0].as_py() for future in waiting]
        assert [*seqs, late[0].seq] == list(range(33))


def test_a_shard_that_stays_down_fails_its_calls_and_no_others(tmp_path: Path) -> None:
    root = begin(tmp_path / "root", 2)
    lost, kept = owned(root, "s0"), owned(root, "s1")
    with LocalShards(root, settings()) as shards:
        shards.down.add("s0")
        shards.shard("s1").hello("first", 1).result(SOON_S)  # its start is not what is to be waited for
        with Router(root, shards.calls, ClusterSettings(patience_s=1)) as router:
            with pytest.raises(ShardDown, match="s0"):
                router.add_batch([turn_of(lost, 0, "x"), turn_of(kept, 0, "x")])
            with pytest.raises(ShardDown, match="s0"):
                router.search(lost, "x")
            state = router.status()
            assert state["s0"]["state"] == "unreachable" and "down" in state["s0"]["failure"]
            assert state["s1"]["state"] == "serving"
            receipts = router.add_batch([turn_of(kept, 0, "x"), turn_of(kept, 1, "y")])
            assert [r.duplicate for r in receipts] == [True, False]
            shards.down.clear()
            shards.shard("s0").hello("first", 1).result(SOON_S)
            assert [r.seq for r in router.add_batch([turn_of(lost, 0, "x")])] == [0]


# ---- shards that are made up


def over(root: Location, shards: Mapping[str, FakeShard], patience_s: float) -> Router:
    return Router(root, shards.__getitem__, ClusterSettings(patience_s=patience_s, call_turns=4))


def test_tenants_in_transit_wait_and_hold_nobody_up(
    tmp_path: Path, calls_of: Callable[..., list[list[str]]]
) -> None:
    root = begin(tmp_path / "root", 1)
    shard = FakeShard(away={"bob": (Status.IN_TRANSIT, "s1")})
    sorted_batches = calls_of(shard_pool, "split", lambda batch, *_: batch.tenants)
    with over(root, {"s0": shard}, SOON_S) as router:
        bobs = [router.submit_table(pack([turn_of("bob", 0, "b0")]))]
        anns = [router.submit_table(pack([turn_of("ann", n, f"a{n}")])) for n in range(200)]
        bobs += [router.submit_table(pack([turn_of("bob", n, f"b{n}")])) for n in range(1, 9)]
        assert set(statuses(anns)) == {"stored"}
        returned = shard.returned
        while shard.returned < returned + 3:  # it is asked again and again, with nothing else on the way
            time.sleep(0.001)
        assert not any(future.done() for future in bobs)
        assert router.status()["s0"]["sent_turns"] == 9
        shard.away.clear()
        assert set(statuses(bobs)) == {"stored"}
        assert statuses([router.submit_table(pack([turn_of("bob", 9, "b9")]))]) == ["stored"]
    assert [t for t in shard.stored if " a" in t] == said(*(f"a{n}" for n in range(200)))
    assert [t for t in shard.stored if " b" in t] == said(*(f"b{n}" for n in range(10)))
    of_ann = sum(tenants.count("ann") for tenants in sorted_batches)
    assert of_ann <= 2 * 200, "when it is sent, and once behind what came back"


def test_turns_that_wait_at_a_shard_which_is_then_removed_go_to_the_new_shard(tmp_path: Path) -> None:
    """The shard ends before it can say where their tenant is."""
    root = begin(tmp_path / "root", 2)
    name = owned(root, "s0")
    leaving, other = FakeShard(away={name: (Status.IN_TRANSIT, "s1")}), FakeShard()
    with over(root, {"s0": leaving, "s1": other}, SOON_S) as router:
        calls = [router.submit_table(pack([turn_of(name, n, f"a{n}")])) for n in range(9)]
        while leaving.returned < 3:
            time.sleep(0.001)
        new = shard_map.load(root).toward(["s1"])
        while new.before is not None:
            shard_map.publish(root, new)
            new = new.after()
        shard_map.publish(root, new)
        leaving.call = AsyncMock(side_effect=Removed("s0", new.version))  # type: ignore[method-assign]
        assert set(statuses(calls)) == {"stored"}
        assert statuses([router.submit_table(pack([turn_of(name, 9, "a9")]))]) == ["stored"]
    assert leaving.stored == [] and other.stored == said(*(f"a{n}" for n in range(10)))


def test_a_shard_that_never_starts_fails_the_calls_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routers, "PING_S", 0.01)
    with over(begin(tmp_path / "root", 1), {"s0": Unstarted()}, 0.05) as router:
        for work in (
            lambda: router.search("ann", "x"),
            lambda: router.flush("ann"),
            lambda: router.delete("m"),
            lambda: router.delete("m", tenant="ann"),
            router.stats,
            router.drain,
        ):
            with pytest.raises(ShardDown, match=r"shard s0 .* its process does not answer.*ray status"):
                work()


def test_a_call_may_take_its_time_while_the_shard_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routers, "PING_S", 0.001)
    with over(begin(tmp_path / "root", 1), {"s0": Slow()}, 0.05) as router:
        assert router.drain()


def test_shards_that_send_a_question_round_in_circles_fail_it(tmp_path: Path) -> None:
    root = begin(tmp_path / "root", 2)
    shards = {"s0": Circular("s1"), "s1": Circular("s0")}
    with over(root, shards, 0.2) as router, pytest.raises(ShardDown, match="lives at"):
        router.search("ann", "x")
    # the waits between: 20 ms and then twice that, and so on
    assert sum(len(shard.calls) for shard in shards.values()) <= 6


def test_a_tenant_is_not_asked_for_at_a_shard_that_is_no_more(tmp_path: Path) -> None:
    root = begin(tmp_path / "root", 1)
    with over(root, {"s0": Circular("s9")}, 0.05) as router, pytest.raises(ShardDown, match=r"s0 .*lives at"):
        router.search("ann", "x")


class Unstarted(FakeShard):
    async def call(self, method: str, *args: Any) -> Any:
        return await asyncio.Future[Any]()


class Slow(FakeShard):
    """Is drained once it has been pinged often enough."""

    async def ask(self, call: DrainCommand) -> bool:
        while self.calls.count("ping") < 5:
            await asyncio.sleep(0.001)
        return True


class Circular(FakeShard):
    """Knows no tenant, and says who does."""

    def __init__(self, to: str) -> None:
        super().__init__()
        self.to = to

    async def ask(self, call: SearchQuery) -> Any:
        raise Moved(call.tenant, self.to)
