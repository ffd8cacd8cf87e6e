"""The model against the engine: the same loads, once run and once predicted, rounds of both in turn."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from undertow.bench.capacity_calibrate import Calibration, warmed
from undertow.bench.capacity_profile import LLMServer, Profile
from undertow.bench.capacity_shard import Arrival, Memoir, SimulatedShard
from undertow.bench.ingest import settings
from undertow.bench.machine import describe
from undertow.bench.mock_llm import MockLLM
from undertow.bench.mock_replies import MockReplies
from undertow.engine.engine import WAIT_FOR_REPLY_S, Engine

WITHIN = 0.2
LIFE_TURNS = 100


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


def predict(case: Case, profile: Profile) -> Rates:
    """The same in simulated time; tenant n repeats the n-th recorded life."""
    lives = profile.lives
    shard = SimulatedShard(
        profile,
        settings(device="cpu"),
        lambda arrival: Memoir(lives[arrival.rank % len(lives)]),
        servers=LLMServer.even(case.latency_s),
    )
    for n in range(case.turns):
        for tenant in range(case.tenants):
            shard.put(Arrival(f"tenant-{tenant}", (), f"{tenant}-{n}", rank=tenant))
    while len(shard.scheduler.inbox):
        shard.step()
    searchable_s = shard.clock.now_s
    finish(shard)
    turns = case.tenants * case.turns
    return Rates(turns / searchable_s, turns / shard.clock.now_s, sum(shard.llm.calls.values()))


def finish(shard: SimulatedShard) -> None:
    """Step until everything is decided, as `Engine.drain` does."""
    while not shard.scheduler.idle:
        if not (shard.step() or shard.clock.wait(None) or shard.scheduler.idle):
            raise RuntimeError("the simulated shard has work left and nothing to wait for")


def check(data: Path, rounds: int) -> tuple[Profile, dict[str, Any]]:
    """Rounds of: calibrate, run the cases, calibrate again, predict the cases from these two calibrations.

    So a ratio compares times of the same minutes. The profile is that of all calibrations together.
    `within_20_percent`: the median ratio over rounds is, for each rate.
    """
    pooled = Calibration(data, LIFE_TURNS)
    ratios: dict[str, list[tuple[Rates, Rates]]] = {case.name: [] for case in CASES}
    folder = Path(tempfile.mkdtemp(prefix="undertow-capacity-"))
    try:
        run(Case("", 4, 40, 0.001), data, folder / "warm")  # compiles the kernels
        for number in range(rounds):
            around = Calibration(data, LIFE_TURNS)
            around.round(folder / f"{number}-before")
            measured = [run(case, data, folder / f"{number}-{n}") for n, case in enumerate(CASES)]
            around.round(folder / f"{number}-after")
            profile = around.profile()
            for case, rates in zip(CASES, measured, strict=True):
                ratios[case.name].append((rates, predict(case, profile)))
            pooled.absorb(around)
    finally:
        shutil.rmtree(folder)
    rows = [_row(case, ratios[case.name]) for case in CASES]
    within = all(
        abs(row[f"{what}_ratio"] - 1) <= WITHIN for row in rows for what in ("searchable", "decided")
    )
    return pooled.profile(), {
        "machine": describe(),
        "rounds": rounds,
        "cases": rows,
        "within_20_percent": within,
    }


def _row(case: Case, found: list[tuple[Rates, Rates]]) -> dict[str, Any]:
    """Rates as (measured, predicted) of each round: medians, and the median of their ratios."""
    row: dict[str, Any] = asdict(case)
    for what in ("searchable", "decided"):
        pairs = [(getattr(measured, what), getattr(predicted, what)) for measured, predicted in found]
        row[f"{what}_per_s"] = round(statistics.median(m for m, _ in pairs), 1)
        row[f"{what}_predicted"] = round(statistics.median(p for _, p in pairs), 1)
        row[f"{what}_ratio"] = round(statistics.median(p / m for m, p in pairs), 3)
        row[f"{what}_all"] = [[round(m, 1), round(p, 1)] for m, p in pairs]
    row["llm_calls"], row["llm_calls_predicted"] = found[0][0].llm_calls, found[0][1].llm_calls
    return row
