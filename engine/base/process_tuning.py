"""Tuning of Undertow's own long-running processes: a shard, the program, the service.

A process that merely imports the engine is not changed.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from pathlib import Path

# All threads allocate from one heap (glibc's mallopt(3)). By default a thread that finds the heap busy gets
# another one, up to eight a core, and memory freed in one heap is unavailable to the others: Lance compacts
# in many threads (docs/decisions/0028 has measurements). Existing heaps stay.
ONE_HEAP = {"MALLOC_ARENA_MAX": "1"}
_M_ARENA_MAX = -8

# Allocations between garbage collections, and how many of each generation make one of the next. With the
# defaults the collector takes a quarter of a shard's time, traversing tenants that are all alive. A young
# generation of 50,000 objects would hold the event loop for up to 80 ms.
_GC_THRESHOLDS = (5_000, 20, 100)

# A thread that does not release the lock of the interpreter delays an event loop by so much, not by 5 ms.
SWITCH_S = 0.0005


def settle_in() -> None:
    """Call this once, after all imports."""
    with suppress(OSError, AttributeError):  # no C library, or not glibc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    sys.setswitchinterval(SWITCH_S)


def open_files(wanted: int) -> int:
    """How many files this process may have open, after raising its limit towards `wanted`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else soft


def usable_memory(groups: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> int:
    """The bytes of main memory that this process may use: the machine's, or a container's limit below it.

    `groups`: the file that names the control groups of this process; `mounted`: where they are.
    """
    import psutil  # this module is loaded before all others of a shard

    limits = [int(psutil.virtual_memory().total)]
    with suppress(OSError):  # no control groups here
        for line in groups.read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds and "memory" not in kinds.split(","):
                continue
            top, name = (mounted / "memory", "memory.limit_in_bytes") if kinds else (mounted, "memory.max")
            own = top / path.strip("/")
            for group in (own, *own.parents):  # each of them is a limit; in a container only `top` is there
                with suppress(OSError, ValueError):  # not there, or "max"
                    limits.append(int((group / name).read_text()))
    return min(limits)


class _NoPandas(MetaPathFinder):
    """Hides pandas from imports in the thread that made it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "pandas" and threading.get_ident() == self._thread:
            raise ModuleNotFoundError("pandas is not to be loaded here", name=name)


@contextmanager
def without_pandas() -> Iterator[None]:
    """Hide pandas from imports inside the block: pyarrow would load it, which takes a second.

    No effect if pyarrow.dataset is loaded already. Later imports find pandas; pyarrow and Lance do without it
    in this process.
    """
    if "pyarrow.dataset" in sys.modules:
        yield
        return
    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        import pyarrow

        pyarrow.array([0])  # with its first array without a type pyarrow looks for pandas, once
        yield
    finally:
        sys.meta_path.remove(finder)
