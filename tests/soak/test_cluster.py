"""The cluster for ten minutes at a time, run by `make soak` only: a slow LLM.

Each run ends in what must hold at its end: all acknowledged turns are there, and the memories are those
of one process that nothing has happened to.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from concurrent.futures import Future, wait
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from undertow.bench.mock.server import spawn_server
from undertow.engine.cluster.ray.cluster import Cluster
from undertow.engine.cluster.routing.route_table import Route
from undertow.engine.cluster.settings import ClusterSettings
from undertow.engine.cluster.wire import pack
from undertow.engine.step.admission import QueueFull
from undertow.engine.storage.location import Location

from ..support.cluster.in_process import cluster_state, settings
from ..support.faults.harness import PARKING, RATES, assert_same_state
from ..support.soak.cluster import TENANTS, alone, assert_all_stored, beside, ray_here, turn
from ..support.soak.runs import MIB, Memory, report, soak_s

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7_200)]
SEED_TURNS = 20
NEW_TURNS_PER_S = 6.0
IN_FLIGHT = 4
PRESSED = ClusterSettings(
    num_cpus=0.5, threads=1, patience_s=120, window_turns=2_048, call_turns=512, lane_turns=4_096
)
QUEUE_TURNS = 1_024
SAMPLE_S = 1.0
# queues that a shard tells the length of, by what its status calls it
IN_SHARD = {
    "inbox_turns": "waiting_turns",
    "running_jobs": "running_jobs",
    "llm_in_flight": "llm_in_flight",
}
# the journal's first compactions, Lance's caches and a heap that finds its size come first
WARM_UP_S = 540.0
# What may be added to a process while all queues are full: what stored turns take (vector 1,536 bytes,
# text, keys and marks about 900, see docs/operations.md, with their undecided work), and noise.
BYTES_A_TURN = 4_096
NOISE_MIB_PER_MIN = 1.0


class Press:
    """Offers turns without a pause: a few new ones at a fixed rate, and ever again those stored already.

    So all queues stay full, as behind clients that repeat what they sent, while the store hardly grows.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        seed = [turn(tenant, n) for n in range(SEED_TURNS) for tenant in TENANTS]
        cluster.add_batch(seed)
        self.sent = Counter(dict.fromkeys(TENANTS, SEED_TURNS))
        self.acked = self.sent.copy()
        self._again = pack(seed[: PRESSED.call_turns])
        self._under_way: deque[tuple[Future[pa.Table], list[str]]] = deque()
        self.repeated = self.refused = 0

    def run(self, seconds: float, stop: threading.Event) -> None:
        began_s = time.monotonic()
        new = 0
        while (elapsed_s := time.monotonic() - began_s) < seconds and not stop.is_set():
            if due := int(elapsed_s * NEW_TURNS_PER_S) - new:
                names = [TENANTS[(new + k) % len(TENANTS)] for k in range(min(due, len(TENANTS)))]
                new += len(names) * self._offer(pack([turn(name, self.sent[name]) for name in names]), names)
            if not self._offer(self._again, []):
                time.sleep(0.005)
            while self._under_way and self._under_way[0][0].done():
                self._heard(*self._under_way.popleft())
        for future, names in self._under_way:
            self._heard(future, names)

    def _offer(self, table: pa.Table, names: list[str]) -> bool:
        try:
            self._under_way.append((self._cluster.submit_table(table), names))
        except QueueFull:
            self.refused += 1
            return False
        self.sent.update(names)
        return True

    def _heard(self, future: Future[pa.Table], names: list[str]) -> None:
        statuses = Counter(future.result().column("status").to_pylist())
        assert set(statuses) == {"stored" if names else "duplicate"}, statuses
        self.acked.update(names)
        self.repeated += 0 if names else statuses["duplicate"]


def sample(cluster: Cluster, memories: dict[str, Memory], seen: Counter[str], now_s: float) -> int | None:
    """Look at every process and queue; how many turns are undecided, if all shards have said so in time.

    `seen`: the longest that each queue was, and how often a shard, busy with a step, did not answer.
    """
    states, undecided = cluster.status(), 0
    for name, state in states.items():
        assert not state["deaths_seen"], state
        seen["lane_turns"] = max(seen["lane_turns"], state["sent_turns"])
        under_way = list(cluster._pool._clients[Route(name)]._under_way.values())
        seen["turns_under_way"] = max(seen["turns_under_way"], sum(map(len, under_way)))
        if state["state"] == "unreachable":
            seen["unanswered"] += 1
            continue
        assert state["state"] == "serving", state
        memories.setdefault(name, Memory(psutil.Process(state["pid"])))
        undecided += state["undecided_turns"]
        for queue, key in IN_SHARD.items():
            seen[queue] = max(seen[queue], state[key])
    memories.setdefault("driver", Memory(psutil.Process()))
    for memory in memories.values():
        memory.sample(now_s)
    return undecided if all("pid" in state for state in states.values()) else None


def test_slow_llm(tmp_path: Path) -> None:
    """Queues stay at their bounds and memory flat, though the LLM falls behind all the time."""
    root, warm_s = Location.of(tmp_path / "root"), min(WARM_UP_S, soak_s())
    seconds = warm_s + soak_s()
    memories: dict[str, Memory] = {}
    most: Counter[str] = Counter()
    undecided: list[int] = []
    searches_s: list[float] = []
    with ray_here(cpus=2), spawn_server(latency_ms=5_000, jitter_ms=5_000, **RATES, **PARKING) as slow:
        of = settings(llm_url=slow, llm_in_flight=IN_FLIGHT, queue_turns=QUEUE_TURNS, batch_turns=256)
        with Cluster.open(root, of, shards=2, resources=PRESSED) as cluster:
            press = Press(cluster)
            began_s = time.monotonic()
            with beside(press.run, seconds) as pressing:
                while not pressing.done():
                    count = sample(cluster, memories, most, time.monotonic() - began_s)
                    undecided += [] if count is None else [count]
                    asked_s = time.monotonic()
                    assert cluster.search(TENANTS[len(searches_s) % len(TENANTS)], "harbour boat").turns
                    searches_s.append(time.monotonic() - asked_s)
                    wait([pressing], SAMPLE_S)
            shards = cluster.owners(TENANTS)
            cluster.stop()
        assert_all_stored(root, press.acked)
        with spawn_server(**RATES, **PARKING) as quick:
            expected = alone(tmp_path / "alone", press.acked, quick)
            with Cluster.open(root, settings(llm_url=quick), resources=PRESSED) as cluster:
                assert cluster.drain()
                cluster.stop()
    assert press.sent == press.acked
    assert_same_state(cluster_state(root), expected)
    allowed = NOISE_MIB_PER_MIN + 60 * NEW_TURNS_PER_S * max(Counter(shards).values()) / len(TENANTS) * (
        BYTES_A_TURN / MIB
    )
    bounds = {
        "lane_turns": PRESSED.lane_turns,
        "turns_under_way": PRESSED.window_turns,
        "inbox_turns": QUEUE_TURNS,
        "running_jobs": max(Counter(shards).values()),
        "llm_in_flight": IN_FLIGHT,
    }
    report(
        runs=1,
        acked_turns=press.acked.total(),
        new_turns_per_s=NEW_TURNS_PER_S,
        repeated_turns=press.repeated,
        refused_offers=press.refused,
        undecided_after_warm_up=undecided[int(warm_s / seconds * len(undecided))],
        undecided_at_the_end=undecided[-1],
        unanswered_status=most.pop("unanswered", 0),
        samples=len(searches_s),
        longest_queues=dict(most),
        bounds=bounds,
        warm_up_s=warm_s,
        allowed_slope_mib_per_min=round(allowed, 2),
        memory={name: memory.figures(warm_s) for name, memory in memories.items()},
        memory_flat=all(memory.slope_mib_per_min(warm_s) <= allowed for memory in memories.values()),
        search_s_median=round(sorted(searches_s)[len(searches_s) // 2], 3),
        search_s_max=round(max(searches_s), 3),
    )
    assert undecided[-1] > undecided[int(warm_s / seconds * len(undecided))], "the LLM has kept up"
    assert press.refused and most["lane_turns"] > PRESSED.lane_turns / 2, "the queues were not full"
    for queue, length in most.items():
        assert length <= bounds[queue], f"{queue}: {length} > {bounds[queue]}"
    for name, memory in memories.items():
        slope = memory.slope_mib_per_min(warm_s)
        assert slope <= allowed, f"{name} grows by {slope:.2f} MiB a minute"
