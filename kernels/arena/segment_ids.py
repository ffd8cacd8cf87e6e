"""Segment ids are never reused; their slots, the positions in the arena's tables, are.

An id is `generation << slot bits | slot`, so one comparison tells whether an id's segment still exists. The
number of slots follows the segments that exist at one time. A slot that has used up its generations is
retired: the id of a released segment never refers to another's rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from undertow.kernels.array_types import Int64s

# An id and a row number form a handle, a non-negative int64.
ID_BITS = 31
# 8.4 million segments at a time, 256 generations each.
SLOT_BITS = 23


class SegmentIds:
    """Allocates and frees ids. They are 0, 1, 2, ... until the first is freed."""

    def __init__(self, slot_bits: int = SLOT_BITS, id_bits: int = ID_BITS) -> None:
        self._slot_bits = slot_bits
        self._slot_mask = (1 << slot_bits) - 1
        self._end = 1 << id_bits
        # By slot: the id of its segment; if it has none, the bitwise complement of the next id.
        self._ids = ~np.arange(16, dtype=np.int64)
        self._free: list[int] = []
        self._slots = 0

    @property
    def slots(self) -> int:
        """The number of slots: used, free and retired."""
        return self._slots

    def take(self) -> int:
        """A new id. MemoryError: none is left."""
        slot = self._free.pop() if self._free else self._new_slot()
        segment = ~int(self._ids[slot])
        self._ids[slot] = segment
        return segment

    def give(self, segment: int) -> int:
        """Free an id for good. Returns its slot. ValueError."""
        slot = int(self.slots_of(segment)[0])
        following = segment + (1 << self._slot_bits)
        self._ids[slot] = ~following
        if following < self._end:
            self._free.append(slot)
        return slot

    def slots_of(self, segments: ArrayLike) -> Int64s:
        """The slots of existing segments, int64 [n]. ValueError names one that does not exist."""
        ids = np.array(segments, np.int64, ndmin=1, copy=None)
        if len(ids) == 1:
            return np.array([self.slot_of(int(ids[0]))])
        slots = ids & self._slot_mask
        # A slot beyond the table is compared with the last, which has another id.
        held = self._ids[np.minimum(slots, len(self._ids) - 1)]
        if len(gone := np.flatnonzero((held != ids) | (ids < 0))):
            raise ValueError(self._refusal(int(ids[gone[0]])))
        return slots

    def slot_of(self, segment: int) -> int:
        """`slots_of` for one segment."""
        slot = segment & self._slot_mask
        if segment < 0 or slot >= self._slots or self._ids[slot] != segment:
            raise ValueError(self._refusal(segment))
        return slot

    def id_of(self, slot: int) -> int:
        """The id of the segment in a slot."""
        return int(self._ids[slot])

    def _new_slot(self) -> int:
        if self._slots > self._slot_mask:
            raise MemoryError(
                f"the arena has given out its {self._slots} segments, and none is free: release some, "
                "and where that does not help, open the store again"
            )
        if self._slots == len(self._ids):
            self._ids = np.concatenate((self._ids, ~np.arange(len(self._ids), 2 * len(self._ids))))
        self._slots += 1
        return self._slots - 1

    def _refusal(self, segment: int) -> str:
        slot = segment & self._slot_mask
        if segment >= 0 and slot < self._slots:
            held = int(self._ids[slot])
            if segment < max(held, ~held):
                return f"segment {segment} was released: take the rows from a new segment"
        return f"there is no segment {segment}: take ids from new_segment"
