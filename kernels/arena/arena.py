"""The arena: vectors of many segments, each segment contiguous, rows addressed by 64-bit handles.

A segment belongs to one tenant and one kind of memory. Its rows are numbered from 0 in order of arrival and
keep their numbers, so a row number can stand for a seq. The bytes lie in host memory or in one pool on a
device (`host_memory.py`, `device_memory.py`). Not thread-safe: one owner calls an arena.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from undertow.kernels.arena.segment_ids import SegmentIds
from undertow.kernels.arena.slab_table import CLOSED, ClosedMemory, Memory, SlabTable
from undertow.kernels.arena.vector_checks import Vectors
from undertow.kernels.array_types import Float16s, Int64s, Uint8s
from undertow.kernels.device import Device, resolve

PRESENT = 1
LIVE = 2

_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1
# The default share of a device's free memory. The rest is for results and libraries.
_DEVICE_SHARE = 0.75


class Arena(SlabTable):
    """Vectors of `dim` fp16 values in one slab per segment, by default in host memory.

    Flags of a row: PRESENT (it holds a vector), LIVE (it counts in gates). Handles are
    `segment << 32 | row`; ids, and so handles, are never reused (`kernels/arena/segment_ids.py`). Every
    vector must be finite and have a norm of at most 4, the domain in which scores are exact (see
    `kernels/error_bounds.py`). Methods raise ValueError for bad input and MemoryError when memory runs out;
    in either case nothing changes.

    `reclaim`, if set, is called before a MemoryError with the number of rows that one segment needs. It
    releases segments that nobody is about to use, and returns whether it released any.
    """

    PRESENT = PRESENT
    LIVE = LIVE

    def __init__(self, dim: int, memory: Memory | None = None) -> None:
        if not 1 <= dim <= 65_536:
            raise ValueError(f"dim must be in 1..65536, not {dim}")
        if memory is None:
            # Imported here: compiled loops need numba, which a machine with a GPU may lack.
            from undertow.kernels.arena.host_memory import HostMemory

            memory = HostMemory(dim)
        super().__init__(memory)
        self.dim = dim
        if self._memory.dim != dim:
            raise ValueError(f"the memory holds vectors of {self._memory.dim} values, not {dim}")
        self._ids = SegmentIds()

    # -- segments

    def new_segment(self) -> int:
        """The id of a new, empty segment: 0, 1, 2, ... while none is released. It takes no memory yet.

        MemoryError: no id is left.
        """
        segment = self._ids.take()
        self._grow(self._ids.slots)
        return segment

    def release(self, segment: int) -> None:
        """Zero and free a segment's memory. Its id is not reused."""
        slot = self._slot_of(segment)
        self._drop(slot)
        self._length[slot] = 0
        self._ids.give(segment)

    # -- rows

    def extend(self, segments: ArrayLike, vectors: Vectors, live: bool) -> Int64s:
        """Append vectors[i] to segments[i], in order; PRESENT, and LIVE if `live`.

        segments: int64 [n]; vectors: float16 [n, dim], NumPy or a tensor on the arena's device.
        Returns the handles, int64 [n].
        """
        owners = np.array(segments, np.int64, ndmin=1, copy=None)
        held = self._accept(vectors, len(owners))
        slots = self._slots_of(owners)
        rows = self._place(slots)
        self._memory.write(self._vector_addresses(slots, rows), held)
        self._memory.change_flags(self._flag_addresses(slots, rows), 0, PRESENT | (LIVE if live else 0))
        np.maximum.at(self._length, slots, rows + 1)
        return owners << _ROW_BITS | rows

    def reserve(self, segments: ArrayLike) -> None:
        """Make room for one more row per entry, int64 [n]: `extend` then cannot run out of memory."""
        self._place(self._slots_of(segments))

    def write(self, handle: ArrayLike, vector: Vectors) -> None:
        """Replace the vector of a row, or of each of several rows, in place; flags stay.

        handle: int64 or int64 [n]; vector: float16 [dim] or [n, dim], as in `extend`. Of several
        vectors for one row the last counts. ValueError for a redacted row.
        """
        slots, rows = self._resolve(handle)
        vectors = vector.reshape(1, -1) if getattr(vector, "ndim", 0) == 1 else vector
        held = self._accept(vectors, len(slots))
        self._check_present(slots, rows)
        addresses = self._vector_addresses(slots, rows)
        if len(addresses) > 1:
            last = len(addresses) - 1 - np.unique(addresses[::-1], return_index=True)[1]
            if len(last) < len(addresses):
                last.sort()
                addresses, held = addresses[last], held[last]
        self._memory.write(addresses, held)

    def set_live(self, handles: ArrayLike, live: bool) -> None:
        """Set or clear LIVE. ValueError for making a redacted row live; clearing one is allowed."""
        slots, rows = self._resolve(handles)
        if live:
            self._check_present(slots, rows)
        self._memory.change_flags(self._flag_addresses(slots, rows), 0xFF & ~LIVE, LIVE if live else 0)

    def redact(self, handles: ArrayLike) -> None:
        """Zero the vectors and clear all flags. The rows keep their numbers."""
        slots, rows = self._resolve(handles)
        self._memory.wipe(self._vector_addresses(slots, rows))
        self._memory.change_flags(self._flag_addresses(slots, rows), 0, 0)

    # -- reading

    def length(self, segment: int) -> int:
        """Rows of a segment, redacted ones included."""
        return int(self._length[self._slot_of(segment)])

    def vectors(self, segment: int) -> Any:
        """A view of the rows, valid until the next extend, release or compact of any segment.

        Host: float16 NumPy [n, dim], read-only. Device: float16 tensor [n, dim], rows `row_bytes` apart.
        """
        return self._memory.vectors(*self._slab_of(segment))

    def flags(self, segment: int) -> Uint8s:
        """uint8 NumPy [n]: a read-only view, valid until the next extend, release or compact."""
        return self._memory.flags(*self._slab_of(segment))

    def held_flags(self, segment: int) -> Any:
        """The flags where kernels read them: uint8 NumPy [n], or a tensor [n] on the device."""
        return self._memory.held_flags(*self._slab_of(segment))

    def vector16(self, handles: ArrayLike) -> Float16s:
        """float16 NumPy [n, dim]: a copy of the rows."""
        return self._memory.read(self._vector_addresses(*self._resolve(handles)))

    def take(self, handles: ArrayLike) -> Vectors:
        """float16 [n, dim]: a copy of the rows for kernels, NumPy or a tensor on the device.

        The tensor is a `CheckedRows`, which a gate does not check again; it must not be changed.
        """
        return self._memory.take(self._vector_addresses(*self._resolve(handles)))

    def locate(self, segments: ArrayLike) -> tuple[Int64s, Int64s, Int64s]:
        """(address of the rows, address of the flags, length), int64 [n] each: the input of kernels."""
        slots = self._slots_of(segments)
        return self._address[slots], self._flags_address[slots], self._length[slots]

    def bytes_of(self, segments: ArrayLike) -> int:
        """The part of `nbytes` of these segments, int64 [n], including their room for growth."""
        return int(self._capacity[self._slots_of(segments)].sum()) * self.stored_bytes

    # -- handles

    @staticmethod
    def handle(segment: int, row: int) -> int:
        return segment << _ROW_BITS | row

    # -- checks

    def _slab_of(self, segment: int) -> tuple[Any, int]:
        """A segment's slab, or None, and its number of rows."""
        slot = self._slot_of(segment)
        return self._slabs.get(slot), int(self._length[slot])

    def _resolve(self, handles: ArrayLike) -> tuple[Int64s, Int64s]:
        """Slots and rows of handles, checked."""
        ids = np.array(handles, np.int64, ndmin=1, copy=None)
        rows = ids & _ROW_MASK
        slots = self._slots_of(ids >> _ROW_BITS)
        beyond = rows >= self._length[slots]
        if beyond.any():
            first = beyond.argmax()
            slot, row = int(slots[first]), int(rows[first])
            raise ValueError(
                f"segment {self._ids.id_of(slot)} has {self._length[slot]} rows, so there is no row {row}"
            )
        return slots, rows

    def _slots_of(self, segments: ArrayLike) -> Int64s:
        """The slots of existing segments, int64 [n]. ValueError."""
        if isinstance(self._memory, ClosedMemory):
            raise ValueError(CLOSED)
        return self._ids.slots_of(segments)

    def _slot_of(self, segment: int) -> int:
        """The slot of an existing segment. ValueError."""
        if isinstance(self._memory, ClosedMemory):
            raise ValueError(CLOSED)
        return self._ids.slot_of(int(segment))

    def _check_present(self, slots: Int64s, rows: Int64s) -> None:
        flags = self._memory.read_flags(self._flag_addresses(slots, rows))
        gone = np.flatnonzero(flags & PRESENT == 0)
        if len(gone):
            segment, row = self._ids.id_of(int(slots[gone[0]])), int(rows[gone[0]])
            raise ValueError(f"row {row} of segment {segment} was redacted: append a new row instead")

    def _accept(self, vectors: Vectors, count: int) -> Any:
        held = self._memory.accept(vectors)
        if len(held) != count:
            raise ValueError(f"{len(held)} vectors for {count} rows")
        return held


def make_arena(
    dim: int, device: Device = "auto", device_bytes: int | None = None, coded: bool = False
) -> Arena:
    """An arena for the kernels of a device: in host memory, or in one pool on a GPU.

    device_bytes: the size of the GPU pool; by default three quarters of the free memory.
    coded: on a GPU, keep int8 codes of the rows too, which the gate reads first (`row_codes.py`).
    Raises ValueError for "cuda" without a GPU, MemoryError if the GPU has too little memory.
    """
    if resolve(device) == "cpu":
        return Arena(dim)
    import torch

    from undertow.kernels.arena.device_memory import DeviceMemory, share_pool

    share_pool()
    nbytes = int(torch.cuda.mem_get_info()[0] * _DEVICE_SHARE) if device_bytes is None else device_bytes
    return Arena(dim, DeviceMemory(dim, "cuda", nbytes, coded))
