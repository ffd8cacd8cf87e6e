"""What an arena asks of the memory that holds its slabs."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from undertow.kernels.arena.vector_checks import Float16s, Vectors

Int64s = NDArray[np.int64]
Slab = TypeVar("Slab")
Held = TypeVar("Held")


class ArenaBackend(Protocol[Slab, Held]):
    """Slabs of rows, and access to rows and flags by address. An address is an int64, of host or device.

    A slab is room for the rows of one segment; every row of it that was never written, and every
    flag, is zero. `Held` is the form in which checked vectors wait to be written.
    """

    dim: int
    row_bytes: int  # from one row to the next

    @property
    def device(self) -> str:
        """Where kernels find the rows: "cpu" or "cuda"."""

    @property
    def nbytes(self) -> int:
        """Bytes of all slabs that are out, their room for growth included."""

    @property
    def capacity_bytes(self) -> int | None:
        """The most that slabs can have in all; None where only the system bounds it."""

    # -- slabs

    def resize(self, slab: Slab | None, rows: int, length: int) -> Slab:
        """Room for `rows` rows, the first `length` rows of `slab` in it; the old slab is given back.

        MemoryError: there is none, and nothing has changed.
        """

    def spare(self, slab: Slab, rows: int) -> int:
        """Bytes that resizing a slab to `rows` rows would free."""

    def give(self, slab: Slab) -> None:
        """Zero a slab and take it back."""

    def pack(self, rows: int) -> bool:
        """Move slabs together where that makes room for `rows` more rows; whether any was moved."""

    def place(self, slab: Slab) -> tuple[int, int, int]:
        """(address of its first row, address of its first flag, how many rows it holds)."""

    # -- rows and flags

    def accept(self, vectors: Vectors) -> Held:
        """The vectors, checked, in the form that `write` takes. ValueError."""

    def write(self, addresses: Int64s, held: Held) -> None:
        """Write vector i to the row at addresses[i]; the addresses are distinct."""

    def wipe(self, addresses: Int64s) -> None:
        """Zero the rows at these addresses."""

    def take(self, addresses: Int64s) -> Vectors:
        """The rows as float16 [n, dim]: NumPy on the host, a tensor on a device."""

    def read(self, addresses: Int64s) -> Float16s:
        """The rows as float16 [n, dim] on the host."""

    def change_flags(self, addresses: Int64s, keep: int, add: int) -> None:
        """flag = flag & keep | add, for the flag at each address."""

    def read_flags(self, addresses: Int64s) -> NDArray[np.uint8]:
        """The flags at these addresses, on the host."""

    def vectors(self, slab: Slab | None, length: int) -> Any:
        """A view of the first `length` rows."""

    def flags(self, slab: Slab | None, length: int) -> NDArray[np.uint8]:
        """A view of the first `length` flags, on the host."""

    def held_flags(self, slab: Slab | None, length: int) -> Any:
        """A view of the first `length` flags where kernels read them: NumPy, or a tensor on a device."""
