"""The model against the engine, alone and as a shard on Ray: the same loads, once run and once predicted."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from undertow.bench.machine import describe
from undertow.bench.mock.llm import MockLLM
from undertow.bench.mock.replies import MockReplies
from undertow.bench.system.capacity.calibrate import Calibration, warmed
from undertow.bench.system.capacity.plan import Assumptions
from undertow.bench.system.capacity.profile import LLMServer, Profile
from undertow.bench.system.capacity.shard import Arrival, Memoir, SimulatedShard
from undertow.bench.system.ingest import settings
from undertow.bench.system.throughput_load import copies
from undertow.engine.api.engine import WAIT_FOR_REPLY_S, Engine
from undertow.engine.base.config import Settings
from undertow.engine.base.process_tuning import settle_in
from undertow.engine.llm.client import LLMClient

WITHIN = 0.2
LIFE_TURNS = 100
_WARM = (4, 40)


@dataclass(frozen=True, slots=True)
class Case:
    """A log of `tenants` x `turns`, ingested at once, with a mock LLM of `latency_s`."""

    name: str
    tenants: int
    turns: int
    latency_s: float


CASES = (
    Case("many tenants, quick LLM: bound by the engine", 200, 60, 0.05),
    Case("few tenants, slow LLM: bound by the order within a tenant", 60, 100, 0.2),
)


@dataclass(frozen=True, slots=True)
class Rates:
    """Turns/s until all are searchable, and until all are decided; LLM calls in all."""

    searchable: float
    decided: float
    llm_calls: int


@dataclass(frozen=True, slots=True)
class Target:
    """What is measured, and by how much the model takes it to be slower than the engine alone."""

    name: str
    run: Callable[[Case, Path, Path], Rates]
    slowdown: float


def run(case: Case, data: Path, folder: Path) -> Rates:
    """The engine itself."""
    log, encoder = warmed(data, case.tenants, case.turns)
    llm = MockLLM(MockReplies(refusal_rate=0.3), latency_s=case.latency_s)
    with Engine(folder, settings(device="cpu"), encoder, llm=llm) as engine:
        began_s = time.perf_counter()
        engine.add_batch(log)
        searchable_s = time.perf_counter() - began_s
        while not engine.idle:
            engine.step(WAIT_FOR_REPLY_S)
        decided_s = time.perf_counter() - began_s
        calls = sum(llm.calls.values())
    return Rates(len(log) / searchable_s, len(log) / decided_s, calls)


def run_on_ray(case: Case, data: Path, _: Path) -> Rates:
    """One shard behind the router, each of its libraries with one thread, fed 512 turns a call."""
    from undertow.bench.system.cluster import (  # `plan` needs no Ray
        CALL_TURNS,
        cluster_of,
        feed,
        packed,
        start_ray,
    )

    start_ray()
    log = list(copies(data, case.tenants, case.turns))
    warm = [replace(turn, tenant=f"warm-{turn.tenant}") for turn in copies(data, *_WARM)]
    llm = partial(mock_llm, latency_s=case.latency_s)
    with cluster_of(data, 1, llm, settings().batch_turns) as cluster:
        feed(cluster, packed(cluster, warm, CALL_TURNS))  # compiles the kernels
        cluster.drain()
        calls_before = cluster.stats()["llm_calls"]
        packed_log = packed(cluster, log, CALL_TURNS)
        began_s = time.perf_counter()
        feed(cluster, packed_log)
        searchable_s = time.perf_counter() - began_s
        cluster.drain()
        decided_s = time.perf_counter() - began_s
        calls = cluster.stats()["llm_calls"] - calls_before
    return Rates(len(log) / searchable_s, len(log) / decided_s, calls)


def mock_llm(of: Settings, *, latency_s: float) -> LLMClient:
    return MockLLM(MockReplies(refusal_rate=0.3), latency_s=latency_s)


TARGETS = (Target("engine", run, 1.0), Target("shard on Ray", run_on_ray, Assumptions().slowdown))


def predict(case: Case, profile: Profile, slowdown: float = 1.0) -> Rates:
    """The same in simulated time; tenant n repeats the n-th recorded life."""
    lives = profile.lives
    shard = SimulatedShard(
        profile,
        settings(device="cpu"),
        lambda arrival: Memoir(lives[arrival.rank % len(lives)]),
        servers=LLMServer.even(case.latency_s),
        slowdown=slowdown,
    )
    for n in range(case.turns):
        for tenant in range(case.tenants):
            shard.put(Arrival(f"tenant-{tenant}", (), f"{tenant}-{n}", rank=tenant))
    while len(shard.scheduler.inbox):
        shard.step()
    searchable_s = shard.clock.now_s
    shard.finish()
    turns = case.tenants * case.turns
    return Rates(turns / searchable_s, turns / shard.clock.now_s, sum(shard.llm.calls.values()))


def check(data: Path, rounds: int) -> tuple[Profile, dict[str, Any]]:
    """Rounds of: calibrate, run the cases, calibrate again, predict the cases from these two calibrations.

    So a ratio compares times of the same minutes. The profile is that of all calibrations together.
    `within_20_percent`: the median ratio over rounds is, for each rate of each target.
    """
    pooled = Calibration(data, LIFE_TURNS)
    runs = [(target, case) for target in TARGETS for case in CASES]
    found: defaultdict[tuple[Target, Case], list[tuple[Rates, Rates]]] = defaultdict(list)
    folder = Path(tempfile.mkdtemp(prefix="undertow-capacity-"))
    try:
        run(Case("", *_WARM, 0.001), data, folder / "warm")  # compiles the kernels
        settle_in()  # as the program and a shard do; else one look for garbage is a quarter of a run
        for number in range(rounds):
            around = Calibration(data, LIFE_TURNS)
            around.round(folder / f"{number}-before")
            measured = [
                target.run(case, data, folder / f"{number}-{n}") for n, (target, case) in enumerate(runs)
            ]
            around.round(folder / f"{number}-after")
            profile = around.profile()
            for (target, case), rates in zip(runs, measured, strict=True):
                found[target, case].append((rates, predict(case, profile, target.slowdown)))
            pooled.absorb(around)
    finally:
        shutil.rmtree(folder)
    rows = [_row(target, case, found[target, case]) for target, case in runs]
    return pooled.profile(), {
        "machine": describe(),
        "rounds": rounds,
        "cases": rows,
        "within_20_percent": all(abs(ratio - 1) <= WITHIN for ratio in ratios(rows)),
    }


def ratios(rows: list[dict[str, Any]]) -> list[float]:
    """Of all cases, for both rates: predicted over measured, the median of the rounds."""
    return [row[f"{what}_ratio"] for row in rows for what in ("searchable", "decided")]


def _row(target: Target, case: Case, found: list[tuple[Rates, Rates]]) -> dict[str, Any]:
    """Rates as (measured, predicted) of each round: medians, and the median of their ratios."""
    row: dict[str, Any] = {"target": target.name, **asdict(case)}
    for what in ("searchable", "decided"):
        pairs = [(getattr(measured, what), getattr(predicted, what)) for measured, predicted in found]
        row[f"{what}_per_s"] = round(statistics.median(m for m, _ in pairs), 1)
        row[f"{what}_predicted"] = round(statistics.median(p for _, p in pairs), 1)
        row[f"{what}_ratio"] = round(statistics.median(p / m for m, p in pairs), 3)
        row[f"{what}_all"] = [[round(m, 1), round(p, 1)] for m, p in pairs]
    row["llm_calls"], row["llm_calls_predicted"] = found[0][0].llm_calls, found[0][1].llm_calls
    return row
