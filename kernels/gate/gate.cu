// The kernels of the gate: lists of the best rows, tasks, `scan`, `tally` and `merge`. Compiled as one text
// with scores.cu, which comes before and says how it all works.

// -- cells

// Insert a row into a list, best first, with space for `room`; the new size. Rows are offered in
// ascending order, so that of equal scores the one that is there already goes first.
__device__ __forceinline__ i64 insert(double *scores, i64 *rows, i64 size, i64 room, double score, i64 row, int lane) {
    if (room == 0 || (size == room && scores[room - 1] >= score)) return size;
    const i64 last = size < room ? size : room - 1;
    i64 place = 0;
    for (i64 block = last / WARP * WARP; block >= 0; block -= WARP) {
        const i64 i = block + lane;
        const bool there = i < last, worse = there && scores[i] < score;
        const double moved_score = worse ? scores[i] : 0;
        const i64 moved_row = worse ? rows[i] : 0;
        const u32 better = __ballot_sync(ALL, there && !worse);
        __syncwarp();  // all have read before any writes
        if (worse) {
            scores[i + 1] = moved_score;
            rows[i + 1] = moved_row;
        }
        __syncwarp();
        if (better) {
            place = block + __popc(better);
            break;
        }
    }
    if (lane == 0) {
        scores[place] = score;
        rows[place] = row;
    }
    __syncwarp();
    return size < room ? size + 1 : size;
}

// What a query is scored by.
__device__ __forceinline__ const char *scored_query(const Plan &plan, i64 p) {
    return (CODED ? plan.codes : plan.queries) + plan.query[p] * SCORED_BYTES;
}

__device__ __forceinline__ Bounds bounds_of_query(const Plan &plan, i64 p) {
    return bounds_of(piece_of(scored_query(plan, p), SCORED_PIECES, true));
}

struct Step {
    const char *scored;     // what is scored of its first row, in the arena or in shared memory
    const char *vectors;    // with codes, its first row in the arena
    i64 row;                // this lane's row
    u32 flag;               // its flag, 0 beyond the task's last row
    u32 asked;              // the rows that any probe asks for
    i64 first, last;        // the probes
    i64 place;              // which task of its group this is
};

// Count the rows of a step that reach the theta of probe `p`, and list the best of them, given tensor
// core scores, with codes the highest that they leave possible. The lowest row goes first; one that surely
// counts but no longer belongs to the best needs no exact score.
__device__ __forceinline__ void judge(const Plan &plan, const Cells &cells, const Step &step, i64 p, float highest, int lane) {
    const double theta = plan.theta[p], slack = plan.slack;
    float lowest = highest;
    if (CODED) lowest -= 2 * distance(bounds_of_row(step.scored, lane, step.asked), bounds_of_query(plan, p));
    const char *query = plan.queries + plan.query[p] * ROW_BYTES;
    const i64 cell = plan.cell[p] + step.place, room = plan.room[p];
    double *scores = cells.scores + plan.list[p] + step.place * room;
    i64 *rows = cells.rows + plan.list[p] + step.place * room;
    i64 count = cells.count[cell], size = cells.size[cell];
    const bool seen = step.row < plan.limit[p] && (step.flag & plan.flag[p]);
    const bool surely = lowest >= theta + slack;
    bool open = seen && highest >= theta - slack;
    for (;;) {
        const bool enters = size < room || (room > 0 && highest >= scores[room - 1] - slack);
        const bool settled = open && surely && !enters;
        count += __popc(__ballot_sync(ALL, settled));
        open = open && !settled;
        const u32 left = __ballot_sync(ALL, open);
        if (left == 0) break;
        const int next = __ffs(left) - 1;
        const double exact = exact_score((CODED ? step.vectors : step.scored) + next * ROW_BYTES, query, lane);
        if (exact >= theta) {
            ++count;
            size = insert(scores, rows, size, room, exact, step.row - lane + next, lane);
        }
        open = open && lane != next;
    }
    if (lane == 0) {
        cells.count[cell] = count;
        cells.size[cell] = size;
    }
    __syncwarp();
}

// -- tasks

// The last group whose first task is not after `task`, by the whole warp: each round leaves a 32nd.
__device__ __forceinline__ i64 group_of(const Plan &plan, i64 task, int lane) {
    i64 low = 0, high = plan.groups;
    while (high - low > 1) {
        const i64 part = (high - low + WARP - 1) / WARP, mine = low + lane * part;
        const u32 before = __ballot_sync(ALL, mine < high && plan.task[mine] <= task);
        low += (__popc(before) - 1) * part;
        high = low + part < high ? low + part : high;
    }
    return low;
}

// The flags that any probe of the group asks for; all cells of the task are emptied on the way.
__device__ __forceinline__ u32 open_cells(const Plan &plan, const Cells &cells, i64 first, i64 last, i64 place, int lane) {
    u32 wanted = 0;
    for (i64 p = first + lane; p < last; p += WARP) {
        cells.count[plan.cell[p] + place] = 0;
        cells.size[plan.cell[p] + place] = 0;
        wanted |= (u32)plan.flag[p];
    }
    __syncwarp();
    return __reduce_or_sync(ALL, wanted);
}

// Whether one of this lane's four scores may reach the theta of probe `p`, `highest` being as high as each can be.
__device__ __forceinline__ bool hopeful(const Plan &plan, const float (&highest)[2][4], int odd, i64 p, i64 last) {
    const double least = p < last ? plan.theta[p] - plan.slack : 0;
    const bool first = highest[0][odd] >= least || highest[0][odd + 2] >= least;
    return p < last && (first || highest[1][odd] >= least || highest[1][odd + 2] >= least);
}

// Put the probes [p, last), at most 8 of them, to the 32 rows of a step.
__device__ __forceinline__ void ask(const Plan &plan, const Cells &cells, const Step &step, i64 p, int lane) {
    const i64 mine = p + lane / 4;
    const char *query = mine < step.last ? scored_query(plan, mine) : nullptr;
    Sum sums[2][4] = {};
    score(sums, step.scored, step.asked, query, lane);
    const i64 pair = p + lane % 4 * 2;
#ifdef CODES
    const Bounds none = {}, of_pair[2] = {pair < step.last ? bounds_of_query(plan, pair) : none,
                                          pair + 1 < step.last ? bounds_of_query(plan, pair + 1) : none};
    float highest[2][4];
    decode(highest, sums, step.scored, step.asked, of_pair, lane);
#else
    const auto &highest = sums;
#endif
    const u32 even = __ballot_sync(ALL, hopeful(plan, highest, 0, pair, step.last));
    const u32 odd = __ballot_sync(ALL, hopeful(plan, highest, 1, pair + 1, step.last));
    if (!(even | odd)) return;
#pragma unroll 1
    for (int j = 0; j < ABREAST; ++j) {
        const u32 holders = 0x11111111u << j / 2;
        if ((j % 2 ? odd : even) & holders) judge(plan, cells, step, p + j, score_of_row(highest, j, lane), lane);
    }
}

__device__ __forceinline__ void ask_all(const Plan &plan, const Cells &cells, const Step &step, int lane) {
    for (i64 p = step.first; p < step.last; p += ABREAST) ask(plan, cells, step, p, lane);
}

struct Task {
    i64 first, last;        // its probes
    i64 place;              // which of its group's tasks it is
    const char *scored, *vectors;  // of the group's first row
    const u8 *flags;
    i64 base, end;          // the rows that are left
    u32 wanted;             // rows with one of these flags
    u32 flag;               // of this lane's row of the next step, read ahead of its use
};

// The flag of this lane's row of the step at `base`, 0 beyond the task's last row.
__device__ __forceinline__ u32 flag_at(const Task &task, int lane) {
    return task.base + lane < task.end ? task.flags[task.base + lane] : 0;
}

// The next task of the list, its cells emptied; false: none is left.
__device__ __forceinline__ bool take(Task &task, const Plan &plan, const Cells &cells, int lane) {
    i64 number = 0;
    if (lane == 0) number = atomicAdd((unsigned long long *)cells.next_task, 1ull);
    number = __shfl_sync(ALL, number, 0);
    if (number >= plan.tasks) return false;
    const i64 g = group_of(plan, number, lane);
    task.first = plan.first[g];
    task.last = plan.first[g + 1];
    task.place = number - plan.task[g];
    task.vectors = (const char *)plan.vectors[g];
    task.scored = CODED ? plan.code + (task.vectors - plan.row) / ROW_BYTES * SCORED_BYTES : task.vectors;
    task.flags = (const u8 *)plan.flags[g];
    task.base = task.place * plan.stride[g];
    task.end = task.base + plan.stride[g] < plan.rows[g] ? task.base + plan.stride[g] : plan.rows[g];
    task.flag = flag_at(task, lane);
    task.wanted = open_cells(plan, cells, task.first, task.last, task.place, lane);
    return true;
}

// The next step in which a row is asked for, of this task or of those that follow; false: none is left.
__device__ __forceinline__ bool next_step(Step &step, Task &task, const Plan &plan, const Cells &cells, int lane) {
    for (;;) {
        if (task.base >= task.end && !take(task, plan, cells, lane)) return false;
        const u32 asked = __ballot_sync(ALL, (task.flag & task.wanted) != 0);
        step = {task.scored + task.base * SCORED_BYTES, CODED ? task.vectors + task.base * ROW_BYTES : nullptr,
                task.base + lane, task.flag, asked, task.first, task.last, task.place};
        task.base += STEP_ROWS;
        task.flag = flag_at(task, lane);
        if (asked) return true;
    }
}

// -- kernels

#ifdef RING_WARPS
// -- rings: each warp has RING_STAGES steps on their way into shared memory, and scores the oldest

constexpr int STEP_BYTES = STEP_ROWS * SCORED_BYTES;

// Have the rows that are asked for brought to `target`.
__device__ __forceinline__ void fetch(char *target, const Step &step, i64 *barrier, int lane) {
    if (lane == 0) expect(barrier, __popc(step.asked) * SCORED_BYTES);
    __syncwarp();
    if (step.asked == ALL) {
        if (lane == 0) bulk_copy(target, step.scored, STEP_BYTES, barrier);
    } else if (step.asked >> lane & 1) {
        bulk_copy(target + lane * SCORED_BYTES, step.scored + lane * SCORED_BYTES, SCORED_BYTES, barrier);
    }
}

// Fill the cells of all tasks. Shared memory: RING_WARPS * RING_STAGES * (STEP_BYTES + 8) bytes.
extern "C" __global__ void __launch_bounds__(RING_WARPS * WARP, 1) scan(const Plan plan, const Cells cells) {
    const int lane = threadIdx.x % WARP, ring = threadIdx.x / WARP * RING_STAGES;
    char *rows = shared_memory + ring * STEP_BYTES;
    i64 *barriers = (i64 *)(shared_memory + RING_WARPS * RING_STAGES * STEP_BYTES) + ring;
    if (lane < RING_STAGES) begin_barrier(barriers + lane);
    __syncwarp();
    Task task = {};
    Step steps[RING_STAGES];
    bool there[RING_STAGES];
#pragma unroll
    for (int s = 0; s < RING_STAGES; ++s) {
        there[s] = next_step(steps[s], task, plan, cells, lane);
        if (there[s]) fetch(rows + s * STEP_BYTES, steps[s], barriers + s, lane);
    }
    for (u32 parity = 0;; parity ^= 1) {
#pragma unroll
        for (int s = 0; s < RING_STAGES; ++s) {
            if (!there[s]) return;  // steps end in order, so nothing is on its way
            wait_for(barriers + s, parity);
            steps[s].scored = rows + s * STEP_BYTES;
            ask_all(plan, cells, steps[s], lane);
            __syncwarp();  // all have read before other rows come
            there[s] = next_step(steps[s], task, plan, cells, lane);
            if (there[s]) fetch(rows + s * STEP_BYTES, steps[s], barriers + s, lane);
        }
    }
}
#else
// Fill the cells of all tasks. Any grid of blocks of BLOCK_THREADS does; the card should be full.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, BLOCKS_PER_SM) scan(const Plan plan, const Cells cells) {
    const int lane = threadIdx.x % WARP;
    Task task = {};
    Step step;
    while (next_step(step, task, plan, cells, lane)) ask_all(plan, cells, step, lane);
}
#endif

// Add up the counts of each probe: a warp a probe.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS) tally(const Plan plan, const Cells cells, const Found found) {
    const i64 p = ((i64)blockIdx.x * BLOCK_THREADS + threadIdx.x) / WARP;
    const int lane = threadIdx.x % WARP;
    if (p >= plan.probes) return;
    i64 count = 0;
    for (i64 cell = plan.cell[p] + lane; cell < plan.cell[p + 1]; cell += WARP) count += cells.count[cell];
    for (int other = WARP / 2; other > 0; other /= 2) count += __shfl_xor_sync(ALL, count, other);
    if (lane) return;
    found.count[plan.place[p]] = count;
    found.kept[plan.place[p]] = count < plan.k[p] ? count : plan.k[p];
    if (p == 0) *cells.next_task = found.starts[0] = 0;
}

struct Head {
    double score;
    i64 row;                // -1: no row is left
};

__device__ __forceinline__ bool before(const Head &a, const Head &b) {
    return a.row >= 0 && (b.row < 0 || a.score > b.score || (a.score == b.score && a.row < b.row));
}

// The best row that is left in this lane's cells of probe p: every 32nd. A cell's `count` is how many
// rows of its list were taken.
__device__ __forceinline__ Head best_left(const Plan &plan, const Cells &cells, i64 p, int lane, i64 &cell) {
    Head best = {0, -1};
    for (i64 c = plan.cell[p] + lane; c < plan.cell[p + 1]; c += WARP) {
        const i64 at = plan.list[p] + (c - plan.cell[p]) * plan.room[p] + cells.count[c];
        if (cells.count[c] == cells.size[c]) continue;
        const Head head = {cells.scores[at], cells.rows[at]};
        if (before(head, best)) {
            best = head;
            cell = c;
        }
    }
    return best;
}

// Write the best rows of each probe, best first: a warp a probe. Overwrites the cells' counts.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS) merge(const Plan plan, const Cells cells, const Found found) {
    const i64 p = ((i64)blockIdx.x * BLOCK_THREADS + threadIdx.x) / WARP;
    const int lane = threadIdx.x % WARP;
    if (p >= plan.probes) return;
    for (i64 c = plan.cell[p] + lane; c < plan.cell[p + 1]; c += WARP) cells.count[c] = 0;
    i64 cell = 0;
    Head mine = best_left(plan, cells, p, lane, cell);
    for (i64 at = found.starts[plan.place[p]]; at < found.starts[plan.place[p] + 1]; ++at) {
        Head best = mine;
        for (int other = WARP / 2; other > 0; other /= 2) {
            const Head theirs = {__shfl_xor_sync(ALL, best.score, other), __shfl_xor_sync(ALL, best.row, other)};
            if (before(theirs, best)) best = theirs;
        }
        if (mine.row == best.row) {  // rows are in one cell only
            found.scores[at] = best.score;
            found.rows[at] = best.row;
            ++cells.count[cell];
            mine = best_left(plan, cells, p, lane, cell);
        }
    }
}
