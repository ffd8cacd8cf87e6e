"""The recurrence gate's arithmetic (RecMem, section 3.2, equation 5), for a ragged batch of queries.

One call answers, for each query: which episode is nearest, how many live earlier turns are at least
theta similar, and which k of those are nearest. Answers are exact (see `kernels/exact.py`), so they
do not depend on the batch, the device or the number of threads.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from undertow.kernels.arena import LIVE, PRESENT, Arena, widened
from undertow.kernels.device import Device, cpu_count, resolve
from undertow.kernels.exact import error_slack
from undertow.kernels.plan import Cells, Plan, group_probes, lay_out, split, starts_of
from undertow.kernels.scan import merge, scan, tally

Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]

NO_SEGMENT = -1
_BLOCK_ROWS = 4096
_SHARES_PER_THREAD = 8


@dataclass(frozen=True)
class GateReadings:
    """What the gate reads for q queries. Scores are exact dot products.

    nearest_row: int64 [q], row of the nearest PRESENT episode, -1 if there is none
    nearest_score: float64 [q], its score, -inf if there is none
    count: int64 [q], all LIVE visible turns with score >= theta, also beyond the k nearest
    offsets: int64 [q + 1]; rows, scores: int64, float64 [offsets[-1]]: of query i, in
        [offsets[i], offsets[i + 1]), the k nearest of the counted turns, by score descending,
        then row ascending
    """

    nearest_row: Int64s
    nearest_score: Float64s
    count: Int64s
    offsets: Int64s
    rows: Int64s
    scores: Float64s

    @property
    def cut_bound(self) -> NDArray[np.bool_]:
        """bool [q]: more turns were relevant than the k that are listed."""
        return self.count > np.diff(self.offsets)


@dataclass(frozen=True)
class Probes:
    """Checked input of one call, as in `Gate.read`; `visible` and `k` are cut to the segment's rows."""

    queries: NDArray[np.float32]
    turn_segments: Int64s
    episode_segments: Int64s
    visible: Int64s
    theta: Float64s
    k: Int64s


class Gate:
    """The reference, in NumPy: fp64 scores of every row. Subclasses make `_read` faster, not different."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena

    def read(
        self,
        *,
        queries: NDArray[np.float16],
        turn_segments: ArrayLike,
        episode_segments: ArrayLike,
        visible: ArrayLike,
        theta: ArrayLike,
        k: ArrayLike,
    ) -> GateReadings:
        """Read the gate for q queries.

        queries: float16 [q, dim]; turn_segments, episode_segments: int64 [q] (episodes: -1 for none);
        visible: int64 [q], only turn rows below it are seen (the causal mask); theta: float64 [q];
        k: int64 [q], how many relevant turns to list. Raises ValueError for wrong shapes or dtypes,
        vectors that are not finite, unknown or released segments, negative visible or k, NaN theta.
        """
        return self._read(self._check(queries, turn_segments, episode_segments, visible, theta, k))

    def _check(
        self,
        queries: NDArray[np.float16],
        turn_segments: ArrayLike,
        episode_segments: ArrayLike,
        visible: ArrayLike,
        theta: ArrayLike,
        k: ArrayLike,
    ) -> Probes:
        wide = widened(queries, self.arena.dim)
        count = len(queries)
        turns = _column("turn_segments", turn_segments, count)
        episodes = _column("episode_segments", episode_segments, count)
        limits, cuts = _column("visible", visible, count), _column("k", k, count)
        thetas = np.asarray(theta, np.float64)
        if thetas.shape != (count,) or np.isnan(thetas).any():
            raise ValueError(f"theta must be {count} numbers, none of them NaN")
        if (limits < 0).any() or (cuts < 0).any():
            raise ValueError("visible and k must not be negative")
        self.arena.locate(episodes[episodes != NO_SEGMENT])
        limits = np.minimum(limits, self.arena.locate(turns)[2])
        return Probes(wide, turns, episodes, limits, thetas, np.minimum(cuts, limits))

    def _read(self, probes: Probes) -> GateReadings:
        count = len(probes.queries)
        nearest_row, nearest_score = np.full(count, -1, np.int64), np.full(count, -np.inf)
        relevant, rows, scores = np.zeros(count, np.int64), [], []
        for i, query in enumerate(probes.queries.astype(np.float64)):
            if probes.episode_segments[i] != NO_SEGMENT:
                episodes, near = self._scores(probes.episode_segments[i], query, None, PRESENT)
                if len(episodes):
                    best = np.argmax(near)  # the first of equals
                    nearest_row[i], nearest_score[i] = episodes[best], near[best]
            turns, near = self._scores(probes.turn_segments[i], query, int(probes.visible[i]), LIVE)
            turns, near = turns[near >= probes.theta[i]], near[near >= probes.theta[i]]
            relevant[i] = len(turns)
            order = np.lexsort((turns, -near))[: probes.k[i]]
            rows.append(turns[order])
            scores.append(near[order])
        offsets = np.concatenate(([0], np.cumsum([len(r) for r in rows], dtype=np.int64)))
        return GateReadings(
            nearest_row,
            nearest_score,
            relevant,
            offsets,
            np.concatenate([np.zeros(0, np.int64), *rows]),
            np.concatenate([np.zeros(0, np.float64), *scores]),
        )

    def _scores(self, segment: int, query: Float64s, limit: int | None, flag: int) -> tuple[Int64s, Float64s]:
        """Rows below `limit` that have the flag, and their exact scores."""
        vectors, flags = self.arena.vectors(segment)[:limit], self.arena.flags(segment)[:limit]
        rows = np.flatnonzero(flags & flag)
        scores = np.empty(len(rows), np.float64)
        for start in range(0, len(rows), _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            scores[block] = vectors[rows[block]].astype(np.float64) @ query
        return rows, scores


class NumbaGate(Gate):
    """The CPU's gate: one compiled pass over the rows as they lie, on `threads` threads.

    Queries of one segment share the pass. A large segment is split by rows, so that one tenant of
    50,000 turns beside thousands of small ones keeps all threads busy.
    """

    def __init__(self, arena: Arena, threads: int | None = None) -> None:
        super().__init__(arena)
        self.threads = threads or cpu_count()
        self._workers = ThreadPoolExecutor(self.threads, thread_name_prefix="gate")

    def _read(self, probes: Probes) -> GateReadings:
        count = len(probes.queries)
        asks = np.flatnonzero(probes.episode_segments != NO_SEGMENT)
        episodes = probes.episode_segments[asks]
        # the nearest episode is the same scan with k = 1 and no threshold
        found = self._run(
            probes.queries,
            query=np.concatenate((np.arange(count), asks)),
            segment=np.concatenate((probes.turn_segments, episodes)),
            limit=np.concatenate((probes.visible, self.arena.locate(episodes)[2])),
            flag=np.repeat(np.array([LIVE, PRESENT], np.uint8), (count, len(asks))),
            theta=np.concatenate((probes.theta, np.full(len(asks), -np.inf))),
            k=np.concatenate((probes.k, np.ones(len(asks), np.int64))),
        )
        relevant, starts, rows, scores = found
        nearest_row, nearest_score = np.full(count, -1, np.int64), np.full(count, -np.inf)
        some = asks[np.diff(starts[count:]) > 0]
        nearest_row[some], nearest_score[some] = rows[starts[count] :], scores[starts[count] :]
        turns = slice(0, starts[count])
        return GateReadings(
            nearest_row, nearest_score, relevant[:count], starts[: count + 1], rows[turns], scores[turns]
        )

    def _run(
        self,
        queries: NDArray[np.float32],
        *,
        query: Int64s,
        segment: Int64s,
        limit: Int64s,
        flag: NDArray[np.uint8],
        theta: Float64s,
        k: Int64s,
    ) -> tuple[Int64s, Int64s, Int64s, Float64s]:
        """Probe i asks `queries[query[i]]`: (count [p], starts [p + 1], rows, scores) in probe order."""
        order = np.argsort(segment, kind="stable")
        groups = group_probes(segment[order], limit[order])
        tasks = split(groups, self.threads * _SHARES_PER_THREAD, self.arena.dim * 4)
        cell_base, cell_heap = lay_out(groups, tasks, limit[order], k[order])
        vectors, flags, _ = self.arena.locate(groups.segment)
        plan = Plan(
            queries=queries,
            probe_query=query[order],
            probe_limit=limit[order],
            probe_flag=flag[order],
            probe_theta=theta[order],
            slack=error_slack(self.arena.dim),
            group_start=groups.start,
            group_vectors=vectors,
            group_flags=flags,
            group_task=tasks.start,
            task_group=tasks.group,
            task_begin=tasks.begin,
            task_end=tasks.end,
            cell_base=cell_base,
            cell_heap=cell_heap,
        )
        cells = Cells(
            counts=np.empty(len(cell_heap) - 1, np.int64),
            sizes=np.empty(len(cell_heap) - 1, np.int64),
            scores=np.empty(cell_heap[-1], np.float64),
            rows=np.empty(cell_heap[-1], np.int64),
        )
        self._scan(plan, cells, tasks.shares)
        found = np.empty(len(order), np.int64)
        tally(plan, cells, found)
        count = np.empty(len(order), np.int64)
        count[order] = found
        kept = np.minimum(count, np.minimum(k, limit))
        starts = starts_of(kept)
        rows, scores = np.empty(starts[-1], np.int64), np.empty(starts[-1], np.float64)
        merge(plan, cells, starts[order], kept[order], scores, rows)
        return count, starts, rows, scores

    def _scan(self, plan: Plan, cells: Cells, shares: Int64s) -> None:
        """Run the tasks [shares[i], shares[i + 1]) of every share, each share on one thread."""
        if len(shares) == 2:
            scan(plan, cells, 0, shares[1])
            return
        list(self._workers.map(lambda a, b: scan(plan, cells, a, b), shares[:-1], shares[1:]))


def _column(name: str, values: ArrayLike, count: int) -> Int64s:
    column = np.asarray(values)
    if column.shape != (count,) or (count and column.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be {count} integers, not {column.dtype} of shape {list(column.shape)}")
    return column.astype(np.int64)


def make_gate(arena: Arena, device: Device = "auto") -> Gate:
    """The fastest gate for a device. "cuda" without a CUDA device is a ValueError, "auto" never fails."""
    if device != "auto" and resolve(device) == "cuda":
        raise ValueError("this version has no CUDA gate: use device 'auto' or 'cpu'")
    return NumbaGate(arena)
