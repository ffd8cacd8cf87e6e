"""The arena: vectors of many segments, each segment contiguous, rows addressed by 64-bit handles.

A segment belongs to one tenant and one kind of memory. Its rows are numbered from 0 in the order they
came and never move, so a row number is as good as a seq. The values are fp16; they are held as fp32,
because decoding fp16 inside the scan costs far more on a CPU than reading twice the bytes.
One owner calls an arena; it takes no locks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from undertow.kernels.exact import MAX_NORM
from undertow.kernels.pool import Slab, SlabPool, slab_bytes
from undertow.kernels.rows import change_flags, read_flags, read_rows, write_rows

Int64s = NDArray[np.int64]
Float16s = NDArray[np.float16]

PRESENT = 1
LIVE = 2

_ROW_BITS = 32
_ROW_MASK = (1 << _ROW_BITS) - 1
_BLOCK_ROWS = 4096
_RELEASED = -1


class Arena:
    """Vectors of `dim` fp16 values in per-segment slabs.

    Flags of a row: PRESENT (it holds a vector), LIVE (it counts in gates). Handles are
    `segment << 32 | row`. Every vector must be finite and have a norm of at most 4, the domain in
    which scores are exact (see `kernels/exact.py`). Methods raise ValueError for bad input and
    MemoryError when the system gives no more memory; in either case nothing is changed.
    """

    PRESENT = PRESENT
    LIVE = LIVE

    def __init__(self, dim: int) -> None:
        if not 1 <= dim <= 65_536:
            raise ValueError(f"dim must be in 1..65536, not {dim}")
        self.dim = dim
        self._pool = SlabPool()
        self._slabs: list[Slab | None] = []
        # per segment; grown by doubling, the first len(_slabs) entries are valid
        self._address = np.zeros(16, np.int64)
        self._capacity = np.zeros(16, np.int64)
        self._length = np.zeros(16, np.int64)

    # -- segments

    def new_segment(self) -> int:
        """An empty segment's id: 0, 1, 2, ... It holds no memory until it gets rows."""
        segment = len(self._slabs)
        if segment == len(self._length):
            for name in ("_address", "_capacity", "_length"):
                table = getattr(self, name)
                setattr(self, name, np.concatenate((table, np.zeros_like(table))))
        self._slabs.append(None)
        return segment

    def release(self, segment: int) -> None:
        """Zero a segment's memory and give it back. Its id is not used again."""
        self._check_segments(segment)
        slab = self._slabs[segment]
        if slab is not None:
            self._pool.give(slab)
        self._slabs[segment] = None
        self._address[segment] = self._capacity[segment] = 0
        self._length[segment] = _RELEASED

    def compact(self) -> int:
        """Refit every slab to its rows; the bytes freed. Views taken before no longer follow the segment."""
        before = self._pool.nbytes
        for segment, slab in enumerate(self._slabs):
            length = int(self._length[segment])
            if slab is not None and slab_bytes(length * self._row_bytes) < slab.nbytes:
                self._move(segment, length)
        return before - self._pool.nbytes

    # -- rows

    def extend(self, segments: ArrayLike, vectors: Float16s, live: bool) -> Int64s:
        """Append vectors[i] to segments[i], in order; PRESENT, and LIVE if `live`.

        segments: int64 [n]; vectors: float16 [n, dim]. Returns the handles, int64 [n].
        """
        owners = np.atleast_1d(np.asarray(segments, np.int64))
        self._check_vectors(vectors, len(owners))
        self._check_segments(owners)
        rows = self._place(owners)
        write_flags = PRESENT | (LIVE if live else 0)
        for start in range(0, len(owners), _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            write_rows(self._vector_addresses(owners[block], rows[block]), to_float32(vectors[block]))
        change_flags(self._flag_addresses(owners, rows), 0, write_flags)
        np.maximum.at(self._length, owners, rows + 1)
        return owners << _ROW_BITS | rows

    def write(self, handle: ArrayLike, vector: Float16s) -> None:
        """Replace the vector of a row, or of each of several rows, in place; flags stay.

        handle: int64 or int64 [n]; vector: float16 [dim] or [n, dim]. A redacted row is an error.
        """
        owners, rows = self._resolve(handle)
        vectors = np.atleast_2d(vector)
        self._check_vectors(vectors, len(owners))
        self._check_present(owners, rows)
        write_rows(self._vector_addresses(owners, rows), to_float32(vectors))

    def set_live(self, handles: ArrayLike, live: bool) -> None:
        """Set or clear LIVE. A redacted row can be cleared, and making it live is an error."""
        owners, rows = self._resolve(handles)
        if live:
            self._check_present(owners, rows)
        change_flags(self._flag_addresses(owners, rows), 0xFF & ~LIVE, LIVE if live else 0)

    def redact(self, handles: ArrayLike) -> None:
        """Zero the vectors and clear all flags. The rows keep their places."""
        owners, rows = self._resolve(handles)
        write_rows(self._vector_addresses(owners, rows), np.zeros((len(rows), self.dim), np.float32))
        change_flags(self._flag_addresses(owners, rows), 0, 0)

    # -- reading

    def length(self, segment: int) -> int:
        """Rows of a segment, redacted ones included."""
        self._check_segments(segment)
        return int(self._length[segment])

    def vectors(self, segment: int) -> NDArray[np.float32]:
        """float32 [n, dim]: a read-only view, good until the next extend, release or compact."""
        length, slab = self.length(segment), self._slabs[segment]
        if slab is None:
            return np.zeros((0, self.dim), np.float32)
        view = slab.bytes[: length * self.dim * 4].view(np.float32).reshape(length, self.dim)
        view.flags.writeable = False
        return view

    def flags(self, segment: int) -> NDArray[np.uint8]:
        """uint8 [n]: a read-only view, good until the next extend, release or compact."""
        length, slab = self.length(segment), self._slabs[segment]
        if slab is None:
            return np.zeros(0, np.uint8)
        start = int(self._capacity[segment]) * self.dim * 4
        view = slab.bytes[start : start + length]
        view.flags.writeable = False
        return view

    def vector16(self, handles: ArrayLike) -> Float16s:
        """float16 [n, dim]: a copy of the rows."""
        owners, rows = self._resolve(handles)
        vectors = np.empty((len(rows), self.dim), np.float32)
        read_rows(self._vector_addresses(owners, rows), vectors)
        return vectors.astype(np.float16)

    def locate(self, segments: ArrayLike) -> tuple[Int64s, Int64s, Int64s]:
        """(address of the rows, address of the flags, length), int64 [n] each: what the kernels take."""
        ids = np.atleast_1d(np.asarray(segments, np.int64))
        self._check_segments(ids)
        address = self._address[ids]
        return address, address + self._capacity[ids] * (self.dim * 4), self._length[ids]

    @property
    def nbytes(self) -> int:
        """Bytes reserved: all slabs held by segments, their room for growth included."""
        return self._pool.nbytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the rows and flags that are there."""
        lengths = self._length[: len(self._slabs)]
        return int(lengths[lengths > 0].sum()) * self._row_bytes

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

    # -- inside

    @property
    def _row_bytes(self) -> int:
        return self.dim * 4 + 1  # fp32 values and a flag

    def _vector_addresses(self, segments: Int64s, rows: Int64s) -> Int64s:
        return self._address[segments] + rows * (self.dim * 4)

    def _flag_addresses(self, segments: Int64s, rows: Int64s) -> Int64s:
        return self._address[segments] + self._capacity[segments] * (self.dim * 4) + rows

    def _place(self, owners: Int64s) -> Int64s:
        """The row number that each new row gets, after making room for all of them."""
        if len(owners) == 0:
            return np.zeros(0, np.int64)
        order = np.argsort(owners, kind="stable")
        ids, starts, counts = np.unique(owners[order], return_index=True, return_counts=True)
        needed = self._length[ids] + counts
        for segment, rows in zip(
            ids[needed > self._capacity[ids]], needed[needed > self._capacity[ids]], strict=True
        ):
            self._move(int(segment), int(rows))
        placed = np.empty(len(owners), np.int64)
        placed[order] = np.arange(len(owners)) + np.repeat(self._length[ids] - starts, counts)
        return placed

    def _move(self, segment: int, rows: int) -> None:
        """Put a segment into a slab with room for `rows` rows."""
        old, slab = self._slabs[segment], self._pool.take(rows * self._row_bytes)
        capacity, width = min(slab.nbytes // self._row_bytes, _ROW_MASK), self.dim * 4
        if old is not None:
            length, start = int(self._length[segment]), int(self._capacity[segment]) * width
            slab.bytes[: length * width] = old.bytes[: length * width]
            slab.bytes[capacity * width : capacity * width + length] = old.bytes[start : start + length]
        self._slabs[segment] = slab
        self._address[segment], self._capacity[segment] = slab.address, capacity
        if old is not None:
            self._pool.give(old)

    def _resolve(self, handles: ArrayLike) -> tuple[Int64s, Int64s]:
        """Segments and rows of handles, checked."""
        ids = np.atleast_1d(np.asarray(handles, np.int64))
        owners, rows = ids >> _ROW_BITS, ids & _ROW_MASK
        self._check_segments(owners)
        beyond = np.flatnonzero(rows >= self._length[owners])
        if len(beyond):
            segment, row = int(owners[beyond[0]]), int(rows[beyond[0]])
            raise ValueError(f"segment {segment} has {self.length(segment)} rows, so there is no row {row}")
        return owners, rows

    def _check_segments(self, segments: ArrayLike) -> None:
        ids = np.atleast_1d(np.asarray(segments, np.int64))
        unknown = ids[(ids < 0) | (ids >= len(self._slabs))]
        if len(unknown):
            raise ValueError(f"there is no segment {unknown[0]}: {len(self._slabs)} were made by new_segment")
        released = ids[self._length[ids] == _RELEASED]
        if len(released):
            raise ValueError(f"segment {released[0]} was released: take the rows from a new segment")

    def _check_present(self, owners: Int64s, rows: Int64s) -> None:
        flags = np.empty(len(rows), np.uint8)
        read_flags(self._flag_addresses(owners, rows), flags)
        gone = np.flatnonzero(flags & PRESENT == 0)
        if len(gone):
            segment, row = int(owners[gone[0]]), int(rows[gone[0]])
            raise ValueError(f"row {row} of segment {segment} was redacted: append a new row instead")

    def _check_vectors(self, vectors: Float16s, count: int) -> None:
        _check_form(vectors, self.dim)
        if len(vectors) != count:
            raise ValueError(f"{len(vectors)} vectors for {count} rows")
        # block by block, and again when they are written: a bulk load must not exist twice in fp32
        for start in range(0, count, _BLOCK_ROWS):
            widened(vectors[start : start + _BLOCK_ROWS], self.dim, first=start)


def widened(
    vectors: NDArray[Any], dim: int, *dtypes: type[np.floating[Any]], first: int = 0
) -> NDArray[np.float32]:
    """The vectors as float32 [n, dim], after refusing (ValueError) what no kernel may meet.

    dtypes: what is taken; float16 where none is named. Values must be finite, norms at most 4.
    first: the number of the first vector in error texts.
    """
    _check_form(vectors, dim, *dtypes)
    wide = to_float32(vectors)
    # written so that NaN fails it
    bad = np.flatnonzero(~(np.einsum("nd,nd->n", wide, wide) <= MAX_NORM * MAX_NORM))
    if len(bad):
        problem = "has a norm above 4" if np.isfinite(wide[bad[0]]).all() else "is not finite"
        raise ValueError(f"vector {first + bad[0]} {problem}: L2-normalise it first")
    return wide


def to_float32(vectors: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    """The same values as float32, contiguous; by torch, as numpy takes fp16 one value at a time (20x)."""
    values = np.ascontiguousarray(vectors)
    # torch warns of memory that it may not write
    return torch.from_numpy(values if values.flags.writeable else values.copy()).float().numpy()


def _check_form(vectors: NDArray[Any], dim: int, *dtypes: type[np.floating[Any]]) -> None:
    names = [np.dtype(dtype).name for dtype in dtypes or (np.float16,)]
    if not isinstance(vectors, np.ndarray) or vectors.dtype.name not in names:
        found = getattr(vectors, "dtype", type(vectors).__name__)
        raise ValueError(f"vectors must be an array of {' or '.join(names)}, not {found}")
    if vectors.ndim != 2 or vectors.shape[1] != dim:
        raise ValueError(f"vectors must have shape [n, {dim}], not {list(vectors.shape)}")
