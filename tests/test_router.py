"""The router over shards in this process: one engine's memories, whatever dies or moves meanwhile."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from undertow.engine.admission import QueueFull
from undertow.engine.cluster import shard_map
from undertow.engine.cluster.lane import Lane, ShardDown
from undertow.engine.cluster.resharding import reshard
from undertow.engine.cluster.resources import ClusterSettings
from undertow.engine.cluster.router import Router
from undertow.engine.cluster.wire import pack
from undertow.engine.engine import Engine
from undertow.engine.model import Turn, UndertowError
from undertow.engine.place import Place, StoreError
from undertow.engine.tenants import UnknownTenant

from .cluster_harness import PARTS, LocalShards, begin, cluster_state, mock_llm, settings
from .engine_harness import interleaved, turn_of
from .fault_harness import State, assert_same_state, end_state, turns_of, write_log

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


def routed(root: Place, shards: LocalShards, **changes: Any) -> Router:
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
        routed(root, shards, window_calls=1) as other,
    ):
        with meanwhile(*(feed(r, t) for r, t in zip(9 * [router, other], turns, strict=False))):
            pass
        assert router.drain()
    assert_same_state(cluster_state(root), expected)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_shards_killed_at_any_moment(seed: int, turns: Turns, expected: State, tmp_path: Path) -> None:
    rng = random.Random(seed)
    root = begin(tmp_path / "root", 2)
    done = threading.Event()

    with LocalShards(root, settings()) as shards:

        def kill() -> None:
            while not done.wait(rng.uniform(0.02, 0.4)) and shards.kills < 12:
                shards.kill(rng.choice(["s0", "s1"]))

        with routed(root, shards, lane_turns=64, call_turns=16) as router:
            with meanwhile(kill):
                sent = submit(router, interleaved(turns, seed), lambda: rng.randint(1, 12))
                found = statuses(sent)
                done.set()
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

    def reluctant(place: Place) -> shard_map.ShardMap:
        readers.add(threading.current_thread().name)
        if refusals[0] > 0:
            refusals[0] -= 1
            raise StoreError("503")
        return load(place)

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
            patch.setattr(Lane, "_window", property(lambda _: 1 / 0))
            with pytest.raises(UndertowError, match="report"):
                router.submit_table(pack([turn_of("ann", 1, "x")])).result(SOON_S)
        assert [r.seq for r in router.add_batch([turn_of("ann", 1, "x")])] == [1]


# ---- bounds, and shards that do not answer


def owned(root: Place, shard: str) -> str:
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
        victim = next(r for r in receipts if r.tenant == name and r.seq == 4)
        assert victim.id is not None
        assert router.delete(victim.id) == "turn"
        with pytest.raises(UndertowError, match="no memory"):
            router.delete(victim.id)
        assert router.stats()["turns"] == 89
        certificate = router.erase(name, now=True)
        assert certificate is not None and certificate.turns_removed == 10
        with pytest.raises(UnknownTenant):
            router.get_all(name)
        assert router.stats()["tenants"] == 8
        assert router.add_batch([]) == []


def test_repeats_after_a_kill_act_once(turns: Turns, tmp_path: Path) -> None:
    root = begin(tmp_path / "root", 1)
    name = TENANTS[0]
    with LocalShards(root, settings()) as shards, routed(root, shards) as router:
        receipts = router.add_batch(list(turns[name]))
        # the shard does what it is asked, and dies before it can say so
        for work in (lambda: router.delete(receipts[3].id or ""), lambda: router.flush(name)):
            shards.held.add("s0")
            with meanwhile(work):
                time.sleep(0.02)
                shards.held.clear()
                time.sleep(0.005)
                shards.kill("s0")
        assert router.drain()
        assert router.stats()["turns"] == len(receipts) - 1
        assert shards.kills == 2
