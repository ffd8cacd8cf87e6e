"""Top-k on the card: batches of queries of many tenants, exact; and a large tenant's own IVF index."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from undertow.bench.gpu.figures import Figure, Part, WrongResults, spread
from undertow.bench.gpu.load import World, equal_sizes
from undertow.bench.gpu.rig import Limits, Rig, Scale
from undertow.kernels.device import load_faiss_gpu
from undertow.kernels.gate.factory import make_gate
from undertow.kernels.gate.gate import Gate
from undertow.kernels.topk.ivf import IvfIndex
from undertow.kernels.topk.topk import top_k, top_k_many

T = TypeVar("T")
Batch = tuple[NDArray[np.int64], NDArray[np.float16]]

K = 10
_CHECKED = 16
# batches that both ways of exact search are put to: one call a tenant is the slow one of them
_COMPARED = 20
_ROWS_A_TOPIC = 500
_WARM_UP = 10


def measure(rig: Rig, scale: Scale, limits: Limits) -> Part:
    """Latency of whole calls, results on the host; every batch asks other tenants."""
    part = Part()
    sizes = equal_sizes(scale.tenants, scale.tenants * scale.rows)
    world = World(rig, sizes, 0, scale.dim, spare_rows=scale.ivf_rows)
    gate = make_gate(world.arena)
    batches = _batches(world, scale)
    for segments, queries in batches[:2]:
        _check(world, segments, queries, top_k_many(world.arena, segments, queries, K, gate))
    figures = _times(rig, batches, lambda batch: top_k_many(world.arena, *batch, K, gate))
    read_bytes = scale.topk_batch * scale.rows * (world.arena.row_bytes + 1)
    part.reach("topk_p95", figures["p95_ms"], read_bytes / limits.copy_bytes_per_s * 1e3)
    part.details["mixed"] = {"batch": scale.topk_batch, "k": K, "bytes_read": read_bytes, **figures}
    part.details["mixed_both_ways"] = _both_ways(rig, world, gate, batches[: _COMPARED + _WARM_UP])
    _large_tenant(part, rig, world, gate, scale)
    return part


def _large_tenant(part: Part, rig: Rig, world: World, gate: Gate, scale: Scale) -> None:
    """One query at a time of a tenant with an index of its own, and the same by exact search."""
    segment = world.grow(scale.ivf_rows, max(1, scale.ivf_rows // _ROWS_A_TOPIC))
    began_s = time.perf_counter()
    index = IvfIndex(world.arena, segment, gate)
    trained_s = time.perf_counter() - began_s
    rows = np.random.default_rng(2).integers(0, scale.ivf_rows, scale.topk_batches + _WARM_UP)
    queries = world.arena.vector16(segment << 32 | rows)
    exact = top_k(world.arena, segment, queries[:_CHECKED], K, scan=gate)[1]
    near = index.search(queries[:_CHECKED], K)[1]
    singles = list(queries[:, None])
    times = {
        "ivf": _times(rig, singles, lambda query: index.search(query, K)),
        "exact": _times(rig, singles, lambda query: top_k(world.arena, segment, query, K, scan=gate)),
    }
    one_query = [(np.array([segment]), query) for query in singles[: _COMPARED + _WARM_UP]]
    what = f"a tenant of {scale.ivf_rows:,} turns by its IVF index, one query, p95"
    recall, of_recall = 100 * index.recall(K), f"its recall@{K} against exact search"
    part.figures += [
        Figure("ivf_p95", what, "ms", times["ivf"]["p95_ms"]),
        Figure("exact_p95", "the same, exact", "ms", times["exact"]["p95_ms"]),
        Figure("ivf_recall", of_recall, "%", recall, lower=False, limit=100.0),
    ]
    found = [np.isin(e, n).mean() for e, n in zip(exact, near, strict=True)]
    part.details["large_tenant"] = {
        "rows": scale.ivf_rows,
        "trained_s": trained_s,
        "report": asdict(index.report),
        "recall_of_checked": float(np.mean(found)),
        **times,
        "exact_both_ways": _both_ways(rig, world, gate, one_query),
    }


def _both_ways(rig: Rig, world: World, gate: Gate, batches: list[Batch]) -> dict[str, Any]:
    """The same batches by the gate's scan, and by FAISS or torch, one segment after the other.

    `blocks_by` says which of the two searched by blocks. WrongResults unless both find the same.
    """
    scanned = top_k_many(world.arena, *batches[0], K, gate)
    by_blocks = top_k_many(world.arena, *batches[0], K)
    if not all(np.array_equal(one, two) for one, two in zip(scanned, by_blocks, strict=True)):
        raise WrongResults("exact top-k by blocks differs from the gate's scan")
    return {
        "scan": _times(rig, batches, lambda batch: top_k_many(world.arena, *batch, K, gate)),
        "blocks": _times(rig, batches, lambda batch: top_k_many(world.arena, *batch, K)),
        "blocks_by": "faiss" if rig.cuda and load_faiss_gpu() else "torch",
    }


def _times(rig: Rig, items: Sequence[T], search: Callable[[T], object]) -> dict[str, float]:
    """Spread of the time of each search by itself, the first ones as warm-up."""
    ahead, warmup = iter(items), min(_WARM_UP, len(items) - 1)
    return spread(rig.wall_s(lambda: search(next(ahead)), len(items) - warmup, warmup=warmup))


def _batches(world: World, scale: Scale) -> list[Batch]:
    """(segments int64 [q], queries float16 [q, dim]): a stored turn of each of q tenants, drawn anew."""
    rng = np.random.default_rng(1)
    drawn = []
    for _ in range(scale.topk_batches + _WARM_UP):
        tenants = rng.choice(len(world.sizes), min(scale.topk_batch, len(world.sizes)), replace=False)
        rows = rng.integers(0, world.sizes[tenants])
        drawn.append((world.turns[tenants], world.arena.vector16(world.turns[tenants] << 32 | rows)))
    return drawn


def _check(world: World, segments: Any, queries: Any, found: tuple[Any, Any]) -> None:
    """WrongResults unless a sample is what NumPy finds in fp64, bit for bit."""
    scores, rows = found
    for i in np.linspace(0, len(segments) - 1, _CHECKED).astype(int):
        exact = world.rows64(int(segments[i])) @ queries[i].astype(np.float64)
        best = np.lexsort((np.arange(len(exact)), -exact))[:K]
        if not (np.array_equal(rows[i], best) and np.array_equal(scores[i], exact[best])):
            raise WrongResults(f"top-k of query {i} of a batch differs from NumPy's in fp64")
