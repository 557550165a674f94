// Sixteen lanes in four NEON registers. Dot products of signed bytes by sdot, and, where the compiler is told of i8mm, by
// smmla for blocks of rows: two weight rows with two rows of activations at a time.
#pragma once
#include <arm_neon.h>

namespace halfbyte {

struct Floats { float32x4_t v[4]; };
struct Ints { int32x4_t v[4]; };
struct Words { int8x16_t v[4]; };

#ifdef __ARM_FEATURE_MATMUL_INT8
constexpr const char* INSTRUCTION_SET = "neon-i8mm";
#else
constexpr const char* INSTRUCTION_SET = "neon";
#endif
constexpr int MXFP4_OFFSET = 0, Q8_OFFSET = 0;
constexpr int STREAMS = 4, BLOCK_TILES = 1, BLOCK_ROWS = 4, DENSE_ROWS = 5;

#define HB_QUARTERS(expression)                      \
    unroll<4>([&](auto i) HB_LAMBDA { r.v[i] = expression; }); \
    return r

HB_INLINE Floats splat(float x) { Floats r; HB_QUARTERS(vdupq_n_f32(x)); }
HB_INLINE Floats load_floats(const float* p) { Floats r; HB_QUARTERS(vld1q_f32(p + 4 * i)); }
HB_INLINE void store(float* p, Floats a) { unroll<4>([&](auto i) HB_LAMBDA { vst1q_f32(p + 4 * i, a.v[i]); }); }
HB_INLINE Floats add(Floats a, Floats b) { Floats r; HB_QUARTERS(vaddq_f32(a.v[i], b.v[i])); }
HB_INLINE Floats sub(Floats a, Floats b) { Floats r; HB_QUARTERS(vsubq_f32(a.v[i], b.v[i])); }
HB_INLINE Floats mul(Floats a, Floats b) { Floats r; HB_QUARTERS(vmulq_f32(a.v[i], b.v[i])); }
HB_INLINE Floats div(Floats a, Floats b) { Floats r; HB_QUARTERS(vdivq_f32(a.v[i], b.v[i])); }
HB_INLINE Floats fma(Floats a, Floats b, Floats c) { Floats r; HB_QUARTERS(vfmaq_f32(c.v[i], a.v[i], b.v[i])); }
HB_INLINE Floats at_most(Floats x, Floats b) { Floats r; HB_QUARTERS(vminq_f32(x.v[i], b.v[i])); }  // NaN stays
HB_INLINE Floats at_least(Floats x, Floats b) { Floats r; HB_QUARTERS(vmaxq_f32(x.v[i], b.v[i])); }
HB_INLINE Floats absolute(Floats a) { Floats r; HB_QUARTERS(vabsq_f32(a.v[i])); }
// Of magnitudes, as integers: their bits order like numbers, NaN above infinity.
HB_INLINE float32x4_t larger_bits(float32x4_t a, float32x4_t b) {
    return vreinterpretq_f32_u32(vmaxq_u32(vreinterpretq_u32_f32(a), vreinterpretq_u32_f32(b)));
}
HB_INLINE Floats larger_magnitude(Floats a, Floats b) { Floats r; HB_QUARTERS(larger_bits(a.v[i], b.v[i])); }
HB_INLINE float largest(Floats a) {
    float32x4_t m = larger_bits(larger_bits(a.v[0], a.v[1]), larger_bits(a.v[2], a.v[3]));
    uint32_t bits = vmaxvq_u32(vreinterpretq_u32_f32(m));
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
HB_INLINE Floats nearest(Floats a) { Floats r; HB_QUARTERS(vrndnq_f32(a.v[i])); }
HB_INLINE Ints to_ints(Floats a) { Ints r; HB_QUARTERS(vcvtq_s32_f32(a.v[i])); }  // of whole numbers
HB_INLINE Floats to_floats(Ints a) { Floats r; HB_QUARTERS(vcvtq_f32_s32(a.v[i])); }
HB_INLINE Floats power_of_two(Ints a) {
    Floats r;
    HB_QUARTERS(vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(a.v[i], vdupq_n_s32(127)), 23)));
}
HB_INLINE Ints half(Ints a) { Ints r; HB_QUARTERS(vshrq_n_s32(a.v[i], 1)); }
HB_INLINE Ints sub(Ints a, Ints b) { Ints r; HB_QUARTERS(vsubq_s32(a.v[i], b.v[i])); }
// The fixed tree: lanes 8 apart, then 4, 2, 1.
HB_INLINE float sum(Floats a) {
    float32x4_t f = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
    float32x2_t g = vadd_f32(vget_low_f32(f), vget_high_f32(f));
    return vget_lane_f32(g, 0) + vget_lane_f32(g, 1);
}
HB_INLINE int32_t sum(Ints a) { return vaddvq_s32(vaddq_s32(vaddq_s32(a.v[0], a.v[1]), vaddq_s32(a.v[2], a.v[3]))); }
HB_INLINE void store_bytes(int8_t* p, Ints a) {
    int16x8_t low = vcombine_s16(vmovn_s32(a.v[0]), vmovn_s32(a.v[1])), high = vcombine_s16(vmovn_s32(a.v[2]), vmovn_s32(a.v[3]));
    vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}
HB_INLINE void load_pairs(const float* p, Floats& first, Floats& second) {
    unroll<4>([&](auto i) HB_LAMBDA {
        float32x4x2_t pair = vld2q_f32(p + 8 * i);
        first.v[i] = pair.val[0];
        second.v[i] = pair.val[1];
    });
}

HB_INLINE Floats load_bf16(const uint16_t* p) {
    Floats r;
    HB_QUARTERS(vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)));
}
HB_INLINE Floats load_f16(const uint16_t* p) {
    Floats r;
    HB_QUARTERS(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))));
}
HB_INLINE bool any_special(const uint8_t* p) {
    return vmaxvq_u8(vsubq_u8(vld1q_u8(p), vdupq_n_u8(2))) > 252;
}
HB_INLINE Floats load_half_e8m0(const uint8_t* p) {
    uint8x16_t e = vsubq_u8(vld1q_u8(p), vdupq_n_u8(1));
    uint16x8_t low = vmovl_u8(vget_low_u8(e)), high = vmovl_u8(vget_high_u8(e));
    return {vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vget_low_u16(low)), 23)),
            vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vget_high_u16(low)), 23)),
            vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vget_low_u16(high)), 23)),
            vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vget_high_u16(high)), 23))};
}

HB_INLINE Words load_words(const uint8_t* p) { Words r; HB_QUARTERS(vreinterpretq_s8_u8(vld1q_u8(p + 16 * i))); }
HB_INLINE void unpack_e2m1(Words w, Words& low, Words& high) {
    static constexpr int8_t values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const int8x16_t table = vld1q_s8(values);
    unroll<4>([&](auto i) HB_LAMBDA {
        uint8x16_t bytes = vreinterpretq_u8_s8(w.v[i]);
        low.v[i] = vqtbl1q_s8(table, vandq_u8(bytes, vdupq_n_u8(15)));
        high.v[i] = vqtbl1q_s8(table, vshrq_n_u8(bytes, 4));
    });
}
HB_INLINE Words offset_q8(Words w) { return w; }
template <int B>
HB_INLINE Ints byte_of(Words w) {
    Ints r;
    HB_QUARTERS(vshrq_n_s32(vshlq_n_s32(vreinterpretq_s32_s8(w.v[i]), 24 - 8 * B), 24));
}

// Dot products of 16 weight rows with one coded group, word by word in ascending order.
template <Format F>
struct Dot {
    const CodedGroup* p;
    int8x16_t codes;  // of four words
    Ints total;

    HB_INLINE explicit Dot(const CodedGroup* group) : p(group) {
        unroll<4>([&](auto i) HB_LAMBDA { total.v[i] = vdupq_n_s32(0); });
    }
    template <int J>
    HB_INLINE void add(Words w) {
        if constexpr (J % 4 == 0) codes = vld1q_s8(p->codes + 4 * J);
        unroll<4>([&](auto i) HB_LAMBDA { total.v[i] = vdotq_laneq_s32(total.v[i], w.v[i], codes, J % 4); });
    }
    HB_INLINE Ints sum() const { return total; }
};

#ifdef __ARM_FEATURE_MATMUL_INT8

// Words 2 i and 2 i + 1 become the eight codes of rows 0 .. 7 and those of rows 8 .. 15, two rows to a register.
HB_INLINE void arrange(Words* w) {
    unroll<4>([&](auto i) HB_LAMBDA {
        Words even = w[2 * i], odd = w[2 * i + 1];
        unroll<4>([&](auto q) HB_LAMBDA {
            int32x4_t a = vreinterpretq_s32_s8(even.v[q]), b = vreinterpretq_s32_s8(odd.v[q]);
            Words& target = w[2 * i + q / 2];
            target.v[q % 2 * 2] = vreinterpretq_s8_s32(vzip1q_s32(a, b));
            target.v[q % 2 * 2 + 1] = vreinterpretq_s8_s32(vzip2q_s32(a, b));
        });
    });
}

template <Format F, int R, int T>
HB_INLINE void dot_block(const Words* w, const CodedGroup* const* a, Ints* d) {
    static_assert(T == 1, "four rows of one tile fill the registers");
    constexpr int pairs = (R + 1) / 2;  // of rows; a last odd one is its own partner
    int32x4_t total[pairs][8];          // of two weight rows w and two rows a: w0 a0, w0 a1, w1 a0, w1 a1
    unroll<pairs * 8>([&](auto i) HB_LAMBDA { total[i / 8][i % 8] = vdupq_n_s32(0); });
    unroll<4>([&](auto j) HB_LAMBDA {
        int8x16_t codes[pairs];
        unroll<pairs>([&](auto p) HB_LAMBDA {
            constexpr int second = 2 * p + 1 < R ? 2 * p + 1 : 2 * p;
            codes[p] = vcombine_s8(vld1_s8(a[2 * p]->codes + 8 * j), vld1_s8(a[second]->codes + 8 * j));
        });
        unroll<8>([&](auto q) HB_LAMBDA {
            int8x16_t rows = w[2 * j + q / 4].v[q % 4];
            unroll<pairs>([&](auto p) HB_LAMBDA { total[p][q] = vmmlaq_s32(total[p][q], rows, codes[p]); });
        });
    });
    unroll<R>([&](auto r) HB_LAMBDA {
        unroll<4>([&](auto q) HB_LAMBDA {
            int32x4_t x = total[r / 2][2 * q], y = total[r / 2][2 * q + 1];
            d[r].v[q] = r % 2 ? vuzp2q_s32(x, y) : vuzp1q_s32(x, y);
        });
    });
}

#else

HB_INLINE void arrange(Words*) {}

template <Format F, int R, int T>
HB_INLINE void dot_block(const Words* w, const CodedGroup* const* a, Ints* d) {
    unroll<R * T>([&](auto i) HB_LAMBDA { unroll<4>([&](auto q) HB_LAMBDA { d[i].v[q] = vdupq_n_s32(0); }); });
    unroll<2>([&](auto part) HB_LAMBDA {
        int8x16_t codes[R];
        unroll<R>([&](auto r) HB_LAMBDA { codes[r] = vld1q_s8(a[r]->codes + 16 * part); });
        unroll<4 * T>([&](auto i) HB_LAMBDA {
            constexpr int j = i / T, t = i % T;
            Words word = w[(4 * part + j) * T + t];
            unroll<R * 4>([&](auto k) HB_LAMBDA {
                int32x4_t& total = d[k / 4 * T + t].v[k % 4];
                total = vdotq_laneq_s32(total, word.v[k % 4], codes[k / 4], j);
            });
        });
    });
}

#endif

#undef HB_QUARTERS

}  // namespace halfbyte
