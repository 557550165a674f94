// What becomes of an item's sums: bias and swiglu into the packed input of the next product, bias and residual into rows, or
// bias and rotation into queries and pages.
#pragma once
#include "prefill/grouped.cuh"

struct Consumer {
  const Product& p;
  Shared& sh;
  int group, warp, lane;  // warpgroup, warp in it, lane
  Place at;
  int turn;

  HB_DEV_MEMBER void release(int slot) const {  // to everyone who fills it
    if constexpr (PAIR == 1) { if (lane == 0) bar_arrive(&sh.empty[slot], 1); }
    else if (lane < PAIR) bar_arrive_in(lane, &sh.empty[slot]);
  }
  HB_DEV_MEMBER void pass() {  // an item with no rows for this group of warps
    for (int k = 0; k < p.chunks; k += KS) {
      wait_for(&sh.full[at.slot], at.phase);
      release(at.slot);
      at.next();
    }
  }
  // The first tile of 16 rows of the item that is this warp's, the next being APART from it.
  HB_DEV_MEMBER int tile() const {
    const int w = anew(warp);
    return ROPE ? group * 8 + (w >> 1) * 4 + (w & 1) : (group * 4 + w) * MT;
  }
};
constexpr int APART = ROPE ? 2 : 1;  // rows that are rotated together, 32 apart, go to one warp

// The biases a lane needs for MT tiles of 16 rows: of its rows g and g + 8; SWIGLU: of the gate and up rows around them.
template <int MT> struct Bias {
  float v[SWIGLU ? 4 * MT : 2 * MT];
  HB_DEV_MEMBER void load(const Product& p, const Item& it, int first, int lane);  // from memory (SYNC)
  HB_DEV_MEMBER void take(const Consumer& c);  // what ask_biases asked for
};

struct alignas(8) Pair { float x, y; };
struct alignas(16) Four { float v[4]; };

HB_DEV float bias_at(const Product& p, size_t i) {
  if (p.bias_float) return ((const float*)p.bias)[i];
  return as_float((u32)((const u16*)p.bias)[i] << 16);
}

template <int MT> HB_DEV_MEMBER void Bias<MT>::load(const Product& p, const Item& it, int first, int lane) {
  const int g = anew(lane) >> 2;
  const size_t row = (size_t)it.expert * p.m_tiles * 64 + first * 16;
  HB_UNROLL
  for (int i = 0; i < (SWIGLU ? 4 * MT : 2 * MT); i++) {
    const int at = SWIGLU ? (i >> 1) * 8 + (g & ~1) + (i & 1) : i * 8 + g;
    v[i] = p.bias ? bias_at(p, row + at) : 0.f;
  }
}

HB_DEV u8* biases(const Consumer& c) { return c.sh.staging[anew(c.group)] + STAGING + anew(c.warp) * BIASES; }

// Those of a warp's MT tiles into shared memory, while the product goes on: fetched at the end they would be waited for.
template <int MT> HB_DEV void ask_biases(const Consumer& c, const Item& it) {
  static_assert(MT * 64 <= BIASES, "as float");
  const Product& p = c.p;
  const int tile = c.tile(), each = p.bias_float ? 16 : 8, lane = anew(c.lane);  // words of a tile
  if (tile >= it.tiles * 4 || lane >= MT * each) return;
  const size_t row = ((size_t)it.expert * p.m_tiles + it.first) * 64 + (tile + lane / each * APART) * 16;
  u8* const to = biases(c) + lane * 4;
  if (p.bias) copy_word(to, (const u8*)p.bias + row * (p.bias_float ? 4 : 2) + lane % each * 4);
  else put32(to, 0);
}
template <int MT> HB_DEV_MEMBER void Bias<MT>::take(const Consumer& c) {
  const int g = anew(c.lane) >> 2;
  const u8* from = biases(c);
  copied_words();
  sync_warp();
  const bool wide = c.p.bias_float;
  HB_UNROLL
  for (int i = 0; i < (SWIGLU ? 4 * MT : 2 * MT); i++) {
    const int at = SWIGLU ? (i >> 1) * 8 + (g & ~1) + (i & 1) : i * 8 + g;  // of the warp's rows
    const u32 word = lds32(from + (wide ? at : at >> 1) * 4);
    v[i] = as_float(wide ? word : at & 1 ? word & 0xffff0000u : word << 16);
  }
}

// ---- what becomes of 64 rows x N columns in a warpgroup's registers -------------------------------------------------

// A row's result: the product with a power of two is exact, so one multiply-add rounds as the addition alone would.
HB_DEV float plus_bias(const Product& p, float sum, float bias) {
  return FORMAT == MXFP4 && !MX ? sum * p.sum_scale + bias : sum + bias;
}

HB_DEV float swiglu(const Product& p, float gate_in, float up_in) {
  const float gate = fminf(gate_in, p.limit), up = fminf(fmaxf(up_in, -p.limit), p.limit);
  return keep_broken((up + 1.f) * gate * reciprocal(1.f + power_of_two(gate * (p.alpha * -1.4426950408889634f))), gate_in, up_in);
}

HB_DEV void sync_group(int group) {
  if (group == 0) sync_some<1, 128>();
  else if (group == 1) sync_some<2, 128>();
  else if (group == 2) sync_some<3, 128>();
  else sync_some<4, 128>();
}

// Hidden values of rows g and g + 8 of a tile in one of columns 8 j + 2 t and its neighbour. Rows alternate gate, up: partners
// are four lanes apart. Even lanes take the even column of a pair, odd lanes the odd one.
template <int N, int MT> HB_DEV u32 hidden_pair(const Product& p, const float (&acc)[N / 2], const Bias<MT>& bias, int mt, int j, int odd) {
  float y[2];
  HB_UNROLL
  for (int h = 0; h < 2; h++) {
    const float a = acc[4 * j + 2 * h], b = acc[4 * j + 2 * h + 1];
    const float own = odd ? b : a, got = shfl_xor(odd ? a : b, 4);
    y[h] = swiglu(p, plus_bias(p, odd ? got : own, bias.v[4 * mt + 2 * h]), plus_bias(p, odd ? own : got, bias.v[4 * mt + 2 * h + 1]));
  }
  return bf16_pair(y[0], y[1]);
}

// A warp has MT consecutive tiles of 16 rows; `first` is its first. The 32 hidden values of 64 rows then meet in shared
// memory, 32 columns at a time, in tile16's order: word (t, i) of a group of 32 at place (i, t). Two buffers in turn: whoever
// fills one again has passed the barrier that all of its readers reached after reading.
template <int N, int MT> HB_DEV void store_hidden(const Consumer& c, const Item& it, int first, const float (&acc)[MT][N / 2], const Bias<MT>& bias) {
  constexpr int LINE = MT * 64 + 16, BUFFER = 32 * LINE;
  static_assert(2 * BUFFER <= STAGING, "two buffers");
  const Product& p = c.p;
  const int lane = anew(c.lane), g = lane >> 2, t = lane & 3, odd = g & 1, q = g >> 1, from = it.slot, valid = it.valid;
  const int place = MT == 2 ? (c.warp >> 1) * 64 + (c.warp & 1) * 8 : c.warp * 4;
  u8* const mine = c.sh.staging[c.group] + (2 * t + odd) * LINE + place + (q >> 1) * 16 + (q & 1) * 2;
  const int unit = MT == 2 ? lane & 7 : lane & 3, tile = first - c.warp * MT;  // the warpgroup's first
  u16* const there = p.packed + (size_t)(tile >> 3) * p.packed_slots * 64;
  sync_group(c.group);  // the item before
  HB_UNROLL
  for (int four = 0; four < (N + 31) / 32; four++) {
    HB_UNROLL
    for (int mt = 0; mt < MT; mt++)
      HB_UNROLL
      for (int k = 0; k < 4; k++) {
        const int j = four * 4 + k;
        if (j >= N / 8) continue;
        const u32 pair = hidden_pair<N, MT>(p, acc[mt], bias, mt, j, odd);
        u8* to = mine + (four & 1) * BUFFER + k * 8 * LINE + mt * 4;
        put16(to, pair);
        put16(to + 32, pair >> 16);
      }
    sync_group(c.group);
    HB_UNROLL
    for (int pass = 0; pass < MT; pass++) {
      const int in_four = MT == 2 ? pass * 16 + c.warp * 4 + (lane >> 3) : c.warp * 8 + (lane >> 2), column = four * 32 + in_four;
      if (column >= N || column >= valid) continue;
      const u32x4 w = lds128(c.sh.staging[c.group] + (four & 1) * BUFFER + in_four * LINE + unit * 16);
      const u32 words[4] = {w.x, w.y, w.z, w.w};
      const int slot = from + column;
      store_words<4>(there + (size_t)slot * 64 + ((MT == 2 ? unit : (tile & 4) + unit) ^ (slot & 7)) * 8, words);
    }
  }
}

// Rows of float: a warp's 16 MT rows of eight or sixteen columns at a time, through shared memory, so that whole lines are
// written. What is added is asked for AHEAD steps before it is needed, where registers allow.
template <int N, int MT> HB_DEV void store_rows(const Consumer& c, const Item& it, int first, const float (&acc)[MT][N / 2], const Bias<MT>& bias) {
  constexpr int LINE = MT * 64 + 16, BLOCKS = MT == 2 ? 1 : 2, COLUMNS = 8 * BLOCKS, BUFFER = COLUMNS * LINE, AHEAD = SHAPE == WIDE ? 2 : 0, KEPT = AHEAD ? AHEAD : 1;
  constexpr int STEPS = (N / 8 + BLOCKS - 1) / BLOCKS, ACROSS = MT * 4, DOWN = 32 / ACROSS;  // lanes along and across a column
  static_assert(MT * BUFFER * 4 <= STAGING, "a buffer for each warp, two where one warp alone does not need both barriers");
  const Product& p = c.p;
  const int lane = anew(c.lane), g = lane >> 2, t = lane & 3, unit = lane % ACROSS, valid = it.valid, stride = anew((int)p.out_stride);
  u8* const mine = c.sh.staging[c.group] + anew(c.warp) * (STAGING / 4);
  const size_t base = (size_t)it.slot * stride + first * 16 + unit * 4;
  Four more[KEPT][2];
  auto ask = [&](int step) {
    HB_UNROLL
    for (int pass = 0; pass < 2; pass++) {
      const int column = step * COLUMNS + pass * DOWN + lane / ACROSS;
      if (step < STEPS && p.residual && column < valid) more[step % KEPT][pass] = *(const Four*)(p.residual + base + (size_t)column * stride);
    }
  };
  HB_UNROLL
  for (int step = 0; step < AHEAD; step++) ask(step);
  HB_UNROLL
  for (int step = 0; step < STEPS; step++) {
    u8* const buffer = mine + (MT == 2 ? (step & 1) * BUFFER : 0);
    HB_UNROLL
    for (int block = 0; block < BLOCKS; block++)
      HB_UNROLL
      for (int i = 0; i < 2 * MT; i++)
        HB_UNROLL
        for (int e = 0; e < 2; e++) {
          const int j = step * BLOCKS + block;
          if (j < N / 8) put32(buffer + (block * 8 + 2 * t + e) * LINE + (8 * i + g) * 4, as_bits(plus_bias(p, acc[i / 2][4 * j + 2 * (i & 1) + e], bias.v[i])));
        }
    sync_warp();
    if (!AHEAD) ask(step);
    HB_UNROLL
    for (int pass = 0; pass < 2; pass++) {
      const int here = pass * DOWN + lane / ACROSS, column = step * COLUMNS + here;
      if (column >= N || column >= valid) continue;
      const u32x4 w = lds128(buffer + here * LINE + unit * 16);
      u32 words[4] = {w.x, w.y, w.z, w.w};
      if (p.residual)
        HB_UNROLL
        for (int i = 0; i < 4; i++) words[i] = as_bits(as_float(words[i]) + more[step % KEPT][pass].v[i]);
      store_words<4>(p.out + base + (size_t)column * stride, words);
    }
    if (AHEAD) ask(step + AHEAD);
    if (MT == 1) sync_warp();
  }
}

// Tiles `first` and `first` + 2 of a head: rows g and g + 8 of each, 32 apart. As above, neighbouring lanes split a pair of
// columns and four lanes exchange, so that each writes eight neighbouring values of one column.
template <int N, int MT> HB_DEV void store_rotated(const Consumer& c, const Item& it, int first, const float (&acc)[MT][N / 2], const Bias<MT>& bias) {
  const Product& p = c.p;
  const int lane = anew(c.lane), g = lane >> 2, t = lane & 3, odd = g & 1, q = g >> 1, head = first >> 2, d = (first & 3) * 16;
  const int from = it.slot, valid = it.valid;
  const bool rotate = head < p.heads + p.kv_heads;
  HB_UNROLL
  for (int four = 0; four < (N + 31) / 32; four++) {
    u32 word[2][2][4];  // [lower and upper 32][rows g and g + 8]
    HB_UNROLL
    for (int k = 0; k < 4; k++) {
      const int j = four * 4 + k;
      HB_UNROLL
      for (int h = 0; h < 2; h++) {
        word[0][h][k] = word[1][h][k] = 0;
        if (j >= N / 8) continue;
        float x[2][2];  // [lower and upper][column]
        HB_UNROLL
        for (int e = 0; e < 2; e++) {
          x[0][e] = plus_bias(p, acc[0][4 * j + 2 * h + e], bias.v[h]);
          x[1][e] = plus_bias(p, acc[1][4 * j + 2 * h + e], bias.v[2 + h]);
          if (rotate) {
            const int column = 8 * j + 2 * t + e, slot = from + (column < valid ? column : 0);
            const Pair a = *(const Pair*)(p.angles + ((size_t)slot * 32 + d + 8 * h + g) * 2);
            const float lower = x[0][e] * a.x - x[1][e] * a.y;
            x[1][e] = x[1][e] * a.x + x[0][e] * a.y;
            x[0][e] = lower;
          }
        }
        HB_UNROLL
        for (int half = 0; half < 2; half++) {
          const float own = odd ? x[half][1] : x[half][0], got = shfl_xor(odd ? x[half][0] : x[half][1], 4);
          word[half][h][k] = bf16_pair(odd ? got : own, odd ? own : got);
        }
      }
    }
    const int column = (four * 4 + q) * 8 + 2 * t + odd, slot = from + column;
    const bool here = column < N && column < valid;
    u16* to = p.q + ((size_t)slot * p.heads + head) * 64;
    if (here && head >= p.heads) {
      const int other = head - p.heads;
      to = p.pool + p.cells[slot] + (other < p.kv_heads ? (size_t)other * 4096 : p.value_offset + (size_t)(other - p.kv_heads) * 4096);
    }
    HB_UNROLL
    for (int half = 0; half < 2; half++)
      HB_UNROLL
      for (int h = 0; h < 2; h++) {
        transpose_four<8>(word[half][h], q);
        if (here) store_words<4>(to + half * 32 + d + h * 8, word[half][h]);
      }
  }
}

// ---- without staging ------------------------------------------------------------------------------------------------

// A warp has MT consecutive tiles of 16 rows, tile `first` and on. Four lanes hold the eight hidden values of a tile
// for four columns each; a transpose among them gives every lane the eight values of one column. They are words 4 t .. of
// a group of 32 values, and tile16 wants word (t, i) of a group at place (i, t): MT words to be stored side by side.
template <int N, int MT> HB_DEV void store_hidden_directly(const Consumer& c, const Item& it, int first, const float (&acc)[MT][N / 2], const Bias<MT>& bias) {
  const Product& p = c.p;
  const int g = c.lane >> 2, t = c.lane & 3, odd = g & 1, q = g >> 1, high = q >> 1, low = q & 1;
  HB_UNROLL
  for (int four = 0; four < (N + 31) / 32; four++) {
    u32 words[4][MT];
    HB_UNROLL
    for (int mt = 0; mt < MT; mt++) {
      u32 v[4] = {0, 0, 0, 0};
      HB_UNROLL
      for (int k = 0; k < 4; k++) {
        const int j = four * 4 + k;
        if (j >= N / 8) continue;
        v[k] = hidden_pair<N, MT>(p, acc[mt], bias, mt, j, odd);
      }
      const u32 k0 = high ? v[2] : v[0], k1 = high ? v[3] : v[1];
      const u32 r0 = shfl_xor(high ? v[0] : v[2], 16), r1 = shfl_xor(high ? v[1] : v[3], 16);
      const u32 own = low ? k1 : k0, far = low ? r1 : r0;
      const u32 got = shfl_xor(low ? k0 : k1, 8), got_far = shfl_xor(low ? r0 : r1, 8);
      const u32 x0 = low ? got : own, x1 = low ? own : got, y0 = low ? got_far : far, y1 = low ? far : got_far;
      const u32 w0 = high ? y0 : x0, w1 = high ? y1 : x1, w2 = high ? x0 : y0, w3 = high ? x1 : y1;
      words[0][mt] = permute(w0, w1, 0x5410);
      words[1][mt] = permute(w2, w3, 0x5410);
      words[2][mt] = permute(w0, w1, 0x7632);
      words[3][mt] = permute(w2, w3, 0x7632);
    }
    const int column = (four * 4 + q) * 8 + 2 * t + odd;
    if (column < N && column < it.valid) {
      const int slot = it.slot + column;
      u16* row = p.packed + ((size_t)(first >> 3) * p.packed_slots + slot) * 64;
      HB_UNROLL
      for (int i = 0; i < 4; i++) store_words<MT>(row + ((((first & 4) + i) ^ (slot & 7)) * 8 + (first & 3) * 2), words[i]);
    }
  }
}

template <int N, int MT> HB_DEV void store_rows_directly(const Consumer& c, const Item& it, int first, const float (&acc)[MT][N / 2], const Bias<MT>& bias) {
  const Product& p = c.p;
  const int g = c.lane >> 2, t = c.lane & 3, row = first * 16 + g;
  const size_t base = (size_t)(it.slot + 2 * t) * p.out_stride + row;
  float* out = p.out + base;
  const float* residual = p.residual ? p.residual + base : nullptr;
  HB_UNROLL
  for (int j = 0; j < N / 8; j++)
    HB_UNROLL
    for (int e = 0; e < 2; e++) {
      if (8 * j + 2 * t + e >= it.valid) continue;
      const size_t at = (size_t)(8 * j + e) * p.out_stride;
      HB_UNROLL
      for (int i = 0; i < 2 * MT; i++) {
        float v = plus_bias(p, acc[i / 2][4 * j + 2 * (i & 1) + e], bias.v[i]);
        if (residual) v += residual[at + 8 * i];
        out[at + 8 * i] = v;
      }
    }
}

template <int N, int MT> HB_DEV void store(const Consumer& c, const Item& it, int first, const float (&acc)[MT][N / 2], const Bias<MT>& bias) {
  if constexpr (SYNC && SWIGLU) store_hidden_directly<N, MT>(c, it, first, acc, bias);
  else if constexpr (SYNC) store_rows_directly<N, MT>(c, it, first, acc, bias);
  else if constexpr (SWIGLU) store_hidden<N, MT>(c, it, first, acc, bias);
  else if constexpr (ROPE) store_rotated<N, MT>(c, it, first, acc, bias);
  else store_rows<N, MT>(c, it, first, acc, bias);
}
