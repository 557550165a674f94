// The grouped product where there is no wgmma: SM120 and SM121 (DGX Spark, RTX 50), SM80 to SM89 (A100, RTX 30 and 40), with
// mma.sync, within 99 KB of shared memory. The same arguments, items, layout "tile16" and epilogues as grouped.cu (see
// grouped.cuh); SM90 runs it, too, which is how it was tested.
//
// One warp feeds, eight multiply, sixteen rows each of an item's 128, by up to 64 or 128 columns. A tensor core of SM12x takes 32 cycles
// for m16n8k16 in bf16, so that a warp's 64 k of 128 columns are 2048 cycles of products beside 60 instructions that widen
// its weights and 32 that load columns: two warps to a tensor core hide each other's.
//
// HB_MX: weights stay E2M1 and are multiplied natively, with their scales, by activations in MXFP8 (16 cycles for twice the
// k) or MXFP4 (and twice again).
#include "prefill/results.cuh"
#include "prefill/weights.cuh"
#include "device/warp_products.cuh"

// ---- weights as the block-scaled products take them -----------------------------------------------------------------

// A chunk for the products: a[step] of four registers, `scale` for both groups of 32.
struct Native {
  u32 a[MX == MXFP4_X ? 4 : 8], scale;
  HB_DEV_MEMBER void load(const u8* chunk, int lane) {
    Raw<MXFP4> raw;
    raw.load(chunk, lane);
    const u32 words[4] = {raw.w.x, raw.w.y, raw.w.z, raw.w.w};  // [group][half]
    HB_UNROLL
    for (int group = 0; group < 2; group++) {
      const Middle first = e2m1_in_bytes(words[2 * group]), second = e2m1_in_bytes(words[2 * group + 1]);
      if constexpr (MX == MXFP4_X) {
        a[2 * group] = first.up >> 2 | second.up << 2;
        a[2 * group + 1] = first.low >> 2 | second.low << 2;
      } else {
        u32* to = a + group * 4;
        to[0] = first.up; to[1] = first.low; to[2] = second.up; to[3] = second.low;
      }
    }
    // bytes (group, row) come as (0, g), (0, g + 8), (1, g), (1, g + 8); odd lanes speak for g + 8
    scale = MX == MXFP4_X ? permute(raw.s, 0, lane & 1 ? 0x4431 : 0x4420) : raw.s >> (lane & 1) * 8;
  }
};

// ---- one item -------------------------------------------------------------------------------------------------------

// Sixteen columns and half of their k at a time: while they are multiplied the next are loaded, and two sums take turns.
template <int N> HB_DEV void multiply_wide(float* acc, const u8* stage, const u32 (&a)[16], int lane) {
  u32 b[2][2][4];
  auto load = [&](int turn) {
    HB_UNROLL
    for (int h = 0; h < 2; h++) load_columns<8>(b[turn & 1][h], stage + ((turn & ~1) + h) * 8 * 128, (turn & 1) * 4, lane);
  };
  load(0);
  HB_UNROLL
  for (int turn = 0; turn < N / 8; turn++) {
    if ((FORMAT == BF16 || COPIERS > 1) && turn % 2) sync_warp();  // else all loads may come first, into too many registers
    if (turn + 1 < N / 8) load(turn + 1);
    HB_UNROLL
    for (int i = 0; i < 2; i++)
      HB_UNROLL
      for (int h = 0; h < 2; h++)
        mma_sync(acc + ((turn & ~1) + h) * 4, a + (turn & 1) * 8 + 4 * i, b[turn & 1][h][2 * i], b[turn & 1][h][2 * i + 1]);
  }
}

// The same for a stage of two chunks, of which the second may be missing: it is half of the columns' k, but in MXFP4 all of
// them come at once.
template <int N> HB_DEV void multiply_native(float* acc, const u8* stage, const Native (&w)[2], bool both, int lane) {
  constexpr int U = COLUMN / 16, EACH = U / 4;  // turns for sixteen columns
  u32 b[2][2][4], scale[2][2];
  auto load = [&](int turn) {
    const int j = turn / EACH;
    HB_UNROLL
    for (int h = 0; h < 2; h++) {
      load_columns<U>(b[turn & 1][h], stage + (2 * j + h) * 8 * COLUMN, turn % EACH * 4, lane);
      if (turn % EACH == 0) scale[j & 1][h] = lds32(stage + X_SCALES + ((2 * j + h) * 8 + (lane >> 2)) * 4);
    }
  };
  load(0);
  HB_UNROLL
  for (int turn = 0; turn < N / 16 * EACH; turn++) {
    const int j = turn / EACH;
    if (turn + 1 < N / 16 * EACH) load(turn + 1);
    HB_UNROLL
    for (int chunk = 0; chunk < 2; chunk++) {
      if (EACH == 2 && chunk != turn % 2) continue;
      if (chunk && !both) continue;
      HB_UNROLL
      for (int h = 0; h < 2; h++) {
        float* d = acc + (2 * j + h) * 4;
        const u32 *x = b[turn & 1][h], sx = scale[j & 1][h], sw = w[chunk].scale;
        if constexpr (MX == MXFP4_X) {
          if (chunk) mma_mxf4<0, 2>(d, w[1].a, x[2], x[3], sw, sx);
          else mma_mxf4<0, 0>(d, w[0].a, x[0], x[1], sw, sx);
        } else {
          if (chunk) { mma_mxf8<0, 2>(d, w[1].a, x[0], x[1], sw, sx); mma_mxf8<2, 3>(d, w[1].a + 4, x[2], x[3], sw, sx); }
          else { mma_mxf8<0, 0>(d, w[0].a, x[0], x[1], sw, sx); mma_mxf8<2, 1>(d, w[0].a + 4, x[2], x[3], sw, sx); }
        }
      }
    }
  }
}

// An arrival can overtake loads of its own warp, and then the copy engine writes what is still to be read: ptxas keeps it
// behind neither loads nor products. One that adds to its count a zero made of all sums cannot.
template <int N> HB_DEV void release(const Consumer& c, const float (&acc)[N], u32 zero) {
  u32 made = 0;
  HB_UNROLL
  for (int i = 0; i < N; i += 4) made |= as_bits(acc[i]);
  if (c.lane == 0) bar_arrive(&c.sh.empty[c.at.slot], 1 + (made & zero));
}

template <int N> HB_DEV void multiply(Consumer& c, const Item& it) {
  const u32 zero = (u32)hb_block() >> 20;  // which the compiler does not know
  float acc[1][N / 2];
  HB_UNROLL
  for (int i = 0; i < N / 2; i++) acc[0][i] = 0.f;
  // SM80: worked out anew for every item, or the places of all widths are kept through all items, in too many registers
  const int lane = COPIERS > 1 ? anew(c.lane) : c.lane, warp = COPIERS > 1 ? anew(c.warp) : c.warp;
  const int tile = c.group * 4 + warp;  // of 16 rows, within the item
  HB_ROLLED
  for (int k = 0; k < c.p.chunks; k += KS) {
    wait_for(&c.sh.full[c.at.slot], c.at.phase);
    const u8 *stage = c.sh.ring[c.at.slot], *weights = stage + N * COLUMN + tile * KS * CHUNK;
    if constexpr (MX != 0) {
      Native w[2];
      HB_UNROLL
      for (int i = 0; i < 2; i++) w[i].load(weights + i * CHUNK, lane);
      multiply_native<N>(acc[0], stage, w, k + 1 < c.p.chunks, lane);
    } else {
      Raw<FORMAT> raw;
      u32 a[16];
      raw.load(weights, lane);
      raw.widen(a, c.p.scale_offset);
      multiply_wide<N>(acc[0], stage, a, lane);
    }
    release(c, acc[0], zero);
    c.at.next();
  }
  Bias<1> bias;
  bias.load(c.p, it, it.first * 4 + tile, lane);
  store<N, 1>(c, it, it.first * 4 + tile, acc, bias);
}

HB_DEV void consume(const Product& p, Shared& sh, int thread) {
  Consumer c{p, sh, thread / 128, thread / 32 % 4, thread % 32, {}, 0};
  for (;;) {
    const int q = c.turn & 1;
    wait_for(&sh.item_full[q], (u32)(c.turn >> 1 & 1));
    const Item& it = sh.item[q];
    if (!it.more) return;
    if (c.group >= it.tiles) c.pass();
    else switch (it.n) {
#define HB_CASE(n) case n: multiply<n>(c, it); break;
      HB_CASE(16) HB_CASE(32) HB_CASE(48) HB_CASE(64)
#if HB_SHAPE == 5
      HB_CASE(80) HB_CASE(96) HB_CASE(112) HB_CASE(128)
#endif
#undef HB_CASE
    }
    c.turn = TURN_IN_ITEM ? it.more : c.turn + 1;
    sync_warp();
    if (c.lane == 0) bar_arrive(&sh.item_empty[TURN_IN_ITEM ? c.turn - 1 & 1 : q], 1);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) grouped(const __grid_constant__ Product p) {
  Shared& sh = *(Shared*)hb_shared();
  const int thread = hb_thread();
  if (thread == 0) {
    for (int s = 0; s < STAGES; s++) { bar_init(&sh.full[s], FEEDERS * COPIERS); bar_init(&sh.empty[s], WARPS); }
    for (int q = 0; q < 2; q++) { bar_init(&sh.item_full[q], 1); bar_init(&sh.item_empty[q], WARPS + FEEDERS - 1); }
    bar_init_done();
  }
  sync_all();
  wait_for_previous();
  release_next();
  if (thread < WARPS * 32) consume(p, sh, thread);
  else feed(p, sh, thread % 32);
}

#ifdef HB_EMULATE
extern "C" void hb_run(const char*, const Product* p, int grid, u32 seed) { emu::run(grid, THREADS, shared_bytes(), seed, [=] { grouped(*p); }); }
extern "C" int hb_size(int what) { return what == 0 ? (int)sizeof(Product) : what == 1 ? shared_bytes() : THREADS; }
#endif
