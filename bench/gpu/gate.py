"""The gate on the card: the bytes of 10 k tenants once, equal and skewed, and a faiss-gpu loop beside it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from undertow.bench.gpu.figures import GATE_SHARE, Figure, Part, WrongResults, spread
from undertow.bench.gpu.load import THETA, World, equal_sizes, zipf_sizes
from undertow.bench.gpu.rig import Limits, Rig, Scale
from undertow.kernels.arena.row_codes import code_bytes
from undertow.kernels.device import load_faiss_gpu
from undertow.kernels.gate.cuda_gate import CudaGate
from undertow.kernels.gate.factory import make_gate
from undertow.kernels.gate.gate import Gate, GateReadings

_CHECKED = 24
# where 5% of the rows count instead of 1%
_LOW_THETA = 0.55
_LOOP_REPEATS = 5


def measure(rig: Rig, scale: Scale, limits: Limits) -> Part:
    """Kernels by CUDA events, and whole calls from NumPy to NumPy by the clock. Medians."""
    part = Part()
    total = scale.tenants * scale.rows
    equal = World(rig, equal_sizes(scale.tenants, total), scale.episodes, scale.dim)
    gate = make_gate(equal.arena)
    least_ms = equal.bytes_read / limits.copy_bytes_per_s * 1e3
    times = {each: _time(rig, equal, gate, each, scale.repeats) for each in scale.queries}
    kernel_ms, call_ms = (times[1][name]["p50_ms"] for name in ("kernels", "call"))
    part.reach("gate_kernel", kernel_ms, least_ms, _hits(times[1]), target=least_ms / GATE_SHARE)
    part.reach("gate_bandwidth", 100 * least_ms / kernel_ms, 100.0)
    what = "the whole call, planning and copies included"
    part.figures.append(Figure("gate_call", what, "ms", call_ms, limit=least_ms))
    for each in scale.queries[1:]:
        what = f"gate kernels, {each} queries a tenant"
        each_ms = times[each]["kernels"]["p50_ms"]
        note = _hits(times[each])
        part.figures.append(Figure(f"gate_kernel_{each}", what, "ms", each_ms, limit=least_ms, note=note))
    often = _time(rig, equal, gate, 1, scale.repeats, _LOW_THETA)
    what, often_ms = "gate kernels, one query a tenant, more rows that count", often["kernels"]["p50_ms"]
    part.figures.append(Figure("gate_kernel_hits", what, "ms", often_ms, limit=least_ms, note=_hits(often)))
    part.details["equal"] = {
        "bytes_read": equal.bytes_read,
        **{str(k): v for k, v in times.items()},
        "low_theta": often,
    }
    _over_loop(part, rig, equal, scale.loop_tenants, call_ms)
    with_codes = isinstance(gate, CudaGate)
    del equal, gate
    if with_codes:
        _with_codes(part, rig, scale, limits)
    sizes = zipf_sizes(scale.tenants, total, scale.largest)
    skewed = World(rig, sizes, scale.episodes, scale.dim)
    found = _time(rig, skewed, make_gate(skewed.arena), 1, scale.repeats)
    part.reach("gate_skew", found["kernels"]["p50_ms"] / kernel_ms, note=_hits(found))
    part.details["skewed"] = {"largest": int(sizes[0]), "smallest": int(sizes[-1]), **found}
    return part


def _with_codes(part: Part, rig: Rig, scale: Scale, limits: Limits) -> None:
    """The same questions to the same rows, int8 codes first."""
    sizes = equal_sizes(scale.tenants, scale.tenants * scale.rows)
    world = World(rig, sizes, scale.episodes, scale.dim, coded=True)
    gate, rows = make_gate(world.arena), world.bytes_read // (world.arena.row_bytes + 1)
    least_ms = rows * (code_bytes(scale.dim) + 1) / limits.copy_bytes_per_s * 1e3
    for each, theta in ((1, _LOW_THETA), *((each, THETA) for each in scale.queries)):
        times = _time(rig, world, gate, each, scale.repeats, theta)
        key = "gate_int8" + ("_hits" if theta == _LOW_THETA else f"_{each}" if each > 1 else "")
        what = f"gate kernels with int8 codes, queries a tenant: {each}"
        value = times["kernels"]["p50_ms"]
        part.figures.append(Figure(key, what, "ms", value, limit=least_ms, note=_hits(times)))
        part.details[key] = times


def _time(
    rig: Rig, world: World, gate: Gate, each: int, repeats: int, theta: float = THETA
) -> dict[str, dict[str, float]]:
    """Spread of the kernels' and the whole call's time for `each` queries a tenant, checked first."""
    asked = world.questions(each, theta)
    found = _check(world, gate, asked)
    return {
        "hits": {"rows": int(found.count.sum()), "share": float(found.count.sum() / asked["visible"].sum())},
        "kernels": spread(rig.device_s(launcher(gate, asked), repeats)),
        "call": spread(rig.wall_s(partial(gate.read, **asked), repeats)),
    }


def launcher(gate: Gate, asked: dict[str, Any]) -> Callable[[], object]:
    """What the device does for a batch that is planned and uploaded; a gate without a device does it all."""
    if isinstance(gate, CudaGate):
        return partial(gate.launch, gate.prepare(**asked))
    return partial(gate.read, **asked)


def _hits(times: dict[str, dict[str, float]]) -> str:
    return f"{times['hits']['share']:.1%} of the rows count"


def _check(world: World, gate: Gate, asked: dict[str, Any]) -> GateReadings:
    """The readings. WrongResults unless a sample, the largest tenant in it, is as NumPy has it in fp64.

    Also where no row counts: then what follows the scores would not be timed.
    """
    count = len(asked["visible"])
    sample = np.unique(np.linspace(0, count - 1, _CHECKED).astype(int)).tolist()
    found = gate.read(**asked)
    if wrong := world.wrong_readings(asked, found, sample):
        raise WrongResults(f"the gate's answers to {len(wrong)} of {len(sample)} questions are not NumPy's")
    if not found.count.any():
        raise WrongResults("no row reaches theta, so nothing but the scores is timed")
    return found


def _over_loop(part: Part, rig: Rig, world: World, tenants: int, call_ms: float) -> None:
    """The ratio to a loop over tenants, measured on some of them and scaled to all."""
    faiss = load_faiss_gpu()
    if faiss is None:
        reason = "FAISS has no GPU part here; docs/gpu.md says how to install faiss-gpu"
        part.reach("gate_over_loop", None, note=f"not measured: {reason}")
        return
    resources, form = faiss.StandardGpuResources(), faiss.GpuIndexFlatConfig()
    resources.setTempMemory(64 << 20)
    form.useFloat16 = True
    loop = world.faiss_loop(lambda: faiss.GpuIndexFlatIP(resources, world.dim, form), tenants)
    seconds = statistics.median(rig.wall_s(loop, _LOOP_REPEATS, warmup=1))
    scaled_ms = seconds * len(world.turns) / tenants * 1e3
    part.reach("gate_over_loop", scaled_ms / call_ms, note=f"{tenants} tenants looped over, scaled to all")
    part.details["faiss_loop"] = {"tenants": tenants, "ms": seconds * 1e3, "scaled_ms": scaled_ms}
