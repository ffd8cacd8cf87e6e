// gate.cu as a library for the host: g++ -DDIM=... -DSOURCE='"..."' host.cpp
#include "simt.h"

#include SOURCE
#include "scores.cu"

static Plan plan;
static Cells cells;
static Found found;

// kernel: 0 scan, 1 tally, 2 merge. Structs by address. ranges: begin and end of what may be read, by pairs.
extern "C" const char *launch(int kernel, unsigned blocks, unsigned threads, const void *const *structs, int cut_block,
                              bool descending, unsigned seed, const unsigned long long *ranges, int range_count) {
    plan = *(const Plan *)structs[0];
    cells = *(const Cells *)structs[1];
    if (kernel > 0) found = *(const Found *)structs[2];
    simt::cut_block = cut_block;
    simt::descending = descending;
    simt::seed = seed;
    simt::readable.clear();
    for (int i = 0; i < range_count; ++i) simt::readable.push_back({ranges[2 * i], ranges[2 * i + 1]});
    void (*const bodies[])() = {[] { scan(plan, cells); }, [] { tally(plan, cells, found); }, [] { merge(plan, cells, found); }};
    return simt::launch(bodies[kernel], blocks, threads);
}

// rows: [32, padded dim], queries: [8, padded dim] fp16, or their codes; out: [32, 8], with codes [2, 32, 8].
extern "C" const char *tensor_scores(const char *rows, const char *queries, float *out, int cut_block) {
    static struct {
        const char *rows, *queries;
        float *out;
    } given;
    given = {rows, queries, out};
    simt::cut_block = cut_block;
    simt::readable = {{(uintptr_t)rows, (uintptr_t)rows + 32 * SCORED_BYTES}, {(uintptr_t)queries, (uintptr_t)queries + 8 * SCORED_BYTES}};
    if (rows > queries) std::swap(simt::readable[0], simt::readable[1]);
    return simt::launch([] { scores(given.rows, given.queries, given.out); }, 1, WARP);
}
