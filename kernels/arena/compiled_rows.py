"""Compiled access to slab rows by address: numba options, views, copies, checks, flags.

numba has no fp16 on CPUs. Rows are arrays of uint16 here, the bits of fp16 values, and `to_float` turns one
into fp32: by the CPU's own instruction (F16C on x86), which LLVM also uses for whole vectors, or by integer
arithmetic where the CPU has none. Both are exact. numba compiles on first use and caches on disk: beside the
source, or in the user's cache folder if that is read-only; NUMBA_CACHE_DIR overrides both. All functions
release the GIL.
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

from undertow.kernels.arena.vector_checks import Vectors, check_form, refusal
from undertow.kernels.array_types import Bytes, Float16s, Halves, Int64s
from undertow.kernels.error_bounds import MAX_NORM

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


def _to_float(typingctx: Any, half: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        # what numba's cache on disk is keyed by, too
        triple, _, features = context.codegen().magic_tuple()
        if "+f16c" in features.split(",") or triple.startswith(("aarch64", "arm64")):
            return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())
        return _to_float_by_integers(builder, arguments[0])

    return types.float32(types.uint16), codegen


def _to_float_by_integers(builder: Any, half: Any) -> Any:
    """The fp32 value of a finite fp16; LLVM would call a function that may be missing.

    Infinity and NaN become numbers of at least 2**16 in magnitude.
    """
    word, single = ir.IntType(32), ir.FloatType()
    wide = builder.zext(half, word)
    bits = builder.shl(builder.and_(wide, word(0x7FFF)), word(13))
    # the exponent's bias is 15 in fp16 and 127 in fp32
    normal = builder.bitcast(builder.add(bits, word(112 << 23)), single)
    # A subnormal fp16 is read as the fraction of 2**-14 * (1 + fraction), so that no fp32 is subnormal.
    above = builder.bitcast(builder.add(bits, word(113 << 23)), single)
    subnormal = builder.fsub(above, single(2.0**-14))
    is_normal = builder.icmp_unsigned(">=", bits, word(0x0400 << 13))
    magnitude = builder.bitcast(builder.select(is_normal, normal, subnormal), word)
    sign = builder.shl(builder.and_(wide, word(0x8000)), word(16))
    return builder.bitcast(builder.or_(magnitude, sign), single)


to_float: Any = intrinsic(_to_float)


@jit
def halves_at(address: int, shape: tuple[int, ...]) -> Halves:
    """An array over the fp16 values at an address. Unchecked; valid while the memory is allocated."""
    return carray(_pointer(address), shape, np.uint16)


@jit
def words_at(address: int, count: int) -> NDArray[np.uint64]:
    return carray(_pointer(address), (count,), np.uint64)


@jit
def bytes_at(address: int, count: int) -> Bytes:
    return carray(_pointer(address), (count,), np.uint8)


@jit
def write_rows(addresses: Int64s, source: int, dim: int) -> None:
    """Copy row i of the fp16 array [n, dim] at `source` to the row that starts at addresses[i]."""
    rows = halves_at(source, (addresses.shape[0], dim))
    for i in range(addresses.shape[0]):
        halves_at(addresses[i], (dim,))[:] = rows[i]


@jit
def read_rows(addresses: Int64s, target: int, dim: int) -> None:
    """Copy the row that starts at addresses[i] to row i of the fp16 array [n, dim] at `target`."""
    rows = halves_at(target, (addresses.shape[0], dim))
    for i in range(addresses.shape[0]):
        rows[i] = halves_at(addresses[i], (dim,))


@sums
def _square_sum(rows: Halves, r: int) -> np.float32:
    total = np.float32(0.0)
    for c in range(rows.shape[1]):
        value = to_float(rows[r, c])
        total += value * value
    return total


@jit
def _first_unfit(address: int, count: int, dim: int) -> int:
    """The first of `count` rows that is not finite or has a norm above MAX_NORM; -1 for none."""
    rows = halves_at(address, (count, dim))
    for i in range(count):
        if not _square_sum(rows, i) <= MAX_NORM * MAX_NORM:  # NaN fails it, too
            return i
    return -1


def fit_rows(vectors: Vectors, dim: int) -> Float16s:
    """The vectors, NumPy float16 [n, dim], checked as by `widened` and contiguous. ValueError."""
    rows: Float16s = np.ascontiguousarray(check_form(vectors, dim))
    bad = _first_unfit(rows.ctypes.data, len(rows), dim)
    if bad >= 0:
        raise ValueError(refusal(bad, rows[bad]))
    return rows


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
def prefetch_rows(rows: Halves, begin: int, end: int) -> None:
    """Prefetch rows [begin, end) into the cache."""
    row_bytes = rows.shape[1] * rows.itemsize
    for line in range(rows.ctypes.data + begin * row_bytes, rows.ctypes.data + end * row_bytes, CACHE_LINE):
        _prefetch(line)
