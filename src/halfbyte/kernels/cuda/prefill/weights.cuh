// A chunk of weights (16 rows x 64 k in the layout tile16) from shared memory into the A registers of four products.
#pragma once
#include "prefill/grouped.cuh"

template <int F> struct Raw;  // this lane's part of a chunk, as it lies in memory
template <> struct Raw<MXFP4> {
  u32x4 w;
  u32 s;
  HB_DEV_MEMBER void load(const u8* chunk, int lane) { w = lds128(chunk + lane * 16); s = lds32(chunk + 512 + (lane >> 2) * 4); }
  // 2^(e - base + 126) as bf16 in both halves, so that a code, which comes as value * 2^-126, becomes value * 2^(e - base).
  // `offset`: (253 - base) << 7 in both halves; e <= base + 1 for every group that is not all zeros (products.py).
  // A multiplication where a shift would do: the logic pipe is the busier one.
  HB_DEV_MEMBER u32 scale(u32 select, u32 offset) const { return permute(s, 0, select) * 0x00800080u + offset; }
  HB_DEV_MEMBER void widen(u32 (&a)[16], u32 offset) const {
    const u32 words[4] = {w.x, w.y, w.z, w.w};
    HB_UNROLL
    for (int half = 0; half < 2; half++) {
      const u32 up = scale(half ? 0x4442 : 0x4440, offset), low = scale(half ? 0x4443 : 0x4441, offset);  // rows g and g + 8
      HB_UNROLL
      for (int i = 2 * half; i < 2 * half + 2; i++) {
        const u32 v = words[i];
        a[4 * i] = bf16_mul(widen_e2m1<0>(v), up);
        a[4 * i + 1] = bf16_mul(widen_e2m1<1>(v), low);
        a[4 * i + 2] = bf16_mul(widen_e2m1<2, true>(v), up);
        a[4 * i + 3] = bf16_mul(widen_e2m1<3>(v), low);
      }
    }
  }
};
template <> struct Raw<Q8> {
  u32x4 w[2];
  u32 s[2];
  HB_DEV_MEMBER void load(const u8* chunk, int lane) {
    HB_UNROLL
    for (int i = 0; i < 2; i++) { w[i] = lds128(chunk + i * 512 + lane * 16); s[i] = lds32(chunk + 1024 + (lane >> 2) * 8 + i * 4); }
  }
  HB_DEV_MEMBER void widen(u32 (&a)[16], u32) const {
    HB_UNROLL
    for (int group = 0; group < 2; group++) {
      const u32 up = permute(s[group], 0, 0x1010), low = permute(s[group], 0, 0x3232);
      const u32 words[4] = {w[group].x, w[group].y, w[group].z, w[group].w};  // (i % 2, p)
      HB_UNROLL
      for (int i = 0; i < 4; i++) {
        const u32 v = words[i] ^ 0x80808080u;
        u32* to = a + group * 8 + i * 2;
        to[0] = half_mul(widen_int8_f16(v, 0x4240), up);
        to[1] = half_mul(widen_int8_f16(v, 0x4341), low);
      }
    }
  }
};
template <> struct Raw<BF16> {
  u32x4 w[4];
  HB_DEV_MEMBER void load(const u8* chunk, int lane) {
    HB_UNROLL
    for (int i = 0; i < 4; i++) w[i] = lds128(chunk + i * 512 + lane * 16);
  }
  HB_DEV_MEMBER void widen(u32 (&a)[16], u32) const {
    HB_UNROLL
    for (int i = 0; i < 4; i++) { a[4 * i] = w[i].x; a[4 * i + 1] = w[i].y; a[4 * i + 2] = w[i].z; a[4 * i + 3] = w[i].w; }
  }
};
