// What Hopper has beyond instructions.cuh: matrix products of a warpgroup (wgmma, A from registers, B from shared memory), the
// register budget of a role, and programmatic dependent launch. With HB_EMULATE the same names run on a CPU.
// Operands are bf16, or f16 where HB_HALF is 1.
//
// B lies in shared memory as rows of 64 bf16 (128 bytes, one row per column of the product, 1024-byte aligned), the
// sixteen-byte units of row r permuted by XOR with r % 8: the 128-byte swizzle of the tensor core's descriptor.
#pragma once
#include "device/instructions.cuh"
#ifndef HB_HALF
#define HB_HALF 0
#endif

#ifdef HB_EMULATE
namespace emu {
inline float operand(u32 bits);
struct Wgmma {  // one warp's share: 16 rows of A, all columns of B
  u32 a[4]; const u8* b; int n; float* d;
  void bring(Warp& w, int p, int lane) { for (int i = 0; i < 4; i++) w.in[p][i][lane] = a[i]; }
  int take(Warp& w, int p, int lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < n / 2; i++) {
      const int row = g + ((i >> 1) & 1) * 8, col = i / 4 * 8 + 2 * t + (i & 1);
      double s = 0;
      for (int k = 0; k < 16; k++) {
        u32 x = w.in[p][(row >= 8) + 2 * (k / 8)][(row % 8) * 4 + (k % 8) / 2];
        uintptr_t at = (uintptr_t)b + col * 128 + k * 2;
        at ^= (at >> 7 & 7) << 4;
        s += (double)operand(k & 1 ? x >> 16 : x & 0xffff) * (double)operand(*(const u16*)at);
      }
      d[i] += (float)s;
    }
    return 0;
  }
};
inline float operand(u32 bits) { return HB_HALF ? half_value(bits) : bf(bits); }
inline float e5m2(u32 b) { return half_value((b & 255) << 8); }
struct Wgmma8 {  // one warp's share: 16 rows of A (E5M2), all columns of B (E4M3), 32 k
  u32 a[4]; const u8* b; int n; float* d;
  void bring(Warp& w, int p, int lane) { for (int i = 0; i < 4; i++) w.in[p][i][lane] = a[i]; }
  int take(Warp& w, int p, int lane) {
    for (int i = 0; i < n / 2; i++) {
      const int row = lane / 4 + ((i >> 1) & 1) * 8, col = i / 4 * 8 + 2 * (lane % 4) + (i & 1);
      double s = 0;
      for (int k = 0; k < 32; k++) {
        const u32 x = w.in[p][(row >= 8) + 2 * (k / 16)][(row % 8) * 4 + k % 16 / 4] >> (8 * (k % 4));
        uintptr_t at = (uintptr_t)b + col * 128 + k;
        at ^= (at >> 7 & 7) << 4;
        s += (double)e5m2(x) * (double)e4m3_value(*(const u8*)at);
      }
      d[i] += (float)s;
    }
    return 0;
  }
};
}  // namespace emu
HB_DEV u64 b_low(const void* p) { return (u64)(uintptr_t)p; }
HB_DEV u64 b_tile(u64 low, int bytes) { return low + bytes; }
template <int N> HB_DEV void wgmma(float (&d)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
  emu::Wgmma w{{a0, a1, a2, a3}, (const u8*)(uintptr_t)b, N, d};
  emu::collective<emu::Wgmma&>(w);
}
template <int N> HB_DEV void wgmma8(float (&d)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {
  emu::Wgmma8 w{{a0, a1, a2, a3}, (const u8*)(uintptr_t)b, N, d};
  emu::collective<emu::Wgmma8&>(w);
}
HB_DEV void wgmma_fence() {}
HB_DEV void wgmma_commit() {}
template <int PENDING, int WHERE = 0> HB_DEV void wgmma_wait() {}
template <int N> HB_DEV void wgmma_settle(float (&)[N]) {}
template <int N> HB_DEV void wgmma_clear(float (&d)[N]) { for (float& v : d) v = 0.f; }
template <int N> HB_DEV void more_registers() {}
template <int N> HB_DEV void fewer_registers() {}
HB_DEV void shared_add(int* p, int v) { *p += v; emu::moved(); }
HB_DEV float reciprocal(float v) { return 1.f / v; }
HB_DEV float divide_exactly(float a, float b) { return a / b; }
HB_DEV float power_of_two(float v) { return std::exp2(v); }
HB_DEV int anew(int v) { return v; }
HB_DEV void copy_word(void* to, const void* from) { memcpy(to, from, 4); }
HB_DEV void copied_words() {}
HB_DEV void put32(void* p, u32 v) { memcpy(p, &v, 4); }
HB_DEV void put16(void* p, u32 v) { const u16 low = (u16)v; memcpy(p, &low, 2); }
template <int N> HB_DEV void store_words(void* p, const u32 (&v)[N]) { memcpy(p, v, 4 * N); }
// Clusters of two blocks, neighbours in the grid. What lies at a multiple of 1024 lies at the same place in both.
namespace emu {
inline u8* aligned(int block) { return (u8*)(((uintptr_t)machine()->blocks[block].shared.data() + 127 & ~(uintptr_t)127) + 1023 & ~(uintptr_t)1023); }
template <class T> T* in_block(int rank, T* p) {
  const int here = machine()->now->block_id;
  return (T*)(aligned((here & ~1) + rank) + ((u8*)p - aligned(here)));
}
}  // namespace emu
HB_DEV int cluster_rank() { return hb_block() & 1; }
HB_DEV void cluster_sync() {
  emu::Machine* m = emu::machine();
  emu::NamedBarrier& n = m->blocks[hb_block() & ~1].named[14];
  const u64 e = n.epoch;
  if (++n.arrived == 2 * (int)m->now->block->warps.size() * 32) { n.arrived = 0; n.epoch++; emu::moved(); }
  while (n.epoch == e) emu::yield();
}
HB_DEV void bar_arrive_in(int rank, u64* bar) { bar_arrive(emu::in_block(rank, bar), 1); }
#ifndef HB_SM80
HB_DEV void bulk_copy_to_both(void* dst, const void* src, u32 bytes, u64* bar) {
  for (int r = 0; r < 2; r++) bulk_copy(emu::in_block(r, (u8*)dst), src, bytes, emu::in_block(r, bar), 0);
}
#endif
#else
// Descriptor of B: rows of 128 bytes, eight to a swizzle atom of 1024. Only the low word moves.
// A reduction leaves its result in a uniform register, where the tensor core wants it: no move per product.
#if HB_HALF
#define HB_OPERANDS "f16.f16"
#else
#define HB_OPERANDS "bf16.bf16"
#endif
HB_DEV u32 b_low(const void* p) { return __reduce_min_sync(0xffffffffu, smem(p)) >> 4 | 1 << 16; }
HB_DEV u64 b_tile(u32 low, int bytes) {
  u64 d;
  asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(low + (bytes >> 4)), "n"(1 << 30 | 1024 >> 4));
  return d;
}
HB_DEV void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
HB_DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// WHERE keeps two waits apart that the compiler would otherwise merge into one after their paths have joined.
template <int PENDING, int WHERE = 0> HB_DEV void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0; // %1" ::"n"(PENDING), "n"(WHERE) : "memory"); }
template <int N> HB_DEV void wgmma_settle(float (&d)[N]) {  // results may be read from here on, not before
  HB_UNROLL
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N> HB_DEV void wgmma_clear(float (&d)[N]) {  // opaque, so that sums of different products share no registers
  HB_UNROLL
  for (int i = 0; i < N; i++) asm volatile("mov.b32 %0, 0;" : "=f"(d[i]));
}
template <int N> HB_DEV void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> HB_DEV void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
HB_DEV void shared_add(int* p, int v) { atomicAdd(p, v); }
HB_DEV float divide_exactly(float a, float b) { return __fdiv_rn(a, b); }
HB_DEV float reciprocal(float v) { float r; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v)); return r; }
HB_DEV float power_of_two(float v) { float r; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v)); return r; }
HB_DEV void put32(void* p, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(smem(p)), "r"(v) : "memory"); }
HB_DEV void put16(void* p, u32 v) { asm volatile("st.shared.u16 [%0], %1;" ::"r"(smem(p)), "h"((u16)v) : "memory"); }
// Four bytes on their way to shared memory; a thread waits for those it asked for.
HB_DEV void copy_word(void* to, const void* from) { asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem(to)), "l"(from) : "memory"); }
HB_DEV void copied_words() { asm volatile("cp.async.wait_all;" ::: "memory"); }
HB_DEV int anew(int v) { asm volatile("" : "+r"(v)); return v; }  // what is made of it is made here, and not kept from before
template <int N> HB_DEV void store_words(void* p, const u32 (&v)[N]) {
  if constexpr (N == 4) asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
  else if constexpr (N == 2) asm volatile("st.global.v2.u32 [%0], {%1,%2};" ::"l"(p), "r"(v[0]), "r"(v[1]) : "memory");
  else { static_assert(N == 1, "1, 2 or 4 words"); asm volatile("st.global.u32 [%0], %1;" ::"l"(p), "r"(v[0]) : "memory"); }
}
// Clusters of two blocks. Barriers and copies reach the same place of the other block's shared memory.
HB_DEV int cluster_rank() { int r; asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
HB_DEV void cluster_sync() { asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory"); }
HB_DEV void bar_arrive_in(int rank, u64* bar) {
  asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there]; }"
               ::"r"(smem(bar)), "r"(rank) : "memory");
}
HB_DEV void bulk_copy_to_both(void* dst, const void* src, u32 bytes, u64* bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
               ::"r"(smem(dst)), "l"(src), "r"(bytes), "r"(smem(bar)), "h"((u16)3) : "memory");
}

// D (64 x N, float) = A (64 x 16, this lane's four registers) B + D, for every N a multiple of 8 up to 128.
template <int N> HB_DEV void wgmma(float (&d)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b);
#define HB_D8 "%0,%1,%2,%3"
#define HB_D16 HB_D8 ",%4,%5,%6,%7"
#define HB_D24 HB_D16 ",%8,%9,%10,%11"
#define HB_D32 HB_D24 ",%12,%13,%14,%15"
#define HB_D40 HB_D32 ",%16,%17,%18,%19"
#define HB_D48 HB_D40 ",%20,%21,%22,%23"
#define HB_D56 HB_D48 ",%24,%25,%26,%27"
#define HB_D64 HB_D56 ",%28,%29,%30,%31"
#define HB_D72 HB_D64 ",%32,%33,%34,%35"
#define HB_D80 HB_D72 ",%36,%37,%38,%39"
#define HB_D88 HB_D80 ",%40,%41,%42,%43"
#define HB_D96 HB_D88 ",%44,%45,%46,%47"
#define HB_D104 HB_D96 ",%48,%49,%50,%51"
#define HB_D112 HB_D104 ",%52,%53,%54,%55"
#define HB_D120 HB_D112 ",%56,%57,%58,%59"
#define HB_D128 HB_D120 ",%60,%61,%62,%63"
#define HB_O4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define HB_O8 HB_O4(0)
#define HB_O16 HB_O8, HB_O4(4)
#define HB_O24 HB_O16, HB_O4(8)
#define HB_O32 HB_O24, HB_O4(12)
#define HB_O40 HB_O32, HB_O4(16)
#define HB_O48 HB_O40, HB_O4(20)
#define HB_O56 HB_O48, HB_O4(24)
#define HB_O64 HB_O56, HB_O4(28)
#define HB_O72 HB_O64, HB_O4(32)
#define HB_O80 HB_O72, HB_O4(36)
#define HB_O88 HB_O80, HB_O4(40)
#define HB_O96 HB_O88, HB_O4(44)
#define HB_O104 HB_O96, HB_O4(48)
#define HB_O112 HB_O104, HB_O4(52)
#define HB_O120 HB_O112, HB_O4(56)
#define HB_O128 HB_O120, HB_O4(60)
#define HB_WGMMA(N, A0, A1, A2, A3, B)                                                                                    \
  template <> HB_DEV void wgmma<N>(float (&d)[N / 2], u32 a0, u32 a1, u32 a2, u32 a3, u64 b) {                  \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N                                                                    \
                 "k16.f32." HB_OPERANDS " {" HB_D##N "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B ", 1, 1, 1, 0;"                 \
                 : HB_O##N : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));                                                 \
  }
HB_WGMMA(8, 4, 5, 6, 7, 8)
HB_WGMMA(16, 8, 9, 10, 11, 12)
HB_WGMMA(24, 12, 13, 14, 15, 16)
HB_WGMMA(32, 16, 17, 18, 19, 20)
HB_WGMMA(40, 20, 21, 22, 23, 24)
HB_WGMMA(48, 24, 25, 26, 27, 28)
HB_WGMMA(56, 28, 29, 30, 31, 32)
HB_WGMMA(64, 32, 33, 34, 35, 36)
HB_WGMMA(72, 36, 37, 38, 39, 40)
HB_WGMMA(80, 40, 41, 42, 43, 44)
HB_WGMMA(88, 44, 45, 46, 47, 48)
HB_WGMMA(96, 48, 49, 50, 51, 52)
HB_WGMMA(104, 52, 53, 54, 55, 56)
HB_WGMMA(112, 56, 57, 58, 59, 60)
HB_WGMMA(120, 60, 61, 62, 63, 64)
HB_WGMMA(128, 64, 65, 66, 67, 68)
#endif

// Of four lanes STEP apart, lane q holds words 0 to 3 of its own; afterwards it holds word q of all four.
template <int STEP> HB_DEV void transpose_four(u32 (&w)[4], int q) {
  const bool high = q & 2, odd = q & 1;
  const u32 a = shfl_xor(high ? w[0] : w[2], 2 * STEP), b = shfl_xor(high ? w[1] : w[3], 2 * STEP);
  const u32 x0 = high ? a : w[0], x1 = high ? b : w[1], y0 = high ? w[2] : a, y1 = high ? w[3] : b;
  const u32 e = shfl_xor(odd ? x0 : x1, STEP), f = shfl_xor(odd ? y0 : y1, STEP);
  w[0] = odd ? e : x0;
  w[1] = odd ? x1 : e;
  w[2] = odd ? f : y0;
  w[3] = odd ? y1 : f;
}
