// Attention of this step's rows over the paged cache. A kv head has several blocks ("seats"), because each of them goes on
// to multiply its share of o by the head's output. A unit is one row and one part of its pages; its eight query heads are
// the eight columns of the mma. Where a row has one part (a sliding window, a short context) every seat does it for itself
// and nothing passes between blocks; else parts are dealt out, exchanged through mailboxes, and every seat merges them.
//
// Pages come through the ring, 16 tokens to a warp, four warps to a page. Tokens of this very step are not in the pages yet:
// they are taken from the mailbox, rounded as the cache will hold them. The sink joins the denominator once, where the
// last sum is made.
#pragma once
#include "decode/gemv.cuh"

constexpr float LOG2E = 1.4426950408889634f, NEVER = -1e30f;
constexpr int PART_WORDS = HEAD_DIM / 2 + 2;
constexpr int TEAMS = WORKERS / 4;  // of four warps, each with a page of its own
constexpr int ROUND = SLOTS / PAGE_SLOTS / TEAMS * TEAMS;  // pages
constexpr int WHOLE = TEAMS;     // pages up to which a row is one part
constexpr bool ALONE = ROWS <= 2;  // one part: every seat does it for itself; with more rows that would take longer than the exchange

// The row's key range and its cut into parts depend on the row alone: the same row gives the same bits in any batch.
HB_DEV int parts_of(int pages, bool sliding) {
  if (sliding || pages <= WHOLE) return 1;
  int n = (pages + HB_PART_PAGES - 1) / HB_PART_PAGES;
  return n < SPLITS ? n : SPLITS;
}
HB_DEV void key_range(const Shared& sh, int row, bool sliding, int& from, int& to, int& first, int& pages) {
  from = sliding && sh.position[row] >= WINDOW ? sh.position[row] - WINDOW + 1 : 0;
  to = sh.base[row];
  first = from / PAGE;
  pages = to > from ? (to - 1) / PAGE + 1 - first : 0;
}
// This seat's unit number n; parts are dealt to the seats in turn, from row to row.
HB_PHASE Unit find_unit(const Shared& sh, int rows, bool sliding, int n) {
  Unit u = {};
  int dealt = 0;
  for (int row = 0; row < rows; row++) {
    int from, to, first, pages, part = 0;
    key_range(sh, row, sliding, from, to, first, pages);
    const int parts = parts_of(pages, sliding);
    const bool alone = ALONE && parts == 1;
    if (alone) {
      if (n) { n--; continue; }
    } else {
      const int of = sh.seat.of, skip = (sh.seat.index - dealt % of + of) % of, mine = parts > skip ? (parts - skip + of - 1) / of : 0;
      dealt += parts;
      if (n >= mine) { n -= mine; continue; }
      part = skip + n * of;
    }
    u.row = row; u.part = part; u.parts = parts;
    u.first = first + pages * part / parts; u.last = first + pages * (part + 1) / parts;
    u.from = from; u.to = to; u.position = sh.position[row];
    u.on = true; u.alone = alone; u.owner = part == parts - 1; u.writes = u.owner && (!alone || sh.seat.index == 0);
    return u;
  }
  return u;
}
HB_DEV const int* page_table(const Step& p, const Shared& sh, bool sliding, int row) {
  return (sliding ? p.sliding_table : p.full_table) + (size_t)sh.seq[row] * p.max_blocks;
}
// HB_LENT: the pages are another engine's, which holds those of every layer by themselves.
HB_DEV u8* page_at(const Step& p, const Layer& l, int page, int place, int which, int head) {
#ifdef HB_LENT
  return l.pages + (((size_t)page * 2 + which) * KV_HEADS + head) * PAGE_BYTES;
#else
  return p.pool + ((((size_t)page * p.page_layers + place) * 2 + which) * KV_HEADS + head) * PAGE_BYTES;
#endif
}

// Queries are the A operand, high parts in rows 0..7 (heads) and low parts in rows 8..15; so are the weights of tokens. A
// lane (g, t) has head g: scores of tokens 2t, 2t + 1, 2t + 8, 2t + 9, and dims 16t to 16t + 15 of the output. No score or
// weight changes lanes; only values do, whose pairs must be of two tokens.
struct Softmax {  // of one warp
  float top = NEVER, sum = 0.f, o[8][4] = {};
};
struct Queries { u32 high[8], low[8]; };

// Dims 16t to 16t + 15 of rows g and g + 8 of a tile of 16 x 64, as bf16. Odd rows of 128 bytes read their halves in the other
// order, so that lanes cover all banks; rows of 64 (FP8) do anyway.
template <bool FP8> HB_DEV void load_rows(const u8* tile, int lane, u32 (&v)[2][8]) {
  const int g = lane / 4, t = lane % 4, swap = g & 1;
  HB_UNROLL
  for (int r = 0; r < 2; r++) {
    if (FP8) {
      const u32x4 w = lds128(tile + (g + 8 * r) * 64 + t * 16);
      const u32 a[4] = {w.x, w.y, w.z, w.w};
      HB_UNROLL
      for (int i = 0; i < 8; i++) v[r][i] = widen_e4m3(a[i / 2] >> (16 * (i & 1)));
    } else {
      const u8* row = tile + (g + 8 * r) * 128 + t * 32;
      const u32x4 a = lds128(row + swap * 16), b = lds128(row + 16 - swap * 16);
      const u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
      HB_UNROLL
      for (int i = 0; i < 4; i++) { v[r][i] = swap ? y[i] : x[i]; v[r][i + 4] = swap ? x[i] : y[i]; }
    }
  }
}

// `seen`: bit i says whether token i of the 16 counts.
template <bool FP8> HB_DEV void score_tile(const u8* keys, const Queries& q, u32 seen, int lane, float (&s)[4]) {
  u32 k[2][8];
  load_rows<FP8>(keys, lane, k);
  float c[2][4] = {};
  HB_UNROLL
  for (int i = 0; i < 4; i++)
    HB_UNROLL
    for (int r = 0; r < 2; r++) mma(c[r], q.high[2 * i], q.low[2 * i], q.high[2 * i + 1], q.low[2 * i + 1], k[r][2 * i], k[r][2 * i + 1]);
  const u32 mine = seen >> (lane % 4 * 2);
  HB_UNROLL
  for (int i = 0; i < 4; i++) s[i] = mine >> (i / 2 * 8 + i % 2) & 1 ? c[i / 2][i % 2] + c[i / 2][i % 2 + 2] : NEVER;
}
template <bool FP8> HB_DEV void weigh_tile(const u8* values, u32 seen, bool more, int lane, float (&s)[4], Softmax& m) {
  float top = s[0] > s[1] ? s[0] : s[1], low = s[2] > s[3] ? s[2] : s[3];
  top = low > top ? low : top;
  HB_UNROLL
  for (int x = 1; x < 4; x *= 2) { const float other = shfl_xor(top, x); top = other > top ? other : top; }
  top = top > m.top ? top : m.top;
  float p[4];  // of tokens that do not count 0; a score that is infinite either way has no weight
  HB_UNROLL
  for (int i = 0; i < 4; i++) p[i] = s[i] * 0.f + exp2_fast(s[i] - top);
  if (more) {  // not this warp's first tile
    const float shrink = exp2_fast(m.top - top);
    m.sum *= shrink;
    HB_UNROLL
    for (int i = 0; i < 32; i++) m.o[i / 4][i % 4] *= shrink;
  }
  m.top = top;
  m.sum += (p[0] + p[1]) + (p[2] + p[3]);
  const Parts a = split(p[0], p[1]), b = split(p[2], p[3]);
  u32 v[2][8];
  load_rows<FP8>(values, lane, v);
  if (seen != 0xffffu)  // a weight of zero does not save us from a NaN in a slot nobody wrote
    HB_UNROLL
    for (int r = 0; r < 2; r++)
      HB_UNROLL
      for (int i = 0; i < 8; i++) v[r][i] = seen >> (lane / 4 + 8 * r) & 1 ? v[r][i] : 0u;
  HB_UNROLL
  for (int i = 0; i < 8; i++) mma(m.o[i], a.high, a.low, b.high, b.low, transpose8x8(v[0][i]), transpose8x8(v[1][i]));
}

// Two neighbouring values of the head's output, as o's operand (head counts within the group).
template <int O_FORMAT> HB_DEV void keep_attention(Shared& sh, int row, int head, int dim, float a, float b, float share) {
  const Parts v = split(a * share * scale_in<O_FORMAT>(), b * share * scale_in<O_FORMAT>());
  *(u32*)&sh.attn[row][0][head * ATTN_HEAD + dim] = v.high;
  *(u32*)&sh.attn[row][1][head * ATTN_HEAD + dim] = v.low;
}

template <int O_FORMAT> HB_DEV void attend(Worker& w, const Layer& layer, int kv_head, int place, bool sliding, const Unit& u) {
  Shared& sh = w.sh;
  const Step& p = w.p;
  const int g = w.lane / 4, t = w.lane % 4;
  // Whoever writes the cache does so when others merge, from what the tile of own tokens was made of; but asks for the
  // page's number now.
  const int writes = u.writes ? w.warp - (WORKERS - 2) : -1;  // keys, values
  int page = 0;
  if (writes >= 0) page = page_table(p, sh, sliding, u.row)[u.position / PAGE];
  // one vector a warp, elements `lane` and `lane` + 32: the eight queries, then keys and values of this step's own tokens
  HB_ROLLED
  for (int i = w.warp; i < GROUP + (u.owner ? 2 * w.rows : 0); i += WORKERS) {
    const bool query = i < GROUP, value = !query && i % 2;
    const int row = query ? u.row : (i - GROUP) / 2;
    float a = 0.f, b = 0.f;
    if (query || (sh.seq[row] == sh.seq[u.row] && sh.position[row] <= u.position)) {
      const u64* vector = p.box.qkv + (size_t)row * QKV + (query ? (kv_head * GROUP + i) * 64 : Q_DIM + (value ? KV_DIM : 0) + kv_head * 64) + w.lane;
      const float* angle = p.rope + (size_t)sh.position[row] * 64 + w.lane;
      const float c = value ? 1.f : angle[0], s = value ? 0.f : angle[32];
      u64 x = box_load(vector), y = box_load(vector + 32);
      Patience patience;
      while (!(has(x, w.tag) && has(y, w.tag))) { patience.wait(0x400); x = box_load(vector); y = box_load(vector + 32); }
      a = as_float(payload(x)) * c - as_float(payload(y)) * s;
      b = as_float(payload(y)) * c + as_float(payload(x)) * s;
    }
    if (query) {
      const Parts v = split(a * (0.125f * LOG2E), b * (0.125f * LOG2E));
      sh.q[0][i][w.lane] = (u16)v.high; sh.q[0][i][w.lane + 32] = (u16)(v.high >> 16);
      sh.q[1][i][w.lane] = (u16)v.low; sh.q[1][i][w.lane + 32] = (u16)(v.low >> 16);
      continue;
    }
    const u32 codes = KV_FP8 ? e4m3_pair(a, b) : bf16_pair(a, b), both = KV_FP8 ? widen_e4m3(codes) : codes;
    sh.fresh[value][row][w.lane] = (u16)both;
    sh.fresh[value][row][w.lane + 32] = (u16)(both >> 16);
  }
  w.sync();
  w.mark(1);
  const u16 sink_code = layer.sinks[kv_head * GROUP + w.thread / 16 % GROUP];  // widened where it is used: nothing waits for it

  Queries q;
  HB_UNROLL
  for (int half = 0; half < 2; half++) {
    const u32x4 a = lds128(&sh.q[0][g][t * 16 + half * 8]), b = lds128(&sh.q[1][g][t * 16 + half * 8]);
    q.high[4 * half] = a.x; q.high[4 * half + 1] = a.y; q.high[4 * half + 2] = a.z; q.high[4 * half + 3] = a.w;
    q.low[4 * half] = b.x; q.low[4 * half + 1] = b.y; q.low[4 * half + 2] = b.z; q.low[4 * half + 3] = b.w;
  }
  Softmax m;
  const int pages = u.last - u.first, sub = w.warp % 4;
  // this step's own tokens are one more tile, of a warp that has little else: its 16 tokens lie outside the window
  const int with_fresh = !u.owner ? WORKERS : u.from % PAGE >= 16 ? 0 : ATTENDING - 1;
  const int turns = (pages + TEAMS - 1) / TEAMS;
  bool more = false;
  HB_ROLLED
  for (int turn = 0; turn <= turns; turn++) {
    const bool fresh = turn == turns;
    if (turn && turn * TEAMS % ROUND == 0) w.sync();  // nobody a round of the ring ahead: see Tile
    const int i = turn * TEAMS + w.warp / 4;
    if (fresh ? w.warp != with_fresh : i >= pages || w.warp >= ATTENDING) continue;
    const Cursor ck = w.at.far_ahead(PAGE_SLOTS * i), cv = ck.ahead(PAGE_SLOTS - 1);
    const u8 *keys = (const u8*)sh.fresh[0], *values = (const u8*)sh.fresh[1];
    u32 seen;  // bits of the 16 tokens
    if (fresh) {
      const int r = w.lane < ROWS ? w.lane : 0;
      seen = warp_ballot(w.lane < w.rows && sh.seq[r] == sh.seq[u.row] && sh.position[r] <= u.position && sh.position[r] >= u.from);
    } else {
      const int token = (u.first + i) * PAGE + sub * 16, skip = u.from - token, left = u.to - token;  // of them
      seen = (left >= 16 ? 0xffffu : left > 0 ? (1u << left) - 1 : 0u) & (skip >= 16 ? 0u : skip > 0 ? ~0u << skip : ~0u);
      keys = sh.ring[ck.slot] + sub * 16 * (HEAD_DIM * KV_BYTES);
      values = sh.ring[cv.slot] + (PAGE_WHOLE ? PAGE_BYTES : 0) + sub * 16 * (HEAD_DIM * KV_BYTES);
      wait_bar(&sh.full[ck.slot], ck.phase, 0x410);
    }
    float s[4] = {};
    if (KV_FP8 && fresh) score_tile<false>(keys, q, seen, w.lane, s);
    else if (seen) score_tile<KV_FP8>(keys, q, seen, w.lane, s);
    sync_warp();
    if (!PAGE_WHOLE && !fresh) {
      const u32 loaded = as_bits(s[0]) ^ as_bits(s[2]);  // every key is in a score
      if (w.lane == 0) bar_arrive(&sh.empty[ck.slot], ARRIVALS / 4 + w.after(loaded));
      wait_bar(&sh.full[cv.slot], cv.phase, 0x411);
    }
    if (KV_FP8 && fresh) weigh_tile<false>(values, seen, more, w.lane, s, m);
    else if (seen) weigh_tile<KV_FP8>(values, seen, more, w.lane, s, m);
    more |= seen != 0;
    sync_warp();
    u32 loaded = 0;
    HB_UNROLL
    for (int j = 0; j < 8; j++) loaded ^= as_bits(m.o[j][0]);
    if (!fresh && w.lane == 0) bar_arrive(&sh.empty[cv.slot], ARRIVALS / 4 + w.after(loaded));
  }
  w.at.advance_far(PAGE_SLOTS * pages);
  w.mark(2);
  Merge& merge = sh.merge;
  if (w.warp < ATTENDING) {  // those that had nothing to do as well: no weight
    m.sum += shfl_xor(m.sum, 1);
    m.sum += shfl_xor(m.sum, 2);
    if (t == 0) { merge.top[w.warp][g] = m.top; merge.sum[w.warp][g] = m.sum; }
    const u32 to = w.base + HB_AT(merge) + ((w.warp * GROUP + g) * MERGE_ROW + t * 16) * 4;
    HB_UNROLL
    for (int i = 0; i < 8; i += 2)
      sts128(to + i * 8, {as_bits(m.o[i][0] + m.o[i][2]), as_bits(m.o[i][1] + m.o[i][3]),
                          as_bits(m.o[i + 1][0] + m.o[i + 1][2]), as_bits(m.o[i + 1][1] + m.o[i + 1][3])});
  }
  w.sync();
  if (w.thread < GROUP * 16) {  // four dims of a head; the warps in order
    const int head = w.thread / 16, dim = w.thread % 16 * 4;
    const float sink = bf16_low(sink_code) * LOG2E;
    float tops[ATTENDING], top = u.alone ? sink : NEVER, sum = 0.f, o[4] = {0.f, 0.f, 0.f, 0.f};
    HB_UNROLL
    for (int i = 0; i < ATTENDING; i++) { tops[i] = merge.top[i][head]; top = tops[i] > top ? tops[i] : top; }
    HB_UNROLL
    for (int i = 0; i < ATTENDING; i++) {
      const float f = exp2_fast(tops[i] - top);
      const u32x4 v = lds128(&merge.o[i][head][dim]);
      sum += merge.sum[i][head] * f;
      o[0] += as_float(v.x) * f; o[1] += as_float(v.y) * f; o[2] += as_float(v.z) * f; o[3] += as_float(v.w) * f;
    }
    if (u.alone) {
      const float f = divide(1.f, sum + exp2_fast(sink - top));
      keep_attention<O_FORMAT>(sh, u.row, head, dim, o[0], o[1], f);
      keep_attention<O_FORMAT>(sh, u.row, head, dim + 2, o[2], o[3], f);
    } else {
      u64* out = p.box.part + ((size_t)(u.row * HEADS + kv_head * GROUP + head) * SPLITS + u.part) * PART_WORDS;
      if (dim == 0) { box_store(out + 32, tagged(as_bits(top), w.tag)); box_store(out + 33, tagged(as_bits(sum), w.tag)); }
      if (!(below(o[0], FINITE) && below(o[1], FINITE) && below(o[2], FINITE) && below(o[3], FINITE) && below(sum, FINITE)))
        break_row(u.row, AT_ATTENTION);
      box_store(out + dim / 2, paired(o[0], o[1], w.tag));
      box_store(out + dim / 2 + 1, paired(o[2], o[3], w.tag));
    }
  }
  if (writes >= 0) {
    u8* slot = page_at(p, layer, page, place, writes, kv_head) + u.position % PAGE * (HEAD_DIM * KV_BYTES);
    const u32 both = *(const u32*)&sh.fresh[writes][u.row][2 * w.lane];
    if (KV_FP8) ((u16*)slot)[w.lane] = (u16)e4m3_pair(bf16_low(both), bf16_high(both));
    else ((u32*)slot)[w.lane] = both;
  }
  w.sync();
}

// The parts of one head become its output; one warp a head, two dims a lane, every word of it asked for at once. Words of parts
// that are none are those of the last one, without weight.
template <int O_FORMAT> HB_DEV void merge_head(Worker& w, const Layer& layer, int kv_head, int row, int head, int parts) {
  const u64* in = w.p.box.part + (size_t)(row * HEADS + kv_head * GROUP + head) * SPLITS * PART_WORDS;
  const u16 sink_code = layer.sinks[kv_head * GROUP + head];
  const int part = w.lane < parts ? w.lane : parts - 1;
  u64x2 own;  // maximum and sum of part `lane`
  Patience patience;
  HB_ROLLED
  for (;;) {  // these first, see load_operand
    own = box_load2(in + part * PART_WORDS + 32);
    if (!warp_ballot(!has(own.x, w.tag) || !has(own.y, w.tag))) break;
    patience.wait(0x420);
  }
  u64 v[SPLITS];
  HB_ROLLED
  for (;;) {
    u32 missing = 0;
    HB_UNROLL
    for (int i = 0; i < SPLITS; i++) v[i] = box_load(in + (i < parts ? i : parts - 1) * PART_WORDS + w.lane);
    HB_UNROLL
    for (int i = 0; i < SPLITS; i++) missing |= (u32)v[i] ^ w.tag;
    if (!warp_ballot(missing & PAIR_TAG)) break;
    patience.wait(0x421);
  }
  const float sink = bf16_low(sink_code) * LOG2E;
  const float mine = w.lane < parts ? as_float(payload(own.x)) : NEVER;
  const float top = from_orderable(warp_max(orderable(mine > sink ? mine : sink)));
  const float share = exp2_fast(mine - top);
  float sum = share * as_float(payload(own.y)), o[2] = {0.f, 0.f};
  HB_UNROLL
  for (int x = 1; x < 32; x *= 2) sum += shfl_xor(sum, x);
  HB_UNROLL
  for (int i = 0; i < SPLITS; i++) {
    const float f = as_float(shfl(as_bits(share), i));
    o[0] += pair_first(v[i]) * f;
    o[1] += pair_second(v[i]) * f;
  }
  keep_attention<O_FORMAT>(w.sh, row, head, 2 * w.lane, o[0], o[1], divide(1.f, sum + exp2_fast(sink - top)));
}
