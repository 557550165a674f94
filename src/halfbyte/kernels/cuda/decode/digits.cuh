// Experts by products of a warpgroup, with x in two E4M3 digits (HB_TILE_BODY; device/digits.cuh says what digits hold). Twice
// the weights in an instruction, which wait for nothing that a warp does meanwhile; x is in shared memory, once for the block.
//
// Columns of a product are shared out as in gemv.cuh: pair t of eight columns is one row's two digits in one of the groups at
// once, zeros in the other groups. Lane (g, t) gets the sums of rows g and g + 8 of its warp's tile with pair t, and scales them
// by the weight's scale and the group's of x.
//
// Who writes digits, and when: load_operand, every warp its part, behind products of the phase before that the block's warps
// have all been through. They share their place with what attention merges, so phase_up clears the zeros again.
#pragma once
#include "decode/gemv.cuh"

#if HB_TILE_BODY
#include "device/digits.cuh"

static_assert(!HB_ROUTER_JOINED, "router sums that are joined lie where digits are cleared");
constexpr int DIGIT_OCTAVES = E5M2_OCTAVES - 100;  // of the weights, and of x on its way in (scale_in)

template <int K> struct DigitOperand { int skip = 0; };  // x, where all warps find it; tiles of the first quad that are another block's
template <int FORMAT, int K> using ExpertOperand = DigitOperand<K>;
#define EXPERT_PHASE HB_DEV  // products of a warpgroup in a function of their own would wait for each other (ptxas C7510)

// An atom's group of x: its third's, and which of the four.
struct DigitPlace { int atom, third, group; };
template <int K> HB_DEV DigitPlace place_of_group(int group) {
  using Q = Quad<K>;
  const int chunk = group / 2, atom = chunk / Q::WIDE, rest = chunk % Q::WIDE, each = Q::REST_EACH == 2 || atom < Q::ATOMS - 1 ? 2 : 1;
  return {atom, rest / each, rest % each * 2 + (group & 1)};
}

// Zeros wherever no digit of a vector of K comes, and no scale.
template <int K> HB_DEV void clear_digits(const Worker& w) {
  using Q = Quad<K>;
  constexpr int UNITS = Q::ATOMS * THIRDS * SETS * 64;
  HB_ROLLED
  for (int i = w.thread; i < UNITS; i += WORK_THREADS) {
    const int atom = i / (THIRDS * SETS * 64), third = i / (SETS * 64) % THIRDS, column = i / 8 % 8, unit = i % 8, group = unit / 2;
    const bool last = atom == Q::ATOMS - 1;
    const int chunk = group / 2, each = last ? Q::REST_EACH : 2;
    const bool there = chunk < each && (!last || third * each + chunk < Q::REST);
    if (!there || group % GROUPS_AT_ONCE != column / 2 / LANE_ROWS)
      sts128(w.base + HB_AT(by_digits.digits) + i / 8 * 128 + (unit ^ column) * 16, u32x4{0, 0, 0, 0});
    if (!there && column == 0 && i / 64 % SETS == 0 && unit % 2 == 0)
      HB_UNROLL
      for (int row = 0; row < ROWS; row++) sts32(w.base + HB_AT(by_digits.scales) + (((atom * THIRDS + third) * 4 + group) * ROWS + row) * 4, 0);
  }
}

// A lane's four values of a word that has come, as take() has them before it splits them; the squares among them.
HB_DEV float values_of(const FromPaired&, const FromPaired::Raw& r, float (&v)[4]) {
  v[0] = pair_first(r.x); v[1] = pair_second(r.x); v[2] = pair_first(r.y); v[3] = pair_second(r.y);
  return 0.f;
}
HB_DEV float values_of(const FromExpert& source, const FromExpert::Raw& r, float (&v)[4]) { return values_of(source.all, r, v); }
template <int FORMAT, int ADDED> HB_DEV float values_of(const FromResidual<FORMAT, ADDED>&, const typename FromResidual<FORMAT, ADDED>::Raw& r, float (&v)[4]) {
  static_assert(ADDED > 0, "experts come behind a sum");
  float squares = 0.f;
  v[0] = summed(r.a.x); v[1] = summed(r.a.y); v[2] = summed(r.b.x); v[3] = summed(r.b.y);
  HB_UNROLL
  for (int i = 0; i < 4; i++) {
    squares += v[i] * v[i];
    v[i] *= (i & 1 ? bf16_high(r.norm[i / 2]) : bf16_low(r.norm[i / 2])) * scale_in<FORMAT>();
  }
  return squares;
}

// Waits as load_operand of gemv.cuh does, whose code this leaves as it is. find(n, row, k): where this lane's eight values of
// pass n of the warp begin, if it has any.
template <int BATCH, int ALL, int PASSES, class Source, class Find>
HB_DEV void fetch_values(const Source& source, typename Source::Raw (&raw)[BATCH], int lane, int first, Find find) {
  Patience patience;
  int row, k;
  HB_ROLLED
  for (;;) {
    u32 missing = 0;
    HB_UNROLL
    for (int n = first; n < first + BATCH && n < ALL; n++)
      if (find(n, row, k) && source.on(n / PASSES)) raw[n - first] = source.load(n / PASSES, row, k, lane / 4 & 1);
    HB_UNROLL
    for (int n = first; n < first + BATCH && n < ALL; n++)
      if (find(n, row, k) && source.on(n / PASSES)) missing |= source.missing(raw[n - first]);
    if (!warp_ballot(missing & Source::MARKS)) break;
    patience.wait(0x311);
    if (!HB_PROBE) continue;
    if (lane % 8 == 0 && find(0, row, k) && source.on(0))
      while (!source.ready(0, row, k)) patience.wait(0x310);
    sync_warp();
  }
}

template <int K, class Source> HB_DEV void load_operand(Worker& w, DigitOperand<K>&, const Source& source) {
  constexpr int GROUPS = K / 32, AT_ONCE = GROUPS_AT_ONCE * WORKERS, PASSES = (GROUPS + AT_ONCE - 1) / AT_ONCE;
  constexpr int ALL = SETS * PASSES, BATCH = ALL < 4 ? ALL : 4;
  const int odd = w.lane / 4 & 1, pair = w.lane / 8;
  const auto find = [&](int n, int& row, int& k) {
    const int group = (n % PASSES * WORKERS + w.warp) * GROUPS_AT_ONCE + pair / LANE_ROWS;
    row = n / PASSES * LANE_ROWS + pair % LANE_ROWS;
    k = group * 32 + w.lane % 4 * 8;
    return row < w.rows && group < GROUPS;
  };
  float squares[SETS] = {};
  if (HB_ONE_POLLER) wait_as_a_block<K>(w, source);
  HB_UNROLL
  for (int first = 0; first < ALL; first += BATCH) {
    typename Source::Raw raw[BATCH] = {};
    fetch_values<BATCH, ALL, PASSES>(source, raw, w.lane, first, find);
    HB_UNROLL
    for (int n = 0; n < BATCH && first + n < ALL; n++) {
      const int s = (first + n) / PASSES;
      int row, k;
      float v[4] = {0.f, 0.f, 0.f, 0.f};
      if (find(first + n, row, k) && source.on(s)) squares[s] += values_of(source, raw[n], v);
      u32 largest = 0;
      HB_UNROLL
      for (int i = 0; i < 4; i++) {
        const u32 size = as_bits(v[i]) & 0x7fffffffu;
        largest = size > largest ? size : largest;
      }
      HB_UNROLL
      for (int m = 1; m < 8; m *= 2) {
        const u32 other = shfl_xor(largest, m);
        largest = other > largest ? other : largest;
      }
      const u32 exponent = largest >> 23;
      Digits d = digits_of(v, exponent);
      if (Source::STEP == 4) {  // 0, 1, 4, 5 and 2, 3, 6, 7: lanes of a pair change two values
        const u32 got = shfl_xor(odd ? permute(d.high, d.low, 0x5410) : permute(d.high, d.low, 0x7632), 4);
        d.high = odd ? permute(got, d.high, 0x7610) : permute(d.high, got, 0x5410);
        d.low = odd ? permute(got, d.low, 0x7632) : permute(d.low, got, 0x7610);
      }
      if (k / 32 < GROUPS) {
        const DigitPlace at = place_of_group<K>(k / 32);
        const int column = 2 * (at.group % GROUPS_AT_ONCE * LANE_ROWS + pair % LANE_ROWS), byte = at.group * 32 + k % 32 + 4 * odd;
        const u32 atom = w.base + HB_AT(by_digits.digits) + ((at.atom * THIRDS + at.third) * SETS + s) * 1024;
        sts32(atom + column * 128 + ((byte / 16) ^ column) * 16 + byte % 16, d.high);
        sts32(atom + (column + 1) * 128 + ((byte / 16) ^ (column + 1)) * 16 + byte % 16, d.low);
        if (w.lane % 8 == 0)
          sts32(w.base + HB_AT(by_digits.scales) + (((at.atom * THIRDS + at.third) * 4 + at.group) * ROWS + row) * 4,
                as_bits(digit_scale(exponent, DIGIT_OCTAVES)));
      }
    }
  }
  written_for_products();
  if (Source::SQUARES)
    HB_UNROLL
    for (int s = 0; s < SETS; s++) {
      float v = squares[s];
      v += shfl_xor(v, 1); v += shfl_xor(v, 2); v += shfl_xor(v, 4);
      if (LANE_ROWS <= 2) v += shfl_xor(v, 16);
      if (LANE_ROWS == 1) v += shfl_xor(v, 8);
      if (w.lane % 8 == 0 && w.lane / 8 < LANE_ROWS) w.sh.ssq[s * LANE_ROWS + w.lane / 8][w.warp] = v;
    }
}

// What is multiplied at once while the words of what follows are widened: an atom, or a chunk of one where four rows or more
// take the registers. SUMS: accumulators of a step.
constexpr int STEP_CHUNKS = ROWS < 4 ? 2 : 1, SUMS = 2 * STEP_CHUNKS / GROUPS_AT_ONCE;
template <int K> struct Steps {
  using Q = Quad<K>;
  static constexpr int ALL = STEP_CHUNKS == 2 ? Q::ATOMS : 2 * (Q::ATOMS - 1) + Q::REST_EACH;
  static HB_CONST_FN int atom(int u) { return u * STEP_CHUNKS / 2; }
  static HB_CONST_FN int chunk(int u) { return u * STEP_CHUNKS % 2; }  // of a third's in the atom, the first
  static HB_CONST_FN int chunks(int u) { return Q::each(atom(u)) - chunk(u) < STEP_CHUNKS ? Q::each(atom(u)) - chunk(u) : STEP_CHUNKS; }
  static HB_CONST_FN bool begins_slot(int u) { return chunk(u) == 0 && atom(u) % Q::IN_SLOT == 0; }
  static HB_CONST_FN bool ends_slot(int u) { return u + 1 == ALL || begins_slot(u + 1); }
};

// A lane's words of a step, and the weights' scales for rows g and g + 8.
struct StepWords {
  u32x4 words[STEP_CHUNKS];
  u32 scale[SUMS];
  template <int K> HB_DEV_MEMBER void load(const Worker& w, int slot, int u) {
    using Q = Quad<K>;
    const int atom = Steps<K>::atom(u), from = Steps<K>::chunk(u), count = Steps<K>::chunks(u), each = Q::each(atom);
    const int third = w.warp / QUAD, g = w.lane / 4, t = w.lane % 4;
    const bool whole = atom < Q::ATOMS - 1 || Q::REST == THIRDS * Q::REST_EACH;  // every third has all of its chunks
    const u32 tile = w.ring(slot) + atom % Q::IN_SLOT * Q::ATOM_BYTES + w.warp % QUAD * Q::tile_bytes(atom);
    HB_UNROLL
    for (int c = 0; c < STEP_CHUNKS; c++) {  // a chunk that is not there has zero digits: any words will do
      if (c >= count) { words[c] = {0, 0, 0, 0}; continue; }
      const int chunk = third * each + from + c;
      words[c] = lds128(tile + (whole || chunk < Q::REST ? chunk : 0) * Q::CHUNK + w.lane * 16);
    }
    HB_UNROLL
    for (int m = 0; m < SUMS; m++) {
      scale[m] = 0;
      if (m * GROUPS_AT_ONCE >= 2 * count) continue;
      const int group = m * GROUPS_AT_ONCE + t / LANE_ROWS, chunk = third * each + from + (group / 2 < count ? group / 2 : 0);
      scale[m] = lds16(tile + (whole || chunk < Q::REST ? chunk : 0) * Q::CHUNK + scale_at<MXFP4>(g, group & 1));
    }
  }
  HB_DEV_MEMBER u32 loaded() const {  // a word of every load
    u32 v = words[0].x ^ words[STEP_CHUNKS - 1].y;
    HB_UNROLL
    for (int m = 0; m < SUMS; m++) v ^= scale[m];
    return v;
  }
};

// A quad from where the ring is; `out`: the shared address of this warp's sums of its tile, [ROWS][16]. A warp whose tile is
// another block's multiplies what its place in the slot holds, and nobody reads its sums.
template <int K> HB_DEV void multiply_quad(Worker& w, u32 out) {
  using S = Steps<K>;
  const int third = w.warp / QUAD, t = w.lane % 4, g = w.lane / 4;
  const auto digits = b_low(w.sh.by_digits.digits[0][third]);
  const u32 scales = w.base + HB_AT(by_digits.scales) + (third * 4 * ROWS + t / LANE_ROWS * ROWS + t % LANE_ROWS) * 4;
  float acc[SETS][2] = {}, d[2][SUMS][DIGIT_COLUMNS / 2];
  u32 a[2][8 * STEP_CHUNKS], scale[2][SUMS];
  StepWords part;
  wait_for(w.full(w.at.slot), w.at.phase);
  part.load<K>(w, w.at.slot, 0);
  HB_UNROLL
  for (int u = 0; u <= S::ALL; u++) {
    const int now = u & 1, before = now ^ 1;
    if (u < S::ALL) {
      HB_UNROLL
      for (int c = 0; c < STEP_CHUNKS; c++) widen_e5m2_chunk(part.words[c], a[now] + 8 * c);
      widened(a[now]);
      wgmma_fence();
      HB_UNROLL
      for (int i = 0; i < 2 * STEP_CHUNKS; i++) {
        if (i >= 2 * S::chunks(u)) continue;
        const u64 b = b_tile(digits, S::atom(u) * THIRDS * SETS * 1024 + (2 * S::chunk(u) + i) * 32);
        if (i % GROUPS_AT_ONCE == 0) digit_product<true, DIGIT_COLUMNS>(d[now][i / GROUPS_AT_ONCE], a[now] + 4 * i, b);
        else digit_product<false, DIGIT_COLUMNS>(d[now][i / GROUPS_AT_ONCE], a[now] + 4 * i, b);
      }
      wgmma_commit();
      HB_UNROLL
      for (int m = 0; m < SUMS; m++) scale[now][m] = part.scale[m];
      if (S::ends_slot(u)) {  // its words are operands by now
        const u32 loaded = part.loaded();
        if (w.lane == 0) bar_arrive(w.empty(w.at.slot), (w.warp == 0 ? ARRIVALS - WORKERS + 1 : 1) + w.after(loaded));
        w.at.advance(1);
      }
    }
    if (u + 1 < S::ALL) {
      if (S::begins_slot(u + 1)) wait_for(w.full(w.at.slot), w.at.phase);
      part.load<K>(w, w.at.slot, u + 1);
    }
    if (u == 0) continue;
    float x[SUMS][SETS];
    HB_UNROLL
    for (int m = 0; m < SUMS; m++)
      if (m * GROUPS_AT_ONCE < 2 * S::chunks(u - 1))
        HB_UNROLL
        for (int s = 0; s < SETS; s++)
          x[m][s] = as_float(lds32(scales + ((S::atom(u - 1) * THIRDS * 4 + 2 * S::chunk(u - 1) + m * GROUPS_AT_ONCE) * ROWS + s * LANE_ROWS) * 4));
    if (u < S::ALL) wgmma_wait<1>(); else wgmma_wait<0>();
    HB_UNROLL
    for (int m = 0; m < SUMS; m++) {
      if (m * GROUPS_AT_ONCE >= 2 * S::chunks(u - 1)) continue;
      wgmma_settle(d[before][m]);
      const float up = as_float((scale[before][m] << 23) & 0x7f800000u), low = as_float((scale[before][m] << 15) & 0x7f800000u);
      HB_UNROLL
      for (int s = 0; s < SETS; s++) {
        const float* sums = d[before][m] + 4 * s;
        acc[s][0] += (sums[0] + sums[1] * DIGIT) * (up * x[m][s]);
        acc[s][1] += (sums[2] + sums[3] * DIGIT) * (low * x[m][s]);
      }
    }
  }
  HB_UNROLL
  for (int s = 0; s < SETS; s++) {
    if (LANE_ROWS == 4) {
      sts32(out + ((s * 4 + t) * 16 + g) * 4, as_bits(acc[s][0]));
      sts32(out + ((s * 4 + t) * 16 + g + 8) * 4, as_bits(acc[s][1]));
      continue;
    }
    const int mine = t / LANE_ROWS & 1;  // of the lanes with other groups of a row, even ones keep row g of the tile, odd ones g + 8
    float own = mine ? acc[s][1] : acc[s][0];
    own += shfl_xor(mine ? acc[s][0] : acc[s][1], LANE_ROWS);
    if (LANE_ROWS == 1) own += shfl_xor(own, 2);
    if (t < 2 * LANE_ROWS) sts32(out + (t % LANE_ROWS * 16 + g + 8 * mine) * 4, as_bits(own));
  }
}

// As in gemv.cuh; sums come back scaled. Places count from the first tile of the block's first quad, tiles from the block's first.
template <int FORMAT, int K, int WIDE, class Before, class Acquire, class After>
HB_DEV void gemv(Worker& w, const DigitOperand<K>& x, int tiles, Before before, Acquire acquire, After after) {
  static_assert(FORMAT == MXFP4, "digits multiply MXFP4");
  constexpr int SIZE = ROWS * 16, AT_ONCE = WORK_THREADS / SIZE, ROUNDS = (SUM_TILES + AT_ONCE - 1) / AT_ONCE;
  static_assert(WORK_THREADS % SIZE == 0 && SUM_TILES % QUAD == 0, "a thread sums one row of several tiles");
  const int row = w.thread / 16 % ROWS, m = w.thread % 16, skip = x.skip, places = tiles ? skip + tiles : 0;
  const bool first_of = m % WIDE == 0 && row < w.rows;
  Early early[ROUNDS];
  const auto look_ahead = [&](int first, int n) {
    HB_UNROLL
    for (int i = 0; i < ROUNDS; i++) {
      const int place = w.thread / SIZE + i * AT_ONCE, tile = first + place - skip;
      if (place < n && tile >= 0 && first_of) early[i] = before(tile, row, m);
    }
  };
  if (tiles) look_ahead(0, places < SUM_TILES ? places : SUM_TILES);
  acquire();
  w.sync();  // every warp's digits are there
  w.mark(1);
  HB_ROLLED
  for (int first = 0; first < places; first += SUM_TILES) {
    const int n = places - first < SUM_TILES ? places - first : SUM_TILES;
    if (first) look_ahead(first, n);
    u32 out = w.base + HB_AT(by_digits.sums) + ((w.buffer * SUM_TILES + w.warp % QUAD) * THIRDS + w.warp / QUAD) * SIZE * 4;
    HB_ROLLED
    for (int i = 0; i < n; i += QUAD, out += QUAD * THIRDS * SIZE * 4) multiply_quad<K>(w, out);
    w.mark(2);
    w.sync();
    if (first == 0) w.acquire();
    HB_UNROLL
    for (int i = 0; i < ROUNDS; i++) {
      if (i * WORK_THREADS + w.warp * 32 >= n * SIZE) continue;
      const int place = w.thread / SIZE + i * AT_ONCE, tile = first + place - skip;
      const float* r = w.sh.by_digits.sums[w.buffer][place < n ? place : 0][0] + row * 16 + m;
      float sum[WIDE];
      sum[0] = (r[0] + r[SIZE]) + r[2 * SIZE];
      HB_UNROLL
      for (int j = 1; j < WIDE; j++) sum[j] = shfl(sum[0], w.lane + j);  // neighbours' rows
      if (place < n && tile >= 0 && first_of) after(tile, row, m, sum, early[i]);
    }
    w.buffer ^= 1;
  }
}

// A quad into the ring: one copy a slot.
template <int K> HB_DEV void feed_quad(Feeder& f, const u8* quad) {
  using Q = Quad<K>;
  HB_ROLLED
  for (int slot = 0; slot < Q::SLOTS_EACH; slot++, quad += Q::SLOT_STEP) f.put(quad, QUAD * Q::bytes_in(slot));
}
// Its tiles from `first` to `last` alone, where a whole one has them: one copy an atom.
template <int K> HB_DEV void feed_part(Feeder& f, const u8* quad, int first, int last) {
  using Q = Quad<K>;
  HB_ROLLED
  for (int slot = 0; slot < Q::SLOTS_EACH; slot++) {
    f.open((last - first) * Q::bytes_in(slot));
    HB_ROLLED
    for (int i = 0; i < Q::IN_SLOT && slot * Q::IN_SLOT + i < Q::ATOMS; i++, quad += Q::ATOM_BYTES) {
      const int bytes = Q::tile_bytes(slot * Q::IN_SLOT + i);
      f.copy(i * Q::ATOM_BYTES + first * bytes, quad + first * bytes, (last - first) * bytes);
    }
    f.close();
  }
}
#else
template <int FORMAT, int K> using ExpertOperand = Operand<FORMAT, K>;
#define EXPERT_PHASE HB_PHASE
#endif
