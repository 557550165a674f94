// Moving numbers about in vectors of the machine's own width, as the compiler knows them: conversion and transposition.
// Arithmetic that is rounded is in vector.h; what is here is exact, so that the width changes nothing.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>

namespace halfbyte::native {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float Vector __attribute__((vector_size(LANES * 4)));
typedef uint32_t Bits __attribute__((vector_size(LANES * 4)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

template <class V>
inline V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
template <class V>
inline void store(void* to, V v) {
    std::memcpy(to, &v, sizeof v);
}

// One stage of a transposition: blocks of `S` lanes change places between two rows.
template <int S, int... I>
inline __attribute__((always_inline)) void exchange(Vector& a, Vector& b, std::integer_sequence<int, I...>) {
    const Vector low = __builtin_shufflevector(a, b, ((I & S) ? LANES + I - S : I)...);
    const Vector high = __builtin_shufflevector(a, b, ((I & S) ? LANES + I : I + S)...);
    a = low;
    b = high;
}
// Pair number I of a stage: of every 2 * S rows the first S meet the others. All indices are constants, so that the rows
// stay in registers.
template <int S, int... I>
inline __attribute__((always_inline)) void exchange_pairs(Vector* rows, std::integer_sequence<int, I...>) {
    (exchange<S>(rows[I / S * 2 * S + I % S], rows[I / S * 2 * S + I % S + S], std::make_integer_sequence<int, LANES>{}), ...);
}
template <int S>
inline __attribute__((always_inline)) void exchange_all(Vector* rows) {
    if constexpr (S < LANES) {
        exchange_pairs<S>(rows, std::make_integer_sequence<int, LANES / 2>{});
        exchange_all<2 * S>(rows);
    }
}
// LANES rows of LANES numbers.
inline __attribute__((always_inline)) void transpose(Vector* rows) { exchange_all<1>(rows); }

// The highest of whole vectors of 16 numbers. NaN may be passed over.
template <int S, int... I>
inline Vector fold(Vector v, std::integer_sequence<int, I...>) {
    const Vector other = __builtin_shufflevector(v, v, (I ^ S)...);
    return v > other ? v : other;
}
template <int S>
inline float highest_lane(Vector v) {
    if constexpr (S == 0) return v[0];
    else return highest_lane<S / 2>(fold<S>(v, std::make_integer_sequence<int, LANES>{}));
}
inline float highest(const float* x, int64_t count) {
    Vector top = load<Vector>(x);
    for (int64_t i = LANES; i < count; i += LANES) {
        const Vector v = load<Vector>(x + i);
        top = v > top ? v : top;
    }
    return highest_lane<LANES / 2>(top);
}

}  // namespace halfbyte::native
