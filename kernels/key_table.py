"""Tables from the hashes of keys to the keys' numbers: open addressing, compiled, many tables in one call.

Of a 64-bit hash a table holds 32 bits, so different keys may match: the caller compares the keys. A slot is
`hash << 32 | number + 1`, 0 if empty; 10 to 15 bytes a key. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from undertow.kernels.arena.compiled_rows import jit, words_at
from undertow.kernels.array_types import Int64s

Slots = NDArray[np.uint64]

# A table is at most four fifths full, and two thirds full when it has just grown.
MOST_FULL = 0.8
GROWTH = 1.5
_HALF = 32
_LOW = (1 << _HALF) - 1
# The compiled functions must not mix signed and unsigned numbers: their sum would be a float.
_HALF64, _LOW64, _EMPTY = (np.uint64(value) for value in (_HALF, _LOW, 0))
_START = np.int64(0)


class KeyTable:
    """The keys of one tenant, numbered from 0 in order of insertion."""

    def __init__(self) -> None:
        self._slots = np.zeros(1, np.uint64)
        # (address of the slots, number of slots, number of keys)
        self.place = (int(self._slots.ctypes.data), 1, 0)

    def __len__(self) -> int:
        return self.place[2]

    def matches(self, hash: int) -> Iterator[int]:
        """The numbers of the keys that match a hash, in any order."""
        size = len(self._slots)
        at = (hash & _LOW) * size >> _HALF
        while slot := int(self._slots[at]):
            if slot >> _HALF == hash & _LOW:
                yield (slot & _LOW) - 1
            at = (at + 1) % size

    def extend(self, count: int) -> None:
        """Make room for `count` keys more and count them; the caller inserts them."""
        address, size, held = self.place
        if held + count > MOST_FULL * size:
            size = int((held + count) * GROWTH) + 2
            slots = np.zeros(size, np.uint64)
            _move(self._slots, slots)
            self._slots, address = slots, int(slots.ctypes.data)
        self.place = (address, size, held + count)


def may_hold(tables: Sequence[KeyTable], owners: Int64s, hashes: Int64s) -> NDArray[np.bool_]:
    """Which hashes match a key in the table of their owner: bool [n]. owners, hashes: int64 [n]."""
    found = np.empty(len(hashes), np.bool_)
    _find(_places(tables), owners, hashes, found)
    return found


def add_keys(tables: Sequence[KeyTable], owners: Int64s, hashes: Int64s) -> None:
    """Insert the hash of a new key into the table of each owner, in order. owners, hashes: int64 [n]."""
    for table, count in zip(tables, np.bincount(owners, minlength=len(tables)).tolist(), strict=True):
        table.extend(count)
    _insert(_places(tables), owners, hashes)


def _places(tables: Sequence[KeyTable]) -> Int64s:
    return np.array([table.place for table in tables], np.int64).reshape(-1, 3)


@jit
def _first_at(tag: np.uint64, size: int) -> np.int64:
    return np.int64(tag * np.uint64(size) >> _HALF64)


@jit
def _find(places: Int64s, owners: Int64s, hashes: Int64s, found: NDArray[np.bool_]) -> None:
    for i in range(hashes.shape[0]):
        address, size, _ = places[owners[i]]
        slots = words_at(address, size)
        tag = np.uint64(hashes[i]) & _LOW64
        at = _first_at(tag, size)
        while slots[at] != _EMPTY and slots[at] >> _HALF64 != tag:
            at = at + 1 if at + 1 < size else _START
        found[i] = slots[at] != _EMPTY


@jit
def _put(slots: Slots, slot: np.uint64) -> None:
    size = slots.shape[0]
    at = _first_at(slot >> _HALF64, size)
    while slots[at] != _EMPTY:
        at = at + 1 if at + 1 < size else _START
    slots[at] = slot


@jit
def _insert(places: Int64s, owners: Int64s, hashes: Int64s) -> None:
    """places[:, 2]: how many keys there are with these. From the last on, so that numbers ascend."""
    for i in range(hashes.shape[0] - 1, -1, -1):
        address, size, number = places[owners[i]]
        places[owners[i], 2] = number - 1
        _put(words_at(address, size), np.uint64(hashes[i]) << _HALF64 | np.uint64(number))


@jit
def _move(old: Slots, new: Slots) -> None:
    for i in range(old.shape[0]):
        if old[i] != _EMPTY:
            _put(new, old[i])
