// What stands around the grouped products: slots grouped by expert, rows packed for the tensor cores (with the norm, if
// asked), and the experts' results summed in the router's order. No atomics decide an order: results are the same always.
#include "device/warpgroup.cuh"

constexpr int EXPERTS_MAX = 512, TOP_MAX = 8, GROUP_THREADS = 1024, ROW_THREADS = 192;
constexpr int SHARED_BYTES = 4096;  // of every kernel of this file, at most

struct Rows {                 // mirrored in builds.py; every kernel of this file takes it
  const void* source;         // rows of float or bf16, `stride` elements apart
  const void* norm;           // weight of an RMS norm, float or bf16; null: none
  const int* select;          // which rows of source; null: all
  u16* packed;                // see grouped.cuh
  const void* ids;            // [rows][top_k] int32 or int64
  const float* weights;       // [rows][top_k]
  int *starts, *counts;       // out: [experts], those with the most rows first
  int* place;                 // [rows][top_k], the slot of each choice
  const void* parts;          // [slots][width], float or bf16
  const float* residual;      // [rows][width]
  float* out;                 // [rows][width]
  i64 stride;
  int rows, width, slots, experts, top_k;
  int source_float, norm_float, ids_wide;
  int kind;                   // how values are packed
  float eps;
  float* scales;              // E4M3: of each slot; MX: four scale bytes, [width / 128][slots]
  const u16* hidden;          // requantize: packed bf16
  int parts_float;
  int* order;                 // out: [experts], whose `starts` and `counts` are
};
HB_MIRRORED(Rows, source, norm, select, packed, ids, weights, starts, counts, place, parts, residual, out, stride, rows, width, slots,
            experts, top_k, source_float, norm_float, ids_wide, kind, eps, scales, hidden, parts_float, order)
// f16: bf16 values, for q8 weights; e4m3: see fp8.cuh; mx: see mx.cuh
enum { AS_BF16 = 0, AS_F16 = 1, AS_E4M3 = 2, AS_MXFP8 = 3, AS_MXFP4 = 4 };
#include "prefill/mx.cuh"

// Eight neighbouring values of a row, from value `k` on.
HB_DEV void load_eight(const void* p, int is_float, size_t k, float (&v)[8]) {
  if (is_float) {
    const u32x4 a = ldg128((const float*)p + k), b = ldg128((const float*)p + k + 4);
    const u32 words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    HB_UNROLL
    for (int i = 0; i < 8; i++) v[i] = as_float(words[i]);
  } else {
    const u32x4 w = ldg128((const u16*)p + k);
    const u32 words[4] = {w.x, w.y, w.z, w.w};
    HB_UNROLL
    for (int i = 0; i < 4; i++) { v[2 * i] = bf16_low(words[i]); v[2 * i + 1] = bf16_high(words[i]); }
  }
}

template <bool MAX> HB_DEV float over_block(float v) {
  float* part = (float*)hb_shared();
  HB_UNROLL
  for (int m = 16; m; m >>= 1) { const float o = shfl_xor(v, m); v = MAX ? fmaxf(v, o) : v + o; }
  sync_all();
  if (hb_thread() % 32 == 0) part[hb_thread() / 32] = v;
  sync_all();
  v = part[0];
  for (int w = 1; w < ROW_THREADS / 32; w++) v = MAX ? fmaxf(v, part[w]) : v + part[w];
  return v;
}

// The scale of a row whose largest magnitude is `top`, as ops/linear.py has it. Values are multiplied by its reciprocal: one on
// an edge between two numbers may fall either way.
HB_DEV float scale_of(float top) { const float s = divide_exactly(top, 448.f); return s > 0.f ? s : 1.f; }

// A row's choices: how much of which part.
struct Choices {
  float weight[TOP_MAX];
  size_t part[TOP_MAX];
  HB_DEV_MEMBER void load(const Rows& r, int row) {
    HB_UNROLL
    for (int i = 0; i < TOP_MAX; i++) {
      weight[i] = i < r.top_k ? r.weights[row * r.top_k + i] : 0.f;
      part[i] = i < r.top_k ? (size_t)r.place[row * r.top_k + i] * r.width : 0;
    }
  }
  // Eight neighbouring values of the row: what it was, and the experts' results in the router's order, FEW at a time.
  HB_DEV_MEMBER void sum(const Rows& r, int row, int k, float (&y)[8]) const {
    constexpr int FEW = 4;
    float sum[8];
    load_eight(r.residual, 1, (size_t)row * r.width + k, y);
    HB_UNROLL
    for (int base = 0; base < TOP_MAX; base += FEW) {
      if (base >= r.top_k) break;
      float p[FEW][8];
      HB_UNROLL
      for (int i = 0; i < FEW; i++) if (base + i < r.top_k) load_eight(r.parts, r.parts_float, part[base + i] + k, p[i]);
      HB_UNROLL
      for (int i = 0; i < FEW; i++)
        if (base + i < r.top_k)
          HB_UNROLL
          for (int j = 0; j < 8; j++) sum[j] = base + i ? sum[j] + weight[base + i] * p[i][j] : weight[0] * p[0][j];
    }
    HB_UNROLL
    for (int j = 0; j < 8; j++) y[j] += sum[j];
  }
};
HB_DEV void store_eight(float* to, const float (&v)[8]) {
  const u32 words[2][4] = {{as_bits(v[0]), as_bits(v[1]), as_bits(v[2]), as_bits(v[3])}, {as_bits(v[4]), as_bits(v[5]), as_bits(v[6]), as_bits(v[7])}};
  store_words<4>(to, words[0]);
  store_words<4>(to + 4, words[1]);
}

constexpr int HELD = 3;  // times eight values that a thread keeps
// A block packs one row: into the slot of its own number, or into the slots that `group_rows` gave it. A thread reads
// eight values and keeps them while norm and scale are found. For 16-bit values four threads then exchange words: word
// (t, i) of a group of 32 goes to place (i, t); for E4M3 two do. SUM: the row is first made, as `sum_rows` makes it, and
// must fit what the threads keep.
template <bool SUM> HB_DEV void pack(const Rows& r) {
  wait_for_previous();
  release_next();
  const int block = hb_block(), thread = hb_thread(), units = r.width / 8;
  const bool grouped = !SUM && r.place;
  const int row = !SUM && r.select ? r.select[block] : block, count = grouped ? r.top_k : 1;
  const size_t from = (size_t)row * r.stride;
  float v[HELD][8];
  Choices choices;
  if (SUM) choices.load(r, row);
  auto load = [&](int unit, float (&x)[8]) {
    HB_UNROLL
    for (int i = 0; i < 8; i++) x[i] = 0.f;
    if (unit >= units) return;
    if (SUM) choices.sum(r, row, unit * 8, x);
    else load_eight(r.source, r.source_float, from + unit * 8, x);
  };
  HB_UNROLL
  for (int j = 0; j < HELD; j++) load(thread + j * ROW_THREADS, v[j]);
  if (SUM)  // only now: a store in between would hold up the loads behind it
    HB_UNROLL
    for (int j = 0; j < HELD; j++)
      if (thread + j * ROW_THREADS < units) store_eight(r.out + (size_t)row * r.width + (thread + j * ROW_THREADS) * 8, v[j]);
  int slots[TOP_MAX];  // read once: the compiler cannot know that packing does not change them
  HB_UNROLL
  for (int j = 0; j < TOP_MAX; j++) slots[j] = j >= count ? 0 : grouped ? r.place[block * r.top_k + j] : block;
  float length = 1.f, per = 1.f;
  if (r.norm) {
    float sum = 0.f;
    auto add = [&](const float (&x)[8]) {
      HB_UNROLL
      for (int i = 0; i < 8; i++) sum += x[i] * x[i];
    };
    HB_UNROLL
    for (int j = 0; j < HELD; j++) add(v[j]);
    for (int u = thread + HELD * ROW_THREADS; u < units; u += ROW_THREADS) { float more[8]; load(u, more); add(more); }
    length = norm_scale(over_block<false>(sum) / (float)r.width + r.eps);
  }
  auto normalise = [&](int unit, float (&x)[8]) {
    if (!r.norm || unit >= units) return;
    float n[8];
    load_eight(r.norm, r.norm_float, unit * 8, n);
    HB_UNROLL
    for (int i = 0; i < 8; i++) x[i] = x[i] * length * n[i];
  };
  HB_UNROLL
  for (int j = 0; j < HELD; j++) normalise(thread + j * ROW_THREADS, v[j]);
  if (r.kind == AS_E4M3) {
    float top = 0.f;
    auto most = [&](const float (&x)[8]) {
      HB_UNROLL
      for (int i = 0; i < 8; i++) top = fmaxf(top, fabsf(x[i]));
    };
    HB_UNROLL
    for (int j = 0; j < HELD; j++) most(v[j]);
    for (int u = thread + HELD * ROW_THREADS; u < units; u += ROW_THREADS) { float more[8]; load(u, more); normalise(u, more); most(more); }
    const float scale = scale_of(over_block<true>(top));
    per = divide_exactly(1.f, scale);
    if (thread < count) r.scales[grouped ? r.place[block * r.top_k + thread] : block] = scale;
  }
  auto emit = [&](int unit, const float (&x)[8]) {
    const bool here = unit < units;  // for all threads that exchange, or for none
    const float times = r.kind < AS_MXFP8 ? 0.f : give_scale(r, unit, x, here ? count : 0, slots);
    if (r.kind == AS_MXFP4) return give_mxfp4(r, unit, x, times, here ? count : 0, slots);
    if (r.kind == AS_E4M3 || r.kind == AS_MXFP8) {
      const float by = r.kind == AS_E4M3 ? per : times;
      const u32 lower = four_times(x[0], x[2], x[1], x[3], by), upper = four_times(x[4], x[6], x[5], x[7], by);
      const bool odd = thread & 1;
      const u32 got = shfl_xor(odd ? lower : upper, 1);
      const u32 word[2] = {odd ? got : lower, odd ? upper : got};
      if (!here) return;
      u8* chunk = (u8*)r.packed + (size_t)(unit >> 4) * r.slots * 128;
      const int sixteen = (unit >> 2 & 3) * 2 + odd;  // of the row's eight
      HB_UNROLL
      for (int j = 0; j < TOP_MAX; j++)
        if (j < count) store_words<2>(chunk + (size_t)slots[j] * 128 + (sixteen ^ (slots[j] & 7)) * 16 + (unit & 2) * 4, word);
      return;
    }
    u32 word[4];
    HB_UNROLL
    for (int i = 0; i < 4; i++) {
      word[i] = bf16_pair(x[2 * i], x[2 * i + 1]);  // the quantisation point
      if (r.kind == AS_F16) word[i] = half_pair(bf16_low(word[i]), bf16_high(word[i]));
    }
    transpose_four<1>(word, thread);
    if (!here) return;
    u16* chunk = r.packed + (size_t)(unit >> 3) * r.slots * 64;
    HB_UNROLL
    for (int j = 0; j < TOP_MAX; j++)
      if (j < count) store_words<4>(chunk + (size_t)slots[j] * 64 + ((unit & 7) ^ (slots[j] & 7)) * 8, word);
  };
  HB_UNROLL
  for (int j = 0; j < HELD; j++)
    if (j * ROW_THREADS < units) emit(thread + j * ROW_THREADS, v[j]);
  for (int first = HELD * ROW_THREADS; first < units; first += ROW_THREADS) {
    float more[8];
    load(first + thread, more);
    normalise(first + thread, more);
    emit(first + thread, more);
  }
}
extern "C" __global__ void __launch_bounds__(ROW_THREADS) pack_rows(const __grid_constant__ Rows r) { pack<false>(r); }
extern "C" __global__ void __launch_bounds__(ROW_THREADS, 3) sum_pack_rows(const __grid_constant__ Rows r) { pack<true>(r); }

// Packed bf16 (what gate_up leaves) to packed E4M3 with a scale for each slot. A block takes eight slots, a kilobyte of
// every chunk: thread (part, slot, unit) the sixteen bytes `unit` of its slot in every third chunk. Words (t, i) of a group
// of 32 values lie at places (i, t); E4M3 wants i and i + 1 together, which neighbouring threads have.
extern "C" __global__ void __launch_bounds__(ROW_THREADS) requantize(const __grid_constant__ Rows r) {
  constexpr int PARTS = ROW_THREADS / 64, HERE = 16;
  wait_for_previous();
  release_next();
  const int thread = hb_thread(), part = thread / 64, at = thread >> 3 & 7, slot = hb_block() * 8 + at, chunks = r.width / 64;
  const int unit = (thread ^ slot) & 7;  // where no XOR would have put it
  const bool inside = slot < r.slots;
  u32x4 held[HERE];
  float top = 0.f;
  auto load = [&](int chunk) {
    u32x4 w = {0, 0, 0, 0};
    if (inside && chunk < chunks) w = ldg128(r.hidden + ((size_t)chunk * r.slots + slot) * 64 + (thread & 7) * 8);
    const u32 words[4] = {w.x, w.y, w.z, w.w};
    HB_UNROLL
    for (int t = 0; t < 4; t++) top = fmaxf(top, fmaxf(fabsf(bf16_low(words[t])), fabsf(bf16_high(words[t]))));
    return w;
  };
  HB_UNROLL
  for (int j = 0; j < HERE; j++) held[j] = load(part + PARTS * j);
  for (int c = part + PARTS * HERE; c < chunks; c += PARTS) load(c);
  HB_UNROLL
  for (int m = 4; m; m >>= 1) top = fmaxf(top, shfl_xor(top, m));
  float* tops = (float*)hb_shared();  // [part][slot]
  if ((thread & 7) == 0) tops[part * 8 + at] = top;
  sync_all();
  HB_UNROLL
  for (int i = 0; i < PARTS; i++) top = fmaxf(top, tops[i * 8 + at]);
  const float scale = scale_of(top), per = divide_exactly(1.f, scale);
  if (inside && (thread & 63) % 8 == 0 && part == 0) r.scales[slot] = scale;
  auto emit = [&](int chunk, const u32x4& w) {
    const bool odd = unit & 1;  // i
    const u32 x = shfl_xor(odd ? w.x : w.z, 1), y = shfl_xor(odd ? w.y : w.w, 1);
    const u32 a[2] = {odd ? x : w.x, odd ? y : w.y}, b[2] = {odd ? w.z : x, odd ? w.w : y};  // i even, i odd: words t of this thread
    if (!inside || chunk >= chunks) return;
    u32 out[2];
    HB_UNROLL
    for (int t = 0; t < 2; t++) out[t] = four_times(bf16_low(a[t]), bf16_low(b[t]), bf16_high(a[t]), bf16_high(b[t]), per);
    const int group = 2 * chunk + (unit >> 2), sixteen = (group & 3) * 2 + (unit >> 1 & 1);
    store_words<2>((u8*)r.packed + ((size_t)(group >> 2) * r.slots + slot) * 128 + (sixteen ^ (slot & 7)) * 16 + odd * 8, out);
  };
  HB_UNROLL
  for (int j = 0; j < HERE; j++)
    if (PARTS * j < chunks) emit(part + PARTS * j, held[j]);
  for (int first = PARTS * HERE; first < chunks; first += PARTS) emit(first + part, load(first + part));
}

// The same to MXFP8 or MXFP4: a scale for every group, so that lanes need nothing of each other.
extern "C" __global__ void __launch_bounds__(ROW_THREADS) mx_requantize(const __grid_constant__ Rows r) {
  wait_for_previous();
  release_next();
  const int lane = hb_thread() % 32, slot = hb_block() * (ROW_THREADS / 32) + hb_thread() / 32;
  if (slot >= r.slots) return;
  for (int group = lane; group < r.width / 32; group += 32) {
    u32 w[4][4], top = 0;  // word (t, i) at [i][t]
    HB_UNROLL
    for (int i = 0; i < 4; i++) {
      const u32x4 v = ldg128(r.hidden + ((size_t)(group >> 1) * r.slots + slot) * 64 + (((group & 1) * 4 + i) ^ (slot & 7)) * 8);
      w[i][0] = v.x; w[i][1] = v.y; w[i][2] = v.z; w[i][3] = v.w;
      HB_UNROLL
      for (int t = 0; t < 4; t++) top = larger(top, larger(as_bits(bf16_low(w[i][t])) & 0x7fffffffu, as_bits(bf16_high(w[i][t])) & 0x7fffffffu));
    }
    const u32 scale = mx_scale(top, r.kind);
    const float times = mx_inverse(scale);
    scale_byte(r, group, slot) = (u8)scale;
    u32 out[4];
    if (r.kind == AS_MXFP4) {
      HB_UNROLL
      for (int t = 0; t < 4; t++) {
        float x[8];
        HB_UNROLL
        for (int i = 0; i < 4; i++) { x[2 * i] = bf16_low(w[i][t]); x[2 * i + 1] = bf16_high(w[i][t]); }
        out[t] = eight_e2m1(x, times);
      }
      store_words<4>((u8*)r.packed + ((size_t)(group >> 2) * r.slots + slot) * 64 + ((group & 3) ^ (slot >> 1 & 3)) * 16, out);
    } else {
      HB_UNROLL
      for (int h = 0; h < 2; h++) {
        HB_UNROLL
        for (int t = 0; t < 4; t++)
          out[t] = four_times(bf16_low(w[2 * h][t]), bf16_low(w[2 * h + 1][t]), bf16_high(w[2 * h][t]), bf16_high(w[2 * h + 1][t]), times);
        store_words<4>((u8*)r.packed + ((size_t)(group >> 2) * r.slots + slot) * 128 + (((group & 3) * 2 + h) ^ (slot & 7)) * 16, out);
      }
    }
  }
}

HB_DEV int choice(const Rows& r, int i) { return r.ids_wide ? (int)((const i64*)r.ids)[i] : ((const int*)r.ids)[i]; }

struct GroupTable { int count[EXPERTS_MAX], mine[GROUP_THREADS / 32], start; };
static_assert(sizeof(GroupTable) <= SHARED_BYTES && ROW_THREADS / 32 * sizeof(float) <= SHARED_BYTES, "shared memory of every launch");

// Block e: counts everything, then gives slots to the rows that chose expert e, in order of rows.
extern "C" __global__ void __launch_bounds__(GROUP_THREADS) group_rows(const __grid_constant__ Rows r) {
  constexpr int WARPS = GROUP_THREADS / 32;
  GroupTable& table = *(GroupTable*)hb_shared();
  const int thread = hb_thread(), warp = thread / 32, lane = thread % 32, expert = hb_block();
  const int all = r.rows * r.top_k, each = ((all + WARPS - 1) / WARPS + 31) & ~31;  // choices per warp
  const int first = warp * each, last = first + each < all ? first + each : all;
  for (int e = thread; e < r.experts; e += GROUP_THREADS) table.count[e] = 0;
  sync_all();
  wait_for_previous();
  release_next();
  int seen = 0;
  HB_UNROLL_4
  for (int i = first + lane; i - lane < last; i += 32) {
    const int e = i < last ? choice(r, i) : -1;
    if (e >= 0) shared_add(&table.count[e], 1);
    seen += popcount(warp_ballot(e == expert));
  }
  if (lane == 0) table.mine[warp] = seen;
  sync_all();
  if (warp == 0) {  // slots before this expert: counts rounded up to 8; experts before it, when the products take them
    int sum = 0, before = 0;
    const int mine = table.count[expert];
    for (int e = lane; e < r.experts; e += 32) {
      const int other = table.count[e];
      if (e < expert) sum += (other + 7) & ~7;
      before += other > mine || (other == mine && e < expert);
    }
    HB_UNROLL
    for (int m = 16; m; m >>= 1) { sum += (int)shfl_xor((u32)sum, m); before += (int)shfl_xor((u32)before, m); }
    if (lane == 0) { table.start = sum; r.starts[before] = sum; r.counts[before] = mine; r.order[before] = expert; }
  }
  sync_all();
  int at = table.start;
  for (int w = 0; w < warp; w++) at += table.mine[w];
  HB_UNROLL_4
  for (int i = first + lane; i - lane < last; i += 32) {
    const bool here = i < last && choice(r, i) == expert;
    const u32 v = warp_ballot(here);
    if (here) r.place[i] = at + popcount(v & ((1u << lane) - 1));
    at += popcount(v);
  }
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS) sum_rows(const __grid_constant__ Rows r) {
  wait_for_previous();
  release_next();
  Choices choices;
  choices.load(r, hb_block());
  for (int k = hb_thread() * 8; k < r.width; k += ROW_THREADS * 8) {
    float y[8];
    choices.sum(r, hb_block(), k, y);
    store_eight(r.out + (size_t)hb_block() * r.width + k, y);
  }
}

#ifdef HB_EMULATE
extern "C" void hb_run(const char* entry, const Rows* r, int grid, u32 seed) {
  const std::string name = entry;
  auto body = [=] {
    if (name == "pack_rows") pack_rows(*r);
    else if (name == "sum_pack_rows") sum_pack_rows(*r);
    else if (name == "group_rows") group_rows(*r);
    else if (name == "requantize") requantize(*r);
    else if (name == "mx_requantize") mx_requantize(*r);
    else sum_rows(*r);
  };
  emu::run(grid, name == "group_rows" ? GROUP_THREADS : ROW_THREADS, SHARED_BYTES, seed, body);
}
extern "C" int hb_size(int what) { return what == 0 ? (int)sizeof(Rows) : SHARED_BYTES; }
#endif
