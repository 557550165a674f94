// What attention of whole prompts over the paged bf16 cache is, whichever instruction multiplies (flash.cu: wgmma,
// flash_sync.cu: mma.sync): its argument, its tiles, softmax, and how results leave.
//
// A tile is some tokens of one sequence times the 8 query heads of one kv head, so that a page is read once for all of
// them. A warp has 16 rows of a product: one head for lanes 4 g .. 4 g + 3, two neighbouring tokens; 64 scores of a row are
// held as mma leaves them.
//
// Softmax runs in base 2. A row keeps an old maximum until a score exceeds it by 2^8 (FlashAttention-4's idea): the sums
// are right with any reference that does not overflow, and rescaling becomes rare. What a row computes depends on its own
// position alone, never on the other rows of its tile. The sink joins the denominator once, at the end.
#pragma once
#include "device/warpgroup.cuh"

constexpr int PAGE = 64, PAGE_BYTES = PAGE * 128, HEAD_DIM = 64, GROUP = 8;
constexpr float NEVER = -1e30f, SLACK = 8.f, LOG2E = 1.4426950408889634f;

struct alignas(64) Flash {  // mirrored in prompt.py
  u64 pages[16];  // the copy engine's map of the pool as rows of 64 values, if it is asked; it must lie at a multiple of 64
  const u16 *q;   // bf16 [rows][heads][64], rotated
  u16 *out;       // bf16, the same shape, or packed as grouped.cuh has it; float where `wide`
  const void *sinks;  // [heads], or null
  const int *table, *positions, *query_start;
  int sequences, kv_heads, table_stride, tiles;
  int page_rows, first_row;  // rows of 64 values in one page; where this layer's begin there
  int window;                // 0: none
  int sinks_float;
  float scale;               // times log2 e
  int slots;                 // of the packed rows; 0: rows as they are
  int half;                  // packed: the bf16 values as f16, as q8 weights want them
  int first_tile;            // of the first sequence here: its first row / tokens of a tile
  const u16 *pool;
  int wide;                  // results stay float (flash_sync.cu)
  int unused[5];
};

HB_MIRRORED(Flash, pages, q, out, sinks, table, positions, query_start, sequences, kv_heads, table_stride, tiles, page_rows, first_row,
            window, sinks_float, scale, slots, half, first_tile, pool, wide, unused)

#ifdef HB_EMULATE
HB_DEV float larger_of(float a, float b) { return a > b ? a : b; }
#else
HB_DEV float larger_of(float a, float b) { return fmaxf(a, b); }
#endif

// ---- tiles ----------------------------------------------------------------------------------------------------------

struct Tile {  // rows of one sequence, and the blocks of 64 positions that some of them can see
  int sequence, row, end, begin, last, newest;
};

// Sequence s owns the tiles from query_start[s] / TOKENS + s on: enough for its rows, found without a list of tiles.
template <int TOKENS> HB_DEV bool find_tile(const Flash& p, int tile, Tile& t) {
  int low = 0, high = p.sequences;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (p.query_start[middle] / TOKENS + middle <= tile) low = middle;
    else high = middle;
  }
  const int start = p.query_start[low];
  t.sequence = low;
  t.end = p.query_start[low + 1];
  t.row = start + (tile - (start / TOKENS + low)) * TOKENS;
  if (t.row >= t.end) return false;
  const int oldest = p.positions[t.row], past = t.row + TOKENS < t.end ? t.row + TOKENS : t.end;
  t.newest = p.positions[past - 1];
  t.last = t.newest / PAGE + 1;
  t.begin = p.window && oldest >= p.window ? (oldest - p.window + 1) / PAGE : 0;
  return true;
}

// ---- softmax --------------------------------------------------------------------------------------------------------

struct Rows {  // this thread's two rows: one head of two neighbouring tokens
  int position[2];
  float top[2] = {NEVER, NEVER}, sum[2] = {0.f, 0.f};
};

// `never`: what stands for a score that does not count; far below NEVER.
HB_DEV void hide(float (&s)[32], const Rows& r, int first, int window, int lane, float never) {
  HB_UNROLL
  for (int i = 0; i < 32; i++) {
    const int key = first + i / 4 * 8 + 2 * (lane & 3) + (i & 1), at = r.position[i >> 1 & 1];
    if (key > at || (window && key <= at - window)) s[i] = never;
  }
}

// Scores become weights (bf16, the A operand of the product with values); o follows where a maximum moved.
HB_DEV void weigh(float (&s)[32], u32 (&w)[16], float (&o)[32], Rows& r, float scale) {
  float high[2] = {s[0], s[2]};
  HB_UNROLL
  for (int i = 0; i < 32; i++) high[i >> 1 & 1] = larger_of(high[i >> 1 & 1], s[i]);
  bool grows[2];
  HB_UNROLL
  for (int h = 0; h < 2; h++) {
    high[h] = larger_of(high[h], shfl_xor(high[h], 1));
    high[h] = larger_of(high[h], shfl_xor(high[h], 2));
    grows[h] = (high[h] - r.top[h]) * scale > SLACK;
  }
  if (warp_ballot(grows[0] || grows[1])) {
    float fade[2];
    HB_UNROLL
    for (int h = 0; h < 2; h++) {
      const float now = grows[h] ? high[h] : r.top[h];
      fade[h] = power_of_two((r.top[h] - now) * scale);  // exactly 1 where nothing moved
      r.top[h] = now;
      r.sum[h] *= fade[h];
    }
    HB_UNROLL
    for (int i = 0; i < 32; i++) o[i] *= fade[i >> 1 & 1];
  }
  const float base[2] = {r.top[0] * scale, r.top[1] * scale};
  HB_UNROLL
  for (int i = 0; i < 32; i++) {
    s[i] = power_of_two(s[i] * scale - base[i >> 1 & 1]);
    r.sum[i >> 1 & 1] += s[i];
  }
  HB_UNROLL
  for (int i = 0; i < 16; i++) w[i] = bf16_pair(s[2 * i], s[2 * i + 1]);
}

// ---- results --------------------------------------------------------------------------------------------------------

// What the sums of a row's values are multiplied with: its sum is spread over four lanes.
HB_DEV float factor_of(const Flash& p, const Rows& r, int h, int q_head) {
  float sum = r.sum[h];
  sum += shfl_xor(sum, 1);
  sum += shfl_xor(sum, 2);
  if (!p.sinks) return reciprocal(sum);
  const float sink = (p.sinks_float ? ((const float*)p.sinks)[q_head] : as_float((u32)((const u16*)p.sinks)[q_head] << 16)) * LOG2E;
  const float top = r.top[h] * p.scale, bound = larger_of(top, sink), fade = power_of_two(top - bound);
  return fade * reciprocal(sum * fade + power_of_two(sink - bound));
}

// Row h of this thread's two in bf16 or packed; `at`: where it lies among rows as they are.
HB_DEV void leave(const Flash& p, const float (&o)[32], int h, float factor, size_t at, int row, int q_head, int lane) {
  u32 word[2][4];
  HB_UNROLL
  for (int i = 0; i < 8; i++) word[i / 4][i % 4] = bf16_pair(o[4 * i + 2 * h] * factor, o[4 * i + 2 * h + 1] * factor);
  if (p.half)
    HB_UNROLL
    for (int i = 0; i < 8; i++) word[i / 4][i % 4] = half_pair(bf16_low(word[i / 4][i % 4]), bf16_high(word[i / 4][i % 4]));
  if (p.slots) {  // a head is a chunk; words (i, lane % 4) of a group of 32 values belong at places (lane % 4, i): side by side
    u16* to = p.out + ((size_t)q_head * p.slots + row) * 64;
    HB_UNROLL
    for (int i = 0; i < 2; i++) store_words<4>(to + ((i * 4 + (lane & 3)) ^ (row & 7)) * 8, word[i]);
  } else
    HB_UNROLL
    for (int i = 0; i < 8; i++) *(u32*)(p.out + at + i * 8) = word[i / 4][i % 4];
}
