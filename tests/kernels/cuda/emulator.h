// Runs a kernel on a CPU, for tests: one fiber per CUDA thread, one host thread for all of them, so that every
// order of events is one the scheduler chose from a seed. Warp instructions wait until all 32 lanes have come; bulk
// copies land late and out of order, and so do those that threads ask for sixteen bytes at a time (cp.async), each as late as
// whoever tracks it allows; a step in which nothing can move any more is reported as a deadlock. It says
// nothing about speed, and it does not reorder memory. With HB_SM80 it has the instructions of SM80 alone.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <string>
#include <vector>
#include <sys/mman.h>
#include <ucontext.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef unsigned long long u64;
typedef long long i64;
#define HB_DEV static inline
#define HB_DEV_MEMBER inline
#define HB_PHASE static
#define HB_CONST_FN constexpr
#define HB_UNROLL
#define HB_ROLLED
#define HB_UNROLL_4
#define HB_ASSUME(x)
#define __global__
#define __restrict__
#define __launch_bounds__(...)
#define __grid_constant__
#define __maxnreg__(n)

// HB_MIRRORED(Struct, fields...): says name, offset and size of every field, one to a line, so that a test can compare a
// struct that is passed by value with its ctypes mirror, name by name (two fields of one size that are swapped keep the
// struct's size). A field of a member is written `member.field`.
#define HB_MIRRORED(S, ...)                                                             \
  extern "C" const char* hb_fields_##S() {                                              \
    static const std::string text = HB_EXPAND(HB_EACH_FIELD(S, __VA_ARGS__)) std::string(); \
    return text.c_str();                                                                \
  }
#define HB_FIELD(S, f) std::string(#f " ") + std::to_string(offsetof(S, f)) + " " + std::to_string(sizeof(((S*)0)->f)) + "\n" +
#define HB_EACH_FIELD(S, f, ...) HB_FIELD(S, f) __VA_OPT__(HB_EACH_AGAIN HB_PARENS(S, __VA_ARGS__))
#define HB_EACH_AGAIN() HB_EACH_FIELD
#define HB_PARENS ()
#define HB_EXPAND(...) HB_EXPAND_3(HB_EXPAND_3(HB_EXPAND_3(__VA_ARGS__)))
#define HB_EXPAND_3(...) HB_EXPAND_2(HB_EXPAND_2(HB_EXPAND_2(__VA_ARGS__)))
#define HB_EXPAND_2(...) HB_EXPAND_1(HB_EXPAND_1(HB_EXPAND_1(__VA_ARGS__)))
#define HB_EXPAND_1(...) __VA_ARGS__

struct u32x4 { u32 x, y, z, w; };
struct u64x2 { u64 x, y; };

namespace emu {
constexpr int LANES = 32, STACK = 1 << 17;

struct Warp {
  u32 in[2][8][LANES];      // operands of the collective in flight, double-buffered by parity
  float acc[2][4][LANES];
  int arrived[2] = {0, 0};
  u64 epoch = 0;
};
struct NamedBarrier { int arrived = 0; u64 epoch = 0; };
struct Block {
  std::vector<u8> shared;
  std::vector<Warp> warps;
  NamedBarrier named[16];
};
struct Unit { void* to; const void* from; int bytes; };  // sixteen bytes on their way; past `bytes` of them zeros
struct Fiber {
  std::vector<Unit> asked;               // on their way, in no group yet
  std::deque<std::vector<Unit>> closed;  // groups, oldest first
  int tracked = 0;                       // arrivals at barriers that still follow this thread's copies
  void* stack = nullptr;
#if defined(__x86_64__)
  void* sp = nullptr;
#else
  ucontext_t context;
#endif
  int thread = 0, lane = 0;
  Block* block = nullptr;
  Warp* warp = nullptr;
  int block_id = 0;
  u64 collective = 0;
  bool done = false;
};
struct Copy { void* dst; const void* src; u32 bytes; u64* bar; int delay; };
struct Arrival { std::vector<Unit> units; u64* bar; Fiber* fiber; int delay; };  // at `bar`, when all of these have landed

struct Machine {
  std::vector<Block> blocks;
  std::vector<Fiber> fibers;
  std::vector<Copy> copies;
  std::vector<Arrival> arrivals;
  std::mt19937 random;
  Fiber* now = nullptr;
  int grid = 0;
  u64 moves = 0;  // progress made; a round without any is a deadlock
  std::function<void()> body;
#if defined(__x86_64__)
  void* main_sp = nullptr;
#else
  ucontext_t main_context;
#endif
};
inline Machine*& machine() { static Machine* m = nullptr; return m; }

#if defined(__x86_64__)
extern "C" void hb_emu_switch(void** save, void* load);
asm(R"(
.text
.globl hb_emu_switch
hb_emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
inline void to_main(Fiber* f) { hb_emu_switch(&f->sp, machine()->main_sp); }
inline void to_fiber(Fiber* f) { hb_emu_switch(&machine()->main_sp, f->sp); }
#else
inline void to_main(Fiber* f) { swapcontext(&f->context, &machine()->main_context); }
inline void to_fiber(Fiber* f) { swapcontext(&machine()->main_context, &f->context); }
#endif

inline void yield() { to_main(machine()->now); }
inline void moved() { machine()->moves++; }
inline void entry() {
  Machine* m = machine();
  m->body();
  m->now->done = true;
  m->moves++;
  for (;;) yield();
}

// Mbarriers live in 64 bits of emulated shared memory: pending arrivals, expected count, bytes still to come, phase.
struct Bar { u64 phase : 1, pending : 12, count : 12, tx : 39; };
inline Bar& bar(u64* b) { return *reinterpret_cast<Bar*>(b); }
inline void settle(Bar& b) {
  if (b.pending == 0 && b.tx == (1ull << 38)) { b.phase ^= 1; b.pending = b.count; moved(); }
}

// A unit may land at once; else its target holds rubbish until whoever tracks it says that it has landed. So a reader that does
// not wait, and a target that others still read, are both seen.
inline void land(const Unit& u) {
  memset(u.to, 0, 16);
  memcpy(u.to, u.from, u.bytes);
}
inline void ask_unit(const Unit& u) {
  if (((uintptr_t)u.to | (uintptr_t)u.from) & 15) { fprintf(stderr, "emulator: a unit of 16 bytes must be aligned\n"); abort(); }
  if (machine()->random() % 2) land(u);
  else { memset(u.to, 0xA5, 16); machine()->now->asked.push_back(u); }
}
inline void arrive_after_units(u64* b) {
  Fiber* f = machine()->now;
  machine()->arrivals.push_back({std::move(f->asked), b, f, (int)(machine()->random() % 6)});
  f->asked = {};
  f->tracked++;
}
inline void arrive(Bar& b, u32 n) {
  if (b.pending < n) { fprintf(stderr, "emulator: more arrivals than a barrier expects\n"); abort(); }
  b.pending -= n;
  moved();
  settle(b);
}
inline void wait_for_units() {
  Fiber* f = machine()->now;
  for (u32 n = machine()->random() % 8; n; n--) { moved(); yield(); }  // what nobody tracks may take so long
  while (f->tracked) yield();
  for (const Unit& u : f->asked) land(u);
  f->asked = {};
}

inline void run(int grid, int threads, size_t shared_bytes, u32 seed, std::function<void()> body) {
  Machine m;
  machine() = &m;
  m.random.seed(seed);
  m.grid = grid;
  m.body = std::move(body);
  m.blocks.resize(grid);
  m.fibers.resize((size_t)grid * threads);
  u8* stacks = (u8*)mmap(nullptr, (size_t)STACK * m.fibers.size(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) { fprintf(stderr, "emulator: no memory for stacks\n"); abort(); }
  for (int b = 0; b < grid; b++) {
    m.blocks[b].shared.assign(shared_bytes + 1024, 0xA5);  // poisoned: nothing may rely on zeros
    m.blocks[b].warps.resize(threads / LANES);
    for (int t = 0; t < threads; t++) {
      Fiber& f = m.fibers[(size_t)b * threads + t];
      f.thread = t; f.lane = t % LANES; f.block = &m.blocks[b]; f.warp = &m.blocks[b].warps[t / LANES]; f.block_id = b;
      f.stack = stacks + (size_t)STACK * ((size_t)b * threads + t);
#if defined(__x86_64__)
      u64* top = (u64*)((u8*)f.stack + STACK);
      *--top = 0;
      *--top = (u64)(void*)&entry;
      for (int i = 0; i < 6; i++) *--top = 0;
      f.sp = top;
#else
      getcontext(&f.context);
      f.context.uc_stack.ss_sp = f.stack; f.context.uc_stack.ss_size = STACK; f.context.uc_link = nullptr;
      makecontext(&f.context, (void (*)())entry, 0);
#endif
    }
  }
  std::vector<int> order(m.fibers.size() / LANES);
  for (size_t i = 0; i < order.size(); i++) order[i] = (int)i;
  size_t left = m.fibers.size();
  for (int quiet = 0; left;) {
    u64 before = m.moves;
    std::shuffle(order.begin(), order.end(), m.random);
    for (int w : order)
      for (int l = 0; l < LANES; l++) {
        Fiber& f = m.fibers[(size_t)w * LANES + l];
        if (f.done) continue;
        m.now = &f;
        to_fiber(&f);
        if (f.done) left--;
      }
    for (size_t i = 0; i < m.copies.size();) {
      Copy& c = m.copies[i];
      if (c.delay-- > 0) { i++; continue; }
      memcpy(c.dst, c.src, c.bytes);
      Bar& b = bar(c.bar);
      b.tx -= c.bytes;
      settle(b);
      m.moves++;
      m.copies[i] = m.copies.back();
      m.copies.pop_back();
    }
    for (size_t i = 0; i < m.arrivals.size();) {
      Arrival& a = m.arrivals[i];
      if (a.delay-- > 0) { i++; continue; }
      for (const Unit& u : a.units) land(u);
      a.fiber->tracked--;
      arrive(bar(a.bar), 1);
      if (i + 1 < m.arrivals.size()) m.arrivals[i] = std::move(m.arrivals.back());
      m.arrivals.pop_back();
    }
    quiet = (m.moves == before && m.copies.empty() && m.arrivals.empty()) ? quiet + 1 : 0;
    if (quiet > 64) { fprintf(stderr, "emulator: deadlock, %zu threads left\n", left); abort(); }
  }
  for (const Fiber& f : m.fibers) {
    bool waited = f.asked.empty() && !f.tracked;
    for (const auto& group : f.closed) waited &= group.empty();
    if (!waited) { fprintf(stderr, "emulator: thread %d of block %d left copies that nobody waits for\n", f.thread, f.block_id); abort(); }
  }
  munmap(stacks, (size_t)STACK * m.fibers.size());
  machine() = nullptr;
}

// A warp instruction: every lane brings operands, and goes on when all have come.
template <class F> inline auto collective(F&& bring_then_take) {
  Fiber* f = machine()->now;
  Warp* w = f->warp;
  int p = f->collective++ & 1;
  bring_then_take.bring(*w, p, f->lane);
  u64 mine = f->collective;
  if (++w->arrived[p] == LANES) { w->arrived[p] = 0; w->epoch = mine; moved(); }
  while (w->epoch < mine) yield();
  return bring_then_take.take(*w, p, f->lane);
}
struct Exchange {
  u32 v; int from;
  void bring(Warp& w, int p, int lane) { w.in[p][0][lane] = v; }
  u32 take(Warp& w, int p, int) { return w.in[p][0][from & 31]; }
};
inline float bf(u32 half) { u32 b = half << 16; float f; memcpy(&f, &b, 4); return f; }
inline float e4m3_value(u32 bits) {
  const int e = bits >> 3 & 15, m = bits & 7;
  if ((bits & 127) == 127) return NAN;
  const float v = e ? std::ldexp(1.f + m / 8.f, e - 7) : std::ldexp((float)m, -9);
  return bits & 128 ? -v : v;
}
struct Mma {
  u32 a[4], b[2];
  void bring(Warp& w, int p, int lane) { for (int i = 0; i < 4; i++) w.in[p][i][lane] = a[i]; w.in[p][4][lane] = b[0]; w.in[p][5][lane] = b[1]; }
  float out[4];
  int take(Warp& w, int p, int lane) {
    int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) {
      int row = g + (i >> 1) * 8, col = 2 * t + (i & 1);
      double s = 0;
      for (int k = 0; k < 16; k++) {
        int kt = (k % 8) / 2, hi = k & 1, half = k / 8;
        u32 x = w.in[p][(row >= 8) + 2 * half][(row % 8) * 4 + kt], y = w.in[p][4 + half][col * 4 + kt];
        s += (double)bf(hi ? x >> 16 : x & 0xffff) * (double)bf(hi ? y >> 16 : y & 0xffff);
      }
      out[i] = (float)s;
    }
    return 0;
  }
};
struct Transpose {
  u32 v;
  void bring(Warp& w, int p, int lane) { w.in[p][0][lane] = v; }
  u32 take(Warp& w, int p, int lane) {
    int g = lane / 4, t = lane % 4;
    auto at = [&](int r, int c) { u32 x = w.in[p][0][r * 4 + c / 2]; return (c & 1) ? x >> 16 : x & 0xffff; };
    return at(2 * t, g) | at(2 * t + 1, g) << 16;
  }
};
struct Reduce {
  u32 v; int what;
  void bring(Warp& w, int p, int lane) { w.in[p][0][lane] = v; }
  u32 take(Warp& w, int p, int) {
    u32 r = what == 2 ? 0 : w.in[p][0][0];
    for (int i = 0; i < LANES; i++) {
      u32 x = w.in[p][0][i];
      if (what == 0) r = std::max(r, x);
      if (what == 1) r = std::min(r, x);
      if (what == 2) r |= (x ? 1u : 0u) << i;
    }
    return r;
  }
};
}  // namespace emu

HB_DEV int hb_thread() { return emu::machine()->now->thread; }
HB_DEV int hb_block() { return emu::machine()->now->block_id; }
HB_DEV int hb_grid() { return emu::machine()->grid; }
HB_DEV u8* hb_shared() { return (u8*)(((uintptr_t)emu::machine()->now->block->shared.data() + 1023) & ~(uintptr_t)1023); }

HB_DEV u32 shared_base() { return 0; }  // addresses are offsets
HB_DEV u8* shared_at(u32 p) { return hb_shared() + p; }

#ifdef HB_DELAYS  // see instructions.cuh
HB_DEV void dawdle() { if (emu::machine()->random() % 64 == 0) for (u32 n = emu::machine()->random() % 8; n; n--) { emu::moved(); emu::yield(); } }
#else
HB_DEV void dawdle() {}
#endif

HB_DEV void bar_init(u64* b, int n) { emu::Bar& x = emu::bar(b); x.phase = 0; x.count = n; x.pending = n; x.tx = 1ull << 38; }
HB_DEV void bar_init_done() {}
HB_DEV void bar_arrive(u64* b, u32 n) {
  dawdle();
  emu::arrive(emu::bar(b), n);
}
HB_DEV void bar_arrive(u32 b, u32 n) { bar_arrive((u64*)shared_at(b), n); }
#ifndef HB_SM80
HB_DEV void bar_expect(u64* b, u32 bytes) { emu::bar(b).tx += bytes; bar_arrive(b, 1); }
#endif
HB_DEV bool bar_try(u64* b, u32 parity) { return emu::bar(b).phase != (parity & 1); }
HB_DEV bool bar_try(u32 b, u32 parity) { return bar_try((u64*)shared_at(b), parity); }
template <int ID, int N> HB_DEV void sync_some() {
  emu::NamedBarrier& n = emu::machine()->now->block->named[ID];
  u64 e = n.epoch;
  if (++n.arrived == N) { n.arrived = 0; n.epoch++; emu::moved(); }
  while (n.epoch == e) emu::yield();
}
HB_DEV void sync_warp() { emu::collective(emu::Exchange{0, 0}); }
HB_DEV void sync_all() { emu::NamedBarrier& n = emu::machine()->now->block->named[15]; u64 e = n.epoch; if (++n.arrived == (int)emu::machine()->now->block->warps.size() * 32) { n.arrived = 0; n.epoch++; emu::moved(); } while (n.epoch == e) emu::yield(); }

HB_DEV void wait_a_bit() { emu::yield(); }
HB_DEV void wait_for_previous() {}  // launches follow each other
HB_DEV void release_next() {}

HB_DEV u64 streaming_policy() { return 0; }
HB_DEV u64 ordinary_policy() { return 0; }
#ifndef HB_SM80
HB_DEV void bulk_copy(void* dst, const void* src, u32 bytes, u64* bar, u64) {
  if (((uintptr_t)src | (uintptr_t)dst | bytes) & 15) { fprintf(stderr, "emulator: a bulk copy must be 16-byte aligned\n"); abort(); }
  emu::machine()->copies.push_back({dst, src, bytes, bar, (int)(emu::machine()->random() % 6)});
}
#endif
HB_DEV u32x4 lds128(const void* p) { u32x4 v; memcpy(&v, p, 16); return v; }
HB_DEV u32 lds32(const void* p) { u32 v; memcpy(&v, p, 4); return v; }
HB_DEV u32 lds16(const void* p) { u16 v; memcpy(&v, p, 2); return v; }
HB_DEV u32x4 lds128(u32 p) { return lds128((const void*)shared_at(p)); }
HB_DEV u64 lds64(u32 p) { u64 v; memcpy(&v, shared_at(p), 8); return v; }
HB_DEV u32 lds32(u32 p) { return lds32((const void*)shared_at(p)); }
HB_DEV u32 lds16(u32 p) { return lds16((const void*)shared_at(p)); }
HB_DEV void sts32(u32 p, u32 v) { memcpy(shared_at(p), &v, 4); }
HB_DEV void sts128(u32 p, u32x4 v) { memcpy(shared_at(p), &v, 16); }
HB_DEV u32x4 ldg128(const void* p) { u32x4 v; memcpy(&v, p, 16); return v; }
HB_DEV void prefetch_l2(const void*) {}
HB_DEV u64 box_load(const u64* p) { const u64 v = *(const volatile u64*)p; dawdle(); return v; }
HB_DEV u64x2 box_load2(const u64* p) { return {box_load(p), box_load(p + 1)}; }
HB_DEV void box_store(u64* p, u64 v) { dawdle(); *p = v; emu::moved(); }
HB_DEV void box_add(u64* p, u64 v) { dawdle(); *p += v; emu::moved(); }
HB_DEV void box_max(u64* p, u64 v) { dawdle(); *p = std::max(*p, v); emu::moved(); }
HB_DEV u32 counter_add(u32* p) { dawdle(); emu::moved(); return (*p)++; }
HB_DEV void fence_gpu() {}
HB_DEV void fence_system() {}
HB_DEV void box_add_released(u64* p, u64 v) { box_add(p, v); }

HB_DEV u32 shfl_xor(u32 v, int m) { return emu::collective(emu::Exchange{v, emu::machine()->now->lane ^ m}); }
HB_DEV float shfl_xor(float v, int m) { u32 b; memcpy(&b, &v, 4); b = shfl_xor(b, m); memcpy(&v, &b, 4); return v; }
HB_DEV u32 shfl(u32 v, int lane) { return emu::collective(emu::Exchange{v, lane}); }
HB_DEV float shfl(float v, int lane) { u32 b; memcpy(&b, &v, 4); b = shfl(b, lane); memcpy(&v, &b, 4); return v; }
HB_DEV u32 warp_ballot(bool p) { return emu::collective(emu::Reduce{p, 2}); }
HB_DEV u32 warp_max(u32 v) { return emu::collective(emu::Reduce{v, 0}); }
HB_DEV u32 warp_min(u32 v) { return emu::collective(emu::Reduce{v, 1}); }
HB_DEV int popcount(u32 v) { return __builtin_popcount(v); }
HB_DEV u32 transpose8x8(u32 v) { return emu::collective(emu::Transpose{v}); }
// What arithmetic makes of no number. A CPU makes 0xffc00000 and keeps the bits of a NaN that comes in; with HB_CUDA_NAN the
// products and the special functions, through which every value passes, give CUDA's 0x7fffffff, which then comes through.
HB_DEV float canonical(float v) {
#ifdef HB_CUDA_NAN
  const u32 bits = 0x7fffffffu;
  if (v != v) memcpy(&v, &bits, 4);
#endif
  return v;
}
HB_DEV void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  emu::Mma m{{a0, a1, a2, a3}, {b0, b1}, {}};
  emu::collective<emu::Mma&>(m);
  for (int i = 0; i < 4; i++) c[i] = canonical(c[i] + m.out[i]);
}

HB_DEV u32 opaque(u32 v) { return v; }
HB_DEV u32 rotate_right(u32 v, int n) { return v >> n | v << (32 - n); }
HB_DEV u32 permute(u32 a, u32 b, u32 s) {
  u64 both = (u64)b << 32 | a;
  u32 r = 0;
  for (int i = 0; i < 4; i++) r |= (u32)(both >> (8 * (s >> (4 * i) & 7)) & 255) << (8 * i);
  return r;
}
HB_DEV float as_float(u32 v) { float f; memcpy(&f, &v, 4); return f; }
HB_DEV u32 as_bits(float v) { u32 b; memcpy(&b, &v, 4); return b; }
HB_DEV u32 bf16_round(float v) { u32 b = as_bits(v); if (v != v) return 0x7fc0; return (b + 0x7fff + (b >> 16 & 1)) >> 16; }
HB_DEV u32 bf16_pair(float lo, float hi) { return bf16_round(lo) | bf16_round(hi) << 16; }
#ifdef HB_SM80
HB_DEV u32 bf16_fma(u32 a, u32 b, u32 c) {  // kernels add to nothing, or multiply by one: no value is rounded twice
  return bf16_pair(std::fma(emu::bf(a & 0xffff), emu::bf(b & 0xffff), emu::bf(c & 0xffff)), std::fma(emu::bf(a >> 16), emu::bf(b >> 16), emu::bf(c >> 16)));
}
#else
HB_DEV u32 bf16_sub(u32 a, u32 b) { return bf16_pair(emu::bf(a & 0xffff) - emu::bf(b & 0xffff), emu::bf(a >> 16) - emu::bf(b >> 16)); }
HB_DEV u32 bf16_mul(u32 a, u32 b) { return bf16_pair(emu::bf(a & 0xffff) * emu::bf(b & 0xffff), emu::bf(a >> 16) * emu::bf(b >> 16)); }
HB_DEV u32 e4m3_round(float v) {  // e4m3: nearest even, saturating
  const u32 sign = as_bits(v) >> 24 & 0x80;
  const float a = std::fabs(v);
  if (v != v) return 0x7f;
  if (a >= 448.f) return sign | 0x7e;
  int e = a < 0.015625f ? -6 : std::ilogb(a);
  const int m = (int)std::nearbyint(std::ldexp(a, 3 - e));  // 8..16 where normal, 0..8 where not
  return sign | (u32)(((e + 6) << 3) + m);
}
HB_DEV u32 e4m3_pair(float lo, float hi) { return e4m3_round(lo) | e4m3_round(hi) << 8; }
#endif
HB_DEV u64 lds64(const void* p) { u64 v; memcpy(&v, p, 8); return v; }
HB_DEV float half_value(u32 bits) {
  int e = bits >> 10 & 31, m = bits & 1023;
  if (e == 31 && m) return as_float(0x7fffffffu);
  float v = e == 31 ? INFINITY : e ? std::ldexp(1.f + m / 1024.f, e - 15) : std::ldexp((float)m, -24);
  return bits & 0x8000 ? -v : v;
}
HB_DEV u32 half_round(float v) {
  u32 b = as_bits(v), sign = b >> 16 & 0x8000u;
  float m = std::fabs(v);
  if (!(m < 65520.f)) return sign | (v != v ? 0x7e00u : 0x7c00u);
  if (m < 6.103515625e-5f) return sign | (u32)std::nearbyint(m * 16777216.f);
  b &= 0x7fffffffu;
  return sign | ((b + 0xfffu + (b >> 13 & 1)) - 0x38000000u) >> 13;
}
HB_DEV u32 half_pair(float lo, float hi) { return half_round(lo) | half_round(hi) << 16; }
HB_DEV u32 half_mul(u32 a, u32 b) { return half_pair(half_value(a & 0xffff) * half_value(b & 0xffff), half_value(a >> 16) * half_value(b >> 16)); }
HB_DEV u32 half_sub(u32 a, u32 b) { return half_pair(half_value(a & 0xffff) - half_value(b & 0xffff), half_value(a >> 16) - half_value(b >> 16)); }
HB_DEV i64 round_i64(float v) { return std::llrint((double)v); }
HB_DEV float from_i32(int v) { return (float)v; }
HB_DEV float exp2_fast(float v) { return canonical(std::exp2(v)); }
HB_DEV float recip_sqrt(float v) { return canonical(1.f / std::sqrt(v)); }
HB_DEV float recip_sqrt_normal(float v) { return recip_sqrt(v); }
HB_DEV float divide(float a, float b) { return canonical(a / b); }
HB_DEV u32 multiprocessor() { return (u32)emu::machine()->now->block_id; }
HB_DEV u64 clock_now() { return 0; }
HB_DEV u64 clock_global() { return 0; }
HB_DEV void nap(u32) { emu::yield(); }
HB_DEV void hb_trap() { fprintf(stderr, "emulator: trap\n"); abort(); }
