"""A small arena on a device, and vectors for it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from undertow.kernels.arena.arena import Arena
from undertow.kernels.arena.device_memory import DeviceMemory

DIM = 20


ROW_BYTES = 48


def pool_bytes(rows: int) -> int:
    """What a pool of at least `rows` rows takes, with the room for moving them."""
    return int(rows * (ROW_BYTES + 1) * 1.02) + 2 * ROW_BYTES


def arena_of(rows: int) -> Arena:
    return Arena(DIM, DeviceMemory(DIM, "cpu", pool_bytes(rows)))


def random_vectors(rng: np.random.Generator, count: int) -> NDArray[np.float16]:
    return (rng.standard_normal((count, DIM)) / 8).astype(np.float16)
