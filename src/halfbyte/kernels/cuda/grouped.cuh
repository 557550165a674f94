// The grouped product: Y = W_e X_e + bias for every expert e, exact W4A16, for batches and prefill on Hopper.
//
// Weights are the A operand of wgmma, from registers: a warp's fragment for 16 rows x 16 k is the one of mma.m16n8k16, so
// the decode layout ("tile16") serves here unchanged. A chunk (16 rows x 64 k, scales included) comes through shared
// memory by bulk copy, is widened to bf16 with its scale multiplied in (exact: E2M1 times a power of two), and multiplies
// 64 k of up to 128 activations in shared memory.
//
// Activations are kept *packed*: [K / 64][slots][64] bf16. Within a group of 32 values the words (pairs of values) stand in
// tile16's order, word (t, i) at place (i, t), four by four; then the sixteen-byte units of slot s are permuted by XOR with
// s % 8, the tensor core's swizzle. An expert's slots are consecutive and begin at a multiple of 8, so the tile of any
// number of columns is one contiguous run per chunk: one bulk copy, no tensor map.
//
// One block per multiprocessor: four warps that feed, and warpgroups that multiply MT times 64 rows each. Work comes as
// items (some rows of one expert x some of its slots), published by the first of them. Every output is summed by one
// warpgroup in the order of k, so results do not depend on who computes what.
#pragma once
#include "warpgroup.cuh"

enum { MXFP4 = 0, Q8 = 1, BF16 = 2 };
constexpr int FORMAT = HB_FORMAT;
enum { NARROW = 0, TALL = 1, WIDE = 2 };
constexpr int SHAPE = HB_SHAPE;     // few columns per expert (memory-bound batches), up to 64, up to 128 (prefill)
constexpr bool SWIGLU = HB_SWIGLU;  // gate_up: packed bf16 out; otherwise rows of float out
constexpr int CHUNK = FORMAT == MXFP4 ? 544 : FORMAT == Q8 ? 1088 : 2048;  // bytes of 16 rows x 64 k
constexpr int WARPGROUPS = SHAPE == NARROW ? 4 : 2;   // that multiply
constexpr int MT = SHAPE == NARROW ? 1 : SHAPE == TALL ? 4 : 2;  // tiles of 64 rows for each of them
constexpr int TILES = WARPGROUPS * MT;                // and for an item
constexpr int N_MAX = SHAPE == WIDE ? 128 : 64;       // columns of an item
constexpr int WARPS = WARPGROUPS * 4, FEEDERS = 4;    // one warp alone takes 100 cycles to issue a copy
constexpr int THREADS = (WARPS + FEEDERS) * 32;
#ifndef HB_KS
#define HB_KS (HB_FORMAT == 0 ? 2 : 1)
#endif
constexpr int KS = HB_KS;                             // chunks in a stage
constexpr int STAGE = (KS * (N_MAX * 128 + TILES * 4 * CHUNK) + 1023) / 1024 * 1024;
constexpr int EXPERTS_MAX = 512;
constexpr int STAGES = 215 * 1024 / STAGE;
static_assert(STAGES >= 3, "too few stages to hide the latency of memory");

struct Product {                 // mirrored in grouped.py
  const u8* weights;             // tile16, experts one after another
  const void* bias;              // [experts][rows], bf16 or float; null: none
  const u16* x;                  // packed
  const int *starts, *counts;    // of each expert's slots; null: one expert with `columns` slots
  u16* packed;                   // SWIGLU: where the hidden values go
  float* out;                    // otherwise: [slots][out_stride]
  const float* residual;         // added to `out`, same shape; null: none
  u32* counter;                  // zero when the kernel starts
  i64 out_stride;
  int experts, m_tiles, chunks;  // m_tiles = rows / 64, chunks = K / 64
  int columns, x_slots, packed_slots, n_cap, bias_float;
  float limit, alpha;
};

struct Item {
  int expert, first, tiles;      // `tiles` of 64 rows, from tile `first`
  int slot, n, valid;            // columns: n computed, the first `valid` kept
  int more;
};

struct Shared {
  u8 ring[STAGES][STAGE];
  u64 full[STAGES], empty[STAGES], item_full[2], item_empty[2];
  Item item[2];
  int before[EXPERTS_MAX];  // the first feeding warp's: tiles of columns before expert e
};
HB_CONST_FN int shared_bytes() { return (int)sizeof(Shared) + 1024; }

HB_DEV void wait_for(u64* bar, u32 parity) { while (!bar_try(bar, parity)) wait_a_bit(); }

// ---- how an expert's slots and rows are cut -------------------------------------------------------------------------

struct Cut { int n, columns; };  // columns per item, and how many such tiles of columns

HB_DEV Cut cut(const Product& p, int count) {
  Cut c;
  const int parts = (count + p.n_cap - 1) / p.n_cap;
  c.n = parts ? ((count + parts - 1) / parts + 7) & ~7 : 8;
  c.columns = (count + c.n - 1) / c.n;
  return c;
}

// The product exists for some widths only; what is computed beyond `valid` is dropped.
HB_CONST_FN int width(int n) {
  return SHAPE == TALL ? n : SHAPE == WIDE ? (n > 48 && n <= 96 ? n : (n + 15) & ~15) : n <= 32 ? n : (n + 15) & ~15;
}

HB_DEV int count_of(const Product& p, int e) { return p.counts ? p.counts[e] : p.columns; }
HB_DEV int start_of(const Product& p, int e) { return p.starts ? p.starts[e] : 0; }

struct Work {  // the first feeding warp's view of what is to do
  const Product& p;
  Shared& sh;
  int lane, whole, rest;  // items with all their rows and remainders; NARROW: tiles of columns, and none

  HB_DEV_MEMBER void survey() {  // running sums over the experts, 32 at a time
    const int full = SHAPE == NARROW ? 1 : p.m_tiles / TILES, left = SHAPE != NARROW && p.m_tiles % TILES;
    int sum = 0;
    for (int base = 0; base < p.experts; base += 32) {
      const int e = base + lane, mine = e < p.experts ? cut(p, count_of(p, e)).columns : 0;
      int s = mine;
      HB_UNROLL
      for (int d = 1; d < 32; d *= 2) {
        const int y = (int)shfl((u32)s, lane - d);
        if (lane >= d) s += y;
      }
      if (e < p.experts) sh.before[e] = sum + s - mine;
      sum += (int)shfl((u32)s, 31);
    }
    whole = sum * full;
    rest = sum * left;
    sync_warp();
  }
  HB_DEV_MEMBER int expert_of(int column, int each) const {  // the last expert with before[e] * each <= column
    int low = 0, high = p.experts;
    while (high - low > 1) {
      const int mid = (low + high) / 2;
      if (sh.before[mid] * each <= column) low = mid; else high = mid;
    }
    return low;
  }
  HB_DEV_MEMBER void columns(Item& it, const Cut& c, int e, int column) const {
    it.expert = e;
    it.slot = start_of(p, e) + column * c.n;
    it.n = width(c.n);
    const int left = count_of(p, e) - column * c.n;
    it.valid = left < c.n ? left : c.n;
    it.more = 1;
  }
  // Item `index`: whole ones first, so that the remainders fill the gaps at the end. Neighbours share rows.
  HB_DEV_MEMBER Item next(int index) const {
    Item it = {};
    if (index >= whole + rest) return it;
    const bool big = index < whole;
    if (!big) index -= whole;
    const int full = p.m_tiles / TILES, each = big ? full : 1;
    const int e = expert_of(index, each);
    const Cut c = cut(p, count_of(p, e));
    index -= sh.before[e] * each;
    columns(it, c, e, index % c.columns);
    it.first = (big ? index / c.columns : full) * TILES;
    it.tiles = big ? TILES : p.m_tiles % TILES;
    return it;
  }
  // NARROW: tile `at` of all tiles of all columns; consecutive, so that every block gets the same number of bytes.
  HB_DEV_MEMBER Item next(i64 at, i64 end) const {
    Item it = {};
    if (at >= end) return it;
    const int column = (int)(at / p.m_tiles), e = expert_of(column, 1);
    columns(it, cut(p, count_of(p, e)), e, column - sh.before[e]);
    it.first = (int)(at % p.m_tiles);
    int tiles = p.m_tiles - it.first;
    if (tiles > TILES) tiles = TILES;
    if (tiles > end - at) tiles = (int)(end - at);
    it.tiles = tiles;
    return it;
  }
};

// ---- the feeding warp -----------------------------------------------------------------------------------------------

struct Place {
  int slot = 0;
  u32 phase = 0;
  HB_DEV_MEMBER void next() { if (++slot == STAGES) { slot = 0; phase ^= 1; } }
};

// One lane of each feeding warp: every fourth tile of 16 rows, and every fourth chunk of the columns.
HB_DEV void stream_item(const Product& p, Shared& sh, const Item& it, Place& at, int feeder, u64 policy) {
  const size_t tile_bytes = (size_t)p.chunks * CHUNK;
  const u8* tile = p.weights + ((size_t)it.expert * p.m_tiles * 4 + (size_t)it.first * 4 + feeder) * tile_bytes;
  const u16* x = p.x + (size_t)it.slot * 64;
  const int n = it.n, tiles = it.tiles;  // 64 rows have a tile of 16 for each feeder
  for (int c = 0; c < p.chunks; c += KS) {
    const int k = p.chunks - c < KS ? p.chunks - c : KS;
    wait_for(&sh.empty[at.slot], at.phase ^ 1);
    u8* stage = sh.ring[at.slot];
    u64* full = &sh.full[at.slot];
    bar_expect(full, tiles * k * CHUNK + (feeder < k ? n * 128 : 0));
    if (feeder < k) bulk_copy(stage + feeder * n * 128, x + (size_t)(c + feeder) * p.x_slots * 64, n * 128, full, policy);
    u8* to = stage + KS * n * 128 + feeder * KS * CHUNK;
    HB_UNROLL
    for (int i = 0; i < TILES; i++)
      if (i < tiles) bulk_copy(to + i * 4 * KS * CHUNK, tile + i * 4 * tile_bytes + (size_t)c * CHUNK, k * CHUNK, full, policy);
    at.next();
  }
}

// The first feeding warp decides what is next and publishes it; the others stream their share of it.
HB_DEV void feed(const Product& p, Shared& sh, int lane) {
  const u64 policy = ordinary_policy();
  Work work{p, sh, lane, 0, 0};
  work.survey();
  Place at;
  int turn = 0;
  i64 next = hb_block(), end = 0;
  if (SHAPE == NARROW) {
    const i64 all = (i64)work.whole * p.m_tiles;
    next = all * hb_block() / hb_grid();
    end = all * (hb_block() + 1) / hb_grid();
  }
  for (;;) {
    const Item it = SHAPE == NARROW ? work.next(next, end) : work.next((int)next);
    const int q = turn & 1;
    wait_for(&sh.item_empty[q], (u32)(turn >> 1 & 1) ^ 1);
    if (lane == 0) { sh.item[q] = it; bar_arrive(&sh.item_full[q], 1); }
    turn++;
    if (!it.more) break;
    u32 got = 0;
    if (lane == 0) {
      if (SHAPE != NARROW) got = counter_add(p.counter);  // asked for now, needed after this item
      stream_item(p, sh, it, at, 0, policy);
    }
    sync_warp();
    next = SHAPE == NARROW ? next + it.tiles : hb_grid() + (int)shfl(got, 0);
  }
}

HB_DEV void help_feed(const Product& p, Shared& sh, int feeder) {  // one lane
  const u64 policy = ordinary_policy();
  Place at;
  for (int turn = 0;; turn++) {
    const int q = turn & 1;
    wait_for(&sh.item_full[q], (u32)(turn >> 1 & 1));
    const Item it = sh.item[q];
    bar_arrive(&sh.item_empty[q], 1);
    if (!it.more) return;
    stream_item(p, sh, it, at, feeder, policy);
  }
}

// ---- weights in registers -------------------------------------------------------------------------------------------

template <int F> struct Raw;  // this lane's part of a chunk, as it lies in memory
template <> struct Raw<MXFP4> {
  u32x4 w;
  u32 s;
  HB_DEV_MEMBER void load(const u8* chunk, int lane) { w = lds128(chunk + lane * 16); s = lds32(chunk + 512 + (lane >> 2) * 4); }
  // 2^(e - 1) in both halves: codes come as value * 2^-126. e <= 128 is checked when weights are bound.
  HB_DEV_MEMBER u32 scale(u32 select) const { return permute(s, 0, select) * 128u + 0x3f003f00u; }
  HB_DEV_MEMBER void widen(u32 (&a)[16]) const {
    const u32 m = 0x81c081c0u, words[4] = {w.x, w.y, w.z, w.w};
    HB_UNROLL
    for (int half = 0; half < 2; half++) {
      const u32 up = scale(half ? 0x4242 : 0x4040), low = scale(half ? 0x4343 : 0x4141);  // rows g and g + 8
      HB_UNROLL
      for (int i = 2 * half; i < 2 * half + 2; i++) {
        const u32 v = words[i];
        a[4 * i] = bf16_mul(v & m, up);
        a[4 * i + 1] = bf16_mul(rotate_right(v, 6) & m, low);
        a[4 * i + 2] = bf16_mul(rotate_right(v, 3) & m, up);
        a[4 * i + 3] = bf16_mul(((v & 0x001b001bu) * 0x1084u) & m, low);
      }
    }
  }
};
template <> struct Raw<BF16> {
  u32x4 w[4];
  HB_DEV_MEMBER void load(const u8* chunk, int lane) {
    HB_UNROLL
    for (int i = 0; i < 4; i++) w[i] = lds128(chunk + i * 512 + lane * 16);
  }
  HB_DEV_MEMBER void widen(u32 (&a)[16]) const {
    HB_UNROLL
    for (int i = 0; i < 4; i++) { a[4 * i] = w[i].x; a[4 * i + 1] = w[i].y; a[4 * i + 2] = w[i].z; a[4 * i + 3] = w[i].w; }
  }
};
