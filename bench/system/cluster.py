"""The cluster on one machine: what a shard costs over a plain engine, what two give, how fast one recovers.

    python -m undertow.bench.system.cluster [--data LOCOMO_JSON] [overhead] [commits] [two] [recovery]

Prints a table and, last, one JSON line. Vectors are cached and each library has one thread, so that what
is compared is the engine with and without Ray. Wall times need an idle machine; CPU times per turn, which
are given beside them, less so.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pyarrow as pa

from undertow.bench.machine import LOCOMO
from undertow.bench.mock.llm import MockLLM
from undertow.bench.mock.replies import MockReplies
from undertow.bench.system.ingest import CachedVectors, settings
from undertow.bench.system.parts import run_parts
from undertow.bench.system.throughput_load import copies
from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Turn
from undertow.engine.base.process_tuning import settle_in
from undertow.engine.cluster.ray.actors import connect
from undertow.engine.cluster.ray.cluster import Cluster
from undertow.engine.cluster.settings import ClusterSettings
from undertow.engine.cluster.shard.supervisor import EngineParts
from undertow.engine.cluster.wire import pack
from undertow.engine.llm.client import LLMClient
from undertow.engine.readers import read
from undertow.engine.step.batch_size import MOST_TURNS

CALL_TURNS = 512
# what two shards are fed with, as a bulk ingest does
LARGE_CALL_TURNS = 2_048
# of a shard, at a time
TURNS_UNDER_WAY = 8_192
WARM_UP_TURNS = 8_192
TENANTS = 2_000
# of a log, fed in turn to what is compared; the first ones compile kernels and fill caches
PARTS = 10
WARM_UP_PARTS = 2

ONE_THREAD = ClusterSettings(
    num_cpus=0.5, threads=1, call_turns=LARGE_CALL_TURNS, window_turns=TURNS_UNDER_WAY, lane_turns=65_536
)


def cached(of: Settings, *, data: str) -> CachedVectors:
    """An encoder that has seen every text of the log."""
    encoder = CachedVectors()
    encoder.warm([t.text for r in read(Path(data), max_message_bytes=1_000_000) for t in r.turns])
    return encoder


def no_llm(of: Settings) -> LLMClient | None:
    return None


def instant_llm(of: Settings) -> LLMClient | None:
    return MockLLM(MockReplies(refusal_rate=0.3))


@dataclass(frozen=True, slots=True)
class Cost:
    """Of some turns: wall seconds, the CPU seconds of the engine's processes, and those of the feeder."""

    s: float
    cpu_s: float
    turns: int
    driver_cpu_s: float = 0.0


def parts_of(log: Sequence[Turn]) -> list[Sequence[Turn]]:
    """The log in `PARTS` parts of whole calls, but for the last."""
    step = max(1, len(log) // PARTS // CALL_TURNS) * CALL_TURNS
    return [log[n * step : (n + 1) * step if n < PARTS - 1 else None] for n in range(PARTS)]


def log_of(data: Path, turns: int) -> tuple[list[Turn], list[Turn]]:
    """What warms up, and what is measured."""
    log = list(copies(data, TENANTS, -(-(turns + WARM_UP_TURNS) // TENANTS)))
    return log[:WARM_UP_TURNS], log[WARM_UP_TURNS : WARM_UP_TURNS + turns]


# ---- the plain engine, in a process of its own


def plain(data: Path, turns: int) -> None:
    """An engine that takes the next part of the log for each line of standard input; prints its `Cost`."""
    settle_in()  # as the program and a shard do
    warm, log = log_of(data, turns)
    with tempfile.TemporaryDirectory(prefix="undertow-bench-") as folder:
        of = settings()
        with Engine(Path(folder) / "store", of, cached(of, data=str(data))) as engine:
            engine.add_batch(warm)
            for part in parts_of(log):
                sys.stdin.readline()
                began_s, began_cpu_s = time.perf_counter(), time.process_time()
                for start in range(0, len(part), CALL_TURNS):
                    engine.add_batch(part[start : start + CALL_TURNS])
                cost = Cost(time.perf_counter() - began_s, time.process_time() - began_cpu_s, len(part))
                print(json.dumps(asdict(cost)), flush=True)


@contextmanager
def plain_apart(data: Path, turns: int) -> Iterator[Callable[[], Cost]]:
    """`plain` in a process with the environment of a shard's; each call feeds it one part more."""
    command = [sys.executable, "-m", __spec__.name if __spec__ else "undertow.bench.system.cluster"]
    command += ["--data", str(data), "--turns", str(turns), "--plain"]
    environment = {**os.environ, **ONE_THREAD.environment()}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def feed_part() -> Cost:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            return Cost(**json.loads(process.stdout.readline()))

        yield feed_part
        process.stdin.close()


# ---- shards


def start_ray() -> None:
    """On this machine, if this process has none."""
    connect(
        "local", num_cpus=2, object_store_memory=300_000_000, include_dashboard=False, log_to_driver=False
    )


@contextmanager
def cluster_of(
    data: Path,
    shards: int,
    llm: Callable[[Settings], LLMClient | None] = no_llm,
    step_turns: int | None = None,
) -> Iterator[Cluster]:
    parts = EngineParts(partial(cached, data=str(data)), llm)
    own = settings(batch_turns=step_turns)
    with (
        tempfile.TemporaryDirectory(prefix="undertow-bench-") as folder,
        Cluster.open(folder, own, shards=shards, resources=ONE_THREAD, parts=parts) as cluster,
    ):
        yield cluster
        cluster.stop()


def packed(cluster: Cluster, log: Sequence[Turn], call_turns: int) -> list[pa.Table]:
    """So many turns of one shard a call, the shards in turn, as the readers of a bulk ingest make them."""
    names = list({turn.tenant: None for turn in log})
    owner = dict(zip(names, cluster.owners(names), strict=True))
    of_shard: dict[str, list[Turn]] = {}
    for turn in log:
        of_shard.setdefault(owner[turn.tenant], []).append(turn)
    starts = range(0, max(map(len, of_shard.values())), call_turns)
    calls = [turns[start : start + call_turns] for start in starts for turns in of_shard.values()]
    return [pack(call) for call in calls if call]


def feed(cluster: Cluster, calls: Sequence[pa.Table], most_turns: int = TURNS_UNDER_WAY) -> None:
    """So many turns under way at a time; returns when all is stored."""
    under_way: deque[Future[pa.Table]] = deque()
    for call in calls:
        if (len(under_way) + 1) * call.num_rows > most_turns:
            under_way.popleft().result()
        under_way.append(cluster.submit_table(call))
    for future in under_way:
        future.result()


@contextmanager
def sharded(
    data: Path, turns: int, shards: int, call_turns: int = CALL_TURNS, step_turns: int | None = None
) -> Iterator[Callable[[], Cost]]:
    """So many shards, `call_turns` turns a call for each; each call feeds them one part of the log more."""
    warm, log = log_of(data, turns)
    most_turns = shards * TURNS_UNDER_WAY
    with cluster_of(data, shards, step_turns=step_turns) as cluster:
        feed(cluster, packed(cluster, warm, call_turns), most_turns)
        processes = [psutil.Process(state["pid"]) for state in cluster.status().values()]
        parts = iter([(len(part), packed(cluster, part, call_turns)) for part in parts_of(log)])
        del warm, log
        settle_in()  # as the program does; the prepared calls are the benchmark's own

        def feed_part() -> Cost:
            count, calls = next(parts)
            began_s, began_cpu_s, began_driver_s = time.perf_counter(), _cpu_s(processes), time.process_time()
            feed(cluster, calls, most_turns)
            return Cost(
                time.perf_counter() - began_s,
                _cpu_s(processes) - began_cpu_s,
                count,
                time.process_time() - began_driver_s,
            )

        yield feed_part


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    return float(sum(sum(process.cpu_times()[:2]) for process in processes))


# ---- the parts


def in_turn(one: Callable[[], Cost], other: Callable[[], Cost]) -> list[tuple[Cost, Cost]]:
    """The costs of each part of the log for both, one right after the other, without the first parts.

    What else the machine does then hits both alike, and the median of the parts' ratios counts.
    """
    return [(one(), other()) for _ in range(PARTS)][WARM_UP_PARTS:]


def overhead(data: Path, turns: int, step_turns: int | None = None) -> dict[str, Any]:
    """One shard against the plain engine, which stores call by call."""
    with plain_apart(data, turns) as plain_part, sharded(data, turns, 1, step_turns=step_turns) as shard_part:
        pairs = in_turn(plain_part, shard_part)
    plains, shards = zip(*pairs, strict=True)
    ratios = [shard.s / plain.s for plain, shard in pairs]
    return {
        "turns": turns,
        "turns_a_call": CALL_TURNS,
        "turns_a_step_at_most": step_turns or MOST_TURNS,
        "plain_turns_per_s": _rate(plains),
        "shard_turns_per_s": _rate(shards),
        "overhead": round(median(ratios) - 1, 3),
        "overhead_of_each_part": [round(ratio - 1, 3) for ratio in ratios],
        "plain_cpu_us_a_turn": _us_a_turn(cost.cpu_s / cost.turns for cost in plains),
        "shard_cpu_us_a_turn": _us_a_turn(cost.cpu_s / cost.turns for cost in shards),
        "driver_cpu_us_a_turn": _us_a_turn(cost.driver_cpu_s / cost.turns for cost in shards),
        "cpu_overhead": round(median(shard.cpu_s / plain.cpu_s for plain, shard in pairs) - 1, 3),
    }


def two(data: Path, turns: int) -> dict[str, Any]:
    """Two shards against one."""
    with (
        sharded(data, turns, 1, LARGE_CALL_TURNS) as one_part,
        sharded(data, turns, 2, LARGE_CALL_TURNS) as two_part,
    ):
        pairs = in_turn(one_part, two_part)
    ones, twos = zip(*pairs, strict=True)
    ratios = [one.s / both.s for one, both in pairs]
    return {
        "turns": turns,
        "turns_a_call": LARGE_CALL_TURNS,
        "one_shard_turns_per_s": _rate(ones),
        "two_shards_turns_per_s": _rate(twos),
        "times_one": round(median(ratios), 2),
        "times_one_of_each_part": [round(ratio, 2) for ratio in ratios],
        "two_shards_cpu_us_a_turn": _us_a_turn(cost.cpu_s / cost.turns for cost in twos),
        "driver_cpu_us_a_turn": _us_a_turn(cost.driver_cpu_s / cost.turns for cost in twos),
        "cores": psutil.cpu_count() or 0,
    }


def _rate(costs: Sequence[Cost]) -> int:
    """Median turns/s."""
    return round(median(cost.turns / cost.s for cost in costs))


def _us_a_turn(seconds: Iterable[float]) -> float:
    return round(1e6 * median(seconds), 1)


def recovery(data: Path, turns: int) -> dict[str, Any]:
    """From the SIGKILL of a shard to its first answer, and until it stores again."""
    _, log = log_of(data, turns)
    with cluster_of(data, 1, instant_llm) as cluster:
        feed(cluster, packed(cluster, log, CALL_TURNS))
        cluster.drain()
        (state,) = cluster.status().values()
        began_s = time.perf_counter()
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
            "of_that_opening_the_journal_s": round(after["opened_s"], 2),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("parts", nargs="*", default=["overhead", "commits", "two", "recovery"])
    parser.add_argument("--data", type=Path, default=LOCOMO, help="LoCoMo in its published JSON")
    parser.add_argument("--turns", type=int, default=400_000)
    # long parts: at the end of each, a shard waits for the other's last step
    parser.add_argument("--two-turns", type=int, default=1_000_000)
    parser.add_argument("--recovery-turns", type=int, default=100_000)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plain:
        plain(args.data, args.turns)
        return
    start_ray()
    parts: dict[str, Callable[[Path], dict[str, Any]]] = {
        "overhead": lambda _: overhead(args.data, args.turns),
        "commits": lambda _: overhead(args.data, args.turns, CALL_TURNS),
        "two": lambda _: two(args.data, args.two_turns),
        "recovery": lambda _: recovery(args.data, args.recovery_turns),
    }
    print(json.dumps(run_parts("cluster", parts, args.parts)))


if __name__ == "__main__":
    main()
