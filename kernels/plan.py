"""How one batch of gate queries becomes tasks: grouped by segment, cut by rows, shared out by work."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]
Bytes = NDArray[np.uint8]

# a task reads about this much or more, so that splitting costs little beside the work
_TASK_BYTES = 256 << 10


class Plan(NamedTuple):
    """One batch of probes, sorted by segment, and its split into tasks of about equal work.

    A probe asks one query of one segment; the probes of a segment are a group. A task is a range of
    a group's rows. A cell is what one task finds for one probe: `cell_base` + its place in the group.
    """

    queries: Float32s  # [q, dim]
    probe_query: Int64s  # [p]: row of `queries`
    probe_limit: Int64s  # [p]: only rows below it
    probe_flag: Bytes  # [p]: only rows with this flag
    probe_theta: Float64s  # [p]
    slack: float
    group_start: Int64s  # [g + 1]: its first probe
    group_vectors: Int64s  # [g]: address of the segment's rows
    group_flags: Int64s  # [g]: address of the segment's flags
    group_task: Int64s  # [g + 1]: its first task
    task_group: Int64s  # [t]
    task_begin: Int64s  # [t]: first row
    task_end: Int64s  # [t]: one after the last row
    cell_base: Int64s  # [t]: its first cell
    cell_heap: Int64s  # [c + 1]: where the cell's heap starts


class Cells(NamedTuple):
    """What tasks find: rows at or above theta (all counted, the k best kept), one heap a cell."""

    counts: Int64s  # [c]
    sizes: Int64s  # [c]
    scores: Float64s  # [heap space]
    rows: Int64s


class Groups(NamedTuple):
    """The probes of each segment: sorted probes [start[g], start[g + 1]) ask `rows[g]` rows of it."""

    segment: Int64s
    start: Int64s
    rows: Int64s


class Tasks(NamedTuple):
    start: Int64s  # [g + 1]: the first task of each group
    group: Int64s  # [t]
    begin: Int64s  # [t]: rows [begin, end)
    end: Int64s
    shares: Int64s  # [s + 1]: runs of consecutive tasks with about equal work


def group_probes(segment: Int64s, limit: Int64s) -> Groups:
    """Group probes sorted by segment; a group reads as many rows as its probe with the highest limit."""
    ids, first = np.unique(segment, return_index=True)
    rows = np.maximum.reduceat(limit, first) if len(first) else np.zeros(0, np.int64)
    return Groups(ids, np.append(first, len(segment)), rows)


def split(groups: Groups, shares: int, row_bytes: int) -> Tasks:
    """Cut groups into tasks by rows, and all tasks into shares, by rows times probes."""
    work = groups.rows * np.diff(groups.start)
    total = int(work.sum())
    target = max(_TASK_BYTES // row_bytes, -(-total // shares), 1)
    pieces = np.clip(-(-work // target), 1, np.maximum(groups.rows, 1))
    start = starts_of(pieces)
    group = np.repeat(np.arange(len(work)), pieces)
    place = np.arange(len(group)) - start[group]
    begin = groups.rows[group] * place // pieces[group]
    end = groups.rows[group] * (place + 1) // pieces[group]
    done = np.cumsum((end - begin) * np.diff(groups.start)[group])
    cuts = np.searchsorted(done, np.arange(1, -(-total // target)) * target)
    return Tasks(start, group, begin, end, np.unique(np.concatenate(([0], cuts, [len(group)]))))


def lay_out(groups: Groups, tasks: Tasks, limit: Int64s, k: Int64s) -> tuple[Int64s, Int64s]:
    """(first cell of each task, first heap entry of each cell); a heap holds at most the rows seen."""
    probes = np.diff(groups.start)[tasks.group]
    base = starts_of(probes)
    task = np.repeat(np.arange(len(probes)), probes)
    probe = groups.start[tasks.group[task]] + np.arange(len(task)) - base[task]
    seen = np.maximum(np.minimum(limit[probe], tasks.end[task]) - tasks.begin[task], 0)
    return base[:-1], starts_of(np.minimum(k[probe], seen))


def starts_of(sizes: Int64s) -> Int64s:
    """[n + 1]: where each of n consecutive runs starts, and the total."""
    starts = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=starts[1:])
    return starts
