"""The settings of Undertow's own processes. Each in a process of its own: heaps that exist stay."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from undertow.engine.base.process_tuning import ONE_HEAP, usable_memory

PROBE = """
import ctypes, gc, sys, threading, xml.etree.ElementTree as tree
from undertow.engine.base.process_tuning import settle_in

if sys.argv[1] == "settled":
    settle_in()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.open_memstream.restype = ctypes.c_void_p
meet = threading.Barrier(8)

def allocate():
    meet.wait()
    libc.malloc(10_000)
    meet.wait()

threads = [threading.Thread(target=allocate) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
text, size = ctypes.c_char_p(), ctypes.c_size_t()
stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
assert libc.malloc_info(0, stream) == 0 and libc.fclose(stream) == 0
looks = sum(generation["collections"] for generation in gc.get_stats())
lists = [[] for _ in range(40_000)]
looks = sum(generation["collections"] for generation in gc.get_stats()) - looks
print(len(tree.fromstring(text.value.decode()).findall("heap")), looks)
"""


def heaps_and_looks(which: str, **environment: str) -> tuple[int, int]:
    """How many heaps eight threads have, and how often 40,000 allocations made Python look for garbage."""
    command = [sys.executable, "-c", PROBE, which]
    env = {**os.environ, **environment}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    heaps, looks = done.stdout.split()
    return int(heaps), int(looks)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has several heaps to bound")
def test_threads_share_one_heap_and_the_collector_rests() -> None:
    heaps, looks = heaps_and_looks("as it is")
    assert heaps > 1 and looks > 10
    heaps, fewer = heaps_and_looks("settled")
    assert heaps == 1 and fewer < looks / 5
    assert heaps_and_looks("as it is", **ONE_HEAP)[0] == 1


def test_a_shard_loads_no_pandas_and_who_wants_it_finds_it() -> None:
    probe = """
import sys
from undertow.engine.cluster.ray.shard_actor import ShardActor
from undertow.engine.base.process_tuning import without_pandas
heavy = {"torch", "lance", "pyarrow", "numpy", "ray"} & sys.modules.keys()
with without_pandas():
    import undertow.engine.cluster.shard.shard
found = "pandas" in sys.modules
import pandas
import pyarrow
print(heavy, found, pandas.Series([1]).sum(), pyarrow.array([1, 2]).to_pylist())
"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "set() False 1 [1, 2]"


@pytest.mark.parametrize(
    ("groups", "limits", "found"),
    [
        ("0::/", {"memory.max": "300"}, 300),  # in a container
        ("0::/a/b", {"memory.max": "max", "a/memory.max": "200", "a/b/memory.max": str(1 << 62)}, 200),
        ("1:cpu:/a\n2:memory,x:/gone", {"memory/memory.limit_in_bytes": "100", "cpu/memory.max": "1"}, 100),
    ],
)
def test_a_container_limits_memory(tmp_path: Path, groups: str, limits: dict[str, str], found: int) -> None:
    assert usable_memory(tmp_path / "groups", tmp_path) == psutil.virtual_memory().total
    for name, text in {"groups": groups, **limits}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert usable_memory(tmp_path / "groups", tmp_path) == found
