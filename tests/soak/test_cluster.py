"""The cluster for ten minutes at a time, run by `make soak` only: a slow LLM, and kills. See soak_harness.

Each run ends in what must hold at its end: all acknowledged turns are there, and the memories are those
of one process that nothing has happened to.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest

ray = pytest.importorskip("ray")

from undertow.bench.mock.server import spawn_server
from undertow.engine.api.engine import Engine, make_llm
from undertow.engine.api.ingest_files import Ingest
from undertow.engine.base.model import Message, Turn
from undertow.engine.cluster.ray.actors import connect
from undertow.engine.cluster.ray.cluster import Cluster
from undertow.engine.cluster.settings import ClusterSettings
from undertow.engine.cluster.shard_map import STORES, load
from undertow.engine.cluster.wire import pack
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.readers import find_logs
from undertow.engine.step.admission import QueueFull
from undertow.engine.storage.location import Location

from ..support.cli import ENV, PROGRAM
from ..support.cluster.in_process import cluster_state, settings
from ..support.faults.harness import (
    FILLER,
    PARKING,
    RATES,
    TOPICS,
    State,
    assert_same_state,
    end_state,
    stored_texts,
    write_log,
)
from ..support.soak import MIB, Memory, report_timed, soak_s

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7_200)]

THETAS = ("--theta-sim", "0.5", "--theta-merge", "0.6", "--theta-count", "3")
CLUSTER_ENV = {"UNDERTOW_CLUSTER_NUM_CPUS": "0.5", "UNDERTOW_CLUSTER_THREADS": "1"}
PROGRAM_ENV = {**ENV, **CLUSTER_ENV, "UNDERTOW_BATCH_TURNS": "16", "UNDERTOW_LLM_PATIENCE_S": "60"}


@contextmanager
def ray_here(cpus: int) -> Iterator[str]:
    """A small Ray in this process; its address."""
    connect(
        "local",
        num_cpus=cpus,
        object_store_memory=200 * MIB,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=40,
    )
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


def turn(tenant: str, n: int) -> Turn:
    """The n-th turn of a tenant, always the same: its topics recur."""
    rng = random.Random(f"{tenant}-{n}")
    topic = rng.choice(TOPICS).split()
    said = " ".join([*rng.sample(topic, 6), rng.choice(FILLER), f"n{n}"])
    answer = f"Tell me of the {topic[0]} and the {topic[1]}."
    when = f"2026-03-{1 + n // 24 % 28:02d}T{n % 24:02d}:00:00"
    return Turn(tenant, (Message("user", said), Message("assistant", answer)), f"{tenant}-{n}", "s", when)


def alone(folder: Path, sent: Counter[str], url: str) -> State:
    """What one engine makes of the first turns of each tenant."""
    of = settings(llm_url=url, batch_turns=512)
    with Engine(folder, of, HashingEncoder(384), llm=make_llm(of)) as engine:
        for tenant, count in sent.items():
            engine.add_batch([turn(tenant, n) for n in range(count)])
        assert engine.drain()
    return end_state(folder)


def assert_all_stored(root: Location, acked: Counter[str]) -> None:
    """Every acknowledged turn is stored, each once, in the order in which its tenant's were sent."""
    stored: dict[str, list[str]] = {}
    for shard in load(root).everyone:
        texts = stored_texts(Path(str(root)) / STORES / shard, "turn")
        assert not stored.keys() & texts.keys(), "a tenant is at two shards"
        stored |= texts
    for tenant, count in acked.items():
        assert len(stored[tenant]) >= count, f"{tenant}: an acknowledged turn is lost"
        assert stored[tenant] == [turn(tenant, n).text for n in range(len(stored[tenant]))], tenant


# ---- a slow LLM

TENANTS = tuple(f"tenant-{n}" for n in range(60))
SEED_TURNS = 20
NEW_TURNS_PER_S = 6.0
IN_FLIGHT = 4
PRESSED = ClusterSettings(
    num_cpus=0.5, threads=1, patience_s=120, window_turns=2_048, call_turns=512, lane_turns=4_096
)
QUEUE_TURNS = 1_024
SAMPLE_S = 1.0
# queues that a shard tells the length of, by what its status calls it
IN_SHARD = {
    "inbox_turns": "waiting_turns",
    "running_jobs": "running_jobs",
    "llm_in_flight": "llm_in_flight",
}
# the journal's first compactions, Lance's caches and a heap that finds its size come first
WARM_UP_S = 540.0
# What may be added to a process while all queues are full: what stored turns take (vector 1,536 bytes,
# text, keys and marks about 900, see docs/operations.md, with their undecided work), and noise.
BYTES_A_TURN = 4_096
NOISE_MIB_PER_MIN = 1.0


class Press:
    """Offers turns without a pause: a few new ones at a fixed rate, and ever again those stored already.

    So all queues stay full, as behind clients that repeat what they sent, while the store hardly grows.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        seed = [turn(tenant, n) for n in range(SEED_TURNS) for tenant in TENANTS]
        cluster.add_batch(seed)
        self.sent = Counter(dict.fromkeys(TENANTS, SEED_TURNS))
        self.acked = self.sent.copy()
        self._again = pack(seed[: PRESSED.call_turns])
        self._under_way: deque[tuple[Future[pa.Table], list[str]]] = deque()
        self.repeated = self.refused = 0

    def run(self, seconds: float, stop: threading.Event) -> None:
        began_s = time.monotonic()
        new = 0
        while (elapsed_s := time.monotonic() - began_s) < seconds and not stop.is_set():
            if due := int(elapsed_s * NEW_TURNS_PER_S) - new:
                names = [TENANTS[(new + k) % len(TENANTS)] for k in range(min(due, len(TENANTS)))]
                new += len(names) * self._offer(pack([turn(name, self.sent[name]) for name in names]), names)
            if not self._offer(self._again, []):
                time.sleep(0.005)
            while self._under_way and self._under_way[0][0].done():
                self._heard(*self._under_way.popleft())
        for future, names in self._under_way:
            self._heard(future, names)

    def _offer(self, table: pa.Table, names: list[str]) -> bool:
        try:
            self._under_way.append((self._cluster.submit_table(table), names))
        except QueueFull:
            self.refused += 1
            return False
        self.sent.update(names)
        return True

    def _heard(self, future: Future[pa.Table], names: list[str]) -> None:
        statuses = Counter(future.result().column("status").to_pylist())
        assert set(statuses) == {"stored" if names else "duplicate"}, statuses
        self.acked.update(names)
        self.repeated += 0 if names else statuses["duplicate"]


def sample(cluster: Cluster, memories: dict[str, Memory], seen: Counter[str], now_s: float) -> int | None:
    """Look at every process and queue; how many turns are undecided, if all shards have said so in time.

    `seen`: the longest that each queue was, and how often a shard, busy with a step, did not answer.
    """
    states, undecided = cluster.status(), 0
    for name, state in states.items():
        assert not state["deaths_seen"], state
        seen["lane_turns"] = max(seen["lane_turns"], state["sent_turns"])
        under_way = list(cluster._pool._clients[name]._under_way.values())
        seen["turns_under_way"] = max(seen["turns_under_way"], sum(map(len, under_way)))
        if state["state"] == "unreachable":
            seen["unanswered"] += 1
            continue
        assert state["state"] == "serving", state
        memories.setdefault(name, Memory(psutil.Process(state["pid"])))
        undecided += state["undecided_turns"]
        for queue, key in IN_SHARD.items():
            seen[queue] = max(seen[queue], state[key])
    memories.setdefault("driver", Memory(psutil.Process()))
    for memory in memories.values():
        memory.sample(now_s)
    return undecided if all("pid" in state for state in states.values()) else None


def test_slow_llm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Queues stay at their bounds and memory flat, though the LLM falls behind all the time."""
    root, warm_s = Location.of(tmp_path / "root"), min(WARM_UP_S, soak_s())
    seconds = warm_s + soak_s()
    memories: dict[str, Memory] = {}
    most: Counter[str] = Counter()
    undecided: list[int] = []
    searches_s: list[float] = []
    with ray_here(cpus=2), spawn_server(latency_ms=5_000, jitter_ms=5_000, **RATES, **PARKING) as slow:
        of = settings(llm_url=slow, llm_in_flight=IN_FLIGHT, queue_turns=QUEUE_TURNS, batch_turns=256)
        with Cluster.open(root, of, shards=2, resources=PRESSED) as cluster:
            press, stop, errors = Press(cluster), threading.Event(), deque[BaseException]()
            pressing = threading.Thread(target=_guarded, args=(press.run, seconds, stop, errors))
            began_s = time.monotonic()
            pressing.start()
            try:
                while pressing.is_alive():
                    count = sample(cluster, memories, most, time.monotonic() - began_s)
                    undecided += [] if count is None else [count]
                    asked_s = time.monotonic()
                    assert cluster.search(TENANTS[len(searches_s) % len(TENANTS)], "harbour boat").turns
                    searches_s.append(time.monotonic() - asked_s)
                    pressing.join(SAMPLE_S)
            finally:
                stop.set()
                pressing.join()
            assert not errors, errors
            shards = cluster.owners(TENANTS)
            cluster.stop()
        assert_all_stored(root, press.acked)
        with spawn_server(**RATES, **PARKING) as quick:
            expected = alone(tmp_path / "alone", press.acked, quick)
            with Cluster.open(root, settings(llm_url=quick), resources=PRESSED) as cluster:
                assert cluster.drain()
                cluster.stop()
    assert press.sent == press.acked
    assert_same_state(cluster_state(root), expected)
    allowed = NOISE_MIB_PER_MIN + 60 * NEW_TURNS_PER_S * max(Counter(shards).values()) / len(TENANTS) * (
        BYTES_A_TURN / MIB
    )
    bounds = {
        "lane_turns": PRESSED.lane_turns,
        "turns_under_way": PRESSED.window_turns,
        "inbox_turns": QUEUE_TURNS,
        "running_jobs": max(Counter(shards).values()),
        "llm_in_flight": IN_FLIGHT,
    }
    report_timed(
        capsys,
        "slow-llm",
        acked_turns=press.acked.total(),
        new_turns_per_s=NEW_TURNS_PER_S,
        repeated_turns=press.repeated,
        refused_offers=press.refused,
        undecided_after_warm_up=undecided[int(warm_s / seconds * len(undecided))],
        undecided_at_the_end=undecided[-1],
        unanswered_status=most.pop("unanswered", 0),
        samples=len(searches_s),
        longest_queues=dict(most),
        bounds=bounds,
        warm_up_s=warm_s,
        allowed_slope_mib_per_min=round(allowed, 2),
        memory={name: memory.figures(warm_s) for name, memory in memories.items()},
        memory_flat=all(memory.slope_mib_per_min(warm_s) <= allowed for memory in memories.values()),
        search_s_median=round(sorted(searches_s)[len(searches_s) // 2], 3),
        search_s_max=round(max(searches_s), 3),
    )
    assert undecided[-1] > undecided[int(warm_s / seconds * len(undecided))], "the LLM has kept up"
    assert press.refused and most["lane_turns"] > PRESSED.lane_turns / 2, "the queues were not full"
    for queue, length in most.items():
        assert length <= bounds[queue], f"{queue}: {length} > {bounds[queue]}"
    for name, memory in memories.items():
        slope = memory.slope_mib_per_min(warm_s)
        assert slope <= allowed, f"{name} grows by {slope:.2f} MiB a minute"


def _guarded(
    work: Callable[[float, threading.Event], object],
    seconds: float,
    stop: threading.Event,
    errors: deque[BaseException],
) -> None:
    """Work in a thread, its error for the test to see."""
    try:
        work(seconds, stop)
    except BaseException as error:  # noqa: BLE001 - it fails the test
        errors.append(error)


# ---- kills


class Command:
    """`undertow ...` in a process of its own, and the Ray processes below it."""

    def __init__(self, folder: Path, *args: str | Path) -> None:
        folder.mkdir(exist_ok=True)
        self._out, self._err = folder / "out.json", folder / "err.txt"
        with self._out.open("w") as out, self._err.open("w") as err:  # no pipe: orphans would hold it open
            self.process = subprocess.Popen(
                [*PROGRAM, *map(str, args)], env={**os.environ, **PROGRAM_ENV}, stdout=out, stderr=err
            )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def wait_until(self, holds: Callable[[], object]) -> None:
        """Wait until something holds, or the command has ended."""
        while self.running and not holds():
            time.sleep(0.02)

    def kill(self) -> list[psutil.Process]:
        """SIGKILL; what it leaves behind."""
        try:
            below: list[psutil.Process] = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            below = []
        self.process.kill()
        self.process.wait()
        return below

    def result(self) -> Any:
        """Wait for its end, which must be a good one: its JSON."""
        code = self.process.wait(timeout=600)
        assert code == 0, f"exit code {code}: {self._err.read_text()[-2_000:]}"
        return json.loads(self._out.read_text())


def ray_processes(of: int, kind: str) -> list[psutil.Process]:
    """The shards, or the workers that read and feed, below a process."""
    found = []
    try:
        for process in psutil.Process(of).children(recursive=True):
            name = process.name()
            if name.startswith("ray::") and not name.endswith("Agent"):
                found += [process] * (("ShardActor" in name) == (kind == "shard"))
    except psutil.NoSuchProcess:
        pass
    return found


def strike(of: int, kind: str, rng: random.Random) -> int:
    """SIGKILL for one of them; how many that were."""
    found = ray_processes(of, kind)
    if found:
        try:
            rng.choice(found).kill()
        except psutil.NoSuchProcess:
            return 0
    return bool(found)


def all_ended(processes: Sequence[psutil.Process]) -> int:
    """Wait for the end of what killed drivers have left; how many went on, which are ended here."""
    _, alive = psutil.wait_procs(processes, timeout=90)
    for process in alive:
        process.kill()
    return len(alive)


def write_logs(folder: Path, seed: int) -> Path:
    """Logs of many tenants, each in several files."""
    folder.mkdir(parents=True)
    for number in range(6):
        some = [f"tenant-{(number * 3 + k) % 14}" for k in range(9)]
        write_log(folder / f"{number}.jsonl", some, 30, seed=100 * seed + number)
    return folder


def test_bulk_kills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Shards, workers and the driver of a bulk ingest are killed; the same command ends it."""
    began_s, rounds, turns = time.monotonic(), 0, 0
    killed: Counter[str] = Counter()
    rng = random.Random(3)
    with spawn_server(latency_ms=20, jitter_ms=20, **RATES, **PARKING) as url:
        while not rounds or time.monotonic() - began_s < soak_s():
            folder = tmp_path / str(rounds)
            logs = write_logs(folder / "logs", rounds)
            of = settings(llm_url=url)
            with Engine(folder / "alone", of, HashingEncoder(384), llm=make_llm(of)) as engine:
                ingest = Ingest(engine)
                ingest.feed(list(find_logs([logs])))
                assert ingest.settle()
            turns += bulk_round(folder, logs, url, rng, killed)
            expected = end_state(folder / "alone")
            assert_same_state(cluster_state(Location.of(folder / "root")), expected)
            rounds += 1
    report_timed(
        capsys,
        "bulk-kills",
        rounds=rounds,
        kills=dict(killed),
        turns=turns,
        elapsed_s=round(time.monotonic() - began_s, 1),
        equal_to_one_process=True,
    )
    assert killed["driver"] and killed["shard"] and killed["worker"], killed


def bulk_round(folder: Path, logs: Path, url: str, rng: random.Random, killed: Counter[str]) -> int:
    """One bulk ingest, cut off a few times; its turns."""
    root = str(folder / "root")
    ingest = ["ingest", str(logs), "--store", root, "--ray", "local", "--shards", "2", "--llm", url]
    command = [*ingest, *THETAS, *(["--resume"] if rng.random() < 0.5 else []), "--json"]
    left: list[psutil.Process] = []
    drivers = rng.randint(1, 3)
    try:
        for attempt in range(drivers + 1):
            running = Command(folder / f"run-{attempt}", *command)
            pid, last = running.process.pid, attempt == drivers
            if rng.random() < 0.75 or last:  # once there is something to kill
                running.wait_until(partial(ray_processes, pid, "shard"))
            kinds = [rng.choice(["shard", "worker"]) for _ in range(rng.randint(0, 2) + last)]
            for kind in kinds:
                time.sleep(rng.uniform(0, 4))
                killed[kind] += running.running and strike(pid, kind, rng)
            if not last:
                time.sleep(rng.uniform(0, 6))
                killed["driver"] += running.running
                left += running.kill()  # and on at once: its shards may still be at it
        return int(running.result()["turns"])
    finally:
        left += running.kill() if running.running else []
        assert not all_ended(left), "what a killed driver started goes on"


class Traffic:
    """Sends turns of many tenants, and counts those that were acknowledged."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.acked: Counter[str] = Counter()

    def run(self, seconds: float, stop: threading.Event) -> None:
        """Eight turns a second, until it is stopped; `seconds` is the longest."""
        rng, end_s = random.Random(1), time.monotonic() + seconds
        while not stop.is_set() and time.monotonic() < end_s:
            names = rng.sample(TENANTS, 8)
            receipts = self._cluster.add_batch([turn(name, self.acked[name]) for name in names])
            assert [receipt.parked for receipt in receipts] == [None] * len(names)
            self.acked.update(names)
            stop.wait(1.0)


def test_resharding_kills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Shards are added and removed again and again under traffic, while movers and shards are killed."""
    began_s, rng = time.monotonic(), random.Random(8)
    root = Location.of(tmp_path / "root")
    killed: Counter[str] = Counter()
    sizes: list[int] = []
    moved = 0
    wide = ClusterSettings(num_cpus=0.1, threads=1, patience_s=240, call_turns=16)
    with ray_here(cpus=8) as address, spawn_server(latency_ms=20, **RATES, **PARKING) as url:
        of = settings(llm_url=url)
        with Cluster.open(root, of, shards=2, resources=wide) as cluster:
            traffic, stop, errors = Traffic(cluster), threading.Event(), deque[BaseException]()
            sending = threading.Thread(target=_guarded, args=(traffic.run, 7_200.0, stop, errors))
            sending.start()
            try:
                while not sizes or time.monotonic() - began_s < soak_s():
                    sizes.append(rng.choice([n for n in (1, 2, 3, 4) if n != len(load(root).shards)]))
                    moved += reshard(
                        tmp_path / f"move-{len(sizes)}", root, address, url, sizes[-1], rng, killed
                    )
                    assert not errors, errors
            finally:
                stop.set()
                sending.join()
            assert not errors, errors
            assert cluster.drain()
            cluster.stop()
        assert_all_stored(root, traffic.acked)
        expected = alone(tmp_path / "alone", traffic.acked, url)
    assert_same_state(cluster_state(root), expected)
    for name in (root / STORES).children():
        if name not in load(root).shards:
            assert not end_state(root / STORES / name).exports, f"{name} has kept tenants"
    report_timed(
        capsys,
        "resharding-kills",
        reshardings=len(sizes),
        shards=sizes,
        tenants_moved_by_the_last_commands=moved,
        kills=dict(killed),
        acked_turns=traffic.acked.total(),
        elapsed_s=round(time.monotonic() - began_s, 1),
        equal_to_one_process=True,
    )
    assert killed["mover"] or killed["shard"], killed


def reshard(
    folder: Path, root: Location, address: str, url: str, size: int, rng: random.Random, killed: Counter[str]
) -> int:
    """Go over to so many shards, however often that is cut off; the tenants that the last command moved."""
    folder.mkdir()
    wanted = ("--shards", str(size))
    for attempt in range(100):
        command = ["cluster", "move", "--store", str(root), "--ray", address, *wanted, "--llm", url, "--json"]
        running = Command(folder / str(attempt), *command)
        if rng.random() < 0.8:
            running.wait_until(lambda: load(root).before is not None)
        try:
            for kind in rng.choice([(), ("shard",), ("mover",), ("shard", "mover"), ("shard", "shard")]):
                time.sleep(rng.uniform(0, rng.choice([0.5, 2.0, 8.0])))
                if kind == "shard":
                    killed[kind] += strike(os.getpid(), kind, rng)
                elif running.running:
                    running.kill()
                    killed[kind] += 1
            if running.process.wait(timeout=600) == -signal.SIGKILL:
                continue
            done = running.result()
        finally:
            if running.running:
                running.kill()
        assert len(done["shards"]) == size and load(root).before is None, done
        return int(done["moved_tenants"])
    raise AssertionError("a hundred attempts were not enough")
