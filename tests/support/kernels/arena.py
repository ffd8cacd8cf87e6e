"""Small arenas in each kind of memory, and vectors for them."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
from numpy.typing import NDArray

from undertow.kernels.arena.arena import Arena
from undertow.kernels.arena.device_memory import DeviceMemory

DIM = 20
ROW_BYTES = 48

# "host": float32 rows and FAISS; the others: float16 rows in a pool that torch holds, on that device
MEMORIES = [
    pytest.param(
        "host", marks=pytest.mark.skipif(find_spec("faiss") is None, reason="FAISS is not installed")
    ),
    "cpu",
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def arena_in(memory: str, dim: int) -> Arena:
    return Arena(dim, None if memory == "host" else DeviceMemory(dim, memory, 8 << 20))


def pool_bytes(rows: int) -> int:
    """What a pool of at least `rows` rows takes, with the room for moving them."""
    return int(rows * (ROW_BYTES + 1) * 1.02) + 2 * ROW_BYTES


def arena_of(rows: int) -> Arena:
    return Arena(DIM, DeviceMemory(DIM, "cpu", pool_bytes(rows)))


def random_vectors(rng: np.random.Generator, count: int) -> NDArray[np.float16]:
    return (rng.standard_normal((count, DIM)) / 8).astype(np.float16)
