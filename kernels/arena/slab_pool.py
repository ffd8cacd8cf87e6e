"""Allocates slabs: slots of size classes, carved from large anonymous mappings.

A chunk serves one size class. A freed slot returns its whole pages to the system at once, and the part of a
slot that was never written holds no page of its own. So many segments that grow a row at a time, each freeing
outgrown slabs, stay within the memory that their rows need, without moving other slabs.
"""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

CHUNK_BYTES = 4 << 20
# Slots are multiples of it, so that a segment of a few rows does not hold a whole page.
STEP_BYTES = 1024
# Size classes between a power of two and the next, where they are further apart than a step.
CLASSES_PER_OCTAVE = 16
LARGEST_SLAB_BYTES = 1 << 42


class Chunk:
    """One mapping cut into `slots` slots of `slot_bytes` each."""

    def __init__(self, slot_bytes: int, slots: int) -> None:
        try:
            self._memory = mmap.mmap(-1, slot_bytes * slots, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(
                f"the arena cannot map {slot_bytes * slots} more bytes: {error}. "
                "Release segments, lower the arena's budget, or raise the process's memory limit."
            ) from error
        if sys.platform == "linux":
            with suppress(OSError):  # a kernel without huge pages
                # a huge page would also back the unused slots and tails around what is written
                self._memory.madvise(mmap.MADV_NOHUGEPAGE)
        self.slot_bytes = slot_bytes
        self.slots = slots
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8)
        self.address = int(self.bytes.ctypes.data)
        self.free = list(range(slots - 1, -1, -1))

    def clear(self, slot: int) -> None:
        """Zero a slot. On Linux its whole pages return to the system and read as zeros on the next access."""
        start = slot * self.slot_bytes
        end = start + self.slot_bytes
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if sys.platform == "linux" and first < last:
            self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)
            self.bytes[start:first] = 0
            self.bytes[last:end] = 0
        else:
            self.bytes[start:end] = 0


@dataclass(frozen=True, slots=True)
class Slab:
    """One slot of a chunk, used by one segment. Its bytes are zero at first."""

    chunk: Chunk
    slot: int

    @property
    def nbytes(self) -> int:
        return self.chunk.slot_bytes

    @property
    def address(self) -> int:
        return self.chunk.address + self.slot * self.chunk.slot_bytes

    @property
    def bytes(self) -> NDArray[np.uint8]:
        start = self.slot * self.chunk.slot_bytes
        return self.chunk.bytes[start : start + self.chunk.slot_bytes]


@dataclass(slots=True)
class SlabPool:
    """Allocates and frees slabs. `nbytes` counts allocated ones; free slots use almost no memory."""

    nbytes: int = 0
    # Chunks with a free slot, by class; full chunks are referenced by their slabs.
    _open: dict[int, list[Chunk]] = field(default_factory=dict)

    def take(self, nbytes: int) -> Slab:
        """A zeroed slab of at least `nbytes` bytes. Raises MemoryError."""
        size = slab_bytes(nbytes)
        chunks = self._open.setdefault(size, [])
        if not chunks:
            chunks.append(Chunk(size, max(1, CHUNK_BYTES // size)))
        chunk = chunks[-1]
        slot = chunk.free.pop()
        if not chunk.free:
            chunks.pop()
        self.nbytes += size
        return Slab(chunk, slot)

    def give(self, slab: Slab) -> None:
        """Zero and free a slab. A chunk without slabs is unmapped."""
        chunk = slab.chunk
        chunk.clear(slab.slot)
        chunk.free.append(slab.slot)
        chunks = self._open.setdefault(chunk.slot_bytes, [])
        if len(chunk.free) == 1:
            chunks.append(chunk)
        if len(chunk.free) == chunk.slots:
            chunks.remove(chunk)
        self.nbytes -= chunk.slot_bytes


def slab_bytes(nbytes: int) -> int:
    """The size of the smallest class that holds `nbytes` > 0. Raises MemoryError above the largest."""
    if nbytes > LARGEST_SLAB_BYTES:
        raise MemoryError(f"a segment of {nbytes} bytes is beyond the largest slab: split the tenant")
    octave = 1 << nbytes.bit_length() - 1
    step = max(octave // CLASSES_PER_OCTAVE, STEP_BYTES)
    return -(-nbytes // step) * step
