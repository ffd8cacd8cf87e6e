"""The payloads of loaded turns, outside Python's heap: in files without a name, mapped into memory.

The kernel may write their pages to disk and read them again, so texts need not stay in memory. The files hold
nothing that the journal does not have, and are gone with the process. A freed range is zeroed at once.
"""

from __future__ import annotations

import mmap
import os
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile

# Ranges have sizes of powers of two from this up. Those of a tenant double up to LARGEST_BYTES; a batch that
# is larger gets a range of its own.
SMALLEST_BYTES = 512
LARGEST_BYTES = 1 << 20
# Segments double in size from the first to the last of these: few files, and little unused space.
SEGMENT_BYTES = (4 << 20, 64 << 20)
# After so many bytes read and written, all pages are unmapped. They stay in the system's page cache.
MAPPED_BYTES = 256 << 20

# A position is the number of a segment and a place in it.
_PLACE_BITS = 40
_PLACE = (1 << _PLACE_BITS) - 1


class Segment:
    """A mapped file of `size` zero bytes, or memory if the disk has no room for it."""

    def __init__(self, folder: Path | None, size: int) -> None:
        try:
            self.map, self.is_file = _mapped_file(folder, size), True
        except OSError:
            self.map, self.is_file = mmap.mmap(-1, size), False
        self.size = size
        # Ranges are handed out up to `end`; `held` bytes of them are in use.
        self.end = self.held = 0

    def unmap_pages(self) -> None:
        """Take the pages out of this process's memory; the page cache keeps them."""
        if self.is_file and sys.platform == "linux":
            self.map.madvise(mmap.MADV_DONTNEED)


def _mapped_file(folder: Path | None, size: int) -> mmap.mmap:
    """OSError. The blocks are reserved: a write to mapped memory cannot fail cleanly."""
    with TemporaryFile(dir=folder, buffering=0) as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
        return mmap.mmap(file.fileno(), size)


class PayloadFile:
    """Owns the segments. `folder`: where they are, on a disk if possible; None: that for temporary files."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        # By number, of segments in use; the newest is the one that new ranges come from.
        self.segments: dict[int, Segment] = {}
        self._newest = -1
        # Positions of freed ranges, by size.
        self._free: dict[int, list[int]] = {}
        self._touched = 0

    def take(self, nbytes: int) -> tuple[int, int]:
        """A range of at least `nbytes` zero bytes: its position and size."""
        size = max(SMALLEST_BYTES, 1 << (nbytes - 1).bit_length())
        if free := self._free.get(size):
            position = free.pop()
            segment = self.segments[position >> _PLACE_BITS]
        else:
            segment = self._segment_for(size)
            position = self._newest << _PLACE_BITS | segment.end
            segment.end += size
        segment.held += size
        return position, size

    def give(self, position: int, size: int) -> None:
        """Zero and free a range. A segment without ranges is closed."""
        self.clear(position, size)
        self._free.setdefault(size, []).append(position)
        number = position >> _PLACE_BITS
        segment = self.segments[number]
        segment.held -= size
        if not segment.held:
            segment.map.close()
            del self.segments[number]
            for of_size, free in self._free.items():
                self._free[of_size] = [place for place in free if place >> _PLACE_BITS != number]

    def read(self, position: int, length: int) -> bytes:
        self._touched += length + mmap.PAGESIZE
        if self._touched > MAPPED_BYTES:
            self._unmap_pages()
        place = position & _PLACE
        return self.segments[position >> _PLACE_BITS].map[place : place + length]

    def write(self, position: int, data: bytes | memoryview) -> None:
        self._touched += len(data) + mmap.PAGESIZE
        if self._touched > MAPPED_BYTES:
            self._unmap_pages()
        place = position & _PLACE
        self.segments[position >> _PLACE_BITS].map[place : place + len(data)] = data

    def clear(self, position: int, length: int) -> None:
        self.write(position, bytes(length))

    def close(self) -> None:
        """Give all memory and disk space back. Payloads cannot be read any more."""
        for segment in self.segments.values():
            segment.map.close()
        self.segments.clear()
        self._free.clear()

    def _segment_for(self, size: int) -> Segment:
        """The newest segment if it has room for `size` bytes, or a new one."""
        newest = self.segments.get(self._newest)
        if newest is not None and newest.end + size <= newest.size:
            return newest
        least, most = SEGMENT_BYTES
        total = sum(segment.size for segment in self.segments.values())
        segment = Segment(self._folder, max(least, min(total, most), size))
        self._newest += 1
        self.segments[self._newest] = segment
        return segment

    def _unmap_pages(self) -> None:
        self._touched = 0
        for segment in self.segments.values():
            segment.unmap_pages()


class Payloads:
    """The payloads of one tenant's records, by seq. Controls and deleted turns have an empty one."""

    def __init__(self, file: PayloadFile) -> None:
        self._file = file
        # By seq: position and length.
        self._positions = array("q")
        self._lengths = array("I")
        # The ranges: position and size of each in turn. The last has `_room` bytes left from `_end` on.
        self._ranges = array("q")
        self._held = self._end = self._room = 0

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, seq: int) -> bytes:
        length = self._lengths[seq]
        return self._file.read(self._positions[seq], length) if length else b""

    def exists(self, seq: int) -> bool:
        """Whether the payload is not empty."""
        return self._lengths[seq] > 0

    def extend(self, joined: bytes | memoryview, lengths: Sequence[int]) -> None:
        """Append payloads of these lengths, which lie one after the other in `joined`."""
        total = len(joined)
        if total > self._room:
            self._end, self._room = self._file.take(max(total, min(self._held, LARGEST_BYTES)))
            self._ranges.extend((self._end, self._room))
            self._held += self._room
        if total:
            self._file.write(self._end, joined)
            self._room -= total
        for length in lengths:
            self._positions.append(self._end)
            self._end += length
        self._lengths.extend(lengths)

    def clear(self, seq: int) -> None:
        """Zero a payload; it is empty from now on."""
        if length := self._lengths[seq]:
            self._file.clear(self._positions[seq], length)
            self._lengths[seq] = 0

    def release(self) -> None:
        """Zero and free the ranges. The payloads are gone."""
        for at in range(0, len(self._ranges), 2):
            self._file.give(self._ranges[at], self._ranges[at + 1])
        for column in (self._positions, self._lengths, self._ranges):
            del column[:]
        self._held = self._end = self._room = 0
