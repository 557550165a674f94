// Activations in MXFP8 and MXFP4 as the block-scaled products of grouped_sync.cu read them; the bits are those of
// formats/mxfp8.py and mxfp4.py (rule `ocp`). Needs `Rows` (rows.cu).
//
// Elements: [width / 128][slots] columns of 128 or 64 bytes. MXFP8: as E4M3 for fp8.cuh, two units of sixteen bytes to
// a group of 32. MXFP4: one unit to a group, word t with the eight values 8 t ..; byte j has values o and o + 4, o = 0, 2, 1, 3
// for j = 0 .. 3, the order in which tile16's words give up their codes. Units are permuted as warp_products.cuh says.
// Scales: [width / 128][slots] words of four bytes, one for each group.
#pragma once
#include "device/warp_products.cuh"

HB_DEV u32 larger(u32 a, u32 b) { return a > b ? a : b; }
// `top`: the largest magnitude as bits, so that a NaN is above all numbers. floor(log2 top) - emax; what is too small has 0.
HB_DEV u32 mx_scale(u32 top, int kind) {
  const u32 field = top >> 23, most = kind == AS_MXFP4 ? 2 : 8;
  return field == 255 ? 255 : field > most ? field - most : 0;
}
HB_DEV float mx_inverse(u32 scale) { return scale == 255 ? 0.f : as_float((254 - scale) << 23); }  // exact: a power of two
HB_DEV u8& scale_byte(const Rows& r, int group, int slot) { return ((u8*)r.scales)[((size_t)(group >> 2) * r.slots + slot) * 4 + (group & 3)]; }

HB_DEV u32 e2m1_code(float v) {  // nearest, ties to even; past the largest: the largest
  const float m = fabsf(v);
  const int c = m < 2.f ? round_even(m * 2.f) : m < 4.f ? round_even(m) + 2 : m < 6.f ? round_even(m * .5f) + 4 : 7;
  return (u32)c | (as_bits(v) >> 28 & 8u);
}
HB_DEV u32 four_times(float a, float b, float c, float d, float by) { return e4m3_pair(a * by, b * by) | e4m3_pair(c * by, d * by) << 16; }
HB_DEV u32 eight_e2m1(const float (&x)[8], float by) {
  u32 code[8], word = 0;
  HB_UNROLL
  for (int i = 0; i < 8; i++) code[i] = e2m1_code(x[i] * by);
  HB_UNROLL
  for (int j = 0; j < 4; j++) {
    const int o = (j & 1) * 2 + (j >> 1);
    word |= (code[o] | code[o + 4] << 4) << 8 * j;
  }
  return word;
}

// Four neighbouring threads have a group of 32: one over its scale, which is stored for the first `count` slots.
HB_DEV float give_scale(const Rows& r, int unit, const float (&x)[8], int count, const int (&slots)[TOP_MAX]) {
  u32 top = 0;
  HB_UNROLL
  for (int i = 0; i < 8; i++) top = larger(top, as_bits(x[i]) & 0x7fffffffu);
  HB_UNROLL
  for (int m = 1; m < 4; m *= 2) top = larger(top, shfl_xor(top, m));
  const u32 scale = mx_scale(top, r.kind);
  HB_UNROLL
  for (int j = 0; j < TOP_MAX; j++)
    if (j < count && (unit & 3) == 0) scale_byte(r, unit >> 2, slots[j]) = (u8)scale;
  return mx_inverse(scale);
}

HB_DEV void give_mxfp4(const Rows& r, int unit, const float (&x)[8], float by, int count, const int (&slots)[TOP_MAX]) {
  const u32 word[1] = {eight_e2m1(x, by)};
  u8* part = (u8*)r.packed + (size_t)(unit >> 4) * r.slots * 64;
  HB_UNROLL
  for (int j = 0; j < TOP_MAX; j++)
    if (j < count) store_words<1>(part + (size_t)slots[j] * 64 + ((unit >> 2 & 3) ^ (slots[j] >> 1 & 3)) * 16 + (unit & 3) * 4, word);
}
