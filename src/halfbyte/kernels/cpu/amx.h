// Blocks of rows by AMX: a tile register holds the codes of 16 rows of activations for one group, another the group's eight
// words of one weight tile, which lie as the instruction wants them; a group's integer sums stay apart because a tile of
// 32 k is half of what the instruction could take. Included by products.cpp where the compiler is told of AMX.
#pragma once
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace halfbyte::amx {

constexpr int ROWS = 16;

// Linux gives a process the tile registers when it asks for them.
inline bool allowed() {
    constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool answer = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
    return answer;
}

// Tile registers are a thread's from here to the end of the object's life, if allowed. 0: codes [16][32]; 1: words [8][64];
// 2 to 5: sums [16][16].
struct Registers {
    Registers() {
        if (!allowed()) return;
        alignas(64) uint8_t config[64] = {};
        config[0] = 1;  // palette
        auto shape = [&](int tile, uint8_t rows, uint16_t bytes) {
            std::memcpy(config + 16 + 2 * tile, &bytes, 2);
            config[48 + tile] = rows;
        };
        shape(0, ROWS, GROUP);
        shape(1, 8, 64);
        for (int tile = 2; tile < 6; tile++) shape(tile, ROWS, 64);
        _tile_loadconfig(config);
    }
    ~Registers() {
        if (allowed()) _tile_release();
    }
    Registers(const Registers&) = delete;
    Registers& operator=(const Registers&) = delete;
};

template <int CHUNK>
struct Scratch {
    int8_t codes[CHUNK][ROWS][GROUP];
    float scales[CHUNK][ROWS];
    int32_t starts[CHUNK][ROWS];
    int32_t sums[2][CHUNK][ROWS][16];
};

// The sums of `groups` groups of 16 rows with one tile, into sums[groups][16][16].
HB_INLINE void multiply(const int8_t (*codes)[ROWS][GROUP], const uint8_t* words, int64_t group_bytes, int64_t word_bytes,
                        int64_t groups, int32_t (*sums)[ROWS][16]) {
    asm volatile("" ::: "memory");  // compilers do not know that tile registers are loaded from memory
    for (int64_t g = 0; g < groups; g += 4) {
#define HB_GROUP(i, tile)                                                  \
    if (g + i < groups) {                                                  \
        _tile_zero(tile);                                                  \
        _tile_loadd(0, codes[g + i], GROUP);                               \
        _tile_loadd(1, words + (g + i) * group_bytes, word_bytes);         \
        _tile_dpbsud(tile, 0, 1);                                          \
        _tile_stored(tile, sums[g + i], 64);                               \
    }
        HB_GROUP(0, 2)
        HB_GROUP(1, 3)
        HB_GROUP(2, 4)
        HB_GROUP(3, 5)
#undef HB_GROUP
    }
}

// Groups [begin, end) of T tiles, unpacked, for `count` rows, at most 16. `row(i)` is a row's records, `out(i)` its results.
template <int CHUNK, int T, class Row, class Out>
void chunk_rows(const uint8_t* words, const Floats (*weight_scales)[T], int64_t begin, int64_t end, int64_t count, Row&& row,
                Out&& out, Scratch<CHUNK>& s) {
    const int64_t groups = end - begin;
    for (int64_t i = 0; i < ROWS; i++)
        for (int64_t g = 0; g < groups; g++) {
            if (i < count) {
                const CodedGroup& group = row(i)[begin + g];
                std::memcpy(s.codes[g][i], group.codes, GROUP);
                s.scales[g][i] = group.scale;
                s.starts[g][i] = group.start;
            } else {
                std::memset(s.codes[g][i], 0, GROUP);
            }
        }
    // A tile's sums are turned into numbers while the next tile's are made.
    constexpr int64_t group_bytes = 8 * T * 64, word_bytes = T * 64;
    multiply(s.codes, words, group_bytes, word_bytes, groups, s.sums[0]);
    for (int t = 0; t < T; t++) {
        if (t + 1 < T)
            multiply(s.codes, words + 64 * (t + 1), group_bytes, word_bytes, groups, s.sums[(t + 1) % 2]);
        for (int64_t i = 0; i < count; i++) {
            float* target = out(i) + 16 * t;
            Floats acc = begin ? load_floats(target) : splat(0.0f);
            for (int64_t g = 0; g < groups; g++) {
                Ints d{_mm512_add_epi32(_mm512_load_si512(s.sums[t % 2][g][i]), _mm512_set1_epi32(s.starts[g][i]))};
                acc = fma(to_floats(d), mul(weight_scales[g][t], splat(s.scales[g][i])), acc);
            }
            store(target, acc);
        }
    }
}

}  // namespace halfbyte::amx
