// W x for up to eight rows of x, exact W4A16. Weights are the A operand of mma.m16n8k16, widened to bf16 in registers;
// activations are the B operand, each as a high and a low bf16 in two columns (together 16 bits of mantissa).
//
// The eight columns never idle: with one batch row, four groups of 32 k sit in four pairs of columns (zero elsewhere),
// so one accumulator serves four groups, and the scales of four groups are applied by one multiply per lane.
//
// A tile is 16 rows. Warp w multiplies chunk w of each piece, with its part of x in registers for the whole phase, and
// leaves 16 sums in shared memory; after FLUSH tiles, or at the end, one thread per output adds the warps in order.
#pragma once
#include "ring.cuh"

// MXFP4 widens to value * 2^-126, so x comes in times 2^100 and the sum goes out times 2^26: nothing leaves the range.
template <int FORMAT> HB_CONST_FN float scale_in() { return FORMAT == MXFP4 ? 1.2676506002282294e30f : 1.f; }
template <int FORMAT> HB_CONST_FN float scale_out() { return FORMAT == MXFP4 ? 67108864.f : 1.f; }

// What a working warp carries from phase to phase, in one register: slot, phase of the ring, half of `red`.
typedef u32 State;

struct Worker {
  Shared& sh;
  const Step& p;
  int warp, lane, thread, block, grid;
  int rows;
  Cursor at;
  u32 buffer;
  u32 tag;  // of the layer

  HB_DEV_MEMBER Worker(State s, int layer)
      : sh(*(Shared*)hb_shared()), p(sh.step), warp(hb_thread() / 32), lane(hb_thread() % 32), thread(hb_thread()),
        block(hb_block()), grid(hb_grid()), rows(p.rows), at{(int)(s & 255u), s >> 8 & 1u}, buffer(s >> 9 & 1u), tag(sh.epoch * (LAYERS + 1) + layer + 1) {}
  HB_DEV_MEMBER State state() const { return (u32)at.slot | at.phase << 8 | buffer << 9; }
  HB_DEV_MEMBER void sync() const { sync_some<1, WORK_THREADS>(); }
  HB_DEV_MEMBER int share(int tiles) const { return tiles > block ? (tiles - block + grid - 1) / grid : 0; }  // strided
};

// ---- where x comes from: four consecutive values of a row, as split floats ------------------------------------------

struct FromTagged {  // split floats, written by one block each
  struct Raw { u64x2 a, b; };
  const u64* box;
  size_t stride;
  u32 tag;
  u32* failure;
  u32 where;
  HB_DEV_MEMBER bool on(int) const { return true; }
  HB_DEV_MEMBER const u64* at(int row, int k) const { return box + row * stride + k; }
  HB_DEV_MEMBER Raw load(int row, int k) const { return {box_load2(at(row, k)), box_load2(at(row, k) + 2)}; }
  HB_DEV_MEMBER void take(Raw r, int row, int k, int, u32 (&v)[4]) {
    Patience patience;
    while (!(has(r.a.x, tag) && has(r.a.y, tag) && has(r.b.x, tag) && has(r.b.y, tag))) {
      patience.wait(failure, where);
      r = load(row, k);
    }
    v[0] = payload(r.a.x); v[1] = payload(r.a.y); v[2] = payload(r.b.x); v[3] = payload(r.b.y);
  }
};

struct FromExpert : FromTagged {  // the hidden values of one expert: rows that did not choose it have none
  const Routing* routing;
  int expert;
  HB_DEV_MEMBER int slot(int row) const {
    int s = -1;
    HB_UNROLL
    for (int i = 0; i < TOP_K; i++) if (routing->expert[row][i] == expert) s = i;
    return s;
  }
  HB_DEV_MEMBER bool on(int row) const { return slot(row) >= 0; }
  HB_DEV_MEMBER const u64* at(int row, int k) const { return box + (size_t)(row * TOP_K + slot(row)) * INTER + k; }
  HB_DEV_MEMBER Raw load(int row, int k) const { return {box_load2(at(row, k)), box_load2(at(row, k) + 2)}; }
  HB_DEV_MEMBER void take(Raw r, int row, int k, int, u32 (&v)[4]) {
    Patience patience;
    while (!(has(r.a.x, tag) && has(r.a.y, tag) && has(r.b.x, tag) && has(r.b.y, tag))) {
      patience.wait(failure, where);
      r = load(row, k);
    }
    v[0] = payload(r.a.x); v[1] = payload(r.a.y); v[2] = payload(r.b.x); v[3] = payload(r.b.y);
  }
};

HB_DEV float bf16_at(const u16* p, int i) { return as_float((u32)p[i] << 16); }

template <int FORMAT> struct FromResidual {  // norm weight times residual; squares are summed on the way, the root comes last
  struct Raw { u64x2 a, b; u64 norm; };
  const u64* box;      // summed words, or null in the first layer
  const u16* embed;    // rows of the embedding then
  const int* token;
  const u16* norm;
  u32* failure;
  float ssq[SETS];
  HB_DEV_MEMBER bool on(int) const { return true; }
  HB_DEV_MEMBER const u64* at(int row, int k) const { return box + (size_t)row * HIDDEN + k; }
  HB_DEV_MEMBER Raw load(int row, int k) const {
    Raw r = {};
    r.norm = *(const u64*)(norm + k);
    if (box) { r.a = box_load2(at(row, k)); r.b = box_load2(at(row, k) + 2); }
    else r.a.x = *(const u64*)(embed + (size_t)token[row] * HIDDEN + k);
    return r;
  }
  HB_DEV_MEMBER void take(Raw r, int row, int k, int set, u32 (&v)[4]) {
    float x[4];
    if (box) {
      Patience patience;
      constexpr u32 all = TOP_K + 1;
      while (!(contributions(r.a.x) == all && contributions(r.a.y) == all && contributions(r.b.x) == all && contributions(r.b.y) == all)) {
        patience.wait(failure, 0x200);
        r.a = box_load2(at(row, k)); r.b = box_load2(at(row, k) + 2);
      }
      x[0] = summed(r.a.x); x[1] = summed(r.a.y); x[2] = summed(r.b.x); x[3] = summed(r.b.y);
    } else {
      u32 a = (u32)r.a.x, b = (u32)(r.a.x >> 32);
      x[0] = bf16_low(a); x[1] = bf16_high(a); x[2] = bf16_low(b); x[3] = bf16_high(b);
    }
    u32 a = (u32)r.norm, b = (u32)(r.norm >> 32);
    float w[4] = {bf16_low(a), bf16_high(a), bf16_low(b), bf16_high(b)};
    HB_UNROLL
    for (int i = 0; i < 4; i++) { ssq[set] += x[i] * x[i]; v[i] = split(x[i] * w[i] * scale_in<FORMAT>()); }
  }
};

// ---- x into registers -----------------------------------------------------------------------------------------------

template <int FORMAT, int K> struct Operand { u32 b[SETS][Tile<FORMAT, K>::PIECES][8]; };

template <int FORMAT, int K, class Source>
HB_DEV void load_operand(const Worker& w, Operand<FORMAT, K>& x, Source& source) {
  using T = Tile<FORMAT, K>;
  constexpr int PASSES = (2 * T::PIECES + GROUPS_AT_ONCE - 1) / GROUPS_AT_ONCE;
  const int g = w.lane / 4, t = w.lane % 4, low = g & 1, pair = g >> 1, mine = pair / LANE_ROWS;
  auto place = [&](int set, int pass, int& row, int& k) {  // this lane's four values, if it has any
    row = set * LANE_ROWS + pair % LANE_ROWS;
    int group = pass * GROUPS_AT_ONCE + mine, piece = group >> 1;
    k = (piece * T::WIDTH + w.warp) * 64 + (group & 1) * 32 + t * 8 + low * 4;
    return row < w.rows && piece < T::PIECES && w.warp < T::chunks_in(piece) && source.on(row);
  };
  constexpr int ALL = SETS * PASSES, BATCH = ALL < 4 ? ALL : 4;  // loads in flight before the first is looked at
  HB_UNROLL
  for (int first = 0; first < ALL; first += BATCH) {
    typename Source::Raw raw[BATCH] = {};  // written in any case: a register set under a condition lives through all phases
    HB_UNROLL
    for (int n = 0; n < BATCH && first + n < ALL; n++) {
      int row, k;
      if (place((first + n) / PASSES, (first + n) % PASSES, row, k)) raw[n] = source.load(row, k);
    }
    HB_UNROLL
    for (int n = 0; n < BATCH && first + n < ALL; n++) {
      const int s = (first + n) / PASSES, q = (first + n) % PASSES;
      int row, k;
      u32 v[4] = {0, 0, 0, 0};
      if (place(s, q, row, k)) source.take(raw[n], row, k, s, v);
      // the even lane of a pair keeps the high parts of all eight values, the odd lane the low parts
      u32 high01 = permute(v[0], v[1], 0x7632), high23 = permute(v[2], v[3], 0x7632);
      u32 low01 = permute(v[0], v[1], 0x5410), low23 = permute(v[2], v[3], 0x5410);
      u32 got0 = shfl_xor(low ? high01 : low01, 4), got1 = shfl_xor(low ? high23 : low23, 4);
      u32 r[4] = {low ? got0 : high01, low ? got1 : high23, low ? low01 : got0, low ? low23 : got1};
      HB_UNROLL
      for (int j = 0; j < GROUPS_AT_ONCE; j++) {
        const int group = q * GROUPS_AT_ONCE + j;
        if (group < 2 * T::PIECES)
          HB_UNROLL
          for (int i = 0; i < 4; i++) x.b[s][group / 2][(group & 1) * 4 + i] = j == mine ? r[i] : 0u;
      }
    }
  }
}

// ---- one tile -------------------------------------------------------------------------------------------------------

template <int FORMAT> struct Chunk;  // a warp's 16 x 64 weights in registers: the A operands of four steps
template <> struct Chunk<MXFP4> {
  u32x4 w;
  HB_DEV_MEMBER void load(const u8* p, int lane) { w = lds128(p + lane * 16); }
  HB_DEV_MEMBER void step(int i, float (&d)[4], u32 b0, u32 b1) const {
    const u32 v = i == 0 ? w.x : i == 1 ? w.y : i == 2 ? w.z : w.w, m = 0x81c081c0u;
    mma(d, v & m, rotate_right(v, 6) & m, rotate_right(v, 3) & m, ((v & 0x001b001bu) * 0x1084u) & m, b0, b1);
  }
};
template <> struct Chunk<Q8> {
  u32x4 w[2];
  HB_DEV_MEMBER void load(const u8* p, int lane) { w[0] = lds128(p + lane * 16); w[1] = lds128(p + 512 + lane * 16); }
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
  HB_DEV_MEMBER void load(const u8* p, int lane) {
    HB_UNROLL
    for (int i = 0; i < 4; i++) w[i] = lds128(p + i * 512 + lane * 16);
  }
  HB_DEV_MEMBER void step(int i, float (&d)[4], u32 b0, u32 b1) const { mma(d, w[i].x, w[i].y, w[i].z, w[i].w, b0, b1); }
};

// Scales of rows g and g + 8 for this lane's group (0 or 1 of the chunk).
template <int FORMAT> HB_DEV u32 load_scales(const u8* chunk, int g, int group) {
  if (FORMAT == MXFP4) return lds16(chunk + 512 + g * 4 + group * 2);
  if (FORMAT == Q8) return lds32(chunk + 1024 + g * 8 + group * 4);
  return 0;
}
template <int FORMAT> HB_DEV void apply_scales(u32 s, const float (&d)[4], float& a0, float& a1) {
  float f0 = 1.f, f1 = 1.f;
  if (FORMAT == MXFP4) { f0 = as_float((s << 23) & 0x7f800000u); f1 = as_float((s << 15) & 0x7f800000u); }
  if (FORMAT == Q8) { f0 = half_value(s & 0xffffu); f1 = half_value(s >> 16); }
  a0 += (d[0] + d[1]) * f0;
  a1 += (d[2] + d[3]) * f1;
}

template <int FORMAT, int K>
HB_DEV void multiply_tile(Worker& w, const Operand<FORMAT, K>& x, float (&out)[ROWS][16]) {
  using T = Tile<FORMAT, K>;
  const int g = w.lane / 4, t = w.lane % 4, mine = t / LANE_ROWS;
  float acc[SETS][2] = {}, d[SETS][4] = {};
  Chunk<FORMAT> chunk[2] = {};
  constexpr u32 one = FORMAT == Q8 ? 0x3c003c00u : 0x7f7fu;
  u32 scales[3] = {one, one, one};  // of three passes in flight; finite where there is no chunk
  int held[2] = {0, 0};
  auto fetch = [&](int piece, int before) {
    if (w.warp >= T::chunks_in(piece)) { chunk[piece & 1] = {}; return; }
    const int in_slot = w.warp % T::PER_SLOT, s = w.warp / T::PER_SLOT;
    Cursor c = w.at.ahead(before + s);
    wait_bar(&w.sh.full[c.slot], c.phase, w.p.failure, 0x300);
    const u8* base = w.sh.ring[c.slot] + in_slot * T::CHUNK;
    chunk[piece & 1].load(base, w.lane);
    if (GROUPS_AT_ONCE == 4) { if ((mine >> 1) == (piece & 1)) scales[(piece / 2) % 3] = load_scales<FORMAT>(base, g, mine & 1); }
    else if (GROUPS_AT_ONCE == 2) scales[piece % 3] = load_scales<FORMAT>(base, g, mine);
    else { scales[(2 * piece) % 3] = load_scales<FORMAT>(base, g, 0); scales[(2 * piece + 1) % 3] = load_scales<FORMAT>(base, g, 1); }
    held[piece & 1] = c.slot;
  };
  // after the multiplications of a piece, which no lane starts before all have their weights
  auto release = [&](int piece) {
    if (w.warp >= T::chunks_in(piece)) return;
    const int in_slot = w.warp % T::PER_SLOT, s = w.warp / T::PER_SLOT;
    const int left = T::chunks_in(piece) - s * T::PER_SLOT, n = left < T::PER_SLOT ? left : T::PER_SLOT;
    if (w.lane == 0) bar_arrive(&w.sh.empty[held[piece & 1]], (ARRIVALS / T::PER_SLOT) * (in_slot == n - 1 ? 1 + T::PER_SLOT - n : 1));
  };
  if (w.warp < T::WIDTH) {
    int before = 0;
    fetch(0, before);
    HB_UNROLL
    for (int piece = 0; piece < T::PIECES; piece++) {
      before += T::slots_in(piece);
      // GROUPS_AT_ONCE == 1 uses the scales of this piece before the next may be fetched into the same place
      if (GROUPS_AT_ONCE > 1 && piece + 1 < T::PIECES) fetch(piece + 1, before);
      HB_UNROLL
      for (int half = 0; half < 2; half++) {
        HB_UNROLL
        for (int s = 0; s < SETS; s++)
          HB_UNROLL
          for (int i = 2 * half; i < 2 * half + 2; i++) chunk[piece & 1].step(i, d[s], x.b[s][piece][2 * i], x.b[s][piece][2 * i + 1]);
        const int group = 2 * piece + half;
        if (group % GROUPS_AT_ONCE == GROUPS_AT_ONCE - 1 || group == 2 * T::PIECES - 1)
          HB_UNROLL
          for (int s = 0; s < SETS; s++) {
            apply_scales<FORMAT>(scales[(group / GROUPS_AT_ONCE) % 3], d[s], acc[s][0], acc[s][1]);
            d[s][0] = d[s][1] = d[s][2] = d[s][3] = 0.f;
          }
      }
      release(piece);
      if (GROUPS_AT_ONCE == 1 && piece + 1 < T::PIECES) fetch(piece + 1, before);
    }
    HB_UNROLL
    for (int s = 0; s < SETS; s++) {
      float a0 = acc[s][0], a1 = acc[s][1];
      if (LANE_ROWS == 1) {  // four lanes hold four groups' sums: add them, keeping row g in even lanes, g + 8 in odd
        float own = t & 1 ? a1 : a0;
        own += shfl_xor(t & 1 ? a0 : a1, 1);
        own += shfl_xor(own, 2);
        if (t < 2) out[0][g + 8 * t] = own;
      } else if (LANE_ROWS == 2) {
        float own = mine ? a1 : a0;
        own += shfl_xor(mine ? a0 : a1, 2);
        out[t & 1][g + 8 * mine] = own;
      } else {
        out[s * 4 + t][g] = a0;
        out[s * 4 + t][g + 8] = a1;
      }
    }
  }
  int total = 0;
  HB_UNROLL
  for (int piece = 0; piece < T::PIECES; piece++) total += T::slots_in(piece);
  w.at.advance(total);
}

struct Early { u32 a = 0; u64 x = 0; };

// ---- a phase's tiles ------------------------------------------------------------------------------------------------
// before(tile, row, m) runs ahead of the multiplications, the first time even of acquire(), which loads x: biases come
// from far away. after(tile, row, m, value, value, early) has the sum and what before() returned. PAIRS gives m = 0..7 and the sums of rows 2m and 2m + 1. each(first, count) runs on all threads after
// every flush. Tiles are numbered from 0 within the block.

template <int FORMAT, int K, bool PAIRS, class Before, class Acquire, class After, class Each>
HB_DEV void gemv(Worker& w, const Operand<FORMAT, K>& x, int tiles, Before before, Acquire acquire, After after, Each each) {
  using T = Tile<FORMAT, K>;
  constexpr int M = PAIRS ? 8 : 16;
  const int tile = w.thread / (ROWS * M), row = w.thread / M % ROWS, m = w.thread % M;
  Early early;
  if (tile < tiles && tile < FLUSH && row < w.rows) early = before(tile, row, m);
  acquire();
  for (int first = 0; first < tiles; first += FLUSH) {
    const int n = tiles - first < FLUSH ? tiles - first : FLUSH;
    const bool mine = tile < n && row < w.rows;
    if (first && mine) early = before(first + tile, row, m);
    for (int i = 0; i < n; i++) multiply_tile<FORMAT, K>(w, x, w.sh.red[w.buffer][i][w.warp]);
    w.sync();
    if (mine) {
      float sum0 = 0.f, sum1 = 0.f;
      HB_UNROLL
      for (int i = 0; i < T::WIDTH; i++) {
        const float* r = w.sh.red[w.buffer][tile][i][row];
        if (PAIRS) { sum0 += r[2 * m]; sum1 += r[2 * m + 1]; } else sum0 += r[m];
      }
      after(first + tile, row, m, sum0 * scale_out<FORMAT>(), sum1 * scale_out<FORMAT>(), early);
    }
    w.buffer ^= 1;
    each(first, n);
  }
}
struct Nothing { HB_DEV_MEMBER void operator()(int, int) const {} };
