"""Slabs in host memory, read and written by compiled loops.

A slab contains its flags, then its rows as fp16. So the part of a slab that is in use has no gap, and what
lies behind it holds no memory.
"""

from __future__ import annotations

import numpy as np

from undertow.kernels.arena.compiled_rows import (
    CACHE_LINE,
    change_flags,
    fit_rows,
    read_flags,
    read_rows,
    write_rows,
)
from undertow.kernels.arena.slab_pool import Slab, SlabPool, slab_bytes
from undertow.kernels.arena.vector_checks import Vectors
from undertow.kernels.array_types import Float16s, Int64s, Uint8s

_MOST_ROWS = (1 << 32) - 1
# An outgrown slab is replaced by one with room for this many times its rows. Small ones are many, move often,
# and hold no page beyond their rows.
SMALL_GROWTH, GROWTH = 1.5, 1.25
SMALL_SLAB_BYTES = 256 << 10


class HostMemory:
    """Rows of `dim` float16 in slabs that grow on demand, bounded only by the system.

    Its methods are those of `DeviceMemory`.
    """

    device = "cpu"
    capacity_bytes = code_places = None

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.row_bytes = dim * 2
        self.stored_bytes = self.row_bytes + 1
        self._pool = SlabPool()

    @property
    def nbytes(self) -> int:
        return self._pool.nbytes

    # -- slabs

    def resize(self, slab: Slab | None, rows: int, length: int) -> Slab:
        if slab is None:
            return self._pool.take(self._nbytes(rows))
        if rows > length:  # it grows, and will again
            growth = SMALL_GROWTH if slab.nbytes < SMALL_SLAB_BYTES else GROWTH
            rows = max(rows, int(self._capacity(slab) * growth))
        new = self._pool.take(self._nbytes(rows))
        new.bytes[:length] = slab.bytes[:length]
        new.bytes[self._rows_in(new, length)] = slab.bytes[self._rows_in(slab, length)]
        self._pool.give(slab)
        return new

    def settle(self) -> bool:
        return False  # `resize` has moved the rows

    def spare(self, slab: Slab, rows: int) -> int:
        return slab.nbytes - slab_bytes(self._nbytes(rows))

    def give(self, slab: Slab) -> None:
        self._pool.give(slab)

    def pack(self, rows: int) -> bool:
        return False  # free slots hold no memory, so there is nothing to gain

    def place(self, slab: Slab) -> tuple[int, int, int]:
        return slab.address + self._rows_in(slab, 0).start, slab.address, self._capacity(slab)

    def _nbytes(self, rows: int) -> int:
        """Enough for `rows` rows and flags; the rows start at a cache line."""
        return rows * self.stored_bytes + CACHE_LINE - 1

    def _capacity(self, slab: Slab) -> int:
        return min((slab.nbytes - CACHE_LINE + 1) // self.stored_bytes, _MOST_ROWS)

    def _rows_in(self, slab: Slab, length: int) -> slice:
        """Where the first `length` rows lie among the bytes of a slab."""
        start = -(-self._capacity(slab) // CACHE_LINE) * CACHE_LINE
        return slice(start, start + length * self.row_bytes)

    # -- rows and flags

    def accept(self, vectors: Vectors) -> Float16s:
        return fit_rows(vectors, self.dim)

    def write(self, addresses: Int64s, held: Float16s) -> None:
        write_rows(addresses, held.ctypes.data, self.dim)

    def wipe(self, addresses: Int64s) -> None:
        self.write(addresses, np.zeros((len(addresses), self.dim), np.float16))

    def read(self, addresses: Int64s) -> Float16s:
        vectors = np.empty((len(addresses), self.dim), np.float16)
        read_rows(addresses, vectors.ctypes.data, self.dim)
        return vectors

    take = read

    def change_flags(self, addresses: Int64s, keep: int, add: int) -> None:
        change_flags(addresses, keep, add)

    def read_flags(self, addresses: Int64s) -> Uint8s:
        flags = np.empty(len(addresses), np.uint8)
        read_flags(addresses, flags)
        return flags

    def vectors(self, slab: Slab | None, length: int) -> Float16s:
        if slab is None:
            return np.zeros((0, self.dim), np.float16)
        view = slab.bytes[self._rows_in(slab, length)].view(np.float16).reshape(length, self.dim)
        view.flags.writeable = False
        return view

    def flags(self, slab: Slab | None, length: int) -> Uint8s:
        view = np.zeros(0, np.uint8) if slab is None else slab.bytes[:length]
        view.flags.writeable = False
        return view

    held_flags = flags
