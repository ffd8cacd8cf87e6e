"""The card under test: timing on it, and the two limits that everything is held against.

The same code runs on the CPU, so that the tests rehearse every part in small; only `undertow bench gpu`
reports, and only on a CUDA device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from undertow.bench.gpu.figures import NotMeasured
from undertow.kernels.device import why_no_cuda


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything; the defaults are the sizes that the goals name."""

    tenants: int = 10_000
    rows: int = 1_000
    episodes: int = 5
    dim: int = 384
    largest: int = 50_000
    queries: tuple[int, ...] = (1, 4, 16)
    repeats: int = 50
    loop_tenants: int = 500
    topk_batch: int = 256
    topk_batches: int = 300
    ivf_rows: int = 1_000_000
    encode_texts: int = 131_072
    ingest_exchanges: int = 393_216
    ingest_batch: int = 65_536  # the largest step that the settings allow: the tenants alternate
    copy_bytes: int = 4 << 30
    matmul_side: int = 8_192


FULL = Scale()
QUICK = Scale(repeats=10, loop_tenants=100, topk_batches=200, encode_texts=16_384, ingest_exchanges=131_072)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the card does at best, measured in the same run."""

    copy_bytes_per_s: float  # bytes read and bytes written both count
    matmul_flop_per_s: float  # bf16


class Rig:
    """A device to measure on. Every timing is a list of seconds, one a repeat, after warm-up."""

    def __init__(self, kind: Literal["cuda", "cpu"] = "cuda") -> None:
        """NotMeasured without a CUDA device; "cpu" is for rehearsals."""
        if kind == "cuda" and (reason := why_no_cuda()):
            raise NotMeasured(reason)
        self.kind = kind
        self.device = torch.device(kind)
        self.cuda = kind == "cuda"

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def wall_s(self, work: Callable[[], object], repeats: int, warmup: int = 3) -> list[float]:
        """Whole calls, host included, the device idle before and after each."""
        for _ in range(warmup):
            work()
        times = []
        for _ in range(repeats):
            self.sync()
            began_s = time.perf_counter()
            work()
            self.sync()
            times.append(time.perf_counter() - began_s)
        return times

    def device_s(self, work: Callable[[], object], repeats: int, warmup: int = 3) -> list[float]:
        """Between two CUDA events round each call: for work that only launches and never waits."""
        if not self.cuda:
            return self.wall_s(work, repeats, warmup)
        for _ in range(warmup):
            work()
        mark = partial(torch.cuda.Event, enable_timing=True)
        marks = [(mark(), mark()) for _ in range(repeats)]
        self.sync()
        for began, ended in marks:
            began.record()
            work()
            ended.record()
        self.sync()
        return [began.elapsed_time(ended) / 1e3 for began, ended in marks]


def measure_limits(rig: Rig, scale: Scale) -> Limits:
    """A device-to-device copy of a large buffer, and a bf16 product of large matrices of random data."""
    source = torch.empty(scale.copy_bytes, dtype=torch.uint8, device=rig.device).random_(0, 256)
    target = torch.empty_like(source)
    copy_s = statistics.median(rig.device_s(lambda: target.copy_(source), 20))
    side = scale.matmul_side
    a, b = (torch.randn(side, side, device=rig.device).to(torch.bfloat16) for _ in range(2))
    matmul_s = statistics.median(rig.device_s(lambda: a @ b, 20))
    return Limits(2 * scale.copy_bytes / copy_s, 2 * side**3 / matmul_s)
