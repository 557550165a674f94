// Sampling in few launches over the logits.
//
// `sample_argmax`   a row's highest logit, in one pass, with many blocks to a row.
// `sample_race`     an exponential race among the row's tokens, likewise.
// `sample_cutoffs`  for rows with a filter (top-n-sigma, top-k, top-p, min-p) only: the lowest scaled logit that may still be drawn, by a histogram
//                   over the distance from the highest and a bisection inside the one bin that holds the cutoff; no sort.
//
// Sums are of whole numbers, so that neither the order of threads nor a neighbour's row can change a cutoff or a token.
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
HB_DEV double sqrt_double(double v) { return std::sqrt(v); }
HB_DEV u32 round_u32(float v) { return (u32)std::llrint((double)v); }
#else
HB_DEV u32 shared_add(u32* p, u32 v) { return atomicAdd(p, v); }
HB_DEV void shared_max(u32* p, u32 v) { atomicMax(p, v); }
HB_DEV void global_add(u32* p, u32 v) { asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }
HB_DEV u32 global_load(const u32* p) { u32 v; asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
HB_DEV float log_exact(float v) { return logf(v); }
HB_DEV float log1p_exact(float v) { return log1pf(v); }
HB_DEV float exp_exact(float v) { return expf(v); }
HB_DEV double exp_double(double v) { return exp(v); }
HB_DEV double sqrt_double(double v) { return sqrt(v); }
HB_DEV u32 round_u32(float v) { return __float2uint_rn(v); }
#endif

constexpr int RACE_THREADS = 256, CUTOFF_THREADS = 1024;
constexpr int BINS = 2048, HELD = 8192;      // bins of 1 / 64; candidates kept in shared memory
constexpr float PER_UNIT = 64.f;
#define HB_INFINITY as_float(0x7f800000u)
constexpr int MASS_BITS = 28, HALF_BITS = 14;  // a mass within its bin in whole numbers, added up as two halves

struct Sampling {         // mirrored by the ctypes structure in sampler.py
  const float* logits;    // [rows][stride]
  const float* settings;  // [rows][HB_COLUMNS], a setting at HB_TEMPERATURE, HB_TOP_K …: ops/sampling_settings.py
  const u64* keys;        // [rows]
  float* cutoffs;         // [rows]
  u64* best;              // [rows], zero between launches
  u32* tickets;           // [rows], zero between launches
  u32* bins;              // [rows][3][BINS], zero between launches
  u32* results;           // [rows][2]: token, bits of the highest logit
  i64 stride;
  int vocab, parts, cutoff_parts, filtered;
  int barred;             // argmax: tokens that may not be chosen are -infinity
};

HB_MIRRORED(Sampling, logits, settings, keys, cutoffs, best, tickets, bins, results, stride, vocab, parts, cutoff_parts, filtered, barred)

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
HB_DEV Part part_of(const Sampling& d) {
  const int each = (d.vocab + d.parts - 1) / d.parts, part = hb_block() % d.parts, from = part * each;
  return {hb_block() / d.parts, from, from + each < d.vocab ? from + each : d.vocab};
}

// The highest of all threads of all blocks of a row, in thread 0 of the block that comes last; 0 in every other.
HB_DEV u64 highest_of_row(const Sampling& d, int row, u64 best) {
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
HB_DEV u64 entry_of(u32 key, int t) { return (u64)key << 32 | (0xffffffffu - (u32)t); }
HB_DEV u32 key_of(float v) { return v == v ? orderable(v) : 0xffffffffu; }
// Of a logit: no infinity is one either, and a NaN that says where it comes from says so in its lower half (plan/broken.py).
HB_DEV u32 logit_key(float v) { return fabsf(v) < HB_INFINITY ? orderable(v) : 0xffc00000u | (v == v ? 0u : as_bits(v) & 0xffffu); }
HB_DEV u32 token_of(u64 entry) { return 0xffffffffu - (u32)entry; }

extern "C" __global__ void __launch_bounds__(RACE_THREADS) sample_argmax(const __grid_constant__ Sampling d) {
  const Part p = part_of(d);
  const float* logits = d.logits + p.row * d.stride;
  u64 best = 0;
  HB_UNROLL_4
  for (int t = p.from + hb_thread(); t < p.to; t += RACE_THREADS) {
    const float v = logits[t];
    const u64 mine = entry_of(d.barred && v == -HB_INFINITY ? orderable(v) : logit_key(v), t);
    best = mine > best ? mine : best;
  }
  best = highest_of_row(d, p.row, best);
  if (best) { d.results[p.row * 2] = token_of(best); d.results[p.row * 2 + 1] = as_bits(from_orderable((u32)(best >> 32))); }
}

extern "C" __global__ void __launch_bounds__(RACE_THREADS) sample_race(const __grid_constant__ Sampling d) {
  const Part p = part_of(d);
  const float temperature = d.settings[p.row * HB_COLUMNS + HB_TEMPERATURE];
  if (!(temperature > 0.f)) return;  // greedy: the result is there already
  const float cutoff = d.filtered ? d.cutoffs[p.row] : -HB_INFINITY;
  const u64 key = d.keys[p.row];
  const float* logits = d.logits + p.row * d.stride;
  u64 best = 0;
  HB_UNROLL_4
  for (int t = p.from + hb_thread(); t < p.to; t += RACE_THREADS) {
    const float x = logits[t] / temperature;
    const u64 mine = x < cutoff ? 0 : entry_of(key_of(x - log_exponential(key, t)), t);
    best = mine > best ? mine : best;
  }
  best = highest_of_row(d, p.row, best);
  if (best) d.results[p.row * 2] = token_of(best);
}

struct Sums { u32 count, high, low; };  // of tokens; of their masses, in two halves

struct Shared {
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
    for (int base = from; base < to; base += AHEAD * CUTOFF_THREADS) {
      float v[AHEAD];
      HB_UNROLL
      for (int i = 0; i < AHEAD; i++) { const int t = base + i * CUTOFF_THREADS + hb_thread(); v[i] = t < to ? logits[t] : 0.f; }
      HB_UNROLL
      for (int i = 0; i < AHEAD; i++) f(v[i] / temperature, base + i * CUTOFF_THREADS + hb_thread() < to);
    }
  }
  HB_DEV_MEMBER int bin(float x) const { const float d = (top - x) * PER_UNIT; return d < (float)(BINS - 1) ? (int)d : BINS - 1; }
  // What a token weighs beside the top of its bin.
  HB_DEV_MEMBER u32 mass(float x, int b) const { return round_u32(exp_exact((float)b / PER_UNIT - (top - x)) * (float)(1 << MASS_BITS)); }
};

HB_DEV double weight_of(int b) { return exp_double(-(double)b / (double)PER_UNIT) / (double)(1 << MASS_BITS); }
HB_DEV double join(u32 high, u32 low) { return (double)high * (1 << HALF_BITS) + (double)low; }

// The sum over the block, in every thread. Three totals take turns, so one barrier a sum is enough.
HB_DEV Sums sum_of_block(Sums s, Shared& sh, int turn) {
  for (int m = 16; m; m >>= 1) { s.count += shfl_xor(s.count, m); s.high += shfl_xor(s.high, m); s.low += shfl_xor(s.low, m); }
  Sums& total = sh.total[turn % 3];
  if (hb_thread() % 32 == 0 && s.count) { shared_add(&total.count, s.count); shared_add(&total.high, s.high); shared_add(&total.low, s.low); }
  sync_all();
  const Sums found = total;
  if (hb_thread() == 0) sh.total[(turn + 2) % 3] = {0, 0, 0};
  return found;
}

// What lies above every bin. A thread has two of them.
HB_DEV void add_up(Shared& sh) {
  static_assert(BINS == 2 * CUTOFF_THREADS && CUTOFF_THREADS == 32 * 32, "two bins a thread, a lane for each warp");
  const int thread = hb_thread(), warp = thread / 32, lane = thread % 32, b = 2 * thread;
  const double mass[2] = {join(sh.high[b], sh.low[b]) * weight_of(b), join(sh.high[b + 1], sh.low[b + 1]) * weight_of(b + 1)};
  const u32 count[2] = {sh.count[b], sh.count[b + 1]};
  double m = mass[0] + mass[1];
  u32 c = count[0] + count[1];
  for (int d = 1; d < 32; d *= 2) {
    const double more = shfl(m, lane < d ? lane : lane - d);
    const u32 others = shfl(c, lane < d ? lane : lane - d);
    if (lane >= d) { m += more; c += others; }
  }
  if (lane == 31) { sh.warp_mass[warp] = m; sh.warp_count[warp] = c; }
  sync_all();
  double before = 0.;
  u32 tokens = 0;
  for (int w = 0; w < warp; w++) { before += sh.warp_mass[w]; tokens += sh.warp_count[w]; }
  if (thread == CUTOFF_THREADS - 1) sh.whole = before + m;
  before += m - mass[0] - mass[1];
  tokens += c - count[0] - count[1];
  sh.mass_above[b] = before;
  sh.mass_above[b + 1] = before + mass[0];
  sh.high[b] = tokens;
  sh.high[b + 1] = tokens + count[0];
  if (thread < 2) sh.found[thread] = 0;
  sync_all();
}

// Counts a row into bins. Several blocks share a row; false in all but the last of them, which has the sums of all.
HB_DEV bool fill_bins(const Sampling& d, const Row& row, Shared& sh, int r, int part) {
  const int thread = hb_thread(), share = (d.vocab + d.cutoff_parts - 1) / d.cutoff_parts, from = part * share;
  for (int b = thread; b < BINS; b += CUTOFF_THREADS) sh.count[b] = sh.high[b] = sh.low[b] = 0;
  if (thread < 3) sh.total[thread] = {0, 0, 0};
  sync_all();
  row.each(from, from + share < d.vocab ? from + share : d.vocab, [&](float x, bool there) {
    if (!there) return;
    const int b = row.bin(x);
    const u32 mass = row.mass(x, b);
    shared_add(&sh.count[b], 1);
    shared_add(&sh.high[b], mass >> HALF_BITS);
    shared_add(&sh.low[b], mass & ((1u << HALF_BITS) - 1));
  });
  sync_all();
  if (d.cutoff_parts > 1) {
    u32* all = d.bins + (size_t)r * 3 * BINS;
    for (int b = thread; b < BINS; b += CUTOFF_THREADS)
      if (sh.count[b]) { global_add(all + b, sh.count[b]); global_add(all + BINS + b, sh.high[b]); global_add(all + 2 * BINS + b, sh.low[b]); }
    fence_gpu();
    sync_all();
    if (thread == 0) sh.last = counter_add(d.tickets + r) == (u32)d.cutoff_parts - 1;
    sync_all();
    if (!sh.last) return false;
    fence_gpu();
    if (thread == 0) d.tickets[r] = 0;
    for (int b = thread; b < BINS; b += CUTOFF_THREADS) {
      sh.count[b] = global_load(all + b); sh.high[b] = global_load(all + BINS + b); sh.low[b] = global_load(all + 2 * BINS + b);
      all[b] = all[BINS + b] = all[2 * BINS + b] = 0;
    }
  }
  sync_all();
  add_up(sh);
  return true;
}

// The last bin that holds a token with less than `limit` (of tokens: which 0; of mass: 1) above it.
HB_DEV int bin_at(Shared& sh, double limit, int which) {
  u32 last = 0;
  for (int b = 2 * hb_thread(); b < 2 * hb_thread() + 2; b++)
    if (sh.count[b] && (which ? sh.mass_above[b] : (double)sh.high[b]) < limit) last = b;
  last = warp_max(last);
  if (hb_thread() % 32 == 0 && last) shared_max(&sh.found[which], last);
  sync_all();
  return (int)sh.found[which];
}

// Tokens of one bin, from shared memory if they fit there.
struct Bin {
  const Row& row;
  Shared& sh;
  int bin, count;
  HB_DEV_MEMBER void gather() {
    if (hb_thread() == 0) sh.taken = 0;
    sync_all();
    if (count <= HELD)
      row.each(0, row.vocab, [&](float x, bool there) {
        const bool mine = there && row.bin(x) == bin;
        const u32 who = warp_ballot(mine);
        if (!who) return;
        const int lane = hb_thread() % 32, first = popcount((who & (0u - who)) - 1);
        u32 place = lane == first ? shared_add(&sh.taken, popcount(who)) : 0u;
        place = shfl(place, first) + popcount(who & ((1u << lane) - 1));
        if (mine) sh.held[place] = orderable(x);
      });
    sync_all();
  }
  // Number and mass of the tokens whose place in order is above `key`.
  HB_DEV_MEMBER Sums above(u32 key, int turn) const {
    Sums s = {0, 0, 0};
    if (count <= HELD) {
      for (int i = hb_thread(); i < count; i += CUTOFF_THREADS) take(s, sh.held[i], key);
    } else {
      row.each(0, row.vocab, [&](float x, bool there) { if (there && row.bin(x) == bin) take(s, orderable(x), key); });
    }
    return sum_of_block(s, sh, turn);
  }
  HB_DEV_MEMBER void take(Sums& s, u32 mine, u32 key) const {
    if (mine <= key) return;
    const u32 mass = row.mass(from_orderable(mine), bin);
    s.count++;
    s.high += mass >> HALF_BITS;
    s.low += mass & ((1u << HALF_BITS) - 1);
  }
};

struct Cutoff { u32 key; double tokens, mass, one; };  // the lowest place in order that is kept; what lies above; a token's mass there

// The lowest place in order above which less than `limit` lies.
HB_DEV Cutoff cutoff_of(const Row& row, Shared& sh, double limit, int which, int& turn) {
  const int b = bin_at(sh, limit, which);
  const double before[2] = {(double)sh.high[b], sh.mass_above[b]}, weight = weight_of(b);
  Bin bin{row, sh, b, (int)sh.count[b]};
  bin.gather();
  // `no` lies below the bin's tokens and is too low, `yes` above them or on the highest.
  u32 yes = b ? orderable(row.top - (float)(b - 1) / PER_UNIT) : orderable(row.top);
  u32 no = b < BINS - 1 ? orderable(row.top - (float)(b + 2) / PER_UNIT) : 0u;
  Cutoff e = {yes, before[0], before[1], 0.};
  while (no + 1 < yes) {
    const u32 middle = no + (yes - no) / 2;
    const Sums s = bin.above(middle, turn++);
    const double tokens = before[0] + (double)s.count, mass = before[1] + join(s.high, s.low) * weight;
    if ((which ? mass : tokens) < limit) { yes = middle; e = {yes, tokens, mass, 0.}; } else no = middle;
  }
  e.one = (double)row.mass(from_orderable(e.key), b) * weight;
  return e;
}

// What lies at or above a place in order.
HB_DEV Cutoff within(const Row& row, Shared& sh, u32 key, int& turn) {
  const int b = row.bin(from_orderable(key));
  Bin bin{row, sh, b, (int)sh.count[b]};
  bin.gather();
  const Sums s = bin.above(key - 1, turn++);
  return {key, (double)sh.high[b] + (double)s.count, sh.mass_above[b] + join(s.high, s.low) * weight_of(b), 0.};
}

// The lowest place in order within so many standard deviations of the highest logit, of those that may be chosen. One block
// reads the whole row in an order that depends on nothing else, so that the sums are the same bits whoever shares the launch.
HB_DEV u32 lowest_within(const Row& row, Shared& sh, float sigmas) {
  double sum = 0., squares = 0.;
  u32 count = 0;
  row.each(0, row.vocab, [&](float x, bool there) {
    if (!there || x == -HB_INFINITY) return;
    const double d = (double)x - (double)row.top;  // from the highest: small numbers where they matter
    sum += d; squares += d * d; count++;
  });
  for (int m = 16; m; m >>= 1) {
    const int other = (hb_thread() % 32) ^ m;
    sum += shfl(sum, other); squares += shfl(squares, other); count += shfl(count, other);
  }
  double* warps = (double*)sh.held;  // [3][32]; nothing is held yet
  if (hb_thread() % 32 == 0) { double* mine = warps + hb_thread() / 32; mine[0] = sum; mine[32] = squares; mine[64] = (double)count; }
  sync_all();
  if (hb_thread() == 0) {
    for (int w = 1; w < 32; w++) { warps[0] += warps[w]; warps[32] += warps[32 + w]; warps[64] += warps[64 + w]; }
    const double mean = warps[0] / warps[64], variance = warps[32] / warps[64] - mean * mean;
    sh.last = orderable((float)((double)row.top - (double)sigmas * sqrt_double(variance > 0. ? variance : 0.)));
  }
  sync_all();
  return sh.last;
}

extern "C" __global__ void __launch_bounds__(CUTOFF_THREADS) sample_cutoffs(const __grid_constant__ Sampling d) {
  Shared& sh = *(Shared*)hb_shared();
  const int r = hb_block() / d.cutoff_parts, part = hb_block() % d.cutoff_parts;
  const float* settings = d.settings + r * HB_COLUMNS;
  const float temperature = settings[HB_TEMPERATURE], top_k = settings[HB_TOP_K], top_p = settings[HB_TOP_P], min_p = settings[HB_MIN_P], sigmas = settings[HB_TOP_N_SIGMA];
  if (!(temperature > 0.f)) return;
  const bool by_count = top_k > 0.f && top_k < (float)d.vocab, by_mass = top_p < 1.f, by_sigma = sigmas > 0.f;
  const float top = as_float(d.results[r * 2 + 1]) / temperature;
  u32 key = min_p > 0.f ? orderable(top + log_exact(min_p)) : 0u;
  if ((by_count || by_mass || by_sigma) && top - top == 0.f) {  // a row whose highest logit is no number has no cutoff
    const Row row{d.logits + r * d.stride, temperature, top, d.vocab};
    if (by_count || by_mass ? !fill_bins(d, row, sh, r, part) : part != 0) return;
    int turn = 0;
    bool counted = by_count;
    if (by_sigma) {
      const u32 lowest = lowest_within(row, sh, sigmas);
      key = lowest > key ? lowest : key;
      if (by_count || by_mass) {
        const Cutoff e = within(row, sh, lowest, turn);
        counted = by_count && (double)top_k < e.tokens;
        if (hb_thread() == 0) sh.whole = e.mass;
        sync_all();
      }
    }
    double whole = by_mass ? sh.whole : 0.;
    if (counted) {
      const Cutoff e = cutoff_of(row, sh, (double)top_k, 0, turn);
      key = e.key > key ? e.key : key;
      whole = e.mass + ((double)top_k - e.tokens) * e.one;  // of the k likeliest: of the last one's equals, what is left
    }
    if (by_mass) {
      const Cutoff e = cutoff_of(row, sh, (double)top_p * whole, 1, turn);
      key = e.key > key ? e.key : key;
    }
  }
  if (hb_thread() == 0) d.cutoffs[r] = key ? from_orderable(key) : -HB_INFINITY;
}

#ifdef HB_EMULATE
extern "C" void hb_run(const char* entry, const Sampling* d, int grid, u32 seed) {
  const std::string name = entry;
  const bool cutoffs = name == "sample_cutoffs", race = name == "sample_race";
  auto body = [=] { cutoffs ? sample_cutoffs(*d) : race ? sample_race(*d) : sample_argmax(*d); };
  emu::run(grid, cutoffs ? CUTOFF_THREADS : RACE_THREADS, cutoffs ? sizeof(Shared) : 256, seed, body);
}
extern "C" int hb_size(int what) { return what == 0 ? (int)sizeof(Sampling) : what == 1 ? (int)sizeof(Shared) : RACE_THREADS / 32 * (int)sizeof(u64); }
#endif
