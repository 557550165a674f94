// A warp's chunks of a tile (16 rows x 64 k each, layout tile16) from the ring, widened to bf16, times its part of eight
// columns. Scales come after the product, one multiply-add per sum and group of 32: eight columns make that cheaper than
// scaling the weights.
//
// An H200 that streams weights at 4.3 TB/s draws some 640 of its 700 W for that alone and slows down above 700, so what this loop
// costs in energy is what a batch costs in time (docs/LOG.md). Up to four columns, which is what experts have in most batches,
// are PAIRED: columns 0 to 3 hold them in even groups of 32 and zeros in odd ones, columns 4 to 7 the other way round. One sum then
// serves a whole chunk, and a lane needs two scales of it instead of four. Sums of even and of odd groups are kept apart in both
// ways, so that a column's result has the same bits in either.
#pragma once
#include "batch/shape.cuh"

// What x is multiplied by on its way in and sums on their way out: see widen.cuh.
constexpr float SCALE_OUT = FORMAT == MXFP4 ? E2M1_SCALE_OUT : 1.f;
HB_DEV u32 scale_in(u32 v) { return FORMAT == MXFP4 ? bf16_mul(v, 0x71807180u) : v; }  // 2^100, exact

using Weights = Chunk<FORMAT, true>;  // this lane's part of a chunk

// Scales of rows g and g + 8: in both groups of a chunk (one word), or in the group that this lane's columns are of (a byte each).
template <int F, bool PAIR> struct Scales;
template <bool PAIR> struct Scales<MXFP4, PAIR> {
  u32 s[2] = {0, 0};
  HB_DEV_MEMBER void load(u32 chunk, int lane) {
    if (!PAIR) { s[0] = lds32(chunk + 512 + lane / 4 * 4); return; }
    const u32 at = chunk + 512 + lane / 4 * 4 + lane % 4 / 2 * 2;
    s[0] = lds8(at); s[1] = lds8(at + 1);
  }
  HB_DEV_MEMBER float of(int group, int high) const {
    if (PAIR) return as_float(s[high] << 23);
    const int shift = 23 - 16 * group - 8 * high;
    return as_float((shift >= 0 ? s[0] << shift : s[0] >> -shift) & 0x7f800000u);
  }
};
template <bool PAIR> struct Scales<Q8, PAIR> {
  u32 s[2] = {0, 0};
  HB_DEV_MEMBER void load(u32 chunk, int lane) { s[0] = lds32(chunk + 1024 + lane / 4 * 8); s[1] = lds32(chunk + 1028 + lane / 4 * 8); }
  HB_DEV_MEMBER float of(int group, int high) const { return half_value(high ? s[group] >> 16 : s[group] & 0xffffu); }
};
template <bool PAIR> struct Scales<BF16, PAIR> {  // none
  HB_DEV_MEMBER void load(u32, int) {}
  HB_DEV_MEMBER float of(int, int) const { return 1.f; }
};

// acc: rows g (0, 1) and g + 8 (2, 3) of columns 2 t and 2 t + 1. `whole`: this warp has EACH chunks, not one less.
template <bool PAIR> HB_DEV void multiply_chunks(float (&acc)[4], const u32 (&x)[EACH][8], u32 from, bool whole, int lane) {
  constexpr int ALWAYS = EACH - (SHORT > 0);
  if (FORMAT == BF16) {  // no scales, and 16 registers of weights: one chunk at a time
    HB_UNROLL
    for (int c = 0; c < EACH; c++) {
      if (c >= ALWAYS && !whole) continue;
      Weights w;
      w.load(from + c * CHUNK, lane);
      HB_UNROLL
      for (int step = 0; step < 4; step++) {
        u32 a[4];
        w.operands(step, a);
        mma(acc, a[0], a[1], a[2], a[3], x[c][2 * step], x[c][2 * step + 1]);
      }
    }
    return;
  }
  constexpr int GROUPS = PAIR ? 1 : 2, APART = PAIRED && !PAIR ? 2 : 1;  // sums of a chunk; those kept apart until the end
  Weights w[EACH];
  Scales<FORMAT, PAIR> scales[EACH];
  float d[EACH][GROUPS][4] = {};
  auto products = [&](int c) {
    HB_UNROLL
    for (int step = 0; step < 4; step++) {
      float(&to)[4] = d[c][step * GROUPS / 4];
      u32 a[4];
      w[c].operands(step, a);
      if (step % (4 / GROUPS) == 0) mma_first(to, a[0], a[1], a[2], a[3], x[c][2 * step], x[c][2 * step + 1]);
      else mma(to, a[0], a[1], a[2], a[3], x[c][2 * step], x[c][2 * step + 1]);
    }
  };
  if (ALWAYS < EACH && whole) {  // first, so that nothing waits for it; without it there are zeros to add
    w[EACH - 1].load(from + (EACH - 1) * CHUNK, lane);
    products(EACH - 1);
  }
  HB_UNROLL
  for (int c = 0; c < ALWAYS; c++) w[c].load(from + c * CHUNK, lane);
  HB_UNROLL
  for (int c = 0; c < EACH; c++)
    if (c < ALWAYS || whole) scales[c].load(from + c * CHUNK, lane);  // else zeros: what lies there may be infinite
  float sum[APART][4] = {};
  HB_UNROLL
  for (int c = 0; c < EACH; c++) {
    if (c < ALWAYS) products(c);
    HB_UNROLL
    for (int group = 0; group < GROUPS; group++) {
      const float(&v)[4] = d[c][group];
      float(&to)[4] = sum[group % APART];
      const float up = scales[c].of(group, 0), low = scales[c].of(group, 1);
      to[0] += v[0] * up; to[1] += v[1] * up; to[2] += v[2] * low; to[3] += v[3] * low;
    }
  }
  HB_UNROLL
  for (int i = 0; i < 4; i++) acc[i] = APART == 1 ? sum[0][i] : sum[0][i] + sum[APART - 1][i];
}
