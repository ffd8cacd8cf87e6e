"""Settings of a process that is Undertow's own, and runs for weeks: a shard, the program, the service.

A process that merely imports the engine is left as it is.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder

# Let all threads allocate from one heap (glibc's mallopt(3)). By default each thread that finds the heap
# busy gets one of its own, up to eight a core, and what is freed in one is of no use to the others: Lance
# compacts in many threads (docs/decisions.md has figures). A heap that exists stays.
ONE_HEAP = {"MALLOC_ARENA_MAX": "1"}
_M_ARENA_MAX = -8

# Allocations between looks for garbage cycles, of which the engine makes next to none. By default it is 700:
# then the collector takes a quarter of a shard's time, walking over tenants that are all alive.
_GC_THRESHOLDS = (50_000, 20, 50)


def settle_in() -> None:
    """Call it once, when all is imported and there is nothing to collect yet."""
    with suppress(OSError, AttributeError):  # no C library to ask, or another than glibc
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


class _NoPandas(MetaPathFinder):
    """For the thread that made it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        if name == "pandas" and threading.get_ident() == self._thread:
            raise ModuleNotFoundError("pandas is not to be loaded here", name=name)


@contextmanager
def without_pandas() -> Iterator[None]:
    """What is loaded here finds no pandas: pyarrow.dataset looks for it, and loading it takes a second.

    Where pyarrow has looked already, nothing is kept from it. Later imports find pandas as ever; pyarrow and
    Lance, which have looked, go without it in this process.
    """
    if "pyarrow.dataset" in sys.modules:
        yield
        return
    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
