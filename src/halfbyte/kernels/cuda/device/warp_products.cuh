// Products of one warp (mma.sync) with columns from shared memory, as SM12x has them: bf16 or f16 (m16n8k16; also on SM90),
// and block-scaled ones whose operands carry a UE8M0 scale for every 32 values of k: E2M1 weights times E4M3 (m16n8k32) or
// E2M1 activations (m16n8k64), SM12x only. With HB_EMULATE the same names run on a CPU.
//
// Columns lie side by side, 128 or 64 bytes each, in units of sixteen bytes; unit u of column c is at place u ^ (c % 8) of
// eight, or u ^ (c / 2 % 4) of four, so that neither ldmatrix nor a packing thread meets a bank twice.
#pragma once
#include "device/warpgroup.cuh"

// Of eight columns of U units, four from `first` on: b[u] of lane (g, t) is word t of unit first + u of column g.
template <int U> HB_DEV int unit_place(int unit, int column) { return unit ^ (U == 8 ? column & 7 : column >> 1 & 3); }

#ifdef HB_EMULATE
template <int U> HB_DEV void load_columns(u32 (&b)[4], const u8* columns, int first, int lane) {
  const int g = lane >> 2, t = lane & 3;
  for (int u = 0; u < 4; u++) b[u] = lds32(columns + g * 16 * U + unit_place<U>(first + u, g) * 16 + t * 4);
}
namespace emu {
inline float e2m1_value(u32 bits) {
  static const float values[8] = {0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f};
  return bits & 8 ? -values[bits & 7] : values[bits & 7];
}
inline double ue8m0_value(u32 bits) { return (bits & 255) == 255 ? NAN : std::ldexp(1.0, (int)(bits & 255) - 127); }
// K values of 16 rows and 8 columns in registers of 128 / K bits, as PTX has them; KIND 0: 16 bits, 1: E2M1 in the middle of
// bytes times E4M3, 2: E2M1 times E2M1. Scales: rows r and r + 8 from lanes 4 r and 4 r + 1, column c from lane 4 c.
template <int KIND> struct Product16 {
  u32 a[4], b[2], sa, sb;
  int byte_a, byte_b;
  float* d;
  static constexpr int K = KIND == 0 ? 16 : KIND == 1 ? 32 : 64, EACH = K / 8, BITS = 32 / EACH;  // values and bits of a word's
  void bring(Warp& w, int p, int lane) {
    for (int i = 0; i < 4; i++) w.in[p][i][lane] = a[i];
    for (int i = 0; i < 2; i++) w.in[p][4 + i][lane] = b[i];
    w.in[p][6][lane] = sa;
    w.in[p][7][lane] = sb;
  }
  static float weight(u32 v) {
    if (KIND == 0) return operand(v & 0xffff);
    if (KIND == 2) return e2m1_value(v & 15);
    if (v & 0xc3) { fprintf(stderr, "emulator: E2M1 stands in the middle of a byte, the rest is zero\n"); abort(); }
    return e2m1_value(v >> 2 & 15);
  }
  static float activation(u32 v) { return KIND == 0 ? operand(v & 0xffff) : KIND == 1 ? e4m3_value(v & 255) : e2m1_value(v & 15); }
  int take(Warp& w, int p, int lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) {
      const int row = g + (i >> 1) * 8, col = 2 * t + (i & 1);
      double sum = 0;
      for (int block = 0; block < (KIND == 2 ? 2 : 1); block++) {
        double s = 0;
        for (int k = block * 32; k < (KIND == 2 ? block * 32 + 32 : K); k++) {
          const int half = k / (K / 2), lane_of = k % (K / 2) / EACH, shift = k % EACH * BITS;
          const u32 x = w.in[p][(row >= 8) + 2 * half][row % 8 * 4 + lane_of] >> shift, y = w.in[p][4 + half][col * 4 + lane_of] >> shift;
          s += (double)weight(KIND == 1 ? x & 255 : x) * (double)activation(y);
        }
        if (KIND) s *= ue8m0_value(w.in[p][6][row % 8 * 4 + (row >= 8)] >> 8 * (byte_a + block)) * ue8m0_value(w.in[p][7][col * 4] >> 8 * (byte_b + block));
        sum += s;
      }
      d[i] += (float)sum;
    }
    return 0;
  }
};
template <int KIND> void product16(float* d, const u32* a, u32 b0, u32 b1, u32 sa, u32 sb, int byte_a, int byte_b) {
  Product16<KIND> p{{a[0], a[1], a[2], a[3]}, {b0, b1}, sa, sb, byte_a, byte_b, d};
  collective<Product16<KIND>&>(p);
}
}  // namespace emu
HB_DEV void mma_sync(float* d, const u32* a, u32 b0, u32 b1) { emu::product16<0>(d, a, b0, b1, 0, 0, 0, 0); }
template <int A, int B> HB_DEV void mma_mxf8(float* d, const u32* a, u32 b0, u32 b1, u32 sa, u32 sb) { emu::product16<1>(d, a, b0, b1, sa, sb, A, B); }
template <int A, int B> HB_DEV void mma_mxf4(float* d, const u32* a, u32 b0, u32 b1, u32 sa, u32 sb) { emu::product16<2>(d, a, b0, b1, sa, sb, A, B); }
HB_DEV int round_even(float v) { return (int)std::nearbyint(v); }
#else
template <int U> HB_DEV void load_columns(u32 (&b)[4], const u8* columns, int first, int lane) {
  const int row = lane & 7;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(smem(columns) + row * 16 * U + (unit_place<U>(first + (lane >> 3), row) << 4)) : "memory");
}
#define HB_SUMS "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define HB_AB "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1)
// Volatile, so that the arrival that frees the columns stays behind the products that need them.
HB_DEV void mma_sync(float* d, const u32* a, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." HB_OPERANDS ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};" : HB_SUMS : HB_AB);
}
// A, B: which byte of the scales' words. Lanes 4 r and 4 r + 1 give the scales of rows r and r + 8, lane 4 c that of column c.
template <int A, int B> HB_DEV void mma_mxf8(float* d, const u32* a, u32 b0, u32 b1, u32 sa, u32 sb) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e2m1.e4m3.f32.ue8m0 "
               "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3},%10,{%12,0},%11,{%13,0};" : HB_SUMS : HB_AB, "r"(sa), "r"(sb), "n"(A), "n"(B));
}
template <int A, int B> HB_DEV void mma_mxf4(float* d, const u32* a, u32 b0, u32 b1, u32 sa, u32 sb) {
  asm volatile("mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0 "
               "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3},%10,{%12,0},%11,{%13,0};" : HB_SUMS : HB_AB, "r"(sa), "r"(sb), "n"(A), "n"(B));
}
HB_DEV int round_even(float v) { return __float2int_rn(v); }
#endif
