"""The cluster on one machine: what a shard costs over a plain engine, what two give, how fast one recovers.

    python -m undertow.bench.cluster [--data LOCOMO_JSON] [overhead] [two] [recovery]

Prints a table and, last, one JSON line. Vectors are cached and each library has one thread, so that what
is compared is the engine with and without Ray. Wall times need an idle machine; CPU times per turn, which
are given beside them, less so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa

from undertow.bench.ingest import CachedVectors, copies, settings
from undertow.bench.machine import LOCOMO, describe
from undertow.bench.mock_llm import MockLLM
from undertow.bench.mock_replies import MockReplies
from undertow.engine.cluster.actors import connect
from undertow.engine.cluster.cluster import Cluster
from undertow.engine.cluster.housing import Parts
from undertow.engine.cluster.resources import ClusterSettings
from undertow.engine.cluster.wire import pack
from undertow.engine.config import Settings
from undertow.engine.engine import Engine
from undertow.engine.llm import LLMClient
from undertow.engine.model import Turn
from undertow.engine.process import settle_in
from undertow.engine.readers import read

CALL_TURNS = 512
CALLS_UNDER_WAY = 8
WARM_UP_TURNS = 2_048
TENANTS = 500

ONE_THREAD = ClusterSettings(num_cpus=0.5, threads=1, call_turns=CALL_TURNS, lane_turns=65_536)


def cached(of: Settings, *, data: str) -> CachedVectors:
    """An encoder that has seen every text of the log."""
    encoder = CachedVectors()
    encoder.warm([t.text for r in read(Path(data), max_message_bytes=1_000_000) for t in r.turns])
    return encoder


def no_llm(of: Settings) -> LLMClient | None:
    return None


def instant_llm(of: Settings) -> LLMClient | None:
    return MockLLM(MockReplies(refusal_rate=0.3))


def engine_settings() -> Settings:
    return settings(batch_turns=CALL_TURNS)


def log_of(data: Path, turns: int) -> tuple[list[Turn], list[Turn]]:
    """What warms up, and what is measured."""
    log = list(copies(data, TENANTS, -(-(turns + WARM_UP_TURNS) // TENANTS)))
    return log[:WARM_UP_TURNS], log[WARM_UP_TURNS : WARM_UP_TURNS + turns]


# ---- the plain engine, in a process of its own


def plain(data: Path, turns: int) -> dict[str, float]:
    """Wall and CPU seconds of an engine for the measured part of the log, 512 turns a call."""
    settle_in()  # as the program and a shard do
    warm, log = log_of(data, turns)
    folder = Path(tempfile.mkdtemp(prefix="undertow-bench-"))
    try:
        of = engine_settings()
        with Engine(folder / "store", of, cached(of, data=str(data))) as engine:
            engine.add_batch(warm)
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            for start in range(0, len(log), CALL_TURNS):
                engine.add_batch(log[start : start + CALL_TURNS])
            return {"s": time.perf_counter() - began_s, "cpu_s": time.process_time() - began_cpu_s}
    finally:
        shutil.rmtree(folder)


def plain_apart(data: Path, turns: int) -> dict[str, float]:
    """`plain` in a process with the environment of a shard's."""
    command = [sys.executable, "-m", __spec__.name if __spec__ else "undertow.bench.cluster"]
    command += ["--data", str(data), "--turns", str(turns), "--plain"]
    environment = {**os.environ, **ONE_THREAD.environment()}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


# ---- shards


def start_ray() -> None:
    """On this machine, if this process has none."""
    connect(
        "local", num_cpus=2, object_store_memory=300_000_000, include_dashboard=False, log_to_driver=False
    )


@contextmanager
def cluster_of(
    data: Path, shards: int, llm: Callable[[Settings], LLMClient | None] = no_llm
) -> Iterator[Cluster]:
    folder = tempfile.mkdtemp(prefix="undertow-bench-")
    parts = Parts(partial(cached, data=str(data)), llm)
    try:
        with Cluster.open(
            folder, engine_settings(), shards=shards, resources=ONE_THREAD, parts=parts
        ) as cluster:
            yield cluster
            cluster.stop()
    finally:
        shutil.rmtree(folder)


def packed(log: Sequence[Turn], shards: int) -> list[pa.Table]:
    """512 turns a call and shard, as readers make them, which run beside the shards or elsewhere."""
    step = CALL_TURNS * shards
    return [pack(log[start : start + step]) for start in range(0, len(log), step)]


def feed(cluster: Cluster, calls: Sequence[pa.Table]) -> None:
    """A few calls under way at a time; returns when all is stored."""
    under_way: deque[Future[pa.Table]] = deque()
    for call in calls:
        if len(under_way) == CALLS_UNDER_WAY:
            under_way.popleft().result()
        under_way.append(cluster.submit_table(call))
    for future in under_way:
        future.result()


def sharded(data: Path, turns: int, shards: int) -> dict[str, float]:
    """Like `plain`, over so many shards: wall seconds, and the CPU seconds of the shards together."""
    warm, log = log_of(data, turns)
    with cluster_of(data, shards) as cluster:
        feed(cluster, packed(warm, shards))
        calls = packed(log, shards)
        processes = [psutil.Process(state["pid"]) for state in cluster.status().values()]
        began_s, began_cpu_s = time.perf_counter(), _cpu_s(processes)
        began_driver_s = time.process_time()
        feed(cluster, calls)
        return {
            "s": time.perf_counter() - began_s,
            "cpu_s": _cpu_s(processes) - began_cpu_s,
            "driver_cpu_s": time.process_time() - began_driver_s,
        }


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    return float(sum(sum(process.cpu_times()[:2]) for process in processes))


# ---- the parts


def overhead(data: Path, turns: int, repeats: int) -> dict[str, Any]:
    """One shard against the plain engine, alternating; the best of each."""
    runs = [(plain_apart(data, turns), sharded(data, turns, 1)) for _ in range(repeats)]
    alone = {key: min(run[0][key] for run in runs) for key in runs[0][0]}
    shard = {key: min(run[1][key] for run in runs) for key in runs[0][1]}
    return {
        "turns": turns,
        "turns_a_call": CALL_TURNS,
        "plain_turns_per_s": round(turns / alone["s"]),
        "shard_turns_per_s": round(turns / shard["s"]),
        "overhead": round(shard["s"] / alone["s"] - 1, 3),
        "plain_cpu_us_a_turn": round(1e6 * alone["cpu_s"] / turns, 1),
        "shard_cpu_us_a_turn": round(1e6 * shard["cpu_s"] / turns, 1),
        "driver_cpu_us_a_turn": round(1e6 * shard["driver_cpu_s"] / turns, 1),
        "cpu_overhead": round(shard["cpu_s"] / alone["cpu_s"] - 1, 3),
    }


def two(data: Path, turns: int, repeats: int) -> dict[str, Any]:
    """Two shards against one, alternating; the best of each."""
    runs = [(sharded(data, turns, 1), sharded(data, turns, 2)) for _ in range(repeats)]
    one_s, two_s = (min(run[n]["s"] for run in runs) for n in (0, 1))
    return {
        "turns": turns,
        "one_shard_turns_per_s": round(turns / one_s),
        "two_shards_turns_per_s": round(turns / two_s),
        "times_one": round(one_s / two_s, 2),
        "two_shards_cpu_us_a_turn": round(1e6 * min(run[1]["cpu_s"] for run in runs) / turns, 1),
        "cores": psutil.cpu_count() or 0,
    }


def recovery(data: Path, turns: int) -> dict[str, Any]:
    """From the SIGKILL of a shard to its first answer, and until it stores again."""
    _, log = log_of(data, turns)
    with cluster_of(data, 1, instant_llm) as cluster:
        feed(cluster, packed(log, 1))
        cluster.drain()
        (state,) = cluster.status().values()
        began_s, killed_at_s = time.perf_counter(), time.time()
        os.kill(state["pid"], signal.SIGKILL)
        while not cluster.search(log[0].tenant, "When did the dance studio open?").turns:
            pass
        answered_s = time.perf_counter() - began_s
        cluster.add_batch([log[0]])
        stored_s = time.perf_counter() - began_s
        (after,) = cluster.status().values()
        return {
            "turns": turns,
            "journal_rows": after["journal_rows"],
            "first_answer_s": round(answered_s, 2),
            "first_store_s": round(stored_s, 2),
            "of_that_until_its_process_began_s": round(
                psutil.Process(after["pid"]).create_time() - killed_at_s, 2
            ),
            "of_that_opening_the_journal_s": round(after["opened_s"], 2),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("parts", nargs="*", default=["overhead", "two", "recovery"])
    parser.add_argument("--data", type=Path, default=LOCOMO, help="LoCoMo in its published JSON")
    parser.add_argument("--turns", type=int, default=50_000)
    parser.add_argument("--recovery-turns", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plain:
        print(json.dumps(plain(args.data, args.turns)))
        return
    start_ray()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "overhead": lambda: overhead(args.data, args.turns, args.repeats),
        "two": lambda: two(args.data, args.turns, args.repeats),
        "recovery": lambda: recovery(args.data, args.recovery_turns),
    }
    figures: dict[str, Any] = {"bench": "cluster", "machine": describe()}
    for name in args.parts:
        figures[name] = parts[name]()
        print(f"\n{name}")
        for key, value in figures[name].items():
            print(f"  {key:28} {value:>16,}")
    figures["load"] = [round(x, 2) for x in os.getloadavg()]
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
