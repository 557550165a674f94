// The multiplying side of the grouped product, and the kernel. See grouped.cuh for the whole picture.
#include "grouped_store.cuh"
#include "grouped_weights.cuh"

// ---- one item -------------------------------------------------------------------------------------------------------

// While the tensor cores read one set of registers, the next chunk is widened into the other. At the head of the loop set
// 0 is ready and nothing is in flight: a set in flight there would be alive, for the compiler, all over the kernel.
template <int N, int MT> HB_DEV void multiply(Consumer& c, const Item& it) {
  static_assert(MT % 2 == 0 || (MT == 1 && (KS == 1 || KS % 2 == 0)), "which set is in use must be known to the compiler");
  float acc[MT][N / 2];
  u32 a[2][16];
  int left = c.p.chunks;
  const int tile = (c.group * 4 + c.warp) * MT;  // of 16 rows, within the item
  auto fetch = [&](int in_stage, int mt) {
    Raw<FORMAT> raw;
    raw.load(c.sh.ring[c.at.slot] + KS * N * 128 + ((tile + mt) * KS + in_stage) * CHUNK, c.lane);
    return raw;
  };
  auto issue = [&](int in_stage, float (&sum)[N / 2], const u32 (&w)[16]) {
    const auto b = b_low(c.sh.ring[c.at.slot] + in_stage * N * 128);
    wgmma_fence();
    HB_UNROLL
    for (int i = 0; i < 4; i++) wgmma<N>(sum, w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3], b_tile(b, i * 32));
    wgmma_commit();
  };
  HB_UNROLL
  for (int mt = 0; mt < MT; mt++) wgmma_clear(acc[mt]);
  wait_for(&c.sh.full[c.at.slot], c.at.phase);
  fetch(0, 0).widen(a[0]);
  int k = 0;  // chunk in the stage
  if constexpr (MT == 1) {
    HB_NO_UNROLL
    for (;;) {
      const int here = c.at.slot;
      issue(k, acc[0], a[0]);
      if (--left == 0) { wgmma_wait<0, 1>(); break; }
      if (KS == 1) { c.at.next(); wait_for(&c.sh.full[c.at.slot], c.at.phase); }
      else k++;
      fetch(k, 0).widen(a[1]);
      issue(k, acc[0], a[1]);
      const int there = c.at.slot;
      if (--left == 0) { wgmma_wait<0, 2>(); if (KS == 1) c.release(here); break; }
      const bool leave = KS <= 2 || ++k == KS;
      if (leave) { k = 0; c.at.next(); wait_for(&c.sh.full[c.at.slot], c.at.phase); }
      if (FORMAT == BF16) wgmma_wait<1>();
      auto raw = fetch(k, 0);
      if (FORMAT != BF16) wgmma_wait<1>();
      if (KS == 1) c.release(here);
      raw.widen(a[0]);
      wgmma_wait<0>();
      if (leave) c.release(there);
    }
  } else {
    HB_NO_UNROLL
    for (;;) {
      HB_UNROLL
      for (int mt = 0; mt < MT; mt++) {
        issue(k, acc[mt], a[mt & 1]);
        if (mt + 1 < MT) {
          if (FORMAT == BF16) wgmma_wait<1>();  // its loads go straight into the registers of the product
          auto raw = fetch(k, mt + 1);
          if (FORMAT != BF16) wgmma_wait<1>();
          raw.widen(a[~mt & 1]);
        }
      }
      if (--left == 0) { wgmma_wait<0>(); break; }
      const int here = c.at.slot;
      const bool leave = KS == 1 || ++k == KS;
      if (leave) { k = 0; c.at.next(); wait_for(&c.sh.full[c.at.slot], c.at.phase); }
      if (FORMAT == BF16) wgmma_wait<1>();
      auto raw = fetch(k, 0);
      if (FORMAT != BF16) wgmma_wait<1>();
      raw.widen(a[0]);
      wgmma_wait<0>();
      if (leave) c.release(here);
    }
  }
  c.release(c.at.slot);
  c.at.next();
  HB_UNROLL
  for (int mt = 0; mt < MT; mt++) wgmma_settle(acc[mt]);
  if (tile >= it.tiles * 4) return;  // a remainder: this warp multiplied what happened to lie there
  Bias<MT> bias;
  bias.load(c.p, it, it.first * 4 + tile, c.lane);
  store<N, MT>(c, it, it.first * 4 + tile, acc, bias);
}

HB_DEV void pass(Consumer& c) {  // an item with no rows for this warpgroup
  for (int k = 0; k < c.p.chunks; k += KS) {
    wait_for(&c.sh.full[c.at.slot], c.at.phase);
    c.release(c.at.slot);
    c.at.next();
  }
}

HB_DEV void dispatch(Consumer& c, const Item& it) {
#define HB_CASE(n) case n: return multiply<n, MT>(c, it);
  if constexpr (SHAPE == BROAD) switch (it.n) {
    HB_CASE(16) HB_CASE(32) HB_CASE(48) HB_CASE(56) HB_CASE(64) HB_CASE(72) HB_CASE(80) HB_CASE(88)
  } else if constexpr (SHAPE == WIDE) switch (it.n) {
    HB_CASE(16) HB_CASE(32) HB_CASE(48) HB_CASE(56) HB_CASE(64) HB_CASE(72)
    HB_CASE(80) HB_CASE(88) HB_CASE(96) HB_CASE(112) HB_CASE(128)
  } else if constexpr (SHAPE == TALL) switch (it.n) {
    HB_CASE(8) HB_CASE(16) HB_CASE(24) HB_CASE(32) HB_CASE(40) HB_CASE(48) HB_CASE(56) HB_CASE(64)
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
    if (c.group * MT < it.tiles) dispatch(c, it);
    else pass(c);
    c.turn++;
    sync_warp();
    if (c.lane == 0) bar_arrive(&sh.item_empty[q], 1);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) grouped(const __grid_constant__ Product p) {
  Shared& sh = *(Shared*)(((size_t)hb_shared() + 1023) & ~(size_t)1023);
  const int thread = hb_thread();
  if (thread == 0) {
    for (int s = 0; s < STAGES; s++) { bar_init(&sh.full[s], FEEDERS); bar_init(&sh.empty[s], WARPS); }
    for (int q = 0; q < 2; q++) { bar_init(&sh.item_full[q], 1); bar_init(&sh.item_empty[q], WARPS + FEEDERS - 1); }
    bar_init_done();
  }
  sync_all();
  wait_for_previous();
  release_next();
  if (thread >= WARPGROUPS * 128) {
    fewer_registers<SHAPE == NARROW ? 40 : 56>();
    const int feeder = thread / 32 - WARPS;
    if (feeder == 0) feed(p, sh, thread % 32);
    else if (thread % 32 == 0) help_feed(p, sh, feeder);
  } else {
    // what one side gives, the other takes: 640 x 96, 512 x 128 or 384 x 168 in all
    more_registers<SHAPE == NARROW ? 104 : SHAPE == BROAD ? 152 : 224>();
    consume(p, sh, thread);
  }
}

#ifdef HB_EMULATE
extern "C" void hb_grouped(const Product* p, int grid, u32 seed) { emu::run(grid, THREADS, shared_bytes(), seed, [=] { grouped(*p); }); }
extern "C" int hb_grouped_size(int what) { return what == 0 ? (int)sizeof(Product) : what == 1 ? shared_bytes() : THREADS; }
#endif
