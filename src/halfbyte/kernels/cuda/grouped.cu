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
  return (up + 1.f) * gate * reciprocal(1.f + exp2_fast(gate * (p.alpha * -1.4426950408889634f)));
}

// Rows alternate gate, up: partners are four lanes apart. Even lanes take the even column of a pair, odd lanes the odd
// one. Then four lanes hold the eight hidden values of a warp for four columns each; a transpose among them gives every
// lane sixteen bytes of one column.
template <int N> HB_DEV void store_hidden(const Consumer& c, const Item& it, int tile, const float (&acc)[N / 2]) {
  const Product& p = c.p;
  const int g = c.lane >> 2, t = c.lane & 3, odd = g & 1, q = g >> 1, high = q >> 1, low = q & 1;
  float bias[4] = {0.f, 0.f, 0.f, 0.f};  // gate and up of rows g, then of rows g + 8
  if (p.bias) {
    const size_t row = ((size_t)it.expert * p.m_tiles + tile) * 64 + c.warp * 16 + (g & ~1);
    HB_UNROLL
    for (int i = 0; i < 4; i++) bias[i] = bias_at(p, row + (i >> 1) * 8 + (i & 1));
  }
  const int first = tile * 32 + c.warp * 8;  // of the hidden values
  HB_UNROLL
  for (int four = 0; four < (N + 31) / 32; four++) {
    u32 v[4] = {0, 0, 0, 0};
    HB_UNROLL
    for (int k = 0; k < 4; k++) {
      const int j = four * 4 + k;
      if (j >= N / 8) continue;
      float y[2];
      HB_UNROLL
      for (int h = 0; h < 2; h++) {
        const float a = acc[4 * j + 2 * h], b = acc[4 * j + 2 * h + 1];
        const float own = odd ? b : a, got = shfl_xor(odd ? a : b, 4);
        y[h] = swiglu(p, (odd ? got : own) + bias[2 * h], (odd ? own : got) + bias[2 * h + 1]);
      }
      v[k] = bf16_pair(y[0], y[1]);
    }
    const u32 k0 = high ? v[2] : v[0], k1 = high ? v[3] : v[1];
    const u32 r0 = shfl_xor(high ? v[0] : v[2], 16), r1 = shfl_xor(high ? v[1] : v[3], 16);
    const u32 own = low ? k1 : k0, far = low ? r1 : r0;
    const u32 got = shfl_xor(low ? k0 : k1, 8), got_far = shfl_xor(low ? r0 : r1, 8);
    const u32 x0 = low ? got : own, x1 = low ? own : got, y0 = low ? got_far : far, y1 = low ? far : got_far;
    const u32 w0 = high ? y0 : x0, w1 = high ? y1 : x1, w2 = high ? x0 : y0, w3 = high ? x1 : y1;
    const int column = (four * 4 + q) * 8 + 2 * t + odd;
    if (column < N && column < it.valid) {
      const int slot = it.slot + column;
      u16* to = p.packed + ((size_t)(first >> 6) * p.packed_slots + slot) * 64 + (((first >> 3) & 7) ^ (slot & 7)) * 8;
      store128(to, permute(w0, w1, 0x5410), permute(w2, w3, 0x5410), permute(w0, w1, 0x7632), permute(w2, w3, 0x7632));
    }
  }
}

template <int N> HB_DEV void store_rows(const Consumer& c, const Item& it, int tile, const float (&acc)[N / 2]) {
  const Product& p = c.p;
  const int g = c.lane >> 2, t = c.lane & 3, row = tile * 64 + c.warp * 16 + g;
  float bias[2] = {0.f, 0.f};
  if (p.bias) {
    const size_t at = (size_t)it.expert * p.m_tiles * 64 + row;
    bias[0] = bias_at(p, at); bias[1] = bias_at(p, at + 8);
  }
  const size_t base = (size_t)it.slot * p.out_stride + row;
  float* out = p.out + base;
  const float* residual = p.residual ? p.residual + base : nullptr;
  HB_UNROLL
  for (int j = 0; j < N / 8; j++)
    HB_UNROLL
    for (int e = 0; e < 2; e++) {
      const int column = 8 * j + 2 * t + e;
      if (column >= it.valid) continue;
      const size_t at = (size_t)column * p.out_stride;
      float a = acc[4 * j + e] + bias[0], b = acc[4 * j + 2 + e] + bias[1];
      if (residual) { a += residual[at]; b += residual[at + 8]; }
      out[at] = a;
      out[at + 8] = b;
    }
}

// ---- one item -------------------------------------------------------------------------------------------------------

// While the tensor cores work on one chunk, the next is widened into the other set of registers; a stage is given back
// when the product after its last one has been issued and that last one is done.
template <int N, int MT> HB_DEV void multiply(Consumer& c, const Item& it) {
  constexpr int PAIR = MT == 1 ? 2 : 1;  // chunks per round, so that the register set in use is known to the compiler
  static_assert(MT == 1 || MT % 2 == 0, "register sets alternate");
  float acc[MT][N / 2];
  u32 a[2][16];
  Raw<FORMAT> raw;
  const int chunks = c.p.chunks, tile0 = c.group * MT * 4 + c.warp;
  const u8* stage = c.sh.ring[c.at.slot];
  u64 columns = b_tile(stage);
  int previous = 0;
  auto weights = [&](int in_stage, int mt) { return stage + KS * N * 128 + ((tile0 + mt * 4) * KS + in_stage) * CHUNK; };
  wait_for(&c.sh.full[c.at.slot], c.at.phase);
  raw.load(weights(0, 0), c.lane);
  int chunk = 0;
  auto unit = [&](int mt, int set, int in_stage) {
    raw.widen(a[set]);
    const u64 b = b_advance(columns, in_stage * N * 128);
    wgmma_fence();
    HB_UNROLL
    for (int i = 0; i < 4; i++)
      wgmma<N>(acc[mt], a[set][4 * i], a[set][4 * i + 1], a[set][4 * i + 2], a[set][4 * i + 3], b_advance(b, i * 32), i > 0 || chunk > 0);
    wgmma_commit();
    const bool entered = mt == 0 && in_stage == 0 && chunk > 0;
    const int left_behind = previous;
    if (mt + 1 < MT) raw.load(weights(in_stage, mt + 1), c.lane);
    else if (chunk + 1 < chunks) {
      const int following = in_stage + 1 == KS ? 0 : in_stage + 1;
      if (following == 0) {
        previous = c.at.slot;
        c.at.next();
        stage = c.sh.ring[c.at.slot];
        columns = b_tile(stage);
        wait_for(&c.sh.full[c.at.slot], c.at.phase);
      }
      raw.load(weights(following, 0), c.lane);
    }
    wgmma_wait<1>();
    if (entered) c.release(left_behind);
  };
  for (; chunk + PAIR <= chunks; ) {
    HB_UNROLL
    for (int h = 0; h < PAIR; h++) {
      const int in_stage = KS == 1 ? 0 : PAIR == 2 ? h % KS : chunk % KS;
      HB_UNROLL
      for (int mt = 0; mt < MT; mt++) unit(mt, (h * MT + mt) & 1, in_stage);
      chunk++;
    }
  }
  if (PAIR == 2 && chunk < chunks) { unit(0, 0, 0); chunk++; }
  wgmma_wait<0>();
  c.release(c.at.slot);
  c.at.next();
  HB_UNROLL
  for (int mt = 0; mt < MT; mt++) {
    wgmma_settle(acc[mt]);
    const int tile = it.first + c.group * MT + mt;
    if constexpr (SWIGLU) store_hidden<N>(c, it, tile, acc[mt]);
    else store_rows<N>(c, it, tile, acc[mt]);
  }
}

HB_DEV void pass(Consumer& c) {  // an item with no rows for this warpgroup
  for (int k = 0; k < c.p.chunks; k += KS) {
    wait_for(&c.sh.full[c.at.slot], c.at.phase);
    c.release(c.at.slot);
    c.at.next();
  }
}

HB_DEV void dispatch(Consumer& c, const Item& it) {
#define HB_CASE(n, mt) case n: return multiply<n, mt>(c, it);
  if constexpr (WIDE) {
    if constexpr (MT_NARROW == 4)
      if (it.mt == 4) switch (it.n) {
        HB_CASE(8, MT_NARROW) HB_CASE(16, MT_NARROW) HB_CASE(24, MT_NARROW) HB_CASE(32, MT_NARROW)
        HB_CASE(40, MT_NARROW) HB_CASE(48, MT_NARROW) HB_CASE(56, MT_NARROW) HB_CASE(64, MT_NARROW)
      }
    if (it.mt == 2) switch (it.n) {
      HB_CASE(32, 2) HB_CASE(64, 2) HB_CASE(72, 2) HB_CASE(80, 2) HB_CASE(88, 2)
      HB_CASE(96, 2) HB_CASE(104, 2) HB_CASE(112, 2) HB_CASE(120, 2) HB_CASE(128, 2)
    }
    switch (it.n) { HB_CASE(32, 1) HB_CASE(64, 1) HB_CASE(96, 1) HB_CASE(128, 1) }
  } else {
    switch (it.n) { HB_CASE(8, 1) HB_CASE(16, 1) HB_CASE(24, 1) HB_CASE(32, 1) HB_CASE(48, 1) HB_CASE(64, 1) }
  }
#undef HB_CASE
}

HB_DEV void consume(const Product& p, Shared& sh, int thread) {
  Consumer c{p, sh, thread / 128, thread / 32 % 4, thread % 32, {}, 0};
  for (;;) {
    const int q = c.turn & 1;
    wait_for(&sh.item_full[q], (u32)(c.turn >> 1 & 1));
    const Item it = sh.item[q];
    c.turn++;
    sync_warp();
    if (c.lane == 0) bar_arrive(&sh.item_empty[q], 1);
    if (!it.more) return;
    if (c.group * it.mt < it.tiles) dispatch(c, it);
    else pass(c);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) grouped(const __grid_constant__ Product p) {
  Shared& sh = *(Shared*)(((size_t)hb_shared() + 1023) & ~(size_t)1023);
  const int thread = hb_thread();
  if (thread == 0) {
    for (int s = 0; s < STAGES; s++) { bar_init(&sh.full[s], 1); bar_init(&sh.empty[s], WARPS); }
    for (int q = 0; q < 2; q++) { bar_init(&sh.item_full[q], 1); bar_init(&sh.item_empty[q], WARPS); }
    bar_init_done();
  }
  sync_all();
  wait_for_previous();
  release_next();
  if (thread >= WARPGROUPS * 128) {
    if constexpr (WIDE) fewer_registers<40>();
    if (thread < WARPGROUPS * 128 + 32) feed(p, sh, thread % 32);
  } else {
    if constexpr (WIDE) more_registers<232>();
    consume(p, sh, thread);
  }
}
