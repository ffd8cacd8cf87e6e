"""SIGKILL at any moment, then resume: what an undisturbed run gives, and no acknowledged turn lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from undertow.bench.mock.server import spawn_server
from undertow.engine.base.config import CallForm
from undertow.engine.base.model import PolicyName

from ...support.faults.harness import (
    KINDS,
    PARKING,
    RATES,
    THETA,
    WINDOWS,
    Driver,
    Outcome,
    State,
    assert_prefix_stored,
    assert_same_state,
    end_state,
    turns_of,
    write_log,
)
from ...support.soak.rare import COMPARED
from ...support.soak.runs import report, soak_round

TENANTS = ("ann", "bob")
BATCH_TURNS = 8


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("log") / "log.jsonl", TENANTS, 28, session_turns=4)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with spawn_server(latency_ms=3, jitter_ms=3, **RATES, **PARKING) as url:
        yield url


@pytest.fixture(scope="module")
def task(log: Path, server: str) -> dict[str, Any]:
    settings = {**THETA, "encoder": "hash:384", "batch_turns": BATCH_TURNS, "llm_url": server}
    # compactions every few commits, so that kills fall into them too
    return {"task": "ingest", "log": log, "settings": settings, "commits_per_compaction": 6}


@pytest.fixture(scope="module")
def undisturbed(
    driver: Driver, task: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[State, float]:
    expected, took_s = run_undisturbed(driver, tmp_path_factory.mktemp("undisturbed"), task)
    assert {"merged", "fired", "waits", "parked", "episode", "fact", "turn"} <= expected.kinds()
    return expected, took_s


def run_undisturbed(driver: Driver, store: Path, task: dict[str, Any]) -> tuple[State, float]:
    """The end state of a run that nothing disturbs, and how long it took."""
    began_s = time.monotonic()
    outcome = driver.run(store=store, **task)
    took_s = time.monotonic() - began_s
    assert outcome.status == 0 and outcome.last("settled")
    return end_state(store), took_s


def killed(outcome: Outcome) -> bool:
    return outcome.status == -signal.SIGKILL


def check_prefix(store: Path, log: Path, outcome: Outcome) -> int:
    """Every acknowledged turn is stored, in its place; how many were acknowledged."""
    acked = outcome.last("acked") or {}
    assert_prefix_stored(store, turns_of(log), acked)
    return sum(acked.values())


def run_until_done(
    driver: Driver, store: Path, task: dict[str, Any], moments_s: Iterable[float]
) -> tuple[int, int]:
    """Kill at each moment and resume, then run to the end. (kills, acknowledged turns seen at them)"""
    kills = acked_turns = 0
    for moment_s in [*moments_s, None]:
        outcome = driver.run(store=store, kill_after_s=moment_s, **task)
        acked_turns += check_prefix(store, task["log"], outcome)
        if not killed(outcome):
            break
        kills += 1
    assert outcome.status == 0 and outcome.last("settled"), outcome.lines[-1:]
    return kills, acked_turns


def check_kills(
    driver: Driver, folder: Path, task: dict[str, Any], expected: State, moments_s: list[float]
) -> None:
    """Two at least; on a machine that has become faster the next try kills earlier."""
    for n in range(5):
        store = folder / f"killed-{n}"
        kills, _ = run_until_done(driver, store, task, [moment_s / 2**n for moment_s in moments_s])
        assert_same_state(end_state(store), expected)
        if kills >= 2:
            break
    assert kills >= 2


def test_kills_in_a_row_at_random_moments(
    driver: Driver, task: dict[str, Any], undisturbed: tuple[State, float], tmp_path: Path
) -> None:
    expected, took_s = undisturbed
    rng = random.Random(7)
    check_kills(driver, tmp_path, task, expected, [rng.uniform(0.05, took_s / 3) for _ in range(7)])


def test_kills_where_turns_tell_the_thresholds(driver: Driver, task: dict[str, Any], tmp_path: Path) -> None:
    by_share = {"theta_sim": None, "theta_merge": None, "theta_share": 0.1}
    long = write_log(tmp_path / "log.jsonl", TENANTS[:1], 140, session_turns=20)
    task = {**task, "log": long, "settings": {**task["settings"], **by_share}}
    expected, took_s = run_undisturbed(driver, tmp_path / "undisturbed", task)
    assert sum('"thetas"' in line for line in expected.exports["ann"]) == 2
    rng = random.Random(9)
    check_kills(driver, tmp_path, task, expected, [rng.uniform(0.3, took_s / 2) for _ in range(6)])


@pytest.mark.soak
@pytest.mark.timeout(7_200)
def test_two_hundred_kills(driver: Driver, tmp_path: Path) -> None:
    """SOAK_KILLS (200) is how many at least; other logs, settings and moments for each SOAK_ROUND."""
    least = int(os.environ.get("SOAK_KILLS", "200"))
    first = 1_000 * soak_round()
    kills = acked_turns = runs = 0
    with spawn_server(latency_ms=2, jitter_ms=4, error_rate=0.1, **RATES, **PARKING) as url:
        while kills < least:
            log = write_log(tmp_path / f"log-{runs}.jsonl", ("ann", "bob", "cleo"), 40, seed=first + runs)
            rng = random.Random(first + runs)
            settings = {**THETA, "encoder": "hash:384", "batch_turns": rng.choice([3, 8, 64]), "llm_url": url}
            settings["durability"] = rng.choice(["commit", "fsync"])
            task = {"task": "ingest", "log": log, "settings": settings}
            task |= {"commits_per_compaction": rng.choice([4, 11, 256]), "resume": rng.random() < 0.7}
            expected, took_s = run_undisturbed(driver, tmp_path / f"undisturbed-{runs}", task)
            # often early: opening, replaying and the first commits are where a restart has most to do
            moments_s = [rng.uniform(0.0, took_s * rng.choice([0.05, 0.15, 0.6])) for _ in range(40)]
            more, acked = run_until_done(driver, tmp_path / f"killed-{runs}", task, moments_s)
            assert_same_state(end_state(tmp_path / f"killed-{runs}"), expected)
            kills, acked_turns, runs = kills + more, acked_turns + acked, runs + 1
    report(kills=kills, runs=runs, acked_turns_checked=acked_turns)


@pytest.mark.parametrize(
    ("method", "n", "after", "resume"),
    [
        ("append", 1, False, True),
        ("append", 2, True, False),
        ("append", 20, False, True),
        ("_move", 1, False, True),
        ("_move", 2, True, False),
        ("_merge_fragments", 2, True, True),
        ("_tidy", 3, True, False),
        ("drop_old_versions", 1, True, True),
    ],
)
def test_kills_at_the_edges_of_a_commit(
    method: str,
    n: int,
    after: bool,
    resume: bool,
    driver: Driver,
    task: dict[str, Any],
    log: Path,
    undisturbed: tuple[State, float],
    tmp_path: Path,
) -> None:
    """Stored but not acknowledged, acknowledged and no more, half compacted; read on or from the start."""
    kill = {"method": method, "n": n, "after": after}
    outcome = driver.run(store=tmp_path, kill=kill, **task)
    assert killed(outcome)
    check_prefix(tmp_path, log, outcome)
    outcome = driver.run(store=tmp_path, resume=resume, **task)
    assert outcome.status == 0 and outcome.last("settled")
    assert_same_state(end_state(tmp_path), undisturbed[0])


@pytest.mark.rarely(policy=COMPARED)
@pytest.mark.parametrize(
    ("policy", "calls"), [*((name, "fused") for name in get_args(PolicyName)), ("recmem", "paper")]
)
def test_other_policies_and_salient_reads_go_on_where_they_were_after_kills(
    policy: PolicyName, calls: CallForm, driver: Driver, task: dict[str, Any], log: Path, tmp_path: Path
) -> None:
    """Turns that wait for their window to fill are undecided in no other way than by their records."""
    other = {**task, "settings": {**task["settings"], "policy": policy, "calls": calls, **WINDOWS}}
    assert driver.run(store=tmp_path / "undisturbed", **other).last("settled")
    store = tmp_path / "killed"
    for kill in ({"method": "append", "n": 4, "after": True}, {"method": "append", "n": 9, "after": False}):
        outcome = driver.run(store=store, kill=kill, **other)
        assert killed(outcome)
        check_prefix(store, log, outcome)
    assert driver.run(store=store, **other).last("settled")
    expected = end_state(tmp_path / "undisturbed")
    assert KINDS[policy] | {"parked"} <= expected.kinds()
    assert_same_state(end_state(store), expected)


def stored_turns(store: Path, log: Path) -> int:
    """By a reader beside the writer."""
    return sum(assert_prefix_stored(store, turns_of(log), {}).values())


def wait_for_turns(process: subprocess.Popen[str], store: Path, log: Path, count: int) -> None:
    deadline_s = time.monotonic() + 120
    while stored_turns(store, log) < count:
        assert process.poll() is None, "the program ended before it could be killed"
        assert time.monotonic() < deadline_s, "the program stores nothing"
        time.sleep(0.05)


def test_the_program_killed_and_resumed(
    task: dict[str, Any], log: Path, undisturbed: tuple[State, float], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    command = [sys.executable, "-B", "-m", "undertow.serving.cli", "ingest", str(log), "--store", str(store)]
    command += f"--json --encoder hash:384 --llm {task['settings']['llm_url']}".split()
    command += f"--batch-turns {BATCH_TURNS} --theta-sim 0.5 --theta-merge 0.6 --theta-count 3".split()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for_turns(process, store, log, 3 * BATCH_TURNS)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert stored_turns(store, log) >= 3 * BATCH_TURNS
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert_same_state(end_state(store), undisturbed[0])
