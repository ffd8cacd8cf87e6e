"""Loads with kills, for hours: bulk ingests and reshardings."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import psutil
import pytest

from undertow.bench.mock.server import spawn_server
from undertow.engine.api.engine import Engine, make_llm
from undertow.engine.api.ingest_files import Ingest
from undertow.engine.cluster.ray.cluster import Cluster
from undertow.engine.cluster.settings import ClusterSettings
from undertow.engine.cluster.shard_map import STORES, load
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.readers import find_logs
from undertow.engine.storage.location import Location

from ..support.cluster.in_process import cluster_state, settings
from ..support.cluster.processes import Command, all_ended, ray_processes, strike
from ..support.faults.harness import (
    PARKING,
    RATES,
    assert_same_state,
    end_state,
    write_log,
)
from ..support.soak.cluster import TENANTS, alone, assert_all_stored, beside, ray_here, turn
from ..support.soak.runs import report, soak_round, soak_s

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7_200)]
THETAS = ("--theta-sim", "0.5", "--theta-merge", "0.6", "--theta-count", "3")
# for a process to kill: a worker reads for a moment only
FOUND_S = 10.0
KINDS = ("driver", "shard", "worker")
PROGRAM_ENV = {"UNDERTOW_BATCH_TURNS": "16", "UNDERTOW_LLM_PATIENCE_S": "60"}


def write_logs(folder: Path, seed: int) -> Path:
    """Logs of many tenants, each in several files."""
    folder.mkdir(parents=True)
    for number in range(6):
        some = [f"tenant-{(number * 3 + k) % 14}" for k in range(9)]
        write_log(folder / f"{number}.jsonl", some, 30, seed=100 * seed + number)
    return folder


def test_bulk_kills(tmp_path: Path) -> None:
    """Shards, workers and the driver of a bulk ingest are killed; the same command ends it.

    On a busy machine a round takes minutes: there are as many as kill each of them once.
    """
    began_s, rounds, turns = time.monotonic(), 0, 0
    killed: Counter[str] = Counter()
    rng = random.Random(3 + 100 * soak_round())
    with spawn_server(latency_ms=20, jitter_ms=20, **RATES, **PARKING) as url:
        while time.monotonic() - began_s < soak_s() or not all(killed[kind] for kind in KINDS):
            folder = tmp_path / str(rounds)
            logs = write_logs(folder / "logs", rounds + 100 * soak_round())
            of = settings(llm_url=url)
            with Engine(folder / "alone", of, HashingEncoder(384), llm=make_llm(of)) as engine:
                ingest = Ingest(engine)
                ingest.feed(list(find_logs([logs])))
                assert ingest.settle()
            turns += bulk_round(folder, logs, url, rng, killed)
            expected = end_state(folder / "alone")
            assert_same_state(cluster_state(Location.of(folder / "root")), expected)
            rounds += 1
    report(rounds=rounds, kills=dict(killed), turns=turns, equal_to_one_process=True)


def bulk_round(folder: Path, logs: Path, url: str, rng: random.Random, killed: Counter[str]) -> int:
    """One bulk ingest, cut off a few times; its turns."""
    root = str(folder / "root")
    ingest = ["ingest", str(logs), "--store", root, "--ray", "local", "--shards", "2", "--llm", url]
    command = [*ingest, *THETAS, *(["--resume"] if rng.random() < 0.5 else []), "--json"]
    left: list[psutil.Process] = []
    drivers = rng.randint(1, 3)
    try:
        for attempt in range(drivers + 1):
            running = Command(folder / f"run-{attempt}", *command, **PROGRAM_ENV)
            pid, last = running.process.pid, attempt == drivers
            if rng.random() < 0.75 or last:  # once there is something to kill
                running.wait_until(partial(ray_processes, pid, "shard"))
            kinds = [rng.choice(["shard", "worker"]) for _ in range(rng.randint(0, 2) + last)]
            for kind in kinds:
                time.sleep(rng.uniform(0, 4))
                killed[kind] += struck(running, kind, rng)
            if not last:
                time.sleep(rng.uniform(0, 6))
                killed["driver"] += running.running
                left += running.kill()  # and on at once: its shards may still be at it
        return int(running.result()["turns"])
    finally:
        left += running.kill() if running.running else []
        assert not all_ended(left), "what a killed driver started goes on"


def struck(running: Command, kind: str, rng: random.Random) -> int:
    """Kill a shard or a worker as soon as there is one: 1. 0 if the command ends, or has none for a while."""
    until_s = time.monotonic() + FOUND_S
    while running.running and time.monotonic() < until_s:
        if strike(ray_processes(running.process.pid, kind), rng):
            return 1
    return 0


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


def test_resharding_kills(tmp_path: Path) -> None:
    """Shards are added and removed again and again under traffic, while movers and shards are killed."""
    began_s, rng = time.monotonic(), random.Random(8 + 100 * soak_round())
    root = Location.of(tmp_path / "root")
    killed: Counter[str] = Counter()
    sizes: list[int] = []
    moved = 0
    wide = ClusterSettings(num_cpus=0.1, threads=1, patience_s=240, call_turns=16)
    with ray_here(cpus=8) as address, spawn_server(latency_ms=20, **RATES, **PARKING) as url:
        of = settings(llm_url=url)
        with Cluster.open(root, of, shards=2, resources=wide) as cluster:
            traffic = Traffic(cluster)
            with beside(traffic.run, 7_200.0) as sending:
                while not sizes or time.monotonic() - began_s < soak_s():
                    sizes.append(rng.choice([n for n in (1, 2, 3, 4) if n != len(load(root).shards)]))
                    moved += reshard(
                        tmp_path / f"move-{len(sizes)}", root, address, url, sizes[-1], rng, killed
                    )
                    if sending.done():
                        sending.result()
            assert cluster.drain()
            cluster.stop()
        assert_all_stored(root, traffic.acked)
        expected = alone(tmp_path / "alone", traffic.acked, url)
    assert_same_state(cluster_state(root), expected)
    for name in (root / STORES).children():
        if name not in load(root).shards:
            assert not end_state(root / STORES / name).exports, f"{name} has kept tenants"
    report(
        reshardings=len(sizes),
        shards=sizes,
        tenants_moved_by_the_last_commands=moved,
        kills=dict(killed),
        acked_turns=traffic.acked.total(),
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
        running = Command(folder / str(attempt), *command, **PROGRAM_ENV)
        if rng.random() < 0.8:
            running.wait_until(lambda: load(root).before is not None)
        try:
            for kind in rng.choice([(), ("shard",), ("mover",), ("shard", "mover"), ("shard", "shard")]):
                time.sleep(rng.uniform(0, rng.choice([0.5, 2.0, 8.0])))
                if kind == "shard":
                    killed[kind] += strike(ray_processes(os.getpid(), kind), rng)
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
