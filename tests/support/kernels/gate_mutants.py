"""Edits of gate.cu that the tests must find: text, and what takes its place."""

from __future__ import annotations

MUTANTS = {
    "no causal mask": ("step.row < plan.limit[p] && ", ""),
    "no live mask": ("&& (step.flag & plan.flag[p]);", ";"),
    "no clamp at the last row": (
        "task.base + lane < task.end ? task.flags[task.base + lane] : 0",
        "task.flags[task.base + lane]",
    ),
    "dead rows are asked": ("__ballot_sync(ALL, (task.flag & task.wanted) != 0)", "__ballot_sync(ALL, true)"),
    "one flag for the whole group": (
        "return __reduce_or_sync(ALL, wanted);",
        "return __shfl_sync(ALL, wanted, 0);",
    ),
    "no slack below theta": (
        "bool open = seen && highest >= theta - slack",
        "bool open = seen && highest >= theta",
    ),
    "no slack above theta": ("lowest >= theta + slack", "lowest >= theta"),
    "no slack at the first look": ("plan.theta[p] - plan.slack", "plan.theta[p]"),
    "no slack at the worst of the best": (
        "highest >= scores[room - 1] - slack",
        "highest > scores[room - 1]",
    ),
    "the last of equals wins": ("worse = there && scores[i] < score", "worse = there && scores[i] <= score"),
    "the last of equals wins at the merge": (
        "a.score == b.score && a.row < b.row",
        "a.score == b.score && a.row > b.row",
    ),
    "cells are not emptied": ("cells.count[plan.cell[p] + place] = 0;", ""),
    "fragments of A transposed": ("upper.x, lower.x, upper.y, lower.y", "upper.x, upper.y, lower.x, lower.y"),
    "upper half of B twice": ("b[s].z, b[s].w", "b[s].x, b[s].y"),
    "rows read by the wrong lane": ("asked >> (g + 8 * i)", "asked >> (t + 8 * i)"),
    "scores of the wrong row": ("lane % 8 * 4 + j / 2", "lane / 4 * 4 + j / 2"),
    "first probes of a chunk only": ("p += ABREAST) ask", "p += step.last) ask"),
    "query of the neighbour": ("const i64 mine = p + lane / 4;", "const i64 mine = p + lane % 4;"),
    "first task of a group only": ("task.place = number - plan.task[g];", "task.place = 0;"),
    "list of the neighbouring task": (
        "cells.rows + plan.list[p] + step.place * room",
        "cells.rows + plan.list[p]",
    ),
    "counts of every other task": ("cell += WARP) count", "cell += 2 * WARP) count"),
    "one row less than k": (
        "count < plan.k[p] ? count : plan.k[p]",
        "count < plan.k[p] ? count : plan.k[p] / 2",
    ),
    "results in the plan's order": ("found.count[plan.place[p]]", "found.count[p]"),
    "no barrier after an insertion": (
        "rows[place] = row;\n    }\n    __syncwarp();",
        "rows[place] = row;\n    }",
    ),
    "a list is read beyond its end": (
        "if (cells.count[c] == cells.size[c])",
        "if (*(const volatile double *)&cells.scores[at], cells.count[c] == cells.size[c])",
    ),
    "a task is taken in two steps": (
        "number = atomicAdd((unsigned long long *)cells.next_task, 1ull);",
        "number = *cells.next_task;\n    __syncwarp();\n    if (lane == 0) *cells.next_task = number + 1;",
    ),
    "lanes meet at two lines": (
        "number = __shfl_sync(ALL, number, 0);",
        "if (lane < 16) number = __shfl_sync(ALL, number, 0);\n else number = __shfl_sync(ALL, number, 0);",
    ),
    "a collective that not all lanes reach": (
        "if (asked) return true;",
        "if (task.flag & task.wanted) return true;",
    ),
}

# with rows by the copy engine
RING_MUTANTS = {
    "one ring for all warps": ("ring = threadIdx.x / WARP * RING_STAGES", "ring = 0"),
    "rows are scored before they came": ("wait_for(barriers + s, parity);", ""),
    "the phase never changes": ("parity ^= 1", "parity ^= 0"),
    "a slot is filled before all have read it": (
        "ask_all(plan, cells, steps[s], lane);",
        "fetch(rows + s * STEP_BYTES, steps[s], barriers + s, lane); ask_all(plan, cells, steps[s], lane);",
    ),
    "bytes of the whole step are expected": ("__popc(step.asked) * SCORED_BYTES", "STEP_BYTES"),
    "rows that nobody asks for are copied": ("} else if (step.asked >> lane & 1) {", "} else {"),
    "all rows go to the first place": ("bulk_copy(target + lane * SCORED_BYTES,", "bulk_copy(target,"),
    "one slot for all steps": ("steps[s].scored = rows + s * STEP_BYTES;", "steps[s].scored = rows;"),
    "a warp leaves while rows are on their way": (
        "if (!there[s]) return;",
        "if (!there[(s + 1) % RING_STAGES]) return;",
    ),
}

# with int8 codes
CODE_MUTANTS = {
    "codes, no slack at the first look": ("plan.theta[p] - plan.slack", "plan.theta[p]"),
    "no bound of the codes at the first look": (" + distance(row, pair[odd])", ""),
    "no bound of the codes at the second": ("if (CODED) lowest -= 2 *", "if (false) lowest -= 2 *"),
    "the query's error is left out": ("return query.error * row.norm +", "return"),
    "the row's error is left out": (" + (query.norm + query.error) * row.error", ""),
    "scale of the row alone": ("row.scale * pair[odd].scale", "row.scale"),
    "the codes of the first segment": ("/ ROW_BYTES * SCORED_BYTES", "* 0"),
    "exact scores from the codes": ("(CODED ? step.vectors : step.scored)", "step.scored"),
}

# where one check alone finds them
MESSAGES = {
    "a list is read beyond its end": "memory was touched beyond an array",
    "lanes meet at two lines": "at different lines",
}
