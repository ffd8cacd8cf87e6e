"""The router over shards in this process: one engine's memories, whatever dies or moves meanwhile."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from undertow.engine.api.engine import Engine
from undertow.engine.base.model import Turn, UndertowError
from undertow.engine.base.queries import SearchQuery
from undertow.engine.cluster import shard_map
from undertow.engine.cluster.resharding.coordinator import reshard
from undertow.engine.cluster.routing import shard_client as shard_clients
from undertow.engine.cluster.routing.router import Router
from undertow.engine.cluster.routing.shard_client import ShardClient
from undertow.engine.cluster.settings import ClusterSettings
from undertow.engine.cluster.wire import pack
from undertow.engine.step.admission import QueueFull
from undertow.engine.storage.location import Location, StoreError

from ...support.cluster.in_process import (
    PARTS,
    LocalCalls,
    LocalShards,
    begin,
    cluster_state,
    mock_llm,
    settings,
)
from ...support.cluster.router import SOON_S, meanwhile, routed, statuses
from ...support.engine import interleaved, turn_of
from ...support.faults.harness import State, assert_same_state, end_state, turns_of, write_log

TENANTS = tuple(f"tenant-{n}" for n in range(9))


Turns = Mapping[str, Sequence[Turn]]


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> Turns:
    return turns_of(write_log(tmp_path_factory.mktemp("log") / "log.jsonl", TENANTS, 26))


@pytest.fixture(scope="module")
def expected(turns: Turns, tmp_path_factory: pytest.TempPathFactory) -> State:
    """What one engine makes of the log."""
    store = tmp_path_factory.mktemp("plain") / "store"
    with Engine(store, settings(), PARTS.encoder(settings()), llm=mock_llm(settings())) as engine:
        for of_tenant in turns.values():
            engine.add_batch(of_tenant)
        assert engine.drain()
    state = end_state(store)
    assert {"merged", "fired", "waits", "parked", "episode", "fact"} <= state.kinds()
    return state


def submit(router: Router, line: Sequence[Turn], calls: Callable[[], int]) -> list[Future[pa.Table]]:
    """Send a line of turns in calls of so many, without waiting for receipts but where there is no room."""
    sent, start = [], 0
    while start < len(line):
        count = calls()
        while True:
            try:
                sent.append(router.submit_table(pack(line[start : start + count])))
                break
            except QueueFull:
                time.sleep(0.002)
        start += count
    return sent


# ---- the same memories


@pytest.mark.parametrize(("count", "seed"), [(1, 1), (2, 2), (4, 3)])
def test_any_number_of_shards_and_interleaving_gives_what_one_engine_gives(
    count: int, seed: int, turns: Turns, expected: State, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    root = begin(tmp_path / "root", count)
    line = interleaved(turns, seed)
    with LocalShards(root, settings()) as shards:
        with routed(root, shards, lane_turns=64, call_turns=7) as router:
            assert set(statuses(submit(router, line, lambda: rng.randint(1, 30)))) == {"stored"}
            assert router.drain()
            assert router.stats()["turns"] == len(line)
        if count > 1:
            assert len(shards.running) > 1
    assert_same_state(cluster_state(root), expected)


def test_many_clients_at_a_time(turns: Turns, expected: State, tmp_path: Path) -> None:
    root = begin(tmp_path / "root", 2)

    def feed(router: Router, tenant: str) -> Callable[[], object]:
        return lambda: statuses(submit(router, turns[tenant], lambda: 3))

    with (
        LocalShards(root, settings()) as shards,
        routed(root, shards, lane_turns=32) as router,
        routed(root, shards, window_turns=1) as other,
    ):
        with meanwhile(*(feed(r, t) for r, t in zip(9 * [router, other], turns, strict=False))):
            pass
        assert router.drain()
    assert_same_state(cluster_state(root), expected)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_shards_killed_at_any_moment(
    seed: int, turns: Turns, expected: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_clients, "COURTESY_S", 0.01)
    rng = random.Random(seed)
    root = begin(tmp_path / "root", 2)

    with LocalShards(root, settings()) as shards:

        def a_few() -> int:
            # by how far the line is, not by the clock: a fast machine would be done before the first kill
            if rng.random() < 0.3:
                shards.kill(rng.choice(["s0", "s1"]))
            return rng.randint(1, 12)

        with routed(root, shards, lane_turns=64, call_turns=16, window_turns=32) as router:
            found = statuses(submit(router, interleaved(turns, seed), a_few))
            assert set(found) <= {"stored", "duplicate"}
            assert router.drain()
            assert router.stats()["turns"] == len(found)
    assert shards.kills > 0
    assert_same_state(cluster_state(root), expected)


# ---- moving


@pytest.mark.parametrize(("seed", "kills"), [(1, False), (2, True)])
def test_tenants_move_while_turns_come_in(
    seed: int, kills: bool, turns: Turns, expected: State, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    root = begin(tmp_path / "root", 2)
    done = threading.Event()
    with LocalShards(root, settings()) as shards:

        def kill() -> None:
            while kills and not done.wait(rng.uniform(0.1, 0.5)) and shards.kills < 6:
                shards.kill(rng.choice(["s0", "s1", "s2"]))

        with routed(root, shards, lane_turns=48) as router, routed(root, shards) as mover:

            def move() -> None:
                for names in (["s0", "s1", "s2"], ["s1", "s2"]):
                    reshard(root, names, mover.ask_shard)

            with meanwhile(kill):
                with meanwhile(move):
                    sent = submit(router, interleaved(turns, seed), lambda: rng.randint(1, 4))
                    assert set(statuses(sent)) <= {"stored", "duplicate"}
                done.set()
            assert router.drain()
            name = TENANTS[0]
            assert router.search(name, turns[name][3].text, k_sub=1).turns[0].memory == turns[name][3].text
            assert set(router.status()) == {"s1", "s2"}
    assert shard_map.load(root).shards == ("s1", "s2")
    assert_same_state(cluster_state(root), expected)


def test_a_map_that_cannot_be_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant has moved; the store refuses for a while, and then for longer than the router waits."""
    root = begin(tmp_path / "root", 1)
    load, refusals, readers = shard_map.load, [0], set[str]()

    def reluctant(location: Location) -> shard_map.ShardMap:
        readers.add(threading.current_thread().name)
        if refusals[0] > 0:
            refusals[0] -= 1
            raise StoreError("503")
        return load(location)

    with (
        LocalShards(root, settings()) as shards,
        Router(root, shards.calls, ClusterSettings(patience_s=2)) as router,
        routed(root, shards) as mover,
    ):
        reshard(root, ["s0", "s1"], mover.ask_shard)
        first, second = [name for name in (f"name-{n}" for n in range(99)) if load(root).owner(name) == "s1"][
            :2
        ]
        monkeypatch.setattr(shard_map, "load", reluctant)
        refusals[0] = 1_000
        with pytest.raises(StoreError, match="503"):
            router.add_batch([turn_of(first, 0, "x")])
        refusals[0] = 3
        assert [r.seq for r in router.add_batch([turn_of(first, n, "x") for n in range(2)])] == [0, 1]
        assert [r.seq for r in router.add_batch([turn_of(second, 0, "x")])] == [0]
        assert refusals == [0]
        assert "router" not in readers, "the loop is not held up"


def test_a_shard_client_that_has_failed_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = begin(tmp_path / "root", 1)
    with LocalShards(root, settings()) as shards, routed(root, shards) as router:
        router.add_batch([turn_of("ann", 0, "x")])
        with monkeypatch.context() as patch:
            answers = [False]  # then a bug, in the client's own task
            patch.setattr(ShardClient, "_may_send", property(lambda _: answers.pop()))
            with pytest.raises(UndertowError, match="report"):
                router.submit_table(pack([turn_of("ann", 1, "x")])).result(SOON_S)
        assert [r.seq for r in router.add_batch([turn_of("ann", 1, "x")])] == [1]


# ---- Engine's other calls


class Counted:
    """A shard's calls, noted by their method."""

    def __init__(self, calls: LocalCalls, shard: str, asked: list[tuple[str, str]]) -> None:
        self._calls, self._shard, self._asked = calls, shard, asked

    async def call(self, method: str, *args: Any) -> Any:
        self._asked.append((self._shard, args[0].name if method == "ask" else method))
        return await self._calls.call(method, *args)


def test_a_deletion_asks_one_shard_or_each_of_them_once(turns: Turns, tmp_path: Path) -> None:
    root = begin(tmp_path / "root", 3)
    name, other = TENANTS[:2]
    asked: list[tuple[str, str]] = []
    with (
        LocalShards(root, settings()) as shards,
        Router(
            root, lambda s: Counted(shards.calls(s), s, asked), ClusterSettings(patience_s=SOON_S)
        ) as router,
    ):
        ids = [receipt.id or "" for receipt in router.add_batch(list(turns[name][:3]))]
        router.add_batch(list(turns[other][:1]))
        asked.clear()
        assert router.delete(ids[0], tenant=name) == "turn"
        assert asked == [(router.owners([name])[0], "delete")]
        with pytest.raises(UndertowError, match=f"no memory of '{other}'"):
            router.delete(ids[1], tenant=other)
        asked.clear()
        assert router.delete(ids[1]) == "turn"
        assert sorted(asked) == [(shard, "delete") for shard in ("s0", "s1", "s2")]
        with pytest.raises(UndertowError, match="no memory has"):
            router.delete(ids[1])
        assert router.stats()["turns"] == 2


def test_parked_jobs_of_all_shards_run_again(turns: Turns, tmp_path: Path) -> None:
    root = begin(tmp_path / "root", 2)
    with LocalShards(root, settings()) as shards, routed(root, shards) as router:
        router.add_batch([turn for of in turns.values() for turn in of])
        assert router.drain()
        parked = router.stats()["dead_letters"]
        assert router.replay_jobs() == parked > 0


def test_repeats_after_a_kill_act_once(turns: Turns, tmp_path: Path) -> None:
    root = begin(tmp_path / "root", 1)
    name = TENANTS[0]
    with LocalShards(root, settings()) as shards, routed(root, shards) as router:
        receipts = router.add_batch(list(turns[name]))
        # the shard does what it is asked, and dies before it can say so
        for work in (
            lambda: router.delete(receipts[3].id or ""),
            lambda: router.update(receipts[4].id or "", "a green boat", tenant=name),
            lambda: router.flush(name),
        ):
            shards.held.add("s0")
            with meanwhile(work):
                time.sleep(0.02)
                shards.held.clear()
                time.sleep(0.005)
                shards.kill("s0")
        assert router.drain()
        assert router.stats()["turns"] == len(receipts) - 1
        found = router.search(name, "a green boat", k_sub=99).turns
        assert sum(hit.memory.endswith("a green boat") for hit in found) == 1
        assert shards.kills == 3


def test_a_router_on_the_loop_of_a_service_changes_no_thread_and_leaves_the_loop_alone(
    tmp_path: Path,
) -> None:
    root = begin(tmp_path / "root", 2)
    threads: set[int] = set()

    class Noted(LocalCalls):
        async def call(self, method: str, *args: Any) -> Any:
            threads.add(threading.get_ident())
            return await super().call(method, *args)

    async def work(shards: LocalShards) -> None:
        loop = asyncio.get_running_loop()
        others = asyncio.create_task(asyncio.sleep(SOON_S))
        running = threading.active_count()
        narrow = ClusterSettings(patience_s=SOON_S, lane_turns=1)
        router = Router(root, lambda s: Noted(shards, s), narrow, loop=loop)
        assert threading.active_count() == running
        (receipt,) = await asyncio.wrap_future(router.begin_add([turn_of("ann", 0, "x")]))
        assert receipt.seq == 0
        shards.held |= {"s0", "s1"}
        sent, full = (router.begin_add([turn_of("ann", n, "x")]) for n in (1, 2))
        assert not sent.cancel() and isinstance(full.exception(0), QueueFull)
        shards.held.clear()
        while (again := router.begin_add([turn_of("ann", 1, "x")])).done():
            await asyncio.sleep(0.001)
        (receipt,) = await asyncio.wrap_future(again)
        assert receipt.duplicate and sent.done()
        shards.held |= {"s0", "s1"}
        left, late = (router.begin(SearchQuery("ann", "x")) for _ in range(2))
        await asyncio.sleep(0.01)
        assert left.cancel()
        await asyncio.to_thread(router.close)
        assert late.cancelled() and not others.done()
        with pytest.raises(UndertowError, match="was closed"):
            router.begin(SearchQuery("ann", "x"))
        others.cancel()

    with LocalShards(root, settings()) as shards:
        asyncio.run(work(shards))
    assert threads == {threading.get_ident()}
