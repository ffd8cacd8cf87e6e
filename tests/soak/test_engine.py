"""Long loads, run by `make soak` only. Each prints its figures as one JSON line.

SOAK_SECONDS (default 0) makes the kills go on for at least so long, 600 for ten minutes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from undertow.bench.mock.server import spawn_server
from undertow.engine.api.engine import Engine, make_llm
from undertow.engine.api.ingest_files import Ingest
from undertow.engine.base.config import Settings
from undertow.engine.encoders.hashing import HashingEncoder

from ..support.faults.harness import (
    PARKING,
    RATES,
    THETA,
    Driver,
    State,
    assert_prefix_stored,
    assert_same_state,
    end_state,
    memories_of,
    shared_driver,
    turns_of,
    write_log,
)
from ..support.faults.spoilt_llm import POISON, SpoiltReplies, SpoiltServer, served

LOCOMO = Path(__file__).parents[3] / "shared" / "data" / "locomo_dev.json"
KILLS = 200
TENANTS = ("ann", "bob", "cleo")
pytestmark = [pytest.mark.soak, pytest.mark.timeout(7_200)]


@pytest.fixture(scope="module")
def driver() -> Driver:
    return shared_driver()


def report(capsys: pytest.CaptureFixture[str], **figures: Any) -> None:
    with capsys.disabled():
        print("\n" + json.dumps(figures))


def run_until_done(
    driver: Driver, store: Path, task: dict[str, Any], rng: random.Random, took_s: float
) -> tuple[int, int]:
    """Kill and resume until a run gets through. (kills, acknowledged turns seen at them)"""
    kills = acked_turns = 0
    turns = turns_of(task["log"])
    while True:
        # often early: opening, replaying and the first commits are where a restart has most to do
        moment_s = rng.uniform(0.0, took_s * rng.choice([0.05, 0.15, 0.6])) if kills < 40 else None
        outcome = driver.run(store=store, kill_after_s=moment_s, **task)
        acked = outcome.last("acked") or {}
        acked_turns += sum(acked.values())
        assert_prefix_stored(store, turns, acked)
        if outcome.status != -signal.SIGKILL:
            assert outcome.status == 0 and outcome.last("settled"), outcome.lines[-1:]
            return kills, acked_turns
        kills += 1


def test_two_hundred_kills(driver: Driver, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    began_s = time.monotonic()
    least_s = float(os.environ.get("SOAK_SECONDS", "0"))
    kills = acked_turns = runs = 0
    with spawn_server(latency_ms=2, jitter_ms=4, error_rate=0.1, **RATES, **PARKING) as url:
        while kills < KILLS or time.monotonic() - began_s < least_s:
            log = write_log(tmp_path / f"log-{runs}.jsonl", TENANTS, 40, seed=runs)
            rng = random.Random(runs)
            settings = {**THETA, "encoder": "hash:384", "batch_turns": rng.choice([3, 8, 64]), "llm_url": url}
            settings["durability"] = rng.choice(["commit", "fsync"])
            task = {"task": "ingest", "log": log, "settings": settings}
            task |= {"commits_per_compaction": rng.choice([4, 11, 256]), "resume": rng.random() < 0.7}
            expected, took_s = undisturbed(driver, tmp_path / f"undisturbed-{runs}", task)
            more, acked = run_until_done(driver, tmp_path / f"killed-{runs}", task, rng, took_s)
            assert_same_state(end_state(tmp_path / f"killed-{runs}"), expected)
            kills, acked_turns, runs = kills + more, acked_turns + acked, runs + 1
    elapsed_s = round(time.monotonic() - began_s, 1)
    report(capsys, soak="kills", kills=kills, runs=runs, acked_turns_checked=acked_turns, elapsed_s=elapsed_s)


def undisturbed(driver: Driver, store: Path, task: dict[str, Any]) -> tuple[State, float]:
    began_s = time.monotonic()
    outcome = driver.run(store=store, **task)
    assert outcome.status == 0 and outcome.last("settled")
    return end_state(store), time.monotonic() - began_s


def test_three_in_ten_faults_over_the_locomo_conversations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not LOCOMO.exists():
        pytest.skip("the LoCoMo development conversations may not be copied into the project")
    began_s = time.monotonic()
    bad = SpoiltReplies(5, 0.3, 0.15, poison_rate=0.3)
    server = SpoiltServer(bad, error_rate=0.3)
    with served(server) as url, opened(tmp_path, url) as engine:
        run = Ingest(engine)
        run.feed([LOCOMO])
        assert run.settle()
        figures = engine.stats()
    turns = turns_of(LOCOMO)
    assert_prefix_stored(tmp_path, turns, {name: len(line) for name, line in turns.items()})
    assert figures["undecided_turns"] == figures["pending_jobs"] == 0
    assert set(memories_of(tmp_path)) <= bad.given
    assert all(POISON not in text for text in memories_of(tmp_path))
    parked = end_state(tmp_path).jobs
    assert len(parked) == figures["dead_letters"] > 0 and all(job["reason"] for job in parked)
    good = SpoiltReplies(5)
    with served(SpoiltServer(good)) as url, opened(tmp_path, url) as engine:
        assert engine.replay_jobs() == len(parked)
        assert engine.drain()
        assert engine.stats()["dead_letters"] == 0
    assert set(memories_of(tmp_path)) <= bad.given | good.given
    report(
        capsys,
        soak="faults",
        **{
            name: figures[name]
            for name in ("turns", "episodes", "facts", "merges", "dead_letters", "llm_calls")
        },
        server_faults=sum(server.faults.values()),
        bad_replies=dict(Counter(bad.ways)),
        elapsed_s=round(time.monotonic() - began_s, 1),
    )


def opened(store: Path, url: str) -> Engine:
    settings = Settings(device="cpu", **THETA, llm_url=url)
    return Engine(store, settings, HashingEncoder(384), llm=make_llm(settings))
