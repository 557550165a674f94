// What stands around the grouped products: slots grouped by expert, rows packed for the tensor cores (with the norm, if
// asked), and the experts' results summed in the router's order. No atomics decide an order: results are the same always.
#include "warpgroup.cuh"

constexpr int EXPERTS_MAX = 512, TOP_MAX = 8, GROUP_THREADS = 1024, ROW_THREADS = 192;

struct Rows {                 // mirrored in grouped.py; every kernel of this file takes it
  const void* source;         // rows of float or bf16, `stride` elements apart
  const void* norm;           // weight of an RMS norm, float or bf16; null: none
  const int* select;          // which rows of source; null: all
  u16* packed;                // see grouped.cuh
  u32* counters;              // of the products that follow; zeroed
  const void* ids;            // [rows][top_k] int32 or int64
  const float* weights;       // [rows][top_k]
  int *starts, *counts;       // out: [experts]
  int* place;                 // [rows][top_k], the slot of each choice
  const float* parts;         // [slots][width]
  const float* residual;      // [rows][width]
  float* out;                 // [rows][width]
  i64 stride;
  int rows, width, slots, experts, top_k;
  int source_float, norm_float, ids_wide;
  int half;                   // pack bf16 values as f16, for q8 weights
  float eps;
};

struct alignas(16) Four { float v[4]; };

// Eight neighbouring values of a row, from value `k` on.
HB_DEV void load_eight(const void* p, int is_float, size_t k, float (&v)[8]) {
  if (is_float) {
    const Four a = ((const Four*)((const float*)p + k))[0], b = ((const Four*)((const float*)p + k))[1];
    HB_UNROLL
    for (int i = 0; i < 4; i++) { v[i] = a.v[i]; v[4 + i] = b.v[i]; }
  } else {
    const u32x4 w = ldg128((const u16*)p + k);
    const u32 words[4] = {w.x, w.y, w.z, w.w};
    HB_UNROLL
    for (int i = 0; i < 4; i++) { v[2 * i] = bf16_low(words[i]); v[2 * i + 1] = bf16_high(words[i]); }
  }
}

HB_DEV float sum_of_block(float v) {
  float* part = (float*)hb_shared();
  HB_UNROLL
  for (int m = 16; m; m >>= 1) v += shfl_xor(v, m);
  if (hb_thread() % 32 == 0) part[hb_thread() / 32] = v;
  sync_all();
  v = 0.f;
  for (int w = 0; w < ROW_THREADS / 32; w++) v += part[w];
  return v;
}

// Lane t of four holds words 0 to 3 of a group's eight values t; afterwards lane i holds word i of all four.
HB_DEV void transpose_four(u32 (&w)[4], int lane) {
  const bool high = lane & 2, odd = lane & 1;
  const u32 a = shfl_xor(high ? w[0] : w[2], 2), b = shfl_xor(high ? w[1] : w[3], 2);
  const u32 x0 = high ? a : w[0], x1 = high ? b : w[1], y0 = high ? w[2] : a, y1 = high ? w[3] : b;
  const u32 c = shfl_xor(odd ? x0 : x1, 1), d = shfl_xor(odd ? y0 : y1, 1);
  w[0] = odd ? c : x0;
  w[1] = odd ? x1 : c;
  w[2] = odd ? d : y0;
  w[3] = odd ? y1 : d;
}

// A block packs one row: into the slot of its own number, or into the slots that `group_rows` gave it. A thread reads
// eight values and keeps them while the norm is found; four threads then exchange words: word (t, i) of a group of 32
// goes to place (i, t).
extern "C" __global__ void __launch_bounds__(ROW_THREADS) pack_rows(const __grid_constant__ Rows r) {
  constexpr int HELD = 3;
  wait_for_previous();
  release_next();
  const int block = hb_block(), thread = hb_thread(), units = r.width / 8;
  if (block == 0 && thread < 2 && r.counters) r.counters[thread] = 0;
  const int row = r.select ? r.select[block] : block, count = r.place ? r.top_k : 1;
  const size_t from = (size_t)row * r.stride;
  float v[HELD][8];
  HB_UNROLL
  for (int j = 0; j < HELD; j++)
    if (thread + j * ROW_THREADS < units) load_eight(r.source, r.source_float, from + (thread + j * ROW_THREADS) * 8, v[j]);
  int slots[TOP_MAX];  // read once: the compiler cannot know that packing does not change them
  HB_UNROLL
  for (int j = 0; j < TOP_MAX; j++) slots[j] = j >= count ? 0 : r.place ? r.place[block * r.top_k + j] : block;
  float scale = 1.f;
  if (r.norm) {
    float sum = 0.f;
    HB_UNROLL
    for (int j = 0; j < HELD; j++)
      if (thread + j * ROW_THREADS < units)
        HB_UNROLL
        for (int i = 0; i < 8; i++) sum += v[j][i] * v[j][i];
    for (int u = thread + HELD * ROW_THREADS; u < units; u += ROW_THREADS) {
      float more[8];
      load_eight(r.source, r.source_float, from + u * 8, more);
      HB_UNROLL
      for (int i = 0; i < 8; i++) sum += more[i] * more[i];
    }
    scale = recip_sqrt(sum_of_block(sum) / (float)r.width + r.eps);
  }
  auto emit = [&](int unit, float (&x)[8]) {
    const bool here = unit < units;  // for all four threads of a group, or for none
    u32 word[4] = {0, 0, 0, 0};
    if (here) {
      if (r.norm) {
        float n[8];
        load_eight(r.norm, r.norm_float, unit * 8, n);
        HB_UNROLL
        for (int i = 0; i < 8; i++) x[i] = x[i] * scale * n[i];
      }
      HB_UNROLL
      for (int i = 0; i < 4; i++) {
        word[i] = bf16_pair(x[2 * i], x[2 * i + 1]);  // the quantisation point
        if (r.half) word[i] = half_pair(bf16_low(word[i]), bf16_high(word[i]));
      }
    }
    transpose_four(word, thread);
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
    float more[8] = {};
    if (first + thread < units) load_eight(r.source, r.source_float, from + (first + thread) * 8, more);
    emit(first + thread, more);
  }
}

HB_DEV int choice(const Rows& r, int i) { return r.ids_wide ? (int)((const i64*)r.ids)[i] : ((const int*)r.ids)[i]; }

// Block e: counts everything, then gives slots to the rows that chose expert e, in order of rows.
extern "C" __global__ void __launch_bounds__(GROUP_THREADS) group_rows(const __grid_constant__ Rows r) {
  constexpr int WARPS = GROUP_THREADS / 32;
  struct Table { int count[EXPERTS_MAX]; int mine[WARPS]; int start; };
  Table& table = *(Table*)hb_shared();
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
    seen += popcount(votes(e == expert));
  }
  if (lane == 0) table.mine[warp] = seen;
  sync_all();
  if (warp == 0) {  // slots before this expert: counts rounded up to 8
    int sum = 0;
    for (int e = lane; e < expert; e += 32) sum += (table.count[e] + 7) & ~7;
    HB_UNROLL
    for (int m = 16; m; m >>= 1) sum += (int)shfl_xor((u32)sum, m);
    if (lane == 0) table.start = sum;
  }
  sync_all();
  if (thread == 0) { r.starts[expert] = table.start; r.counts[expert] = table.count[expert]; }
  int at = table.start;
  for (int w = 0; w < warp; w++) at += table.mine[w];
  HB_UNROLL_4
  for (int i = first + lane; i - lane < last; i += 32) {
    const bool here = i < last && choice(r, i) == expert;
    const u32 v = votes(here);
    if (here) r.place[i] = at + popcount(v & ((1u << lane) - 1));
    at += popcount(v);
  }
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS) sum_rows(const __grid_constant__ Rows r) {
  wait_for_previous();
  release_next();
  const int row = hb_block();
  float weight[TOP_MAX];
  size_t part[TOP_MAX];
  HB_UNROLL
  for (int i = 0; i < TOP_MAX; i++) {
    weight[i] = i < r.top_k ? r.weights[row * r.top_k + i] : 0.f;
    part[i] = i < r.top_k ? (size_t)r.place[row * r.top_k + i] * r.width : 0;
  }
  for (int k = hb_thread() * 4; k < r.width; k += ROW_THREADS * 4) {
    const size_t at = (size_t)row * r.width + k;
    Four y = *(const Four*)(r.residual + at), p[TOP_MAX];
    HB_UNROLL
    for (int i = 0; i < TOP_MAX; i++) if (i < r.top_k) p[i] = *(const Four*)(r.parts + part[i] + k);
    HB_UNROLL
    for (int j = 0; j < 4; j++) {
      float sum = weight[0] * p[0].v[j];
      HB_UNROLL
      for (int i = 1; i < TOP_MAX; i++) if (i < r.top_k) sum += weight[i] * p[i].v[j];
      y.v[j] += sum;
    }
    *(Four*)(r.out + at) = y;
  }
}

#ifdef HB_EMULATE
extern "C" void hb_rows(const char* entry, const Rows* r, int grid, u32 seed) {
  auto body = [=] { entry[0] == 'p' ? pack_rows(*r) : entry[0] == 'g' ? group_rows(*r) : sum_rows(*r); };
  emu::run(grid, entry[0] == 'g' ? GROUP_THREADS : ROW_THREADS, 4096, seed, body);
}
extern "C" int hb_rows_size() { return sizeof(Rows); }
#endif
