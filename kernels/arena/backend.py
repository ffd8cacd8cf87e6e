"""The protocol of the memory that holds an arena's slabs."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from undertow.kernels.arena.vector_checks import Float16s, Vectors

Int64s = NDArray[np.int64]
Slab = TypeVar("Slab")
Held = TypeVar("Held")


class ArenaBackend(Protocol[Slab, Held]):
    """Slabs of rows, and access to rows and flags by address: an int64, of the host or the device.

    A slab has room for the rows of one segment. Rows and flags that were never written are zero. `Held` is
    the form of checked vectors before they are written.
    """

    dim: int
    row_bytes: int  # from one row to the next

    @property
    def device(self) -> str:
        """The device of the rows: "cpu" or "cuda"."""

    @property
    def nbytes(self) -> int:
        """Bytes of all allocated slabs, including their room for growth."""

    @property
    def capacity_bytes(self) -> int | None:
        """The upper bound of `nbytes`; None if only the system bounds it."""

    # -- slabs

    def resize(self, slab: Slab | None, rows: int, length: int) -> Slab:
        """A slab for `rows` rows with the first `length` rows of `slab`, which is freed.

        MemoryError: there is no room, and nothing changed.
        """

    def spare(self, slab: Slab, rows: int) -> int:
        """The bytes that resizing a slab to `rows` rows would free."""

    def give(self, slab: Slab) -> None:
        """Zero a slab and free it."""

    def pack(self, rows: int) -> bool:
        """Compact the slabs if that makes room for `rows` more rows. Returns whether any was moved."""

    def place(self, slab: Slab) -> tuple[int, int, int]:
        """(address of its first row, address of its first flag, its capacity in rows)."""

    # -- rows and flags

    def accept(self, vectors: Vectors) -> Held:
        """The checked vectors in the form that `write` takes. ValueError."""

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
        """A view of the first `length` flags for kernels: NumPy, or a tensor on a device."""
