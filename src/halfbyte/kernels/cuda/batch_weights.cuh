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
#include "batch.cuh"

// MXFP4 widens to value * 2^-126, so x comes in times 2^100 and the sum goes out times 2^26: nothing leaves the range.
constexpr float SCALE_OUT = FORMAT == MXFP4 ? 67108864.f : 1.f;
HB_DEV u32 scale_in(u32 v) { return FORMAT == MXFP4 ? bf16_times(v, 0x71807180u) : v; }  // exact: a power of two

template <int F, bool PAIR> struct Weights;  // this lane's part of a chunk
template <bool PAIR> struct Weights<MXFP4, PAIR> {
  u32x4 w;
  u32 s[2] = {0, 0};  // scales of rows g and g + 8 in group 0, then in group 1, in one word; PAIR: a word each, of one group
  HB_DEV_MEMBER void load(u32 chunk, int lane) {
    w = lds128(chunk + lane * 16);
    if (!PAIR) s[0] = lds32(chunk + 512 + lane / 4 * 4);
    else { s[0] = lds8(chunk + 512 + (lane & 30)); s[1] = lds8(chunk + 513 + (lane & 30)); }  // columns 2 t and 2 t + 1 are of group t / 2
  }
  HB_DEV_MEMBER float scale(int group, int high) const {
    if (PAIR) return as_float(s[high] << 23);
    const int shift = 23 - 16 * group - 8 * high;
    return as_float((shift >= 0 ? s[0] << shift : s[0] >> -shift) & 0x7f800000u);
  }
  HB_DEV_MEMBER void operands(int step, u32 (&a)[4]) const {
    const u32 v = step == 0 ? w.x : step == 1 ? w.y : step == 2 ? w.z : w.w, m = 0x81c081c0u;
    const u32 six = rotate_right(v, 6);  // by three: the same times eight, but for bits that the mask drops
    a[0] = v & m; a[1] = six & m; a[2] = (six * 8) & m; a[3] = ((v & 0x001b001bu) * 0x1084u) & m;
  }
};
template <bool PAIR> struct Weights<Q8, PAIR> {
  u32x4 w[2];
  u32 s[2] = {0, 0};
  HB_DEV_MEMBER void load(u32 chunk, int lane) {
    HB_UNROLL
    for (int i = 0; i < 2; i++) { w[i] = lds128(chunk + i * 512 + lane * 16); s[i] = lds32(chunk + 1024 + lane / 4 * 8 + i * 4); }
  }
  HB_DEV_MEMBER float scale(int group, int high) const { return half_value(high ? s[group] >> 16 : s[group] & 0xffffu); }
  // int8 to bf16: low seven bits as the mantissa of 128..255, minus 128, or minus 256 where the sign bit is set
  static HB_DEV_MEMBER u32 widen(u32 v) { return bf16_sub((v & 0x007f007fu) | 0x43004300u, (v & 0x00800080u) | 0x43004300u); }
  HB_DEV_MEMBER void operands(int step, u32 (&a)[4]) const {
    const u32x4& q = w[step / 2];
    const u32 lo = step & 1 ? q.z : q.x, hi = step & 1 ? q.w : q.y;
    a[0] = widen(lo); a[1] = widen(lo >> 8); a[2] = widen(hi); a[3] = widen(hi >> 8);
  }
};
template <bool PAIR> struct Weights<BF16, PAIR> {
  u32x4 w[4];
  HB_DEV_MEMBER void load(u32 chunk, int lane) {
    HB_UNROLL
    for (int i = 0; i < 4; i++) w[i] = lds128(chunk + i * 512 + lane * 16);
  }
  HB_DEV_MEMBER float scale(int, int) const { return 1.f; }
  HB_DEV_MEMBER void operands(int step, u32 (&a)[4]) const { a[0] = w[step].x; a[1] = w[step].y; a[2] = w[step].z; a[3] = w[step].w; }
};

// A chunk's products, before their scales: of both groups in one sum (PAIR), or of each in its own.
template <bool PAIR> struct Chunk {
  static constexpr int GROUPS = PAIR ? 1 : 2, APART = PAIRED && !PAIR ? 2 : 1;
  Weights<FORMAT, PAIR> w;
  float d[GROUPS][4] = {};
  HB_DEV_MEMBER void multiply(const u32 (&b)[8]) {
    HB_UNROLL
    for (int step = 0; step < 4; step++) {
      float(&to)[4] = d[step * GROUPS / 4];
      u32 a[4];
      w.operands(step, a);
      if (step % (4 / GROUPS) == 0) mma_first(to, a[0], a[1], a[2], a[3], b[2 * step], b[2 * step + 1]);
      else mma(to, a[0], a[1], a[2], a[3], b[2 * step], b[2 * step + 1]);
    }
  }
  HB_DEV_MEMBER void add_to(float (&sum)[APART][4]) const {
    HB_UNROLL
    for (int group = 0; group < GROUPS; group++) {
      float(&to)[4] = sum[group % APART];
      const float up = w.scale(group, 0), low = w.scale(group, 1);
      to[0] += d[group][0] * up; to[1] += d[group][1] * up; to[2] += d[group][2] * low; to[3] += d[group][3] * low;
    }
  }
};

// acc: rows g (0, 1) and g + 8 (2, 3) of columns 2 t and 2 t + 1. `whole`: this warp has EACH chunks, not one less.
template <bool PAIR> HB_DEV void multiply_chunks(float (&acc)[4], const u32 (&x)[EACH][8], u32 from, bool whole, int lane) {
  constexpr int ALWAYS = EACH - (SHORT > 0);
  if (FORMAT == BF16) {  // no scales, and 16 registers of weights: one chunk at a time
    HB_UNROLL
    for (int c = 0; c < EACH; c++) {
      if (c >= ALWAYS && !whole) continue;
      Weights<FORMAT, PAIR> w;
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
  Chunk<PAIR> chunk[EACH];
  if (ALWAYS < EACH && whole) {  // first, so that nothing waits for it; without it there are zeros to add
    chunk[EACH - 1].w.load(from + (EACH - 1) * CHUNK, lane);
    chunk[EACH - 1].multiply(x[EACH - 1]);
  }
  HB_UNROLL
  for (int c = 0; c < ALWAYS; c++) chunk[c].w.load(from + c * CHUNK, lane);
  float sum[Chunk<PAIR>::APART][4] = {};
  HB_UNROLL
  for (int c = 0; c < EACH; c++) {
    if (c < ALWAYS) chunk[c].multiply(x[c]);
    chunk[c].add_to(sum);
  }
  HB_UNROLL
  for (int i = 0; i < 4; i++) acc[i] = Chunk<PAIR>::APART == 2 ? sum[0][i] + sum[Chunk<PAIR>::APART - 1][i] : sum[0][i];
}
