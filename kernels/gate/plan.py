"""Plans a batch of gate queries as tasks: grouped by segment, split by rows.

A probe is one query against one segment; the probes of a segment form a group. A task is a range of a group's
rows, and a cell holds what one task finds for one probe. Plans consist of prefix sums over probes and groups,
with nothing stored per task or cell, so that planning is cheap compared with the scan. It is compiled, and
writes one table: a card scans 10,000 tenants in 2.6 ms, and NumPy took 2 ms to plan and pack that.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import NamedTuple

import numpy as np

from undertow.kernels.arena.compiled_rows import jit
from undertow.kernels.array_types import Float64s, Int64s

# The most tasks of a group, and so cells of a probe: merging their lists costs time for each.
MAX_TASKS = 4096
# Bytes for the cells and lists of one batch: GPU memory also holds the arena and the encoder.
MAX_SPACE_BYTES = 256 << 20
# Bytes of a cell (count and size), and of a row in its list (score and number).
_ENTRY_BYTES = 16


class ProbeBatch(NamedTuple):
    """Probes in the caller's order. All arrays [p]."""

    query: Int64s  # row of the queries
    segment: Int64s
    vectors: Int64s  # address of the segment's rows
    flags: Int64s  # address of their flags
    limit: Int64s  # only rows below it; at most the segment's rows
    flag: Int64s  # only rows with this flag
    theta: Float64s
    k: Int64s  # number of hits to list, at most `limit`


class Plan(NamedTuple):
    """One batch of probes by segment, in order of first appearance, and its split into tasks of like work.

    Task t of group g, `group_task[g] + i`, reads rows [i, i + 1) * group_stride[g] of it, as far as
    group_rows[g]. Cell i of probe p is `probe_cell[p] + i`, its list `probe_list[p] + i * probe_room[p]`.
    All arrays lie in `table`, in this order.
    """

    table: Int64s
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


def lay_out(asked: ProbeBatch, cut: TaskLimits, memory: Callable[[int], Int64s], most_bytes: int) -> Plan:
    """Plan a batch in a table from `memory`, which gives int64 [n].

    Tasks grow beyond the target if that keeps the plan within `most_bytes`, but their number does not fall
    far below what keeps the device busy. Then the plan takes more space, and the batch is better split.
    """
    probes = len(asked.query)
    table = memory(15 * probes + 4)  # enough for a group each
    return _columns(table, probes, _fill(table, asked, cut, most_bytes))


@jit
def _columns(memory: Int64s, probes: int, groups: int) -> Plan:
    """The table at the end of `memory`, and views of it, one after the other."""
    table = memory[len(memory) - (9 * probes + 6 * groups + 4) :]
    a = table[: 7 * probes].reshape((7, probes))
    sums = table[7 * probes : 9 * probes + 2].reshape((2, probes + 1))
    rest = table[9 * probes + 2 :]
    b = rest[groups + 1 : 5 * groups + 1].reshape((4, groups))
    columns = (a[0], a[1], a[2], a[3], a[4].view(np.float64), a[5], a[6], sums[0], sums[1])
    return Plan(table, *columns, rest[: groups + 1], b[0], b[1], b[2], b[3], rest[5 * groups + 1 :])


@jit
def _grouped(segment: Int64s) -> tuple[Int64s, Int64s]:
    """(group of each probe [p], first [g + 1]): segments by first appearance, through a table of hashes."""
    probes, bits = len(segment), 1
    while 1 << bits < 2 * probes:
        bits += 1
    mask = (1 << bits) - 1
    groups, group_of, sizes = (
        np.full(mask + 1, -1, np.int64),
        np.empty(probes, np.int64),
        np.zeros(probes, np.int64),
    )
    leader = np.empty(probes, np.int64)
    count = 0
    for p in range(probes):
        key = segment[p]
        at = (key ^ key >> 17) & mask
        while groups[at] >= 0 and segment[leader[groups[at]]] != key:
            at = (at + 1) & mask
        if groups[at] < 0:
            groups[at], leader[count] = count, p
            count += 1
        group_of[p] = groups[at]
        sizes[groups[at]] += 1
    first = np.zeros(count + 1, np.int64)
    for g in range(count):
        first[g + 1] = first[g] + sizes[g]
    return group_of, first


@jit
def _place(plan: Plan, asked: ProbeBatch, group_of: Int64s) -> None:
    """Write the probes by group, in the caller's order within each, and the groups' addresses and rows."""
    if len(plan.group_rows) == len(group_of):  # each is a group of its own, as mostly: whole columns
        plan.probe_place[:] = group_of
        plan.probe_query[:], plan.probe_limit[:], plan.probe_flag[:] = asked.query, asked.limit, asked.flag
        plan.probe_theta[:], plan.probe_k[:] = asked.theta, asked.k
        plan.group_vectors[:], plan.group_flags[:] = asked.vectors, asked.flags
        plan.group_rows[:] = asked.limit
        return
    taken = plan.group_first.copy()
    plan.group_rows[:] = 0
    for i in range(len(group_of)):
        g = group_of[i]
        p = taken[g]
        taken[g] = p + 1
        plan.probe_place[p], plan.probe_query[p] = i, asked.query[i]
        plan.probe_limit[p], plan.probe_flag[p] = asked.limit[i], asked.flag[i]
        plan.probe_theta[p], plan.probe_k[p] = asked.theta[i], asked.k[i]
        plan.group_vectors[g], plan.group_flags[g] = asked.vectors[i], asked.flags[i]
        plan.group_rows[g] = max(plan.group_rows[g], asked.limit[i])


@jit
def _sum_up(plan: Plan, pieces: Int64s, step_rows: int) -> None:
    """Strides (whole steps, where there are several pieces), and where tasks, cells and lists start."""
    tasks = cells = listed = 0
    for g in range(len(pieces)):
        rows = plan.group_rows[g]
        stride, count = max(rows, 1), min(rows, 1)
        if pieces[g] > 1:
            stride = ceil(rows / (pieces[g] * step_rows)) * step_rows
            count = ceil(rows / stride)
        plan.group_stride[g], plan.group_task[g] = stride, tasks
        tasks += count
        for p in range(plan.group_first[g], plan.group_first[g + 1]):
            room = min(plan.probe_k[p], stride)
            plan.probe_room[p], plan.probe_cell[p], plan.probe_list[p] = room, cells, listed
            cells += count
            listed += count * room
    plan.group_task[len(pieces)] = tasks
    plan.probe_cell[len(plan.probe_k)], plan.probe_list[len(plan.probe_k)] = cells, listed


# Most groups are one task: branches spare them the divisions, which took half of the time.
@jit
def _split(plan: Plan, cut: TaskLimits, most_bytes: int) -> None:
    """Choose the rows of a task of each group, and write the prefix sums that follow from them."""
    groups = len(plan.group_rows)
    pieces = np.empty(groups, np.int64)
    work = 0
    for g in range(groups):
        probes = plan.group_first[g + 1] - plan.group_first[g]
        passes = 1 if probes <= cut.abreast else ceil(probes / cut.abreast)
        pieces[g] = plan.group_rows[g] * passes
        work += pieces[g]
    target = max(ceil(work / cut.tasks), cut.least_work, 1)
    for g in range(groups):
        pieces[g] = 1 if pieces[g] <= target else min(ceil(pieces[g] / target), MAX_TASKS)
    while True:
        _sum_up(plan, pieces, cut.step_rows)
        space_bytes = _ENTRY_BYTES * (plan.probe_cell[-1] + plan.probe_list[-1])
        if space_bytes <= most_bytes or pieces.sum() <= max(cut.enough, groups):
            return
        for g in range(groups):
            pieces[g] = max(pieces[g] * 3 // 4, 1)


@jit
def _fill(table: Int64s, asked: ProbeBatch, cut: TaskLimits, most_bytes: int) -> int:
    """Write the table. Returns the number of groups. One call, as each unpacks the arrays anew."""
    group_of, first = _grouped(asked.segment)
    plan = _columns(table, len(group_of), len(first) - 1)
    plan.group_first[:] = first
    _place(plan, asked, group_of)
    _split(plan, cut, most_bytes)
    return len(first) - 1


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
