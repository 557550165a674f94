// The grouped product: Y = W_e X_e + bias for every expert e, exact W4A16, for batches and prefill on Hopper.
//
// Weights are the A operand of wgmma, from registers: a warp's fragment for 16 rows x 16 k is the one of mma.m16n8k16, so
// the decode layout ("tile16") serves here unchanged. A chunk (16 rows x 64 k, scales included) comes through shared
// memory by bulk copy, is widened to bf16 with its scale multiplied in (exact: E2M1 times a power of two, see weights.cuh),
// and multiplies 64 k of up to 128 activations in shared memory.
//
// Activations are kept *packed*: [K / 64][slots][64] bf16. Within a group of 32 values the words (pairs of values) stand in
// tile16's order, word (t, i) at place (i, t), four by four; then the sixteen-byte units of slot s are permuted by XOR with
// s % 8, the tensor core's swizzle. An expert's slots are consecutive and begin at a multiple of 8, so the tile of any
// number of columns is one contiguous run per chunk: one bulk copy, no tensor map.
//
// One block per multiprocessor: four warps that feed, and warpgroups that multiply MT times 64 rows each. Work comes as
// items (some rows of one expert x some of its slots), published by the first of them. Every output is summed by one
// warpgroup in the order of k.
#pragma once
#define HB_HALF (HB_FORMAT == 1)  // q8 times its float16 scale keeps more bits in f16
#include "device/feeding.cuh"
#include "device/warpgroup.cuh"
#include "device/widen.cuh"

constexpr int FORMAT = HB_FORMAT;
//  shape    for                                  warpgroups x 64-row tiles, columns of an item
enum {
  NARROW = 0,  // few columns per expert            4 x 1, 64
  WIDE = 1,    // many                              2 x 2, 128
  BROAD = 2,   // between                           3 x 2, 88
  VAST = 3,    // fp8 activations (fp8.cuh)         2 x 1, 256
  SYNC_64 = 4, SYNC_128 = 5,  // mma.sync (grouped_sync.cu) 2 x 1, 64 or 128
};
constexpr int SHAPE = HB_SHAPE;
constexpr bool SYNC = SHAPE >= SYNC_64;
#ifndef HB_MX
#define HB_MX 0
#endif
enum { MXFP8_X = 1, MXFP4_X = 2 };
constexpr int MX = HB_MX;  // SYNC: activations with a scale for every 32 values, in E4M3 or E2M1; 0: 16-bit ones
constexpr bool STRIPES = SHAPE == NARROW;  // memory-bound: every block gets the same number of bytes
constexpr bool SWIGLU = HB_SWIGLU;  // gate_up: packed bf16 out; otherwise rows of float out
#ifndef HB_ROPE  // qkv: rotated queries as bf16 rows, keys and values as bf16 into their pages
#define HB_ROPE 0
#endif
constexpr bool ROPE = HB_ROPE;
constexpr int CHUNK = CHUNK_BYTES[FORMAT];  // 16 rows x 64 k
constexpr int WARPGROUPS = STRIPES ? 4 : SHAPE == BROAD ? 3 : 2;
constexpr bool FP8 = SHAPE == VAST;
constexpr int MT = STRIPES || FP8 || SYNC ? 1 : 2;
static_assert(!ROPE || ((MT == 2 || FP8) && !SWIGLU), "a warp or a warpgroup must hold both halves of what is rotated");
constexpr int TILES = WARPGROUPS * MT;  // of 64 rows, in a block's share of an item
#ifdef HB_COLUMNS  // BROAD for 48: registers for two chunks, and another stage
constexpr int N_MAX = HB_COLUMNS;
#else
constexpr int N_MAX = SHAPE == WIDE || SHAPE == SYNC_128 ? 128 : SHAPE == BROAD ? 88 : FP8 ? 256 : 64;
#endif
constexpr int WARPS = WARPGROUPS * 4, FEEDERS = SYNC ? 1 : 4;
constexpr int THREADS = (WARPS + FEEDERS) * 32;
constexpr int KS = FORMAT == MXFP4 && (!SYNC || MX) ? 2 : 1;  // chunks in a stage
constexpr bool NARROW_X = FP8 || MX;  // one copy brings a stage's part of all columns
constexpr int COLUMN = MX == MXFP4_X ? 64 : NARROW_X ? 128 : KS * 128;  // bytes of a column in a stage
constexpr int ALIGN = SYNC ? 128 : 1024, ROOM = SYNC ? 98304 : 228096;  // of stages; for all of them
constexpr int STAGE = (N_MAX * (COLUMN + (MX ? 4 : 0)) + TILES * 4 * KS * CHUNK + ALIGN - 1) / ALIGN * ALIGN;
constexpr int X_SCALES = STAGE - N_MAX * 4;  // MX: where a stage has the scales of its columns, four bytes each
static_assert(!NARROW_X || FORMAT == MXFP4, "fp8 and fp4 activations are for MXFP4 weights");
// Two blocks of a cluster may share an item's columns: each has half of its rows and fetches half of the columns for both,
// so that L2 delivers activations once for two.
#ifndef HB_PAIR  // measured: no gain for bf16 (docs/LOG.md); fp8 asks for it
#define HB_PAIR 1
#endif
constexpr int PAIR = STRIPES ? 1 : HB_PAIR;
static_assert(PAIR == 1 || !SWIGLU || MT == 1, "a warpgroup has all of its rows or none where it puts them in order together");
#if HB_SHAPE == 0 || HB_PAIR == 1 || defined(HB_EMULATE)
#define HB_CLUSTER
#else
#define HB_CLUSTER __cluster_dims__(2, 1, 1)
#endif
constexpr int EXPERTS_MAX = 512;
// Bytes in which a warpgroup puts its results in order, before whole lines are written; SM12x has none to spare.
constexpr int STAGING = SYNC ? 16 : FP8 ? 8704 : MT == 2 ? 9216 : 5120;
constexpr int BIASES = SYNC || FP8 ? 0 : 128;  // bytes behind that, for each warp: its rows' biases
constexpr int STAGES = (SYNC ? ROOM : ROOM - WARPGROUPS * STAGING) / STAGE;
static_assert(STAGES >= 3, "too few stages to hide the latency of memory");

struct alignas(64) Product {     // mirrored in builds.py
  u64 map[16];                   // the copy engine's map of the weights: tile16, experts one after another
  const void* bias;              // [experts][rows], bf16 or float; null: none
  const u16* x;                  // packed
  const int *starts, *counts;    // of experts' slots, in their `order`; null: one expert with `columns` slots
  u16* packed;                   // SWIGLU: where the hidden values go
  float* out;                    // otherwise: [slots][out_stride]
  const float* residual;         // added to `out`, same shape; null: none
  const u8* row_max_scale;       // FP8: the largest scale of each row, [experts][rows]
  const float* x_scale;          // FP8: of each slot; MX: four scale bytes, [K / 128][slots]
  i64 out_stride;
  int experts, m_tiles, chunks;  // m_tiles = rows / 64, chunks = K / 64
  int columns, x_slots, packed_slots, n_cap, bias_float;
  float limit, alpha;
  const float* angles;           // ROPE: cos and sin in turn, [slots][32]
  const i64* cells;              // ROPE: where in `pool` the slot's key for the first head goes
  u16 *q, *pool;                 // ROPE
  i64 value_offset;              // ROPE: from a key to its value
  int heads, kv_heads;           // ROPE: of 64 rows each: queries, then keys, then values
  int out_bf16;                  // FP8: `out` is rows of bf16 instead, and nothing is added
  const int* order;              // those with the most columns first: items of one width, whose code is one, follow each other
  u32 scale_offset;              // MXFP4: a weight is held times a power of two (weights.cuh),
  float sum_scale;               // and its sums are multiplied by this one, which undoes it
};
HB_MIRRORED(Product, map, bias, x, starts, counts, packed, out, residual, row_max_scale, x_scale, out_stride, experts, m_tiles, chunks, columns,
            x_slots, packed_slots, n_cap, bias_float, limit, alpha, angles, cells, q, pool, value_offset, heads, kv_heads, out_bf16,
            order, scale_offset, sum_scale)
static_assert(sizeof(Product) % 64 == 0, "the map must lie at a multiple of 64");

// What the copy engine fetches at once: a stage's part of 64 rows, as words of 8 bytes.
constexpr int TILE_BYTES = 4 * KS * CHUNK;
#ifdef HB_SM80
static_assert(KS == 1, "a stage ends with the row");
HB_DEV void copy_tile(u8* to, const u64* map, int word, int row, u64*, int lane) {  // map: address and bytes of a row
  const u8* from = (const u8*)map[0] + (size_t)row * map[1] + word * 8;
  HB_UNROLL_4
  for (int i = lane; i < TILE_BYTES / 16; i += 32) copy_unit(to + i * 16, from + (size_t)(i / (CHUNK / 16)) * map[1] + i % (CHUNK / 16) * 16, 16);
}
#elif defined(HB_EMULATE)
HB_DEV void copy_tile(u8* to, const u64* map, int word, int row, u64* bar, int) {  // map: address, bytes and number of rows
  static u8 zeros[16];
  for (int r = 0; r < 4; r++)
    for (int b = 0; b < KS * CHUNK; b += 16) {
      const bool inside = row + r < (int)map[2] && word * 8 + b < (int)map[1];
      const u8* from = (const u8*)(uintptr_t)map[0] + (size_t)(row + r) * map[1] + word * 8 + b;
      bulk_copy(to + r * KS * CHUNK + b, inside ? from : zeros, 16, bar, 0);
    }
}
#else
HB_DEV void copy_tile(u8* to, const u64* map, int word, int row, u64* bar, int) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               ::"r"(smem(to)), "l"(map), "r"(word), "r"(row), "r"(smem(bar)) : "memory");
}
#endif

// Those who multiply count items. BROAD and SM80 have no register for that while they do, and read the count in the item.
constexpr bool TURN_IN_ITEM = SHAPE == BROAD || COPIERS > 1;
struct Item {
  int expert, first, tiles;      // `tiles` of 64 rows, from tile `first`
  int slot, n, valid;            // columns: n computed, the first `valid` kept
  int more;                      // 0: there is no item; TURN_IN_ITEM: the next turn of those who multiply
};

template <bool SMALL> struct Counted { using type = int; };
template <> struct Counted<true> { using type = u16; };

struct Shared {
  u8 ring[STAGES][STAGE];
  u64 full[STAGES], empty[STAGES], item_full[2], item_empty[2];
  Item item[2];
  int whole, rest;          // the first feeding warp's: items with all their rows, and remainders (STRIPES: tiles of columns)
  Counted<FP8>::type before[EXPERTS_MAX];  // its, too: tiles of columns before expert e (FP8: every byte counts)
  alignas(16) u8 staging[WARPGROUPS][STAGING + 4 * BIASES];
  float scales[FP8 ? WARPGROUPS : 1][FP8 ? N_MAX : 4];  // of an item's columns
};
HB_CONST_FN int shared_bytes() { return (int)sizeof(Shared) + (SYNC ? 0 : 1024); }
static_assert(shared_bytes() <= (SYNC ? 101376 : 232448), "more than a block may have");

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
  if (SHAPE == NARROW) return n <= 32 ? n : (n + 15) & ~15;
  if (SYNC) return (n + 15) & ~15;
  if (SHAPE == BROAD) return n < 16 ? 16 : n;
  if (!FP8) return n > 48 && n <= 96 ? n : (n + 15) & ~15;
  return n <= 64 || (n > 80 && n <= 144) ? (n + 15) & ~15 : n <= 80 ? n : n > 240 ? 256 : (n + 15) / 32 * 32 + 16;
}

HB_DEV int count_of(const Product& p, int e) { return p.counts ? p.counts[e] : p.columns; }
HB_DEV int start_of(const Product& p, int e) { return p.starts ? p.starts[e] : 0; }

struct Work {  // the first feeding warp's view of what is to do
  const Product& p;
  Shared& sh;

  HB_DEV_MEMBER void survey(int lane) const {  // running sums over the experts, 32 at a time
    const int full = STRIPES ? 1 : p.m_tiles / (PAIR * TILES), left = !STRIPES && p.m_tiles % (PAIR * TILES);
    int sum = 0;
    for (int base = 0; base < p.experts; base += 32) {
      const int e = base + lane, mine = e < p.experts ? cut(p, count_of(p, e)).columns : 0;
      int s = mine;
      HB_UNROLL
      for (int d = 1; d < 32; d *= 2) {
        const int y = (int)shfl((u32)s, lane - d);
        if (lane >= d) s += y;
      }
      if (e < p.experts) sh.before[e] = (Counted<FP8>::type)(sum + s - mine);
      sum += (int)shfl((u32)s, 31);
    }
    if (lane == 0) { sh.whole = sum * full; sh.rest = sum * left; }
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
    it.expert = p.order ? p.order[e] : 0;
    it.slot = start_of(p, e) + column * c.n;
    it.n = width(c.n);
    const int left = count_of(p, e) - column * c.n;
    it.valid = left < c.n ? left : c.n;
    it.more = 1;
  }
  // Item `index`: whole ones first, so that the remainders fill the gaps at the end. Neighbours share rows.
  HB_DEV_MEMBER Item next(int index, int rank) const {
    Item it = {};
    const int whole = sh.whole;
    if (index >= whole + sh.rest) return it;
    const bool big = index < whole;
    if (!big) index -= whole;
    const int full = p.m_tiles / (PAIR * TILES), each = big ? full : 1;
    const int e = expert_of(index, each);
    const Cut c = cut(p, count_of(p, e));
    index -= sh.before[e] * each;
    columns(it, c, e, index % c.columns);
    const int tiles = big ? PAIR * TILES : p.m_tiles % (PAIR * TILES), upper = (tiles + PAIR - 1) / PAIR;
    it.first = (big ? index / c.columns : full) * PAIR * TILES + rank * upper;
    it.tiles = rank ? tiles - upper : upper;
    return it;
  }
  // STRIPES: tile `at` of all tiles of all columns; consecutive, so that every block gets the same number of bytes.
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

// One lane of each feeding warp: every fourth tile of 64 rows, and every fourth chunk of the columns. The copy engine takes
// some 50 cycles for a copy however short it is, and sixteen rows of a stage are only a kilobyte: so it is given 64 rows at
// once, by a map of the weights.
HB_DEV void stream_item(const Product& p, Shared& sh, const Item& it, Place& at, int feeder, int lane) {
  const int row = (it.expert * p.m_tiles + it.first) * 4;  // of 16-row tiles
  const int n = it.n, tiles = it.tiles, mine = (tiles - feeder + FEEDERS - 1) / FEEDERS, other = FEEDERS - 1 - feeder;
  const int own = n / PAIR * (PAIR == 1 ? 0 : cluster_rank());  // the first column that this block fetches
  const u16* x = p.x + (size_t)(it.slot + own) * (MX == MXFP4_X ? 32 : 64);
  for (int c = 0; c < p.chunks; c += KS) {
    const int k = p.chunks - c < KS ? p.chunks - c : KS;
    wait_for(&sh.empty[at.slot], at.phase ^ 1);
    u8* stage = sh.ring[at.slot];
    u64* full = &sh.full[at.slot];
    const bool columns = other < (NARROW_X ? 1 : k);
    constexpr int EACH = COLUMN < 128 ? COLUMN : 128, MORE = MX ? 4 : 0;  // bytes of a column in a copy
    begin_copies(full, mine * TILE_BYTES + (columns ? n * (EACH + MORE) : 0));  // past the last k the engine fills in zeros
    u8* to = stage + n * COLUMN + feeder * TILE_BYTES;
    HB_ROLLED  // addresses made ahead would not fit the feeding warps' registers
    for (int i = feeder; i < tiles; i += FEEDERS, to += FEEDERS * TILE_BYTES) copy_tile(to, p.map, c * (CHUNK / 8), row + 4 * i, full, lane);
    if (columns) {
      u8* there = stage + (other * n + own) * EACH;
      const u16* from = x + (size_t)(NARROW_X ? c / 2 : c + other) * p.x_slots * (EACH / 2);
      if constexpr (MX != 0) copy_bytes(stage + X_SCALES, p.x_scale + (size_t)(c / 2) * p.x_slots + it.slot, n * 4, full, ordinary_policy(), lane);
#ifdef HB_SM80
      copy_bytes(there, from, n * EACH, full, ordinary_policy(), lane);
#elif defined(HB_ALONE)  // pairs that share nothing, for comparison
      copy_bytes(stage + other * n * 128, x - (size_t)own * 64 + (size_t)(c + other) * p.x_slots * 64, n * 128, full, ordinary_policy(), lane);
#else
      if constexpr (PAIR == 1) copy_bytes(there, from, n * EACH, full, ordinary_policy(), lane);
      else bulk_copy_to_both(there, from, n * 64, full);
#endif
    }
    end_copies(full);
    at.next();
  }
}

// The first feeding warp says what is next and publishes it; the others stream their share of it.
HB_DEV void feed(const Product& p, Shared& sh, int lane) {
  const Work work{p, sh};
  work.survey(lane);
  if (!feeds(lane)) return;
  Place at;
  i64 next = hb_block() / PAIR, end = 0;
  if (STRIPES) {
    const i64 all = (i64)sh.whole * p.m_tiles;
    next = all * hb_block() / hb_grid();
    end = all * (hb_block() + 1) / hb_grid();
  }
  for (int turn = 0;; turn++) {
    const int q = turn & 1;
    Item& it = sh.item[q];
    wait_for(&sh.item_empty[q], (u32)(turn >> 1 & 1) ^ 1);
#ifdef HB_SM80  // every lane works it out, one publishes it
    Item mine = work.next((int)next, 0);
    if (mine.more) mine.more = turn + 1;
    if (leads(lane)) { it = mine; bar_arrive(&sh.item_full[q], 1); }
    if (!mine.more) break;
    next += hb_grid();
    stream_item(p, sh, mine, at, 0, lane);
#else
    if constexpr (STRIPES) it = work.next(next, end);
    else it = work.next((int)next, PAIR == 1 ? 0 : cluster_rank());
    if (TURN_IN_ITEM && it.more) it.more = turn + 1;
    bar_arrive(&sh.item_full[q], 1);
    if (!it.more) break;
    next += STRIPES ? it.tiles : hb_grid() / PAIR;
    stream_item(p, sh, it, at, 0, lane);
#endif
  }
  finish_copies();
}

HB_DEV void help_feed(const Product& p, Shared& sh, int feeder) {  // one lane
  Place at;
  for (int turn = 0;; turn++) {
    const int q = turn & 1;
    wait_for(&sh.item_full[q], (u32)(turn >> 1 & 1));
    const Item it = sh.item[q];
    bar_arrive(&sh.item_empty[q], 1);
    if (!it.more) return;
    stream_item(p, sh, it, at, feeder, 0);
  }
}
