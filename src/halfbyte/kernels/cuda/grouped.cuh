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
// One block per multiprocessor: a warp that feeds, and warpgroups that multiply MT times 64 rows each. Work comes as
// items (some rows of one expert x some of its slots), published by the feeding warp. Every output is summed by one
// warpgroup in the order of k, so results do not depend on who computes what.
#pragma once
#include "warpgroup.cuh"

enum { MXFP4 = 0, Q8 = 1, BF16 = 2 };
constexpr int FORMAT = HB_FORMAT;
constexpr bool WIDE = HB_WIDE;      // many columns per expert (prefill); otherwise few (memory-bound batches)
constexpr bool SWIGLU = HB_SWIGLU;  // gate_up: packed bf16 out; otherwise rows of float out
constexpr int CHUNK = FORMAT == MXFP4 ? 544 : FORMAT == Q8 ? 1088 : 2048;  // bytes of 16 rows x 64 k
constexpr int WARPGROUPS = WIDE ? 2 : 4;  // that multiply
constexpr int WARPS = WARPGROUPS * 4;
constexpr int THREADS = (WARPGROUPS + 1) * 128;
constexpr int N_MAX = WIDE ? 128 : 64;                // columns of an item
constexpr int MT = WIDE ? 2 : 1;                      // tiles of 64 rows per warpgroup
constexpr int KS = WIDE || FORMAT != MXFP4 ? 1 : 2;   // chunks in a stage
constexpr int STAGE = (KS * (N_MAX * 128 + WARPGROUPS * MT * 4 * CHUNK) + 1023) / 1024 * 1024;
constexpr int EXPERTS_MAX = 512;
constexpr int STAGES = 215 * 1024 / STAGE;
static_assert(STAGES >= 4, "too few stages to hide the latency of memory");

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
  int expert, first, tiles, mt;  // `tiles` of 64 rows from tile `first`, `mt` per warpgroup
  int slot, n, valid;            // columns: n computed, the first `valid` kept
  int more;
};

struct Shared {
  u8 ring[STAGES][STAGE];
  u64 full[STAGES], empty[STAGES], item_full[2], item_empty[2];
  Item item[2];
  int before[2][EXPERTS_MAX + 1];  // the feeding warp's: whole items (or tiles of columns), and remainders, before expert e
};
HB_CONST_FN int shared_bytes() { return (int)sizeof(Shared) + 1024; }

HB_DEV void wait_for(u64* bar, u32 parity) { while (!bar_try(bar, parity)) wait_a_bit(); }

// ---- how an expert's slots and rows are cut -------------------------------------------------------------------------

struct Cut { int n, columns, whole, rest; };  // n per tile of columns; items of one such tile: whole ones, remainders

HB_DEV Cut cut(const Product& p, int count) {
  Cut c;
  const int parts = (count + p.n_cap - 1) / p.n_cap;
  c.n = parts ? ((count + parts - 1) / parts + 7) & ~7 : 8;
  c.columns = (count + c.n - 1) / c.n;
  c.whole = p.m_tiles / (WARPGROUPS * MT);
  c.rest = (p.m_tiles % (WARPGROUPS * MT) + WARPGROUPS - 1) / WARPGROUPS;
  return c;
}

HB_DEV int count_of(const Product& p, int e) { return p.counts ? p.counts[e] : p.columns; }
HB_DEV int start_of(const Product& p, int e) { return p.starts ? p.starts[e] : 0; }

struct Work {  // the feeding warp's view of what is to do
  const Product& p;
  Shared& sh;
  int lane, whole, rest;

  HB_DEV_MEMBER void survey() {  // running sums over the experts, 32 at a time
    int a = 0, b = 0;
    for (int base = 0; base < p.experts; base += 32) {
      const int e = base + lane;
      int va = 0, vb = 0;
      if (e < p.experts) {
        Cut c = cut(p, count_of(p, e));
        va = WIDE ? c.columns * c.whole : c.columns;
        vb = WIDE ? c.columns * c.rest : 0;
      }
      int sa = va, sb = vb;
      HB_UNROLL
      for (int d = 1; d < 32; d *= 2) {
        int ya = (int)shfl((u32)sa, lane - d), yb = (int)shfl((u32)sb, lane - d);
        if (lane >= d) { sa += ya; sb += yb; }
      }
      if (e < p.experts) { sh.before[0][e] = a + sa - va; sh.before[1][e] = b + sb - vb; }
      a += (int)shfl((u32)sa, 31);
      b += (int)shfl((u32)sb, 31);
    }
    whole = a;
    rest = b;
    if (lane == 0) { sh.before[0][p.experts] = a; sh.before[1][p.experts] = b; }
    sync_warp();
  }
  HB_DEV_MEMBER int expert_of(const int* before, int index) const {  // the last expert with before[e] <= index
    int low = 0, high = p.experts;
    while (high - low > 1) {
      int mid = (low + high) / 2;
      if (before[mid] <= index) low = mid; else high = mid;
    }
    return low;
  }
  HB_DEV_MEMBER void columns(Item& it, const Cut& c, int e, int column) const {
    it.expert = e;
    it.slot = start_of(p, e) + column * c.n;
    it.n = c.n;
    const int left = count_of(p, e) - column * c.n;
    it.valid = left < c.n ? left : c.n;
    it.more = 1;
  }
  // WIDE: item `index`; whole ones first, so that the small ones fill the gaps at the end. Neighbours share rows.
  HB_DEV_MEMBER Item wide(int index) const {
    Item it = {};
    if (index >= whole + rest) return it;
    const bool big = index < whole;  // products exist for some n only; columns beyond `valid` are computed and dropped
    const int* before = sh.before[big ? 0 : 1];
    if (!big) index -= whole;
    const int e = expert_of(before, index);
    const Cut c = cut(p, count_of(p, e));
    index -= before[e];
    columns(it, c, e, index % c.columns);
    const int block = index / c.columns;
    if (big) {
      it.first = block * WARPGROUPS * MT; it.tiles = WARPGROUPS * MT; it.mt = MT;
      it.n = it.n <= 48 ? (it.n + 15) & ~15 : it.n <= 96 ? it.n : (it.n + 15) & ~15;
    } else {
      it.first = c.whole * WARPGROUPS * MT + block * WARPGROUPS;
      it.tiles = p.m_tiles - it.first < WARPGROUPS ? p.m_tiles - it.first : WARPGROUPS; it.mt = 1;
      it.n = (it.n + 63) & ~63;
    }
    return it;
  }
  // Otherwise: tile `at` of all tiles of all columns; consecutive, so that every block gets the same number of bytes.
  HB_DEV_MEMBER Item narrow(i64 at, i64 end) const {
    Item it = {};
    if (at >= end) return it;
    const int pair = (int)(at / p.m_tiles);
    it.first = (int)(at % p.m_tiles);
    const int e = expert_of(sh.before[0], pair);
    const Cut c = cut(p, count_of(p, e));
    columns(it, c, e, pair - sh.before[0][e]);
    int tiles = p.m_tiles - it.first;
    if (tiles > WARPGROUPS) tiles = WARPGROUPS;
    if (tiles > end - at) tiles = (int)(end - at);
    it.tiles = tiles;
    it.mt = 1;
    if (it.n > 32) it.n = (it.n + 15) & ~15;
    return it;
  }
};

// ---- the feeding warp -----------------------------------------------------------------------------------------------

struct Place {
  int slot = 0;
  u32 phase = 0;
  HB_DEV_MEMBER void next() { if (++slot == STAGES) { slot = 0; phase ^= 1; } }
};

HB_DEV void stream_item(const Product& p, Shared& sh, const Item& it, Place& at, int lane, u64 policy) {
  const size_t tile_bytes = (size_t)p.chunks * CHUNK;
  const u8* tile = p.weights + ((size_t)it.expert * p.m_tiles * 4 + (size_t)it.first * 4 + lane) * tile_bytes;
  const u16* x = p.x + (size_t)it.slot * 64;
  const bool mine = lane < it.tiles * 4;
  for (int c = 0; c < p.chunks; c += KS) {
    const int k = p.chunks - c < KS ? p.chunks - c : KS;
    wait_for(&sh.empty[at.slot], at.phase ^ 1);
    u8* stage = sh.ring[at.slot];
    if (lane == 0) bar_expect(&sh.full[at.slot], k * (it.tiles * 4 * CHUNK + it.n * 128));
    sync_warp();
    if (lane < k) bulk_copy(stage + lane * it.n * 128, x + (size_t)(c + lane) * p.x_slots * 64, it.n * 128, &sh.full[at.slot], policy);
    if (mine) bulk_copy(stage + KS * it.n * 128 + lane * KS * CHUNK, tile + (size_t)c * CHUNK, k * CHUNK, &sh.full[at.slot], policy);
    at.next();
  }
}

HB_DEV void feed(const Product& p, Shared& sh, int lane) {
  const u64 policy = ordinary_policy();
  Work work{p, sh, lane, 0, 0};
  work.survey();
  Place at;
  int turn = 0;
  i64 next = hb_block(), end = 0;
  if (!WIDE) {
    const i64 all = (i64)work.whole * p.m_tiles;
    next = all * hb_block() / hb_grid();
    end = all * (hb_block() + 1) / hb_grid();
  }
  for (;;) {
    const Item it = WIDE ? work.wide((int)next) : work.narrow(next, end);
    const int q = turn & 1;
    wait_for(&sh.item_empty[q], (u32)(turn >> 1 & 1) ^ 1);
    if (lane == 0) { sh.item[q] = it; bar_arrive(&sh.item_full[q], 1); }
    turn++;
    if (!it.more) break;
    if (WIDE) {  // asked for now, needed after this item
      u32 got = 0;
      if (lane == 0) got = counter_add(p.counter);
      stream_item(p, sh, it, at, lane, policy);
      next = hb_grid() + (int)shfl(got, 0);
    } else {
      stream_item(p, sh, it, at, lane, policy);
      next += it.tiles;
    }
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
