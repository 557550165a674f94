// Sixteen lanes in one AVX-512 register; dot products by VNNI (unsigned weights times signed activations).
#pragma once
#include <immintrin.h>

namespace halfbyte {

using Floats = __m512;
struct Ints { __m512i v; };
struct Words { __m512i v; };

constexpr const char* INSTRUCTION_SET = "avx512";
constexpr int MXFP4_OFFSET = 12, Q8_OFFSET = 128;
constexpr int STREAMS = 4, BLOCK_TILES = 4, BLOCK_ROWS = 4, DENSE_ROWS = 6;

HB_INLINE Floats splat(float x) { return _mm512_set1_ps(x); }
HB_INLINE Floats load_floats(const float* p) { return _mm512_loadu_ps(p); }
HB_INLINE void store(float* p, Floats a) { _mm512_storeu_ps(p, a); }
HB_INLINE Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
HB_INLINE Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
HB_INLINE Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
HB_INLINE Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
HB_INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
// The instruction returns its second operand when either is NaN: NaN in x stays; b is never NaN.
HB_INLINE Floats at_most(Floats x, Floats b) { return _mm512_min_ps(b, x); }
HB_INLINE Floats at_least(Floats x, Floats b) { return _mm512_max_ps(b, x); }
HB_INLINE Floats absolute(Floats a) { return _mm512_abs_ps(a); }
// Of magnitudes, as integers: their bits order like numbers, NaN above infinity.
HB_INLINE float largest(Floats a) {
    return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(_mm512_reduce_max_epi32(_mm512_castps_si512(a)))));
}
HB_INLINE Floats larger_magnitude(Floats a, Floats b) {
    return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(a), _mm512_castps_si512(b)));
}
HB_INLINE Floats nearest(Floats a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
HB_INLINE Ints to_ints(Floats a) { return {_mm512_cvtps_epi32(a)}; }
HB_INLINE Floats to_floats(Ints a) { return _mm512_cvtepi32_ps(a.v); }
HB_INLINE Floats power_of_two(Ints a) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(a.v, _mm512_set1_epi32(127)), 23));
}
HB_INLINE Ints half(Ints a) { return {_mm512_srai_epi32(a.v, 1)}; }
HB_INLINE Ints sub(Ints a, Ints b) { return {_mm512_sub_epi32(a.v, b.v)}; }
HB_INLINE float sum(Floats a) {
    __m256 e = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 f = _mm_add_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
    f = _mm_add_ps(f, _mm_movehl_ps(f, f));
    return _mm_cvtss_f32(_mm_add_ss(f, _mm_movehdup_ps(f)));
}
HB_INLINE int32_t sum(Ints a) { return _mm512_reduce_add_epi32(a.v); }
HB_INLINE void store_bytes(int8_t* p, Ints a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}
HB_INLINE void load_pairs(const float* p, Floats& first, Floats& second) {
    __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    __m512 a = load_floats(p), b = load_floats(p + 16);
    first = _mm512_permutex2var_ps(a, even, b);
    second = _mm512_permutex2var_ps(a, _mm512_or_si512(even, _mm512_set1_epi32(1)), b);
}

HB_INLINE Floats load_bf16(const uint16_t* p) {
    __m256i half_words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half_words), 16));
}
HB_INLINE Floats load_f16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
HB_INLINE bool any_special(const uint8_t* p) {
    __m128i e = _mm_sub_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), _mm_set1_epi8(2));
    return _mm_cmpgt_epu8_mask(e, _mm_set1_epi8(static_cast<char>(252))) != 0;
}
HB_INLINE Floats load_half_e8m0(const uint8_t* p) {
    __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(1)), 23));
}

HB_INLINE Words load_words(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
HB_INLINE void unpack_e2m1(Words w, Words& low, Words& high) {
    const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m512i nibble = _mm512_set1_epi8(15);
    low.v = _mm512_shuffle_epi8(table, _mm512_and_si512(w.v, nibble));
    high.v = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi32(w.v, 4), nibble));
}
HB_INLINE Words offset_q8(Words w) { return {_mm512_xor_si512(w.v, _mm512_set1_epi8(-128))}; }
template <int B>
HB_INLINE Ints byte_of(Words w) {
    return {_mm512_srai_epi32(_mm512_slli_epi32(w.v, 24 - 8 * B), 24)};
}

// Four codes for every lane.
HB_INLINE __m512i codes_of(const CodedGroup* p, int word) {
    int32_t codes;
    std::memcpy(&codes, p->codes + 4 * word, 4);
    return _mm512_set1_epi32(codes);
}

template <Format F>
struct Dot {  // two chains, because one would wait for itself
    const CodedGroup* a;
    __m512i even, odd;
    HB_INLINE explicit Dot(const CodedGroup* group)
        : a(group), even(_mm512_set1_epi32(group->start)), odd(_mm512_setzero_si512()) {}
    template <int J>
    HB_INLINE void add(Words w) {
        __m512i& chain = J % 2 ? odd : even;
        chain = _mm512_dpbusd_epi32(chain, w.v, codes_of(a, J));
    }
    HB_INLINE Ints sum() const { return {_mm512_add_epi32(even, odd)}; }
};

HB_INLINE void arrange(Words*) {}

template <Format F, int R, int T>
HB_INLINE void dot_block(const Words* w, const CodedGroup* const* a, Ints* d) {
    unroll<R>([&](auto r) HB_LAMBDA {
        unroll<T>([&](auto t) HB_LAMBDA { d[r * T + t].v = _mm512_set1_epi32(a[r]->start); });
    });
    unroll<8>([&](auto j) HB_LAMBDA {
        unroll<R>([&](auto r) HB_LAMBDA {
            __m512i codes = codes_of(a[r], j);
            unroll<T>([&](auto t) HB_LAMBDA { d[r * T + t].v = _mm512_dpbusd_epi32(d[r * T + t].v, w[j * T + t].v, codes); });
        });
    });
}

}  // namespace halfbyte
