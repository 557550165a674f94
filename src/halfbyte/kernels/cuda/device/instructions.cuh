// The instructions that all CUDA kernels are written in, by name. Compiled by NVRTC they are inline PTX that exists on
// sm_90, sm_100, sm_120 and sm_121 alike (mma.sync, bulk copies, mbarriers; nothing architecture-specific). With HB_SM80 they
// are those that exist from sm_80 on: there is no copy engine (feeding.cuh), an mbarrier has neither bytes nor a wait that
// sleeps, launches do not overlap, and some conversions are made of several instructions, with the same bits. With
// HB_EMULATE the same names come from emulator.h and a kernel runs on a CPU, one fiber per thread.
// Words of the house (seat, box, ring, slot, tile, chunk, ...) are explained in docs/glossary.md.
#pragma once
#ifdef HB_EMULATE
#include <emulator.h>  // tests/kernels/cuda
#else
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#define HB_DEV __device__ __forceinline__
#define HB_DEV_MEMBER __device__ __forceinline__
#define HB_PHASE __device__ __noinline__
#define HB_CONST_FN __host__ __device__ constexpr
#define HB_UNROLL _Pragma("unroll")
#define HB_ROLLED _Pragma("unroll 1")
#define HB_UNROLL_4 _Pragma("unroll 4")
#define HB_ASSUME(x) __builtin_assume(x)
#define HB_MIRRORED(...)  // the emulator says where the fields are: see emulator.h

struct u32x4 { u32 x, y, z, w; };
struct u64x2 { u64 x, y; };

// Opaque to the compiler: nothing computed from these in one phase may be kept in registers through the others.
HB_DEV int hb_thread() { int v; asm volatile("mov.u32 %0, %%tid.x;" : "=r"(v)); return v; }
HB_DEV int hb_block() { int v; asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(v)); return v; }
HB_DEV int hb_grid() { int v; asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(v)); return v; }
HB_DEV u8* hb_shared() { extern __shared__ __align__(128) u8 hb_dynamic[]; return hb_dynamic; }
HB_DEV u32 smem(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// The same as a 32-bit address that stays in a register; the compiler would look it up again before every access.
HB_DEV u32 shared_base() { u32 v = smem(hb_shared()); asm volatile("mov.u32 %0, %0;" : "+r"(v)); return v; }

// Tests of the order of events (HB_DELAYS): whoever hands something over, or has just received it, is late now and then, by up
// to so many nanoseconds.
#ifdef HB_DELAYS
HB_DEV void dawdle() {
  u32 t;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(t));
  t = (t ^ (u32)hb_thread() << 7 ^ (u32)hb_block() << 17) * 0x9e3779b1u;
  t ^= t >> 15;
  t *= 0x85ebca6bu;
  if (t >> 26 == 0) asm volatile("nanosleep.u32 %0;" ::"r"((t >> 6) % HB_DELAYS));
}
#else
HB_DEV void dawdle() {}
#endif

// ---- barriers --------------------------------------------------------------------------------------------------
HB_DEV void bar_init(u64* b, int n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem(b)), "r"(n) : "memory"); }
#ifdef HB_SM80
HB_DEV void bar_init_done() { __threadfence_block(); }  // and a barrier of the block follows
// An arrival for several, which must not be the one that completes the phase, and then an ordinary one. Its address is made
// of `n`, in a bit that is never set, so that it stays behind the loads that a kernel has made `n` of.
HB_DEV void bar_arrive(u32 b, u32 n) {
  dawdle();
  if (n != 1) asm volatile("{ .reg .b64 s; mbarrier.arrive.noComplete.shared.b64 s, [%0], %1; }" ::"r"(b), "r"(n - 1) : "memory");
  asm volatile("{ .reg .b64 s; mbarrier.arrive.shared.b64 s, [%0]; }" ::"r"(b + (n & 0x800u)) : "memory");
}
HB_DEV void bar_arrive(u64* b, u32 n) { bar_arrive(smem(b), n); }
HB_DEV bool bar_try(u32 b, u32 parity) {
  u32 ok;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" : "=r"(ok) : "r"(b), "r"(parity) : "memory");
  return ok;
}
HB_DEV bool bar_try(u64* b, u32 parity) { return bar_try(smem(b), parity); }
#else
HB_DEV void bar_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
HB_DEV void bar_arrive(u64* b, u32 n) { dawdle(); asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(smem(b)), "r"(n) : "memory"); }
HB_DEV void bar_expect(u64* b, u32 bytes) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem(b)), "r"(bytes) : "memory"); }
HB_DEV bool bar_try(u64* b, u32 parity) {
  u32 ok;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" : "=r"(ok) : "r"(smem(b)), "r"(parity) : "memory");
  return ok;
}
HB_DEV void bar_arrive(u32 b, u32 n) { dawdle(); asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(n) : "memory"); }
HB_DEV bool bar_try(u32 b, u32 parity) {
  u32 ok;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }" : "=r"(ok) : "r"(b), "r"(parity) : "memory");
  return ok;
}
#endif
template <int ID, int N> HB_DEV void sync_some() { asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(N) : "memory"); }
HB_DEV void wait_a_bit() {}  // between two looks at a barrier: the emulator lets others run
HB_DEV void sync_all() { __syncthreads(); }
HB_DEV void sync_warp() { __syncwarp(); }

// Programmatic dependent launch: wait until the kernel before this one is complete; let the next one start. Kernels let the
// next one start with themselves, so before it waits a kernel may only read what no kernel of the step writes: weights, and
// pages of earlier steps. (A product with ids that reads them early needs one in front that waits first.)
#ifdef HB_SM80
HB_DEV void wait_for_previous() {}  // launches follow each other
HB_DEV void release_next() {}
#else
HB_DEV void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
HB_DEV void release_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#endif

// ---- memory ----------------------------------------------------------------------------------------------------
HB_DEV u64 streaming_policy() { u64 p; asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p)); return p; }
HB_DEV u64 ordinary_policy() { u64 p; asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(p)); return p; }
#ifndef HB_SM80
HB_DEV void bulk_copy(void* dst, const void* src, u32 bytes, u64* bar, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
               ::"r"(smem(dst)), "l"(src), "r"(bytes), "r"(smem(bar)), "l"(policy) : "memory");
}
#endif
HB_DEV u32x4 lds128(const void* p) {
  u32x4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(smem(p)));
  return v;
}
HB_DEV u32 lds32(const void* p) { u32 v; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(smem(p))); return v; }
HB_DEV u32 lds16(const void* p) { u16 v; asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(smem(p))); return v; }
HB_DEV u32x4 lds128(u32 p) {
  u32x4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(p));
  return v;
}
HB_DEV u64 lds64(u32 p) { u64 v; asm volatile("ld.shared.u64 %0, [%1];" : "=l"(v) : "r"(p)); return v; }
HB_DEV u32 lds32(u32 p) { u32 v; asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(p)); return v; }
HB_DEV u32 lds16(u32 p) { u16 v; asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(p)); return v; }
HB_DEV void sts32(u32 p, u32 v) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(p), "r"(v) : "memory"); }
HB_DEV void sts128(u32 p, u32x4 v) { asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory"); }
HB_DEV u32x4 ldg128(const void* p) {
  u32x4 v;
  asm volatile("ld.global.nc.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
HB_DEV void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
// Mailbox words: 64 bits that are read and written whole, past L1.
HB_DEV u64 box_load(const u64* p) { u64 v; asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory"); dawdle(); return v; }
HB_DEV u64x2 box_load2(const u64* p) {
  u64x2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0,%1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(p) : "memory");
  dawdle();
  return v;
}
HB_DEV void box_store(u64* p, u64 v) { dawdle(); asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
HB_DEV void box_add(u64* p, u64 v) { dawdle(); asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
HB_DEV void box_max(u64* p, u64 v) { dawdle(); asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
HB_DEV u32 counter_add(u32* p) { u32 v; dawdle(); asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(v) : "l"(p) : "memory"); return v; }
HB_DEV void fence_gpu() { __threadfence(); }
HB_DEV void fence_system() { __threadfence_system(); }  // for what the host reads
HB_DEV void box_add_released(u64* p, u64 v) { dawdle(); asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }  // after all this thread wrote before

// ---- warps -----------------------------------------------------------------------------------------------------
HB_DEV u32 shfl_xor(u32 v, int m) { return __shfl_xor_sync(0xffffffffu, v, m); }
HB_DEV float shfl_xor(float v, int m) { return __shfl_xor_sync(0xffffffffu, v, m); }
HB_DEV u32 shfl(u32 v, int lane) { return __shfl_sync(0xffffffffu, v, lane); }
HB_DEV float shfl(float v, int lane) { return __shfl_sync(0xffffffffu, v, lane); }
HB_DEV u32 warp_ballot(bool p) { return __ballot_sync(0xffffffffu, p); }
HB_DEV u32 warp_max(u32 v) { return __reduce_max_sync(0xffffffffu, v); }
HB_DEV u32 warp_min(u32 v) { return __reduce_min_sync(0xffffffffu, v); }
HB_DEV int popcount(u32 v) { return __popc(v); }
HB_DEV u32 transpose8x8(u32 v) { u32 r; asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v)); return r; }
HB_DEV void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// ---- numbers ---------------------------------------------------------------------------------------------------
HB_DEV u32 opaque(u32 v) { asm volatile("mov.u32 %0, %0;" : "+r"(v)); return v; }
HB_DEV u32 rotate_right(u32 v, int n) { return __funnelshift_r(v, v, n); }
HB_DEV u32 permute(u32 a, u32 b, u32 s) { return __byte_perm(a, b, s); }
HB_DEV float as_float(u32 v) { return __uint_as_float(v); }
HB_DEV u32 as_bits(float v) { return __float_as_uint(v); }
HB_DEV u32 bf16_pair(float lo, float hi) { u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
#ifdef HB_SM80
HB_DEV u32 bf16_fma(u32 a, u32 b, u32 c) { u32 r; asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r; }
#else
HB_DEV u32 bf16_sub(u32 a, u32 b) { u32 r; asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
HB_DEV u32 bf16_mul(u32 a, u32 b) { u32 r; asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
HB_DEV u32 e4m3_pair(float lo, float hi) { u16 r; asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo)); return r; }
#endif
HB_DEV u64 lds64(const void* p) { u64 v; asm volatile("ld.shared.u64 %0, [%1];" : "=l"(v) : "r"(smem(p))); return v; }
HB_DEV float half_value(u32 bits) { float r; asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"((u16)bits)); return r; }
HB_DEV u32 half_pair(float lo, float hi) { u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
HB_DEV u32 half_mul(u32 a, u32 b) { u32 r; asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
HB_DEV u32 half_sub(u32 a, u32 b) { u32 r; asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
HB_DEV i64 round_i64(float v) { return __float2ll_rn(v); }
HB_DEV float from_i32(int v) { return __int2float_rn(v); }
HB_DEV float exp2_fast(float v) { float r; asm("ex2.approx.f32 %0, %1;" : "=f"(r) : "f"(v)); return r; }
HB_DEV float recip_sqrt(float v) { return rsqrtf(v); }
HB_DEV float recip_sqrt_normal(float v) { float r; asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v)); return r; }  // of no subnormal
HB_DEV float divide(float a, float b) { return __fdividef(a, b); }
HB_DEV u64 clock_global() { u64 t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t; }
HB_DEV u32 multiprocessor() { u32 v; asm volatile("mov.u32 %0, %smid;" : "=r"(v)); return v; }
HB_DEV u64 clock_now() { u64 t; asm volatile("mov.u64 %0, %clock64;" : "=l"(t)); return t; }
HB_DEV void nap(u32 ns) { asm volatile("nanosleep.u32 %0;" ::"r"(ns)); }
HB_DEV void hb_trap() { asm volatile("trap;"); }
#endif

#ifdef HB_SM80  // what a multiply-add rounds once, and a conversion made of integers: the bits of the instructions that came later
HB_DEV u32 bf16_sub(u32 a, u32 b) { return bf16_fma(b, 0xbf80bf80u, a); }
HB_DEV u32 bf16_mul(u32 a, u32 b) { return bf16_fma(a, b, 0x80008000u); }
HB_DEV u32 to_e4m3(float v) {  // nearest, ties to even, saturating; NaN stays NaN
  const u32 bits = as_bits(v), m = as_bits(fminf(fabsf(v), 448.f));
  const u32 normal = ((m + 0x7ffffu + (m >> 20 & 1u)) >> 20) - 960u, small = as_bits(as_float(m) + 16384.f) - 0x46800000u;
  return v != v ? 0x7fu : (m < 0x3c800000u ? small : normal) | (bits >> 24 & 0x80u);
}
HB_DEV u32 e4m3_pair(float lo, float hi) { return to_e4m3(lo) | to_e4m3(hi) << 8; }
#endif

// A wait that never ends is a bug, or a neighbour on the GPU that keeps blocks of this kernel from starting: say where (in the
// host's memory: see host.py), then stop, instead of hanging the device.
HB_PHASE void give_up(u32* failure, u32 where) {
  failure[0] = where;
  failure[1] = (u32)hb_block() << 16 | (u32)hb_thread();
  fence_system();
  hb_trap();
}
// Waits inside a block are bounded by what they wait for: a copy, which the hardware completes, or a warp of the same block,
// whose waits for other blocks give up. A count of their own would cost the products with a router 188 bytes of spills. Where a
// copy does not complete after all, the warp that feeds the experts gives up (batch/product.cu).
HB_DEV void wait_for(u64* bar, u32 parity) { while (!bar_try(bar, parity)) wait_a_bit(); }
HB_DEV void wait_for(u32 bar, u32 parity) { while (!bar_try(bar, parity)) wait_a_bit(); }

// A NaN and an infinity stay visible: a clamp, a maximum and a sort drop them, and so does the root of squares that overflowed.
HB_DEV float keep_broken(float v, float a, float b) { return v + (a * 0.f + b * 0.f); }
HB_DEV float norm_scale(float v) { const float s = recip_sqrt(v); return s > 0.f ? s : as_float(0x7fffffffu); }

HB_DEV float bf16_low(u32 v) { return as_float(v << 16); }
HB_DEV float bf16_high(u32 v) { return as_float(v & 0xffff0000u); }

// A float as an integer of the same order, and back.
HB_DEV u32 orderable(float v) { const u32 b = as_bits(v); return b & 0x80000000u ? ~b : b | 0x80000000u; }
HB_DEV u32 broken_highest(float v) { return fabsf(v) < as_float(0x7f800000u) ? orderable(v) : 0xffffffffu; }  // back: NaN
HB_DEV float from_orderable(u32 b) { return as_float(b & 0x80000000u ? b & 0x7fffffffu : ~b); }
