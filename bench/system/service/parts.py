"""The parts of the benchmark: each loads one service over a copy of a filled store, and returns figures."""

from __future__ import annotations

import asyncio
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from undertow.bench.system.service import closed_loop
from undertow.bench.system.service.open_loop import Answer, Caller, Outcome, arrivals, run_loop
from undertow.bench.system.service.served import Checkout, Service, Side
from undertow.bench.system.service.world import Request, World
from undertow.engine.api.views.reports import Reports
from undertow.engine.base.model import UndertowError
from undertow.engine.storage.journal import Journal
from undertow.engine.storage.location import Location

GOAL_SEARCH_P95_MS, GOAL_ADD_P95_MS = 10.0, 15.0
# rates are FIRST_RATE times a power of STEP, so that runs can be compared
FIRST_RATE, STEP = 40.0, 1.25
# the search for the highest rate begins at this share of the closed loop's rate
FIRST_SHARE = 0.3
KILL_RATE = 500.0
PREPARING_AT_ONCE = 4
WINDOW_S = 0.5
MIB = 2**20

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Mix:
    """Adds to searches, as `1:9`."""

    adds: int
    searches: int

    @classmethod
    def of(cls, text: str) -> Mix:
        """ValueError."""
        adds, searches = map(int, text.split(":"))
        if adds < 0 or searches < 0 or not adds + searches:
            raise ValueError(f"{text!r} is no mix of adds and searches, such as 1:9")
        return cls(adds, searches)

    def __str__(self) -> str:
        return f"{self.adds}:{self.searches}"

    @property
    def add_share(self) -> float:
        return self.adds / (self.adds + self.searches)


@dataclass(frozen=True, slots=True)
class Filled:
    """A store that holds a world, made once; each run gets a copy."""

    side: Side
    world: World
    store: Path
    figures: Figures

    @classmethod
    def make(cls, side: Side, world: World, folder: Path) -> Filled:
        """UndertowError."""
        folder.mkdir()
        log = folder / "world.jsonl"
        world.write_log(log)
        figures = side.fill(log, folder / "store")
        log.unlink()
        return cls(side, world, folder / "store", figures)

    @contextmanager
    def loaded(self, mix: Mix, durability: str) -> Iterator[Load]:
        """A service over a copy of the store, each tenant searched once."""
        with TemporaryDirectory(prefix="undertow-bench-") as made:
            store = Path(made) / "store"
            shutil.copytree(self.store, store)
            with self.side.served(store, durability) as service:
                load = Load(self.side, self.world, service, mix)
                load.prepare()
                yield load


@dataclass(slots=True)
class Load:
    """Requests to one service. Each stretch has a seed of its own, the same for every service."""

    side: Side
    world: World
    service: Service
    mix: Mix
    _seeds: Iterator[int] = field(default_factory=lambda: count(1_000))

    def prepare(self) -> None:
        run_loop(self._prepare())

    async def _prepare(self) -> None:
        caller = Caller(self.service.url)
        await caller.all_of(self.world.one_search_each(self.service.url, self.service.key), PREPARING_AT_ONCE)
        caller.close()

    def at_rate(self, rate: float, seconds: float) -> tuple[Outcome, Figures]:
        """An open loop, and its figures with the service's CPU time."""
        return run_loop(self.at_rate_async(rate, seconds))

    async def at_rate_async(self, rate: float, seconds: float) -> tuple[Outcome, Figures]:
        return await self._at_moments(arrivals(rate, seconds, self._seed()), Outcome(rate, seconds))

    def at_rates(self, rates: Sequence[float], seconds: float) -> list[Outcome]:
        """Open loops one right after the other: each begins whatever the one before has left."""
        moments = [
            n * seconds + due_s
            for n, rate in enumerate(rates)
            for due_s in arrivals(rate, seconds, self._seed())
        ]
        outcome, _ = run_loop(self._at_moments(moments, Outcome(0.0, seconds * len(rates))))
        return [outcome.part(rate, n * seconds, seconds) for n, rate in enumerate(rates)]

    def _seed(self) -> int:
        return next(self._seeds)

    async def _at_moments(self, due_s: Sequence[float], outcome: Outcome) -> tuple[Outcome, Figures]:
        requests, caller = self._requests(len(due_s), self._seed()), Caller(self.service.url)
        cpu_s = self.cpu_s()
        await caller.run(requests, due_s, outcome)
        spent_s = self.cpu_s() - cpu_s
        caller.close()
        return outcome, {**outcome.figures(), **_per_request(spent_s, len(requests))}

    def at_most(self, seconds: float, connections: int = closed_loop.CONNECTIONS) -> Figures:
        """The closed loop's figures with the service's CPU time."""
        requests = self._requests(int(seconds * closed_loop.MOST_PER_S), self._seed())
        cpu_s = self.cpu_s()
        figures = closed_loop.drive(self.service.url, requests, seconds, connections)
        return {**figures, **_per_request(self.cpu_s() - cpu_s, figures["requests"])}

    def cpu_s(self) -> float:
        """Of the service; 0 once it was killed."""
        return self.service.cpu_s() if self.service.process.is_running() else 0.0

    def decided(self) -> Figures:
        """UndertowError: not every turn was decided."""
        return self.side.decided(self.service)

    def _requests(self, count: int, seed: int) -> list[Request]:
        at = self.service.url, self.service.key
        return self.world.requests(*at, count, add_share=self.mix.add_share, seed=seed)


def _per_request(cpu_s: float, requests: int) -> Figures:
    return {"service_cpu_ms_per_request": round(1e3 * cpu_s / max(requests, 1), 3)}


def cost_part(
    filled: Filled, mix: Mix, durability: str, *, seconds: float, rate: float, connections: int
) -> Figures:
    """An open loop at a fixed rate, then the closed loop."""
    with filled.loaded(mix, durability) as load:
        load.at_rate(rate, min(seconds, 5.0))  # to warm up
        _, at_rate = load.at_rate(rate, seconds)
        most = load.at_most(seconds, connections)
        return {"open_loop": at_rate, "closed_loop": most, "decided": load.decided()}


def holds(outcome: Outcome) -> bool:
    """Whether both goals were met, and every request was answered with 200."""
    return outcome.p95_ms(adds=False) <= GOAL_SEARCH_P95_MS and outcome.p95_ms(adds=True) <= GOAL_ADD_P95_MS


def rate_part(filled: Filled, mix: Mix, durability: str, seconds: float) -> Figures:
    """The highest rate that holds both goals. It rises until two rates in a row miss them; if the first
    one misses, it falls until one holds them.
    """
    with filled.loaded(mix, durability) as load:
        most = load.at_most(min(seconds, 10.0))
        step = round(np.log(max(1.0, FIRST_SHARE * most["answered_per_s"]) / FIRST_RATE) / np.log(STEP))
        tried: list[tuple[float, bool, Figures]] = []

        def attempt(step: int) -> bool:
            rate = round(FIRST_RATE * STEP**step, 1)
            outcome, figures = load.at_rate(rate, seconds)
            tried.append((rate, holds(outcome), figures))
            return tried[-1][1]

        rises, misses = attempt(step), 0
        while rises and misses < 2:
            step += 1
            misses = 0 if attempt(step) else misses + 1
        while not rises and FIRST_RATE * STEP**step > 1.0:
            step -= 1
            rises = attempt(step)
        decided = load.decided()
    return {
        "goal_search_p95_ms": GOAL_SEARCH_P95_MS,
        "goal_add_p95_ms": GOAL_ADD_P95_MS,
        "highest_rate_per_s": max((rate for rate, held, _ in tried if held), default=0.0),
        "seconds_a_rate": seconds,
        "closed_loop": most,
        "rates": [figures for _, _, figures in tried],
        "decided": decided,
    }


def overload_part(filled: Filled, mix: Mix, durability: str, seconds: float) -> Figures:
    """Twice what the closed loop reaches, then a fifth of it."""
    with filled.loaded(mix, durability) as load:
        peak = load.at_most(seconds)
        most = peak["answered_per_s"]
        beyond, after = load.at_rates([round(2 * most, 1), round(most / 5, 1)], seconds)
        figures = beyond.figures()
        return {
            "closed_loop": peak,
            "beyond": figures,
            "share_of_peak": round(figures["answered_per_s"] / most, 3),
            "after": after.figures(),
            **recovery(after.answers, seconds),
            "decided": load.decided(),
        }


def recovery(answers: Sequence[Answer], seconds: float) -> Figures:
    """When the first window of searches that held the goal began, and how many windows missed it later."""
    starts = np.arange(0.0, seconds, WINDOW_S).tolist()
    held = [
        _window_holds([a for a in answers if start <= a.due_s < start + WINDOW_S and not a.adds])
        for start in starts
    ]
    first = held.index(True) if any(held) else len(held)
    return {
        "recovered_after_s": starts[first] if any(held) else None,
        "missed_windows_later": held[first:].count(False),
    }


def _window_holds(answers: Sequence[Answer]) -> bool:
    if not answers:
        return True
    latencies_s = [a.latency_s if a.status == 200 else float("inf") for a in answers]
    return float(np.percentile(latencies_s, 95, method="lower")) * 1e3 <= GOAL_SEARCH_P95_MS


def memory_part(filled: Filled, mix: Mix, durability: str, seconds: float, rate: float) -> Figures:
    """The process's own memory, sampled each second, under a rate that it keeps up with."""
    with filled.loaded(mix, durability) as load:
        (outcome, figures), samples = run_loop(_sampled(load, rate, seconds))
        decided = load.decided()
    at_s, own = np.array(samples).T
    late = at_s >= seconds / 3
    first, second = np.triu_indices(int(late.sum()), k=1)
    slopes = np.diff(own[late][[first, second]], axis=0) / np.diff(at_s[late][[first, second]], axis=0)
    return {
        "rate_per_s": rate,
        "seconds": seconds,
        "own_mib_by_tenth": [round(float(np.median(part)) / MIB, 1) for part in np.array_split(own, 10)],
        "slope_mib_per_min": round(60 * float(np.median(slopes)) / MIB, 2),  # Theil-Sen
        "added_turns_per_min": round(60 * len(outcome.latencies_s(adds=True)) / seconds),
        **figures,
        "decided": decided,
    }


async def _sampled(
    load: Load, rate: float, seconds: float
) -> tuple[tuple[Outcome, Figures], list[tuple[float, int]]]:
    samples: list[tuple[float, int]] = []
    began_s = time.monotonic()

    async def sample() -> None:
        while True:
            memory = load.service.process.memory_info()
            samples.append((time.monotonic() - began_s, memory.rss - memory.shared))
            await asyncio.sleep(1)

    sampling = asyncio.create_task(sample())
    try:
        return await load.at_rate_async(rate, seconds), samples
    finally:
        sampling.cancel()


def kill_part(filled: Filled, mix: Mix, durability: str, seconds: float) -> Figures:
    """SIGKILL in the middle of a load: how many acknowledged turns are lost afterwards, or stored twice."""
    if not isinstance(filled.side, Checkout):
        raise UndertowError("the part kill reads the store, which only this checkout's service has")
    with filled.loaded(mix, durability) as load:
        outcome, _ = run_loop(_killed(load, KILL_RATE, seconds))
        lost, doubled = _missing(load.service.store, filled.world, outcome.acknowledged())
    under_load = sum(map(len, outcome.acknowledged().values()))
    return {
        "rate_per_s": KILL_RATE,
        "acknowledged_turns": under_load + filled.world.turns * filled.world.tenants,
        "of_them_under_load": under_load,
        "lost_turns": lost,
        "doubled_turns": doubled,
        "statuses": outcome.figures()["statuses"],
    }


async def _killed(load: Load, rate: float, seconds: float) -> tuple[Outcome, Figures]:
    asyncio.get_running_loop().call_later(seconds / 2, load.service.process.send_signal, signal.SIGKILL)
    return await load.at_rate_async(rate, seconds)


def _missing(store: Path, world: World, acknowledged: dict[str, set[str]]) -> tuple[int, int]:
    """Turns of the world or acknowledged that the store lacks; turns whose text another one has, too."""
    lost = doubled = 0
    ingested: dict[str, set[str]] = {name: set() for name in world.names}
    for tenant, asked, answered in world.exchanges():
        ingested[tenant].add(f"{asked}\0{answered}")
    with closing(Journal.open(Location.of(store), writable=False)) as journal:
        reports = Reports(journal)
        for tenant in world.names:
            turns = reports.turns(tenant)
            texts = {"\0".join(message["content"] for message in turn["messages"]) for turn in turns}
            lost += len(ingested[tenant] - texts)
            lost += len(acknowledged.get(tenant, set()) - {turn["id"] for turn in turns})
            doubled += len(turns) - len(texts)
    return lost, doubled
