// The fp8 side of the grouped product: E2M1 weights as E5M2, activations as E4M3, twice the tensor cores' bf16 rate.
//
// E5M2 is the upper byte of f16, and E2M1 times a power of two fits it exactly: codes are moved to where f16 has exponent and
// mantissa, multiplied by 2^(e - top + 15) (top: the row's largest scale), and the upper bytes are gathered. Exact while a
// row's scales lie within 16 octaves; others are multiplied in bf16 (fp8.py). The sum is multiplied by 2^(top - 128) and
// by the column's own scale at the end.
//
// A chunk is two products of 32 k. Lane (g, t) has rows g and g + 8 and eight neighbouring values t of each group of 32, so a
// product's place 4 t + j is value 8 t + {0, 2, 1, 3}[j] of the group, place 16 + 4 t + j value 8 t + 4 + {0, 2, 1, 3}[j].
// Columns lie in shared memory as rows of 128 bytes (two chunks), swizzled as bf16 ones are.
#pragma once
#include "prefill/weights.cuh"

#ifndef HB_EMULATE
template <int N> HB_DEV void wgmma8(float (&d)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b);
#define HB_D136 HB_D128 ",%64,%65,%66,%67"
#define HB_D144 HB_D136 ",%68,%69,%70,%71"
#define HB_D152 HB_D144 ",%72,%73,%74,%75"
#define HB_D160 HB_D152 ",%76,%77,%78,%79"
#define HB_D168 HB_D160 ",%80,%81,%82,%83"
#define HB_D176 HB_D168 ",%84,%85,%86,%87"
#define HB_D184 HB_D176 ",%88,%89,%90,%91"
#define HB_D192 HB_D184 ",%92,%93,%94,%95"
#define HB_D200 HB_D192 ",%96,%97,%98,%99"
#define HB_D208 HB_D200 ",%100,%101,%102,%103"
#define HB_D216 HB_D208 ",%104,%105,%106,%107"
#define HB_D224 HB_D216 ",%108,%109,%110,%111"
#define HB_D232 HB_D224 ",%112,%113,%114,%115"
#define HB_D240 HB_D232 ",%116,%117,%118,%119"
#define HB_D248 HB_D240 ",%120,%121,%122,%123"
#define HB_D256 HB_D248 ",%124,%125,%126,%127"
#define HB_O136 HB_O128, HB_O4(64)
#define HB_O144 HB_O136, HB_O4(68)
#define HB_O152 HB_O144, HB_O4(72)
#define HB_O160 HB_O152, HB_O4(76)
#define HB_O168 HB_O160, HB_O4(80)
#define HB_O176 HB_O168, HB_O4(84)
#define HB_O184 HB_O176, HB_O4(88)
#define HB_O192 HB_O184, HB_O4(92)
#define HB_O200 HB_O192, HB_O4(96)
#define HB_O208 HB_O200, HB_O4(100)
#define HB_O216 HB_O208, HB_O4(104)
#define HB_O224 HB_O216, HB_O4(108)
#define HB_O232 HB_O224, HB_O4(112)
#define HB_O240 HB_O232, HB_O4(116)
#define HB_O248 HB_O240, HB_O4(120)
#define HB_O256 HB_O248, HB_O4(124)
#define HB_WGMMA8(N, A0, A1, A2, A3, B)                                                                                  \
  template <> HB_DEV void wgmma8<N>(float (&d)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {                             \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N                                                                     \
                 "k32.f32.e5m2.e4m3 {" HB_D##N "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B ", 1, 1, 1;"                   \
                 : HB_O##N : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));                                                  \
  }
HB_WGMMA8(16, 8, 9, 10, 11, 12)
HB_WGMMA8(24, 12, 13, 14, 15, 16)
HB_WGMMA8(32, 16, 17, 18, 19, 20)
HB_WGMMA8(40, 20, 21, 22, 23, 24)
HB_WGMMA8(48, 24, 25, 26, 27, 28)
HB_WGMMA8(56, 28, 29, 30, 31, 32)
HB_WGMMA8(64, 32, 33, 34, 35, 36)
HB_WGMMA8(72, 36, 37, 38, 39, 40)
HB_WGMMA8(80, 40, 41, 42, 43, 44)
HB_WGMMA8(88, 44, 45, 46, 47, 48)
HB_WGMMA8(96, 48, 49, 50, 51, 52)
HB_WGMMA8(104, 52, 53, 54, 55, 56)
HB_WGMMA8(112, 56, 57, 58, 59, 60)
HB_WGMMA8(120, 60, 61, 62, 63, 64)
HB_WGMMA8(128, 64, 65, 66, 67, 68)
HB_WGMMA8(136, 68, 69, 70, 71, 72)
HB_WGMMA8(144, 72, 73, 74, 75, 76)
HB_WGMMA8(152, 76, 77, 78, 79, 80)
HB_WGMMA8(160, 80, 81, 82, 83, 84)
HB_WGMMA8(168, 84, 85, 86, 87, 88)
HB_WGMMA8(176, 88, 89, 90, 91, 92)
HB_WGMMA8(184, 92, 93, 94, 95, 96)
HB_WGMMA8(192, 96, 97, 98, 99, 100)
HB_WGMMA8(200, 100, 101, 102, 103, 104)
HB_WGMMA8(208, 104, 105, 106, 107, 108)
HB_WGMMA8(216, 108, 109, 110, 111, 112)
HB_WGMMA8(224, 112, 113, 114, 115, 116)
HB_WGMMA8(232, 116, 117, 118, 119, 120)
HB_WGMMA8(240, 120, 121, 122, 123, 124)
HB_WGMMA8(248, 124, 125, 126, 127, 128)
HB_WGMMA8(256, 128, 129, 130, 131, 132)
#endif

// This lane's part of a chunk as E5M2: four registers for each of two products. `up`, `low`: (30 - top) of rows g and g + 8,
// in both halves of a word, where f16 has its exponent.
HB_DEV void widen_chunk_e5m2(const Raw<MXFP4>& raw, u32 up, u32 low, u32 (&a)[8]) {
  const u32 words[4] = {raw.w.x, raw.w.y, raw.w.z, raw.w.w};
  HB_UNROLL
  for (int half = 0; half < 2; half++) {
    const u32 s_up = permute(raw.s, 0, half ? 0x4242 : 0x4040) * 1024u + up;
    const u32 s_low = permute(raw.s, 0, half ? 0x4343 : 0x4141) * 1024u + low;
    HB_UNROLL
    for (int i = 0; i < 2; i++) widen_e2m1_e5m2(words[2 * half + i], s_up, s_low, a[4 * half + 2 * i], a[4 * half + 2 * i + 1]);
  }
}
