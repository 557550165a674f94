// W x for up to eight rows of x, exact W4A16. Weights are the A operand of mma.m16n8k16, widened to bf16 in registers;
// activations are the B operand, each as a high and a low bf16 in two columns (together 16 bits of mantissa).
//
// The eight columns never idle: with one batch row, four groups of 32 k sit in four pairs of columns (zero elsewhere),
// so one accumulator serves four groups, and the scales of four groups are applied by one multiply per lane.
//
// All warps multiply a tile of 16 rows, each with its part of x in registers for the whole phase, and leave their sums in
// shared memory; after FLUSH tiles, or at the end, one thread per output adds the warps in order.
#pragma once
#include "decode/ring.cuh"

// What x is multiplied by on its way in and sums on their way out: see widen.cuh.
template <int FORMAT> HB_CONST_FN float scale_in() { return FORMAT == MXFP4 ? E2M1_SCALE_IN : 1.f; }
template <int FORMAT> HB_CONST_FN float scale_out() { return FORMAT == MXFP4 ? E2M1_SCALE_OUT : 1.f; }

// What a working warp carries from phase to phase, in one register: slot, phase of the ring, half of `red`.
typedef u32 State;

#define HB_AT(member) ((u32)(size_t)&((Shared*)0)->member)  // NVRTC has no offsetof; the ring is at 0

// One thread's clock into the trace: four of each phase at 4 * phase, five of the feeding warp at 24; then where and when.
HB_DEV void stamp(const Step& p, int block, int layer, int i) {
#ifdef HB_TRACE
  if (!p.trace) return;
  u64* t = p.trace + ((size_t)block * (LAYERS + 1) + layer) * 32;
  t[i] = clock_now();
  if (i == 0) { t[30] = multiprocessor(); t[31] = clock_global(); }
#endif
  (void)p; (void)block; (void)layer; (void)i;
}

HB_DEV int rows_of(const Step& p) { return ROWS == 1 ? 1 : p.rows; }
HB_DEV int share_of(int tiles, int block, int grid) { return tiles > block ? (tiles - block + grid - 1) / grid : 0; }  // strided

struct Worker {
  Shared& sh;
  const Step& p;
  u32 base;  // of shared memory
  int warp, lane, thread, block, grid;
  int rows;
  Cursor at;
  u32 buffer;
  u32 tag;  // of the layer
  int layer, phase;

  HB_DEV_MEMBER Worker(State s, int layer_, int phase_)
      : sh(*(Shared*)hb_shared()), p(sh.step), base(shared_base()), warp((int)((u32)hb_thread() / 32)), lane((int)((u32)hb_thread() % 32)),
        thread(hb_thread()), block(hb_block()), grid(hb_grid()), rows(rows_of(p)), at{(int)(s & 255u), s >> 8 & 1u},
        buffer(s >> 9 & 1u), tag(sh.epoch * (LAYERS + 1) + layer_ + 1), layer(layer_), phase(phase_) {
    HB_ASSUME(thread >= 0 && thread < WORK_THREADS);  // spares the rounding of signed quotients
    HB_ASSUME(lane >= 0 && lane < 32 && warp >= 0 && warp < WORKERS);
    HB_ASSUME(block >= 0 && grid > 0 && at.slot >= 0 && at.slot < SLOTS && rows <= ROWS);
    if (lane == 0) sh.layer_of[warp] = layer_;
    mark(0);
  }
  HB_DEV_MEMBER State state() const { return (u32)at.slot | at.phase << 8 | buffer << 9; }
  HB_DEV_MEMBER void mark(int i) const {  // 0 start, 1 x is here, 2 multiplied, 3 done
    if (thread == 0) stamp(p, block, layer, phase * 4 + i);
  }
  HB_DEV_MEMBER void sync() const { sync_some<1, WORK_THREADS>(); }
  // Behind a barrier that the warps reached with words of other blocks: what was written before these is seen from here on.
  HB_DEV_MEMBER void acquire() const {
    if (!ACQUIRE) return;
    if (thread == 0) fence_gpu();
    sync();
  }
  HB_DEV_MEMBER u32 full(int slot) const { return base + HB_AT(full) + slot * 8; }
  HB_DEV_MEMBER u32 empty(int slot) const { return base + HB_AT(empty) + slot * 8; }
  HB_DEV_MEMBER u32 ring(int slot) const { return base + slot * SLOT_BYTES; }
  // Zero, once `loaded` is there. An arrival can overtake loads of its own warp, and then the copy engine writes what is
  // still to be read; one that adds this to its count cannot.
  HB_DEV_MEMBER u32 after(u32 loaded) const { return loaded & (u32)block >> 20; }
};

// ---- where x comes from ---------------------------------------------------------------------------------------------
// load() and take() give a lane of a pair its four of eight consecutive values, as two neighbours (first, first + 1) and
// (second, second + 1); both lanes together read whole sectors. take() returns the squares it met.

struct FromPaired {  // written by one block each: the even lane has values 0..3, the odd lane 4..7
  static constexpr bool SQUARES = false;
  static constexpr int STEP = 2;  // from the first two values of a lane to the second two
  static constexpr u32 MARKS = PAIR_TAG;
  typedef u64x2 Raw;
  const u64* box;
  size_t stride;  // words of a row
  u32 tag;
  HB_DEV_MEMBER bool on(int) const { return true; }
  HB_DEV_MEMBER bool ready(int, int row, int k) const { return pair_has(box_load(box + row * stride + k / 2), tag); }
  HB_DEV_MEMBER Raw load(int, int row, int k, int odd) const { return box_load2(box + row * stride + k / 2 + odd * 2); }
  HB_DEV_MEMBER u32 missing(const Raw& r) const { return ((u32)r.x ^ tag) | ((u32)r.y ^ tag); }
  HB_DEV_MEMBER float take(const Raw& r, Parts& a, Parts& b) const {
    a = split(pair_first(r.x), pair_second(r.x));
    b = split(pair_first(r.y), pair_second(r.y));
    return 0.f;
  }
};

struct FromExpert {  // the hidden values of one expert of the list: rows that did not choose it have none
  static constexpr bool SQUARES = false;
  static constexpr int STEP = FromPaired::STEP;
  static constexpr u32 MARKS = FromPaired::MARKS;
  typedef FromPaired::Raw Raw;
  FromPaired all;    // [row][slot][k]
  int slot[SETS];    // of the expert, in this lane's row of each set; -1: not chosen
  HB_DEV_MEMBER FromExpert(const Worker& w, const u64* box, const Routing& routing, int index) : all{box, (size_t)INTER / 2, w.tag} {
    HB_UNROLL
    for (int s = 0; s < SETS; s++) {
      if (ROWS == 1) { slot[s] = index; continue; }
      const int row = s * LANE_ROWS + w.lane / 8 % LANE_ROWS;
      slot[s] = -1;
      HB_UNROLL
      for (int i = 0; i < TOP_K; i++) if (row < w.rows && routing.expert[row][i] == routing.list[index]) slot[s] = i;
    }
  }
  HB_DEV_MEMBER bool on(int set) const { return slot[set] >= 0; }
  HB_DEV_MEMBER bool ready(int set, int row, int k) const { return all.ready(set, row * TOP_K + slot[set], k); }
  HB_DEV_MEMBER Raw load(int set, int row, int k, int odd) const { return all.load(set, row * TOP_K + slot[set], k, odd); }
  HB_DEV_MEMBER u32 missing(const Raw& r) const { return all.missing(r); }
  HB_DEV_MEMBER float take(const Raw& r, Parts& a, Parts& b) const { return all.take(r, a, b); }
};

HB_DEV float bf16_at(const u16* p, size_t i) { return as_float((u32)p[i] << 16); }

// Norm weight times residual, a sum of ADDED contributions; the root of the squares comes last. A value is a word of its
// own here: the even lane has 0, 1, 4, 5, the odd lane 2, 3, 6, 7. None added: rows of the embedding, in the first layer.
template <int FORMAT, int ADDED> struct FromResidual {
  static constexpr bool FIRST = ADDED == 0;
  static constexpr bool SQUARES = true;
  static constexpr int STEP = 4;
  static constexpr u32 MARKS = (1u << COUNT) - 1;
  struct Raw { u64x2 a, b; u32 norm[2]; };
  const u64* box;      // summed words
  const u16* embed;
  const int* token;
  const u16* norm;
  float per_unit;
  HB_DEV_MEMBER bool on(int) const { return true; }
  HB_DEV_MEMBER const u64* at(int row, int k) const { return box + (size_t)row * HIDDEN + k; }
  HB_DEV_MEMBER bool ready(int, int row, int k) const { return FIRST || contributions(box_load(at(row, k))) == ADDED; }
  HB_DEV_MEMBER Raw load(int, int row, int k, int odd) const {
    Raw r = {};
    k += odd * 2;
    r.norm[0] = *(const u32*)(norm + k); r.norm[1] = *(const u32*)(norm + k + STEP);
    if (FIRST) {
      const u16* e = embed + (size_t)token[row] * HIDDEN + k;
      r.a.x = *(const u32*)e; r.b.x = *(const u32*)(e + STEP);
    } else { r.a = box_load2(at(row, k)); r.b = box_load2(at(row, k + STEP)); }
    return r;
  }
  HB_DEV_MEMBER u32 missing(const Raw& r) const {
    constexpr u32 all = ADDED;
    return FIRST ? 0u : ((u32)r.a.x ^ all) | ((u32)r.a.y ^ all) | ((u32)r.b.x ^ all) | ((u32)r.b.y ^ all);
  }
  HB_DEV_MEMBER float take(const Raw& r, Parts& a, Parts& b) const {
    float x[4] = {bf16_low((u32)r.a.x) * per_unit, bf16_high((u32)r.a.x) * per_unit, bf16_low((u32)r.b.x) * per_unit,
                  bf16_high((u32)r.b.x) * per_unit}, squares = 0.f;
    if (!FIRST) { x[0] = summed(r.a.x); x[1] = summed(r.a.y); x[2] = summed(r.b.x); x[3] = summed(r.b.y); }
    HB_UNROLL
    for (int i = 0; i < 4; i++) {
      squares += x[i] * x[i];
      x[i] *= (i & 1 ? bf16_high(r.norm[i / 2]) : bf16_low(r.norm[i / 2])) * scale_in<FORMAT>();
    }
    a = split(x[0], x[1]);
    b = split(x[2], x[3]);
    return squares;
  }
};

// ---- x into registers -----------------------------------------------------------------------------------------------
// b[set][chunk of this warp][2 step + register]. Lane (g, t): pair g / 2 of columns is (group, row), column g % 2 the
// high or the low part; with several groups at once a lane has values in its own group and zeros in the others.

template <int FORMAT, int K> struct Operand { u32 b[SETS][Tile<FORMAT, K>::MINE][8]; };

// `mine`: 1 for this lane's group of those at once, 0 for the others. Products, for they cost half of a choice.
template <int FORMAT, int K> HB_DEV void place_operand(Operand<FORMAT, K>& x, int s, int pass, const u32 (&mine)[GROUPS_AT_ONCE], const u32 (&r)[4]) {
  HB_UNROLL
  for (int j = 0; j < GROUPS_AT_ONCE; j++) {
    const int group = pass * GROUPS_AT_ONCE + j;
    if (group < 2 * Tile<FORMAT, K>::MINE)
      HB_UNROLL
      for (int i = 0; i < 4; i++) x.b[s][group / 2][(group & 1) * 4 + i] = GROUPS_AT_ONCE == 1 ? r[i] : r[i] * mine[j];
  }
}

// Where this lane's eight values of a pass begin, if it has any. Chunk n of the warp is number n % EACH of piece n / EACH.
template <int FORMAT, int K> HB_DEV bool find_values(const Worker& w, int set, int pass, int& row, int& k) {
  using T = Tile<FORMAT, K>;
  const int pair = w.lane / 8, group = pass * GROUPS_AT_ONCE + pair / LANE_ROWS, n = group >> 1;
  const int piece = T::PIECES == 1 ? 0 : n / T::EACH, chunk = w.warp * T::EACH + (T::PIECES == 1 ? n : n % T::EACH);
  row = set * LANE_ROWS + pair % LANE_ROWS;
  k = (piece * T::WIDTH + chunk) * 64 + (group & 1) * 32 + w.lane % 4 * 8;
  return row < w.rows && n < T::MINE && chunk < T::chunks_in(piece);
}

// HB_ONE_POLLER. One word in every K / 32 of the first row; the rest comes within the time that the others take to wake.
template <int K, class Source> HB_DEV void wait_as_a_block(Worker& w, const Source& source) {
  if (w.warp == 0) {
    Patience patience;
    HB_ROLLED
    while (warp_ballot(source.on(0) && !source.ready(0, 0, w.lane * (K / 32)))) patience.wait(0x312);
  }
  w.sync();
}

// Every warp fetches its own part of x: all of it at once, in the hope that it is there, which it is for a block that comes
// late. Blocks that come early look again, at all of it or (HB_PROBE) at a few words, and fetch the rest when those are there:
// that is one more trip to L2, but 132 blocks that look at everything all the time can keep the writers out.
template <int FORMAT, int K, class Source> HB_DEV void load_operand(Worker& w, Operand<FORMAT, K>& x, const Source& source) {
  using T = Tile<FORMAT, K>;
  constexpr int PASSES = (2 * T::MINE + GROUPS_AT_ONCE - 1) / GROUPS_AT_ONCE, ALL = SETS * PASSES, BATCH = ALL < 4 ? ALL : 4;
  const int odd = w.lane / 4 & 1;
  float squares[SETS] = {};
  u32 mine[GROUPS_AT_ONCE];
  HB_UNROLL
  for (int j = 0; j < GROUPS_AT_ONCE; j++) mine[j] = opaque(w.lane / 8 / LANE_ROWS == j);
  if (HB_ONE_POLLER) wait_as_a_block<K>(w, source);
  HB_UNROLL
  for (int first = 0; first < ALL; first += BATCH) {
    typename Source::Raw raw[BATCH] = {};
    Patience patience;
    HB_ROLLED
    for (;;) {
      u32 missing = 0;
      HB_UNROLL
      for (int n = 0; n < BATCH && first + n < ALL; n++) {
        const int s = (first + n) / PASSES;
        int row, k;
        if (find_values<FORMAT, K>(w, s, (first + n) % PASSES, row, k) && source.on(s)) raw[n] = source.load(s, row, k, odd);
      }
      HB_UNROLL
      for (int n = 0; n < BATCH && first + n < ALL; n++) {
        const int s = (first + n) / PASSES;
        int row, k;
        if (find_values<FORMAT, K>(w, s, (first + n) % PASSES, row, k) && source.on(s)) missing |= source.missing(raw[n]);
      }
      if (!warp_ballot(missing & Source::MARKS)) break;
      patience.wait(0x311);
      if (!HB_PROBE) continue;
      int row, k;
      if (w.lane % 8 == 0 && find_values<FORMAT, K>(w, 0, 0, row, k) && source.on(0))
        while (!source.ready(0, row, k)) patience.wait(0x310);
      sync_warp();
    }
    HB_UNROLL
    for (int n = 0; n < BATCH && first + n < ALL; n++) {
      const int s = (first + n) / PASSES, q = (first + n) % PASSES;
      int row, k;
      Parts a = {0, 0}, b = {0, 0};
      if (find_values<FORMAT, K>(w, s, q, row, k) && source.on(s)) squares[s] += source.take(raw[n], a, b);
      // the even lane of a pair gets the high parts of all eight values, the odd lane the low parts
      const u32 got0 = shfl_xor(odd ? a.high : a.low, 4), got1 = shfl_xor(odd ? b.high : b.low, 4);
      u32 r[4];
      if (Source::STEP == 2) {  // 0..3 and 4..7
        r[0] = odd ? got0 : a.high; r[1] = odd ? got1 : b.high; r[2] = odd ? a.low : got0; r[3] = odd ? b.low : got1;
      } else {                  // 0, 1, 4, 5 and 2, 3, 6, 7
        r[0] = odd ? got0 : a.high; r[1] = odd ? a.low : got0; r[2] = odd ? got1 : b.high; r[3] = odd ? b.low : got1;
      }
      place_operand(x, s, q, mine, r);
    }
  }
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

// ---- one tile -------------------------------------------------------------------------------------------------------

template <int FORMAT> using DecodeChunk = Chunk<FORMAT, HB_BY_PRODUCT>;
template <int FORMAT> HB_DEV void multiply_step(const DecodeChunk<FORMAT>& chunk, int step, float (&d)[4], u32 b0, u32 b1) {
  u32 a[4];
  chunk.operands(step, a);
  mma(d, a[0], a[1], a[2], a[3], b0, b1);
}

// Where in a chunk the scales of rows g and g + 8 for one of its two groups lie, together.
template <int FORMAT> HB_DEV u32 scale_at(int g, int group) { return FORMAT == MXFP4 ? 512 + g * 4 + group * 2 : 1024 + g * 8 + group * 4; }
template <int FORMAT> HB_DEV u32 load_scales(u32 p) { return FORMAT == MXFP4 ? lds16(p) : lds32(p); }
template <int FORMAT> HB_DEV void apply_scales(u32 s, float (&d)[4], float& a0, float& a1) {
  float f0 = 1.f, f1 = 1.f;
  if (FORMAT == MXFP4) { f0 = as_float((s << 23) & 0x7f800000u); f1 = as_float((s << 15) & 0x7f800000u); }
  if (FORMAT == Q8) { f0 = half_value(s & 0xffffu); f1 = half_value(s >> 16); }
  a0 += (d[0] + d[1]) * f0;
  a1 += (d[2] + d[3]) * f1;
  HB_UNROLL
  for (int i = 0; i < 4; i++) d[i] = 0.f;
}

// How a warp finds its part of a tile: worked out in front of the wait for x, where compilers would put it behind.
template <int FORMAT, int K> struct Way {
  using T = Tile<FORMAT, K>;
  static constexpr int SCALES = (2 * T::EACH + GROUPS_AT_ONCE - 1) / GROUPS_AT_ONCE, READERS = T::PER_SLOT / T::EACH;
  int slot;                  // its first one of a tile (of all where the tile comes in pieces)
  u32 words, place[SCALES];  // in slot 0: this lane's words of the warp's first chunk, its scales
  u32 arrivals;              // at a slot of its own

  HB_DEV_MEMBER explicit Way(const Worker& w) {
    const int first = w.warp * T::EACH, place_in = w.warp / READERS, after = T::SHARES - place_in * READERS;
    slot = T::OWN && w.warp < T::SHARES ? first / T::PER_SLOT : 0;
    const u32 base = w.base + first % T::PER_SLOT * T::CHUNK;
    words = opaque(base + w.lane * 16);
    arrivals = opaque((u32)(w.warp == place_in * READERS ? ARRIVALS + 1 - (after < READERS ? after : READERS) : 1));
    if (FORMAT != BF16)
      HB_UNROLL
      for (int i = 0; i < SCALES; i++) place[i] = opaque(base + scale_of(w, i, 0, T::CHUNKS - first));
  }
  // a piece begins where the one before it ended, in the columns of x as well
  static HB_DEV_MEMBER u32 scale_of(const Worker& w, int i, int piece, int left) {
    const int g = w.lane / 4, group = i * GROUPS_AT_ONCE + (w.lane % 4 / LANE_ROWS ^ (2 * piece & (GROUPS_AT_ONCE - 1))), c = group >> 1;
    const bool here = (2 * T::EACH % GROUPS_AT_ONCE == 0 && T::CHUNKS % T::EACH == 0) || (c < T::EACH && c < left);
    return here ? c * T::CHUNK + scale_at<FORMAT>(g, group & 1) : scale_at<FORMAT>(g, 0);
  }
};

// One tile of which `at` is this warp's slot; moves on to the next tile's. `out`: the shared address of this warp's
// [ROWS][16] sums. A warp whose share is not full multiplies what lies behind it with zeros: any bits widen to something
// finite, except scales, so those it takes from its first chunk.
template <int FORMAT, int K> HB_DEV void multiply_tile(const Worker& w, const Operand<FORMAT, K>& x, const Way<FORMAT, K>& way, Cursor& at, u32 out) {
  using T = Tile<FORMAT, K>;
  constexpr int SCALES = Way<FORMAT, K>::SCALES;
  constexpr bool BY_SUM = T::OWN && ROWS == 1;  // a slot is freed by the sum, which took every word
  const u32 own_slot = w.empty(at.slot);
  const int v = w.warp, g = w.lane / 4, t = w.lane % 4, mine = t / LANE_ROWS;
  float acc[SETS][2] = {}, d[SETS][4] = {};
  HB_UNROLL
  for (int piece = 0; piece < T::PIECES; piece++) {
    const int n = T::chunks_in(piece), left = n - v * T::EACH;  // chunks from this warp's first on
    const int slot = v * T::EACH / T::PER_SLOT, in_slot = v * T::EACH % T::PER_SLOT;
    u32 loaded = 0;
    if (!T::OWN)  // all of them, also those this warp takes nothing from, and frees all of them: see Tile
      HB_UNROLL
      for (int i = 0; i < T::slots_in(piece); i++) {
        const Cursor here = at.ahead(i);
        wait_bar(w.full(here.slot), here.phase, 0x300);
      }
    if (left > 0) {
      if (T::OWN) wait_bar(w.full(at.slot), at.phase, 0x301);
      const u32 from = (T::OWN ? at.slot : at.ahead(slot).slot) * SLOT_BYTES;
      DecodeChunk<FORMAT> chunk[T::EACH];
      u32 scales[SCALES];
      HB_UNROLL
      for (int c = 0; c < T::EACH; c++) { chunk[c].load(way.words + from + c * T::CHUNK, 0); loaded ^= chunk[c].loaded(); }
      if (FORMAT != BF16)
        HB_UNROLL
        for (int i = 0; i < SCALES; i++) {
          scales[i] = load_scales<FORMAT>(from + (piece ? w.base + in_slot * T::CHUNK + Way<FORMAT, K>::scale_of(w, i, piece, left) : way.place[i]));
          loaded ^= scales[i];
        }
      HB_UNROLL
      for (int c = 0; c < T::EACH; c++)
        HB_UNROLL
        for (int half = 0; half < 2; half++) {
          HB_UNROLL
          for (int s = 0; s < SETS; s++)
            HB_UNROLL
            for (int i = 2 * half; i < 2 * half + 2; i++) multiply_step(chunk[c], i, d[s], x.b[s][piece * T::EACH + c][2 * i], x.b[s][piece * T::EACH + c][2 * i + 1]);
          const int group = 2 * c + half;
          if (FORMAT != BF16 && (group % GROUPS_AT_ONCE == GROUPS_AT_ONCE - 1 || group == 2 * T::EACH - 1))
            HB_UNROLL
            for (int s = 0; s < SETS; s++) apply_scales<FORMAT>(scales[group / GROUPS_AT_ONCE], d[s], acc[s][0], acc[s][1]);
        }
      if (T::OWN && !BY_SUM && w.lane == 0) bar_arrive(w.empty(at.slot), way.arrivals + w.after(loaded));
    }
    if (!T::OWN && w.lane < T::slots_in(piece)) bar_arrive(w.empty(at.ahead(w.lane).slot), (v == 0 ? ARRIVALS - WORKERS + 1 : 1) + w.after(loaded));
    at.advance(T::slots_in(piece));
  }
  if (FORMAT == BF16)
    HB_UNROLL
    for (int s = 0; s < SETS; s++) apply_scales<FORMAT>(0, d[s], acc[s][0], acc[s][1]);
  HB_UNROLL
  for (int s = 0; s < SETS; s++) {
    float a0 = acc[s][0], a1 = acc[s][1];
    if (LANE_ROWS == 1) {  // four lanes hold four groups' sums: add them, keeping row g in even lanes, g + 8 in odd
      float own = t & 1 ? a1 : a0;
      own += shfl_xor(t & 1 ? a0 : a1, 1);
      own += shfl_xor(own, 2);
      if (BY_SUM && w.lane == 0 && w.warp < T::SHARES) bar_arrive(own_slot, way.arrivals + w.after(as_bits(own)));
      if (t < 2) sts32(out + (g + 8 * t) * 4, as_bits(own));
    } else if (LANE_ROWS == 2) {
      float own = mine ? a1 : a0;
      own += shfl_xor(mine ? a0 : a1, 2);
      sts32(out + ((t & 1) * 16 + g + 8 * mine) * 4, as_bits(own));
    } else {
      sts32(out + ((s * 4 + t) * 16 + g) * 4, as_bits(a0));
      sts32(out + ((s * 4 + t) * 16 + g + 8) * 4, as_bits(a1));
    }
  }
}

// ---- a phase's tiles ------------------------------------------------------------------------------------------------
// before(tile, row, m) runs ahead of the multiplications, the first time even of acquire(), which loads x: biases come
// from far away. after(tile, row, m, values, early) has the sums of WIDE neighbouring rows, m = WIDE * i, and what before()
// returned; a thread sums one row. Tiles are numbered from 0 within the block.

struct Early { u32 a = 0, b = 0; u64 x[2] = {0, 0}; };

template <int FORMAT, int K, int WIDE, class Before, class Acquire, class After>
HB_DEV void gemv(Worker& w, const Operand<FORMAT, K>& x, int tiles, Before before, Acquire acquire, After after) {
  using T = Tile<FORMAT, K>;
  constexpr int SIZE = WORKERS * ROWS * 16;  // floats of one tile in `red`
  static_assert(T::FLUSH * SIZE <= RED_TILES * WORKERS * 16 && T::FLUSH * ROWS * 16 <= WORK_THREADS && T::FLUSH >= 1, "flush");
  const int tile = w.thread / (ROWS * 16), row = w.thread / 16 % ROWS, m = w.thread % 16;
  const bool first_of = m % WIDE == 0 && row < w.rows;
  const Way<FORMAT, K> way(w);
  Early early;
  if (tile < tiles && tile < T::FLUSH && first_of) early = before(tile, row, m);
  acquire();
  w.mark(1);
  for (int first = 0; first < tiles; first += T::FLUSH) {
    const int n = tiles - first < T::FLUSH ? tiles - first : T::FLUSH;
    if (first && tile < n && first_of) early = before(first + tile, row, m);
    u32 out = w.base + HB_AT(red) + (w.buffer * (RED_TILES * WORKERS * 16) + w.warp * ROWS * 16) * 4;
    Cursor at = w.at.ahead(way.slot);
    HB_ROLLED
    for (int i = 0; i < n; i++, out += SIZE * 4) multiply_tile<FORMAT, K>(w, x, way, at, out);
    at.back(way.slot);
    w.at = at;
    w.mark(2);
    w.sync();
    if (first == 0) w.acquire();
    if (w.warp * 32 < n * ROWS * 16) {
      const float* r = w.sh.red[w.buffer] + (tile < n ? tile * SIZE + row * 16 + m : 0);
      float part[4] = {}, sum[WIDE];
      HB_UNROLL
      for (int i = 0; i < WORKERS; i++) part[i % 4] += r[i * ROWS * 16];
      sum[0] = ((part[0] + part[1]) + (part[2] + part[3])) * scale_out<FORMAT>();
      HB_UNROLL
      for (int j = 1; j < WIDE; j++) sum[j] = shfl(sum[0], w.lane + j);  // neighbours' rows
      if (tile < n && first_of) after(first + tile, row, m, sum, early);
    }
    w.buffer ^= 1;
  }
}
