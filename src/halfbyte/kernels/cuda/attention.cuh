// Attention of this step's rows over the paged cache. A unit is one row, one kv head and one part of its pages; its
// eight query heads are the eight columns of the mma. Pages come through the ring, 16 tokens to a warp, four warps to a
// page. Tokens of this very step are not in the pages yet: they are taken from the mailbox, rounded to bf16 as the cache
// will hold them. The sink joins the denominator once, where the last sum is made.
#pragma once
#include "gemv.cuh"

constexpr float LOG2E = 1.4426950408889634f, NEVER = -1e30f;
constexpr int TEAMS = WORKERS / 4;  // of four warps, each with a page of its own
constexpr int ROUND = SLOTS / PAGE_SLOTS / TEAMS * TEAMS;  // pages
constexpr int WHOLE = 8;  // up to so many pages, one block does a head alone and no merge is needed

// The row's key range and its cut into parts depend on the row alone: the same row gives the same bits in any batch.
HB_DEV int parts_of(int pages, bool sliding) {
  if (sliding || pages <= WHOLE) return 1;
  int n = (pages + 1) / 2;
  return n < SPLITS ? n : SPLITS;
}
HB_DEV void key_range(const Shared& sh, int row, bool sliding, int& from, int& to, int& first, int& pages) {
  from = sliding && sh.position[row] >= WINDOW ? sh.position[row] - WINDOW + 1 : 0;
  to = sh.base[row];
  first = from / PAGE;
  pages = to > from ? (to - 1) / PAGE + 1 - first : 0;
}
// Units are dealt to the blocks from the last one down; the first blocks have the odd tiles of the matrices.
HB_DEV Unit find_unit(const Shared& sh, int rows, bool sliding, int index) {
  Unit u = {};
  for (int row = 0; row < rows; row++) {
    int from, to, first, pages;
    key_range(sh, row, sliding, from, to, first, pages);
    int parts = parts_of(pages, sliding);
    if (index < KV_HEADS * parts) {
      u.row = row; u.head = index % KV_HEADS; u.part = index / KV_HEADS; u.parts = parts;
      u.first = first + pages * u.part / parts; u.last = first + pages * (u.part + 1) / parts;
      u.from = from; u.to = to; u.position = sh.position[row]; u.owner = u.part == parts - 1; u.on = true;
      return u;
    }
    index -= KV_HEADS * parts;
  }
  return u;
}
HB_DEV u8* page_of(const Step& p, const Shared& sh, bool sliding, int row, int page, int place, int which, int head) {
  const int* table = (sliding ? p.sliding_table : p.full_table) + (size_t)sh.seq[row] * p.max_blocks;
  return p.pool + ((((size_t)table[page] * p.page_layers + place) * 2 + which) * KV_HEADS + head) * PAGE_BYTES;
}

struct Softmax {  // of one warp: heads 2t and 2t + 1 in every lane; dims as the mma leaves them
  float top[2] = {NEVER, NEVER}, sum[2] = {0.f, 0.f}, o[4][4] = {};
};
struct Queries { u32 high[4][2], low[4][2]; };

// Two E4M3 in the low half of `v` as bf16, exactly: shifted into place they are 2^-120 of their values.
HB_DEV u32 widen_fp8(u32 v) {
  const u32 p = permute(v, 0u, 0x1404);
  return bf16_mul(((p >> 4) & 0x07f007f0u) | (p & 0x80008000u), 0x7b807b80u);
}

// Rows g and g + 8 of a tile of 16 x 64, as four words of bf16 per half row. Some rows read their halves in the other order,
// so that lanes cover all banks: odd ones where a row has 128 bytes, every other pair where it has 64 (FP8).
template <bool FP8> HB_DEV void load_rows(const u8* tile, int lane, u32 (&v)[2][2][4]) {
  const int g = lane / 4, t = lane % 4, swap = FP8 ? g >> 1 & 1 : g & 1;
  HB_UNROLL
  for (int r = 0; r < 2; r++) {
    u32 a[2][4];
    HB_UNROLL
    for (int half = 0; half < 2; half++) {
      const u8* row = tile + (g + 8 * r) * (FP8 ? 64 : 128) + (half ^ swap) * (FP8 ? 32 : 64);
      if (FP8) {
        const u64 w = lds64(row + t * 8);
        a[half][0] = widen_fp8((u32)w); a[half][1] = widen_fp8((u32)w >> 16);
        a[half][2] = widen_fp8((u32)(w >> 32)); a[half][3] = widen_fp8((u32)(w >> 48));
      } else {
        const u32x4 w = lds128(row + t * 16);
        a[half][0] = w.x; a[half][1] = w.y; a[half][2] = w.z; a[half][3] = w.w;
      }
    }
    HB_UNROLL
    for (int i = 0; i < 8; i++) v[r][i / 4][i % 4] = swap ? a[1 - i / 4][i % 4] : a[i / 4][i % 4];
  }
}

// `seen` bit 0: this lane's token g counts, bit 1: token g + 8. At least one of the 16 does.
template <bool FP8> HB_DEV void score_tile(const u8* keys, const Queries& q, u32 seen, int lane, float (&s)[4]) {
  u32 k[2][2][4];
  load_rows<FP8>(keys, lane, k);
  float c[4] = {0.f, 0.f, 0.f, 0.f}, d[4] = {0.f, 0.f, 0.f, 0.f};
  HB_UNROLL
  for (int i = 0; i < 4; i++) {
    const int x = (i & 1) * 2;
    mma(c, k[0][i / 2][x], k[1][i / 2][x], k[0][i / 2][x + 1], k[1][i / 2][x + 1], q.high[i][0], q.high[i][1]);
    mma(d, k[0][i / 2][x], k[1][i / 2][x], k[0][i / 2][x + 1], k[1][i / 2][x + 1], q.low[i][0], q.low[i][1]);
  }
  HB_UNROLL
  for (int i = 0; i < 4; i++) c[i] += d[i];
  s[0] = seen & 1 ? c[0] : NEVER; s[1] = seen & 1 ? c[1] : NEVER;
  s[2] = seen & 2 ? c[2] : NEVER; s[3] = seen & 2 ? c[3] : NEVER;
}
template <bool FP8> HB_DEV void weigh_tile(const u8* values, u32 seen, bool all, int lane, float (&s)[4], Softmax& m) {
  float p[4];
  HB_UNROLL
  for (int h = 0; h < 2; h++) {
    float top = s[h] > s[h + 2] ? s[h] : s[h + 2];
    HB_UNROLL
    for (int x = 4; x < 32; x *= 2) { float o = shfl_xor(top, x); top = o > top ? o : top; }
    top = top > m.top[h] ? top : m.top[h];
    const float shrink = exp2_fast(m.top[h] - top);
    m.top[h] = top;
    p[h] = s[h] > NEVER ? exp2_fast(s[h] - top) : 0.f;
    p[h + 2] = s[h + 2] > NEVER ? exp2_fast(s[h + 2] - top) : 0.f;
    m.sum[h] = m.sum[h] * shrink + p[h] + p[h + 2];
    HB_UNROLL
    for (int i = 0; i < 4; i++) { m.o[i][h] *= shrink; m.o[i][h + 2] *= shrink; }
  }
  u32 high[2], low[2];
  HB_UNROLL
  for (int r = 0; r < 2; r++) {
    const Parts both = split(p[2 * r], p[2 * r + 1]);
    high[r] = transpose8x8(both.high);
    low[r] = transpose8x8(both.low);
  }
  u32 v[2][2][4];
  load_rows<FP8>(values, lane, v);
  if (!all)  // a weight of zero does not save us from a NaN in a slot nobody wrote
    HB_UNROLL
    for (int r = 0; r < 2; r++)
      HB_UNROLL
      for (int i = 0; i < 8; i++) v[r][i / 4][i % 4] = seen >> r & 1 ? v[r][i / 4][i % 4] : 0u;
  HB_UNROLL
  for (int i = 0; i < 4; i++) {
    const int half = i / 2, x = (i & 1) * 2;
    const u32 a0 = transpose8x8(v[0][half][x]), a1 = transpose8x8(v[0][half][x + 1]);
    const u32 a2 = transpose8x8(v[1][half][x]), a3 = transpose8x8(v[1][half][x + 1]);
    mma(m.o[i], a0, a1, a2, a3, high[0], high[1]);
    mma(m.o[i], a0, a1, a2, a3, low[0], low[1]);
  }
}

HB_DEV float tagged_float(const u64* p, u32 tag, u32 where) {
  Patience patience;
  u64 v = box_load(p);
  while (!has(v, tag)) { patience.wait(where); v = box_load(p); }
  return as_float(payload(v));
}
// Elements dim and dim + 32 of a head's vector in the mailbox, rotated.
HB_DEV void rotated(const Step& p, const u64* vector, int position, int dim, u32 tag, float& a, float& b) {
  const float c = p.rope[(size_t)position * 64 + dim], s = p.rope[(size_t)position * 64 + 32 + dim];
  u64 x = box_load(vector + dim), y = box_load(vector + dim + 32);
  Patience patience;
  while (!(has(x, tag) && has(y, tag))) { patience.wait(0x400); x = box_load(vector + dim); y = box_load(vector + dim + 32); }
  const float first = as_float(payload(x)), second = as_float(payload(y));
  a = first * c - second * s;
  b = second * c + first * s;
}

template <int O_FORMAT> HB_DEV void attend(Worker& w, const Layer& layer, int place, bool sliding, const Unit& u) {
  Shared& sh = w.sh;
  const Step& p = w.p;
  const int g = w.lane / 4, t = w.lane % 4;
  const float sink = bf16_at(layer.sinks, u.head * GROUP + w.thread % GROUP) * LOG2E;
  for (int i = w.thread; i < GROUP * 32 + (u.owner ? w.rows * 64 : 0); i += WORK_THREADS) {
    const int dim = i % 32;
    float a = 0.f, b = 0.f;
    if (i < GROUP * 32) {
      const int head = i / 32;
      rotated(p, p.box.qkv + (size_t)u.row * QKV + (u.head * GROUP + head) * 64, u.position, dim, w.tag, a, b);
      const Parts v = split(a * (0.125f * LOG2E), b * (0.125f * LOG2E));
      sh.q[0][head][dim] = (u16)v.high; sh.q[0][head][dim + 32] = (u16)(v.high >> 16);
      sh.q[1][head][dim] = (u16)v.low; sh.q[1][head][dim + 32] = (u16)(v.low >> 16);
      continue;
    }
    const int row = (i - GROUP * 32) / 64, value = i / 32 % 2;
    if (sh.seq[row] == sh.seq[u.row] && sh.position[row] <= u.position) {
      const u64* vector = p.box.qkv + (size_t)row * QKV + Q_DIM + value * KV_DIM + u.head * 64;
      if (value) { a = tagged_float(vector + dim, w.tag, 0x402); b = tagged_float(vector + dim + 32, w.tag, 0x402); }
      else rotated(p, vector, sh.position[row], dim, w.tag, a, b);
    }
    const u32 codes = KV_FP8 ? fp8_pair(a, b) : bf16_pair(a, b), both = KV_FP8 ? widen_fp8(codes) : codes;
    sh.fresh[value][row][dim] = (u16)both;
    sh.fresh[value][row][dim + 32] = (u16)(both >> 16);
    if (row == u.row) {
      u8* slot = page_of(p, sh, sliding, row, u.position / PAGE, place, value, u.head) + u.position % PAGE * (HEAD_DIM * KV_BYTES);
      if (KV_FP8) { slot[dim] = (u8)codes; slot[dim + 32] = (u8)(codes >> 8); }
      else { ((u16*)slot)[dim] = (u16)codes; ((u16*)slot)[dim + 32] = (u16)(codes >> 16); }
    }
  }
  w.sync();
  w.mark(1);

  Queries q;
  HB_UNROLL
  for (int half = 0; half < 2; half++) {
    const u32x4 a = lds128(&sh.q[0][g][half * 32 + t * 8]), b = lds128(&sh.q[1][g][half * 32 + t * 8]);
    q.high[2 * half][0] = a.x; q.high[2 * half][1] = a.y; q.high[2 * half + 1][0] = a.z; q.high[2 * half + 1][1] = a.w;
    q.low[2 * half][0] = b.x; q.low[2 * half][1] = b.y; q.low[2 * half + 1][0] = b.z; q.low[2 * half + 1][1] = b.w;
  }
  Softmax m;
  const int pages = u.last - u.first, sub = w.warp % 4;
  // this step's own tokens are one more tile, of a warp that has little else: its 16 tokens lie outside the window
  const int with_fresh = !u.owner ? WORKERS : u.from % PAGE >= 16 ? 0 : ATTENDING - 1;
  const int turns = (pages + TEAMS - 1) / TEAMS;
  for (int turn = 0; turn <= turns; turn++) {
    const bool fresh = turn == turns;
    if (turn && turn * TEAMS % ROUND == 0) w.sync();  // nobody a round of the ring ahead: see Tile
    const int i = turn * TEAMS + w.warp / 4;
    if (fresh ? w.warp != with_fresh : i >= pages || w.warp >= ATTENDING) continue;
    const Cursor ck = w.at.far_ahead(PAGE_SLOTS * i), cv = ck.ahead(PAGE_SLOTS - 1);
    const u8 *keys = (const u8*)sh.fresh[0], *values = (const u8*)sh.fresh[1];
    bool some = true, all = false;
    u32 seen;
    if (fresh) {
      const int r = g < ROWS ? g : 0;
      seen = g < w.rows && sh.seq[r] == sh.seq[u.row] && sh.position[r] <= u.position && sh.position[r] >= u.from ? 1u : 0u;
    } else {
      const int token = (u.first + i) * PAGE + sub * 16, a = token + g, b = token + g + 8;
      some = token < u.to && token + 16 > u.from;
      all = token >= u.from && token + 16 <= u.to;
      seen = (a >= u.from && a < u.to ? 1u : 0u) | (b >= u.from && b < u.to ? 2u : 0u);
      keys = sh.ring[ck.slot] + sub * 16 * (HEAD_DIM * KV_BYTES);
      values = sh.ring[cv.slot] + (PAGE_WHOLE ? PAGE_BYTES : 0) + sub * 16 * (HEAD_DIM * KV_BYTES);
      wait_bar(&sh.full[ck.slot], ck.phase, 0x410);
    }
    float s[4] = {};
    if (KV_FP8 && fresh) score_tile<false>(keys, q, seen, w.lane, s);
    else if (some) score_tile<KV_FP8>(keys, q, seen, w.lane, s);
    sync_warp();
    if (!PAGE_WHOLE && !fresh) {
      if (w.lane == 0) bar_arrive(&sh.empty[ck.slot], ARRIVALS / 4 + w.after(as_bits(s[0])));  // every key is in every score
      wait_bar(&sh.full[cv.slot], cv.phase, 0x411);
    }
    if (KV_FP8 && fresh) weigh_tile<false>(values, seen, all, w.lane, s, m);
    else if (some) weigh_tile<KV_FP8>(values, seen, all, w.lane, s, m);
    sync_warp();
    const u32 loaded = as_bits(m.o[0][0]) ^ as_bits(m.o[1][0]) ^ as_bits(m.o[2][0]) ^ as_bits(m.o[3][0]);
    if (!fresh && w.lane == 0) bar_arrive(&sh.empty[cv.slot], ARRIVALS / 4 + w.after(loaded));
  }
  w.at.advance_far(PAGE_SLOTS * pages);
  w.mark(2);
  Merge& merge = sh.merge;
  const int teams = pages < TEAMS ? pages : TEAMS;
  if (w.warp / 4 < teams || w.warp == with_fresh) {
    HB_UNROLL
    for (int h = 0; h < 2; h++) {
      HB_UNROLL
      for (int x = 4; x < 32; x *= 2) m.sum[h] += shfl_xor(m.sum[h], x);
      if (g == 0) { merge.top[w.warp][2 * t + h] = m.top[h]; merge.sum[w.warp][2 * t + h] = m.sum[h]; }
    }
    const u32 to = w.base + HB_AT(merge) + (w.warp * (HEAD_DIM * MERGE_ROW) + 2 * t) * 4;
    HB_UNROLL
    for (int i = 0; i < 8; i++) {  // dims as transpose8x8 left them
      const int dim = (i / 4) * 32 + 8 * (g / 2) + 2 * (i % 4) + g % 2;
      sts64(to + dim * MERGE_ROW * 4, as_bits(m.o[i / 2][(i & 1) * 2]), as_bits(m.o[i / 2][(i & 1) * 2 + 1]));
    }
  }
  w.sync();
  if (w.thread < GROUP * 32) {  // two dims of a head; the warps in order
    const int head = w.thread % GROUP, dim = w.thread / GROUP * 2;
    float top = NEVER, sum = 0.f, o[2] = {0.f, 0.f};
    HB_UNROLL
    for (int i = 0; i < ATTENDING; i++)
      if (i / 4 < teams || i == with_fresh) top = merge.top[i][head] > top ? merge.top[i][head] : top;
    if (u.parts == 1) top = sink > top ? sink : top;
    HB_UNROLL
    for (int i = 0; i < ATTENDING; i++)
      if (i / 4 < teams || i == with_fresh) {
        const float f = exp2_fast(merge.top[i][head] - top);
        sum += merge.sum[i][head] * f;
        o[0] += merge.o[i][dim * MERGE_ROW + head] * f;
        o[1] += merge.o[i][(dim + 1) * MERGE_ROW + head] * f;
      }
    const int query = u.row * HEADS + u.head * GROUP + head;
    if (u.parts == 1) {
      const float f = divide(1.f, sum + exp2_fast(sink - top)) * scale_in<O_FORMAT>();
      box_store(p.box.attn + (size_t)query * 32 + dim / 2, paired(o[0] * f, o[1] * f, w.tag));
    } else {
      u64* out = p.box.part + ((size_t)query * SPLITS + u.part) * 66;
      box_store(out + dim, tagged(as_bits(o[0]), w.tag));
      box_store(out + dim + 1, tagged(as_bits(o[1]), w.tag));
      if (dim == 0) { box_store(out + 64, tagged(as_bits(top), w.tag)); box_store(out + 65, tagged(as_bits(sum), w.tag)); }
    }
  }
  w.sync();
}

// The parts of one head become its output; one warp a head, two dims a lane, every word of it asked for at once.
template <int O_FORMAT> HB_DEV void merge_head(Worker& w, const Layer& layer, int row, int head, int parts) {
  const Step& p = w.p;
  const u64* in = p.box.part + (size_t)(row * HEADS + head) * SPLITS * 66;
  const float sink = bf16_at(layer.sinks, head) * LOG2E;
  u64x2 v[SPLITS] = {}, own = {};  // own: maximum and sum of part `lane`
  Patience patience;
  HB_ROLLED
  for (;;) {
    bool whole = true;
    if (w.lane < parts) own = box_load2(in + w.lane * 66 + 64);
    HB_UNROLL
    for (int i = 0; i < SPLITS; i++)
      if (i < parts) v[i] = box_load2(in + i * 66 + 2 * w.lane);
    if (w.lane < parts) whole = has(own.x, w.tag) && has(own.y, w.tag);
    HB_UNROLL
    for (int i = 0; i < SPLITS; i++)
      if (i < parts) whole &= has(v[i].x, w.tag) && has(v[i].y, w.tag);
    if (warp_ballot(whole) == 0xffffffffu) break;
    patience.wait(0x420);
  }
  const float mine = w.lane < parts ? as_float(payload(own.x)) : NEVER;
  const float top = from_orderable(warp_max(orderable(mine > sink ? mine : sink)));
  const float share = exp2_fast(mine - top);
  float sum = w.lane < parts ? share * as_float(payload(own.y)) : 0.f, o[2] = {0.f, 0.f};
  HB_UNROLL
  for (int x = 1; x < 32; x *= 2) sum += shfl_xor(sum, x);
  sum += exp2_fast(sink - top);
  HB_UNROLL
  for (int i = 0; i < SPLITS; i++)
    if (i < parts) {
      const float f = as_float(shfl(as_bits(share), i));
      o[0] += as_float(payload(v[i].x)) * f;
      o[1] += as_float(payload(v[i].y)) * f;
    }
  const float f = divide(1.f, sum) * scale_in<O_FORMAT>();
  box_store(p.box.attn + (size_t)(row * HEADS + head) * 32 + w.lane, paired(o[0] * f, o[1] * f, w.tag));
}
