// The multiplying side of the grouped product, and the kernel. See grouped.cuh for the whole picture.
#include "prefill/fp8_results.cuh"
#include "prefill/fp8.cuh"
#include "prefill/weights.cuh"

// ---- one item -------------------------------------------------------------------------------------------------------

template <int N, int MT> HB_DEV void finish_item(Consumer& c, const Item& it, float (&acc)[MT][N / 2]) {
  HB_UNROLL
  for (int mt = 0; mt < MT; mt++) wgmma_settle(acc[mt]);
  const int tile = c.tile();
  if (tile >= it.tiles * 4) return;  // a remainder: this warp multiplied what happened to lie there
  Bias<MT> bias;
  bias.take(c);
  store<N, MT>(c, it, it.first * 4 + tile, acc, bias);
}

// Registers for two chunks: while the tensor cores read the sets of one chunk, the next is widened into the others. The
// fence stands before the wait, not before the products: what it orders, the widening, cannot then sink below the wait, and
// nothing is left to do between two products.
template <int N, int MT> HB_DEV void multiply_deep(Consumer& c, const Item& it) {
  float acc[MT][N / 2];
  u32 a[2][MT][16];  // [chunk][tile]
  int left = c.p.chunks;
  const int weights = KS * N * 128 + c.tile() * KS * CHUNK;  // of this warp, in a stage
  auto widen = [&](int in_stage, u32 (&to)[MT][16]) {
    Raw<FORMAT> raw[MT];
    HB_UNROLL
    for (int mt = 0; mt < MT; mt++) raw[mt].load(c.sh.ring[c.at.slot] + weights + (mt * APART * KS + in_stage) * CHUNK, c.lane);
    HB_UNROLL
    for (int mt = 0; mt < MT; mt++) raw[mt].widen(to[mt], c.p.scale_offset);
    wgmma_fence();
  };
  auto issue = [&](int in_stage, const u32 (&w)[MT][16]) {
    const auto b = b_low(c.sh.ring[c.at.slot] + in_stage * N * 128);
    HB_UNROLL
    for (int i = 0; i < 4; i++)
      HB_UNROLL
      for (int mt = 0; mt < MT; mt++) wgmma<N>(acc[mt], w[mt][4 * i], w[mt][4 * i + 1], w[mt][4 * i + 2], w[mt][4 * i + 3], b_tile(b, i * 32));
    wgmma_commit();
  };
  HB_UNROLL
  for (int mt = 0; mt < MT; mt++) wgmma_clear(acc[mt]);
  wait_for(&c.sh.full[c.at.slot], c.at.phase);
  widen(0, a[0]);
  HB_ROLLED
  for (;;) {  // set 0 is ready and nothing is in flight
    int here = c.at.slot;
    issue(0, a[0]);
    if (--left == 0) { wgmma_wait<0>(); break; }
    if (KS == 1) { c.at.next(); wait_for(&c.sh.full[c.at.slot], c.at.phase); }
    widen(KS - 1, a[1]);
    wgmma_wait<0>();
    if (KS == 1) { c.release(here); here = c.at.slot; }
    issue(KS - 1, a[1]);
    if (--left == 0) { wgmma_wait<0, 1>(); break; }
    c.at.next();
    wait_for(&c.sh.full[c.at.slot], c.at.phase);
    widen(0, a[0]);
    wgmma_wait<0>();
    c.release(here);
  }
  c.release(c.at.slot);
  c.at.next();
  finish_item<N, MT>(c, it, acc);
}

constexpr bool PIN = SHAPE == NARROW;  // fences before waits here, too: no gain for the others (docs/LOG.md)
// While the tensor cores read one set of registers, the next chunk is widened into the other. At the head of the loop set
// 0 is ready and nothing is in flight: a set in flight there would be alive, for the compiler, all over the kernel. Fences
// follow the widening, as above.
template <int N, int MT> HB_DEV void multiply(Consumer& c, const Item& it) {
  static_assert(MT % 2 == 0 || (MT == 1 && (KS == 1 || KS % 2 == 0)), "which set is in use must be known to the compiler");
  float acc[MT][N / 2];
  u32 a[2][16];
  int left = c.p.chunks;
  const int weights = KS * N * 128 + c.tile() * KS * CHUNK;  // of this warp, in a stage
  auto fetch = [&](int in_stage, int mt) {
    Raw<FORMAT> raw;
    raw.load(c.sh.ring[c.at.slot] + weights + (mt * KS + in_stage) * CHUNK, c.lane);
    return raw;
  };
  auto issue_at = [&](auto b, float (&sum)[N / 2], const u32 (&w)[16]) {
    if (!PIN) wgmma_fence();
    HB_UNROLL
    for (int i = 0; i < 4; i++) wgmma<N>(sum, w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3], b_tile(b, i * 32));
    wgmma_commit();
  };
  auto issue = [&](int in_stage, float (&sum)[N / 2], const u32 (&w)[16]) {
    issue_at(b_low(c.sh.ring[c.at.slot] + in_stage * N * 128), sum, w);
  };
  HB_UNROLL
  for (int mt = 0; mt < MT; mt++) wgmma_clear(acc[mt]);
  wait_for(&c.sh.full[c.at.slot], c.at.phase);
  fetch(0, 0).widen(a[0], c.p.scale_offset);
  if (PIN) wgmma_fence();
  int k = 0;  // chunk in the stage
  if constexpr (MT == 1) {
    HB_ROLLED
    for (;;) {
      const int here = c.at.slot;
      issue(k, acc[0], a[0]);
      if (--left == 0) { wgmma_wait<0, 1>(); break; }
      if (KS == 1) { c.at.next(); wait_for(&c.sh.full[c.at.slot], c.at.phase); }
      else k++;
      fetch(k, 0).widen(a[1], c.p.scale_offset);
      if (PIN) wgmma_fence();
      issue(k, acc[0], a[1]);
      const int there = c.at.slot;
      if (--left == 0) { wgmma_wait<0, 2>(); if (KS == 1) c.release(here); break; }
      const bool leave = KS <= 2 || ++k == KS;
      if (leave) { k = 0; c.at.next(); wait_for(&c.sh.full[c.at.slot], c.at.phase); }
      if (FORMAT == BF16) wgmma_wait<1>();
      auto raw = fetch(k, 0);
      if (FORMAT != BF16) wgmma_wait<1>();
      if (KS == 1) c.release(here);
      raw.widen(a[0], c.p.scale_offset);
      if (PIN) wgmma_fence();
      wgmma_wait<0>();
      if (leave) c.release(there);
    }
  } else if constexpr (KS == 2 && MT == 2 && N <= 72) {  // a stage at a time; weights are loaded a tile before they are widened
    auto other = fetch(0, 1);
    HB_ROLLED
    for (;;) {  // and `other` is here
      const int here = c.at.slot;
      issue(0, acc[0], a[0]);
      auto raw = fetch(1, 0);  // past the last k: zeros
      other.widen(a[1], c.p.scale_offset);
      issue(0, acc[1], a[1]);
      if (--left == 0) { wgmma_wait<0>(); break; }
      other = fetch(1, 1);
      wgmma_wait<1>();
      raw.widen(a[0], c.p.scale_offset);
      issue(1, acc[0], a[0]);
      const auto columns = b_low(c.sh.ring[here] + N * 128);
      if (left > 1) {
        c.at.next();
        wait_for(&c.sh.full[c.at.slot], c.at.phase);
        raw = fetch(0, 0);
      }
      wgmma_wait<1>();
      other.widen(a[1], c.p.scale_offset);
      issue_at(columns, acc[1], a[1]);
      if (--left == 0) { wgmma_wait<0, 1>(); break; }
      other = fetch(0, 1);
      wgmma_wait<1>();
      raw.widen(a[0], c.p.scale_offset);
      wgmma_wait<0>();
      c.release(here);
    }
  } else {
    HB_ROLLED
    for (;;) {
      HB_UNROLL
      for (int mt = 0; mt < MT; mt++) {
        issue(k, acc[mt], a[mt & 1]);
        if (mt + 1 < MT) {
          if (FORMAT == BF16) wgmma_wait<1>();  // its loads go straight into the registers of the product
          auto raw = fetch(k, mt + 1);
          if (FORMAT != BF16) wgmma_wait<1>();
          raw.widen(a[~mt & 1], c.p.scale_offset);
          if (PIN) wgmma_fence();
        }
      }
      if (--left == 0) { wgmma_wait<0>(); break; }
      const int here = c.at.slot;
      const bool leave = KS == 1 || ++k == KS;
      if (leave) { k = 0; c.at.next(); wait_for(&c.sh.full[c.at.slot], c.at.phase); }
      if (FORMAT == BF16) wgmma_wait<1>();
      auto raw = fetch(k, 0);
      if (FORMAT != BF16) wgmma_wait<1>();
      raw.widen(a[0], c.p.scale_offset);
      if (PIN) wgmma_fence();
      wgmma_wait<0>();
      if (leave) c.release(here);
    }
  }
  c.release(c.at.slot);
  c.at.next();
  finish_item<N, MT>(c, it, acc);
}

#if HB_SHAPE == 3
// The same for fp8 activations: one tile of 64 rows, up to 256 columns; two products of 32 k to a chunk.
template <int N> HB_DEV void multiply_fp8(Consumer& c, const Item& it) {
  float acc[N / 2];
  u32 a[2][8];
  int left = c.p.chunks;
  const int tile = c.group * 4 + c.warp;  // of 16 rows, within the item
  const u8* tops = c.p.row_max_scale + ((size_t)it.expert * c.p.m_tiles + it.first) * 64 + tile * 16 + (c.lane >> 2);
  const int top[2] = {tops[0], tops[8]};
  const int thread = c.warp * 32 + c.lane;
  // asked for before they are needed
  const float mine[2] = {c.p.x_scale[it.slot + thread], N > 128 ? c.p.x_scale[it.slot + 128 + thread] : 0.f};
  const u32 up = (u32)(30 - top[0]) * 0x04000400u, low = (u32)(30 - top[1]) * 0x04000400u;
  auto load = [&](int slot, int in_stage) {
    Raw<MXFP4> raw;
    raw.load(c.sh.ring[slot] + N * COLUMN + (tile * KS + in_stage) * CHUNK, c.lane);
    return raw;
  };
  auto widen = [&](const Raw<MXFP4>& raw, u32 (&to)[8]) {
    widen_chunk_e5m2(raw, up, low, to);
    wgmma_fence();
  };
  auto issue = [&](int slot, int in_stage, const u32 (&w)[8]) {
    const auto b = b_low(c.sh.ring[slot]);
    HB_UNROLL
    for (int i = 0; i < 2; i++) wgmma8<N>(acc, w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3], b_tile(b, in_stage * 64 + i * 32));
    wgmma_commit();
  };
  wgmma_clear(acc);
  wait_for(&c.sh.full[c.at.slot], c.at.phase);
  Raw<MXFP4> first = load(c.at.slot, 0), second = load(c.at.slot, 1);
  widen(first, a[0]);
  HB_ROLLED
  for (;;) {  // set 0 is ready and nothing is in flight; `second` is here, and weights come a chunk before they are widened
    const int here = c.at.slot;
    issue(here, 0, a[0]);
    if (--left == 0) { wgmma_wait<0>(); break; }
    if (left > 1) {
      c.at.next();
      wait_for(&c.sh.full[c.at.slot], c.at.phase);
      first = load(c.at.slot, 0);
    }
    widen(second, a[1]);
    wgmma_wait<0>();
    issue(here, 1, a[1]);
    if (--left == 0) { wgmma_wait<0, 1>(); break; }
    second = load(c.at.slot, 1);  // past the last k: zeros
    widen(first, a[0]);
    wgmma_wait<0>();
    c.release(here);
  }
  c.release(c.at.slot);
  c.at.next();
  wgmma_settle(acc);
  float* columns = c.sh.scales[c.group];
  sync_group(c.group);  // everyone has read those of the item before
  put32(columns + thread, as_bits(mine[0]));
  if (N > 128) put32(columns + 128 + thread, as_bits(mine[1]));
  finish<N>(c, it, acc);  // which begins with a barrier
}
#endif

HB_DEV void dispatch(Consumer& c, const Item& it) {
#if HB_SHAPE == 3
#define HB_CASE(n) case n: return multiply_fp8<n>(c, it);
#else
  constexpr bool DEEP = SHAPE == WIDE || (SHAPE == BROAD && N_MAX <= 48);  // where registers allow
#define HB_CASE(n) case n: if constexpr (n > N_MAX) return; else if constexpr (DEEP) return multiply_deep<n, MT>(c, it); else return multiply<n, MT>(c, it);
#endif
  if constexpr (SHAPE == VAST) switch (it.n) {
    HB_CASE(16) HB_CASE(32) HB_CASE(48) HB_CASE(64) HB_CASE(72) HB_CASE(80) HB_CASE(96)
    HB_CASE(112) HB_CASE(128) HB_CASE(144) HB_CASE(176) HB_CASE(208) HB_CASE(240) HB_CASE(256)
  } else if constexpr (SHAPE == BROAD) switch (it.n) {
    HB_CASE(16) HB_CASE(24) HB_CASE(32) HB_CASE(40) HB_CASE(48) HB_CASE(56) HB_CASE(64) HB_CASE(72) HB_CASE(80) HB_CASE(88)
  } else if constexpr (SHAPE == WIDE) switch (it.n) {
    HB_CASE(16) HB_CASE(32) HB_CASE(48) HB_CASE(56) HB_CASE(64) HB_CASE(72)
    HB_CASE(80) HB_CASE(88) HB_CASE(96) HB_CASE(112) HB_CASE(128)
  } else switch (it.n) {
    HB_CASE(8) HB_CASE(16) HB_CASE(24) HB_CASE(32) HB_CASE(48) HB_CASE(64)
  }
#undef HB_CASE
}

HB_DEV void consume(const Product& p, Shared& sh, int thread) {
  Consumer c{p, sh, thread / 128, thread / 32 % 4, thread % 32, {}, 0};
  for (;;) {
    const int q = c.turn & 1;
    wait_for(&sh.item_full[q], (u32)(c.turn >> 1 & 1));
    const Item& it = sh.item[q];  // left in shared memory: registers are dear
    if (!it.more) return;
    if constexpr (!FP8) ask_biases<MT>(c, it);
    if (c.group * MT < it.tiles) dispatch(c, it);
    else c.pass();
    if constexpr (TURN_IN_ITEM) c.turn = it.more;
    sync_warp();
    if (c.lane == 0) bar_arrive(&sh.item_empty[(TURN_IN_ITEM ? ~c.turn : anew(c.turn)) & 1], 1);
    if constexpr (!TURN_IN_ITEM) c.turn++;
  }
}

extern "C" __global__ void HB_CLUSTER __launch_bounds__(THREADS, 1) grouped(const __grid_constant__ Product p) {
  Shared& sh = *(Shared*)(((size_t)hb_shared() + 1023) & ~(size_t)1023);
  const int thread = hb_thread();
  if (thread == 0) {
    for (int s = 0; s < STAGES; s++) { bar_init(&sh.full[s], FEEDERS); bar_init(&sh.empty[s], PAIR * WARPS); }
    for (int q = 0; q < 2; q++) { bar_init(&sh.item_full[q], 1); bar_init(&sh.item_empty[q], WARPS + FEEDERS - 1); }
    bar_init_done();
  }
  if constexpr (PAIR == 1) sync_all();
  else cluster_sync();
  wait_for_previous();
  release_next();
  if (thread >= WARPGROUPS * 128) {
    fewer_registers<SHAPE == BROAD ? 56 : 40>();
    const int feeder = thread / 32 - WARPS;
    if (feeder == 0) feed(p, sh, thread % 32);
    else if (thread % 32 == 0) help_feed(p, sh, feeder);
  } else {
    // what one side gives, the other takes: 640 x 96, 384 x 168 or 512 x 128 in all
    more_registers<SHAPE == NARROW ? 104 : SHAPE == BROAD ? 152 : 232>();
    consume(p, sh, thread);
  }
  if constexpr (PAIR != 1) cluster_sync();  // nobody leaves while the other may write or arrive here
}

#ifdef HB_EMULATE
extern "C" void hb_run(const char*, const Product* p, int grid, u32 seed) { emu::run(grid, THREADS, shared_bytes(), seed, [=] { grouped(*p); }); }
extern "C" int hb_size(int what) { return what == 0 ? (int)sizeof(Product) : what == 1 ? shared_bytes() : THREADS; }
#endif
