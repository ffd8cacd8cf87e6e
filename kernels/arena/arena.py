"""The arena: vectors of many segments, each segment contiguous, rows addressed by 64-bit handles.

A segment belongs to one tenant and one kind of memory. Its rows are numbered from 0 in the order they
came and never move, so a row number is as good as a seq. Where the bytes are is the memory's business
(`kernels/arena/backend.py`): in the host's, or in one pool on a device. One owner calls an arena; it takes no
locks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from undertow.kernels.arena.backend import ArenaBackend
from undertow.kernels.arena.segment_ids import SegmentIds
from undertow.kernels.arena.vector_checks import Float16s, Vectors
from undertow.kernels.device import Device, resolve

Int64s = NDArray[np.int64]

PRESENT = 1
LIVE = 2

_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1
# of the memory that is free on a device, where no size is given: the rest is for results and libraries
_DEVICE_SHARE = 0.75
_GONE = "the arena was closed: its rows are gone"


class _Closed:
    """What a closed arena has in place of its memory."""

    nbytes = capacity_bytes = 0

    def __getattr__(self, name: str) -> Any:
        raise ValueError(_GONE)


class Arena:
    """Vectors of `dim` fp16 values in per-segment slabs of a memory (the host's where none is given).

    Flags of a row: PRESENT (it holds a vector), LIVE (it counts in gates). Handles are
    `segment << 32 | row`; an id, and so a handle, is never used again (`kernels/arena/segment_ids.py`). Every
    vector must be finite and have a norm of at most 4, the domain in which scores are exact (see
    `kernels/error_bounds.py`). Methods raise ValueError for bad input and MemoryError when there is no more
    memory; in either case nothing is changed.

    `reclaim`, where set, is asked before a MemoryError: it is told how many rows one segment needs,
    releases segments that nobody is about to use, and says whether it did.
    """

    PRESENT = PRESENT
    LIVE = LIVE

    def __init__(self, dim: int, memory: ArenaBackend[Any, Any] | None = None) -> None:
        if not 1 <= dim <= 65_536:
            raise ValueError(f"dim must be in 1..65536, not {dim}")
        self.dim = dim
        self.reclaim: Callable[[int], bool] | None = None
        self._memory: ArenaBackend[Any, Any] | _Closed = _host_memory(dim) if memory is None else memory
        if self._memory.dim != dim:
            raise ValueError(f"the memory holds vectors of {self._memory.dim} values, not {dim}")
        self._ids = SegmentIds()
        # by the segment's slot; here only those that hold memory
        self._slabs: dict[int, Any] = {}
        # the same, of all slots; grown by doubling
        self._address = np.zeros(16, np.int64)
        self._flags_address = np.zeros(16, np.int64)
        self._capacity = np.zeros(16, np.int64)
        self._length = np.zeros(16, np.int64)

    def close(self) -> None:
        """Give all memory back at once, whoever still refers to the arena. Its rows are gone."""
        self._memory, self.reclaim = _Closed(), None
        self._slabs.clear()

    @property
    def device(self) -> str:
        """Where the rows are: "cpu" or "cuda"."""
        return self._memory.device

    @property
    def row_bytes(self) -> int:
        """Bytes from one row to the next."""
        return self._memory.row_bytes

    # -- segments

    def new_segment(self) -> int:
        """An empty segment's id: 0, 1, 2, ... while none is released. It has no memory until it gets rows.

        MemoryError: no id is left.
        """
        segment = self._ids.take()
        if self._ids.slots > len(self._length):
            for name in ("_address", "_flags_address", "_capacity", "_length"):
                table = getattr(self, name)
                setattr(self, name, np.concatenate((table, np.zeros_like(table))))
        return segment

    def release(self, segment: int) -> None:
        """Zero a segment's memory and give it back. Its id is not used again."""
        slot = int(self._slots_of(segment)[0])
        self._drop(slot)
        self._length[slot] = 0
        self._ids.give(segment)

    def compact(self) -> int:
        """Refit every slab to its rows; the bytes freed. Views taken before no longer follow the segment."""
        before = self._memory.nbytes
        for slot in list(self._slabs):
            slab, length = self._slabs.get(slot), int(self._length[slot])
            if slab is None:  # released meanwhile, for another's new slab
                continue
            if length == 0:  # room that was made in vain
                self._drop(slot)
            elif self._memory.spare(slab, length) > 0:
                self._move(slot, length)
        if self._memory.pack(0):
            self._find_slabs()
        return before - self._memory.nbytes

    # -- rows

    def extend(self, segments: ArrayLike, vectors: Vectors, live: bool) -> Int64s:
        """Append vectors[i] to segments[i], in order; PRESENT, and LIVE if `live`.

        segments: int64 [n]; vectors: float16 [n, dim], NumPy or a tensor on the arena's device.
        Returns the handles, int64 [n].
        """
        owners = np.atleast_1d(np.asarray(segments, np.int64))
        held = self._accept(vectors, len(owners))
        slots = self._slots_of(owners)
        rows = self._place(slots)
        self._memory.write(self._vector_addresses(slots, rows), held)
        self._memory.change_flags(self._flag_addresses(slots, rows), 0, PRESENT | (LIVE if live else 0))
        np.maximum.at(self._length, slots, rows + 1)
        return owners << _ROW_BITS | rows

    def reserve(self, segments: ArrayLike) -> None:
        """Make the room that `extend` of these segments, int64 [n], takes: it then cannot lack memory."""
        self._place(self._slots_of(segments))

    def write(self, handle: ArrayLike, vector: Vectors) -> None:
        """Replace the vector of a row, or of each of several rows, in place; flags stay.

        handle: int64 or int64 [n]; vector: float16 [dim] or [n, dim], as in `extend`. Of several
        vectors for one row the last is kept. A redacted row is an error.
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
        """Set or clear LIVE. A redacted row can be cleared, and making it live is an error."""
        slots, rows = self._resolve(handles)
        if live:
            self._check_present(slots, rows)
        self._memory.change_flags(self._flag_addresses(slots, rows), 0xFF & ~LIVE, LIVE if live else 0)

    def redact(self, handles: ArrayLike) -> None:
        """Zero the vectors and clear all flags. The rows keep their places."""
        slots, rows = self._resolve(handles)
        self._memory.wipe(self._vector_addresses(slots, rows))
        self._memory.change_flags(self._flag_addresses(slots, rows), 0, 0)

    # -- reading

    def length(self, segment: int) -> int:
        """Rows of a segment, redacted ones included."""
        return int(self._length[self._slots_of(segment)[0]])

    def vectors(self, segment: int) -> Any:
        """A view of the rows, good until the next extend, release or compact of any segment.

        Host: float32 NumPy [n, dim], read-only. Device: float16 tensor [n, dim], rows `row_bytes` apart.
        """
        return self._memory.vectors(*self._slab_of(segment))

    def flags(self, segment: int) -> NDArray[np.uint8]:
        """uint8 NumPy [n]: a read-only view, good until the next extend, release or compact."""
        return self._memory.flags(*self._slab_of(segment))

    def held_flags(self, segment: int) -> Any:
        """The same where kernels read them: uint8 NumPy [n], or a tensor [n] on the device."""
        return self._memory.held_flags(*self._slab_of(segment))

    def vector16(self, handles: ArrayLike) -> Float16s:
        """float16 NumPy [n, dim]: a copy of the rows."""
        return self._memory.read(self._vector_addresses(*self._resolve(handles)))

    def take(self, handles: ArrayLike) -> Vectors:
        """float16 [n, dim]: a copy of the rows where kernels want it, NumPy or a tensor on the device.

        The tensor is a `Taken`, which a gate reads without another check; it must not be changed.
        """
        return self._memory.take(self._vector_addresses(*self._resolve(handles)))

    def locate(self, segments: ArrayLike) -> tuple[Int64s, Int64s, Int64s]:
        """(address of the rows, address of the flags, length), int64 [n] each: what the kernels take."""
        slots = self._slots_of(segments)
        return self._address[slots], self._flags_address[slots], self._length[slots]

    @property
    def nbytes(self) -> int:
        """Bytes reserved: all slabs held by segments, their room for growth included."""
        return self._memory.nbytes

    def bytes_of(self, segments: ArrayLike) -> int:
        """What these segments, int64 [n], take of `nbytes`, their room for growth included."""
        return int(self._capacity[self._slots_of(segments)].sum()) * (self.row_bytes + 1)

    @property
    def capacity_bytes(self) -> int | None:
        """What `nbytes` can come to: the size of the device's pool; None on the host."""
        return self._memory.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the rows and flags that are there."""
        return int(self._length.sum()) * (self.row_bytes + 1)

    # -- handles

    @staticmethod
    def handle(segment: int, row: int) -> int:
        return segment << _ROW_BITS | row

    @staticmethod
    def segment_of(handle: int) -> int:
        return handle >> _ROW_BITS

    @staticmethod
    def row_of(handle: int) -> int:
        return handle & _ROW_MASK

    # -- inside: by slot

    def _vector_addresses(self, slots: Int64s, rows: Int64s) -> Int64s:
        return self._address[slots] + rows * self._memory.row_bytes

    def _flag_addresses(self, slots: Int64s, rows: Int64s) -> Int64s:
        return self._flags_address[slots] + rows

    def _slab_of(self, segment: int) -> tuple[Any, int]:
        """A segment's slab, None where it has none, and how many rows it has."""
        slot = int(self._slots_of(segment)[0])
        return self._slabs.get(slot), int(self._length[slot])

    def _place(self, owners: Int64s) -> Int64s:
        """The row number that each new row gets, after making room for all of them."""
        if len(owners) == 0:
            return np.zeros(0, np.int64)
        order = np.argsort(owners, kind="stable")
        slots, starts, counts = np.unique(owners[order], return_index=True, return_counts=True)
        needed = self._length[slots] + counts
        short = needed > self._capacity[slots]
        for slot, rows in zip(slots[short], needed[short], strict=True):
            self._move(int(slot), int(rows))
        placed = np.empty(len(owners), np.int64)
        placed[order] = np.arange(len(owners)) + np.repeat(self._length[slots] - starts, counts)
        return placed

    def _move(self, slot: int, rows: int) -> None:
        """Put a segment into a slab with room for `rows` rows."""
        while True:
            try:
                slab = self._memory.resize(self._slabs.get(slot), rows, int(self._length[slot]))
                break
            except MemoryError:
                if self._memory.pack(rows):
                    self._find_slabs()
                elif self.reclaim is None or not self.reclaim(rows):
                    raise
        self._slabs[slot] = slab
        self._find_slab(slot, slab)

    def _drop(self, slot: int) -> None:
        """Zero a segment's slab, where it has one, and give it back."""
        if (slab := self._slabs.pop(slot, None)) is not None:
            self._memory.give(slab)
        self._address[slot] = self._flags_address[slot] = self._capacity[slot] = 0

    def _find_slab(self, slot: int, slab: Any) -> None:
        address, flags_address, capacity = self._memory.place(slab)
        self._address[slot], self._flags_address[slot] = address, flags_address
        self._capacity[slot] = capacity

    def _find_slabs(self) -> None:
        """After the memory has moved slabs."""
        for slot, slab in self._slabs.items():
            self._find_slab(slot, slab)

    def _resolve(self, handles: ArrayLike) -> tuple[Int64s, Int64s]:
        """Slots and rows of handles, checked."""
        ids = np.atleast_1d(np.asarray(handles, np.int64))
        rows = ids & _ROW_MASK
        slots = self._slots_of(ids >> _ROW_BITS)
        beyond = np.flatnonzero(rows >= self._length[slots])
        if len(beyond):
            slot, row = int(slots[beyond[0]]), int(rows[beyond[0]])
            raise ValueError(
                f"segment {self._ids.id_of(slot)} has {self._length[slot]} rows, so there is no row {row}"
            )
        return slots, rows

    def _slots_of(self, segments: ArrayLike) -> Int64s:
        """The slots of segments that are there, int64 [n]. ValueError."""
        if isinstance(self._memory, _Closed):
            raise ValueError(_GONE)
        return self._ids.slots_of(segments)

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


def _host_memory(dim: int) -> ArenaBackend[Any, Any]:
    # imported where it is used: compiled loops need numba, which a machine with a card may lack
    from undertow.kernels.arena.host_memory import HostMemory

    return HostMemory(dim)


def make_arena(dim: int, device: Device = "auto", device_bytes: int | None = None) -> Arena:
    """An arena where the kernels of a device run: in one pool on a card, or in the host's memory.

    device_bytes: the size of the pool on a card; three quarters of what is free there where None.
    Raises ValueError for "cuda" without a card, MemoryError when it does not have the bytes.
    """
    if resolve(device) == "cpu":
        return Arena(dim)
    from undertow.kernels.arena.device_memory import DeviceMemory, share_pool

    share_pool()
    nbytes = int(torch.cuda.mem_get_info()[0] * _DEVICE_SHARE) if device_bytes is None else device_bytes
    return Arena(dim, DeviceMemory(dim, "cuda", nbytes))
