"""Allocates ranges of rows in a fixed pool: size classes, with adjacent free ranges coalesced.

Pure bookkeeping without memory of its own. Free rows are zero: the caller zeroes rows before it frees them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from undertow.kernels.array_types import Int64s

# Classes are multiples of this.
SMALLEST_ROWS = 4
# Up to this, classes double; beyond it they grow by a quarter.
DOUBLING_ROWS = 256
GROWTH = 1.25


def class_rows(rows: int) -> int:
    """The size of the smallest class that holds `rows` rows."""
    size = SMALLEST_ROWS
    while size < rows:
        size = size * 2 if size < DOUBLING_ROWS else -int(-size * GROWTH // SMALLEST_ROWS) * SMALLEST_ROWS
    return size


@dataclass(slots=True, eq=False)
class Range:
    """Rows [start, start + rows) of the pool, held by one segment; `pack` may move it."""

    start: int
    rows: int

    @property
    def end(self) -> int:
        return self.start + self.rows


class RangeAllocator:
    """Allocates and frees ranges in a pool of `total` rows, best fit.

    `take` can serve any request up to `free` rows, after `pack` if they are fragmented.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self._held: dict[int, Range] = {}  # by start
        self._ends = {total: 0} if total else {}  # free ranges: end -> start
        self._sizes = {0: total} if total else {}  # start -> rows
        self._by_size = [(total, 0)] if total else []  # sorted

    @property
    def taken(self) -> int:
        return self.total - self.free

    @property
    def largest_free(self) -> int:
        """Rows of the largest free range."""
        return self._by_size[-1][0] if self._by_size else 0

    def take(self, rows: int) -> Range | None:
        """A range of exactly `rows` rows; None if no free range is large enough."""
        at = bisect_left(self._by_size, (rows, -1))
        if at == len(self._by_size):
            return None
        start = self._by_size[at][1]
        self._cut(start, rows)
        held = self._held[start] = Range(start, rows)
        return held

    def stretch(self, held: Range, rows: int) -> bool:
        """Grow or shrink a range in place. False: too little free space follows it."""
        more = rows - held.rows
        if more > 0:
            if self._sizes.get(held.end, 0) < more:
                return False
            self._cut(held.end, more)
        elif more < 0:
            self._join(held.start + rows, -more)
        held.rows = rows
        return True

    def give(self, held: Range) -> None:
        """Free a range."""
        del self._held[held.start]
        self._join(held.start, held.rows)

    def pack(self) -> tuple[int, Int64s]:
        """Move all held ranges to the front, in their order.

        Returns (first, sources): row first + i now belongs where row sources[i] lay, int64, ascending,
        never below first + i; rows from first + len(sources) on are free.
        """
        first = min(self._sizes, default=self.total)
        later = sorted(start for start in self._held if start >= first)
        moved = [self._held.pop(start) for start in later]
        sizes = np.array([held.rows for held in moved], np.int64)
        starts = np.concatenate(([0], np.cumsum(sizes)))
        shifts = np.array(later, np.int64) - (first + starts[:-1])
        sources = np.arange(first, first + starts[-1], dtype=np.int64) + np.repeat(shifts, sizes)
        for held, start in zip(moved, starts.tolist(), strict=False):
            held.start = first + start
            self._held[held.start] = held
        self._ends, self._sizes, self._by_size = {}, {}, []
        self.free = 0
        if (end := first + len(sources)) < self.total:
            self._join(end, self.total - end)
        return first, sources

    # -- free ranges

    def _cut(self, start: int, rows: int) -> None:
        """Mark the first `rows` rows of the free range at `start` as used."""
        size = self._remove(start)
        if size > rows:
            self._add(start + rows, size - rows)
        self.free -= rows

    def _join(self, start: int, rows: int) -> None:
        """Mark these rows as free, coalesced with adjacent free ranges."""
        self.free += rows
        if start + rows in self._sizes:
            rows += self._remove(start + rows)
        if start in self._ends:
            before = self._ends[start]
            rows += self._remove(before)
            start = before
        self._add(start, rows)

    def _add(self, start: int, rows: int) -> None:
        self._sizes[start] = rows
        self._ends[start + rows] = start
        insort(self._by_size, (rows, start))

    def _remove(self, start: int) -> int:
        rows = self._sizes.pop(start)
        del self._ends[start + rows]
        del self._by_size[bisect_left(self._by_size, (rows, start))]
        return rows
