// For tests, appended to gate.cu: what the tensor cores make of 32 rows and 8 queries, one warp.
extern "C" __global__ void scores(const char *rows, const char *queries, float *out) {
    const int lane = threadIdx.x % WARP;
    float sums[2][4] = {};
    score(sums, rows, ALL, queries + lane / 4 * ROW_BYTES, lane);
    for (int j = 0; j < ABREAST; ++j) out[lane * ABREAST + j] = score_of_row(sums, j, lane);
}
