// Sixteen lanes in two AVX2 registers. Dot products by AVX-VNNI where the compiler is told of it; otherwise by products of
// unsigned with signed bytes, whose sums of pairs must fit 16 bits: mxfp4 (at most 24 times 127) leaves room for the sum
// of four words, q8 takes magnitudes of weights and gives their signs to the codes, which leaves room for none.
#pragma once
#include <immintrin.h>

namespace halfbyte {

struct Floats { __m256 a, b; };
struct Ints { __m256i a, b; };
struct Words { __m256i a, b; };

#ifdef __AVXVNNI__
constexpr const char* INSTRUCTION_SET = "avx-vnni";
constexpr int Q8_OFFSET = 128, BLOCK_ROWS = 4;
#else
constexpr const char* INSTRUCTION_SET = "avx2";
constexpr int Q8_OFFSET = 0, BLOCK_ROWS = 4;
#endif
constexpr int MXFP4_OFFSET = 12;
constexpr int STREAMS = 4, BLOCK_TILES = 1, DENSE_ROWS = 6;

HB_INLINE Floats splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
HB_INLINE Floats load_floats(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
HB_INLINE void store(float* p, Floats x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
HB_INLINE Floats add(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
HB_INLINE Floats sub(Floats x, Floats y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
HB_INLINE Floats mul(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
HB_INLINE Floats div(Floats x, Floats y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
HB_INLINE Floats fma(Floats x, Floats y, Floats z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
// The instruction returns its second operand when either is NaN: NaN in x stays; y is never NaN.
HB_INLINE Floats at_most(Floats x, Floats y) { return {_mm256_min_ps(y.a, x.a), _mm256_min_ps(y.b, x.b)}; }
HB_INLINE Floats at_least(Floats x, Floats y) { return {_mm256_max_ps(y.a, x.a), _mm256_max_ps(y.b, x.b)}; }
HB_INLINE Floats absolute(Floats x) {
    __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
// Of magnitudes, as integers: their bits order like numbers, NaN above infinity.
HB_INLINE __m256 larger_bits(__m256 x, __m256 y) {
    return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(x), _mm256_castps_si256(y)));
}
HB_INLINE Floats larger_magnitude(Floats x, Floats y) { return {larger_bits(x.a, y.a), larger_bits(x.b, y.b)}; }
HB_INLINE float largest(Floats x) {
    __m256i m = _mm256_castps_si256(larger_bits(x.a, x.b));
    __m128i n = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256(m, 1));
    n = _mm_max_epi32(n, _mm_shuffle_epi32(n, 0x4e));
    n = _mm_max_epi32(n, _mm_shuffle_epi32(n, 0xb1));
    return _mm_cvtss_f32(_mm_castsi128_ps(n));
}
HB_INLINE Floats nearest(Floats x) {
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
HB_INLINE Ints to_ints(Floats x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
HB_INLINE Floats to_floats(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
HB_INLINE __m256 power_of_two(__m256i x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(x, _mm256_set1_epi32(127)), 23));
}
HB_INLINE Floats power_of_two(Ints x) { return {power_of_two(x.a), power_of_two(x.b)}; }
HB_INLINE Ints half(Ints x) { return {_mm256_srai_epi32(x.a, 1), _mm256_srai_epi32(x.b, 1)}; }
HB_INLINE Ints sub(Ints x, Ints y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
HB_INLINE float sum(Floats x) {
    __m256 e = _mm256_add_ps(x.a, x.b);
    __m128 f = _mm_add_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
    f = _mm_add_ps(f, _mm_movehl_ps(f, f));
    return _mm_cvtss_f32(_mm_add_ss(f, _mm_movehdup_ps(f)));
}
HB_INLINE int32_t sum(Ints x) {
    __m256i e = _mm256_add_epi32(x.a, x.b);
    __m128i f = _mm_add_epi32(_mm256_castsi256_si128(e), _mm256_extracti128_si256(e, 1));
    f = _mm_add_epi32(f, _mm_shuffle_epi32(f, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(f, _mm_shuffle_epi32(f, 0xb1)));
}
HB_INLINE void store_bytes(int8_t* p, Ints x) {  // of -128 .. 127
    __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
    __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
HB_INLINE void load_pairs(const float* p, Floats& first, Floats& second) {
    auto deal = [](__m256 x, __m256 y, __m256& even, __m256& odd) HB_LAMBDA {
        __m256 low = _mm256_permute2f128_ps(x, y, 0x20), high = _mm256_permute2f128_ps(x, y, 0x31);
        even = _mm256_shuffle_ps(low, high, 0x88);  // lanes 0 2 | 8 10 and so on, in the halves' order
        odd = _mm256_shuffle_ps(low, high, 0xdd);
        // low = x0..3 y0..3, high = x4..7 y4..7: even = x0 x2 x4 x6 y0 y2 y4 y6
    };
    deal(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8), first.a, second.a);
    deal(_mm256_loadu_ps(p + 16), _mm256_loadu_ps(p + 24), first.b, second.b);
}

HB_INLINE __m128i load_half(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
HB_INLINE Floats load_bf16(const uint16_t* p) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half(p)), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half(p + 8)), 16))};
}
HB_INLINE Floats load_f16(const uint16_t* p) { return {_mm256_cvtph_ps(load_half(p)), _mm256_cvtph_ps(load_half(p + 8))}; }
HB_INLINE bool any_special(const uint8_t* p) {
    __m128i e = _mm_sub_epi8(load_half(p), _mm_set1_epi8(2)), most = _mm_set1_epi8(static_cast<char>(252));
    return _mm_movemask_epi8(_mm_cmpeq_epi8(_mm_max_epu8(e, most), most)) != 0xffff;
}
HB_INLINE Floats load_half_e8m0(const uint8_t* p) {
    __m128i e = _mm_sub_epi8(load_half(p), _mm_set1_epi8(1));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(e), 23)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_srli_si128(e, 8)), 23))};
}

HB_INLINE Words load_words(const uint8_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
HB_INLINE void unpack_e2m1(Words w, Words& low, Words& high) {
    const __m256i table =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m256i nibble = _mm256_set1_epi8(15);
    low = {_mm256_shuffle_epi8(table, _mm256_and_si256(w.a, nibble)), _mm256_shuffle_epi8(table, _mm256_and_si256(w.b, nibble))};
    high = {_mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi32(w.a, 4), nibble)),
            _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi32(w.b, 4), nibble))};
}
HB_INLINE Words offset_q8(Words w) {
    if constexpr (Q8_OFFSET == 0) return w;
    __m256i top = _mm256_set1_epi8(-128);
    return {_mm256_xor_si256(w.a, top), _mm256_xor_si256(w.b, top)};
}
template <int B>
HB_INLINE Ints byte_of(Words w) {
    return {_mm256_srai_epi32(_mm256_slli_epi32(w.a, 24 - 8 * B), 24), _mm256_srai_epi32(_mm256_slli_epi32(w.b, 24 - 8 * B), 24)};
}

// Four codes for every lane.
HB_INLINE __m256i codes_of(const CodedGroup* p, int word) {
    int32_t codes;
    std::memcpy(&codes, p->codes + 4 * word, 4);
    return _mm256_set1_epi32(codes);
}

HB_INLINE void arrange(Words*) {}

// Dot products of 16 weight rows with one coded group, word by word in ascending order.
template <Format F>
struct Dot {
    const CodedGroup* p;
    Ints total;
    Words four;  // without VNNI and for mxfp4: sums of up to four words in 16 bits

    HB_INLINE Dot() {}
    HB_INLINE explicit Dot(const CodedGroup* group) : p(group) { total.a = total.b = _mm256_set1_epi32(group->start); }
    template <int J>
    HB_INLINE void add(Words w) {
        __m256i codes = codes_of(p, J);
#ifdef __AVXVNNI__
        total.a = _mm256_dpbusd_avx_epi32(total.a, w.a, codes);
        total.b = _mm256_dpbusd_avx_epi32(total.b, w.b, codes);
#else
        const __m256i ones = _mm256_set1_epi16(1);
        if constexpr (F == Format::q8) {
            __m256i a = _mm256_maddubs_epi16(_mm256_abs_epi8(w.a), _mm256_sign_epi8(codes, w.a));
            __m256i b = _mm256_maddubs_epi16(_mm256_abs_epi8(w.b), _mm256_sign_epi8(codes, w.b));
            total.a = _mm256_add_epi32(total.a, _mm256_madd_epi16(a, ones));
            total.b = _mm256_add_epi32(total.b, _mm256_madd_epi16(b, ones));
        } else {
            __m256i a = _mm256_maddubs_epi16(w.a, codes), b = _mm256_maddubs_epi16(w.b, codes);
            four.a = J % 4 ? _mm256_add_epi16(four.a, a) : a;
            four.b = J % 4 ? _mm256_add_epi16(four.b, b) : b;
            if constexpr (J % 4 == 3) {
                total.a = _mm256_add_epi32(total.a, _mm256_madd_epi16(four.a, ones));
                total.b = _mm256_add_epi32(total.b, _mm256_madd_epi16(four.b, ones));
            }
        }
#endif
    }
    HB_INLINE Ints sum() const { return total; }
};

template <Format F, int R, int T>
HB_INLINE void dot_block(const Words* w, const CodedGroup* const* a, Ints* d) {
    Dot<F> dots[R * T];
    unroll<R * T>([&](auto i) HB_LAMBDA { dots[i] = Dot<F>(a[i / T]); });
    unroll<8>([&](auto j) HB_LAMBDA {
        unroll<T>([&](auto t) HB_LAMBDA {
            Words word = w[j * T + t];
            unroll<R>([&](auto r) HB_LAMBDA { dots[r * T + t].template add<j>(word); });
        });
    });
    unroll<R * T>([&](auto i) HB_LAMBDA { d[i] = dots[i].sum(); });
}

}  // namespace halfbyte
