"""What the arena and its readers make of fp16 values, printed by a process of its own: `python -m` this."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit
from numpy.typing import NDArray

from undertow.kernels.arena.arena import Arena
from undertow.kernels.arena.compiled_rows import to_float
from undertow.kernels.gate.scan import widen_row
from undertow.kernels.topk.topk import top_k

from .gate_worlds import NUMBA, close_world, host_arena, questions, unit

DIMS = (1, 7, 16, 33, 100, 384)


def every_half() -> NDArray[np.float16]:
    """float16 [63488]: all finite values, subnormals and both zeros included."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    return halves[np.isfinite(halves)]


def widened_halves() -> NDArray[np.float32]:
    halves = every_half()
    wide = np.empty(len(halves), np.float32)
    widen_row(halves.view(np.uint16)[None], 0, wide)
    return wide


def readings() -> list[bytes]:
    """The bytes of all that a gate and a search find in small worlds full of ties."""
    found = [widened_halves().tobytes()]
    for dim in DIMS:
        rng = np.random.default_rng(dim)
        world, pool = close_world(rng, dim, NUMBA)
        found += [value.tobytes() for value in vars(world.read(questions(rng, pool, 20))).values()]
        vectors = unit(rng.standard_normal((2000, dim)))
        arena = host_arena(dim)
        arena.extend(np.full(2000, arena.new_segment()), vectors, live=True)
        found += [value.tobytes() for value in top_k(arena, 0, vectors[:3], 20)]
        found += [refusal(arena, value).encode() for value in (np.nan, np.inf, -np.inf, 4.004)]
    return found


def refusal(arena: Arena, value: float) -> str:
    """What the arena says to a vector with this value at its end."""
    vector = np.zeros((1, arena.dim), np.float16)
    vector[0, -1] = value
    with pytest.raises(ValueError, match="vector 0") as caught:
        arena.extend([0], vector, live=True)
    return str(caught.value)


def machine_code() -> str:
    """What the compiler makes of a loop that converts an array."""

    @njit
    def convert(halves: Any, singles: Any) -> None:
        for i in range(halves.shape[0]):
            singles[i] = to_float(halves[i])

    convert(np.zeros(4, np.uint16), np.zeros(4, np.float32))
    (code,) = convert.inspect_asm().values()
    return str(code)


if __name__ == "__main__":
    print(*(found.hex() for found in readings()))
    print(machine_code())
