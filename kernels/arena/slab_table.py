"""The table of an arena's slabs: where each segment's rows lie, and how slabs grow, move and go.

A slot is a segment's place in the table (`segment_ids.py`). Everything here works by slot; `arena.py` checks
ids and handles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from undertow.kernels.array_types import Int64s

if TYPE_CHECKING:  # the host's memory needs numba, which a machine with a GPU may lack
    from undertow.kernels.arena.device_memory import DeviceMemory
    from undertow.kernels.arena.host_memory import HostMemory

Memory: TypeAlias = "HostMemory | DeviceMemory"

CLOSED = "the arena was closed: its rows are gone"


class ClosedMemory:
    """Replaces the memory of a closed arena."""

    nbytes = capacity_bytes = 0

    def __getattr__(self, name: str) -> Any:
        raise ValueError(CLOSED)


class SlabTable:
    """Owns the slabs that `memory` gives out, at most one for each segment."""

    def __init__(self, memory: Memory) -> None:
        self.reclaim: Callable[[int], bool] | None = None
        self._memory: Memory | ClosedMemory = memory
        # By slot, for the segments that hold memory.
        self._slabs: dict[int, Any] = {}
        # By slot, for all slots; grown by doubling.
        self._address = np.zeros(16, np.int64)
        self._flags_address = np.zeros(16, np.int64)
        self._capacity = np.zeros(16, np.int64)
        self._length = np.zeros(16, np.int64)

    def close(self) -> None:
        """Free all memory at once, even if the arena is still referenced. Its rows are gone."""
        self._memory, self.reclaim = ClosedMemory(), None
        self._slabs.clear()

    @property
    def device(self) -> str:
        """The device that holds the rows: "cpu" or "cuda"."""
        return self._memory.device

    @property
    def row_bytes(self) -> int:
        """Bytes from one row to the next."""
        return self._memory.row_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of a row with its flag and, if there is one, its code."""
        return self._memory.stored_bytes

    @property
    def code_places(self) -> tuple[int, int] | None:
        """(address of some row, address of its code), from which all others follow; None without codes."""
        return self._memory.code_places

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs, including their room for growth."""
        return self._memory.nbytes

    @property
    def capacity_bytes(self) -> int | None:
        """The upper bound of `nbytes`: the size of the device's pool; None on the host."""
        return self._memory.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the existing rows, with their flags and codes."""
        return int(self._length.sum()) * self.stored_bytes

    def _grow(self, slots: int) -> None:
        """Make the table long enough for `slots` slots."""
        if slots > len(self._length):
            for name in ("_address", "_flags_address", "_capacity", "_length"):
                table = getattr(self, name)
                setattr(self, name, np.concatenate((table, np.zeros_like(table))))

    def compact(self) -> int:
        """Refit every slab to its rows. Returns the bytes freed. Earlier views become invalid."""
        before = self._memory.nbytes
        for slot in list(self._slabs):
            slab, length = self._slabs.get(slot), int(self._length[slot])
            if slab is None:  # released meanwhile to make room
                continue
            if length == 0:  # reserved and never used
                self._drop(slot)
            elif self._memory.spare(slab, length) > 0:
                self._move(slot, length)
        if self._memory.pack(0):
            self._find_slabs()
        return before - self._memory.nbytes

    def _vector_addresses(self, slots: Int64s, rows: Int64s) -> Int64s:
        return self._address[slots] + rows * self._memory.row_bytes

    def _flag_addresses(self, slots: Int64s, rows: Int64s) -> Int64s:
        return self._flags_address[slots] + rows

    def _place(self, owners: Int64s) -> Int64s:
        """The row number of each new row, after making room for all of them. MemoryError."""
        self._memory.settle()  # what an earlier call failed to move, before anything moves twice
        if len(owners) == 0:
            return np.zeros(0, np.int64)
        if len(owners) == 1:
            slot = int(owners[0])
            length = int(self._length[slot])
            if length >= self._capacity[slot]:
                self._move(slot, length + 1)
                self._memory.settle()
            return np.array([length])
        order = np.argsort(owners, kind="stable")
        slots, starts, counts = np.unique(owners[order], return_index=True, return_counts=True)
        needed = self._length[slots] + counts
        short = needed > self._capacity[slots]
        for slot, rows in zip(slots[short], needed[short], strict=True):
            self._move(int(slot), int(rows))
        self._memory.settle()
        placed = np.empty(len(owners), np.int64)
        placed[order] = np.arange(len(owners)) + np.repeat(self._length[slots] - starts, counts)
        return placed

    def _move(self, slot: int, rows: int) -> None:
        """Give a segment a slab for `rows` rows, into which the next `settle` moves it. MemoryError."""
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
        """Zero a segment's slab, if it has one, and give it back."""
        if (slab := self._slabs.pop(slot, None)) is not None:
            self._memory.give(slab)
        self._address[slot] = self._flags_address[slot] = self._capacity[slot] = 0

    def _find_slab(self, slot: int, slab: Any) -> None:
        address, flags_address, capacity = self._memory.place(slab)
        self._address[slot], self._flags_address[slot] = address, flags_address
        self._capacity[slot] = capacity

    def _find_slabs(self) -> None:
        """Update all addresses after the memory has moved slabs."""
        for slot, slab in self._slabs.items():
            self._find_slab(slot, slab)
