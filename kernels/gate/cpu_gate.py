"""The CPU's gate, compiled by numba."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from undertow.kernels.arena.arena import Arena
from undertow.kernels.device import cpu_count
from undertow.kernels.error_bounds import error_slack
from undertow.kernels.gate.cpu_scan import merge, scan, tally
from undertow.kernels.gate.gate import GateReadings, PlannedGate, Probes
from undertow.kernels.gate.plan import Cells, GateHits, Plan, TaskLimits, shares_of, starts_of

_SHARES_PER_THREAD = 8
# A task reads at least about this much, so that splitting is cheap compared with reading.
_TASK_BYTES = 256 << 10


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

    def _scan(
        self, plan: Plan, cells: Cells, queries: NDArray[np.float32], shares: NDArray[np.int64]
    ) -> None:
        """Run the tasks [shares[i], shares[i + 1]) of every share, each share on one thread."""
        slack = error_slack(self.arena.dim)
        if len(shares) == 2:
            scan(plan, cells, queries, slack, 0, shares[1])
            return
        list(self._workers.map(lambda a, b: scan(plan, cells, queries, slack, a, b), shares[:-1], shares[1:]))
