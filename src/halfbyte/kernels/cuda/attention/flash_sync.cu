// Attention of whole prompts over the paged bf16 cache with mma.sync and cp.async, which every GPU from SM80 on has, within
// the shared memory of SM12x. A warp has HB_TILES times 16 rows (two tokens of 8 heads each); a block's warps share pages,
// which arrive STAGES - 1 ahead. Two blocks to a multiprocessor: one multiplies while the other works out its weights.
// Softmax, tiles and results: prompt.cuh.
//
// Unit u (sixteen bytes) of a page's row r lies at place u ^ (r % 8), so that neither copies nor ldmatrix meet a bank twice.
// Tokens that were never written arrive as zeros: whatever lies there must not meet even a zero weight. A score that is
// infinite either way makes its row NaN, instead of a weight of 0 or an answer.
#include "attention/prompt.cuh"
#include "device/async_copies.cuh"
#include "device/warp_products.cuh"

constexpr int TILES = HB_TILES, WARPS = HB_WARPS, THREADS = WARPS * 32, TOKENS = WARPS * TILES * 2, STAGES = HB_STAGES;
constexpr float HIDDEN = -3e38f;  // finite, so that it can be told from a score that overflowed
static_assert(STAGES >= 2, "a page is read while the next arrives");

struct Shared { u8 k[STAGES][PAGE_BYTES], v[STAGES][PAGE_BYTES]; };

// B operands from 16 rows of values: b[2 i], b[2 i + 1] of lane (g, t) are dim g of unit `unit` + i, rows 2 t, 2 t + 1 and 8 more.
#ifdef HB_EMULATE
HB_DEV void load_values(u32 (&b)[4], const u8* rows, int unit, int lane) {
  const int g = lane >> 2, t = lane & 3;
  for (int i = 0; i < 4; i++) {
    const int row = (i & 1) * 8 + 2 * t;
    const u8* at = rows + row * 128 + g * 2;
    b[i] = lds16(at + (unit_place<8>(unit + i / 2, row) << 4)) | lds16(at + 128 + (unit_place<8>(unit + i / 2, row + 1) << 4)) << 16;
  }
}
#else
HB_DEV void load_values(u32 (&b)[4], const u8* rows, int unit, int lane) {
  const int row = lane & 15;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
               : "r"(smem(rows) + row * 128 + (unit_place<8>(unit + (lane >> 4), row) << 4)) : "memory");
}
#endif

struct Pages {  // of one tile and one kv head
  const Flash& p;
  const Tile& t;
  const u8* first;  // this head's keys in page 0
  const int* table;
  int count;

  HB_DEV_MEMBER int find(int j) const { return j < count ? table[j] : 0; }
  HB_DEV_MEMBER void ask(Shared& sh, int j, int page, int thread) const {  // page j of the tile, which is `page` of the pool
    const u8 *k = first + (size_t)page * p.page_rows * 128, *v = k + (size_t)p.kv_heads * PAGE_BYTES;
    const int stage = j % STAGES, written = t.newest + 1 - (t.begin + j) * PAGE;
    HB_UNROLL
    for (int n = 0; n < PAGE * 8 / THREADS; n++) {
      const int i = n * THREADS + thread, row = i / 8, place = row * 128 + (unit_place<8>(i % 8, row) << 4), bytes = row < written ? 16 : 0;
      copy_unit(sh.k[stage] + place, k + i * 16, bytes);
      copy_unit(sh.v[stage] + place, v + i * 16, bytes);
    }
  }
};

HB_DEV void multiply_scores(float (&s)[TILES][32], const u32 (&q)[TILES][16], const u8* keys, int lane) {
  HB_UNROLL
  for (int n = 0; n < 8; n++) {
    u32 b[2][4];
    load_columns<8>(b[0], keys + n * 1024, 0, lane);
    load_columns<8>(b[1], keys + n * 1024, 4, lane);
    HB_UNROLL
    for (int k = 0; k < 4; k++)
      HB_UNROLL
      for (int m = 0; m < TILES; m++) mma_sync(s[m] + 4 * n, q[m] + 4 * k, b[k / 2][k % 2 * 2], b[k / 2][k % 2 * 2 + 1]);
  }
}

HB_DEV void multiply_values(float (&o)[TILES][32], const u32 (&w)[TILES][16], const u8* values, int lane) {
  HB_UNROLL
  for (int k = 0; k < 4; k++)
    HB_UNROLL
    for (int unit = 0; unit < 8; unit += 2) {
      u32 b[4];
      load_values(b, values + k * 2048, unit, lane);
      HB_UNROLL
      for (int i = 0; i < 2; i++)
        HB_UNROLL
        for (int m = 0; m < TILES; m++) mma_sync(o[m] + 4 * (unit + i), w[m] + 4 * k, b[2 * i], b[2 * i + 1]);
    }
}

HB_DEV size_t place_of(const Flash& p, int row, int q_head, int lane) {  // of this lane's first values, in queries and results
  return ((size_t)row * p.kv_heads * GROUP + q_head) * HEAD_DIM + 2 * (lane & 3);
}

HB_DEV void attend(const Flash& p, Shared& sh, const Tile& t, int head, int thread) {
  const int warp = thread / 32, lane = thread % 32, g = lane / 4;
  const int most = t.end - 1;
  const Pages pages{p, t, (const u8*)(p.pool + (size_t)(p.first_row + head * PAGE) * HEAD_DIM),
                    p.table + (size_t)t.sequence * p.table_stride + t.begin, t.last - t.begin};
  HB_UNROLL
  for (int j = 0; j < STAGES - 1; j++) {
    if (j < pages.count) pages.ask(sh, j, pages.find(j), thread);
    close_copies();
  }
  int next = pages.find(STAGES - 1);

  const int first = t.row + warp * TILES * 2, last = first + TILES * 2 - 1;
  const int oldest = p.positions[first < most ? first : most], newest = p.positions[last < most ? last : most];
  Rows r[TILES];
  u32 q[TILES][16];
  HB_UNROLL
  for (int m = 0; m < TILES; m++)
    HB_UNROLL
    for (int h = 0; h < 2; h++) {
      const int row = first + 2 * m + h, real = row < most ? row : most;
      r[m].position[h] = p.positions[real];
      const u16* from = p.q + place_of(p, real, head * GROUP + g, lane);
      HB_UNROLL
      for (int i = 0; i < 8; i++) q[m][i / 2 * 4 + (i & 1) * 2 + h] = *(const u32*)(from + i * 8);
    }
  float o[TILES][32] = {};
  HB_ROLLED
  for (int j = 0; j < pages.count; j++) {
    const int stage = j % STAGES, block = t.begin + j;
    wait_for_copies<STAGES - 2>();
    sync_all();  // page j is there for all, and all are done with the stage of page j - 1
    if (j + STAGES - 1 < pages.count) pages.ask(sh, j + STAGES - 1, next, thread);
    close_copies();
    next = pages.find(j + STAGES);
    float s[TILES][32] = {};
    u32 w[TILES][16];
    multiply_scores(s, q, sh.k[stage], lane);
    const bool edge = (block + 1) * PAGE > oldest + 1 || (p.window && block * PAGE <= newest - p.window);
    HB_UNROLL
    for (int m = 0; m < TILES; m++) {
      if (edge) hide(s[m], r[m], block * PAGE, p.window, lane, HIDDEN);
      HB_UNROLL
      for (int i = 0; i < 32; i++) r[m].sum[i >> 1 & 1] += s[m][i] * 0.f;
      weigh(s[m], w[m], o[m], r[m], p.scale);
    }
    multiply_values(o, w, sh.v[stage], lane);
  }
  wait_for_copies<0>();
  HB_UNROLL
  for (int m = 0; m < TILES; m++)
    HB_UNROLL
    for (int h = 0; h < 2; h++) {
      const float factor = factor_of(p, r[m], h, head * GROUP + g);
      const int row = first + 2 * m + h;
      if (row >= t.end) continue;
      const size_t at = place_of(p, row, head * GROUP + g, lane);
      if (!p.wide) leave(p, o[m], h, factor, at, row, head * GROUP + g, lane);
      else
        HB_UNROLL
        for (int i = 0; i < 8; i++) {
          const u32 pair[2] = {as_bits(o[m][4 * i + 2 * h] * factor), as_bits(o[m][4 * i + 2 * h + 1] * factor)};
          store_words<2>((float*)p.out + at + i * 8, pair);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, HB_BLOCKS) flash_sync(const __grid_constant__ Flash p) {
  Shared& sh = *(Shared*)hb_shared();
  wait_for_previous();
  Tile t;
  if (find_tile<TOKENS>(p, p.first_tile + p.tiles - 1 - hb_block() / p.kv_heads, t))  // the longest rows first
    attend(p, sh, t, hb_block() % p.kv_heads, hb_thread());
}

#ifdef HB_EMULATE
extern "C" void hb_run(const char*, const Flash* p, int grid, u32 seed) { emu::run(grid, THREADS, sizeof(Shared), seed, [=] { flash_sync(*p); }); }
extern "C" int hb_size(int what) { return what == 0 ? (int)sizeof(Flash) : what == 1 ? (int)sizeof(Shared) : THREADS; }
#endif
