"""The router over shards in this process: one engine's memories, whatever dies or moves meanwhile."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from undertow.engine.api.engine import Engine
from undertow.engine.base.model import Turn, UndertowError
from undertow.engine.base.queries import DrainCommand, SearchQuery
from undertow.engine.cluster import shard_map
from undertow.engine.cluster.resharding.coordinator import reshard
from undertow.engine.cluster.routing import router as routers
from undertow.engine.cluster.routing import shard_client as shard_clients
from undertow.engine.cluster.routing import shard_pool
from undertow.engine.cluster.routing.batch import ShardBatch, split
from undertow.engine.cluster.routing.errors import ShardDown
from undertow.engine.cluster.routing.router import Router
from undertow.engine.cluster.routing.shard_client import ShardClient
from undertow.engine.cluster.settings import ClusterSettings
from undertow.engine.cluster.wire import Status, pack
from undertow.engine.step.admission import QueueFull
from undertow.engine.storage.location import Location, StoreError
from undertow.engine.tenants.migration_records import Moved
from undertow.engine.tenants.registry import UnknownTenant

from ..support.cluster.fake_shard import FakeShard, said
from ..support.cluster.in_process import (
    PARTS,
    LocalCalls,
    LocalShards,
    begin,
    cluster_state,
    mock_llm,
    settings,
)
from ..support.engine import interleaved, turn_of
from ..support.faults.harness import State, assert_same_state, end_state, turns_of, write_log

SOON_S = 60
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


def routed(root: Location, shards: LocalShards, **changes: Any) -> Router:
    return Router(root, shards.calls, ClusterSettings(patience_s=SOON_S, **changes))


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


def statuses(sent: Sequence[Future[pa.Table]]) -> list[str]:
    return [s for future in sent for s in future.result(SOON_S).column("status").to_pylist()]


@contextmanager
def meanwhile(*works: Callable[[], object]) -> Iterator[None]:
    """Do things on other threads; their errors are raised at the end."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


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
            sent = submit(router, line, lambda: rng.randint(1, 30))
            assert set(statuses(sent)) == {"stored"}
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


class Mover:
    """A shard's part in a resharding, over the router."""

    def __init__(self, router: Router, shard: str) -> None:
        self._router, self._shard = router, shard

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *args: self._router.ask_shard(self._shard, method, *args)


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
                    reshard(root, names, lambda name: Mover(mover, name))

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
        reshard(root, ["s0", "s1"], lambda name: Mover(mover, name))
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


def test_a_lane_that_has_failed_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = begin(tmp_path / "root", 1)
    with LocalShards(root, settings()) as shards, routed(root, shards) as router:
        router.add_batch([turn_of("ann", 0, "x")])
        with monkeypatch.context() as patch:
            patch.setattr(ShardClient, "_may_send", property(lambda _: 1 / 0))
            with pytest.raises(UndertowError, match="report"):
                router.submit_table(pack([turn_of("ann", 1, "x")])).result(SOON_S)
        assert [r.seq for r in router.add_batch([turn_of("ann", 1, "x")])] == [1]


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
            assert [r.seq for r in router.add_batch([turn_of(lost, 0, "x")])] == [0]


# ---- shards that are made up


def over(root: Location, shards: Mapping[str, FakeShard], patience_s: float) -> Router:
    return Router(root, shards.__getitem__, ClusterSettings(patience_s=patience_s, call_turns=4))


def test_tenants_in_transit_wait_aside_and_nobody_is_sorted_again_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = begin(tmp_path / "root", 1)
    shard = FakeShard(away={"bob": (Status.IN_TRANSIT, "s1")})
    sorted_parcels = Counter[str]()

    def counted(parcel: ShardBatch, *how: Any) -> Any:
        sorted_parcels.update(parcel.tenants)
        return split(parcel, *how)

    monkeypatch.setattr(shard_pool, "split", counted)
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
    assert sorted_parcels["ann"] <= 2 * 200, "when it is sent, and once behind what came back"


def test_a_shard_that_never_starts_fails_the_calls_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routers, "SIGN_S", 0.01)
    root = begin(tmp_path / "root", 1)
    with over(root, {"s0": Unstarted()}, 0.05) as router:
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
    monkeypatch.setattr(routers, "SIGN_S", 0.001)
    root = begin(tmp_path / "root", 1)
    with over(root, {"s0": Slow()}, 0.05) as router:
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
    with (
        over(root, {"s0": Circular("s9")}, 0.05) as router,
        pytest.raises(ShardDown, match=r"shard s0 .*lives at"),
    ):
        router.search("ann", "x")


class Unstarted(FakeShard):
    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await asyncio.Future[Any]()


class Slow(FakeShard):
    """Is drained once it has been asked often enough for a sign."""

    async def ask(self, call: DrainCommand) -> bool:
        while self.calls.count("sign") < 5:
            await asyncio.sleep(0.001)
        return True


class Circular(FakeShard):
    """Knows no tenant, and says who does."""

    def __init__(self, to: str) -> None:
        super().__init__()
        self.to = to

    async def ask(self, call: SearchQuery) -> Any:
        raise Moved(call.tenant, self.to)


# ---- Engine's other calls


def test_the_engines_calls(turns: Turns, tmp_path: Path) -> None:
    root = begin(tmp_path / "root", 3)
    name = TENANTS[2]
    with LocalShards(root, settings()) as shards, routed(root, shards) as router:
        receipts = router.add_batch([turn for of in turns.values() for turn in of[:10]])
        assert [r.tenant for r in receipts] == [n for n in TENANTS for _ in range(10)]
        assert router.flush(name)
        assert router.drain()
        assert router.answer(name, "What of the harbour?").text
        assert router.get_all(name)
        few = router.search(name, "the harbour", k_sub=20, where={"no": "such"})
        assert not few.ranked()
        memory = router.get_all(name)[0]
        assert router.update(memory.id, "The boat is green.").id == memory.id
        assert router.drain()
        assert router.get(memory.id)["text"] == router.history(memory.id)[-1]["text"] == "The boat is green."
        first = next(r for r in receipts if r.tenant == name and r.seq == 1)
        anew = router.update(first.id or "", "The boat was red.", tenant=name)
        assert router.get(anew.id, tenant=name)["text"].endswith("The boat was red.")
        for call in (router.get, router.history):
            with pytest.raises(UndertowError, match="no memory"):
                call(first.id or "")
            with pytest.raises(UndertowError, match="no memory of"):
                call(anew.id, tenant=TENANTS[3])
        assert router.drain()
        victim = next(r for r in receipts if r.tenant == name and r.seq == 4)
        assert victim.id is not None
        assert router.delete(victim.id) == "turn"
        with pytest.raises(UndertowError, match="no memory"):
            router.delete(victim.id)
        assert router.stats()["turns"] == 89
        certificate = router.erase(name, now=True)
        assert certificate is not None and certificate.turns_removed == 11
        with pytest.raises(UnknownTenant):
            router.get_all(name)
        assert router.stats()["tenants"] == 8
        assert router.add_batch([]) == []


class Counted:
    """A shard's calls, noted by their method."""

    def __init__(self, calls: LocalCalls, shard: str, asked: list[tuple[str, str]]) -> None:
        self._calls, self._shard, self._asked = calls, shard, asked

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self._asked.append((self._shard, args[0].name if method == "ask" else method))
        return await self._calls.call(method, *args, **kwargs)


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
