// Blocks of rows by AMX: a tile register holds the codes of 16 rows of activations for one group, another the group's eight
// words of one weight tile, which lie as the instruction wants them; a group's integer sums stay apart because a tile of
// 32 k is half of what the instruction could take. Weights are signed here, so that sums need no correction. Included by
// products.cpp where the compiler is told of AMX.
#pragma once
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace halfbyte::amx {

constexpr int ROWS = 16;
#ifndef HALFBYTE_AMX_ROWS
#define HALFBYTE_AMX_ROWS 2
#endif
constexpr int FEWEST_ROWS = HALFBYTE_AMX_ROWS;  // with fewer, dot products of vectors are faster

// Linux gives a process the tile registers when it asks for them.
inline bool allowed() {
#ifdef HALFBYTE_EMULATED_AMX  // by a test
    return true;
#else
    constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool answer = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
    return answer;
#endif
}

// Tile registers are a thread's from here to the end of the object's life, if wanted. 0 and 1: codes [16][32]; 2 and 3: words
// [8][64]; 4 to 7: sums [16][16]. Several of each, so that a group need not wait for the group before.
struct Registers {
    const bool wanted;
    explicit Registers(bool take) : wanted(take) {
        if (!wanted) return;
        alignas(64) uint8_t config[64] = {};
        config[0] = 1;  // palette
        auto shape = [&](int tile, uint8_t rows, uint16_t bytes) {
            std::memcpy(config + 16 + 2 * tile, &bytes, 2);
            config[48 + tile] = rows;
        };
        for (int i = 0; i < 2; i++) shape(i, ROWS, GROUP), shape(2 + i, 8, 64);
        for (int i = 4; i < 8; i++) shape(i, ROWS, 64);
        _tile_loadconfig(config);
    }
    ~Registers() {
        if (wanted) _tile_release();
    }
    Registers(const Registers&) = delete;
    Registers& operator=(const Registers&) = delete;
};

template <int CHUNK>
struct Scratch {
    int8_t codes[CHUNK][ROWS][GROUP];
    float scales[CHUNK][ROWS];
    int32_t sums[2][CHUNK][ROWS][16];
};

// The words of a group without the offset that makes them unsigned.
template <Format F>
HB_INLINE Words as_signed(Words w) {
    return {_mm512_sub_epi8(w.v, _mm512_set1_epi8(static_cast<char>(F == Format::mxfp4 ? MXFP4_OFFSET : Q8_OFFSET)))};
}

// The integer sums of 16 rows with group `g` of one tile, into sums[g]. Registers have numbers, so there are four of it.
HB_INLINE void multiply(int64_t g, const int8_t (*codes)[ROWS][GROUP], const uint8_t* words, int64_t word_bytes,
                        int32_t (*sums)[ROWS][16]) {
    asm volatile("" ::: "memory");  // compilers do not know that tile registers are loaded from memory
#define HB_TURN(a, b, c)              \
    _tile_zero(c);                    \
    _tile_loadd(a, codes[g], GROUP);  \
    _tile_loadd(b, words, word_bytes); \
    _tile_dpbssd(c, a, b);            \
    _tile_stored(c, sums[g], 64);     \
    break;
    switch (g % 4) {
        case 0: HB_TURN(0, 2, 4)
        case 1: HB_TURN(1, 3, 5)
        case 2: HB_TURN(0, 2, 6)
        case 3: HB_TURN(1, 3, 7)
    }
#undef HB_TURN
    asm volatile("" ::: "memory");
}

// Groups [begin, end) of T tiles, unpacked as signed words, for `count` rows, at most 16. `row(i)` is a row's records,
// `out(i)` its results.
template <int CHUNK, int T, class Row, class Out>
void chunk_rows(const uint8_t* words, const Floats (*weight_scales)[T], int64_t begin, int64_t end, int64_t count, Row&& row,
                Out&& out, Scratch<CHUNK>& s) {
    const int64_t groups = end - begin;
    for (int64_t i = 0; i < count; i++) {
        const CodedGroup* records = row(i) + begin;
        for (int64_t g = 0; g < groups; g++) {
            std::memcpy(s.codes[g][i], records[g].codes, GROUP);
            s.scales[g][i] = records[g].scale;
        }
    }
    for (int64_t i = count; i < ROWS; i++)
        for (int64_t g = 0; g < groups; g++) {
            std::memset(s.codes[g][i], 0, GROUP);
            s.scales[g][i] = 0.0f;
        }
    float* target[ROWS];
    for (int64_t i = 0; i < ROWS; i++) target[i] = out(i < count ? i : 0);
    constexpr int64_t group_bytes = 8 * T * 64, word_bytes = T * 64;
    // A tile's sums are turned into numbers while the next tile's are made: so long after they were stored that nobody waits.
    const auto sums_of = [&](int t, int64_t g) HB_LAMBDA {
        multiply(g, s.codes, words + g * group_bytes + 64 * t, word_bytes, s.sums[t % 2]);
    };
    for (int64_t g = 0; g < groups; g++) sums_of(0, g);
    for (int t = 0; t < T; t++) {
        Floats acc[ROWS];
        unroll<ROWS>([&](auto i) HB_LAMBDA { acc[i] = begin ? load_floats(target[i] + 16 * t) : splat(0.0f); });
        for (int64_t g = 0; g < groups; g++) {
            if (t + 1 < T) sums_of(t + 1, g);
            unroll<ROWS>([&](auto i) HB_LAMBDA {
                const Ints d{_mm512_load_si512(s.sums[t % 2][g][i])};
                acc[i] = fma(to_floats(d), mul(weight_scales[g][t], splat(s.scales[g][i])), acc[i]);
            });
        }
        unroll<ROWS>([&](auto i) HB_LAMBDA {
            if (i < count) store(target[i] + 16 * t, acc[i]);
        });
    }
}

}  // namespace halfbyte::amx
