"""What the long runs share: how long, where their figures go, and whether a process's memory grows.

SOAK_SECONDS: of each run, 600 unless said. SOAK_OUT: a file for the figures. proofs.py sets both.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

DEFAULT_S = 600.0
MIB = 2**20


def soak_s() -> float:
    return float(os.environ.get("SOAK_SECONDS", DEFAULT_S))


def soak_round() -> int:
    """Which unit of a proof this is (proofs.py): tests that draw at random draw otherwise in each."""
    return int(os.environ.get("SOAK_ROUND", "0"))


def report(**figures: Any) -> None:
    """Tell the figures of a unit: one more JSON line in SOAK_OUT, without it on stdout (see pytest -s)."""
    with Path(os.environ.get("SOAK_OUT", "/dev/stdout")).open("a") as file:
        file.write(json.dumps(figures) + "\n")


def private_bytes(process: psutil.Process) -> int:
    """Resident memory without pages that are shared: those of files, and of Ray's object store."""
    memory = process.memory_info()
    return int(memory.rss - memory.shared)


def theil_sen(times: Sequence[float], values: Sequence[float]) -> float:
    """The median of the slopes between all pairs of samples: a few peaks, as of a compaction, do not count.

    Theil (1950), Sen (1968). NaN for fewer than two samples.
    """
    t, v = np.asarray(times, np.float64), np.asarray(values, np.float64)
    first, second = np.triu_indices(len(t), k=1)
    if not len(first):
        return float("nan")
    return float(np.median((v[second] - v[first]) / (t[second] - t[first])))


@dataclass
class Memory:
    """Samples of one process: seconds since the start, resident bytes, and those that are its own."""

    process: psutil.Process
    at_s: list[float] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)
    private: list[int] = field(default_factory=list)

    def sample(self, now_s: float) -> None:
        self.at_s.append(now_s)
        self.rss.append(int(self.process.memory_info().rss))
        self.private.append(private_bytes(self.process))

    def slope_mib_per_min(self, since_s: float) -> float:
        """Growth of the private memory from then on."""
        late = [n for n, at_s in enumerate(self.at_s) if at_s >= since_s]
        return 60 / MIB * theil_sen([self.at_s[n] for n in late], [self.private[n] for n in late])

    def figures(self, since_s: float) -> dict[str, Any]:
        """Every tenth of the run by its median, in MiB, and the slope after the warm-up."""
        parts = np.array_split(np.array(self.private), min(10, len(self.private)))
        return {
            "slope_mib_per_min": round(self.slope_mib_per_min(since_s), 3),
            "private_mib_by_tenth": [round(float(np.median(part)) / MIB, 1) for part in parts],
            "rss_mib_max": round(max(self.rss) / MIB, 1),
            "rss_mib_last": round(self.rss[-1] / MIB, 1),
        }
