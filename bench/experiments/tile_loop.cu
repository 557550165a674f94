// The loop over tiles of a decode step by itself, from shared memory to sums: what a tile of 16 x 2880 MXFP4 weights costs in
// cycles where no memory and no other block is waited for. tile_loop.py compares and times it.
//
//   HB_BODY 0  today's: multiply_tile and its flush, as the decode step has them (gemv.cuh; HB_BY_PRODUCT as there)
//           2  layout A: E2M1 as E5M2 by masks, wgmma m64n8k32 with two E4M3 digits of x
//           3  layout B: the same by a table in registers (prmt), as grouped products would have it
//           4  layout A as the decode step has it (decode/digits.cuh): atoms of four tiles in a slot
//
// The feeding warp copies nothing: it says of every slot that it is full as soon as it is free. A ring's content stays, so
// tile n is made of the slots that n comes to.
//
// A and B. Three warpgroups share K, 15 chunks each; a warp has 16 of the warpgroup's 64 rows, so four tiles are made at once, and a
// warp's part of one is a slot of its own. A group of 32 of x is hi + lo / 16 times a power of two of its own, both digits E4M3,
// which holds a bf16 number within 14 octaves of its group's largest exactly. Four groups lie in the eight columns of a product
// in turn, zeros elsewhere, so that a lane's two columns are one group's digits: its sum is scaled and added in float.
//
// A word holds eight codes of one row: bytes k = 4 t .. 4 t + 3 of the group in the first register, 16 + 4 t .. in the second.
// A's layout is tile16_e5m2 (formats/tile16.py), and B's the same with other words. The widening of A and the products are
// those of the decode step (device/digits.cuh).
#define HB_IN_STEP (HB_BODY < 2 || HB_BODY == 4)  // the decode step's own code
#if HB_IN_STEP
#include "decode/digits.cuh"
#else
#include "device/digits.cuh"
#endif

struct Probe {
  const u8* weights;      // [SLOTS][SLOT_BYTES]
  const u8* digits;       // of x: [3][8][1024], as the tensor core reads them
  const float* x_scales;  // [3][32]: of the groups of each third of K
  const u64* x;           // today's: [HIDDEN / 2] paired words with tag 1
  float* out;             // [kept][16] or, of four tiles at once, [kept][64]
  u64* cycles;            // [blocks]
  u32* failure;
  int passes, kept;       // tiles, or four at once; whose sums are stored
};
HB_MIRRORED(Probe, weights, digits, x_scales, x, out, cycles, failure, passes, kept)

#if HB_IN_STEP
#if HB_TILE_BODY
constexpr int TILES_EACH = QUAD, SLOTS_EACH = Quad<HIDDEN>::SLOTS_EACH;  // of a pass
#else
constexpr int TILES_EACH = 1, SLOTS_EACH = Tile<MXFP4, HIDDEN>::slots();
#endif
HB_DEV void run(const Probe& p) {
  Shared& sh = *(Shared*)hb_shared();
  const int thread = hb_thread(), warp = thread / 32, lane = thread % 32;
  if (thread == 0) {
    for (int i = 0; i < SLOTS; i++) { bar_init(&sh.full[i], 1); bar_init(&sh.empty[i], ARRIVALS); }
    bar_init_done();
    sh.epoch = 0;
    sh.step.failure = p.failure;
    sh.step.rows = 1;
  }
  for (int i = thread; i < SLOTS * SLOT_BYTES / 4; i += THREADS) ((u32*)sh.ring)[i] = ((const u32*)p.weights)[i];
  sync_all();
  if (warp == WORKERS) {
    if (lane) return;
    Cursor c;
    for (int i = 0; i < p.passes * SLOTS_EACH; i++, c.advance(1)) {
      if (i >= SLOTS) wait_bar(&sh.empty[c.slot], c.phase ^ 1, 0x100);
      bar_arrive(&sh.full[c.slot], 1);
    }
    return;
  }
  Worker w(0, 0, 0);
  ExpertOperand<MXFP4, HIDDEN> x;
  u64 start = 0;
#if HB_TILE_BODY
  clear_digits<HIDDEN>(w);
#endif
  gemv<MXFP4, HIDDEN, 1>(w, x, p.passes * TILES_EACH,
    [&](int, int, int) { return Early(); },
    [&] {
      load_operand(w, x, FromPaired{p.x, HIDDEN / 2, w.tag});
      w.sync();
      start = clock_now();
    },
    [&](int tile, int, int m, const float (&sum)[1], Early) { if (tile < p.kept * TILES_EACH) p.out[tile * 16 + m] = sum[0]; });
  w.sync();
  if (thread == 0) p.cycles[hb_block()] = clock_now() - start;
}
#else
constexpr int WORKERS = 12, THREADS = 32 * (WORKERS + 1), SLOTS = 20, SLOT_BYTES = 8192, ATOMS = 8;
struct Shared {
  u8 digits[3][ATOMS][1024];
  u8 ring[SLOTS][SLOT_BYTES];
  float x_scales[3][32], red[2][3][64];
  u64 full[SLOTS], empty[SLOTS];
};

#ifdef HB_EMULATE
HB_DEV u32 select_bytes(u32 a, u32 b, u32 s) { return permute(a, b, s & 0x7777u); }
#else
HB_DEV u32 select_bytes(u32 a, u32 b, u32 s) { u32 r; asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(s)); return r; }
#endif

// Eight codes of a word as E5M2, four to a register. A: value * 2^-14; B: value.
HB_DEV void widen_word(u32 w, u32& first, u32& second) {
  if (HB_BODY == 2) {
    widen_e5m2_word(w, first, second);
  } else {
    const u32 m = w & 0x77777777u;
    first = select_bytes(0x3e3c3800u, 0x46444240u, m) | (w & 0x80808080u);
    second = select_bytes(0x3e3c3800u, 0x46444240u, m >> 16) | ((w << 4) & 0x80808080u);
  }
}
constexpr float OUT = HB_BODY == 2 ? (float)(1 << E5M2_OCTAVES) : 1.f;

// A lane's words of two chunks (of one in the last atom), and what its sums of them are multiplied by, in rows g and g + 8.
struct Part {
  u32x4 w[2];
  float up, low;
  HB_DEV_MEMBER void load(const Shared& sh, int slot, int third, int q, int lane) {
    const int n = q < ATOMS - 1 ? 2 : 1, t = lane % 4;
    const u8* chunks = sh.ring[slot] + 2 * q * 544;
    HB_UNROLL
    for (int c = 0; c < n; c++) w[c] = lds128(chunks + c * 544 + lane * 16);
    if (n == 1) w[1] = {0, 0, 0, 0};
    const u32 s = lds16(chunks + (n > 1 ? t / 2 : 0) * 544 + 512 + lane / 4 * 4 + t % 2 * 2);
    const float x = as_float(lds32(&sh.x_scales[third][4 * q + t]));
    up = as_float((s << 23) & 0x7f800000u) * x;
    low = as_float((s << 15) & 0x7f800000u) * x;
  }
  HB_DEV_MEMBER void widen(u32 (&a)[16]) const {
    HB_UNROLL
    for (int c = 0; c < 2; c++) {
      widen_word(w[c].x, a[8 * c], a[8 * c + 2]);
      widen_word(w[c].y, a[8 * c + 1], a[8 * c + 3]);
      widen_word(w[c].z, a[8 * c + 4], a[8 * c + 6]);
      widen_word(w[c].w, a[8 * c + 5], a[8 * c + 7]);
    }
  }
};

HB_DEV void run(const Probe& p) {
  Shared& sh = *(Shared*)(((size_t)hb_shared() + 1023) & ~(size_t)1023);
  const int thread = hb_thread(), warp = thread / 32, lane = thread % 32;
  if (thread == 0) {
    for (int i = 0; i < SLOTS; i++) { bar_init(&sh.full[i], 1); bar_init(&sh.empty[i], 1); }
    bar_init_done();
  }
  for (int i = thread; i < SLOTS * SLOT_BYTES / 4; i += THREADS) ((u32*)sh.ring)[i] = ((const u32*)p.weights)[i];
  for (int i = thread; i < 3 * ATOMS * 256; i += THREADS) ((u32*)sh.digits)[i] = ((const u32*)p.digits)[i];
  for (int i = thread; i < 96; i += THREADS) (&sh.x_scales[0][0])[i] = p.x_scales[i] * OUT;
  written_for_products();
  sync_all();
  if (warp == WORKERS) {
    if (lane) return;
    int slot = 0;
    u32 phase = 0;
    for (int i = 0; i < p.passes * WORKERS; i++) {
      if (i >= SLOTS) wait_for(&sh.empty[slot], phase ^ 1);
      bar_arrive(&sh.full[slot], 1);
      if (++slot == SLOTS) { slot = 0; phase ^= 1; }
    }
    return;
  }
  const int third = warp / 4, g = lane / 4, t = lane % 4;
  int slot = warp, buffer = 0;
  u32 phase = 0;
  const auto digits = b_low(sh.digits[third]);
  sync_some<1, WORKERS * 32>();
  const u64 start = clock_now();
  HB_ROLLED
  for (int pass = 0; pass < p.passes; pass++) {
    float acc[2] = {0.f, 0.f}, d[2][4];
    u32 a[2][16];
    Part part[2];
    wait_for(&sh.full[slot], phase);
    part[0].load(sh, slot, third, 0, lane);
    HB_UNROLL
    for (int q = 0; q <= ATOMS; q++) {
      const int now = q & 1, before = now ^ 1;
      const float up = part[before].up, low = part[before].low;
      if (q + 1 < ATOMS) part[before].load(sh, slot, third, q + 1, lane);
      if (q < ATOMS) {
        part[now].widen(a[now]);
        wgmma_fence();
        digit_product<true, 8>(d[now], a[now], b_tile(digits, q * 1024));
        HB_UNROLL
        for (int i = 1; i < (q < ATOMS - 1 ? 4 : 2); i++) digit_product<false, 8>(d[now], a[now] + 4 * i, b_tile(digits, q * 1024 + i * 32));
        wgmma_commit();
      }
      if (q == 0) continue;
      if (q < ATOMS) wgmma_wait<1>(); else wgmma_wait<0>();
      wgmma_settle(d[before]);
      acc[0] += (d[before][0] + d[before][1] * DIGIT) * up;
      acc[1] += (d[before][2] + d[before][3] * DIGIT) * low;
    }
    float own = t & 1 ? acc[1] : acc[0];
    own += shfl_xor(t & 1 ? acc[0] : acc[1], 1);
    own += shfl_xor(own, 2);
    if (lane == 0) bar_arrive(&sh.empty[slot], 1 + (as_bits(own) & (u32)hb_block() >> 20));  // every word is in the sum
    if (t < 2) put32(&sh.red[buffer][third][warp % 4 * 16 + g + 8 * t], as_bits(own));
    slot += WORKERS;
    if (slot >= SLOTS) { slot -= SLOTS; phase ^= 1; }
    sync_some<1, WORKERS * 32>();
    if (thread < 64) {
      const float* sums = sh.red[buffer][0] + thread;
      const float sum = (as_float(lds32(sums)) + as_float(lds32(sums + 64))) + as_float(lds32(sums + 128));
      if (pass < p.kept) p.out[pass * 64 + thread] = sum;
    }
    buffer ^= 1;
  }
  sync_some<1, WORKERS * 32>();
  if (thread == 0) p.cycles[hb_block()] = clock_now() - start;
}
#endif

#ifdef HB_EMULATE
constexpr int BYTES = sizeof(Shared) + (HB_IN_STEP ? 0 : 1024);
extern "C" void hb_run(const char*, const Probe* p, int grid, u32 seed) {
  emu::run(grid, THREADS, BYTES, seed, [p] { run(*p); });
}
extern "C" int hb_size(int what) { return what == 0 ? (int)sizeof(Probe) : what == 1 ? BYTES : what == 2 ? THREADS : SLOTS; }
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1) tile_loop(const __grid_constant__ Probe p) { run(p); }
#endif
