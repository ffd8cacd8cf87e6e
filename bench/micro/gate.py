"""How fast the CPU gate reads: `python -m undertow.bench.micro.gate`.

Many small tenants, one query each. Measured in one process, on the same threads, in turns: a plain sum over
the bytes of the rows (the machine's read bandwidth), the gate, and a loop over faiss IndexFlatIP indexes, two
a tenant, as one would write it without a ragged kernel. Medians of the repeats. Other load on the machine
distorts all of them, so it is reported too.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import faiss
import numpy as np
import psutil
from numpy.typing import NDArray

from undertow.bench.gpu.load import World, equal_sizes
from undertow.bench.gpu.rig import Rig
from undertow.bench.machine import describe
from undertow.bench.micro.timing import in_turns
from undertow.kernels.arena.compiled_rows import halves_at, jit
from undertow.kernels.device import cpu_count
from undertow.kernels.gate.factory import make_gate


@jit
def sum_slabs(addresses: NDArray[np.int64], words: NDArray[np.int64], first: int, last: int) -> np.uint64:
    """Sum of all 64-bit words of slabs first..last - 1: nothing reads the same bytes with less work."""
    total = np.uint64(0)
    for s in range(first, last):
        slab = halves_at(addresses[s], (words[s] * 4,)).view(np.uint64)
        for i in range(words[s]):
            total += slab[i]
    return total


def bandwidth_probe(world: World, threads: int) -> Callable[[], object]:
    """Reads every vector of the arena once, on `threads` threads."""
    segments = np.concatenate((world.turns, world.episodes))
    addresses, _, lengths = world.arena.locate(segments)
    bounds = np.linspace(0, len(segments), threads * 8 + 1).astype(int)
    workers = ThreadPoolExecutor(threads)

    def part(first: int, last: int) -> int:
        return int(sum_slabs(addresses, lengths * world.dim // 4, first, last))

    return lambda: sum(workers.map(part, bounds[:-1], bounds[1:]))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    defaults = {"tenants": 10_000, "rows": 200, "episodes": 5, "dim": 384, "repeats": 9}
    defaults["threads"] = cpu_count()
    for name, default in defaults.items():
        options.add_argument(f"--{name}", type=int, default=default)
    given = options.parse_args()

    process = psutil.Process()
    before = process.memory_info().rss
    sizes = equal_sizes(given.tenants, given.tenants * given.rows)
    world = World(Rig("cpu"), sizes, given.episodes, given.dim)
    gc.collect()
    resident = process.memory_info().rss - before
    faiss.omp_set_num_threads(given.threads)
    gate, asked = make_gate(world.arena), world.questions(1)
    tasks = {
        "sum": bandwidth_probe(world, given.threads),
        "gate": lambda: gate.read(**asked),
        "faiss": world.faiss_loop(lambda: faiss.IndexFlatIP(world.dim), given.tenants),
    }
    medians = {name: wall_s for name, (wall_s, _) in in_turns(tasks, given.repeats).items()}
    report(given, world, medians, resident)


def report(given: argparse.Namespace, world: World, medians: dict[str, float], resident: int) -> None:
    """A table for people and one JSON line for programs."""
    held = given.tenants * (given.rows + given.episodes) * given.dim * 2
    figures = {
        "bench": "gate",
        "machine": describe(),
        "load_average": round(os.getloadavg()[0], 2),
        **vars(given),
        "bytes_read": held,
        "bandwidth_gb_per_s": round(held / medians["sum"] / 1e9, 2),
        "gate_ms": round(medians["gate"] * 1e3, 2),
        "gate_gb_per_s": round(held / medians["gate"] / 1e9, 2),
        "bandwidth_fraction": round(medians["sum"] / medians["gate"], 3),
        "faiss_loop_ms": round(medians["faiss"] * 1e3, 2),
        "speedup_over_faiss_loop": round(medians["faiss"] / medians["gate"], 2),
        "arena_used_bytes": world.arena.used_bytes,
        "arena_reserved_bytes": world.arena.nbytes,
        "arena_resident_bytes": resident,
    }
    for name, value in figures.items():
        print(f"{name:28}{value}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
