// Sixteen lanes in plain C++: correct everywhere, as fast as the compiler makes loops over 16 elements.
#pragma once

namespace halfbyte {

struct Floats { float v[16]; };
struct Ints { int32_t v[16]; };
struct Words { uint32_t v[16]; };

constexpr const char* INSTRUCTION_SET = "portable";
constexpr int MXFP4_OFFSET = 0, Q8_OFFSET = 0;
constexpr int STREAMS = 2, BLOCK_TILES = 1, BLOCK_ROWS = 2, DENSE_ROWS = 2;

// What is long is called: inlined everywhere it takes compilers a minute.
#define HB_CALL inline __attribute__((noinline))

#define HB_LANES(expression)                       \
    for (int i = 0; i < 16; i++) r.v[i] = expression; \
    return r

HB_INLINE float bits_to_float(uint32_t b) { float f; std::memcpy(&f, &b, 4); return f; }
HB_INLINE uint32_t float_to_bits(float f) { uint32_t b; std::memcpy(&b, &f, 4); return b; }

HB_INLINE Floats splat(float x) { Floats r; HB_LANES(x); }
HB_INLINE Floats load_floats(const float* p) { Floats r; std::memcpy(&r, p, 64); return r; }
HB_INLINE void store(float* p, Floats a) { std::memcpy(p, &a, 64); }
HB_INLINE Floats add(Floats a, Floats b) { Floats r; HB_LANES(a.v[i] + b.v[i]); }
HB_INLINE Floats sub(Floats a, Floats b) { Floats r; HB_LANES(a.v[i] - b.v[i]); }
HB_INLINE Floats mul(Floats a, Floats b) { Floats r; HB_LANES(a.v[i] * b.v[i]); }
HB_INLINE Floats div(Floats a, Floats b) { Floats r; HB_LANES(a.v[i] / b.v[i]); }
HB_INLINE Floats fma(Floats a, Floats b, Floats c) { Floats r; HB_LANES(a.v[i] * b.v[i] + c.v[i]); }
// NaN in x stays; b is never NaN.
HB_INLINE Floats at_most(Floats x, Floats b) { Floats r; HB_LANES(x.v[i] > b.v[i] ? b.v[i] : x.v[i]); }
HB_INLINE Floats at_least(Floats x, Floats b) { Floats r; HB_LANES(x.v[i] < b.v[i] ? b.v[i] : x.v[i]); }
HB_INLINE Floats absolute(Floats a) { Floats r; HB_LANES(bits_to_float(float_to_bits(a.v[i]) & 0x7fffffffu)); }
// The largest of 16 magnitudes; NaN or infinity where one of them is.
HB_INLINE float largest(Floats a) {  // as integers: bits of magnitudes order like magnitudes, NaN above infinity
    uint32_t m = 0;
    for (int i = 0; i < 16; i++) m = float_to_bits(a.v[i]) > m ? float_to_bits(a.v[i]) : m;
    return bits_to_float(m);
}
HB_INLINE Floats larger_magnitude(Floats a, Floats b) {  // of bits, as above
    Floats r;
    HB_LANES(float_to_bits(a.v[i]) > float_to_bits(b.v[i]) ? a.v[i] : b.v[i]);
}
// To the nearest whole number, ties to even. |a| is at most 2^22.
HB_INLINE Floats nearest(Floats a) {
    Floats r;
    HB_LANES((a.v[i] + 12582912.0f) - 12582912.0f);
}
HB_INLINE Ints to_ints(Floats a) { Ints r; HB_LANES(static_cast<int32_t>(float_to_bits(a.v[i] + 12582912.0f) - 0x4b400000u)); }  // of whole numbers; anything of NaN
HB_INLINE Floats to_floats(Ints a) { Floats r; HB_LANES(static_cast<float>(a.v[i])); }
// 2^a for a in -126 .. 127.
HB_INLINE Floats power_of_two(Ints a) { Floats r; HB_LANES(bits_to_float((static_cast<uint32_t>(a.v[i]) + 127u) << 23)); }
HB_INLINE Ints half(Ints a) { Ints r; HB_LANES(a.v[i] >> 1); }
HB_INLINE Ints sub(Ints a, Ints b) {
    Ints r;
    HB_LANES(static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) - static_cast<uint32_t>(b.v[i])));
}
// The fixed tree: lanes 8 apart, then 4, 2, 1.
HB_INLINE float sum(Floats a) {
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; i++) a.v[i] += a.v[i + step];
    return a.v[0];
}
HB_INLINE int32_t sum(Ints a) { int32_t s = 0; for (int i = 0; i < 16; i++) s += a.v[i]; return s; }
HB_INLINE void store_bytes(int8_t* p, Ints a) { for (int i = 0; i < 16; i++) p[i] = static_cast<int8_t>(a.v[i]); }
// 16 pairs: first of each, second of each.
HB_INLINE void load_pairs(const float* p, Floats& first, Floats& second) {
    for (int i = 0; i < 16; i++) { first.v[i] = p[2 * i]; second.v[i] = p[2 * i + 1]; }
}

HB_INLINE Floats load_bf16(const uint16_t* p) { Floats r; HB_LANES(bits_to_float(static_cast<uint32_t>(p[i]) << 16)); }
HB_INLINE float half_to_float(uint16_t h) {
    uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, rest = h & 0x7fffu;
    // The exponent's bias is mended by a multiplication, which is exact and takes subnormals along.
    float f = bits_to_float(rest << 13) * bits_to_float(0x77800000u);
    uint32_t b = float_to_bits(f);
    if (rest >= 0x7c00u) b = 0x7f800000u | ((rest & 0x3ffu) << 13);
    return bits_to_float(b | sign);
}
HB_INLINE Floats load_f16(const uint16_t* p) { Floats r; HB_LANES(half_to_float(p[i])); }
HB_INLINE bool any_special(const uint8_t* p) {
    bool any = false;
    for (int i = 0; i < 16; i++) any |= p[i] < 2 || p[i] == 255;
    return any;
}
// 2^(e - 128), half of what an E8M0 byte means, for bytes 2 .. 254.
HB_INLINE Floats load_half_e8m0(const uint8_t* p) { Floats r; HB_LANES(bits_to_float((p[i] - 1u) << 23)); }

HB_INLINE Words load_words(const uint8_t* p) { Words r; std::memcpy(&r, p, 64); return r; }
// Twice the E2M1 elements of the low and of the high nibbles, plus MXFP4_OFFSET. Reckoned, because compilers do not turn
// table look-ups into vectors: of the magnitudes 0 1 2 3 4 6 8 12, number m is m + max(m - 4, 0) + 2 [m = 7].
HB_INLINE void doubled_e2m1(const uint8_t* nibbles, uint8_t* out) {
    for (int i = 0; i < 64; i++) {
        uint8_t m = nibbles[i] & 7, sign = static_cast<uint8_t>(nibbles[i] & 8 ? 255 : 0);
        uint8_t v = static_cast<uint8_t>(m + (m > 4 ? m - 4 : 0) + (m == 7 ? 2 : 0));
        out[i] = static_cast<uint8_t>((v ^ sign) - sign);
    }
}
HB_CALL void unpack_e2m1(const Words& w, Words& low, Words& high) {
    uint8_t bytes[64], part[64], out[64];
    std::memcpy(bytes, &w, 64);
    for (int i = 0; i < 64; i++) part[i] = bytes[i] & 15;
    doubled_e2m1(part, out);
    std::memcpy(&low, out, 64);
    for (int i = 0; i < 64; i++) part[i] = bytes[i] >> 4;
    doubled_e2m1(part, out);
    std::memcpy(&high, out, 64);
}
HB_INLINE Words offset_q8(Words w) { return w; }
// Byte B of every word, as a signed number.
template <int B>
HB_INLINE Ints byte_of(Words w) {
    Ints r;
    HB_LANES(static_cast<int32_t>(w.v[i] << (24 - 8 * B)) >> 24);
}

// d += w times four codes. Products of bytes fit 16 bits, in pairs too; every machine has vectors of 16 bytes.
HB_CALL void add_words(const Words& w, const int8_t* x, Ints& d) {
    typedef int16_t Shorts __attribute__((vector_size(16)));
    typedef int32_t Quarter __attribute__((vector_size(16)));
    const auto pair = [](int8_t a, int8_t b) {
        return static_cast<int32_t>((static_cast<uint32_t>(b) << 16) | (static_cast<uint32_t>(a) & 0xffffu));
    };
    const int32_t even = pair(x[0], x[2]), odd = pair(x[1], x[3]);
    const Shorts evens = reinterpret_cast<Shorts>(Quarter{even, even, even, even});
    const Shorts odds = reinterpret_cast<Shorts>(Quarter{odd, odd, odd, odd});
    for (int q = 0; q < 16; q += 4) {
        Shorts bytes;
        Quarter total;
        std::memcpy(&bytes, w.v + q, 16);
        std::memcpy(&total, d.v + q, 16);
        const Quarter sums = reinterpret_cast<Quarter>(((bytes << 8) >> 8) * evens + (bytes >> 8) * odds);
        total += ((sums << 16) >> 16) + (sums >> 16);
        std::memcpy(d.v + q, &total, 16);
    }
}

template <Format F>
struct Dot {
    const CodedGroup* a;
    Ints d;
    HB_INLINE explicit Dot(const CodedGroup* group) : a(group) {
        for (int i = 0; i < 16; i++) d.v[i] = group->start;
    }
    template <int J>
    HB_INLINE void add(const Words& w) {
        add_words(w, a->codes + 4 * J, d);
    }
    HB_INLINE Ints sum() const { return d; }
};

HB_INLINE void arrange(Words*) {}

template <Format F, int R, int T>
HB_INLINE void dot_block(const Words* w, const CodedGroup* const* a, Ints* d) {
    for (int i = 0; i < R * T; i++) {
        Dot<F> dot(a[i / T]);
        unroll<8>([&](auto j) HB_LAMBDA { dot.template add<j>(w[j * T + i % T]); });
        d[i] = dot.sum();
    }
}

#undef HB_LANES
#undef HB_CALL

}  // namespace halfbyte
