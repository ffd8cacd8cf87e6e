"""The service under load: how many requests a second it answers in time, and what it does beyond that.

    python -m undertow.bench.system.service [rate] [overload] [memory] [kill] [--out docs/results]

The service runs as `undertow serve` in a process of its own, without an LLM and with the hashing encoder.
Half of the requests add a turn, half search, for 1,000 tenants. This process sends them over loopback, and
shares the machine. Prints the figures and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from undertow.bench.system.parts import run_parts
from undertow.bench.system.service_load import Caller, Outcome
from undertow.engine.api.views.reports import Reports
from undertow.engine.storage.journal import Journal
from undertow.engine.storage.location import Location

PARTS = ("rate", "overload", "memory", "kill")
TURNS_A_TENANT = 20
GOAL_P95_MS = 20.0
# the first rate, and the factor to each next one
FIRST_RATE, STEP_UP = 40.0, 1.25
START_S = 120.0
MIB = 2**20
PROGRAM = (sys.executable, "-m", "undertow.serving.cli")


@dataclass(frozen=True, slots=True)
class Service:
    """A running one: its address, a key for it, its process and its store."""

    url: str
    key: str
    process: psutil.Process
    store: Path


@contextmanager
def served(store: Path) -> Iterator[Service]:
    """`undertow serve` in a process of its own, which ends with the block."""
    keys, log = str(store.parent / "keys.json"), store.parent / "service.log"
    create = ["keys", "create", "--all-tenants", "--scope", "read", "--scope", "write", "--json"]
    created = subprocess.run([*PROGRAM, *create, "--keys", keys], stdout=subprocess.PIPE, check=True)
    serve = ["serve", "--port", "0", "--encoder", "hash:384", "--llm", "off", "--keys", keys]
    with log.open("ab") as to:
        process = subprocess.Popen([*PROGRAM, *serve, "--store", str(store)], stderr=to)
    try:
        key = json.loads(created.stdout)["key"]
        yield Service(_address(process, log), key, psutil.Process(process.pid), store)
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(START_S)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        if found := re.findall(r"at (http://[0-9.]+:[0-9]+)", log.read_text()):
            return str(found[-1])
        time.sleep(0.05)
    raise RuntimeError(f"the service did not start; it says:\n{log.read_text()}")


async def highest_rate(service: Service, stretch_s: float) -> tuple[float, list[Outcome]]:
    """The highest rate with a search p95 within the goal. The rate rises until it misses twice in a row."""
    with closing(Caller(service.url, service.key)) as caller:
        await caller.fill(TURNS_A_TENANT)
        await caller.run(FIRST_RATE, stretch_s)  # to warm up
        rate, reached, misses, outcomes = FIRST_RATE, 0.0, 0, []
        while misses < 2:
            outcome = await caller.run(rate, stretch_s)
            outcomes.append(outcome)
            in_time = outcome.p95_ms() <= GOAL_P95_MS
            reached, misses = (rate, 0) if in_time else (reached, misses + 1)
            rate = round(rate * STEP_UP, 1)
        return reached, outcomes


async def at_rate(service: Service, rate: float, seconds: float) -> Outcome:
    with closing(Caller(service.url, service.key, seed=1)) as caller:
        return await caller.run(rate, seconds)


async def filled(service: Service) -> Outcome:
    with closing(Caller(service.url, service.key)) as caller:
        return await caller.fill(TURNS_A_TENANT)


def rate_part(folder: Path, stretch_s: float) -> dict[str, Any]:
    with served(folder / "store") as service:
        reached, outcomes = asyncio.run(highest_rate(service, stretch_s))
    return {
        "goal_search_p95_ms": GOAL_P95_MS,
        "highest_rate_per_s": reached,
        "seconds_a_rate": stretch_s,
        "rates": [outcome.figures() for outcome in outcomes],
    }


def overload_part(folder: Path, stretch_s: float, rate: float) -> dict[str, Any]:
    """Far more than it can do, then less again."""
    with served(folder / "store") as service:
        asyncio.run(filled(service))
        before = asyncio.run(at_rate(service, rate / 2, stretch_s))
        beyond = [asyncio.run(at_rate(service, rate * times, stretch_s)) for times in (2, 4)]
        after = asyncio.run(at_rate(service, rate / 2, stretch_s))
    return {
        "before": before.figures(),
        "beyond": [outcome.figures() for outcome in beyond],
        "after": after.figures(),
    }


def memory_part(folder: Path, seconds: float, rate: float) -> dict[str, Any]:
    """The process's own memory, sampled each second, under a rate that it keeps up with."""
    with served(folder / "store") as service:
        asyncio.run(filled(service))
        outcome, samples = asyncio.run(_sampled(service, rate, seconds))
    at_s, own = np.array(samples).T
    late = at_s >= seconds / 3
    first, second = np.triu_indices(int(late.sum()), k=1)
    slopes = np.diff(own[late][[first, second]], axis=0) / np.diff(at_s[late][[first, second]], axis=0)
    return {
        "rate_per_s": rate,
        "seconds": seconds,
        "own_mib_by_tenth": [round(float(np.median(part)) / MIB, 1) for part in np.array_split(own, 10)],
        "slope_mib_per_min": round(60 * float(np.median(slopes)) / MIB, 2),  # Theil-Sen
        "added_turns_per_min": round(60 * len(outcome.add_s) / seconds),
        **outcome.figures(),
    }


async def _sampled(service: Service, rate: float, seconds: float) -> tuple[Outcome, list[tuple[float, int]]]:
    samples: list[tuple[float, int]] = []
    began_s = time.monotonic()

    async def sample() -> None:
        while True:
            memory = service.process.memory_info()
            samples.append((time.monotonic() - began_s, memory.rss - memory.shared))
            await asyncio.sleep(1)

    sampling = asyncio.create_task(sample())
    try:
        return await at_rate(service, rate, seconds), samples
    finally:
        sampling.cancel()


def kill_part(folder: Path, seconds: float, rate: float) -> dict[str, Any]:
    """SIGKILL in the middle of a load: how many acknowledged turns are lost afterwards, or stored twice."""
    with served(folder / "store") as service:
        before = asyncio.run(filled(service))
        outcome = asyncio.run(_killed(service, rate, seconds))
    lost = doubled = 0
    journal = Journal.open(Location.of(folder / "store"), writable=False)
    try:
        reports = Reports(journal)
        for tenant, ids in before.acknowledged.items():
            turns = reports.turns(tenant)
            lost += len({*ids, *outcome.acknowledged.get(tenant, ())} - {turn["id"] for turn in turns})
            doubled += len(turns) - len({turn["text"] for turn in turns})  # no two were sent the same words
    finally:
        journal.close()
    under_load = sum(map(len, outcome.acknowledged.values()))
    return {
        "acknowledged_turns": under_load + sum(map(len, before.acknowledged.values())),
        "of_them_under_load": under_load,
        "lost_turns": lost,
        "doubled_turns": doubled,
        "statuses": {str(status): count for status, count in sorted(outcome.statuses.items())},
    }


async def _killed(service: Service, rate: float, seconds: float) -> Outcome:
    asyncio.get_running_loop().call_later(seconds / 2, service.process.send_signal, signal.SIGKILL)
    return await at_rate(service, rate, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("parts", nargs="*", default=PARTS)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each rate")
    parser.add_argument("--memory-seconds", type=float, default=300.0)
    parser.add_argument("--rate", type=float, help="a rate that it keeps up with, if `rate` is not run")
    parser.add_argument("--out", type=Path, help="a folder for the figures")
    args = parser.parse_args()
    if not args.rate and args.parts[0] != "rate":
        parser.error("give --rate, or `rate` as the first part")

    def rate(folder: Path) -> dict[str, Any]:
        figures = rate_part(folder, args.seconds)
        args.rate = float(figures["highest_rate_per_s"]) or FIRST_RATE
        return figures

    parts: dict[str, Callable[[Path], dict[str, Any]]] = {
        "rate": rate,
        "overload": lambda folder: overload_part(folder, args.seconds, args.rate),
        "memory": lambda folder: memory_part(folder, args.memory_seconds, args.rate / 2),
        "kill": lambda folder: kill_part(folder, args.seconds, args.rate),
    }
    text = json.dumps(run_parts("service", parts, args.parts))
    print(text)
    if args.out is not None:
        # a run of some parts does not replace the figures of a whole one
        name = "service" if set(args.parts) == set(PARTS) else "-".join(("service", *args.parts))
        (args.out / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
