"""How one batch of gate queries becomes tasks: grouped by segment, cut by rows.

A probe puts one query to one segment; the probes of a segment are a group. A task is a range of a
group's rows, and a cell is what one task finds for one probe. All of it is prefix sums over probes and
groups; nothing is laid out for each task or cell, so that planning costs little beside the scan.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]

# tasks of a group, so cells of a probe: joining their lists takes time with each of them
MAX_TASKS = 1024
# bytes of the cells and lists of one batch: beside them the card holds the arena and the encoder
MAX_SPACE_BYTES = 256 << 20
# of a cell (count and size), and of a row in its list (score and number)
_ENTRY_BYTES = 16


class ProbeBatch(NamedTuple):
    """Probes in the caller's order. All arrays [p]."""

    query: Int64s  # row of the queries
    segment: Int64s
    limit: Int64s  # only rows below it, at most the segment's rows
    flag: Int64s  # only rows with this flag
    theta: Float64s
    k: Int64s  # how many of the rows found to list, at most `limit`


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
    probe_room: Int64s  # [p]: how many rows a cell keeps
    probe_cell: Int64s  # [p + 1]: its first cell
    probe_list: Int64s  # [p + 1]: where the lists of its cells start
    group_first: Int64s  # [g + 1]: its first probe
    group_vectors: Int64s  # [g]: address of the segment's rows
    group_flags: Int64s  # [g]: address of the segment's flags
    group_rows: Int64s  # [g]: rows that some probe of it asks for
    group_stride: Int64s  # [g]
    group_task: Int64s  # [g + 1]: its first task

    @property
    def space_bytes(self) -> int:
        """What the cells and their lists take."""
        return _ENTRY_BYTES * int(self.probe_cell[-1] + self.probe_list[-1])


class Cells(NamedTuple):
    """What tasks find: rows at or above theta (all counted, the best kept), one list a cell."""

    counts: Int64s  # [cells]
    sizes: Int64s  # [cells]
    scores: Float64s  # [probe_list[-1]]
    rows: Int64s


class GateHits(NamedTuple):
    """What all tasks found, for the probes in the caller's order."""

    counts: Int64s  # [p]
    starts: Int64s  # [p + 1]: the list of probe i is rows, scores[starts[i] : starts[i + 1]]
    rows: Int64s
    scores: Float64s


class TaskLimits(NamedTuple):
    """How a device wants its tasks."""

    tasks: int  # about so many in all, when there is enough work
    least_work: int  # and none with less, in rows times passes
    abreast: int  # probes that one pass over rows serves
    step_rows: int  # rows are read so many at a time
    enough: int  # fewer tasks than these, though there is work for more, leave much of the device idle


def group(asked: ProbeBatch) -> tuple[Int64s, Int64s]:
    """(order [p], first [g + 1]): probes by segment; group g is order[first[g] : first[g + 1]]."""
    # one number for segment and place: sorting numbers is several times faster than sorting places by them
    keys = np.sort(asked.segment << 32 | np.arange(len(asked.segment)))
    order, segment = keys & 0xFFFFFFFF, keys >> 32
    edges = np.flatnonzero(segment[1:] != segment[:-1]) + 1
    return order, np.concatenate((np.zeros(min(1, len(order)), np.int64), edges, [len(order)]))


def lay_out(
    asked: ProbeBatch, order: Int64s, first: Int64s, addresses: tuple[Int64s, Int64s], cut: TaskLimits
) -> Plan:
    """Plan the groups that `group` formed. addresses: of the rows and of the flags of each, int64 [g].

    Tasks are made larger than wanted where that keeps the plan within MAX_SPACE_BYTES, but not far
    fewer than are enough for the device: then the plan takes more space,
    and its batch is better read in parts.
    """
    limit, k, probes = asked.limit[order], asked.k[order], np.diff(first)
    rows = np.maximum.reduceat(limit, first[:-1]) if len(probes) else np.zeros(0, np.int64)
    pieces = _pieces(rows, -(-probes // cut.abreast), cut)
    while True:
        # whole steps, so there may be fewer tasks than pieces
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
    """Into how many tasks of equal work, near the target, each group is cut."""
    work = rows * passes
    target = max(-(-int(work.sum()) // cut.tasks), cut.least_work, 1)
    pieces: Int64s = np.clip(-(-work // target), 1, MAX_TASKS)
    return pieces


def _ceil(a: Int64s, b: Int64s) -> Int64s:
    """a / b, rounded up; in fp64, which is exact enough below 2**52 and far faster than integers."""
    return np.ceil(a / b).astype(np.int64)


def shares_of(plan: Plan, count: int) -> Int64s:
    """int64 [s + 1]: about `count` runs of consecutive tasks with about equal rows times probes."""
    tasks = np.diff(plan.group_task)
    owner = np.repeat(np.arange(len(tasks)), tasks)
    begin = (np.arange(len(owner)) - plan.group_task[owner]) * plan.group_stride[owner]
    rows = np.minimum(plan.group_stride[owner], plan.group_rows[owner] - begin)
    done = np.cumsum(rows * np.diff(plan.group_first)[owner])
    total = int(done[-1]) if len(done) else 0
    cuts = np.searchsorted(done, np.arange(1, count) * (total / count))
    return np.unique(np.concatenate(([0], cuts, [len(owner)])))


def starts_of(sizes: Int64s) -> Int64s:
    """[n + 1]: where each of n consecutive runs starts, and the total."""
    starts = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=starts[1:])
    return starts
