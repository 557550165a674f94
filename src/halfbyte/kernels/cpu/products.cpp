// Products of rows of activations with matrices in the layout rows16, over the sixteen lanes of vector.h.
//
// Few rows: a group's weights are unpacked into registers and met by every row, one pass over the weights. Many rows: a
// chunk of groups is unpacked once into memory that stays in the first cache, then met by blocks of rows. Both run the
// same chain of float operations for a result, so a row's bits do not depend on how many rows came with it.
#include "products.h"

#include "vector.h"

namespace halfbyte {

namespace {

constexpr int64_t round64(int64_t bytes) { return (bytes + 63) / 64 * 64; }

constexpr int64_t CHUNK = 16;              // groups unpacked at a time: 8 KiB
constexpr int64_t PREFETCH = 2048;         // bytes ahead of a pass over weights that come from memory

template <Format F>
struct Group;  // where a group's codes and scales lie in a tile, and how they are unpacked

template <>
struct Group<Format::mxfp4> {
    static constexpr int64_t code_bytes = 256, scale_bytes = 16;
    static constexpr int offset = MXFP4_OFFSET;
    static HB_INLINE void unpack(const uint8_t* codes, Words* w) {
        unroll<4>([&](auto j) HB_LAMBDA { unpack_e2m1(load_words(codes + 64 * j), w[2 * j], w[2 * j + 1]); });
    }
    // Half the scale, because the elements come doubled.
    static HB_INLINE Floats scales(const uint8_t* p) { return load_half_e8m0(p); }
    // The elements of a group as float32 [32][16].
    static HB_INLINE void dequantize(const uint8_t* codes, const uint8_t* scale, float* out) {
        Floats s = scales(scale), offset_floats = splat(static_cast<float>(MXFP4_OFFSET));
        for (int j = 0; j < 4; j++) {
            Words low, high;
            unpack_e2m1(load_words(codes + 64 * j), low, high);
            unroll<4>([&](auto b) HB_LAMBDA {
                store(out + (8 * j + 2 * b) * 16, mul(sub(to_floats(byte_of<b>(low)), offset_floats), s));
                store(out + (8 * j + 2 * b + 1) * 16, mul(sub(to_floats(byte_of<b>(high)), offset_floats), s));
            });
        }
    }
};

template <>
struct Group<Format::q8> {
    static constexpr int64_t code_bytes = 512, scale_bytes = 32;
    static constexpr int offset = Q8_OFFSET;
    static HB_INLINE void unpack(const uint8_t* codes, Words* w) {
        unroll<8>([&](auto j) HB_LAMBDA { w[j] = offset_q8(load_words(codes + 64 * j)); });
    }
    static HB_INLINE Floats scales(const uint8_t* p) { return load_f16(reinterpret_cast<const uint16_t*>(p)); }
    static HB_INLINE void dequantize(const uint8_t* codes, const uint8_t* scale, float* out) {
        Floats s = scales(scale);
        for (int j = 0; j < 8; j++) {
            Words w = load_words(codes + 64 * j);
            unroll<4>([&](auto b) HB_LAMBDA { store(out + (4 * j + b) * 16, mul(to_floats(byte_of<b>(w)), s)); });
        }
    }
};

// The rows of activations that one pass meets.
template <int R>
struct Block {
    const int8_t* codes[R];
    const float* scales[R];
    const int32_t* sums[R];
    const float* values[R];
    float* out[R];

    Block(const Rows& a, const int32_t* token_rows, int64_t first, float* target, int64_t out_stride) {
        for (int r = 0; r < R; r++) {
            int64_t row = token_rows ? token_rows[first + r] : first + r;
            codes[r] = a.codes ? a.codes + row * a.stride : nullptr;
            scales[r] = a.codes ? a.scales + row * a.groups : nullptr;
            sums[r] = a.codes ? a.sums + row * a.groups : nullptr;
            values[r] = a.codes ? nullptr : a.values + row * a.value_stride;
            out[r] = target + (first + r) * out_stride;
        }
    }
};

// acc += float(d) * (ws * as), for one group and R rows.
template <Format F, int R>
HB_INLINE void meet(const Words* w, Floats weight_scales, const Block<R>& b, int64_t group, Floats* acc) {
    const int8_t* a[R];
    int32_t start[R];
    Ints d[R];
    unroll<R>([&](auto r) HB_LAMBDA {
        a[r] = b.codes[r] + group * GROUP;
        start[r] = Group<F>::offset ? -Group<F>::offset * b.sums[r][group] : 0;
    });
    dot_group<F, R>(w, a, start, d);
    unroll<R>([&](auto r) HB_LAMBDA { acc[r] = fma(to_floats(d[r]), mul(weight_scales, splat(b.scales[r][group])), acc[r]); });
}

// One tile for R rows, weights through registers.
template <Format F, int R>
void tile_direct(const uint8_t* tile, int64_t groups, const Block<R>& b) {
    const uint8_t* scales = tile + round64(groups * Group<F>::code_bytes);
    Floats acc[R];
    unroll<R>([&](auto r) HB_LAMBDA { acc[r] = splat(0.0f); });
    for (int64_t g = 0; g < groups; g++) {
        const uint8_t* codes = tile + g * Group<F>::code_bytes;
        for (int64_t line = 0; line < Group<F>::code_bytes; line += 64) __builtin_prefetch(codes + PREFETCH + line);
        Words w[8];
        Group<F>::unpack(codes, w);
        meet<F, R>(w, Group<F>::scales(scales + g * Group<F>::scale_bytes), b, g, acc);
    }
    unroll<R>([&](auto r) HB_LAMBDA { store(b.out[r], acc[r]); });
}

// A chunk of groups, unpacked.
struct Chunk {
    Words words[CHUNK][8];
    Floats scales[CHUNK];
};

// Groups [begin, end), at most CHUNK of them, for R rows; sums go on from out unless begin is 0.
template <Format F, int R>
void chunk_rows(const Chunk& chunk, int64_t begin, int64_t end, const Block<R>& b) {
    Floats acc[R];
    unroll<R>([&](auto r) HB_LAMBDA { acc[r] = begin ? load_floats(b.out[r]) : splat(0.0f); });
    for (int64_t g = begin; g < end; g++) meet<F, R>(chunk.words[g - begin], chunk.scales[g - begin], b, g, acc);
    unroll<R>([&](auto r) HB_LAMBDA { store(b.out[r], acc[r]); });
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

template <Format F>
void quantised_tile(const uint8_t* tile, int64_t groups, const Rows& a, const int32_t* token_rows, int64_t count, float* out,
                    int64_t out_stride) {
    if (count <= DIRECT_ROWS) {
        in_blocks<DIRECT_ROWS>(a, token_rows, count, out, out_stride,
                               [&](const auto& b) { tile_direct<F>(tile, groups, b); });
        return;
    }
    alignas(64) Chunk chunk;
    const uint8_t* scales = tile + round64(groups * Group<F>::code_bytes);
    for (int64_t begin = 0; begin < groups; begin += CHUNK) {
        int64_t end = begin + CHUNK < groups ? begin + CHUNK : groups;
        for (int64_t g = begin; g < end; g++) {
            Group<F>::unpack(tile + g * Group<F>::code_bytes, chunk.words[g - begin]);
            chunk.scales[g - begin] = Group<F>::scales(scales + g * Group<F>::scale_bytes);
        }
        in_blocks<BLOCK_ROWS>(a, token_rows, count, out, out_stride,
                              [&](const auto& b) { chunk_rows<F>(chunk, begin, end, b); });
    }
}

// Float32 activations. Weights are read as float32 [k][16] by `weight(k)`; `length` is 32 but for a ragged last group.
template <int R, class Weight>
HB_INLINE void meet_dense(Weight&& weight, const Block<R>& b, int64_t group, int64_t length, Floats* acc) {
    Floats partial[R];
    unroll<R>([&](auto r) HB_LAMBDA { partial[r] = splat(0.0f); });
    const float* x[R];
    unroll<R>([&](auto r) HB_LAMBDA { x[r] = b.values[r] + group * GROUP; });
    for (int64_t k = 0; k < length; k++) {
        Floats w = weight(k);
        unroll<R>([&](auto r) HB_LAMBDA { partial[r] = fma(w, splat(x[r][k]), partial[r]); });
    }
    unroll<R>([&](auto r) HB_LAMBDA { acc[r] = add(acc[r], partial[r]); });
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

template <Format F>
void dense_tile(const uint8_t* tile, int64_t cols, const Rows& a, const int32_t* token_rows, int64_t count, float* out,
                int64_t out_stride) {
    in_blocks<DENSE_ROWS>(a, token_rows, count, out, out_stride, [&](const auto& b) {
        constexpr int R = sizeof(b.out) / sizeof(b.out[0]);
        Floats acc[R];
        unroll<R>([&](auto r) HB_LAMBDA { acc[r] = splat(0.0f); });
        for (int64_t k = 0; k < cols; k += GROUP) {
            const uint8_t* group = tile + k * 16 * Element<F>::bytes;
            auto weight = [&](int64_t i) HB_LAMBDA { return Element<F>::load(group + i * 16 * Element<F>::bytes); };
            meet_dense<R>(weight, b, k / GROUP, cols - k < GROUP ? cols - k : GROUP, acc);
        }
        unroll<R>([&](auto r) HB_LAMBDA { store(b.out[r], acc[r]); });
    });
}

// Quantised weights with float32 activations: one group at a time becomes float32, sums lie in out between groups.
template <Format F>
void exact_tile(const uint8_t* tile, int64_t cols, const Rows& a, const int32_t* token_rows, int64_t count, float* out,
                int64_t out_stride) {
    int64_t groups = (cols + GROUP - 1) / GROUP;
    const uint8_t* scales = tile + round64(groups * Group<F>::code_bytes);
    alignas(64) float values[GROUP * 16];
    for (int64_t g = 0; g < groups; g++) {
        Group<F>::dequantize(tile + g * Group<F>::code_bytes, scales + g * Group<F>::scale_bytes, values);
        int64_t length = cols - g * GROUP < GROUP ? cols - g * GROUP : GROUP;
        in_blocks<DENSE_ROWS>(a, token_rows, count, out, out_stride, [&](const auto& b) {
            constexpr int R = sizeof(b.out) / sizeof(b.out[0]);
            Floats acc[R];
            unroll<R>([&](auto r) HB_LAMBDA { acc[r] = g ? load_floats(b.out[r]) : splat(0.0f); });
            auto weight = [&](int64_t i) HB_LAMBDA { return load_floats(values + i * 16); };
            meet_dense<R>(weight, b, g, length, acc);
            unroll<R>([&](auto r) HB_LAMBDA { store(b.out[r], acc[r]); });
        });
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

Order order_for(Format format) { return format == Format::mxfp4 ? Order::evens_odds : Order::natural; }

void product(const Matrix& m, int64_t tile_begin, int64_t tile_end, const Rows& a, const int32_t* token_rows, int64_t count,
             float* out, int64_t out_stride) {
    for (int64_t t = tile_begin; t < tile_end; t++) {
        const uint8_t* tile = m.data + t * m.tile_bytes();
        float* target = out + (t - tile_begin) * TILE_ROWS;
        switch (m.format) {
            case Format::mxfp4:
                if (a.codes) quantised_tile<Format::mxfp4>(tile, m.groups(), a, token_rows, count, target, out_stride);
                else exact_tile<Format::mxfp4>(tile, m.cols, a, token_rows, count, target, out_stride);
                break;
            case Format::q8:
                if (a.codes) quantised_tile<Format::q8>(tile, m.groups(), a, token_rows, count, target, out_stride);
                else exact_tile<Format::q8>(tile, m.cols, a, token_rows, count, target, out_stride);
                break;
            case Format::bf16: dense_tile<Format::bf16>(tile, m.cols, a, token_rows, count, target, out_stride); break;
            case Format::f16: dense_tile<Format::f16>(tile, m.cols, a, token_rows, count, target, out_stride); break;
            case Format::f32: dense_tile<Format::f32>(tile, m.cols, a, token_rows, count, target, out_stride); break;
        }
        // Padding has zero weights, but zero times an activation of NaN is NaN.
        for (int64_t r = m.rows - t * TILE_ROWS; r < TILE_ROWS; r++)
            for (int64_t i = 0; i < count; i++) target[i * out_stride + r] = 0.0f;
    }
}

const char* instruction_set() { return INSTRUCTION_SET; }

}  // namespace halfbyte
