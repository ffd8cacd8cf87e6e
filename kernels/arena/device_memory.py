"""Slabs on a device: a pool of fp16 rows, one of flags and perhaps one of codes, allocated once.

Row r of the pool has flag r and code r (`row_codes.py`), so a slab is a range of rows. The host keeps a copy
of all flags for checks; the device's copy, for kernels, is updated by the same operations. Everything is
queued on torch's current stream. Appended tensors are not copied to the host; checking them synchronises
with the device once per batch. NumPy arrays are checked on the host without synchronisation, and rows from
`take` are not checked again.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from undertow.kernels.arena.range_allocator import Range, RangeAllocator, class_rows
from undertow.kernels.arena.row_codes import code_bytes, codes_of
from undertow.kernels.arena.tensors import CheckedRows, check_array, check_tensor, to_tensor
from undertow.kernels.arena.vector_checks import Vectors
from undertow.kernels.array_types import Float16s, Int64s, Uint8s

_ALIGN_BYTES = 16
_BOUNCE_BYTES = 16 << 20
# 1 / the largest share of the pool that is reserved for moving rows.
_BOUNCE_SHARE = 64


class DeviceMemory:
    """`nbytes` of a torch device for rows of `dim` float16, padded with zeros to multiples of 16 bytes.

    A slab has room for the rows of one segment. Rows and flags are addressed by int64 of the host or the
    device; those never written are zero. With `coded`, each row has an int8 code beside it. `device` is a
    torch device; tests use "cpu" on machines without a GPU. Raises ValueError for a pool too small for a
    single slab, MemoryError if the device has too little memory.
    """

    def __init__(self, dim: int, device: str | torch.device, nbytes: int, coded: bool = False) -> None:
        self.dim = dim
        self.row_bytes = -(-dim * 2 // _ALIGN_BYTES) * _ALIGN_BYTES
        self._code_bytes = code_bytes(dim) if coded else 0
        self.stored_bytes = self.row_bytes + self._code_bytes + 1
        self._device = torch.device(device)
        widest = max(self.row_bytes, self._code_bytes)
        self._at_a_time = bounce = max(1, min(_BOUNCE_BYTES, nbytes // _BOUNCE_SHARE) // widest)
        rows = (nbytes - bounce * widest) // self.stored_bytes
        if rows < class_rows(1):
            raise ValueError(
                f"an arena of {nbytes} bytes on {self._device} holds no segment of vectors of {dim} "
                f"values: give it {(class_rows(1) + bounce + 1) * self.stored_bytes} bytes at least"
            )
        self._rows, self._codes, self._flags, self._bounce = self._reserve(rows, bounce * widest)
        # What moves with a row, in words of 32 bits, and is zeroed with it.
        self._pools = (self._rows.view(torch.int32), self._codes)[: 1 + coded]
        self._values = self._rows[:, :dim]
        self._mirror = np.zeros(rows, np.uint8)
        self._ranges = RangeAllocator(rows)
        # Slabs that were replaced, the first row of what replaces each, and how many rows move there.
        self._outgrown: list[tuple[Range, int, int]] = []
        self._address = self._rows.data_ptr()
        self._flags_address = self._flags.data_ptr()

    def _reserve(self, rows: int, bounce_bytes: int) -> tuple[torch.Tensor, ...]:
        width, device = self.row_bytes // 2, self._device
        try:
            return (
                torch.zeros((rows, width), dtype=torch.float16, device=device),
                torch.zeros((rows, self._code_bytes // 4), dtype=torch.int32, device=device),
                torch.zeros(rows, dtype=torch.uint8, device=device),
                torch.empty(bounce_bytes // 4, dtype=torch.int32, device=device),
            )
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            wanted = rows * self.stored_bytes + bounce_bytes
            free = f"; {torch.cuda.mem_get_info(device)[0]} are free" if device.type == "cuda" else ""
            raise MemoryError(
                f"the arena cannot have its {wanted} bytes on {device}{free}: "
                "give it less, or end what else uses the device"
            ) from error

    @property
    def device(self) -> str:
        return self._device.type

    @property
    def nbytes(self) -> int:
        """Bytes of all allocated slabs, including their room for growth."""
        return self._ranges.taken * self.stored_bytes

    @property
    def capacity_bytes(self) -> int:
        """The upper bound of `nbytes`; the host has None."""
        return self._ranges.total * self.stored_bytes

    @property
    def code_places(self) -> tuple[int, int] | None:
        """(address of the pool's first row, address of its code); None without codes."""
        return (self._address, self._codes.data_ptr()) if self._code_bytes else None

    # -- slabs

    def resize(self, slab: Range | None, rows: int, length: int) -> Range:
        """A slab for `rows` rows in place of `slab`, whose first `length` rows move into it at `settle`.

        MemoryError: there is no room, and nothing changed.
        """
        size = class_rows(rows)
        if slab is not None and self._ranges.stretch(slab, size):
            return slab
        new = self._ranges.take(size)
        if new is None:
            raise MemoryError(
                f"the arena on {self._device} has room for {self._ranges.free} of {self._ranges.total} rows, "
                f"{self._ranges.largest_free} of them together, and a segment needs {size}"
            )
        if slab is not None:
            self._outgrown.append((slab, new.start, length))
        return new

    def settle(self) -> bool:
        """Move the rows of all slabs that `resize` replaced, in a few launches. Returns whether any was.

        If it fails, the next one goes on with what has not moved.
        """
        if not self._outgrown:
            return False
        slabs, starts, counts = zip(*self._outgrown, strict=True)
        lengths, before = np.array(counts), np.array([slab.start for slab in slabs])
        sources = np.arange(lengths.sum()) + np.repeat(before - np.cumsum(lengths) + lengths, lengths)
        targets = sources + np.repeat(np.array(starts) - before, lengths)
        held = self._mirror[sources] != 0  # without flags are redacted rows and those that have moved: zeros
        self._carry(sources[held], targets[held], clear=True)
        self._outgrown = []
        for slab in slabs:
            self._ranges.give(slab)
        return True

    def spare(self, slab: Range, rows: int) -> int:
        """The bytes that resizing a slab to `rows` rows would free."""
        return (slab.rows - class_rows(rows)) * self.stored_bytes

    def give(self, slab: Range) -> None:
        """Zero a slab and free it."""
        self.settle()  # rows of a failed move may still be due in it
        self._clear(slab.start, slab.end)
        self._ranges.give(slab)

    def pack(self, rows: int) -> bool:
        """Settle, and compact the slabs if that makes room for `rows` rows. Returns whether any changed."""
        settled = self.settle()
        size = class_rows(rows) if rows else 0
        free, together = self._ranges.free, self._ranges.largest_free
        if free < size or free == together or 0 < size <= together:
            return settled
        first, sources = self._ranges.pack()
        end = first + len(sources)
        # In ascending order no row is overwritten before it has moved: sources[i] >= first + i.
        self._carry(sources, np.arange(first, end))
        self._clear(end, self._ranges.total)
        return True

    def place(self, slab: Range) -> tuple[int, int, int]:
        """(address of its first row, address of its first flag, its capacity in rows)."""
        address = self._address + slab.start * self.row_bytes
        return address, self._flags_address + slab.start, slab.rows

    def _carry(self, sources: Int64s, targets: Int64s, clear: bool = False) -> None:
        """Copy row sources[i], its code and its flag to row targets[i], in order, a part at a time.

        `clear`: zero the sources, which are no targets.
        """
        for start in range(0, len(sources), self._at_a_time):
            part = slice(start, start + self._at_a_time)
            flags = self._mirror[sources[part]]
            # what can fail comes before what changes anything
            before, after, held = [self._upload(each) for each in (sources[part], targets[part], flags)]
            for pool in self._pools:
                passing = self._bounce[: len(before) * pool.shape[1]].view(len(before), -1)
                pool.index_copy_(0, after, torch.index_select(pool, 0, before, out=passing))
            self._flags.index_copy_(0, after, held)
            self._mirror[targets[part]] = flags
            if clear:
                for pool in (*self._pools, self._flags):
                    pool.index_fill_(0, before, 0)
                self._mirror[sources[part]] = 0
        self._bounce.zero_()

    def _clear(self, start: int, end: int) -> None:
        for pool in (*self._pools, self._flags):
            pool[start:end].zero_()
        self._mirror[start:end] = 0

    # -- rows and flags

    def accept(self, vectors: Vectors) -> torch.Tensor:
        """The checked vectors in the form that `write` takes. ValueError."""
        # Each is checked where it lies, so that an array needs no synchronisation.
        if not isinstance(vectors, torch.Tensor):
            return self._upload(check_array(vectors, self.dim))
        if vectors.device.type != self._device.type:
            raise ValueError(f"vectors are on {vectors.device}, and the arena is on {self._device}")
        check_tensor(vectors, self.dim)
        return vectors

    def write(self, addresses: Int64s, held: torch.Tensor) -> None:
        """Write vector i to the row at addresses[i]; the addresses are distinct."""
        rows = self._rows_at(addresses)
        # coding takes memory, so it may fail: before anything changes
        codes = codes_of(held) if self._code_bytes else None
        self._values.index_copy_(0, rows, held)
        if codes is not None:
            self._codes.index_copy_(0, rows, codes)

    def wipe(self, addresses: Int64s) -> None:
        rows = self._rows_at(addresses)
        for pool in self._pools:
            pool.index_fill_(0, rows, 0)

    def take(self, addresses: Int64s) -> CheckedRows:
        """The rows as float16 [n, dim] for kernels: a tensor, on the host NumPy."""
        return self._values.index_select(0, self._rows_at(addresses)).as_subclass(CheckedRows)

    def read(self, addresses: Int64s) -> Float16s:
        vectors: Float16s = self.take(addresses).cpu().numpy()
        return vectors

    def change_flags(self, addresses: Int64s, keep: int, add: int) -> None:
        """flag = flag & keep | add, for the flag at each address."""
        rows = addresses - self._flags_address
        changed = self._mirror[rows] & keep | add
        self._mirror[rows] = changed
        # A repeated row gets the same flag twice.
        self._flags.index_copy_(0, self._upload(rows), self._upload(changed))

    def read_flags(self, addresses: Int64s) -> Uint8s:
        flags: Uint8s = self._mirror[addresses - self._flags_address]
        return flags

    def vectors(self, slab: Range | None, length: int) -> torch.Tensor:
        start = 0 if slab is None else slab.start
        return self._values[start : start + length]

    def flags(self, slab: Range | None, length: int) -> Uint8s:
        start = 0 if slab is None else slab.start
        view = self._mirror[start : start + length]
        view.flags.writeable = False
        return view

    def held_flags(self, slab: Range | None, length: int) -> torch.Tensor:
        start = 0 if slab is None else slab.start
        return self._flags[start : start + length]

    def _rows_at(self, addresses: Int64s) -> torch.Tensor:
        return self._upload((addresses - self._address) // self.row_bytes)

    def _upload(self, values: NDArray[Any]) -> torch.Tensor:
        # From pageable memory this returns once the values are staged, so they may be freed at once.
        return to_tensor(values).to(self._device, non_blocking=True)


def share_pool() -> None:
    """Let CuPy allocate through torch's caching allocator, so that the process has a single memory pool.

    A block belongs to CuPy's stream at its allocation and must be used on that one only. ImportError without
    CuPy.
    """
    cuda = importlib.import_module("cupy").cuda

    def allocate(nbytes: int, device: int) -> int:
        return int(torch.cuda.caching_allocator_alloc(nbytes, device, cuda.get_current_stream().ptr))

    def free(address: int, device: int) -> None:
        torch.cuda.caching_allocator_delete(address)  # type: ignore[no-untyped-call]

    cuda.set_allocator(cuda.PythonFunctionAllocator(allocate, free).malloc)
