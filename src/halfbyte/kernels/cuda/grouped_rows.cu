// What stands around the grouped products: slots grouped by expert, rows packed for the tensor cores (with the norm, if
// asked), and the experts' results summed in the router's order. No atomics decide an order: results are the same always.
#include "warpgroup.cuh"

constexpr int EXPERTS_MAX = 512, TOP_MAX = 8, GROUP_THREADS = 512, ROW_THREADS = 256;

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

HB_DEV float number(const void* p, int is_float, size_t i) {
  return is_float ? ((const float*)p)[i] : as_float((u32)((const u16*)p)[i] << 16);
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

// A block packs one row: into the slot of its own number, or into the slots that `group_rows` gave it. A thread makes
// sixteen bytes: word (t, i) of a group of 32 goes to place (i, t).
extern "C" __global__ void __launch_bounds__(ROW_THREADS) pack_rows(const __grid_constant__ Rows r) {
  wait_for_previous();
  release_next();
  const int block = hb_block(), thread = hb_thread();
  if (block == 0 && thread < 2 && r.counters) r.counters[thread] = 0;
  const int row = r.select ? r.select[block] : block, count = r.place ? r.top_k : 1;
  const size_t from = (size_t)row * r.stride;
  int slots[TOP_MAX];  // read once: the compiler cannot know that packing does not change them
  HB_UNROLL
  for (int j = 0; j < TOP_MAX; j++) slots[j] = j >= count ? 0 : r.place ? r.place[block * r.top_k + j] : block;
  float scale = 1.f;
  if (r.norm) {
    float sum = 0.f;
    for (int k = thread; k < r.width; k += ROW_THREADS) { float v = number(r.source, r.source_float, from + k); sum += v * v; }
    scale = recip_sqrt(sum_of_block(sum) / (float)r.width + r.eps);
  }
  for (int unit = thread; unit < r.width / 8; unit += ROW_THREADS) {  // (half of the chunk, i) of chunk unit / 8
    const int group = unit >> 2, i = unit & 3;
    u32 word[4];
    if (!r.norm && !r.source_float && !r.half) {
      const u32* s = (const u32*)((const u16*)r.source + from) + group * 16 + i;
      HB_UNROLL
      for (int t = 0; t < 4; t++) word[t] = s[4 * t];
    } else {
      HB_UNROLL
      for (int t = 0; t < 4; t++) {
        const int k = group * 32 + 8 * t + 2 * i;
        float a = number(r.source, r.source_float, from + k), b = number(r.source, r.source_float, from + k + 1);
        if (r.norm) { a = a * scale * number(r.norm, r.norm_float, k); b = b * scale * number(r.norm, r.norm_float, k + 1); }
        word[t] = bf16_pair(a, b);  // the quantisation point
        if (r.half) word[t] = half_pair(bf16_low(word[t]), bf16_high(word[t]));
      }
    }
    u16* chunk = r.packed + (size_t)(unit >> 3) * r.slots * 64;
    HB_UNROLL
    for (int j = 0; j < TOP_MAX; j++)
      if (j < count) store_words<4>(chunk + (size_t)slots[j] * 64 + ((unit & 7) ^ (slots[j] & 7)) * 8, word);
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

struct alignas(16) Four { float v[4]; };

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
