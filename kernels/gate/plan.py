"""Plans a batch of gate queries as tasks: grouped by segment, split by rows.

A probe is one query against one segment; the probes of a segment form a group. A task is a range of a group's
rows, and a cell holds what one task finds for one probe. Plans consist of prefix sums over probes and groups,
with nothing stored per task or cell, so that planning is cheap compared with the scan.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]

# The most tasks of a group, and so cells of a probe: merging their lists costs time for each.
MAX_TASKS = 1024
# Bytes for the cells and lists of one batch: GPU memory also holds the arena and the encoder.
MAX_SPACE_BYTES = 256 << 20
# Bytes of a cell (count and size), and of a row in its list (score and number).
_ENTRY_BYTES = 16


class ProbeBatch(NamedTuple):
    """Probes in the caller's order. All arrays [p]."""

    query: Int64s  # row of the queries
    segment: Int64s
    limit: Int64s  # only rows below it; at most the segment's rows
    flag: Int64s  # only rows with this flag
    theta: Float64s
    k: Int64s  # number of hits to list, at most `limit`


class Plan(NamedTuple):
    """One batch of probes, sorted by segment, and its split into tasks of about equal work.

    Task t of group g, `group_task[g] + i`, reads rows [i, i + 1) * group_stride[g] of it, as far as
    group_rows[g]. Cell i of probe p is `probe_cell[p] + i`, its list `probe_list[p] + i * probe_room[p]`.
    """

    probe_place: Int64s  # [p]: the caller's number of the probe
    probe_query: Int64s  # [p]
    probe_limit: Int64s  # [p]
    probe_flag: Int64s  # [p]
    probe_theta: Float64s  # [p]
    probe_k: Int64s  # [p]
    probe_room: Int64s  # [p]: the most rows that a cell keeps
    probe_cell: Int64s  # [p + 1]: its first cell
    probe_list: Int64s  # [p + 1]: where the lists of its cells start
    group_first: Int64s  # [g + 1]: its first probe
    group_vectors: Int64s  # [g]: address of the segment's rows
    group_flags: Int64s  # [g]: address of the segment's flags
    group_rows: Int64s  # [g]: the largest limit of its probes
    group_stride: Int64s  # [g]
    group_task: Int64s  # [g + 1]: its first task

    @property
    def space_bytes(self) -> int:
        """Bytes of the cells and their lists."""
        return _ENTRY_BYTES * int(self.probe_cell[-1] + self.probe_list[-1])


class Cells(NamedTuple):
    """What tasks find: rows at or above theta, all counted and the best listed, one list per cell."""

    counts: Int64s  # [cells]
    sizes: Int64s  # [cells]
    scores: Float64s  # [probe_list[-1]]
    rows: Int64s


class GateHits(NamedTuple):
    """The merged results of all tasks, for the probes in the caller's order."""

    counts: Int64s  # [p]
    starts: Int64s  # [p + 1]: the list of probe i is rows, scores[starts[i] : starts[i + 1]]
    rows: Int64s
    scores: Float64s


class TaskLimits(NamedTuple):
    """The limits of tasks on a device."""

    tasks: int  # target number in all, if there is enough work
    least_work: int  # the least work of a task, in rows times passes
    abreast: int  # probes served by one pass over rows
    step_rows: int  # rows read at a time
    enough: int  # with fewer tasks, much of the device is idle


def group(asked: ProbeBatch) -> tuple[Int64s, Int64s]:
    """(order [p], first [g + 1]): probes by segment; group g is order[first[g] : first[g + 1]]."""
    # Segment and position in one number: np.sort is several times faster than np.argsort.
    keys = np.sort(asked.segment << 32 | np.arange(len(asked.segment)))
    order, segment = keys & 0xFFFFFFFF, keys >> 32
    edges = np.flatnonzero(segment[1:] != segment[:-1]) + 1
    return order, np.concatenate((np.zeros(min(1, len(order)), np.int64), edges, [len(order)]))


def lay_out(
    asked: ProbeBatch, order: Int64s, first: Int64s, addresses: tuple[Int64s, Int64s], cut: TaskLimits
) -> Plan:
    """Plan the groups that `group` formed. addresses: of the rows and of the flags of each, int64 [g].

    Tasks grow beyond the target if that keeps the plan within MAX_SPACE_BYTES, but their number does not fall
    far below what keeps the device busy. Then the plan takes more space, and the batch is better split.
    """
    limit, k, probes = asked.limit[order], asked.k[order], np.diff(first)
    rows = np.maximum.reduceat(limit, first[:-1]) if len(probes) else np.zeros(0, np.int64)
    pieces = _pieces(rows, -(-probes // cut.abreast), cut)
    while True:
        # Whole steps, so there may be fewer tasks than pieces.
        stride = np.maximum(_ceil(rows, pieces * cut.step_rows), 1) * cut.step_rows
        tasks = _ceil(rows, stride)
        cells, room = np.repeat(tasks, probes), np.minimum(k, np.repeat(stride, probes))
        space_bytes = _ENTRY_BYTES * int((cells * (1 + room)).sum())
        if space_bytes <= MAX_SPACE_BYTES or pieces.sum() <= max(cut.enough, len(pieces)):
            break
        pieces = np.maximum(pieces * 3 // 4, 1)
    return Plan(
        probe_place=order,
        probe_query=asked.query[order],
        probe_limit=limit,
        probe_flag=asked.flag[order],
        probe_theta=asked.theta[order],
        probe_k=k,
        probe_room=room,
        probe_cell=starts_of(cells),
        probe_list=starts_of(cells * room),
        group_first=first,
        group_vectors=addresses[0],
        group_flags=addresses[1],
        group_rows=rows,
        group_stride=stride,
        group_task=starts_of(tasks),
    )


def _pieces(rows: Int64s, passes: Int64s, cut: TaskLimits) -> Int64s:
    """The number of tasks of each group, so that their work is about equal and near the target."""
    work = rows * passes
    target = max(-(-int(work.sum()) // cut.tasks), cut.least_work, 1)
    pieces: Int64s = np.clip(-(-work // target), 1, MAX_TASKS)
    return pieces


def _ceil(a: Int64s, b: Int64s) -> Int64s:
    """ceil(a / b), in fp64: exact enough below 2**52, and much faster than integer division."""
    return np.ceil(a / b).astype(np.int64)


def shares_of(plan: Plan, count: int) -> Int64s:
    """int64 [s + 1]: bounds of about `count` runs of consecutive tasks with about equal rows times probes."""
    tasks = np.diff(plan.group_task)
    owner = np.repeat(np.arange(len(tasks)), tasks)
    begin = (np.arange(len(owner)) - plan.group_task[owner]) * plan.group_stride[owner]
    rows = np.minimum(plan.group_stride[owner], plan.group_rows[owner] - begin)
    done = np.cumsum(rows * np.diff(plan.group_first)[owner])
    total = int(done[-1]) if len(done) else 0
    cuts = np.searchsorted(done, np.arange(1, count) * (total / count))
    return np.unique(np.concatenate(([0], cuts, [len(owner)])))


def starts_of(sizes: Int64s) -> Int64s:
    """int64 [n + 1]: the start of each of n consecutive runs, and the total."""
    starts = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=starts[1:])
    return starts
