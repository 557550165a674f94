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
#define HALFBYTE_AMX_ROWS 128
#endif
constexpr int FEWEST_ROWS = HALFBYTE_AMX_ROWS;  // with fewer, dot products of vectors are faster: measured, docs/LOG.md

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
// [8][64]; 4 and 5: sums [16][16]. Two of each, so that a group's loads need not wait for the group before.
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
        for (int i = 0; i < 2; i++) shape(i, ROWS, GROUP), shape(2 + i, 8, 64), shape(4 + i, ROWS, 64);
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
    int32_t sums[2][ROWS][16];
};

// The words of a group without the offset that makes them unsigned.
template <Format F>
HB_INLINE Words as_signed(Words w) {
    return {_mm512_sub_epi8(w.v, _mm512_set1_epi8(static_cast<char>(F == Format::mxfp4 ? MXFP4_OFFSET : Q8_OFFSET)))};
}

// The integer sums of 16 rows with one group of one tile. Registers have numbers, so there are two of it.
template <int TURN>
HB_INLINE void multiply(const int8_t (*codes)[GROUP], const uint8_t* words, int64_t word_bytes, int32_t (*sums)[16]) {
    asm volatile("" ::: "memory");  // compilers do not know that tile registers are loaded from memory
    if constexpr (TURN == 0) {
        _tile_zero(4);
        _tile_loadd(0, codes, GROUP);
        _tile_loadd(2, words, word_bytes);
        _tile_dpbssd(4, 0, 2);
        _tile_stored(4, sums, 64);
    } else {
        _tile_zero(5);
        _tile_loadd(1, codes, GROUP);
        _tile_loadd(3, words, word_bytes);
        _tile_dpbssd(5, 1, 3);
        _tile_stored(5, sums, 64);
    }
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
    for (int t = 0; t < T; t++) {
        Floats acc[ROWS];
        unroll<ROWS>([&](auto i) HB_LAMBDA { acc[i] = begin ? load_floats(target[i] + 16 * t) : splat(0.0f); });
        // A group's sums are turned into numbers while the next group's are made.
        const auto sums_of = [&](int64_t g) HB_LAMBDA {
            const uint8_t* from = words + g * group_bytes + 64 * t;
            if (g % 2) multiply<1>(s.codes[g], from, word_bytes, s.sums[1]);
            else multiply<0>(s.codes[g], from, word_bytes, s.sums[0]);
        };
        sums_of(0);
        for (int64_t g = 0; g < groups; g++) {
            if (g + 1 < groups) sums_of(g + 1);
            unroll<ROWS>([&](auto i) HB_LAMBDA {
                const Ints d{_mm512_load_si512(s.sums[g % 2][i])};
                acc[i] = fma(to_floats(d), mul(weight_scales[g][t], splat(s.scales[g][i])), acc[i]);
            });
        }
        unroll<ROWS>([&](auto i) HB_LAMBDA {
            if (i < count) store(target[i] + 16 * t, acc[i]);
        });
    }
}

}  // namespace halfbyte::amx
