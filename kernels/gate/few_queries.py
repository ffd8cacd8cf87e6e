"""The CPU's gate for few queries over few rows: one compiled call, without a plan and without threads."""

from __future__ import annotations

import numpy as np

from undertow.kernels.arena.arena import PRESENT
from undertow.kernels.arena.compiled_rows import bytes_at, halves_at, jit, lean
from undertow.kernels.array_types import Bytes, Float32s, Float64s, Halves, Int64s
from undertow.kernels.error_bounds import error_slack
from undertow.kernels.gate.gate import GateReadings, Probes
from undertow.kernels.gate.plan import starts_of
from undertow.kernels.gate.scan import (
    TILE,
    dot64,
    offer,
    sort_heap,
    stream32,
    widen_row,
)

# More rows take longer by one thread than a plan and a hand-over to several.
FEW_QUERIES, FEW_ROWS = 64, 16_384


def are_few(probes: Probes) -> bool:
    """Whether `read_few` is the quicker way."""
    if probes.turn_flags is not None or len(probes) > FEW_QUERIES:
        return False
    return int(probes.visible.sum() + probes.places.episode_rows.sum()) <= FEW_ROWS


def read_few(dim: int, probes: Probes) -> GateReadings:
    """The readings of a host arena, as any other gate has them."""
    count, at = len(probes), probes.places
    starts = starts_of(probes.k)
    rows, scores = np.empty(starts[-1], np.int64), np.empty(starts[-1])
    found = GateReadings(
        np.full(count, -1, np.int64),
        np.full(count, -np.inf),
        np.zeros(count, np.int64),
        np.zeros(count + 1, np.int64),
        rows,
        scores,
    )
    _read(
        probes.queries.ctypes.data,
        probes.queries.shape,
        (at.turns, at.turn_flags, probes.visible),
        (at.episodes, at.episode_flags, at.episode_rows),
        probes.turn_flag,
        probes.theta,
        starts,
        error_slack(dim),
        (found.nearest_row, found.nearest_score, found.count, found.offsets, rows, scores),
    )
    listed = found.offsets[-1]
    return GateReadings(
        found.nearest_row, found.nearest_score, found.count, found.offsets, rows[:listed], scores[:listed]
    )


Rows = tuple[Int64s, Int64s, Int64s]
"""Of each query: the address of a segment's rows, that of their flags, and how many rows are read."""


@jit
def _read(
    queries: int,
    shape: tuple[int, int],
    turns: Rows,
    episodes: Rows,
    flag: int,
    theta: Float64s,
    starts: Int64s,
    slack: float,
    found: tuple[Int64s, Float64s, Int64s, Int64s, Int64s, Float64s],
) -> None:
    """Write the fields of GateReadings, the lists without gaps between them."""
    nearest_row, nearest_score, counts, offsets, rows, scores = found
    asked = halves_at(queries, shape)
    query, fast = np.empty(shape[1], np.float32), np.empty(TILE, np.float32)
    picked, sizes = np.empty(TILE, np.int64), np.zeros(1, np.int64)
    for i in range(shape[0]):
        widen_row(asked, i, query)
        limit, length = turns[2][i], episodes[2][i]
        some, flags = halves_at(turns[0][i], (limit, shape[1])), bytes_at(turns[1][i], limit)
        base, room = offsets[i], starts[i + 1] - starts[i]
        counts[i] = _count(
            some, flags, flag, query, theta[i], slack, base, room, scores, rows, sizes, picked, fast
        )
        sort_heap(scores, rows, base, sizes[0])
        offsets[i + 1] = base + sizes[0]
        some, flags = halves_at(episodes[0][i], (length, shape[1])), bytes_at(episodes[1][i], length)
        _count(
            some,
            flags,
            PRESENT,
            query,
            -np.inf,
            slack,
            i,
            1,
            nearest_score,
            nearest_row,
            sizes,
            picked,
            fast,
        )


@lean
def _count(
    rows: Halves,
    flags: Bytes,
    flag: int,
    query: Float32s,
    theta: float,
    slack: float,
    base: int,
    room: int,
    best: Float64s,
    best_rows: Int64s,
    sizes: Int64s,
    picked: Int64s,
    fast: Float32s,
) -> int:
    """How many rows with the flag reach theta; the `room` best are a heap at `base`, of sizes[0] rows."""
    row, size, count = 0, 0, 0
    while row < rows.shape[0]:
        some = 0
        while row < rows.shape[0] and some < TILE:
            if flags[row] & flag:
                picked[some] = row
                some += 1
            row += 1
        stream32(rows, picked, some, query, fast)
        for i in range(some):
            score = np.float64(fast[i])
            if score < theta - slack:
                continue
            enters = size < room or (room > 0 and score >= best[base] - slack)
            if not enters and score >= theta + slack:
                count += 1
                continue
            exact = dot64(rows, picked[i], query)
            if exact >= theta:
                count += 1
                size = offer(best, best_rows, base, size, room, exact, picked[i])
    sizes[0] = size
    return count
