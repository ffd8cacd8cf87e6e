"""Plans: so many shards, so many tenants with skew. What rate, what lag, how many LLM servers, what binds."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from undertow.bench.system.capacity.clock import Gauge
from undertow.bench.system.capacity.load import Spread, Traffic, shard_map, tenant_name
from undertow.bench.system.capacity.profile import LLMServer, Profile
from undertow.bench.system.capacity.shard import Arrival, Memoir, SimulatedShard, delays, life_of
from undertow.engine.base.config import Settings

DEFAULT_LOAD = 0.7  # of what the engines can decide, where no rate is asked for
LLM_LOAD = 0.8  # of the servers' slots, when their number is worked out
_WARM_UP = 0.25  # of a simulation, left out of its figures
LEAST_TURNS = 2_048  # four batches: a quarter to warm up, three to count
_MANY_IN_FLIGHT = 4_096


@dataclass(frozen=True, slots=True)
class Size:
    """What is asked: GPUs (one shard each), tenants, and turns/s in all (None: 70% of what they decide)."""

    gpus: int
    tenants: int
    turns_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.tenants < 1 or (self.turns_per_s is not None and self.turns_per_s <= 0):
            raise ValueError(f"a size needs GPUs, tenants and a rate above 0, not {self}")


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What all sizes of a plan share. `slowdown`: the shard's shell round the engine, in multiples."""

    skew: float = 0.8
    history_turns: float = 300.0
    largest_turns: float = 1e5
    session_turns: int = 10
    slowdown: float = 1.1
    turns: int = 10_000
    """How many turns each simulated shard takes."""

    def __post_init__(self) -> None:
        if self.turns < LEAST_TURNS:
            raise ValueError(f"{self.turns} turns a shard fill too few batches; give {LEAST_TURNS:,} or more")


def plan(profile: Profile, size: Size, given: Assumptions, llm_servers: int | None = None) -> dict[str, Any]:
    """One size in figures: cluster-wide rates, and the hottest and the median shard in detail."""
    traffic = Traffic(size.tenants, given.skew, given.history_turns, given.largest_turns)
    spread = Spread.over(traffic, shard_map(size.gpus))
    remember = memory_of(profile, traffic, size.gpus, given.session_turns)
    hot = spread.hottest
    share = float(spread.shares[hot])
    arrivals = [_arrival(rank, n, 0.0) for n, rank in enumerate(spread.ranks(hot, given.turns).tolist())]
    searchable = saturated(profile, remember, arrivals, given.slowdown, decide=False) / share
    decided = saturated(profile, remember, arrivals, given.slowdown, decide=True) / share
    rate = size.turns_per_s or DEFAULT_LOAD * decided
    call_s = sum(calls * profile.llm.seconds[op] for op, calls in profile.calls_per_turn.items())
    slots = profile.llm.slots
    needed = 0 if slots is None else math.ceil(rate * call_s / slots / LLM_LOAD)
    in_all = None if slots is None else slots * (llm_servers or needed)
    row: dict[str, Any] = {
        "gpus": size.gpus,
        "tenants": size.tenants,
        "searchable_capacity_per_s": round(searchable),
        "decided_capacity_per_s": round(decided),
        "offered_per_s": round(rate, 1),
        "llm_calls_per_s": round(rate * sum(profile.calls_per_turn.values()), 1),
        "llm_servers_needed": needed,
        "llm_servers": llm_servers or needed,
        "hottest_over_mean_shard": round(share * size.gpus, 3),
        "resident_tenants": traffic.resident_rank(_room_turns(profile, size.gpus)),
        "largest_tenant_turns": round(traffic.history(1)),
        "loads": {
            "engine": round(rate / decided, 3),
            "LLM servers": 0.0 if in_all is None else round(rate * call_s / in_all, 3),
            "order of the largest tenant": round(traffic.share(1) * rate * call_s, 3),
        },
        "tenants_beyond_their_order": int(np.count_nonzero(traffic.head_shares * rate * call_s > 1)),
    }
    for name, shard in (("hottest", hot), ("median", spread.median)):
        servers = profile.llm.model_copy(
            update={"slots": None if in_all is None else max(1, round(in_all / size.gpus))}
        )
        row[name] = flowing(
            profile, remember, spread, shard, rate, servers, slowdown=given.slowdown, turns=given.turns
        )
    row["bottleneck"] = _bottleneck(row)
    return row


def memory_of(
    profile: Profile, traffic: Traffic, gpus: int, session_turns: int
) -> Callable[[Arrival], Memoir]:
    """What shards know of a tenant beforehand: its history, and whether it is in the arena.

    The most active tenants that fit stay in it; another is loaded once for each `session_turns` turns.
    Histories vary by half to either side: tenants of like rank must not go through their lives in step.
    """
    resident = traffic.resident_rank(_room_turns(profile, gpus))

    def remember(arrival: Arrival) -> Memoir:
        first_of_session = zlib.crc32(b"session" + arrival.tenant.encode()) % session_turns == 0
        varied = 0.5 + zlib.crc32(b"history" + arrival.tenant.encode()) / 2**32
        history = round(traffic.history(arrival.rank) * varied)
        return Memoir(
            life_of(profile.lives, arrival.tenant),
            history,
            arrival.rank <= resident or not first_of_session or not history,
        )

    return remember


def _room_turns(profile: Profile, gpus: int) -> float:
    return gpus * profile.arena_bytes / profile.bytes_per_turn


def _arrival(rank: int, number: int, at_s: float) -> Arrival:
    return Arrival(tenant_name(rank), (), str(number), at_s=at_s, rank=rank)


def saturated(
    profile: Profile,
    remember: Callable[[Arrival], Memoir],
    arrivals: Sequence[Arrival],
    slowdown: float,
    *,
    decide: bool,
) -> float:
    """Turns/s of one shard whose queue never empties: to searchable, or to decided by an instant LLM.

    Counted from a quarter of the turns to the last: jobs begun before that are under way by then, and the
    chains of the last tenants, which leave the engine idle, come after it.
    """
    settings = _settings(len(arrivals), _MANY_IN_FLIGHT)
    shard = SimulatedShard(
        profile, settings, remember, servers=LLMServer.even(0.0), slowdown=slowdown, with_llm=decide
    )
    for arrival in arrivals:
        shard.put(arrival)
    done = shard.decided_s if decide else shard.searchable_s
    inbox, warm = shard.scheduler.inbox, (0, 0.0)
    while len(inbox):
        shard.step()
        if not warm[0] and len(inbox) <= (1 - _WARM_UP) * len(arrivals):
            warm = (len(done), shard.clock.now_s)
    return (len(done) - warm[0]) / (shard.clock.now_s - warm[1])


def flowing(
    profile: Profile,
    remember: Callable[[Arrival], Memoir],
    spread: Spread,
    shard: int,
    turns_per_s: float,
    servers: LLMServer,
    *,
    slowdown: float = 1.0,
    turns: int,
    seed: int = 0,
) -> dict[str, Any]:
    """One shard under its part of a Poisson stream of `turns_per_s` in all: lags in s, queues, loads."""
    rng = np.random.default_rng([seed, shard, 1])
    rate = turns_per_s * float(spread.shares[shard])
    times = np.cumsum(rng.exponential(1 / rate, turns)).tolist()
    ranks = spread.ranks(shard, turns, seed).tolist()
    arrivals = [_arrival(rank, n, at_s) for n, (rank, at_s) in enumerate(zip(ranks, times, strict=True))]
    simulated = SimulatedShard(
        profile,
        _settings(8_192, servers.slots or _MANY_IN_FLIGHT),
        remember,
        servers=servers,
        slowdown=slowdown,
        seed=seed,
    )
    gauges, spent_s, ended_s = _stream(simulated, arrivals, times[int(_WARM_UP * turns)])
    since_s = times[int(_WARM_UP * turns)]
    llm = simulated.llm
    busy, waiting = llm.at_servers.mean(llm.now_s), llm.waiting.mean(llm.now_s)
    simulated.finish()
    return {
        "turns_per_s": round(rate, 1),
        "searchable_lag_s": _percentiles(delays(simulated.searchable_s, since_s)),
        "decided_lag_s": _percentiles(delays(simulated.decided_s, since_s)),
        "queued": _of(gauges["queued"], ended_s),
        "undecided": _of(gauges["undecided"], ended_s),
        "llm_waiting": round(waiting, 1),
        "llm_at_servers": round(busy, 1),
        "engine_busy": round(spent_s / (ended_s - since_s), 3),
        "engine_parts": _parts(simulated),
    }


def _stream(
    shard: SimulatedShard, arrivals: Sequence[Arrival], since_s: float
) -> tuple[dict[str, Gauge], float, float]:
    """Let turns arrive at their times until the last one has: gauges and seconds of work from `since_s`."""
    gauges = {"queued": Gauge(), "undecided": Gauge()}
    clock, inbox = shard.clock, shard.scheduler.inbox
    came = put = 0
    warm, before_s = False, 0.0
    while put < len(arrivals):
        while came < len(arrivals) and arrivals[came].at_s <= clock.now_s:
            came += 1
        for arrival in arrivals[put : min(came, put + inbox.room)]:
            shard.put(arrival)
            put += 1
        if not warm and clock.now_s >= since_s:
            warm, before_s = True, _work_s(shard)
            for gauge in (*gauges.values(), shard.llm.at_servers, shard.llm.waiting):
                gauge.restart(clock.now_s)
        gauges["queued"].set(clock.now_s, came - put + len(inbox))
        gauges["undecided"].set(clock.now_s, came - len(shard.decided_s))
        if not shard.step():
            clock.wait(arrivals[came].at_s if came < len(arrivals) else None)
    return gauges, _work_s(shard) - before_s, clock.now_s


def _work_s(shard: SimulatedShard) -> float:
    return sum(shard.clock.spent_s.values())


def _parts(shard: SimulatedShard) -> dict[str, float]:
    """The three largest phases, by their share of the shard's work."""
    total = _work_s(shard)
    largest = sorted(shard.clock.spent_s.items(), key=lambda item: -item[1])[:3]
    return {name: round(spent / total, 3) for name, spent in largest}


def _settings(queue_turns: int, llm_in_flight: int) -> Settings:
    return Settings(device="cpu", queue_turns=queue_turns, llm_in_flight=llm_in_flight)


def _percentiles(values: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, float]:
    found = np.percentile(values, (50, 95)) if len(values) else (math.nan, math.nan)
    return {"p50": round(float(found[0]), 4), "p95": round(float(found[1]), 4)}


def _of(gauge: Gauge, now_s: float) -> dict[str, float]:
    return {"mean": round(gauge.mean(now_s), 1), "most": gauge.most}


def _bottleneck(row: dict[str, Any]) -> str:
    """What is loaded most, in words."""
    loads = row["loads"]
    name = max(loads, key=lambda key: loads[key])
    part = f" ({next(iter(row['hottest']['engine_parts']))} first)" if name == "engine" else ""
    return f"{name}{part}, {loads[name]:.0%}"
