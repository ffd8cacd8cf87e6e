"""A table from the hash of a key to the positions that keys of this hash have: open addressing, compiled.

Of a 64-bit hash the table holds 32 bits, so different keys may match: the caller compares the keys. A slot is
`hash << 32 | position + 1`, 0 if empty; 10 to 15 bytes a key. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from undertow.kernels.arena.compiled_rows import jit

Int64s = NDArray[np.int64]
Slots = NDArray[np.uint64]

# A table is at most four fifths full, and two thirds full when it has just grown.
MOST_FULL = 0.8
GROWTH = 1.5
_HALF = 32
_LOW = (1 << _HALF) - 1
# The compiled functions must not mix signed and unsigned numbers: their sum would be a float.
_HALF64, _LOW64, _ONE, _EMPTY = (np.uint64(value) for value in (_HALF, _LOW, 1, 0))


class KeyTable:
    """The positions of one tenant's keys."""

    def __init__(self) -> None:
        self._slots = np.zeros(0, np.uint64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def may_hold(self, hashes: Int64s) -> NDArray[np.bool_]:
        """Which hashes, int64 [n], match a key: bool [n]."""
        found = np.zeros(len(hashes), np.bool_)
        if self._count:
            _find(self._slots, hashes, found)
        return found

    def matches(self, hash: int) -> Iterator[int]:
        """The positions of the keys that match a hash, in any order."""
        size = len(self._slots)
        at = (hash & _LOW) * size >> _HALF
        while size and (slot := int(self._slots[at])):
            if slot >> _HALF == hash & _LOW:
                yield (slot & _LOW) - 1
            at = (at + 1) % size

    def add(self, hashes: Int64s, positions: NDArray[np.int32]) -> None:
        """Insert the hash of a key, int64 [n], at each position, int32 [n]."""
        count = self._count + len(hashes)
        if count > MOST_FULL * len(self._slots):
            slots = np.zeros(int(count * GROWTH) + 2, np.uint64)
            _move(self._slots, slots)
            self._slots = slots
        _insert(self._slots, hashes, positions)
        self._count = count


@jit
def _find(slots: Slots, hashes: Int64s, found: NDArray[np.bool_]) -> None:
    size = np.uint64(slots.shape[0])
    for i in range(hashes.shape[0]):
        tag = np.uint64(hashes[i]) & _LOW64
        at = tag * size >> _HALF64
        while slots[at] != _EMPTY:
            if slots[at] >> _HALF64 == tag:
                found[i] = True
                break
            at += _ONE
            if at == size:
                at = _EMPTY


@jit
def _put(slots: Slots, slot: np.uint64) -> None:
    size = np.uint64(slots.shape[0])
    at = (slot >> _HALF64) * size >> _HALF64
    while slots[at] != _EMPTY:
        at += _ONE
        if at == size:
            at = _EMPTY
    slots[at] = slot


@jit
def _insert(slots: Slots, hashes: Int64s, positions: NDArray[np.int32]) -> None:
    for i in range(hashes.shape[0]):
        _put(slots, np.uint64(hashes[i]) << _HALF64 | (np.uint64(positions[i]) + _ONE))


@jit
def _move(old: Slots, new: Slots) -> None:
    for i in range(old.shape[0]):
        if old[i] != _EMPTY:
            _put(new, old[i])
