// The warps of a block in turn on the host: just enough of CUDA to run gate.cu as C++.
//
// The 32 lanes of a warp are coroutines. Each runs until it meets a warp collective, leaves what it
// brings and waits; when all have come, the collective is worked out and they go on. Lanes that meet
// in different collectives, or in one at different lines, or leave while others wait, are an error. Between
// collectives lanes run one after the other, from lane 0 up or from lane 31 down, so that a missing
// barrier shows as a wrong result in one of the two orders. At each collective another warp of the block may
// go on, drawn at random; blocks run one after the other.
#pragma once

#include <algorithm>
#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <random>
#include <string>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct uint4 {
    unsigned x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace simt {

constexpr int LANES = 32;
constexpr size_t STACK_BYTES = 64 << 10;

struct Index {
    unsigned x;
};

struct Range {  // of memory that a kernel may read through __ldg; sorted, apart
    uintptr_t begin, end;
};

enum class Kind { none, ballot, reduce_or, shuffle, shuffle_xor, sync, mma, mma_bytes };
inline const char *const KIND_NAMES[] = {"none", "ballot", "reduce_or", "shfl", "shfl_xor", "syncwarp", "mma", "mma of bytes"};

struct Visit {  // what a lane brings to a collective, and what it takes away
    Kind kind;
    int line;
    unsigned mask;
    int source;  // of a shuffle
    uint64_t value;
    unsigned operands[6];
    float sums[4];
};

struct Lane {
    ucontext_t start;
    jmp_buf place;
    std::vector<char> stack = std::vector<char>(STACK_BYTES);
    bool started, done;
    Visit visit;
};

struct Warp {
    Lane lanes[LANES];
    ucontext_t home_context;
    jmp_buf home;
    int current;
    Index block, thread_base;
    void (*body)();
};

inline Warp *warp;               // the one that runs
inline unsigned seed = 0;        // of the order in which warps run
inline int cut_block = 0;        // products that an mma adds in one go, cutting bits off; 0: plain fp32
inline bool descending = false;  // the order in which lanes run
inline std::string error;
inline std::vector<Range> readable;

inline Index thread_index() { return {warp->thread_base.x + warp->current}; }

inline void fail(const std::string &text) {
    if (error.empty()) error = text;
}

inline Visit &meet(Kind kind, unsigned mask, int line) {
    Lane &lane = warp->lanes[warp->current];
    lane.visit.kind = kind;
    lane.visit.line = line;
    lane.visit.mask = mask;
    if (_setjmp(lane.place) == 0) _longjmp(warp->home, 1);
    return lane.visit;
}

inline Visit &mine() { return warp->lanes[warp->current].visit; }

inline float half_value(unsigned bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float size = exponent ? __builtin_ldexpf(1024 + fraction, exponent - 25) : __builtin_ldexpf(fraction, -24);
    return bits & 0x8000 ? -size : size;
}

// The fragments of mma.m16n8k16 with fp16 operands, as the PTX ISA tabulates them: element i of a lane.
inline void mma_all() {
    static float a[16][16], b[16][8];
    for (int l = 0; l < LANES; ++l) {
        const unsigned *operands = warp->lanes[l].visit.operands;
        const int group = l >> 2, in_group = l % 4;
        for (int i = 0; i < 8; ++i) {
            const int row = i < 2 || (4 <= i && i < 6) ? group : group + 8;
            const int column = in_group * 2 + (i & 1) + (i >= 4 ? 8 : 0);
            a[row][column] = half_value(operands[i / 2] >> 16 * (i & 1) & 0xffff);
        }
        for (int i = 0; i < 4; ++i) {
            const int row = in_group * 2 + (i & 1) + (i >= 2 ? 8 : 0);
            b[row][group] = half_value(operands[4 + i / 2] >> 16 * (i & 1) & 0xffff);
        }
    }
    for (int l = 0; l < LANES; ++l) {
        for (int i = 0; i < 4; ++i) {
            const int row = (l >> 2) + (i >= 2 ? 8 : 0), column = l % 4 * 2 + (i & 1);
            float &sum = warp->lanes[l].visit.sums[i];
            if (cut_block == 0) {
                for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
                continue;
            }
            for (int first = 0; first < 16; first += cut_block) {
                // align all addends to the largest, cut off below 2**-23 of it, add, cut to fp32
                double addends[17] = {sum}, total = 0;
                for (int k = 0; k < cut_block; ++k) addends[k + 1] = (double)a[row][first + k] * b[first + k][column];
                int largest = -1000, exponent;
                for (int k = 0; k <= cut_block; ++k)
                    if (addends[k] != 0 && (__builtin_frexp(addends[k], &exponent), exponent > largest)) largest = exponent;
                if (largest == -1000) continue;
                for (int k = 0; k <= cut_block; ++k)
                    total += __builtin_ldexp(__builtin_trunc(__builtin_ldexp(addends[k], 24 - largest)), largest - 24);
                __builtin_frexp(total, &exponent);
                sum = (float)__builtin_ldexp(__builtin_trunc(__builtin_ldexp(total, 24 - exponent)), exponent - 24);
            }
        }
    }
}

// The same for mma.m16n8k32 with bytes, whose sums are exact.
inline void mma_bytes_all() {
    static int a[16][32], b[32][8];
    const auto byte = [](unsigned word, int i) { return (int)(int8_t)(word >> 8 * (i & 3)); };
    for (int l = 0; l < LANES; ++l) {
        const unsigned *operands = warp->lanes[l].visit.operands;
        const int group = l >> 2, in_group = l % 4;
        for (int i = 0; i < 16; ++i) {
            const int row = i < 4 || (8 <= i && i < 12) ? group : group + 8;
            a[row][in_group * 4 + (i & 3) + (i >= 8 ? 16 : 0)] = byte(operands[i / 4], i);
        }
        for (int i = 0; i < 8; ++i) b[in_group * 4 + (i & 3) + (i >= 4 ? 16 : 0)][group] = byte(operands[4 + i / 4], i);
    }
    for (int l = 0; l < LANES; ++l)
        for (int i = 0; i < 4; ++i) {
            int sum;
            std::memcpy(&sum, &warp->lanes[l].visit.sums[i], sizeof sum);
            for (int k = 0; k < 32; ++k) sum += a[(l >> 2) + (i >= 2 ? 8 : 0)][k] * b[k][l % 4 * 2 + (i & 1)];
            std::memcpy(&warp->lanes[l].visit.sums[i], &sum, sizeof sum);
        }
}

inline void settle(Kind kind) {
    if (kind == Kind::mma) return mma_all();
    if (kind == Kind::mma_bytes) return mma_bytes_all();
    uint64_t values[LANES], bits = 0, any = 0;
    for (int l = 0; l < LANES; ++l) {
        values[l] = warp->lanes[l].visit.value;
        bits |= (uint64_t)(values[l] != 0) << l;
        any |= values[l];
    }
    for (int l = 0; l < LANES; ++l) {
        Visit &visit = warp->lanes[l].visit;
        if (kind == Kind::ballot) visit.value = bits;
        if (kind == Kind::reduce_or) visit.value = any;
        if (kind == Kind::shuffle) visit.value = values[visit.source & 31];
        if (kind == Kind::shuffle_xor) visit.value = values[l ^ visit.source];
    }
}

inline void enter() {
    warp->body();
    warp->lanes[warp->current].done = true;
    _longjmp(warp->home, 1);
}

inline void resume(int l) {
    Lane &lane = warp->lanes[l];
    warp->current = l;
    if (_setjmp(warp->home)) return;
    if (lane.started) _longjmp(lane.place, 1);
    lane.started = true;
    getcontext(&lane.start);
    lane.start.uc_stack.ss_sp = lane.stack.data();
    lane.start.uc_stack.ss_size = lane.stack.size();
    lane.start.uc_link = nullptr;
    makecontext(&lane.start, enter, 0);
    setcontext(&lane.start);
}

// The lanes of the running warp up to their next collective. Whether they have left; see `error`.
inline bool advance() {
    int done = 0;
    for (int i = 0; i < LANES; ++i) resume(descending ? LANES - 1 - i : i);
    for (const Lane &lane : warp->lanes) done += lane.done;
    if (done == LANES || !error.empty()) return true;
    const Visit &first = warp->lanes[0].visit;
    const std::string name = KIND_NAMES[(int)first.kind], line = std::to_string(first.line);
    for (const Lane &lane : warp->lanes) {
        if (lane.done) fail("lanes have left while others wait at " + name);
        if (lane.visit.kind != first.kind)
            fail("lanes meet in different collectives: " + name + " and " + KIND_NAMES[(int)lane.visit.kind]);
        if (lane.visit.line != first.line)
            fail("lanes meet in " + name + " at different lines: " + line + " and " + std::to_string(lane.visit.line));
        if (lane.visit.mask != 0xffffffffu) fail("a collective that does not name all lanes");
    }
    settle(first.kind);
    return false;
}

inline void run_block(void (*body)(), unsigned block, unsigned threads) {
    static std::deque<Warp> warps;
    static std::mt19937 draw;
    draw.seed(seed + block);
    static std::vector<Warp *> left;  // static: a jump out of bounds runs no destructor
    left.clear();
    warps.resize(std::max<size_t>(warps.size(), threads / LANES));
    for (unsigned t = 0; t < threads; t += LANES) {
        Warp &each = warps[t / LANES];
        each.block = {block};
        each.thread_base = {t};
        each.body = body;
        for (Lane &lane : each.lanes) lane.started = lane.done = false;
        left.push_back(&each);
    }
    while (!left.empty() && error.empty()) {
        const size_t next = draw() % left.size();
        warp = left[next];
        if (advance()) left.erase(left.begin() + next);
    }
}

// The copy engine: bytes arrive when a lane waits for them, no sooner; until then the target holds noise.
struct Copy {
    char *target;
    const char *source;
    unsigned bytes;
    const void *barrier;
};
struct Barrier {
    unsigned phase, expected;
    bool begun;
};
inline std::vector<Copy> copies;
inline std::vector<std::pair<const void *, Barrier>> barriers;

inline Barrier &barrier_at(const void *place) {
    for (auto &[at, barrier] : barriers)
        if (at == place) return barrier;
    fail("a barrier that was not begun");
    barriers.push_back({place, {}});
    return barriers.back().second;
}

inline void check_readable(const char *source, size_t bytes) {
    const uintptr_t at = (uintptr_t)source;
    const auto after = std::upper_bound(readable.begin(), readable.end(), at,
                                        [](uintptr_t address, const Range &range) { return address < range.begin; });
    if (after == readable.begin() || at + bytes > (after - 1)->end) fail("a read outside of the rows that were asked for");
    if (at % 16) fail("a read that is not aligned to 16 bytes");
}

inline sigjmp_buf out_of_bounds;
inline thread_local bool running = false;

inline void beyond(int number) {
    if (running) siglongjmp(out_of_bounds, 1);
    signal(number, SIG_DFL);  // of another thread: as without a handler
}

// Run a kernel with so many blocks; what went wrong, or nullptr. Memory that must not be touched is an error.
inline const char *launch(void (*body)(), unsigned blocks, unsigned threads) {
    static std::string told;
    error.clear();
    copies.clear();
    barriers.clear();
    if (blocks == 0) fail("a launch of no blocks");
    struct sigaction before, during = {};
    during.sa_handler = beyond;
    sigaction(SIGSEGV, &during, &before);
    running = true;
    if (sigsetjmp(out_of_bounds, 1)) fail("memory was touched beyond an array");
    for (unsigned b = 0; b < blocks && error.empty(); ++b) run_block(body, b, threads);
    running = false;
    sigaction(SIGSEGV, &before, nullptr);
    if (!copies.empty()) fail("rows are on their way to a warp that has left");
    told = error;
    return told.empty() ? nullptr : told.c_str();
}

template <class T>
uint64_t bits_of(T value) {
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    return bits;
}

template <class T>
T exchange(Kind kind, unsigned mask, T value, int source, int line) {
    mine().value = bits_of(value);
    mine().source = source;
    const uint64_t bits = meet(kind, mask, line).value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

}  // namespace simt

#define threadIdx simt::thread_index()
#define blockIdx simt::warp->block

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int line = __builtin_LINE()) {
    return simt::exchange(simt::Kind::shuffle, mask, value, source, line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int other, int line = __builtin_LINE()) {
    return simt::exchange(simt::Kind::shuffle_xor, mask, value, other, line);
}
inline unsigned __ballot_sync(unsigned mask, int value, int line = __builtin_LINE()) {
    return simt::exchange<unsigned>(simt::Kind::ballot, mask, value != 0, 0, line);
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value, int line = __builtin_LINE()) {
    return simt::exchange(simt::Kind::reduce_or, mask, value, 0, line);
}
inline void __syncwarp(int line = __builtin_LINE()) { simt::meet(simt::Kind::sync, 0xffffffffu, line); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(unsigned bits) { return __builtin_ffs((int)bits); }
inline unsigned long long atomicAdd(unsigned long long *place, unsigned long long value) {
    const unsigned long long before = *place;
    *place += value;
    return before;
}

template <class Sum>
void mma(Sum (&sums)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1, int line = __builtin_LINE()) {
    const auto kind = std::is_same_v<Sum, int> ? simt::Kind::mma_bytes : simt::Kind::mma;
    const unsigned operands[6] = {a0, a1, a2, a3, b0, b1};
    std::memcpy(simt::mine().operands, operands, sizeof operands);
    std::memcpy(simt::mine().sums, sums, sizeof sums);
    std::memcpy(sums, simt::meet(kind, 0xffffffffu, line).sums, sizeof sums);
}

inline float as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

alignas(128) inline char shared_memory[232448];

inline void begin_barrier(long long *place) {
    for (auto &[at, barrier] : simt::barriers)
        if (at == place) {
            barrier = {0, 0, true};
            return;
        }
    simt::barriers.push_back({place, {0, 0, true}});
}
inline void expect(long long *place, unsigned bytes) {
    simt::Barrier &barrier = simt::barrier_at(place);
    if (barrier.expected) simt::fail("a barrier expects bytes while others are on their way to it");
    barrier.expected = bytes;
}
inline void bulk_copy(char *target, const char *source, unsigned bytes, long long *place) {
    if (bytes % 16 || (uintptr_t)target % 16) simt::fail("a copy in bulk that is not in units of 16 bytes");
    if (target < shared_memory || target + bytes > shared_memory + sizeof shared_memory) return simt::fail("a copy beyond shared memory");
    simt::check_readable(source, bytes);
    std::memset(target, 0xff, bytes);
    simt::copies.push_back({target, source, bytes, place});
}
inline void wait_for(long long *place, unsigned parity, int line = __builtin_LINE()) {
    simt::meet(simt::Kind::sync, 0xffffffffu, line);  // the lanes before this one must not wait for its copies
    simt::Barrier &barrier = simt::barrier_at(place);
    if ((barrier.phase & 1) != parity) return;
    unsigned came = 0;
    for (const simt::Copy &copy : simt::copies)
        if (copy.barrier == place) {
            std::memcpy(copy.target, copy.source, copy.bytes);
            came += copy.bytes;
        }
    simt::copies.erase(std::remove_if(simt::copies.begin(), simt::copies.end(),
                                      [&](const simt::Copy &copy) { return copy.barrier == place; }),
                       simt::copies.end());
    if (came == 0 || came != barrier.expected) simt::fail("a wait for bytes that do not come, or are not expected");
    barrier.expected = 0;
    ++barrier.phase;
}
// Rows and queries are all that kernels read this way, or copy: a read outside of them is reported.
inline uint4 __ldg(const uint4 *place) {
    simt::check_readable((const char *)place, sizeof(uint4));
    return simt::error.empty() ? *place : uint4{};
}

inline double widen(unsigned half) { return simt::half_value(half & 0xffff); }
