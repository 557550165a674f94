// Products of rows of activations with matrices in the layout rows16, over the sixteen lanes of vector.h.
//
// One row: a group's weights are unpacked into registers and used once. More rows: a chunk of groups of several tiles is
// unpacked into memory that stays in the first cache, then met by blocks of rows; what limits CPUs here are loads, so a
// block has as many rows times tiles as there are registers for. All run the same chain of float operations for a
// result, so a row's bits do not depend on how many rows came with it.
#include "products.h"

#include "vector.h"
#ifdef __AMX_INT8__
#include "amx.h"
#endif

namespace halfbyte {

namespace {

constexpr int64_t round64(int64_t bytes) { return (bytes + 63) / 64 * 64; }

constexpr int64_t CHUNK = 8;        // groups unpacked at a time
constexpr int64_t PREFETCH = 2048;  // bytes ahead of a pass over weights that come from memory

// Half of what 16 E8M0 bytes mean where load_half_e8m0 cannot tell: 0 and 1 are subnormal, 255 is NaN. Groups of zeros
// do not come here: rows16 gives them an ordinary scale.
__attribute__((noinline, cold)) void special_scales(const uint8_t* bytes, float* out) {
    for (int r = 0; r < TILE_ROWS; r++) {
        uint32_t e = bytes[r], bits = e == 255 ? 0x7fc00000u : e >= 2 ? (e - 1) << 23 : 0x00200000u << e;
        std::memcpy(out + r, &bits, 4);
    }
}

template <Format F>
struct Group;  // where a group's codes and scales lie in a tile, and how they are unpacked

template <>
struct Group<Format::mxfp4> {
    static constexpr int64_t code_bytes = 256, scale_bytes = 16;
    // f(j, word) for the eight words of a group.
    template <class F>
    static HB_INLINE void unpack(const uint8_t* codes, F&& f) {
        unroll<4>([&](auto j) HB_LAMBDA {
            Words low, high;
            unpack_e2m1(load_words(codes + 64 * j), low, high);
            f(std::integral_constant<int, 2 * j>{}, low);
            f(std::integral_constant<int, 2 * j + 1>{}, high);
        });
    }
    // Half the scale, because the elements come doubled.
    static HB_INLINE Floats scales(const uint8_t* p) {
        if (__builtin_expect(any_special(p), 0)) {
            alignas(64) float special[TILE_ROWS];
            special_scales(p, special);
            return load_floats(special);
        }
        return load_half_e8m0(p);
    }
    // The elements of a group as float32, 16 T apart.
    template <int T>
    static HB_INLINE void dequantize(const uint8_t* codes, const uint8_t* scale, float* out) {
        Floats s = scales(scale), offset_floats = splat(static_cast<float>(MXFP4_OFFSET));
        for (int j = 0; j < 4; j++) {
            Words low, high;
            unpack_e2m1(load_words(codes + 64 * j), low, high);
            unroll<4>([&](auto b) HB_LAMBDA {
                store(out + (8 * j + 2 * b) * 16 * T, mul(sub(to_floats(byte_of<b>(low)), offset_floats), s));
                store(out + (8 * j + 2 * b + 1) * 16 * T, mul(sub(to_floats(byte_of<b>(high)), offset_floats), s));
            });
        }
    }
};

template <>
struct Group<Format::q8> {
    static constexpr int64_t code_bytes = 512, scale_bytes = 32;
    template <class F>
    static HB_INLINE void unpack(const uint8_t* codes, F&& f) {
        unroll<8>([&](auto j) HB_LAMBDA { f(j, offset_q8(load_words(codes + 64 * j))); });
    }
    static HB_INLINE Floats scales(const uint8_t* p) { return load_f16(reinterpret_cast<const uint16_t*>(p)); }
    template <int T>
    static HB_INLINE void dequantize(const uint8_t* codes, const uint8_t* scale, float* out) {
        Floats s = scales(scale);
        for (int j = 0; j < 8; j++) {
            Words w = load_words(codes + 64 * j);
            unroll<4>([&](auto b) HB_LAMBDA { store(out + (4 * j + b) * 16 * T, mul(to_floats(byte_of<b>(w)), s)); });
        }
    }
};

// The rows of activations that one pass meets.
template <int R>
struct Block {
    const CodedGroup* coded[R];
    const float* values[R];
    float* out[R];

    Block(const Rows& a, const int32_t* token_rows, int64_t first, float* target, int64_t out_stride) {
        for (int r = 0; r < R; r++) {
            int64_t row = token_rows ? token_rows[first + r] : first + r;
            coded[r] = a.coded ? a.coded + row * a.groups : nullptr;
            values[r] = a.coded ? nullptr : a.values + row * a.value_stride;
            out[r] = target + (first + r) * out_stride;
        }
    }
};

// T tiles for one row, weights through registers: T streams, of which memory gives more a second than of one.
template <Format F, int T>
void tiles_for_one_row(const uint8_t* tile, int64_t tile_bytes, int64_t groups, const CodedGroup* a, float* out) {
    const int64_t scales = round64(groups * Group<F>::code_bytes);
    Floats acc[T];
    unroll<T>([&](auto t) HB_LAMBDA { acc[t] = splat(0.0f); });
    for (int64_t g = 0; g < groups; g++, a++) {
        Floats scale = splat(a->scale);
        unroll<T>([&](auto t) HB_LAMBDA {
            const uint8_t* codes = tile + t * tile_bytes + g * Group<F>::code_bytes;
            unroll<Group<F>::code_bytes / 64>([&](auto line) HB_LAMBDA { __builtin_prefetch(codes + PREFETCH + 64 * line); });
            __builtin_prefetch(tile + t * tile_bytes + scales + g * Group<F>::scale_bytes + PREFETCH / 8);
            Dot<F> dot(a);
            Group<F>::unpack(codes, [&](auto j, Words w) HB_LAMBDA { dot.template add<j>(w); });
            Floats weight_scales = Group<F>::scales(tile + t * tile_bytes + scales + g * Group<F>::scale_bytes);
            acc[t] = fma(to_floats(dot.sum()), mul(weight_scales, scale), acc[t]);
        });
    }
    unroll<T>([&](auto t) HB_LAMBDA { store(out + 16 * t, acc[t]); });
}

// Groups of T tiles side by side, unpacked: every code of a row that is loaded meets T words.
template <int T>
struct Chunk {
    Words words[CHUNK][8][T];
    Floats scales[CHUNK][T];
};

template <Format F, int T, bool SIGNED = false>
HB_INLINE void unpack_chunk(const uint8_t* tile, int64_t tile_bytes, int64_t groups, int64_t begin, int64_t end, Chunk<T>& chunk) {
    for (int t = 0; t < T; t++, tile += tile_bytes) {
        const uint8_t* scales = tile + round64(groups * Group<F>::code_bytes);
        for (int64_t line = 0; line < CHUNK * Group<F>::scale_bytes; line += 64)
            __builtin_prefetch(scales + end * Group<F>::scale_bytes + line);
        for (int64_t g = begin; g < end; g++) {
            const uint8_t* codes = tile + g * Group<F>::code_bytes;
            Words w[8];
            Group<F>::unpack(codes, [&](auto j, Words word) HB_LAMBDA { w[j] = word; });
#ifdef __AMX_INT8__
            if (SIGNED) unroll<8>([&](auto j) HB_LAMBDA { w[j] = amx::as_signed<F>(w[j]); });
#endif
            arrange(w);
            unroll<8>([&](auto j) HB_LAMBDA { chunk.words[g - begin][j][t] = w[j]; });
            chunk.scales[g - begin][t] = Group<F>::scales(scales + g * Group<F>::scale_bytes);
        }
    }
}

// Codes that the next chunk will unpack. They are fetched while rows are multiplied, some at every group, because a CPU
// has room for a dozen requests at a time.
struct Ahead {
    const uint8_t* codes;  // of the group that follows group 0 by a chunk
    int64_t tile_bytes;
    int first, last;       // tiles
};

// Groups [begin, end), at most CHUNK of them, for R rows. Sums lie in `out` between chunks.
template <Format F, int R, int T>
void chunk_rows(const Chunk<T>& chunk, int64_t begin, int64_t end, const Block<R>& b, const Ahead& ahead) {
    Floats acc[R * T];
    unroll<R * T>([&](auto i) HB_LAMBDA { acc[i] = begin ? load_floats(b.out[i / T] + i % T * 16) : splat(0.0f); });
    for (int64_t g = begin; g < end; g++) {
        for (int t = ahead.first; t < ahead.last; t++)
            unroll<Group<F>::code_bytes / 64>([&](auto line) HB_LAMBDA {
                __builtin_prefetch(ahead.codes + t * ahead.tile_bytes + g * Group<F>::code_bytes + 64 * line);
            });
        const CodedGroup* a[R];
        unroll<R>([&](auto r) HB_LAMBDA {
            a[r] = b.coded[r] + g;
            asm("" : "+r"(a[r]));  // one address, not one for every field
        });
        Ints d[R * T];
        dot_block<F, R, T>(&chunk.words[g - begin][0][0], a, d);
        unroll<R * T>([&](auto i) HB_LAMBDA {
            Floats scale = mul(chunk.scales[g - begin][i % T], splat(a[i / T]->scale));
            acc[i] = fma(to_floats(d[i]), scale, acc[i]);
        });
    }
    unroll<R * T>([&](auto i) HB_LAMBDA { store(b.out[i / T] + i % T * 16, acc[i]); });
}

// f(Block<R>) for all rows, in blocks of MOST and one smaller block at the end.
template <int MOST, class F>
HB_INLINE void in_blocks(const Rows& a, const int32_t* token_rows, int64_t count, float* out, int64_t out_stride, F&& f) {
    int64_t first = 0;
    for (; first + MOST <= count; first += MOST) f(Block<MOST>(a, token_rows, first, out, out_stride));
    unroll<MOST - 1>([&](auto r) HB_LAMBDA {
        if (count - first == r + 1) f(Block<r + 1>(a, token_rows, first, out, out_stride));
    });
}

// What a call works on: T tiles from `tile`, results from `out`.
struct Call {
    const Matrix& m;
    const Rows& a;
    const int32_t* token_rows;
    int64_t count, out_stride;
};

#ifdef __AMX_INT8__
// As chunk_rows, for all rows of a call.
template <Format F, int T>
void chunk_rows_by_amx(const Call& c, const Chunk<T>& chunk, int64_t begin, int64_t end, float* out, const uint8_t* ahead) {
    alignas(64) amx::Scratch<CHUNK> scratch;
    const int64_t blocks = (c.count + amx::ROWS - 1) / amx::ROWS, tile_bytes = c.m.tile_bytes();
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t first = block * amx::ROWS, rows = c.count - first < amx::ROWS ? c.count - first : amx::ROWS;
        for (int64_t t = block * T / blocks; t < (block + 1) * T / blocks; t++)
            for (int64_t line = 0; line < CHUNK * Group<F>::code_bytes; line += 64)
                __builtin_prefetch(ahead + t * tile_bytes + line);
        auto row = [&](int64_t i) { return c.a.coded + (c.token_rows ? c.token_rows[first + i] : first + i) * c.a.groups; };
        auto target = [&](int64_t i) { return out + (first + i) * c.out_stride; };
        amx::chunk_rows<CHUNK, T>(reinterpret_cast<const uint8_t*>(chunk.words), chunk.scales, begin, end, rows, row, target,
                                  scratch);
    }
}
#endif

// `blocks` blocks of T tiles, so many that a chunk of each is read before the next chunk.
template <Format F, int T>
void quantised_tiles(const Call& c, const uint8_t* tile, int64_t blocks, float* out) {
    const int64_t groups = c.m.groups(), tile_bytes = c.m.tile_bytes();
    const int64_t row_blocks = (c.count + BLOCK_ROWS - 1) / BLOCK_ROWS;
    alignas(64) Chunk<T> chunk;
#ifdef __AMX_INT8__
    const amx::Registers registers(c.count >= amx::FEWEST_ROWS && amx::allowed());
#endif
    for (int64_t begin = 0; begin < groups; begin += CHUNK) {
        const int64_t end = begin + CHUNK < groups ? begin + CHUNK : groups;
        for (int64_t i = 0; i < blocks; i++) {
            const uint8_t* first = tile + i * T * tile_bytes;
            const uint8_t* next = first + CHUNK * Group<F>::code_bytes;  // of group 0: what is unpacked a chunk later
#ifdef __AMX_INT8__
            if (registers.wanted) {
                unpack_chunk<F, T, true>(first, tile_bytes, groups, begin, end, chunk);
                chunk_rows_by_amx<F, T>(c, chunk, begin, end, out + i * T * TILE_ROWS, next + begin * Group<F>::code_bytes);
                continue;
            }
#endif
            unpack_chunk<F, T>(first, tile_bytes, groups, begin, end, chunk);
            int64_t row_block = 0;
            in_blocks<BLOCK_ROWS>(c.a, c.token_rows, c.count, out + i * T * TILE_ROWS, c.out_stride, [&](const auto& b) {
                Ahead ahead{next, tile_bytes, static_cast<int>(row_block * T / row_blocks),
                            static_cast<int>((row_block + 1) * T / row_blocks)};
                chunk_rows<F>(chunk, begin, end, b, ahead);
                row_block++;
            });
        }
    }
}

// Float32 activations: a group of `length` k (32 but for a ragged last one) of T tiles, weight(k, t) being 16 float32.
template <int T, int R, class Weight>
HB_INLINE void meet_dense(Weight&& weight, const Block<R>& b, int64_t group, int64_t length) {
    Floats partial[R * T];
    const float* x[R];
    unroll<R * T>([&](auto i) HB_LAMBDA { partial[i] = splat(0.0f); });
    unroll<R>([&](auto r) HB_LAMBDA { x[r] = b.values[r] + group * GROUP; });
    for (int64_t k = 0; k < length; k++) {
        Floats w[T];
        unroll<T>([&](auto t) HB_LAMBDA { w[t] = weight(k, t); });
        unroll<R>([&](auto r) HB_LAMBDA {
            Floats v = splat(x[r][k]);
            unroll<T>([&](auto t) HB_LAMBDA { partial[r * T + t] = fma(w[t], v, partial[r * T + t]); });
        });
    }
    unroll<R>([&](auto r) HB_LAMBDA {
        unroll<T>([&](auto t) HB_LAMBDA {
            float* acc = b.out[r] + 16 * t;
            store(acc, group ? add(load_floats(acc), partial[r * T + t]) : partial[r * T + t]);
        });
    });
}

template <Format F>
struct Element;
template <>
struct Element<Format::f32> {
    static constexpr int64_t bytes = 4;
    static HB_INLINE Floats load(const uint8_t* p) { return load_floats(reinterpret_cast<const float*>(p)); }
};
template <>
struct Element<Format::f16> {
    static constexpr int64_t bytes = 2;
    static HB_INLINE Floats load(const uint8_t* p) { return load_f16(reinterpret_cast<const uint16_t*>(p)); }
};
template <>
struct Element<Format::bf16> {
    static constexpr int64_t bytes = 2;
    static HB_INLINE Floats load(const uint8_t* p) { return load_bf16(reinterpret_cast<const uint16_t*>(p)); }
};

// A group of one tile as float32 [32][T][16], from column t on.
template <Format F, int T>
HB_INLINE void to_dense(const uint8_t* tile, int64_t groups, int64_t g, float* out) {
    if constexpr (F == Format::mxfp4 || F == Format::q8) {
        const uint8_t* scales = tile + round64(groups * Group<F>::code_bytes);
        Group<F>::template dequantize<T>(tile + g * Group<F>::code_bytes, scales + g * Group<F>::scale_bytes, out);
    } else {
        constexpr int64_t bytes = Element<F>::bytes * TILE_ROWS;
        for (int k = 0; k < GROUP; k++) store(out + k * T * 16, Element<F>::load(tile + (g * GROUP + k) * bytes));
    }
}

// Weights that are numbers already, for a few rows: not worth a copy.
template <Format F, int T, int R>
void dense_for_few_rows(const uint8_t* tile, int64_t tile_bytes, int64_t cols, const Block<R>& b) {
    constexpr int64_t bytes = Element<F>::bytes * TILE_ROWS;
    for (int64_t k = 0; k < cols; k += GROUP) {
        auto weight = [&](int64_t i, int64_t t) HB_LAMBDA {
            const uint8_t* p = tile + t * tile_bytes + (k + i) * bytes;
            __builtin_prefetch(p + PREFETCH);
            return Element<F>::load(p);
        };
        meet_dense<T>(weight, b, k / GROUP, cols - k < GROUP ? cols - k : GROUP);
    }
}

// A group of T tiles as float32 [32][T][16], for all rows. One function for all formats: compilers take long over it.
template <int T>
void dense_group(const Call& c, const float* dense, int64_t group, int64_t length, float* out) {
    in_blocks<DENSE_ROWS>(c.a, c.token_rows, c.count, out, c.out_stride, [&](const auto& b) {
        auto weight = [&](int64_t k, int64_t t) HB_LAMBDA { return load_floats(dense + (k * T + t) * 16); };
        meet_dense<T>(weight, b, group, length);
    });
}

template <Format F, int T>
void dense_tiles(const Call& c, const uint8_t* tile, float* out) {
    const int64_t groups = c.m.groups(), tile_bytes = c.m.tile_bytes();
    alignas(64) float dense[GROUP * T * 16];
    for (int64_t g = 0; g < groups; g++) {
        for (int t = 0; t < T; t++) to_dense<F, T>(tile + t * tile_bytes, groups, g, dense + t * 16);
        dense_group<T>(c, dense, g, c.m.cols - g * GROUP < GROUP ? c.m.cols - g * GROUP : GROUP, out);
    }
}

template <Format F, int T>
void one_row(const Call& c, const uint8_t* tile, float* out) {
    const Block<1> b(c.a, c.token_rows, 0, out, c.out_stride);
    if constexpr (F == Format::mxfp4 || F == Format::q8)
        tiles_for_one_row<F, T>(tile, c.m.tile_bytes(), c.m.groups(), b.coded[0], out);
    else
        dense_for_few_rows<F, T>(tile, c.m.tile_bytes(), c.m.cols, b);
}

// So many rows are met by weights straight from where they lie, by as many tiles at a time as there are registers for.
constexpr int FEW_ROWS = BLOCK_TILES > 1 ? 8 : DENSE_ROWS;
constexpr int few_tiles(int rows) { return rows * BLOCK_TILES <= 16 ? BLOCK_TILES : BLOCK_TILES > 1 ? BLOCK_TILES / 2 : 1; }

// How many tiles were done: 0 where there are too few.
template <Format F>
int64_t few_rows(const Call& c, const uint8_t* tile, int64_t tiles, float* out) {
    int64_t done = 0;
    unroll<FEW_ROWS>([&](auto r) {
        constexpr int R = r + 1, T = few_tiles(R);
        if (R == 1 || c.count != R || tiles < T) return;
        dense_for_few_rows<F, T>(tile, c.m.tile_bytes(), c.m.cols, Block<R>(c.a, c.token_rows, 0, out, c.out_stride));
        done = T;
    });
    return done;
}

template <Format F>
void all_tiles(const Call& c, const uint8_t* tile, int64_t tiles, float* out) {
    constexpr bool quantised = F == Format::mxfp4 || F == Format::q8;
    const int64_t tile_bytes = c.m.tile_bytes();
    const bool coded = quantised && c.a.coded;
    while (tiles) {
        int64_t done = 1;
        if (c.count == 1 && coded == quantised) {
            if (tiles >= STREAMS) one_row<F, STREAMS>(c, tile, out), done = STREAMS;
            else one_row<F, 1>(c, tile, out);
        } else if (coded) {
            if constexpr (quantised) {
                done = tiles < STREAMS ? tiles : STREAMS;
                const int64_t blocks = done / BLOCK_TILES;
                if (blocks) quantised_tiles<F, BLOCK_TILES>(c, tile, blocks, out), done = blocks * BLOCK_TILES;
                else quantised_tiles<F, 1>(c, tile, done, out);
            }
        } else {
            done = 0;
            if constexpr (!quantised)
                if (c.count <= FEW_ROWS) done = few_rows<F>(c, tile, tiles, out);
            if (!done) {
                done = tiles >= BLOCK_TILES ? BLOCK_TILES : 1;
                if (done == 1) dense_tiles<F, 1>(c, tile, out);
                else dense_tiles<F, BLOCK_TILES>(c, tile, out);
            }
        }
        tile += done * tile_bytes;
        out += done * TILE_ROWS;
        tiles -= done;
    }
}

}  // namespace

int64_t Matrix::tile_bytes() const {
    switch (format) {
        case Format::mxfp4: return round64(groups() * 256) + round64(groups() * 16);
        case Format::q8: return round64(groups() * 512) + round64(groups() * 32);
        case Format::f32: return groups() * GROUP * TILE_ROWS * 4;
        default: return groups() * GROUP * TILE_ROWS * 2;
    }
}

void product(const Matrix& m, int64_t tile_begin, int64_t tile_end, const Rows& a, const int32_t* token_rows, int64_t count,
             float* out, int64_t out_stride) {
    const Call call{m, a, token_rows, count, out_stride};
    const uint8_t* first = m.data + tile_begin * m.tile_bytes();
    const int64_t tiles = tile_end - tile_begin;
    switch (m.format) {
        case Format::mxfp4: all_tiles<Format::mxfp4>(call, first, tiles, out); break;
        case Format::q8: all_tiles<Format::q8>(call, first, tiles, out); break;
        case Format::bf16: all_tiles<Format::bf16>(call, first, tiles, out); break;
        case Format::f16: all_tiles<Format::f16>(call, first, tiles, out); break;
        case Format::f32: all_tiles<Format::f32>(call, first, tiles, out); break;
    }
    // Padding has zero weights, but zero times an activation of NaN is NaN.
    for (int64_t r = m.rows - tile_begin * TILE_ROWS; r < (tile_end - tile_begin) * TILE_ROWS; r++)
        for (int64_t i = 0; i < count; i++) out[i * out_stride + r] = 0.0f;
}

const char* instruction_set() {
#ifdef __AMX_INT8__
    if (amx::allowed()) return "avx512-amx";
#endif
    return INSTRUCTION_SET;
}

}  // namespace halfbyte
