"""What the gate's tests share: every backend, segments that all of them hold, and hard questions."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from undertow.kernels.arena.arena import Arena, make_arena
from undertow.kernels.arena.device_memory import DeviceMemory
from undertow.kernels.gate.cuda_gate import STEP_ROWS, CudaGate, Rings, scored_bytes
from undertow.kernels.gate.gate import Gate, GateReadings, Probes
from undertow.kernels.gate.planned_gate import PlannedGate

from ..oracles.gate import Row, Store, cosine, nearest, relevant
from .cuda_shim.shim import COMPILER, ShimKernels, build

EVERYTHING = np.iinfo(np.int64).max
POOL_BYTES = 4 << 20
SHARED_BYTES = 232_448  # of a block, as in simt.h and on an H100
_LIBRARIES = tempfile.TemporaryDirectory()


@dataclass(frozen=True)
class Backend:
    """One implementation of the gate, and the arena that it reads."""

    name: str
    arena: Callable[[int], Arena]
    gate: Callable[[Arena], Gate]


def shim_rings(dim: int, stages: int, coded: bool = False) -> Rings | None:
    """Rings of so many stages for up to four warps; None for 0 stages, the scan of cards before sm_90."""
    ring_bytes = stages * (STEP_ROWS * scored_bytes(dim, coded) + 8)
    assert ring_bytes <= SHARED_BYTES
    return Rings(min(4, SHARED_BYTES // ring_bytes), stages, shared_bytes=0) if stages else None


@cache
def shim_library(dim: int, stages: int = 0, coded: bool = False) -> Any:
    if COMPILER is None:
        pytest.skip("g++ is not installed: gate.cu cannot run without a card")
    return build(Path(_LIBRARIES.name), dim, rings=shim_rings(dim, stages, coded), coded=coded)


def shim_arena(dim: int, nbytes: int = POOL_BYTES, coded: bool = False) -> Arena:
    return Arena(dim, DeviceMemory(dim, "cpu", nbytes, coded))


def shim_gate(arena: Arena, stages: int = 0, **options: Any) -> CudaGate:
    """The CUDA gate, host code and kernels, on the CPU; options as in `ShimKernels`."""
    kind = (arena.dim, stages, arena.code_places is not None)
    library, rings = shim_library(*kind), shim_rings(*kind)
    return CudaGate(arena, ShimKernels(library, arena.dim, rings=rings, **options))


def numba_gate(arena: Arena, threads: int = 3) -> Gate:
    pytest.importorskip("numba")
    from undertow.kernels.gate.cpu_gate import NumbaGate

    return NumbaGate(arena, threads=threads)


def planned_gate(arena: Arena) -> Gate:
    """The CPU's gate as it reads many rows, also where there are few."""
    pytest.importorskip("numba")
    from undertow.kernels.gate.cpu_gate import NumbaGate

    class Planned(NumbaGate):
        def _read(self, probes: Probes) -> GateReadings:
            return PlannedGate._read(self, probes)

    return Planned(arena, threads=3)


def host_arena(dim: int) -> Arena:
    pytest.importorskip("numba")
    return Arena(dim)


NUMPY = Backend("numpy", host_arena, Gate)
NUMPY_ON_DEVICE = Backend("numpy-device", shim_arena, Gate)
NUMBA = Backend("numba", host_arena, numba_gate)
PLANNED = Backend("numba-planned", host_arena, planned_gate)
SHIM = Backend("shim", shim_arena, shim_gate)
RING_SHIM = Backend("shim-rings", shim_arena, partial(shim_gate, stages=2))
CODE_SHIM = Backend("shim-codes", partial(shim_arena, coded=True), shim_gate)
RING_CODE_SHIM = Backend("shim-rings-codes", partial(shim_arena, coded=True), partial(shim_gate, stages=2))
SHIMS = (SHIM, RING_SHIM, CODE_SHIM, RING_CODE_SHIM)
CUDA = Backend("cuda", lambda dim: make_arena(dim, "cuda", 512 << 20), CudaGate)
CODE_CUDA = Backend("cuda-codes", lambda dim: make_arena(dim, "cuda", 512 << 20, coded=True), CudaGate)
ON_CPU = (NUMPY, NUMBA, PLANNED, *SHIMS)
EACH = [
    *(NUMPY, NUMPY_ON_DEVICE, NUMBA, PLANNED, *SHIMS),
    *(pytest.param(card, marks=pytest.mark.gpu) for card in (CUDA, CODE_CUDA)),
]


def unit(vectors: NDArray[Any]) -> NDArray[np.float16]:
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=-1, keepdims=True)
    return (vectors / np.where(lengths == 0, 1, lengths)).astype(np.float16)


def same(*readings: GateReadings) -> None:
    """Equal in every bit, dtypes included."""
    for field in fields(GateReadings):
        first, *others = (getattr(reading, field.name) for reading in readings)
        for other in others:
            assert first.dtype == other.dtype
            assert first.tobytes() == other.tobytes(), field.name


class World:
    """The same segments many times: in an arena for each backend, and as the oracle's lists."""

    def __init__(self, dim: int, *backends: Backend) -> None:
        self.store, self.backends = Store(), backends
        self.arenas = [backend.arena(dim) for backend in backends]

    def segment(self, vectors: NDArray[np.float16], live: NDArray[np.bool_], gone: NDArray[np.bool_]) -> int:
        segment = len(self.store.segments)
        for arena in self.arenas:
            assert arena.new_segment() == segment
            handles = arena.extend(np.full(len(vectors), segment), vectors, live=True)
            arena.set_live(handles[~live], False)
            arena.redact(handles[gone])
        self.store.segments.append(
            [
                Row(np.zeros_like(v) if g else v, present=not g, live=bool(alive and not g))
                for v, alive, g in zip(vectors, live, gone, strict=True)
            ]
        )
        return segment

    def read(self, asked: dict[str, Any]) -> GateReadings:
        """What all backends read; they must agree in every bit."""
        gates = [backend.gate(arena) for backend, arena in zip(self.backends, self.arenas, strict=True)]
        readings = [gate.read(**asked) for gate in gates]
        same(*readings)
        return readings[0]

    def check(self, readings: GateReadings, asked: dict[str, Any]) -> None:
        """The readings are the oracle's."""
        assert readings.rows.dtype == readings.count.dtype == readings.offsets.dtype == np.int64
        for i, query in enumerate(asked["queries"]):
            best = nearest(self.store, int(asked["episode_segments"][i]), query)
            assert (readings.nearest_row[i], readings.nearest_score[i]) == best
            hits = relevant(
                self.store, int(asked["turn_segments"][i]), query, asked["visible"][i], asked["theta"][i]
            )
            kept = slice(readings.offsets[i], readings.offsets[i + 1])
            assert readings.count[i] == len(hits)
            got = list(zip(readings.scores[kept].tolist(), readings.rows[kept].tolist(), strict=True))
            assert got == hits[: asked["k"][i]]
        assert readings.offsets[0] == 0
        assert readings.offsets[-1] == len(readings.rows) == len(readings.scores)


def fill(world: World, rng: np.random.Generator, dim: int, sizes: tuple[int, ...]) -> NDArray[np.float16]:
    """Segments made of few directions and their last-bit variants, which are returned: ties abound."""
    pool = unit(rng.standard_normal((6, dim)))
    pool = np.concatenate((pool, np.nextafter(pool, np.float16(4)), -pool[:1], unit(pool + pool[0])))
    for size in sizes:
        picks = pool[rng.integers(0, len(pool), size)]
        world.segment(picks, rng.random(size) < 0.7, rng.random(size) < 0.15)
    return pool


def close_world(rng: np.random.Generator, dim: int, *backends: Backend) -> tuple[World, NDArray[np.float16]]:
    """Five segments of very different sizes."""
    world = World(dim, *backends)
    sizes = (0, 1, int(rng.integers(2, 9)), int(rng.integers(10, 90)), int(rng.integers(90, 300)))
    return world, fill(world, rng, dim, sizes)


def questions(rng: np.random.Generator, pool: NDArray[np.float16], count: int) -> dict[str, Any]:
    """Questions to five segments, with thresholds that are the score of some pair, or next to it."""
    queries = pool[rng.integers(0, len(pool), count)]
    theta = np.array([cosine(q, pool[rng.integers(len(pool))]) for q in queries])
    nudge = rng.integers(-1, 2, count)
    theta = np.where(nudge < 0, np.nextafter(theta, -2), np.where(nudge > 0, np.nextafter(theta, 2), theta))
    theta[rng.random(count) < 0.1] = -1.0
    return {
        "queries": queries,
        "turn_segments": rng.integers(0, 5, count),
        "episode_segments": rng.integers(-1, 5, count),
        "visible": rng.choice([0, 1, 7, 40, 250, EVERYTHING], count),
        "theta": theta,
        "k": rng.choice([0, 1, 2, 8, 1000], count),
    }
