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

// MXFP4 widens to value * 2^-126, so x comes in times 2^100 and the sum goes out times 2^26: nothing leaves the range.
constexpr float SCALE_OUT = FORMAT == MXFP4 ? 67108864.f : 1.f;
HB_DEV u32 scale_in(u32 v) { return FORMAT == MXFP4 ? bf16_times(v, 0x71807180u) : v; }  // exact: a power of two

template <int F> struct Weights;  // this lane's part of a chunk
template <> struct Weights<MXFP4> {
  u32x4 w;
  HB_DEV_MEMBER void load(u32 chunk, int lane) { w = lds128(chunk + lane * 16); }
  HB_DEV_MEMBER void operands(int step, u32 (&a)[4]) const {
    const u32 v = step == 0 ? w.x : step == 1 ? w.y : step == 2 ? w.z : w.w, m = 0x81c081c0u;
    const u32 six = rotate_right(v, 6);  // by three: the same times eight, but for bits that the mask drops
    a[0] = v & m; a[1] = six & m; a[2] = (six * 8) & m; a[3] = ((v & 0x001b001bu) * 0x1084u) & m;
  }
};
template <> struct Weights<Q8> {
  u32x4 w[2];
  HB_DEV_MEMBER void load(u32 chunk, int lane) { w[0] = lds128(chunk + lane * 16); w[1] = lds128(chunk + 512 + lane * 16); }
  // int8 to bf16: low seven bits as the mantissa of 128..255, minus 128, or minus 256 where the sign bit is set
  static HB_DEV_MEMBER u32 widen(u32 v) { return bf16_sub((v & 0x007f007fu) | 0x43004300u, (v & 0x00800080u) | 0x43004300u); }
  HB_DEV_MEMBER void operands(int step, u32 (&a)[4]) const {
    const u32x4& q = w[step / 2];
    const u32 lo = step & 1 ? q.z : q.x, hi = step & 1 ? q.w : q.y;
    a[0] = widen(lo); a[1] = widen(lo >> 8); a[2] = widen(hi); a[3] = widen(hi >> 8);
  }
};
template <> struct Weights<BF16> {
  u32x4 w[4];
  HB_DEV_MEMBER void load(u32 chunk, int lane) {
    HB_UNROLL
    for (int i = 0; i < 4; i++) w[i] = lds128(chunk + i * 512 + lane * 16);
  }
  HB_DEV_MEMBER void operands(int step, u32 (&a)[4]) const { a[0] = w[step].x; a[1] = w[step].y; a[2] = w[step].z; a[3] = w[step].w; }
};

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
      Weights<FORMAT> w;
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
  Weights<FORMAT> w[EACH];
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
