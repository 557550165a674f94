// A warp's chunks of a tile (16 rows x 64 k each, layout tile16) from the ring, widened to bf16, times its part of eight
// columns. Scales come after the product, one multiply-add per sum and group of 32: eight columns make that cheaper than
// scaling the weights.
#pragma once
#include "batch.cuh"

// MXFP4 widens to value * 2^-126, so x comes in times 2^100 and the sum goes out times 2^26: nothing leaves the range.
constexpr float SCALE_OUT = FORMAT == MXFP4 ? 67108864.f : 1.f;
HB_DEV u32 scale_in(u32 v) { return FORMAT == MXFP4 ? bf16_times(v, 0x71807180u) : v; }  // exact: a power of two

template <int F> struct Weights;  // this lane's part of a chunk
template <> struct Weights<MXFP4> {
  u32x4 w;
  u32 s;  // scales of rows g and g + 8 in group 0, then in group 1
  HB_DEV_MEMBER void load(u32 chunk, int lane) { w = lds128(chunk + lane * 16); s = lds32(chunk + 512 + lane / 4 * 4); }
  HB_DEV_MEMBER void none() { w = {0, 0, 0, 0}; s = 0; }
  HB_DEV_MEMBER float scale(int group, int high) const {
    const int shift = 23 - 16 * group - 8 * high;
    return as_float((shift >= 0 ? s << shift : s >> -shift) & 0x7f800000u);
  }
  HB_DEV_MEMBER void operands(int step, u32 (&a)[4]) const {
    const u32 v = step == 0 ? w.x : step == 1 ? w.y : step == 2 ? w.z : w.w, m = 0x81c081c0u;
    a[0] = v & m; a[1] = rotate_right(v, 6) & m; a[2] = rotate_right(v, 3) & m; a[3] = ((v & 0x001b001bu) * 0x1084u) & m;
  }
};
template <> struct Weights<Q8> {
  u32x4 w[2];
  u32 s[2];
  HB_DEV_MEMBER void load(u32 chunk, int lane) {
    HB_UNROLL
    for (int i = 0; i < 2; i++) { w[i] = lds128(chunk + i * 512 + lane * 16); s[i] = lds32(chunk + 1024 + lane / 4 * 8 + i * 4); }
  }
  HB_DEV_MEMBER void none() { w[0] = w[1] = {0, 0, 0, 0}; s[0] = s[1] = 0; }
  HB_DEV_MEMBER float scale(int group, int high) const { return half_value(high ? s[group] >> 16 : s[group] & 0xffffu); }
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
  HB_DEV_MEMBER void none() { w[0] = w[1] = w[2] = w[3] = {0, 0, 0, 0}; }
  HB_DEV_MEMBER float scale(int, int) const { return 1.f; }
  HB_DEV_MEMBER void operands(int step, u32 (&a)[4]) const { a[0] = w[step].x; a[1] = w[step].y; a[2] = w[step].z; a[3] = w[step].w; }
};

// acc: rows g (0, 1) and g + 8 (2, 3) of columns 2 t and 2 t + 1. `mine`: chunks from this warp's first to the tile's end.
HB_DEV void multiply_chunks(float (&acc)[4], const u32 (&x)[EACH][8], u32 from, int mine, int lane) {
  constexpr int AT_ONCE = FORMAT == BF16 ? 1 : EACH;  // chunks in registers; bf16 has 16 registers of them
  HB_UNROLL
  for (int first = 0; first < EACH; first += AT_ONCE) {
    Weights<FORMAT> w[AT_ONCE];
    HB_UNROLL
    for (int c = 0; c < AT_ONCE; c++) {
      if (CHUNKS % EACH == 0 || first + c < mine) w[c].load(from + (first + c) * CHUNK, lane);
      else w[c].none();
    }
    HB_UNROLL
    for (int c = 0; c < AT_ONCE; c++)
      HB_UNROLL
      for (int group = 0; group < 2; group++) {
        const u32(&b)[8] = x[first + c];
        float d[4];
        u32 a[4];
        w[c].operands(2 * group, a);
        if (FORMAT == BF16) mma(acc, a[0], a[1], a[2], a[3], b[4 * group], b[4 * group + 1]);
        else mma_first(d, a[0], a[1], a[2], a[3], b[4 * group], b[4 * group + 1]);
        w[c].operands(2 * group + 1, a);
        if (FORMAT == BF16) { mma(acc, a[0], a[1], a[2], a[3], b[4 * group + 2], b[4 * group + 3]); continue; }
        mma(d, a[0], a[1], a[2], a[3], b[4 * group + 2], b[4 * group + 3]);
        const float up = w[c].scale(group, 0), low = w[c].scale(group, 1);
        acc[0] += d[0] * up; acc[1] += d[1] * up; acc[2] += d[2] * low; acc[3] += d[3] * low;
      }
  }
}
