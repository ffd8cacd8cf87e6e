"""What a benchmark ran on: goes into each JSON line."""

from __future__ import annotations

import os
import platform
import resource
from pathlib import Path

LOCOMO = Path(__file__).resolve().parents[2] / "shared" / "data" / "locomo_dev.json"
"""Where benchmarks look for conversations unless told otherwise; the data is not ours to ship."""


def describe() -> dict[str, object]:
    """CPU name, usable cores, memory, Python."""
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "amx_bf16": "amx_bf16" in Path("/proc/cpuinfo").read_text(),
        "python": platform.python_version(),
    }


def peak_rss_bytes() -> int:
    """The most resident memory this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
