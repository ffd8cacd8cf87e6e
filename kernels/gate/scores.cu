// The recurrence gate on tensor cores: one pass over the rows of many segments (see cuda_gate.py).
//
// A probe puts one query to one segment; the probes of a segment are a group. A task is a range of a
// group's rows, and a cell is what one task finds for one probe: how many rows reach the threshold, and
// the best of them with exact scores. `scan` fills the cells, `tally` adds up their counts, `merge`
// joins their lists. Plan and cells are laid out as plan.py says, and are the same on the CPU (cpu_gate.py).
//
// Each warp works by itself and takes a task at a time, so no block ever synchronises. It goes over the
// rows in steps of 32: scores on tensor cores, which are within `slack` of the exact ones (kernels/error_bounds.py);
// rows for which that leaves open whether they count, or belong to the best, are scored again in fp64,
// which is exact. So what is found does not depend on which warp finds it.
//
// Compiled with -DDIM=<values of a vector> for sm_80 or later: this file, then gate.cu, as one text. No header
// is included, so that NVRTC needs nothing else. tests/support/kernels/cuda_shim/ compiles the same text for the host.
//
// With -DCODES the tensor cores score int8 codes of rows and queries (kernels/arena/row_codes.py), half the bytes.
// Their scores are within a bound of each pair of the exact ones, and what that leaves open reads the fp16 row.
//
// With -DRING_WARPS=<warps of a block> -DRING_STAGES=<steps of a warp>, for sm_90 or later, `scan` has the
// copy engine bring the rows of the next steps into shared memory while a warp scores one: see "rings".

typedef long long i64;
typedef unsigned int u32;
typedef unsigned char u8;

constexpr int WARP = 32;
constexpr u32 ALL = 0xffffffffu;
constexpr int STEP_ROWS = 32;                       // rows scored together: two mma tiles
constexpr int ABREAST = 8;                          // probes scored together: the columns of an mma
constexpr int PIECES = (DIM + 7) / 8;               // a row in pieces of 16 bytes; its padding is zeros
constexpr int ROW_BYTES = PIECES * 16;
#ifdef CODES
typedef int Sum;
constexpr bool CODED = true;
constexpr int SCORED_PIECES = (DIM + 15) / 16;      // of a code, without its bounds
constexpr int SCORED_BYTES = SCORED_PIECES * 16 + 16;
#else
typedef float Sum;
constexpr bool CODED = false;
constexpr int SCORED_PIECES = PIECES;               // what the tensor cores score are the rows themselves
constexpr int SCORED_BYTES = ROW_BYTES;
#endif
constexpr int COLUMN_STEPS = (SCORED_PIECES + 3) / 4;       // one piece for each of 4 lanes
constexpr int BATCH = COLUMN_STEPS < 3 ? COLUMN_STEPS : 3;  // 12 loads of 16 bytes of rows on their way
constexpr int BLOCK_THREADS = 128;
#ifndef RING_WARPS
constexpr int BLOCKS_PER_SM = 4;                    // 16 warps, each with some 6 KB on their way
#endif

struct Plan {
    const char *queries;    // [q] rows as in the arena
    const i64 *place;       // [p] the caller's number of the probe
    const i64 *query;       // [p]
    const i64 *limit;       // [p] only rows below it
    const i64 *flag;        // [p] only rows with this flag
    const double *theta;    // [p]
    const i64 *k;           // [p]
    const i64 *room;        // [p] how many rows a cell keeps
    const i64 *cell;        // [p + 1] its first cell, one for each task of the group
    const i64 *list;        // [p + 1] where its first cell's list starts; the others follow
    const i64 *first;       // [g + 1] the group's first probe
    const i64 *vectors;     // [g] address of its rows
    const i64 *flags;       // [g] address of its flags
    const i64 *rows;        // [g]
    const i64 *stride;      // [g] rows of a task, the last one may have fewer
    const i64 *task;        // [g + 1] its first task
    const char *row;        // some row in the arena, and its code; no addresses without codes
    const char *code;
    const char *codes;      // [q] of the queries
    i64 probes;
    i64 groups;
    i64 tasks;
    double slack;
};

struct Cells {
    i64 *count;             // [c] rows that reach theta
    i64 *size;              // [c] how many of them are listed
    double *scores;         // [lists] best first, exact
    i64 *rows;              // [lists]
    i64 *next_task;         // 0 before and after each run
};

struct Found {              // for the probes as the caller numbers them
    i64 *count;             // [p]
    i64 *kept;              // [p]
    i64 *starts;            // [p + 1] sums of `kept`, formed between `tally` and `merge`
    i64 *rows;              // [starts[p]]
    double *scores;
};

// -- what the hardware does

#ifdef __CUDACC__
// sums += A * B: A is 16 rows of 16 values, B 16 values of 8 queries, spread over the warp as PTX says
__device__ __forceinline__ void mma(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same for bytes: A is 16 rows of 32 values, B 32 values of 8 queries
__device__ __forceinline__ void mma(int (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float as_float(u32 bits) { return __uint_as_float(bits); }

__device__ __forceinline__ double widen(u32 half) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"((unsigned short)half));
    return wide;
}

#ifdef RING_WARPS
extern __shared__ __align__(128) char shared_memory[];

__device__ __forceinline__ u32 shared_address(const void *place) { return (u32)__cvta_generic_to_shared(place); }

// A barrier of one warp: a phase ends when lane 0 has said how many bytes to expect and all have come.
__device__ __forceinline__ void begin_barrier(i64 *barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void expect(i64 *barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

__device__ __forceinline__ void bulk_copy(char *target, const char *source, u32 bytes, i64 *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(target)), "l"(source), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}

// Until the phase of this parity has ended; phases are numbered from 0.
__device__ __forceinline__ void wait_for(i64 *barrier, u32 parity) {
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(
                     shared_address(barrier)), "r"(parity) : "memory");
}
#endif
#endif

// -- scores

__device__ __forceinline__ uint4 piece_of(const char *row, int piece, bool wanted) {
    return wanted ? __ldg((const uint4 *)row + piece) : make_uint4(0, 0, 0, 0);
}

#ifdef RING_WARPS
constexpr bool RING = true;     // what is scored is in shared memory
#else
constexpr bool RING = false;
#endif

// A piece of what is scored of a row, where that is. Pieces in shared memory that were not copied hold any value.
__device__ __forceinline__ uint4 piece_of_row(const char *row, int piece, bool wanted) {
    if (!RING) return piece_of(row, piece, wanted);
    return piece < SCORED_PIECES ? ((const uint4 *)row)[piece] : make_uint4(0, 0, 0, 0);
}

// The sums of products of 32 rows with 8 queries. Rows that are not `asked` may have any.
//
// Lane 4g + t reads rows g, g + 8, g + 16, g + 24 and query g, of each the pieces t, t + 4, t + 8, ...
// An mma wants other columns from that lane, but all that matters to a dot product is that rows and
// queries are permuted alike. sums[i] is of rows 16i to 16i + 15, in the layout of an mma's result:
// of rows g, g, g + 8, g + 8, the queries 2t, 2t + 1, 2t, 2t + 1.
__device__ __forceinline__ void score(Sum (&sums)[2][4], const char *rows, u32 asked, const char *query, int lane) {
    const int g = lane / 4, t = lane % 4;
    const char *row = rows + g * SCORED_BYTES;
    bool reads[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) reads[i] = asked >> (g + 8 * i) & 1;
#pragma unroll 1
    for (int step = 0; step < COLUMN_STEPS; step += BATCH) {
        uint4 a[BATCH][4], b[BATCH];
#pragma unroll
        for (int s = 0; s < BATCH; ++s) {
            const int piece = 4 * (step + s) + t;
            const bool inside = SCORED_PIECES % (4 * BATCH) == 0 || piece < SCORED_PIECES;
#pragma unroll
            for (int i = 0; i < 4; ++i) a[s][i] = piece_of_row(row + 8 * i * SCORED_BYTES, piece, inside && reads[i]);
            b[s] = piece_of(query, piece, inside && query);
        }
#pragma unroll
        for (int s = 0; s < BATCH; ++s) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint4 upper = a[s][2 * i], lower = a[s][2 * i + 1];
                mma(sums[i], upper.x, lower.x, upper.y, lower.y, b[s].x, b[s].y);
                mma(sums[i], upper.z, lower.z, upper.w, lower.w, b[s].z, b[s].w);
            }
        }
    }
}

// What a code says of its vector x: the scale, and bounds of how far the scaled code is from x, and of |x|.
struct Bounds {
    float scale, error, norm;
};

__device__ __forceinline__ Bounds bounds_of(uint4 piece) { return {as_float(piece.x), as_float(piece.y), as_float(piece.z)}; }

__device__ __forceinline__ Bounds bounds_of_row(const char *rows, int row, u32 asked) {
    const char *code = rows + row * SCORED_BYTES;
    return bounds_of(RING ? ((const uint4 *)code)[SCORED_PIECES] : piece_of(code, SCORED_PIECES, asked >> row & 1));
}

// How far the score of two codes can be from the exact one, less the rounding; kernels/error_bounds.py.
__device__ __forceinline__ float distance(const Bounds &row, const Bounds &query) {
    return query.error * row.norm + (query.norm + query.error) * row.error;
}

// From sums of codes the highest that the exact scores can be, in the layout of an mma's result. `pair`: the bounds
// of queries 2t and 2t + 1.
__device__ __forceinline__ void decode(float (&highest)[2][4], const int (&sums)[2][4], const char *rows, u32 asked,
                                       const Bounds (&pair)[2], int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const Bounds row = bounds_of_row(rows, lane / 4 + 8 * i, asked);
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const int at = i % 2 * 2 + odd;
            highest[i / 2][at] = (float)sums[i / 2][at] * (row.scale * pair[odd].scale) + distance(row, pair[odd]);
        }
    }
}

// Lane r's score of row r with query j.
__device__ __forceinline__ float score_of_row(const float (&sums)[2][4], int j, int lane) {
    const int holder = lane % 8 * 4 + j / 2;
    float scores[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float *pair = &sums[i / 2][i % 2 * 2];
        scores[i] = __shfl_sync(ALL, j % 2 ? pair[1] : pair[0], holder);
    }
    const float low = lane & 8 ? scores[1] : scores[0], high = lane & 8 ? scores[3] : scores[2];
    return lane & 16 ? high : low;
}

__device__ __forceinline__ double product(u32 a, u32 b) {
    return widen(a & 0xffff) * widen(b & 0xffff) + widen(a >> 16) * widen(b >> 16);
}

// The exact score, by the whole warp, in every lane.
__device__ __forceinline__ double exact_score(const char *row, const char *query, int lane) {
    double sum = 0;
    for (int piece = lane; piece < PIECES; piece += WARP) {
        const uint4 a = CODED ? piece_of(row, piece, true) : piece_of_row(row, piece, true), b = piece_of(query, piece, true);
        sum += product(a.x, b.x) + product(a.y, b.y) + product(a.z, b.z) + product(a.w, b.w);
    }
    for (int other = WARP / 2; other > 0; other /= 2) sum += __shfl_xor_sync(ALL, sum, other);
    return sum;
}
