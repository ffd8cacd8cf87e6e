"""How fast the CPU gate reads: `python -m undertow.bench.micro.gate`.

Many small tenants, one query each. Measured in one process, on the same threads, in turns: a plain
sum over the very bytes that the gate reads (the machine's read bandwidth), the gate, and a loop over
faiss IndexFlatIP indexes (turns and episodes of each tenant), as one would write it without a ragged
kernel. Medians of the repeats. Other load on the machine distorts all of them, so it is reported too.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
from numpy.typing import NDArray

from undertow.bench.machine import describe
from undertow.kernels.arena.arena import Arena
from undertow.kernels.arena.compiled_rows import floats_at, sums
from undertow.kernels.device import cpu_count, load_faiss
from undertow.kernels.gate.factory import make_gate
from undertow.kernels.gate.gate import Gate, GateReadings

THETA = 0.7
K_GATE = 10


@sums
def sum_slabs(addresses: NDArray[np.int64], values: NDArray[np.int64], first: int, last: int) -> np.float32:
    """Sum of all float32 of slabs first..last - 1."""
    total = np.float32(0.0)
    for s in range(first, last):
        slab = floats_at(addresses[s], (values[s],))
        for i in range(values[s]):
            total += slab[i]
    return total


class Load:
    """`tenants` tenants with `rows` turns and `episodes` episodes each, and one query a tenant."""

    def __init__(self, tenants: int, rows: int, episodes: int, dim: int, seed: int) -> None:
        self.rng, self.dim = np.random.default_rng(seed), dim
        self.arena = Arena(dim)
        self.turns = np.array([self.arena.new_segment() for _ in range(tenants)])
        self.episodes = np.array([self.arena.new_segment() for _ in range(tenants)])
        for tenant in range(tenants):
            for segment, count in ((self.turns[tenant], rows), (self.episodes[tenant], episodes)):
                self.arena.extend(np.full(count, segment), self._near(self._unit(1), count), live=True)
        self.queries = np.concatenate([self._near(self.arena.vectors(s)[:1], 1) for s in self.turns])

    def _unit(self, count: int) -> NDArray[np.float32]:
        return _normalised(self.rng.standard_normal((count, self.dim), np.float32))

    def _near(self, centre: NDArray[np.float32], count: int) -> NDArray[np.float16]:
        """Vectors whose cosines with each other lie around 0.5, as those of chat turns do."""
        return _normalised(centre + self._unit(count)).astype(np.float16)

    def read(self, gate: Gate) -> GateReadings:
        count = len(self.turns)
        return gate.read(
            queries=self.queries,
            turn_segments=self.turns,
            episode_segments=self.episodes,
            visible=np.full(count, np.iinfo(np.int64).max),
            theta=np.full(count, THETA),
            k=np.full(count, K_GATE),
        )


def _normalised(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    lengths: NDArray[np.float32] = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / lengths


def faiss_loop(load: Load, threads: int) -> Callable[[], int]:
    """The same questions, answered by two flat indexes a tenant; inexact near theta."""
    faiss = load_faiss()
    faiss.omp_set_num_threads(threads)
    indexes = []
    for segment in np.concatenate((load.turns, load.episodes)):
        index = faiss.IndexFlatIP(load.dim)
        index.add(load.arena.vectors(segment))
        indexes.append(index)
    queries, count = load.queries.astype(np.float32), len(load.turns)

    def run() -> int:
        relevant = 0
        for tenant in range(count):
            query = queries[tenant : tenant + 1]
            scores, _ = indexes[tenant].search(query, K_GATE)
            relevant += int((scores >= THETA).sum())
            indexes[count + tenant].search(query, 1)
        return relevant

    return run


def bandwidth_probe(load: Load, threads: int) -> Callable[[], float]:
    """Reads every vector of the arena once, on `threads` threads."""
    segments = np.concatenate((load.turns, load.episodes))
    addresses, _, lengths = load.arena.locate(segments)
    bounds = np.linspace(0, len(segments), threads * 8 + 1).astype(int)
    workers = ThreadPoolExecutor(threads)

    def run() -> float:
        parts = workers.map(
            lambda a, b: sum_slabs(addresses, lengths * load.dim, a, b), bounds[:-1], bounds[1:]
        )
        return float(sum(parts))

    return run


def measure(tasks: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each task; the tasks take turns, so that a noisy neighbour meets all of them."""
    for task in tasks.values():
        task()
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(repeats):
        for name, task in tasks.items():
            start = time.perf_counter()
            task()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--tenants", type=int, default=10_000)
    options.add_argument("--rows", type=int, default=200)
    options.add_argument("--episodes", type=int, default=5)
    options.add_argument("--dim", type=int, default=384)
    options.add_argument("--repeats", type=int, default=9)
    options.add_argument("--threads", type=int, default=cpu_count())
    given = options.parse_args()

    process = psutil.Process()
    before = process.memory_info().rss
    load = Load(given.tenants, given.rows, given.episodes, given.dim, seed=0)
    gc.collect()
    resident = process.memory_info().rss - before
    gate = make_gate(load.arena)
    medians = measure(
        {
            "sum": bandwidth_probe(load, given.threads),
            "gate": lambda: load.read(gate),
            "faiss": faiss_loop(load, given.threads),
        },
        given.repeats,
    )
    report(given, load, medians, resident)


def report(given: argparse.Namespace, load: Load, medians: dict[str, float], resident: int) -> None:
    """A table for people and one JSON line for programs."""
    held = given.tenants * (given.rows + given.episodes) * given.dim * 4
    figures = {
        "bench": "gate",
        "machine": describe(),
        "threads": given.threads,
        "load_average": round(os.getloadavg()[0], 2),
        "tenants": given.tenants,
        "rows": given.rows,
        "episodes": given.episodes,
        "dim": given.dim,
        "repeats": given.repeats,
        "bytes_read": held,
        "bandwidth_gb_per_s": round(held / medians["sum"] / 1e9, 2),
        "gate_ms": round(medians["gate"] * 1e3, 2),
        "gate_gb_per_s": round(held / medians["gate"] / 1e9, 2),
        "bandwidth_fraction": round(medians["sum"] / medians["gate"], 3),
        "faiss_loop_ms": round(medians["faiss"] * 1e3, 2),
        "speedup_over_faiss_loop": round(medians["faiss"] / medians["gate"], 2),
        "arena_used_bytes": load.arena.used_bytes,
        "arena_reserved_bytes": load.arena.nbytes,
        "arena_resident_bytes": resident,
    }
    for name, value in figures.items():
        print(f"{name:28}{value}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
