// Products of a warpgroup of MXFP4 weights with x in two E4M3 digits: wgmma m64n8k32 (n 16 for eight rows of x), E5M2 by E4M3.
// The layout of the weights is "tile16_e5m2" (formats/tile16.py): two registers of E5M2 from a word by masks, value * 2^-14.
//
// A group of 32 values of x is (high + low / 16) * s, s a power of two of the group's own. s brings the largest magnitude to
// [128, 256), and the low digit is what the high one leaves, times 16. A digit has four bits of significand, and the low one begins
// where the high one's rounding ends: an error of a value is at most 2^-9 of it, as bf16's, and never less than 2^-22 of the
// group's largest (the low digit's subnormal step). So a number of bf16 within 14 octaves of its group's largest is held exactly.
#pragma once
#include "device/warpgroup.cuh"

constexpr float DIGIT = 1.f / 16.f;  // of the low digit, in the high one's unit
constexpr int E5M2_OCTAVES = 14;     // that weights are too small by

// Eight codes of a word as E5M2, four to a register: columns 4 t + j, and 16 + 4 t + j.
HB_DEV void widen_e5m2_word(u32 w, u32& first, u32& second) {
  first = w & 0x8e8e8e8eu;
  second = ((w >> 3) & 0x0e0e0e0eu) + (w & 0x01010101u) * 128u;
}
// The words of two groups, rows g and g + 8 of each, as the registers of two products.
HB_DEV void widen_e5m2_chunk(const u32x4& w, u32* a) {
  widen_e5m2_word(w.x, a[0], a[2]);
  widen_e5m2_word(w.y, a[1], a[3]);
  widen_e5m2_word(w.z, a[4], a[6]);
  widen_e5m2_word(w.w, a[5], a[7]);
}

#ifdef HB_EMULATE
HB_DEV void e4m3_values(u32 pair, float& a, float& b) { a = emu::e4m3_value(pair & 255); b = emu::e4m3_value(pair >> 8 & 255); }
HB_DEV void written_for_products() {}
template <int N> HB_DEV void widened(u32 (&)[N]) {}
template <bool FIRST, int N> HB_DEV void digit_product(float (&d)[N / 2], const u32* a, u64 b) {
  if (FIRST) wgmma_clear(d);
  wgmma8<N>(d, a[0], a[1], a[2], a[3], b);
}
#else
HB_DEV void e4m3_values(u32 pair, float& a, float& b) {
  u32 both;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(both) : "h"((u16)pair));
  a = half_value(both & 0xffffu);
  b = half_value(both >> 16);
}
// What this thread has stored to shared memory is seen by products that begin behind the next barrier.
HB_DEV void written_for_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Operands are made in front of the fence that products follow, or the compiler puts another fence between them.
template <int N> HB_DEV void widened(u32 (&a)[N]) {
  HB_UNROLL
  for (int i = 0; i < N; i++) asm volatile("" : "+r"(a[i])::"memory");
}
// d = A (64 x 32) B + (FIRST ? 0 : d).
template <bool FIRST, int N> HB_DEV void digit_product(float (&d)[N / 2], const u32* a, u64 b) {
  if constexpr (N == 8)
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k32.f32.e5m2.e4m3 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, %9, 1, 1;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(FIRST ? 0 : 1));
  else
    asm volatile("wgmma.mma_async.sync.aligned.m64n16k32.f32.e5m2.e4m3 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, %13, 1, 1;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(FIRST ? 0 : 1));
}
#endif

// Four values as digits of a group whose largest magnitude has this biased exponent: words of E4M3, the first value lowest.
struct Digits { u32 high, low; };
HB_DEV Digits digits_of(const float (&v)[4], u32 exponent) {
  const float unit = as_float(exponent > 7 ? (261u - exponent) << 23 : 0u);  // to [128, 256); a group of nothing stays nothing
  Digits r = {0, 0};
  HB_UNROLL
  for (int i = 0; i < 4; i += 2) {
    const float x = v[i] * unit, y = v[i + 1] * unit;
    const u32 high = e4m3_pair(x, y);
    float a, b;
    e4m3_values(high, a, b);
    r.high |= high << (8 * i);
    r.low |= e4m3_pair((x - a) * 16.f, (y - b) * 16.f) << (8 * i);
  }
  return r;
}
// What sums of such a group's digits are multiplied by, relative to 2^`octaves`; NaN where the group holds no number. Too small a
// group counts as zeros.
HB_DEV float digit_scale(u32 exponent, int octaves) {
  const int e = (int)exponent - 7 + octaves;
  return as_float(exponent == 255 ? 0x7fffffffu : e > 0 && e < 255 ? (u32)e << 23 : e > 0 ? 0x7f800000u : 0u);
}
