"""gate.cu compiled for the host, as `Kernels` for CudaGate: its own host code, no card (see simt.h)."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from undertow.kernels.arena.row_codes import code_bytes
from undertow.kernels.gate.cuda_gate import BLOCK_THREADS, WARP, Rings, options_of, source

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
PROT_NONE = 0  # of mprotect(2)
KERNELS = ("scan", "tally", "merge")
# _FORTIFY_SOURCE's check of longjmp knows one stack only
COMPILE = (
    *(str(COMPILER), "-std=c++17", "-O1", "-fPIC", "-Wall", "-Werror", "-Wno-unknown-pragmas"),
    "-U_FORTIFY_SOURCE",
)
_HEADERS = tempfile.TemporaryDirectory()


class ShimError(Exception):
    """What no device would forgive: lanes in different collectives, a read out of bounds."""


@cache
def simt() -> Path:
    """A header that stands for simt.h, precompiled: half of a build is what it includes."""
    header = Path(_HEADERS.name) / "precompiled.h"
    header.write_text(f'#include "{HERE / "simt.h"}"\n')
    compiled(*COMPILE, str(header), "-o", f"{header}.gch")
    return header


def compiled(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise ShimError(done.stderr[-4000:])


def build(
    folder: Path, dim: int, edited: str | None = None, rings: Rings | None = None, coded: bool = False
) -> ctypes.CDLL:
    """Compile gate.cu (or the text given in its place) for the host; with rings as for sm_90."""
    number = next(n for n in itertools.count() if not (folder / f"{n}.so").exists())
    target, text = folder / f"{number}.so", folder / f"{number}.cu"
    text.write_text(source() if edited is None else edited)
    options = ("-shared", *options_of(dim, rings, coded), f'-DSOURCE="{text}"')
    compiled(*COMPILE, *options, "-include", str(simt()), str(HERE / "host.cpp"), "-o", str(target))
    library = ctypes.CDLL(str(target))
    library.launch.restype = library.tensor_scores.restype = ctypes.c_char_p
    return library


class ShimKernels:
    """cut_block: how many products an mma adds at a time, cutting bits off; 0 for plain fp32 sums.

    seed: of the order in which a block's warps go on. rings: as the library was built with.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        dim: int,
        cut_block: int = 0,
        descending: bool = False,
        seed: int = 0,
        rings: Rings | None = None,
    ) -> None:
        self.warps = 8
        self._in_block = {"scan": rings.warps} if rings else {}
        self._library, self._row_bytes, self._code_bytes = library, -(-dim // 8) * 16, code_bytes(dim)
        self._cut_block, self._descending, self._seed = cut_block, descending, seed

    def launch(self, kernel: str, warps: int, *structs: NDArray[Any]) -> None:
        in_block = self._in_block.get(kernel, BLOCK_THREADS // WARP)
        addresses = (ctypes.c_void_p * len(structs))(*(struct.ctypes.data for struct in structs))
        ranges = self._readable(structs[0])
        error = self._library.launch(
            KERNELS.index(kernel),
            -(-warps // in_block),
            in_block * WARP,
            addresses,
            self._cut_block,
            ctypes.c_bool(self._descending),
            self._seed,
            ranges.ctypes.data_as(ctypes.c_void_p),
            len(ranges),
        )
        if error:
            raise ShimError(f"{kernel}: {error.decode()}")

    def _readable(self, plan: NDArray[Any]) -> NDArray[np.int64]:
        """[n, 2]: the rows that the plan's groups ask for, and the queries; with codes, those too."""
        groups, probes = int(plan["groups"]), int(plan["probes"])
        begin = _int64s(int(plan["vectors"]), groups)
        end = begin + _int64s(int(plan["rows"]), groups) * self._row_bytes
        asked = int(_int64s(int(plan["query"]), probes).max() + 1)
        ranges = np.stack((begin, end), 1)
        given = [[int(plan["queries"]), int(plan["queries"]) + asked * self._row_bytes]]
        if int(plan["code"]):
            codes = int(plan["code"]) + (ranges - int(plan["row"])) // self._row_bytes * self._code_bytes
            given.append([int(plan["codes"]), int(plan["codes"]) + asked * self._code_bytes])
            ranges = np.concatenate((ranges, codes))
        ranges = np.concatenate((ranges, given))
        ranges = ranges[ranges[:, 0] < ranges[:, 1]]
        return np.ascontiguousarray(ranges[np.argsort(ranges[:, 0])])


def guarded(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory [size] that ends where none may be touched, full of ones: safe as indexes, wrong as results."""
    nbytes = size * dtype.itemsize
    inside = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, inside + mmap.PAGESIZE)
    end = ctypes.addressof(ctypes.c_char.from_buffer(pages)) + inside
    if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(end), mmap.PAGESIZE, PROT_NONE):
        raise OSError(ctypes.get_errno(), "mprotect")
    return torch.frombuffer(pages, dtype=dtype, count=size, offset=inside - nbytes).fill_(1)


def _int64s(address: int, count: int) -> NDArray[np.int64]:
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_int64)), (count,))
