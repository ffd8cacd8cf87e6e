"""Segment ids: each is given once, while the slot behind it, its place in the arena's tables, is used again.

An id is `life << slot bits | slot`, so one comparison an id tells whether its segment is still there. Slots
follow the segments that are there at one time, not all that ever were. A slot whose lives are used up is
not given again: an id of a released segment never comes to mean another's rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Int64s = NDArray[np.int64]

# an id and a row's number make one handle, a non-negative int64
ID_BITS = 31
# 8.4 million segments at a time, 256 lives each
SLOT_BITS = 23


class SegmentIds:
    """Gives ids and takes them back. While none came back they are 0, 1, 2, ..."""

    def __init__(self, slot_bits: int = SLOT_BITS, id_bits: int = ID_BITS) -> None:
        self._slot_bits = slot_bits
        self._slot_mask = (1 << slot_bits) - 1
        self._end = 1 << id_bits
        # by slot: the id of its segment; where it has none, the bitwise complement of the next id
        self._ids = ~np.arange(16, dtype=np.int64)
        self._free: list[int] = []
        self._slots = 0

    @property
    def slots(self) -> int:
        """How many slots there are: those in use, those to be used again, and the used up."""
        return self._slots

    def take(self) -> int:
        """An id that was never given before. MemoryError: there is none left."""
        slot = self._free.pop() if self._free else self._new_slot()
        segment = ~int(self._ids[slot])
        self._ids[slot] = segment
        return segment

    def give(self, segment: int) -> int:
        """Take an id back for good; its slot. ValueError."""
        slot = int(self.slots_of(segment)[0])
        following = segment + (1 << self._slot_bits)
        self._ids[slot] = ~following
        if following < self._end:
            self._free.append(slot)
        return slot

    def slots_of(self, segments: ArrayLike) -> Int64s:
        """The slots of segments that are there, int64 [n]. ValueError names one that is not."""
        ids = np.atleast_1d(np.asarray(segments, np.int64))
        slots = ids & self._slot_mask
        # a slot beyond the table is compared with the last, whose id is another
        held = self._ids[np.minimum(slots, len(self._ids) - 1)]
        if len(gone := np.flatnonzero((held != ids) | (ids < 0))):
            raise ValueError(self._refusal(int(ids[gone[0]])))
        return slots

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
