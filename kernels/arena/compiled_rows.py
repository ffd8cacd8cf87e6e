"""Compiled access to slab rows by address: numba options, views, copies, flags.

numba compiles on first use and caches on disk: beside the source, or in the user's cache folder if that is
read-only; NUMBA_CACHE_DIR overrides both. All functions release the GIL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]
Bytes = NDArray[np.uint8]
F = TypeVar("F", bound=Callable[..., Any])

CACHE_LINE = 64


def jit(function: F, **options: Any) -> F:
    """numba's nopython compiler with our options; uncached if no folder is writable."""
    try:
        return cast(F, njit(function, cache=True, nogil=True, error_model="numpy", **options))
    except RuntimeError:  # no folder for the cache
        return cast(F, njit(function, nogil=True, error_model="numpy", **options))


def sums(function: F) -> F:
    """As `jit`; the compiler may reorder sums, which is harmless in fp64 and bounded by slack in fp32."""
    return jit(function, _nrt=False, fastmath={"reassoc", "contract"})


def lean(function: F) -> F:
    """As `jit`, without reference counting: for functions that neither create nor return arrays.

    Threads share the arrays of a plan, and would contend for the cache lines of their reference counts.
    """
    return jit(function, _nrt=False)


def _pointer_at(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.voidptr(types.int64), codegen


_pointer: Any = intrinsic(_pointer_at)


def _prefetch_at(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
        insert: Any = cgutils.get_or_insert_function
        hint = insert(
            builder.module, ir.FunctionType(ir.VoidType(), [pointer, word, word, word]), "llvm.prefetch.p0"
        )
        # to read, into the second-level cache, data
        builder.call(hint, [builder.inttoptr(arguments[0], pointer), word(0), word(2), word(1)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


_prefetch: Any = intrinsic(_prefetch_at)


@jit
def floats_at(address: int, shape: tuple[int, ...]) -> Float32s:
    """An array over the float32 values at an address. Unchecked; valid while the slab is allocated."""
    return carray(_pointer(address), shape, np.float32)


@jit
def words_at(address: int, count: int) -> NDArray[np.uint64]:
    return carray(_pointer(address), (count,), np.uint64)


@jit
def bytes_at(address: int, count: int) -> Bytes:
    return carray(_pointer(address), (count,), np.uint8)


@jit
def write_rows(addresses: Int64s, vectors: Float32s) -> None:
    """Copy vectors[i] to the row that starts at addresses[i]."""
    dim = vectors.shape[1]
    for i in range(addresses.shape[0]):
        row = floats_at(addresses[i], (dim,))
        for c in range(dim):
            row[c] = vectors[i, c]


@jit
def read_rows(addresses: Int64s, vectors: Float32s) -> None:
    """Copy the row that starts at addresses[i] to vectors[i]."""
    dim = vectors.shape[1]
    for i in range(addresses.shape[0]):
        row = floats_at(addresses[i], (dim,))
        for c in range(dim):
            vectors[i, c] = row[c]


@jit
def change_flags(addresses: Int64s, keep: int, add: int) -> None:
    """flag = flag & keep | add, for the flag byte at each address."""
    for address in addresses:
        flag = bytes_at(address, 1)
        flag[0] = (flag[0] & keep) | add


@jit
def read_flags(addresses: Int64s, flags: Bytes) -> None:
    for i in range(addresses.shape[0]):
        flags[i] = bytes_at(addresses[i], 1)[0]


@lean
def prefetch_rows(rows: Float32s, begin: int, end: int) -> None:
    """Prefetch rows [begin, end) into the cache."""
    row_bytes = rows.shape[1] * rows.itemsize
    for line in range(rows.ctypes.data + begin * row_bytes, rows.ctypes.data + end * row_bytes, CACHE_LINE):
        _prefetch(line)
