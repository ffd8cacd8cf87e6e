"""The CPU's gate: a threshold scan with exact top-k, compiled by numba (proof: `kernels/error_bounds.py`)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from undertow.kernels.arena.arena import Arena
from undertow.kernels.arena.compiled_rows import bytes_at, fit_rows, halves_at, jit, lean
from undertow.kernels.arena.vector_checks import Vectors
from undertow.kernels.array_types import Bytes, Float16s, Float32s, Float64s, Halves, Int64s
from undertow.kernels.device import cpu_count
from undertow.kernels.error_bounds import error_slack
from undertow.kernels.gate.few_queries import are_few, read_few
from undertow.kernels.gate.gate import GateReadings, Probes
from undertow.kernels.gate.plan import Cells, GateHits, Plan, TaskLimits, shares_of, starts_of
from undertow.kernels.gate.planned_gate import PlannedGate
from undertow.kernels.gate.scan import (
    TILE,
    cached32,
    dot64,
    offer,
    sort_heap,
    stream32,
    widen_row,
)

_SHARES_PER_THREAD = 8
# A task reads at least about this much, so that splitting is cheap compared with reading.
_TASK_BYTES = 256 << 10


class Work(NamedTuple):
    """What a thread needs to put one query to a tile of rows."""

    query: Float32s  # [dim]
    picked: Int64s  # [TILE]: row numbers
    scores: Float32s  # [TILE]


@jit
def scan(
    plan: Plan,
    cells: Cells,
    queries: int,
    shape: tuple[int, int],
    slack: float,
    first_task: int,
    last_task: int,
) -> None:
    """Run tasks first_task..last_task - 1; writes every one of their cells.

    queries: the address of fp16 vectors [q, dim], and their shape.
    """
    asked = halves_at(queries, shape)
    work = Work(np.empty(shape[1], np.float32), np.empty(TILE, np.int64), np.empty(TILE, np.float32))
    g = int(np.searchsorted(plan.group_task, first_task, side="right")) - 1
    for t in range(first_task, last_task):
        while t >= plan.group_task[g + 1]:
            g += 1
        place = t - plan.group_task[g]
        end = min((place + 1) * plan.group_stride[g], plan.group_rows[g])
        rows = halves_at(plan.group_vectors[g], (end, shape[1]))
        flags = bytes_at(plan.group_flags[g], end)
        _scan_task(plan, cells, g, place, rows, flags, asked, slack, work)


@lean
def _scan_task(
    plan: Plan,
    cells: Cells,
    g: int,
    place: int,
    rows: Halves,
    flags: Bytes,
    asked: Halves,
    slack: float,
    work: Work,
) -> None:
    """Put the probes of group g to the rows of its task number `place`, a tile at a time."""
    wanted = 0
    for p in range(plan.group_first[g], plan.group_first[g + 1]):
        wanted |= plan.probe_flag[p]
        cells.counts[plan.probe_cell[p] + place] = 0
        cells.sizes[plan.probe_cell[p] + place] = 0
    row, end = place * plan.group_stride[g], rows.shape[0]
    while row < end:
        count = 0
        while row < end and count < TILE:
            if flags[row] & wanted:
                work.picked[count] = row
                count += 1
            row += 1
        if count:
            _ask(plan, cells, g, place, rows, flags, asked, slack, work, count)


@lean
def _ask(
    plan: Plan,
    cells: Cells,
    g: int,
    place: int,
    rows: Halves,
    flags: Bytes,
    asked: Halves,
    slack: float,
    work: Work,
    count: int,
) -> None:
    """Put every probe of group g to the first `count` picked rows."""
    cached = 0
    for p in range(plan.group_first[g], plan.group_first[g + 1]):
        limit, flag = plan.probe_limit[p], plan.probe_flag[p]
        seen = count
        while seen > 0 and work.picked[seen - 1] >= limit:
            seen -= 1
        widen_row(asked, plan.probe_query[p], work.query)
        if seen > cached:
            stream32(rows, work.picked, seen, work.query, work.scores)
            cached = seen
        else:
            cached32(rows, work.picked, seen, work.query, work.scores)
        least = plan.probe_theta[p] - slack
        for i in range(seen):
            if np.float64(work.scores[i]) >= least and flags[work.picked[i]] & flag:
                _weigh(
                    plan, cells, p, place, rows, work.picked[i], work.query, slack, np.float64(work.scores[i])
                )


@lean
def _weigh(
    plan: Plan,
    cells: Cells,
    p: int,
    place: int,
    rows: Halves,
    r: int,
    query: Float32s,
    slack: float,
    score: float,
) -> None:
    """Count and keep a row whose fp32 score may reach theta, with its exact score where it matters."""
    cell, room = plan.probe_cell[p] + place, plan.probe_room[p]
    heap, size = plan.probe_list[p] + place * room, cells.sizes[cell]
    enters = size < room or (room > 0 and score >= cells.scores[heap] - slack)
    if not enters and score >= plan.probe_theta[p] + slack:
        cells.counts[cell] += 1
        return
    exact = dot64(rows, r, query)
    if exact >= plan.probe_theta[p]:
        cells.counts[cell] += 1
        cells.sizes[cell] = offer(cells.scores, cells.rows, heap, size, room, exact, r)


@lean
def tally(plan: Plan, cells: Cells, count: Int64s) -> None:
    """count[i] = the rows that all tasks counted for the caller's probe i."""
    for p in range(plan.probe_place.shape[0]):
        total = 0
        for cell in range(plan.probe_cell[p], plan.probe_cell[p + 1]):
            total += cells.counts[cell]
        count[plan.probe_place[p]] = total


@lean
def merge(plan: Plan, cells: Cells, starts: Int64s, scores: Float64s, rows: Int64s) -> None:
    """Write the best rows of the caller's probe i, best first, to scores, rows[starts[i] : starts[i + 1]]."""
    for p in range(plan.probe_place.shape[0]):
        start = starts[plan.probe_place[p]]
        size, kept = 0, starts[plan.probe_place[p] + 1] - start
        for cell in range(plan.probe_cell[p], plan.probe_cell[p + 1]):
            heap = plan.probe_list[p] + (cell - plan.probe_cell[p]) * plan.probe_room[p]
            for i in range(heap, heap + cells.sizes[cell]):
                size = offer(scores, rows, start, size, kept, cells.scores[i], cells.rows[i])
        sort_heap(scores, rows, start, size)


# ---- the gate


class NumbaGate(PlannedGate):
    """One compiled pass over the rows as they lie, on `threads` threads.

    Queries of one segment share the pass. A large segment is split by rows, so that one tenant of
    50,000 turns beside thousands of small ones keeps all threads busy.
    """

    def __init__(self, arena: Arena, threads: int | None = None) -> None:
        super().__init__(arena)
        self.threads = threads or cpu_count()
        self._workers = ThreadPoolExecutor(self.threads, thread_name_prefix="gate")

    def _cut(self) -> TaskLimits:
        least = _TASK_BYTES // self.arena.row_bytes
        shares = self.threads * _SHARES_PER_THREAD
        return TaskLimits(tasks=shares, least_work=least, abreast=1, step_rows=1, enough=self.threads)

    def _admit(self, queries: Vectors) -> Float16s:
        return fit_rows(queries, self.arena.dim)

    def _read(self, probes: Probes) -> GateReadings:
        return read_few(self.arena.dim, probes) if are_few(probes) else super()._read(probes)

    def _run(self, probes: Probes, plan: Plan) -> GateReadings:
        cells = Cells(
            counts=np.empty(plan.probe_cell[-1], np.int64),
            sizes=np.empty(plan.probe_cell[-1], np.int64),
            scores=np.empty(plan.probe_list[-1], np.float64),
            rows=np.empty(plan.probe_list[-1], np.int64),
        )
        self._scan(plan, cells, probes.queries, shares_of(plan, self.threads * _SHARES_PER_THREAD))
        count = np.empty(len(plan.probe_place), np.int64)
        tally(plan, cells, count)
        k = np.empty_like(count)
        k[plan.probe_place] = plan.probe_k
        starts = starts_of(np.minimum(count, k))
        rows, scores = np.empty(starts[-1], np.int64), np.empty(starts[-1], np.float64)
        merge(plan, cells, starts, scores, rows)
        return self._readings(probes, GateHits(count, starts, rows, scores))

    def _scan(self, plan: Plan, cells: Cells, queries: Float16s, shares: Int64s) -> None:
        """Run the tasks [shares[i], shares[i + 1]) of every share, each share on one thread."""
        asked = (plan, cells, queries.ctypes.data, queries.shape, error_slack(self.arena.dim))
        if len(shares) == 2:
            scan(*asked, 0, shares[1])
            return
        list(self._workers.map(lambda a, b: scan(*asked, a, b), shares[:-1], shares[1:]))
