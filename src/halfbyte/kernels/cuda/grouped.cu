// The multiplying side of the grouped product, and the kernel. See grouped.cuh for the whole picture.
#include "grouped.cuh"

struct Consumer {
  const Product& p;
  Shared& sh;
  int group, warp, lane;  // warpgroup, warp in it, lane
  Place at;
  int turn;

  HB_DEV_MEMBER void release(int slot) const { if (lane == 0) bar_arrive(&sh.empty[slot], 1); }
};

HB_DEV float bias_at(const Product& p, size_t i) {
  if (p.bias_float) return ((const float*)p.bias)[i];
  return as_float((u32)((const u16*)p.bias)[i] << 16);
}

// ---- what becomes of 64 rows x N columns in a warpgroup's registers -------------------------------------------------

HB_DEV float swiglu(const Product& p, float gate, float up) {
  gate = fminf(gate, p.limit);
  up = fminf(fmaxf(up, -p.limit), p.limit);
  return (up + 1.f) * gate * reciprocal(1.f + power_of_two(gate * (p.alpha * -1.4426950408889634f)));
}

// A warp has MT consecutive tiles of 16 rows, tile `first` and on. Rows alternate gate, up: partners are four lanes apart.
// Even lanes take the even column of a pair, odd lanes the odd one. Then four lanes hold the eight hidden values of a tile
// for four columns each; a transpose among them gives every lane the eight values of one column. They are words 4 t .. of
// a group of 32 values, and tile16 wants word (t, i) of a group at place (i, t): MT words to be stored side by side.
template <int N, int MT> HB_DEV void store_hidden(const Consumer& c, const Item& it, int first, const float (&acc)[MT][N / 2]) {
  const Product& p = c.p;
  const int g = c.lane >> 2, t = c.lane & 3, odd = g & 1, q = g >> 1, high = q >> 1, low = q & 1;
  float bias[MT][4] = {};  // gate and up of rows g, then of rows g + 8
  if (p.bias) {
    const size_t row = (size_t)it.expert * p.m_tiles * 64 + first * 16 + (g & ~1);
    HB_UNROLL
    for (int i = 0; i < 4 * MT; i++) bias[i / 4][i % 4] = bias_at(p, row + (i >> 2) * 16 + (i >> 1 & 1) * 8 + (i & 1));
  }
  HB_UNROLL
  for (int four = 0; four < (N + 31) / 32; four++) {
    u32 words[4][MT];
    HB_UNROLL
    for (int mt = 0; mt < MT; mt++) {
      u32 v[4] = {0, 0, 0, 0};
      HB_UNROLL
      for (int k = 0; k < 4; k++) {
        const int j = four * 4 + k;
        if (j >= N / 8) continue;
        float y[2];
        HB_UNROLL
        for (int h = 0; h < 2; h++) {
          const float a = acc[mt][4 * j + 2 * h], b = acc[mt][4 * j + 2 * h + 1];
          const float own = odd ? b : a, got = shfl_xor(odd ? a : b, 4);
          y[h] = swiglu(p, (odd ? got : own) + bias[mt][2 * h], (odd ? own : got) + bias[mt][2 * h + 1]);
        }
        v[k] = bf16_pair(y[0], y[1]);
      }
      const u32 k0 = high ? v[2] : v[0], k1 = high ? v[3] : v[1];
      const u32 r0 = shfl_xor(high ? v[0] : v[2], 16), r1 = shfl_xor(high ? v[1] : v[3], 16);
      const u32 own = low ? k1 : k0, far = low ? r1 : r0;
      const u32 got = shfl_xor(low ? k0 : k1, 8), got_far = shfl_xor(low ? r0 : r1, 8);
      const u32 x0 = low ? got : own, x1 = low ? own : got, y0 = low ? got_far : far, y1 = low ? far : got_far;
      const u32 w0 = high ? y0 : x0, w1 = high ? y1 : x1, w2 = high ? x0 : y0, w3 = high ? x1 : y1;
      words[0][mt] = permute(w0, w1, 0x5410);
      words[1][mt] = permute(w2, w3, 0x5410);
      words[2][mt] = permute(w0, w1, 0x7632);
      words[3][mt] = permute(w2, w3, 0x7632);
    }
    const int column = (four * 4 + q) * 8 + 2 * t + odd;
    if (column < N && column < it.valid) {
      const int slot = it.slot + column;
      u16* row = p.packed + ((size_t)(first >> 3) * p.packed_slots + slot) * 64;
      HB_UNROLL
      for (int i = 0; i < 4; i++) store_words<MT>(row + ((((first & 4) + i) ^ (slot & 7)) * 8 + (first & 3) * 2), words[i]);
    }
  }
}

template <int N, int MT> HB_DEV void store_rows(const Consumer& c, const Item& it, int first, const float (&acc)[MT][N / 2]) {
  const Product& p = c.p;
  const int g = c.lane >> 2, t = c.lane & 3, row = first * 16 + g;
  float bias[2 * MT] = {};
  if (p.bias)
    HB_UNROLL
    for (int i = 0; i < 2 * MT; i++) bias[i] = bias_at(p, (size_t)it.expert * p.m_tiles * 64 + row + 8 * i);
  const size_t base = (size_t)(it.slot + 2 * t) * p.out_stride + row;
  float* out = p.out + base;
  const float* residual = p.residual ? p.residual + base : nullptr;
  HB_UNROLL
  for (int j = 0; j < N / 8; j++)
    HB_UNROLL
    for (int e = 0; e < 2; e++) {
      if (8 * j + 2 * t + e >= it.valid) continue;
      const size_t at = (size_t)(8 * j + e) * p.out_stride;
      HB_UNROLL
      for (int i = 0; i < 2 * MT; i++) {
        float v = acc[i / 2][4 * j + 2 * (i & 1) + e] + bias[i];
        if (residual) v += residual[at + 8 * i];
        out[at + 8 * i] = v;
      }
    }
}

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
      auto raw = fetch(k, 0);
      wgmma_wait<1>();
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
          auto raw = fetch(k, mt + 1);
          wgmma_wait<1>();
          raw.widen(a[~mt & 1]);
        }
      }
      if (--left == 0) { wgmma_wait<0>(); break; }
      const int here = c.at.slot;
      const bool leave = KS == 1 || ++k == KS;
      if (leave) { k = 0; c.at.next(); wait_for(&c.sh.full[c.at.slot], c.at.phase); }
      auto raw = fetch(k, 0);
      wgmma_wait<1>();
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
  if constexpr (SWIGLU) store_hidden<N, MT>(c, it, it.first * 4 + tile, acc);
  else store_rows<N, MT>(c, it, it.first * 4 + tile, acc);
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
  if constexpr (SHAPE == WIDE) switch (it.n) {
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
    fewer_registers<SHAPE == NARROW ? 40 : 56>();  // what one side gives, the other takes: 640 x 96 or 384 x 168 in all
    const int feeder = thread / 32 - WARPS;
    if (feeder == 0) feed(p, sh, thread % 32);
    else if (thread % 32 == 0) help_feed(p, sh, feeder);
  } else {
    more_registers<SHAPE == NARROW ? 104 : 224>();
    consume(p, sh, thread);
  }
}

#ifdef HB_EMULATE
extern "C" void hb_grouped(const Product* p, int grid, u32 seed) { emu::run(grid, THREADS, shared_bytes(), seed, [=] { grouped(*p); }); }
extern "C" int hb_grouped_size(int what) { return what == 0 ? (int)sizeof(Product) : what == 1 ? shared_bytes() : THREADS; }
#endif
