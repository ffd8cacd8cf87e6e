"""What a benchmark ran on: goes into each JSON line."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from undertow.engine.encoders.model_files import BF16_UNITS

ROOT = Path(__file__).resolve().parents[1]
LOCOMO = ROOT.parent / "shared" / "data" / "locomo_dev.json"
"""Where benchmarks look for conversations unless told otherwise; the data is not ours to ship."""

GPU_PACKAGES = (
    *("numpy", "torch", "triton", "cupy-cuda12x", "cupy-cuda13x", "faiss-cpu", "faiss-gpu"),
    *("faiss-gpu-cuvs", "nanotoken", "transformers", "sentence-transformers", "pylance"),
)
# what nvidia-smi calls them, and the names here
_CARD_FIELDS = {
    "name": "name",
    "driver_version": "driver",
    "memory.total": "memory_mib",
    "clocks.sm": "sm_clock_mhz",
    "clocks.max.sm": "sm_clock_max_mhz",
    "clocks.mem": "memory_clock_mhz",
    "power.draw": "power_w",
    "power.limit": "power_limit_w",
    "temperature.gpu": "temperature_c",
    "clocks_event_reasons.active": "clock_limits",
}


def describe() -> dict[str, object]:
    """CPU name, usable cores, memory, Python."""
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    flags = set(Path("/proc/cpuinfo").read_text().split())
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        **{unit: unit in flags for unit in BF16_UNITS},
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """The versions of the packages that decide how fast a card is used; those not installed are absent."""
    found = {}
    for name in GPU_PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit(root: Path = ROOT) -> str | None:
    """The commit of a checkout, with a + where files but results differ; None outside a checkout."""
    if shutil.which("git") is None or not (root / ".git").exists():
        return None
    ask = ["git", "-C", str(root)]
    head = subprocess.run([*ask, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    if head.returncode:
        return None
    status = ("status", "--porcelain", "--untracked-files=no", ":!docs/results")
    changed = subprocess.run([*ask, *status], capture_output=True, text=True)
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def card_now() -> dict[str, str]:
    """What nvidia-smi says of the first card: name, driver, clocks, power. Empty where it is missing."""
    if shutil.which("nvidia-smi") is None:
        return {}
    found = {}
    for field, name in _CARD_FIELDS.items():  # one by one: an unknown field fails the whole query
        asked = subprocess.run(
            ["nvidia-smi", "--id=0", f"--query-gpu={field}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
        )
        if asked.returncode == 0:
            found[name] = asked.stdout.strip()
    return found


def peak_rss_bytes() -> int:
    """The most resident memory this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
