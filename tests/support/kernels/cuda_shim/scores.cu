// For tests, appended to gate.cu: what the tensor cores make of 32 rows and 8 queries, or of their codes; one warp.
// out: [32, 8] scores; with codes the highest that the exact ones can be, and in [32, 8] more the lowest.
extern "C" __global__ void scores(const char *rows, const char *queries, float *out) {
    const int lane = threadIdx.x % WARP;
    Sum sums[2][4] = {};
    score(sums, rows, ALL, queries + lane / 4 * SCORED_BYTES, lane);
#ifdef CODES
    Bounds of[ABREAST];
    for (int j = 0; j < ABREAST; ++j) of[j] = bounds_of(piece_of(queries + j * SCORED_BYTES, SCORED_PIECES, true));
    const Bounds pair[2] = {of[lane % 4 * 2], of[lane % 4 * 2 + 1]};
    float told[2][4];
    decode(told, sums, rows, ALL, pair, lane);
    for (int j = 0; j < ABREAST; ++j) {
        const float highest = score_of_row(told, j, lane);
        out[(WARP + lane) * ABREAST + j] = highest - 2 * distance(bounds_of_row(rows, lane, ALL), of[j]);
    }
#else
    const auto &told = sums;
#endif
    for (int j = 0; j < ABREAST; ++j) out[lane * ABREAST + j] = score_of_row(told, j, lane);
}
