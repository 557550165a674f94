// Numbers of the KV cache: float32, bfloat16 (round to nearest even) or E4M3 (saturating, as an fp8 cache has no scale and
// infinity would poison a sequence); and float16, of tables and scales. NaN stays NaN in all of them.
#pragma once
#include <cstdint>
#include <cstring>

#include "lanes.h"
#include "vector.h"

namespace halfbyte {

inline uint32_t bits_of(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return u;
}

inline uint16_t to_bf16(float x) {
    const uint32_t u = bits_of(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

inline float from_f16(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, rest = h & 0x7fff;
    const uint32_t u = rest >= 0x7c00 ? 0x7f800000u | rest << 13 : rest << 13;
    float x;
    std::memcpy(&x, &u, 4);
    if (rest < 0x7c00) x *= 0x1p112f;
    return sign ? -x : x;
}

inline uint8_t to_e4m3(float x) {
    const uint32_t u = bits_of(x), sign = u >> 24 & 0x80;
    uint32_t a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7f);
    if (a >= 0x43e00000u) return static_cast<uint8_t>(sign | 0x7e);  // 448 and more
    if (a < 0x3c800000u) {  // below 2^-6: multiples of 2^-9, rounded by an addition whose last bit is one of them
        float magnitude;
        std::memcpy(&magnitude, &a, 4);
        return static_cast<uint8_t>(sign | (bits_of(magnitude + 16384.0f) - bits_of(16384.0f)));
    }
    a += 0x7ffffu + (a >> 20 & 1);
    return static_cast<uint8_t>(sign | ((a >> 20) - (120u << 3)));
}

inline void write_cells(const float* x, int64_t count, int32_t format, uint8_t* to) {
    if (format == 0) {
        std::memcpy(to, x, static_cast<size_t>(count) * 4);
    } else if (format == 2) {
        for (int64_t i = 0; i < count; ++i) {
            const uint16_t cell = to_bf16(x[i]);
            std::memcpy(to + 2 * i, &cell, 2);
        }
    } else {
        for (int64_t i = 0; i < count; ++i) to[i] = to_e4m3(x[i]);
    }
}

// How a kind of cell is read: 16 in a row, `part` i of words that hold several, one.
struct CellF32 {
    static constexpr int64_t bytes = 4;
    static void sixteen(const uint8_t* p, float* to) { std::memcpy(to, p, 64); }
    static native::Vector part(native::Bits word, int) { return reinterpret_cast<native::Vector>(word); }
    static float one(const uint8_t* p) { float x; std::memcpy(&x, p, 4); return x; }
};
struct CellBf16 {
    static constexpr int64_t bytes = 2;
    static void sixteen(const uint8_t* p, float* to) { store(to, load_bf16(reinterpret_cast<const uint16_t*>(p))); }
    static native::Vector part(native::Bits word, int i) {
        return reinterpret_cast<native::Vector>(i ? word & 0xffff0000u : word << 16);
    }
    static float one(const uint8_t* p) {
        uint16_t h;
        std::memcpy(&h, p, 2);
        const uint32_t u = static_cast<uint32_t>(h) << 16;
        float x;
        std::memcpy(&x, &u, 4);
        return x;
    }
};
struct CellE4m3 {  // exponent and mantissa moved into place make the number 2^-120 times too small, exactly
    static constexpr int64_t bytes = 1;
    static native::Vector of(native::Bits w) {
        using native::Bits, native::Vector;
        const Bits nan = reinterpret_cast<Bits>((w & 0x7f) == 0x7f) & 0x7fc00000u;
        const Vector number = reinterpret_cast<Vector>((w & 0x80) << 24 | (w & 0x7f) << 20) * 0x1p120f;
        return reinterpret_cast<Vector>(reinterpret_cast<Bits>(number) | nan);
    }
    static void sixteen(const uint8_t* p, float* to) {
        for (int i = 0; i < 16; i += native::LANES)
            native::store(to + i, of(__builtin_convertvector(native::load<native::Bytes>(p + i), native::Bits)));
    }
    static native::Vector part(native::Bits word, int i) { return of(word >> static_cast<uint32_t>(8 * i) & 0xff); }
    static float one(const uint8_t* p) {
        const uint32_t w = *p;
        const uint32_t u = (w & 0x7f) == 0x7f ? 0x7fc00000u : (w & 0x80) << 24 | (w & 0x7f) << 20;
        float x;
        std::memcpy(&x, &u, 4);
        return (w & 0x7f) == 0x7f ? x : x * 0x1p120f;
    }
};

}  // namespace halfbyte
