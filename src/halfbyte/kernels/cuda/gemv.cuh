// W x for up to eight rows of x, exact W4A16. Weights are the A operand of mma.m16n8k16, widened to bf16 in registers;
// activations are the B operand, each as a high and a low bf16 in two columns (together 16 bits of mantissa).
//
// The eight columns never idle: with one batch row, four groups of 32 k sit in four pairs of columns (zero elsewhere),
// so one accumulator serves four groups, and the scales of four groups are applied by one multiply per lane.
//
// All warps multiply a tile of 16 rows, each with its part of x in registers for the whole phase, and leave their sums in
// shared memory; after FLUSH tiles, or at the end, one thread per output adds the warps in order.
#pragma once
#include "ring.cuh"

// MXFP4 widens to value * 2^-126, so x comes in times 2^100 and the sum goes out times 2^26: nothing leaves the range.
template <int FORMAT> HB_CONST_FN float scale_in() { return FORMAT == MXFP4 ? 1.2676506002282294e30f : 1.f; }
template <int FORMAT> HB_CONST_FN float scale_out() { return FORMAT == MXFP4 ? 67108864.f : 1.f; }

// What a working warp carries from phase to phase, in one register: slot, phase of the ring, half of `red`.
typedef u32 State;

#define HB_AT(member) ((u32)(size_t)&((Shared*)0)->member)  // NVRTC has no offsetof; the ring is at 0

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
#ifdef HB_WIDE_ROTATE
  u32 k6 = opaque(1u << 26), k3 = opaque(1u << 29);
#endif

  HB_DEV_MEMBER Worker(State s, int layer_, int phase_)
      : sh(*(Shared*)hb_shared()), p(sh.step), base(shared_base()), warp(hb_thread() / 32), lane(hb_thread() % 32),
        thread(hb_thread()), block(hb_block()), grid(hb_grid()), rows(p.rows), at{(int)(s & 255u), s >> 8 & 1u},
        buffer(s >> 9 & 1u), tag(sh.epoch * (LAYERS + 1) + layer_ + 1), layer(layer_), phase(phase_) { mark(0); }
  HB_DEV_MEMBER State state() const { return (u32)at.slot | at.phase << 8 | buffer << 9; }
  HB_DEV_MEMBER void mark(int i) const {  // 0 start, 1 x is here, 2 multiplied, 3 done
#ifdef HB_TRACE
    if (thread != 0 || !p.trace) return;
    u64* t = p.trace + ((size_t)block * (LAYERS + 1) + layer) * 32;
    t[phase * 4 + i] = clock_now();
    if (phase == 0 && i == 0) t[31] = clock_global();
#endif
    (void)i;
  }
  HB_DEV_MEMBER void sync() const { sync_some<1, WORK_THREADS>(); }
  HB_DEV_MEMBER int share(int tiles) const { return tiles > block ? (tiles - block + grid - 1) / grid : 0; }  // strided
  HB_DEV_MEMBER u32 full(int slot) const { return base + HB_AT(full) + slot * 8; }
  HB_DEV_MEMBER u32 empty(int slot) const { return base + HB_AT(empty) + slot * 8; }
  HB_DEV_MEMBER u32 ring(int slot) const { return base + slot * SLOT_BYTES; }
};

// ---- where x comes from: four consecutive values of a row, as split floats ------------------------------------------

struct FromTagged {  // split floats, written by one block each
  static constexpr bool SQUARES = false;
  struct Raw { u64x2 a, b; };
  const u64* box;
  size_t stride;
  u32 tag, where;
  HB_DEV_MEMBER bool on(int) const { return true; }
  HB_DEV_MEMBER bool ready(int row, int k) const { return has(box_load(box + row * stride + k), tag); }
  HB_DEV_MEMBER Raw load(int row, int k) const {
    const u64* p = box + row * stride + k;
    return {box_load2(p), box_load2(p + 2)};
  }
  HB_DEV_MEMBER float take(Raw r, int row, int k, u32 (&v)[4]) const {
    Patience patience;
    while (!(has(r.a.x, tag) && has(r.a.y, tag) && has(r.b.x, tag) && has(r.b.y, tag))) {
      patience.wait(where);
      r = load(row, k);
    }
    v[0] = payload(r.a.x); v[1] = payload(r.a.y); v[2] = payload(r.b.x); v[3] = payload(r.b.y);
    return 0.f;
  }
};

struct FromExpert {  // the hidden values of one expert: rows that did not choose it have none
  static constexpr bool SQUARES = false;
  typedef FromTagged::Raw Raw;
  FromTagged all;    // [row][slot][k]
  const Routing* routing;
  int expert;
  HB_DEV_MEMBER int slot(int row) const {
    int s = -1;
    HB_UNROLL
    for (int i = 0; i < TOP_K; i++) if (routing->expert[row][i] == expert) s = i;
    return s;
  }
  HB_DEV_MEMBER bool on(int row) const { return slot(row) >= 0; }
  HB_DEV_MEMBER bool ready(int row, int k) const { return all.ready(row * TOP_K + slot(row), k); }
  HB_DEV_MEMBER Raw load(int row, int k) const { return all.load(row * TOP_K + slot(row), k); }
  HB_DEV_MEMBER float take(Raw r, int row, int k, u32 (&v)[4]) const { return all.take(r, row * TOP_K + slot(row), k, v); }
};

HB_DEV float bf16_at(const u16* p, int i) { return as_float((u32)p[i] << 16); }

template <int FORMAT> struct FromResidual {  // norm weight times residual; take() returns the squares: the root comes last
  static constexpr bool SQUARES = true;
  struct Raw { u64x2 a, b; u64 norm; };
  const u64* box;      // summed words, or null in the first layer
  const u16* embed;    // rows of the embedding then
  const int* token;
  const u16* norm;
  HB_DEV_MEMBER bool on(int) const { return true; }
  HB_DEV_MEMBER const u64* at(int row, int k) const { return box + (size_t)row * HIDDEN + k; }
  HB_DEV_MEMBER bool ready(int row, int k) const { return !box || contributions(box_load(at(row, k))) == TOP_K + 1; }
  HB_DEV_MEMBER Raw load(int row, int k) const {
    Raw r = {};
    r.norm = *(const u64*)(norm + k);
    if (box) { r.a = box_load2(at(row, k)); r.b = box_load2(at(row, k) + 2); }
    else r.a.x = *(const u64*)(embed + (size_t)token[row] * HIDDEN + k);
    return r;
  }
  HB_DEV_MEMBER float take(Raw r, int row, int k, u32 (&v)[4]) const {
    float x[4];
    if (box) {
      Patience patience;
      constexpr u32 all = TOP_K + 1;
      while (!(contributions(r.a.x) == all && contributions(r.a.y) == all && contributions(r.b.x) == all && contributions(r.b.y) == all)) {
        patience.wait(0x200);
        r.a = box_load2(at(row, k)); r.b = box_load2(at(row, k) + 2);
      }
      x[0] = summed(r.a.x); x[1] = summed(r.a.y); x[2] = summed(r.b.x); x[3] = summed(r.b.y);
    } else {
      u32 a = (u32)r.a.x, b = (u32)(r.a.x >> 32);
      x[0] = bf16_low(a); x[1] = bf16_high(a); x[2] = bf16_low(b); x[3] = bf16_high(b);
    }
    u32 a = (u32)r.norm, b = (u32)(r.norm >> 32);
    float w[4] = {bf16_low(a), bf16_high(a), bf16_low(b), bf16_high(b)}, squares = 0.f;
    HB_UNROLL
    for (int i = 0; i < 4; i++) { squares += x[i] * x[i]; v[i] = split(x[i] * w[i] * scale_in<FORMAT>()); }
    return squares;
  }
};

// ---- x into registers -----------------------------------------------------------------------------------------------
// b[set][chunk of this warp][2 step + register]. Lane (g, t): pair g / 2 of columns is (group, row), column g % 2 the
// high or the low part; with several groups at once a lane has values in its own group and zeros in the others.

template <int FORMAT, int K> struct Operand { u32 b[SETS][Tile<FORMAT, K>::MINE][8]; };

template <int FORMAT, int K> HB_DEV void place_operand(Operand<FORMAT, K>& x, int s, int pass, int mine, const u32 (&r)[4]) {
  HB_UNROLL
  for (int j = 0; j < GROUPS_AT_ONCE; j++) {
    const int group = pass * GROUPS_AT_ONCE + j;
    if (group < 2 * Tile<FORMAT, K>::MINE)
      HB_UNROLL
      for (int i = 0; i < 4; i++) x.b[s][group / 2][(group & 1) * 4 + i] = j == mine ? r[i] : 0u;
  }
}

// Where this lane's eight values of a pass begin, if it has any. Chunk n of the warp is number n % EACH of piece n / EACH.
template <int FORMAT, int K> HB_DEV bool find_values(const Worker& w, int set, int pass, int& row, int& k) {
  using T = Tile<FORMAT, K>;
  const int pair = w.lane / 8, group = pass * GROUPS_AT_ONCE + pair / LANE_ROWS, n = group >> 1;
  const int piece = n / T::EACH, chunk = w.warp * T::EACH + n % T::EACH;
  row = set * LANE_ROWS + pair % LANE_ROWS;
  k = (piece * T::WIDTH + chunk) * 64 + (group & 1) * 32 + w.lane % 4 * 8;
  return row < w.rows && piece < T::PIECES && chunk < T::chunks_in(piece);
}

// Every warp fetches its own part of x. All blocks wait for the same words, so they wait by looking at a few of them only,
// and fetch the rest when those are there: 132 blocks that look at everything all the time keep the writers out of L2.
template <int FORMAT, int K, class Source> HB_DEV void load_operand(Worker& w, Operand<FORMAT, K>& x, const Source& source) {
  using T = Tile<FORMAT, K>;
  constexpr int PASSES = (2 * T::MINE + GROUPS_AT_ONCE - 1) / GROUPS_AT_ONCE, ALL = SETS * PASSES, BATCH = ALL < 4 ? ALL : 4;
  const int low = w.lane / 4 & 1;
  float squares[SETS] = {};
  if (w.lane % 8 == 0) {
    int row, k;
    if (find_values<FORMAT, K>(w, 0, 0, row, k) && source.on(row)) {
      Patience patience;
      while (!source.ready(row, k)) patience.wait(0x310);
    }
  }
  sync_warp();
  HB_UNROLL
  for (int first = 0; first < ALL; first += BATCH) {
    typename Source::Raw raw[BATCH] = {};
    HB_UNROLL
    for (int n = 0; n < BATCH && first + n < ALL; n++) {
      int row, k;
      if (find_values<FORMAT, K>(w, (first + n) / PASSES, (first + n) % PASSES, row, k) && source.on(row)) raw[n] = source.load(row, k + low * 4);
    }
    HB_UNROLL
    for (int n = 0; n < BATCH && first + n < ALL; n++) {
      const int s = (first + n) / PASSES, q = (first + n) % PASSES;
      int row, k;
      u32 v[4] = {0, 0, 0, 0};
      if (find_values<FORMAT, K>(w, s, q, row, k) && source.on(row)) squares[s] += source.take(raw[n], row, k + low * 4, v);
      // the even lane of a pair keeps the high parts of all eight values, the odd lane the low parts
      u32 high01 = permute(v[0], v[1], 0x7632), high23 = permute(v[2], v[3], 0x7632);
      u32 low01 = permute(v[0], v[1], 0x5410), low23 = permute(v[2], v[3], 0x5410);
      u32 got0 = shfl_xor(low ? high01 : low01, 4), got1 = shfl_xor(low ? high23 : low23, 4);
      const u32 r[4] = {low ? got0 : high01, low ? got1 : high23, low ? low01 : got0, low ? low23 : got1};
      place_operand(x, s, q, w.lane / 8 / LANE_ROWS, r);
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

template <int FORMAT> struct Chunk;  // a warp's 16 x 64 weights in registers: the A operands of four steps
template <> struct Chunk<MXFP4> {
  u32x4 w;
  HB_DEV_MEMBER void load(u32 p, int lane) { w = lds128(p + lane * 16); }
  HB_DEV_MEMBER void step(int i, float (&d)[4], u32 b0, u32 b1) const {
    const u32 v = i == 0 ? w.x : i == 1 ? w.y : i == 2 ? w.z : w.w, m = 0x81c081c0u;
#ifdef HB_WIDE_ROTATE  // rotations as products, on the other pipe
    const u64 r6 = (u64)v * k6, r3 = (u64)v * k3;
    mma(d, v & m, ((u32)r6 | (u32)(r6 >> 32)) & m, ((u32)r3 | (u32)(r3 >> 32)) & m, ((v & 0x001b001bu) * 0x1084u) & m, b0, b1);
#else
    mma(d, v & m, rotate_right(v, 6) & m, rotate_right(v, 3) & m, ((v & 0x001b001bu) * 0x1084u) & m, b0, b1);
#endif
  }
#ifdef HB_WIDE_ROTATE
  u32 k6, k3;
#endif
};
template <> struct Chunk<Q8> {
  u32x4 w[2];
  HB_DEV_MEMBER void load(u32 p, int lane) { w[0] = lds128(p + lane * 16); w[1] = lds128(p + 512 + lane * 16); }
  // int8 to bf16: low seven bits as the mantissa of 128..255, minus 128, or minus 256 where the sign bit is set
  static HB_DEV_MEMBER u32 widen(u32 v) { return bf16_sub((v & 0x007f007fu) | 0x43004300u, (v & 0x00800080u) | 0x43004300u); }
  HB_DEV_MEMBER void step(int i, float (&d)[4], u32 b0, u32 b1) const {
    const u32x4& q = w[i / 2];
    const u32 a = i & 1 ? q.z : q.x, b = i & 1 ? q.w : q.y;
    mma(d, widen(a), widen(a >> 8), widen(b), widen(b >> 8), b0, b1);
  }
};
template <> struct Chunk<BF16> {
  u32x4 w[4];
  HB_DEV_MEMBER void load(u32 p, int lane) {
    HB_UNROLL
    for (int i = 0; i < 4; i++) w[i] = lds128(p + i * 512 + lane * 16);
  }
  HB_DEV_MEMBER void step(int i, float (&d)[4], u32 b0, u32 b1) const { mma(d, w[i].x, w[i].y, w[i].z, w[i].w, b0, b1); }
};

// Scales of rows g and g + 8 for this lane's group (0 or 1 of the chunk).
template <int FORMAT> HB_DEV u32 load_scales(u32 chunk, int g, int group) {
  if (FORMAT == MXFP4) return lds16(chunk + 512 + g * 4 + group * 2);
  if (FORMAT == Q8) return lds32(chunk + 1024 + g * 8 + group * 4);
  return 0;
}
template <int FORMAT> HB_DEV void apply_scales(u32 s, float (&d)[2][4], float& a0, float& a1) {
  float f0 = 1.f, f1 = 1.f;
  if (FORMAT == MXFP4) { f0 = as_float((s << 23) & 0x7f800000u); f1 = as_float((s << 15) & 0x7f800000u); }
  if (FORMAT == Q8) { f0 = half_value(s & 0xffffu); f1 = half_value(s >> 16); }
  a0 += ((d[0][0] + d[0][1]) + (d[1][0] + d[1][1])) * f0;
  a1 += ((d[0][2] + d[0][3]) + (d[1][2] + d[1][3])) * f1;
  HB_UNROLL
  for (int i = 0; i < 8; i++) d[i / 4][i % 4] = 0.f;
}

// `at` is where the tile begins in the ring; `out` the shared address of this warp's [ROWS][16] sums.
template <int FORMAT, int K> HB_DEV void multiply_tile(const Worker& w, const Operand<FORMAT, K>& x, Cursor at, u32 out) {
  using T = Tile<FORMAT, K>;
  constexpr int UNIT = ARRIVALS / T::PER_SLOT;
  constexpr u32 one = FORMAT == Q8 ? 0x3c003c00u : 0x7f7fu;
  const int v = w.warp, g = w.lane / 4, t = w.lane % 4, mine = t / LANE_ROWS;
  float acc[SETS][2] = {}, d[SETS][2][4] = {};
  HB_UNROLL
  for (int piece = 0; piece < T::PIECES; piece++) {
    const int n = T::chunks_in(piece), left = n - v * T::EACH;  // chunks from this warp's first on
    const int slot = v * T::EACH / T::PER_SLOT, in_slot = v * T::EACH % T::PER_SLOT;
    const Cursor mine_at = at.ahead(slot);
    if (!T::OWN)  // all of them, also those this warp takes nothing from, and frees all of them: see Tile
      HB_UNROLL
      for (int i = 0; i < T::slots_in(piece); i++) {
        const Cursor here = at.ahead(i);
        wait_bar(w.full(here.slot), here.phase, 0x300);
      }
    if (left > 0) {
      if (T::OWN) wait_bar(w.full(mine_at.slot), mine_at.phase, 0x301);
      const u32 base = w.ring(mine_at.slot) + in_slot * T::CHUNK;
      Chunk<FORMAT> chunk[T::EACH] = {};
      u32 scales[2 * T::EACH];  // of the passes
      HB_UNROLL
      for (int i = 0; i < 2 * T::EACH; i++) scales[i] = one;  // finite where there is no chunk
      HB_UNROLL
      for (int c = 0; c < T::EACH; c++) {
        if (T::CHUNKS % T::EACH && c >= left) continue;
        const u32 from = base + c * T::CHUNK;
        chunk[c].load(from, w.lane);
        if (FORMAT == BF16) continue;
        if (GROUPS_AT_ONCE == 4) { if ((mine >> 1) == (c & 1)) scales[c / 2] = load_scales<FORMAT>(from, g, mine & 1); }
        else if (GROUPS_AT_ONCE == 2) scales[c] = load_scales<FORMAT>(from, g, mine);
        else { scales[2 * c] = load_scales<FORMAT>(from, g, 0); scales[2 * c + 1] = load_scales<FORMAT>(from, g, 1); }
      }
      HB_UNROLL
      for (int c = 0; c < T::EACH; c++)
        HB_UNROLL
        for (int half = 0; half < 2; half++) {
          HB_UNROLL
          for (int s = 0; s < SETS; s++)
            HB_UNROLL
            for (int i = 2 * half; i < 2 * half + 2; i++) chunk[c].step(i, d[s][i & 1], x.b[s][piece * T::EACH + c][2 * i], x.b[s][piece * T::EACH + c][2 * i + 1]);
          const int group = 2 * c + half;
          if (FORMAT != BF16 && (group % GROUPS_AT_ONCE == GROUPS_AT_ONCE - 1 || group == 2 * T::EACH - 1))
            HB_UNROLL
            for (int s = 0; s < SETS; s++) apply_scales<FORMAT>(scales[group / GROUPS_AT_ONCE], d[s], acc[s][0], acc[s][1]);
        }
      // no lane is past its multiplications before all have their weights
      const int mine_now = left < T::EACH ? left : T::EACH, in = n - slot * T::PER_SLOT < T::PER_SLOT ? n - slot * T::PER_SLOT : T::PER_SLOT;
      if (T::OWN && w.lane == 0) bar_arrive(w.empty(mine_at.slot), in_slot + mine_now == in ? ARRIVALS - UNIT * in_slot : UNIT * mine_now);
    }
    if (!T::OWN && w.lane < T::slots_in(piece)) bar_arrive(w.empty(at.ahead(w.lane).slot), v == 0 ? ARRIVALS - WORKERS + 1 : 1);
    at.advance(T::slots_in(piece));
  }
  if (FORMAT == BF16)
    HB_UNROLL
    for (int s = 0; s < SETS; s++) apply_scales<FORMAT>(one, d[s], acc[s][0], acc[s][1]);
  HB_UNROLL
  for (int s = 0; s < SETS; s++) {
    float a0 = acc[s][0], a1 = acc[s][1];
    if (LANE_ROWS == 1) {  // four lanes hold four groups' sums: add them, keeping row g in even lanes, g + 8 in odd
      float own = t & 1 ? a1 : a0;
      own += shfl_xor(t & 1 ? a0 : a1, 1);
      own += shfl_xor(own, 2);
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
// from far away. after(tile, row, m, value, value, early) has the sum and what before() returned. PAIRS gives m = 0..7
// and the sums of rows 2m and 2m + 1. each(first, count) runs on all threads after every flush. Tiles are numbered from
// 0 within the block.

struct Early { u32 a = 0; u64 x = 0; };

template <int FORMAT, int K, bool PAIRS, class Before, class Acquire, class After, class Each>
HB_DEV void gemv(Worker& w, const Operand<FORMAT, K>& x, int tiles, Before before, Acquire acquire, After after, Each each) {
  using T = Tile<FORMAT, K>;
  constexpr int M = PAIRS ? 8 : 16, SIZE = WORKERS * ROWS * 16;  // floats of one tile in `red`
  static_assert(T::FLUSH * SIZE <= 16 * WORKERS * 16 && T::FLUSH * ROWS * 16 <= WORK_THREADS && T::FLUSH >= 1, "flush");
  const int tile = w.thread / (ROWS * M), row = w.thread / M % ROWS, m = w.thread % M;
  Early early;
  if (tile < tiles && tile < T::FLUSH && row < w.rows) early = before(tile, row, m);
  acquire();
  w.mark(1);
  for (int first = 0; first < tiles; first += T::FLUSH) {
    const int n = tiles - first < T::FLUSH ? tiles - first : T::FLUSH;
    const bool mine = tile < n && row < w.rows;
    if (first && mine) early = before(first + tile, row, m);
    u32 out = w.base + HB_AT(red) + (w.buffer * (16 * WORKERS * 16) + w.warp * ROWS * 16) * 4;
    for (int i = 0; i < n; i++, out += SIZE * 4) {
      multiply_tile<FORMAT, K>(w, x, w.at, out);
      w.at.advance_far(T::slots());
    }
    w.mark(2);
    w.sync();
    if (mine) {
      const float* r = w.sh.red[w.buffer] + tile * SIZE + row * 16;
      float sum0 = 0.f, sum1 = 0.f;
      HB_UNROLL
      for (int i = 0; i < WORKERS; i++) {
        if (PAIRS) { sum0 += r[i * ROWS * 16 + 2 * m]; sum1 += r[i * ROWS * 16 + 2 * m + 1]; } else sum0 += r[i * ROWS * 16 + m];
      }
      after(first + tile, row, m, sum0 * scale_out<FORMAT>(), sum1 * scale_out<FORMAT>(), early);
    }
    w.buffer ^= 1;
    each(first, n);
  }
}
struct Nothing { HB_DEV_MEMBER void operator()(int, int) const {} };
