"""Slabs in host memory, read and written by compiled loops.

fp16 values are stored as fp32: decoding fp16 inside the scan costs a CPU far more than reading twice the
bytes. A slab contains its rows, then its flags.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from undertow.kernels.arena.compiled_rows import change_flags, read_flags, read_rows, write_rows
from undertow.kernels.arena.slab_pool import Slab, SlabPool, slab_bytes
from undertow.kernels.arena.vector_checks import BLOCK_ROWS, Float16s, Vectors, check_array, to_float32

Int64s = NDArray[np.int64]

_MOST_ROWS = (1 << 32) - 1


class HostMemory:
    """Rows of `dim` float32 in slabs that grow on demand, bounded only by the system.

    Its methods are those of `DeviceMemory`.
    """

    device = "cpu"
    capacity_bytes = None

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.row_bytes = dim * 4
        self._pool = SlabPool()

    @property
    def nbytes(self) -> int:
        return self._pool.nbytes

    # -- slabs

    def resize(self, slab: Slab | None, rows: int, length: int) -> Slab:
        new = self._pool.take(rows * (self.row_bytes + 1))
        if slab is not None:
            end, start, target = length * self.row_bytes, self._flags_at(slab), self._flags_at(new)
            new.bytes[:end] = slab.bytes[:end]
            new.bytes[target : target + length] = slab.bytes[start : start + length]
            self._pool.give(slab)
        return new

    def spare(self, slab: Slab, rows: int) -> int:
        return slab.nbytes - slab_bytes(rows * (self.row_bytes + 1))

    def give(self, slab: Slab) -> None:
        self._pool.give(slab)

    def pack(self, rows: int) -> bool:
        return False  # free slots hold no memory, so there is nothing to gain

    def place(self, slab: Slab) -> tuple[int, int, int]:
        return slab.address, slab.address + self._flags_at(slab), self._capacity(slab)

    def _capacity(self, slab: Slab) -> int:
        return min(slab.nbytes // (self.row_bytes + 1), _MOST_ROWS)

    def _flags_at(self, slab: Slab) -> int:
        return self._capacity(slab) * self.row_bytes

    # -- rows and flags

    def accept(self, vectors: Vectors) -> Float16s:
        return check_array(vectors, self.dim)

    def write(self, addresses: Int64s, held: Float16s) -> None:
        for start in range(0, len(addresses), BLOCK_ROWS):
            block = slice(start, start + BLOCK_ROWS)
            write_rows(addresses[block], to_float32(held[block]))

    def wipe(self, addresses: Int64s) -> None:
        write_rows(addresses, np.zeros((len(addresses), self.dim), np.float32))

    def read(self, addresses: Int64s) -> Float16s:
        vectors = np.empty((len(addresses), self.dim), np.float32)
        read_rows(addresses, vectors)
        return vectors.astype(np.float16)

    take = read

    def change_flags(self, addresses: Int64s, keep: int, add: int) -> None:
        change_flags(addresses, keep, add)

    def read_flags(self, addresses: Int64s) -> NDArray[np.uint8]:
        flags = np.empty(len(addresses), np.uint8)
        read_flags(addresses, flags)
        return flags

    def vectors(self, slab: Slab | None, length: int) -> NDArray[np.float32]:
        if slab is None:
            return np.zeros((0, self.dim), np.float32)
        view = slab.bytes[: length * self.row_bytes].view(np.float32).reshape(length, self.dim)
        view.flags.writeable = False
        return view

    def flags(self, slab: Slab | None, length: int) -> NDArray[np.uint8]:
        if slab is None:
            return np.zeros(0, np.uint8)
        start = self._flags_at(slab)
        view = slab.bytes[start : start + length]
        view.flags.writeable = False
        return view

    held_flags = flags
