// Sampling in few launches over the logits. `draw_note`: a row's highest logit, one pass, many blocks to a row.
// `draw_race`: an exponential race among its tokens, likewise. `draw_edges`, for rows with top-k, top-p or min-p only: the lowest scaled logit that may be drawn, by a
// histogram over the distance from the highest and a bisection inside the one bin that holds the edge; no sort. Sums are
// of whole numbers, so that neither the order of threads nor a neighbour's row can change an edge or a token.
#include "device/instructions.cuh"

#ifdef HB_EMULATE
HB_DEV u32 shared_add(u32* p, u32 v) { const u32 old = *p; *p += v; return old; }
HB_DEV void shared_max(u32* p, u32 v) { *p = std::max(*p, v); }
HB_DEV void global_add(u32* p, u32 v) { *p += v; }
HB_DEV u32 global_load(const u32* p) { return *p; }
HB_DEV float log_exact(float v) { return std::log(v); }
HB_DEV float log1p_exact(float v) { return std::log1p(v); }
HB_DEV float exp_exact(float v) { return std::exp(v); }
HB_DEV double exp_double(double v) { return std::exp(v); }
HB_DEV u32 round_u32(float v) { return (u32)std::llrint((double)v); }
#define __grid_constant__
#define HB_SOME
#else
#define HB_SOME _Pragma("unroll 4")
HB_DEV u32 shared_add(u32* p, u32 v) { return atomicAdd(p, v); }
HB_DEV void shared_max(u32* p, u32 v) { atomicMax(p, v); }
HB_DEV void global_add(u32* p, u32 v) { asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
HB_DEV u32 global_load(const u32* p) { u32 v; asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
HB_DEV float log_exact(float v) { return logf(v); }
HB_DEV float log1p_exact(float v) { return log1pf(v); }
HB_DEV float exp_exact(float v) { return expf(v); }
HB_DEV double exp_double(double v) { return exp(v); }
HB_DEV u32 round_u32(float v) { return __float2uint_rn(v); }
#endif

constexpr int RACE_THREADS = 256, EDGE_THREADS = 1024;
constexpr int BINS = 2048, HELD = 8192;      // bins of 1 / 64; candidates kept in shared memory
constexpr float PER_UNIT = 64.f;
#define HB_INFINITY as_float(0x7f800000u)
constexpr int MASS_BITS = 28, HALF_BITS = 14;  // a mass within its bin in whole numbers, added up as two halves

struct Draw {             // mirrored in draw.py
  const float* logits;    // [rows][stride]
  const float* settings;  // [rows][4]: temperature, top_k, top_p, min_p
  const u64* keys;        // [rows]
  float* edges;           // [rows]
  u64* best;              // [rows], zero between launches
  u32* tickets;           // [rows], zero between launches
  u32* bins;              // [rows][3][BINS], zero between launches
  u32* results;           // [rows][2]: token, bits of the highest logit
  i64 stride;
  int vocab, parts, edge_parts, filtered;
};

HB_DEV u32 ordered(float v) { const u32 b = as_bits(v); return b & 0x80000000u ? ~b : b | 0x80000000u; }
HB_DEV float from_ordered(u32 k) { return as_float(k & 0x80000000u ? k & 0x7fffffffu : ~k); }

// log of an exponential variate, fixed by key and token: splitmix64, of which the upper half decides.
HB_DEV float log_exponential(u64 key, int token) {
  u64 z = key + (u64)(token + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ z >> 27) * 0x94D049BB133111EBull;
  z ^= z >> 31;
  const float u = ((float)(u32)(z >> 32) + 0.5f) * 2.3283064365386963e-10f;
  return log_exact(-log1p_exact(-u));
}

struct Part { int row, from, to; };
HB_DEV Part part_of(const Draw& d) {
  const int each = (d.vocab + d.parts - 1) / d.parts, part = hb_block() % d.parts, from = part * each;
  return {hb_block() / d.parts, from, from + each < d.vocab ? from + each : d.vocab};
}

// The highest of all threads of all blocks of a row, in thread 0 of the block that comes last; 0 in every other.
HB_DEV u64 highest_of_row(const Draw& d, int row, u64 best) {
  const u32 high = (u32)(best >> 32), top = warp_max(high), low = warp_max(high == top ? (u32)best : 0u);
  u64* warps = (u64*)hb_shared();
  if (hb_thread() % 32 == 0) warps[hb_thread() / 32] = (u64)top << 32 | low;
  sync_all();
  if (hb_thread()) return 0;
  for (int w = 0; w < RACE_THREADS / 32; w++) best = warps[w] > best ? warps[w] : best;
  box_max(d.best + row, best);
  fence_gpu();
  if (counter_add(d.tickets + row) != (u32)d.parts - 1) return 0;
  best = box_load(d.best + row);
  d.best[row] = 0;
  d.tickets[row] = 0;
  return best;
}

// A value and its token in one word, to be compared as one: NaN above all, and of equals the lower token.
HB_DEV u64 entry_of(float v, int t) { return (u64)(v == v ? ordered(v) : 0xffffffffu) << 32 | (0xffffffffu - (u32)t); }
HB_DEV u32 token_of(u64 entry) { return 0xffffffffu - (u32)entry; }

extern "C" __global__ void __launch_bounds__(RACE_THREADS) draw_note(const __grid_constant__ Draw d) {
  const Part p = part_of(d);
  const float* logits = d.logits + p.row * d.stride;
  u64 best = 0;
  HB_SOME
  for (int t = p.from + hb_thread(); t < p.to; t += RACE_THREADS) {
    const u64 mine = entry_of(logits[t], t);
    best = mine > best ? mine : best;
  }
  best = highest_of_row(d, p.row, best);
  if (best) { d.results[p.row * 2] = token_of(best); d.results[p.row * 2 + 1] = as_bits(from_ordered((u32)(best >> 32))); }
}

extern "C" __global__ void __launch_bounds__(RACE_THREADS) draw_race(const __grid_constant__ Draw d) {
  const Part p = part_of(d);
  const float temperature = d.settings[p.row * 4];
  if (!(temperature > 0.f)) return;  // greedy: the result is there already
  const float edge = d.filtered ? d.edges[p.row] : -HB_INFINITY;
  const u64 key = d.keys[p.row];
  const float* logits = d.logits + p.row * d.stride;
  u64 best = 0;
  HB_SOME
  for (int t = p.from + hb_thread(); t < p.to; t += RACE_THREADS) {
    const float x = logits[t] / temperature;
    const u64 mine = x < edge ? 0 : entry_of(x - log_exponential(key, t), t);
    best = mine > best ? mine : best;
  }
  best = highest_of_row(d, p.row, best);
  if (best) d.results[p.row * 2] = token_of(best);
}

struct Sums { u32 count, high, low; };  // of tokens; of their masses, in two halves

struct Room {
  double mass_above[BINS];
  u32 count[BINS], high[BINS], low[BINS];  // `high` becomes the tokens above
  u32 held[HELD];
  double warp_mass[32];
  u32 warp_count[32];
  double whole;
  Sums total[3];
  u32 found[2], taken, last;
};

HB_DEV double shfl(double v, int lane) {
  union { double d; u32 u[2]; } b;
  b.d = v;
  b.u[0] = shfl(b.u[0], lane);
  b.u[1] = shfl(b.u[1], lane);
  return b.d;
}

struct Row {
  const float* logits;
  float temperature, top;  // top: the highest scaled logit
  int vocab;
  // Scaled logits from `from` to `to`, every thread its own, and whether there was one: all threads come equally often.
  // Loads run ahead, since few blocks share a row.
  template <class F> HB_DEV_MEMBER void each(int from, int to, F f) const {
    constexpr int AHEAD = 8;
    for (int base = from; base < to; base += AHEAD * EDGE_THREADS) {
      float v[AHEAD];
      HB_UNROLL
      for (int i = 0; i < AHEAD; i++) { const int t = base + i * EDGE_THREADS + hb_thread(); v[i] = t < to ? logits[t] : 0.f; }
      HB_UNROLL
      for (int i = 0; i < AHEAD; i++) f(v[i] / temperature, base + i * EDGE_THREADS + hb_thread() < to);
    }
  }
  HB_DEV_MEMBER int bin(float x) const { const float d = (top - x) * PER_UNIT; return d < (float)(BINS - 1) ? (int)d : BINS - 1; }
  // What a token weighs beside the top of its bin.
  HB_DEV_MEMBER u32 mass(float x, int b) const { return round_u32(exp_exact((float)b / PER_UNIT - (top - x)) * (float)(1 << MASS_BITS)); }
};

HB_DEV double weight_of(int b) { return exp_double(-(double)b / (double)PER_UNIT) / (double)(1 << MASS_BITS); }
HB_DEV double join(u32 high, u32 low) { return (double)high * (1 << HALF_BITS) + (double)low; }

// The sum over the block, in every thread. Three totals take turns, so one barrier a sum is enough.
HB_DEV Sums sum_of_block(Sums s, Room& room, int turn) {
  for (int m = 16; m; m >>= 1) { s.count += shfl_xor(s.count, m); s.high += shfl_xor(s.high, m); s.low += shfl_xor(s.low, m); }
  Sums& total = room.total[turn % 3];
  if (hb_thread() % 32 == 0 && s.count) { shared_add(&total.count, s.count); shared_add(&total.high, s.high); shared_add(&total.low, s.low); }
  sync_all();
  const Sums found = total;
  if (hb_thread() == 0) room.total[(turn + 2) % 3] = {0, 0, 0};
  return found;
}

// What lies above every bin. A thread has two of them.
HB_DEV void add_up(Room& room) {
  static_assert(BINS == 2 * EDGE_THREADS && EDGE_THREADS == 32 * 32, "two bins a thread, a lane for each warp");
  const int thread = hb_thread(), warp = thread / 32, lane = thread % 32, b = 2 * thread;
  const double mass[2] = {join(room.high[b], room.low[b]) * weight_of(b), join(room.high[b + 1], room.low[b + 1]) * weight_of(b + 1)};
  const u32 count[2] = {room.count[b], room.count[b + 1]};
  double m = mass[0] + mass[1];
  u32 c = count[0] + count[1];
  for (int d = 1; d < 32; d *= 2) {
    const double more = shfl(m, lane < d ? lane : lane - d);
    const u32 others = shfl(c, lane < d ? lane : lane - d);
    if (lane >= d) { m += more; c += others; }
  }
  if (lane == 31) { room.warp_mass[warp] = m; room.warp_count[warp] = c; }
  sync_all();
  double before = 0.;
  u32 tokens = 0;
  for (int w = 0; w < warp; w++) { before += room.warp_mass[w]; tokens += room.warp_count[w]; }
  if (thread == EDGE_THREADS - 1) room.whole = before + m;
  before += m - mass[0] - mass[1];
  tokens += c - count[0] - count[1];
  room.mass_above[b] = before;
  room.mass_above[b + 1] = before + mass[0];
  room.high[b] = tokens;
  room.high[b + 1] = tokens + count[0];
  if (thread < 2) room.found[thread] = 0;
  sync_all();
}

// Counts a row into bins. Several blocks share a row; false in all but the last of them, which has the sums of all.
HB_DEV bool fill_bins(const Draw& d, const Row& row, Room& room, int r, int part) {
  const int thread = hb_thread(), share = (d.vocab + d.edge_parts - 1) / d.edge_parts, from = part * share;
  for (int b = thread; b < BINS; b += EDGE_THREADS) room.count[b] = room.high[b] = room.low[b] = 0;
  if (thread < 3) room.total[thread] = {0, 0, 0};
  sync_all();
  row.each(from, from + share < d.vocab ? from + share : d.vocab, [&](float x, bool there) {
    if (!there) return;
    const int b = row.bin(x);
    const u32 mass = row.mass(x, b);
    shared_add(&room.count[b], 1);
    shared_add(&room.high[b], mass >> HALF_BITS);
    shared_add(&room.low[b], mass & ((1u << HALF_BITS) - 1));
  });
  sync_all();
  if (d.edge_parts > 1) {
    u32* all = d.bins + (size_t)r * 3 * BINS;
    for (int b = thread; b < BINS; b += EDGE_THREADS)
      if (room.count[b]) { global_add(all + b, room.count[b]); global_add(all + BINS + b, room.high[b]); global_add(all + 2 * BINS + b, room.low[b]); }
    fence_gpu();
    sync_all();
    if (thread == 0) room.last = counter_add(d.tickets + r) == (u32)d.edge_parts - 1;
    sync_all();
    if (!room.last) return false;
    fence_gpu();
    if (thread == 0) d.tickets[r] = 0;
    for (int b = thread; b < BINS; b += EDGE_THREADS) {
      room.count[b] = global_load(all + b); room.high[b] = global_load(all + BINS + b); room.low[b] = global_load(all + 2 * BINS + b);
      all[b] = all[BINS + b] = all[2 * BINS + b] = 0;
    }
  }
  sync_all();
  add_up(room);
  return true;
}

// The last bin that holds a token with less than `limit` (of tokens: which 0; of mass: 1) above it.
HB_DEV int bin_at(Room& room, double limit, int which) {
  u32 last = 0;
  for (int b = 2 * hb_thread(); b < 2 * hb_thread() + 2; b++)
    if (room.count[b] && (which ? room.mass_above[b] : (double)room.high[b]) < limit) last = b;
  last = warp_max(last);
  if (hb_thread() % 32 == 0 && last) shared_max(&room.found[which], last);
  sync_all();
  return (int)room.found[which];
}

// Tokens of one bin, from shared memory if they fit there.
struct Bin {
  const Row& row;
  Room& room;
  int bin, count;
  HB_DEV_MEMBER void gather() {
    if (hb_thread() == 0) room.taken = 0;
    sync_all();
    if (count <= HELD)
      row.each(0, row.vocab, [&](float x, bool there) {
        const bool mine = there && row.bin(x) == bin;
        const u32 who = warp_ballot(mine);
        if (!who) return;
        const int lane = hb_thread() % 32, first = popcount((who & (0u - who)) - 1);
        u32 place = lane == first ? shared_add(&room.taken, popcount(who)) : 0u;
        place = shfl(place, first) + popcount(who & ((1u << lane) - 1));
        if (mine) room.held[place] = ordered(x);
      });
    sync_all();
  }
  // Number and mass of the tokens whose place in order is above `key`.
  HB_DEV_MEMBER Sums above(u32 key, int turn) const {
    Sums s = {0, 0, 0};
    if (count <= HELD) {
      for (int i = hb_thread(); i < count; i += EDGE_THREADS) take(s, room.held[i], key);
    } else {
      row.each(0, row.vocab, [&](float x, bool there) { if (there && row.bin(x) == bin) take(s, ordered(x), key); });
    }
    return sum_of_block(s, room, turn);
  }
  HB_DEV_MEMBER void take(Sums& s, u32 mine, u32 key) const {
    if (mine <= key) return;
    const u32 mass = row.mass(from_ordered(mine), bin);
    s.count++;
    s.high += mass >> HALF_BITS;
    s.low += mass & ((1u << HALF_BITS) - 1);
  }
};

struct Edge { u32 key; double tokens, mass, one; };  // the lowest place in order that is kept; what lies above; a token's mass there

// The lowest place in order above which less than `limit` lies.
HB_DEV Edge edge_of(const Row& row, Room& room, double limit, int which, int& turn) {
  const int b = bin_at(room, limit, which);
  const double before[2] = {(double)room.high[b], room.mass_above[b]}, weight = weight_of(b);
  Bin bin{row, room, b, (int)room.count[b]};
  bin.gather();
  // `no` lies below the bin's tokens and is too low, `yes` above them or on the highest.
  u32 yes = b ? ordered(row.top - (float)(b - 1) / PER_UNIT) : ordered(row.top);
  u32 no = b < BINS - 1 ? ordered(row.top - (float)(b + 2) / PER_UNIT) : 0u;
  Edge e = {yes, before[0], before[1], 0.};
  while (no + 1 < yes) {
    const u32 middle = no + (yes - no) / 2;
    const Sums s = bin.above(middle, turn++);
    const double tokens = before[0] + (double)s.count, mass = before[1] + join(s.high, s.low) * weight;
    if ((which ? mass : tokens) < limit) { yes = middle; e = {yes, tokens, mass, 0.}; } else no = middle;
  }
  e.one = (double)row.mass(from_ordered(e.key), b) * weight;
  return e;
}

extern "C" __global__ void __launch_bounds__(EDGE_THREADS) draw_edges(const __grid_constant__ Draw d) {
  Room& room = *(Room*)hb_shared();
  const int r = hb_block() / d.edge_parts, part = hb_block() % d.edge_parts;
  const float* settings = d.settings + r * 4;
  const float temperature = settings[0], top_k = settings[1], top_p = settings[2], min_p = settings[3];
  if (!(temperature > 0.f)) return;
  const bool by_count = top_k > 0.f && top_k < (float)d.vocab, by_mass = top_p < 1.f;
  const float top = as_float(d.results[r * 2 + 1]) / temperature;
  u32 key = min_p > 0.f ? ordered(top + log_exact(min_p)) : 0u;
  if ((by_count || by_mass) && top - top == 0.f) {  // a row that is no number has no edge
    const Row row{d.logits + r * d.stride, temperature, top, d.vocab};
    if (!fill_bins(d, row, room, r, part)) return;
    int turn = 0;
    double whole = 0.;
    if (by_count) {
      const Edge e = edge_of(row, room, (double)top_k, 0, turn);
      key = e.key > key ? e.key : key;
      whole = e.mass + ((double)top_k - e.tokens) * e.one;  // of the k likeliest: of the last one's equals, what is left
    } else {
      whole = room.whole;
    }
    if (by_mass) {
      const Edge e = edge_of(row, room, (double)top_p * whole, 1, turn);
      key = e.key > key ? e.key : key;
    }
  }
  if (hb_thread() == 0) d.edges[r] = key ? from_ordered(key) : -HB_INFINITY;
}

#ifdef HB_EMULATE
extern "C" void hb_draw(const char* entry, const Draw* d, int grid, u32 seed) {
  const char what = entry[5];
  const bool edges = what == 'e';
  auto body = [=] { edges ? draw_edges(*d) : what == 'r' ? draw_race(*d) : draw_note(*d); };
  emu::run(grid, edges ? EDGE_THREADS : RACE_THREADS, edges ? sizeof(Room) : 256, seed, body);
}
extern "C" int hb_draw_size(int what) { return what ? (int)sizeof(Room) : (int)sizeof(Draw); }
#endif
