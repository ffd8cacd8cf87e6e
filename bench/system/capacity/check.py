"""Measures the constants of the capacity model, and compares its predictions with runs of the engine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, get_args

from undertow.bench.machine import describe
from undertow.bench.mock.llm import MockLLM
from undertow.bench.mock.replies import MockReplies
from undertow.bench.system.capacity.model import Assumptions, Profile
from undertow.bench.system.ingest import CachedVectors, settings
from undertow.bench.system.throughput_load import copies
from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Turn
from undertow.engine.base.process_tuning import settle_in
from undertow.engine.llm.client import LLMClient
from undertow.kernels.gate.factory import make_gate
from undertow.prompts.operations import RecMemOperation

REFUSAL_RATE = 0.3  # of the mock's merges
COLD_TENANTS = 16


@dataclass(frozen=True, slots=True)
class LoadCase:
    """A log of `tenants` x `turns`, ingested at once, with a mock LLM of `latency_s`."""

    name: str
    tenants: int
    turns: int
    latency_s: float


CALIBRATION = LoadCase("calibration", 100, 100, 0.0)
CASES = (
    LoadCase("many tenants, quick LLM: bound by the engine", 200, 60, 0.05),
    LoadCase("few tenants, slow LLM: bound by the order within a tenant", 60, 100, 0.2),
)


class Rates(NamedTuple):
    """Turns/s until all are searchable, and until all are decided."""

    searchable: float
    decided: float


def mock_llm(of: Settings, *, latency_s: float) -> LLMClient:
    return MockLLM(MockReplies(refusal_rate=REFUSAL_RATE), latency_s=latency_s)


def engine_of(folder: Path, encoder: CachedVectors, latency_s: float = 0.0, **changes: Any) -> Engine:
    own = settings(device="cpu", **changes)
    return Engine(folder, own, encoder, llm=mock_llm(own, latency_s=latency_s))


def run(case: LoadCase, data: Path, folder: Path) -> Rates:
    """The engine alone."""
    log, encoder = warmed(data, case)
    with engine_of(folder, encoder, case.latency_s) as engine:
        return _rates(len(log), lambda: engine.add_batch(log), engine.drain)


def run_on_ray(case: LoadCase, data: Path, _: Path) -> Rates:
    """One shard on Ray behind the router, fed 512 turns a call."""
    from undertow.bench.system.cluster import CALL_TURNS, cluster_of, feed, packed, start_ray

    start_ray()
    log = list(copies(data, case.tenants, case.turns))
    warm = [replace(turn, tenant=f"warm-{turn.tenant}") for turn in copies(data, 4, 40)]
    with cluster_of(data, 1, partial(mock_llm, latency_s=case.latency_s), settings().batch_turns) as cluster:
        feed(cluster, packed(cluster, warm, CALL_TURNS))  # compiles the kernels
        cluster.drain()
        calls = packed(cluster, log, CALL_TURNS)
        return _rates(len(log), lambda: feed(cluster, calls), cluster.drain)


def _rates(turns: int, add: Callable[[], object], drain: Callable[[], object]) -> Rates:
    searchable_s = _timed(add)
    return Rates(turns / searchable_s, turns / (searchable_s + _timed(drain)))


TARGETS = {"engine": (run, 1.0), "shard on Ray": (run_on_ray, Assumptions().slowdown)}


def predict(case: LoadCase, profile: Profile, slowdown: float = 1.0) -> Rates:
    """The model's closed form of a run: the engine's work, or the longest chain of LLM calls of a tenant."""
    turns, rows = case.tenants * case.turns, case.turns / 2
    work_s = slowdown * turns * profile.decided_s(rows)
    # the engine decides between batches, and leaves the replies for later
    searchable_s = work_s - slowdown * turns * profile.calls * profile.call_s
    chain_s = case.turns * profile.busiest_calls_per_turn * (case.latency_s + slowdown * profile.call_s)
    return Rates(turns / searchable_s, turns / max(work_s, searchable_s + chain_s))


def measure(data: Path, folder: Path) -> Profile:
    """The profile of this machine, from three runs: without decisions, without calls, and with both."""
    case = CALIBRATION
    log, encoder = warmed(data, case)
    # nothing fires and no turn is salient, so there is no LLM call
    never: dict[str, Any] = {"theta_count": 1000, "theta_merge": 1.0, "salience_turns": 0, "quiet_share": 0.0}
    with engine_of(folder / "quiet", encoder, **never) as engine:
        engine.scheduler.blocked.update(dict.fromkeys({turn.tenant for turn in log}, "measured later"))
        admit_s = _timed(lambda: engine.add_batch(log)) / len(log)
        engine.resume()
        quiet_s = _timed(engine.drain) / len(log)
        gate_byte_s = _gate_byte_s(engine)
        singles = [replace(log[n], tenant="single") for n in range(20)]
        commit_s = statistics.median(_timed(partial(engine.add_batch, [turn])) for turn in singles)
        row_bytes, arena_bytes = engine.arena.row_bytes, engine.settings.arena_bytes
    with engine_of(folder / "full", encoder) as engine:
        full_s = _timed(lambda: (engine.add_batch(log), engine.drain())) / len(log)
        stats, usage = engine.stats(), engine.usage()
        each = [engine.usage(name).values() for name in engine.tenants.names()]
    calls = {op: usage[op]["calls"] / len(log) for op in get_args(RecMemOperation) if op in usage}
    machine = describe()
    return Profile(
        name=f"{machine['cpu']}, {machine['cores']} cores; cached vectors, mock LLM",
        admit_s=admit_s,
        encode_s=0.0,
        decide_s=max(0.0, quiet_s - case.turns / 2 * row_bytes * gate_byte_s),
        gate_byte_s=gate_byte_s,
        call_s=max(0.0, (full_s - admit_s - quiet_s) / sum(calls.values())),
        commit_s=commit_s,
        load_s=_load_s(folder / "quiet", encoder),
        calls_per_turn=calls,
        busiest_calls_per_turn=max(sum(spent["calls"] for spent in used) for used in each) / case.turns,
        memories_per_turn=(stats["episodes"] + stats["facts"]) / len(log),
        row_bytes=row_bytes,
        arena_bytes=arena_bytes,
        llm_seconds=dict.fromkeys(calls, 0.2),
        sources={
            "engine": f"measured, {case.tenants} x {case.turns} turns",
            "llm": "the mock's 0.2 s a call",
        },
    )


def check(data: Path, rounds: int, targets: list[str]) -> tuple[Profile, dict[str, Any]]:
    """Measure, run and predict `rounds` times; ratios are within a round, their median counts."""
    profiles: list[Profile] = []
    found: dict[tuple[str, LoadCase], list[tuple[Rates, Rates]]] = {}
    with TemporaryDirectory(prefix="undertow-capacity-") as made:
        folder = Path(made)
        run(LoadCase("", 4, 40, 0.001), data, folder / "warm")  # compiles the kernels
        settle_in()  # as the program and a shard do; else one garbage collection is a quarter of a run
        for number in range(rounds):
            profiles.append(measure(data, folder / f"{number}"))
            for target in targets:
                measured, slowdown = TARGETS[target]
                for n, case in enumerate(CASES):
                    rates = measured(case, data, folder / f"{number}-{n}")
                    predicted = predict(case, profiles[-1], slowdown)
                    found.setdefault((target, case), []).append((rates, predicted))
    rows = [_row(target, case, pairs) for (target, case), pairs in found.items()]
    middle = sorted(profiles, key=lambda profile: profile.admit_s)[len(profiles) // 2]
    return middle, {"machine": describe(), "rounds": rounds, "cases": rows}


def _row(target: str, case: LoadCase, pairs: list[tuple[Rates, Rates]]) -> dict[str, Any]:
    row: dict[str, Any] = {"target": target, **asdict(case)}
    for what in ("searchable", "decided"):
        rates = [(getattr(measured, what), getattr(predicted, what)) for measured, predicted in pairs]
        row[f"{what}_per_s"] = round(statistics.median(m for m, _ in rates), 1)
        row[f"{what}_predicted"] = round(statistics.median(p for _, p in rates), 1)
        row[f"{what}_ratio"] = round(statistics.median(p / m for m, p in rates), 3)
        row[f"{what}_ratios"] = [round(p / m, 3) for m, p in rates]
    return row


def warmed(data: Path, case: LoadCase) -> tuple[list[Turn], CachedVectors]:
    """Copies of the conversations, and an encoder that has their vectors."""
    log, encoder = list(copies(data, case.tenants, case.turns)), CachedVectors()
    encoder.warm([turn.text for turn in log])
    return log, encoder


def _timed(act: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    act()
    return time.perf_counter() - began_s


def _gate_byte_s(engine: Engine) -> float:
    """Seconds per byte of the gate over all turns of all tenants, one query each."""
    segments = [tenant.turns_segment for tenant in engine.tenants.loaded()]
    queries = engine.arena.vectors(segments[0])[:1].repeat(len(segments), 0)
    gate, rows = make_gate(engine.arena), sum(len(engine.arena.vectors(s)) for s in segments)
    ask = partial(gate.nearest, queries=queries.astype("float16"), segments=segments, k=[5] * len(segments))
    ask()
    return statistics.median(_timed(ask) for _ in range(5)) / (rows * engine.arena.row_bytes)


def _load_s(folder: Path, encoder: CachedVectors) -> float:
    """Seconds to load one tenant from the journal, when several are loaded together."""
    with Engine(folder, settings(), encoder, writable=False) as engine:
        names = engine.tenants.names()[:COLD_TENANTS]
        return _timed(lambda: engine.tenants.get_many(names)) / len(names)
