// What stands between the products of a batch: experts' results summed into the residual with the next norm, the router's
// products, its choice with the norm in front of the experts. A row's numbers depend on that row alone.
#include "batch.cuh"

constexpr int HIDDEN = HB_HIDDEN, EXPERTS = HB_EXPERTS, TOP_K = HB_TOP_K;
constexpr int ROW_THREADS = 256, QUADS = (HIDDEN / 4 + ROW_THREADS - 1) / ROW_THREADS;
constexpr int ROUTER_CHUNKS = 3, ROUTER_THREADS = EXPERTS / 16 * 32;  // chunks of 64 k to a block, a warp to 16 experts
constexpr int ROUTER_PARTS = (HIDDEN / 64 + ROUTER_CHUNKS - 1) / ROUTER_CHUNKS;
static_assert(HIDDEN % 64 == 0 && EXPERTS % 16 == 0 && EXPERTS <= 512 && TOP_K <= 8, "shape");

struct Rows {             // mirrored in batch.py; every kernel of this file takes it
  float* x;               // [rows][HIDDEN], the residual; updated in place
  const float* parts;     // [rows][TOP_K][HIDDEN], experts' results to be added; null: none
  float* weights;         // [rows][TOP_K]
  int* ids;               // [rows][TOP_K]
  const void* norm;       // weight of the norm that makes h, float or bf16; null: no h
  u16* h;                 // bf16 [rows][HIDDEN]
  const u16* router;      // bf16 [EXPERTS][HIDDEN]
  const void* router_bias;
  float* logits;          // [ROUTER_PARTS][rows][EXPERTS]: products of norm weight times x, without the row's scale
  u32* tickets;           // of the products that follow; two, zeroed by `choose`
  int rows, norm_float, bias_float;
  float eps;
};

HB_DEV float sum_of_block(float v, float* part) {
  HB_UNROLL
  for (int m = 16; m; m >>= 1) v += shfl_xor(v, m);
  if (hb_thread() % 32 == 0) part[hb_thread() / 32] = v;
  sync_all();
  v = 0.f;
  HB_UNROLL
  for (int w = 0; w < ROW_THREADS / 32; w++) v += part[w];
  return v;
}

struct Four { float v[4]; };
HB_DEV Four four(const float* p) {
  const u32x4 w = load128(p);
  return {as_float(w.x), as_float(w.y), as_float(w.z), as_float(w.w)};
}
HB_DEV Four norm_at(const Rows& r, int k) {
  Four f;
  if (r.norm_float) {
    const u32x4 w = ldg128((const float*)r.norm + k);
    f = {as_float(w.x), as_float(w.y), as_float(w.z), as_float(w.w)};
  } else {
    const u64 w = *(const u64*)((const u16*)r.norm + k);
    f = {bf16_low((u32)w), bf16_high((u32)w), bf16_low((u32)(w >> 32)), bf16_high((u32)(w >> 32))};
  }
  return f;
}

// One row of h from the values of x this thread holds: the quantisation point of the product that follows.
HB_DEV float normalise(const Rows& r, int row, const Four (&x)[QUADS], const Four (&weight)[QUADS], float* part) {
  float squares = 0.f;
  HB_UNROLL
  for (int i = 0; i < QUADS; i++)
    HB_UNROLL
    for (int j = 0; j < 4; j++) squares += x[i].v[j] * x[i].v[j];
  const float scale = recip_sqrt(sum_of_block(squares, part) / (float)HIDDEN + r.eps);
  HB_UNROLL
  for (int i = 0; i < QUADS; i++) {
    const int k = (hb_thread() + i * ROW_THREADS) * 4;
    if (k >= HIDDEN) continue;
    const Four &v = x[i], &w = weight[i];
    store64(r.h + (size_t)row * HIDDEN + k, bf16_pair(v.v[0] * scale * w.v[0], v.v[1] * scale * w.v[1]),
            bf16_pair(v.v[2] * scale * w.v[2], v.v[3] * scale * w.v[3]));
  }
  return scale;
}

// A block sums one row: x + (w0 part 0 + w1 part 1 + ...), in the router's order, and makes its h for the next layer.
extern "C" __global__ void __launch_bounds__(ROW_THREADS) batch_finish(const __grid_constant__ Rows r) {
  const int row = hb_block(), thread = hb_thread();
  Four weight[QUADS] = {}, x[QUADS] = {};
  if (r.norm)
    HB_UNROLL
    for (int i = 0; i < QUADS; i++) {
      const int k = (thread + i * ROW_THREADS) * 4;
      if (k < HIDDEN) weight[i] = norm_at(r, k);
    }
  wait_for_previous();
  release_next();
  float share[TOP_K] = {};
  if (r.parts)
    HB_UNROLL
    for (int j = 0; j < TOP_K; j++) share[j] = as_float(load32(r.weights + row * TOP_K + j));
  HB_UNROLL
  for (int i = 0; i < QUADS; i++) {
    const int k = (thread + i * ROW_THREADS) * 4;
    if (k >= HIDDEN) continue;
    x[i] = four(r.x + (size_t)row * HIDDEN + k);
    if (!r.parts) continue;
    Four part[TOP_K];
    HB_UNROLL
    for (int j = 0; j < TOP_K; j++) part[j] = four(r.parts + ((size_t)row * TOP_K + j) * HIDDEN + k);
    HB_UNROLL
    for (int c = 0; c < 4; c++) {
      float sum = share[0] * part[0].v[c];
      HB_UNROLL
      for (int j = 1; j < TOP_K; j++) sum += share[j] * part[j].v[c];
      x[i].v[c] += sum;
    }
    store128(r.x + (size_t)row * HIDDEN + k, as_bits(x[i].v[0]), as_bits(x[i].v[1]), as_bits(x[i].v[2]), as_bits(x[i].v[3]));
  }
  if (r.norm) normalise(r, row, x, weight, (float*)hb_shared());
}

// A block: eight rows, one part of K, all experts. x enters as two bf16, so that a choice between experts is made with 16
// bits and not with eight. The norm's scale is one number a row: `choose` multiplies it in.
extern "C" __global__ void __launch_bounds__(ROUTER_THREADS) batch_router(const __grid_constant__ Rows r) {
  const int part = hb_block() % ROUTER_PARTS, first = hb_block() / ROUTER_PARTS * 8;
  const int warp = hb_thread() / 32, lane = hb_thread() % 32, g = lane / 4, t = lane % 4;
  const int row = first + g, from = part * ROUTER_CHUNKS * 64 + t * 8;
  u32x4 up[ROUTER_CHUNKS * 2], low[ROUTER_CHUNKS * 2];  // rows g and g + 8 of the router: there before x is
  HB_UNROLL
  for (int i = 0; i < ROUTER_CHUNKS * 2; i++) {
    const int k = from + i * 32;
    up[i] = low[i] = {0, 0, 0, 0};
    if (k >= HIDDEN) continue;
    up[i] = ldg128(r.router + (size_t)(warp * 16 + g) * HIDDEN + k);
    low[i] = ldg128(r.router + (size_t)(warp * 16 + g + 8) * HIDDEN + k);
  }
  wait_for_previous();
  release_next();
  float d[4] = {0.f, 0.f, 0.f, 0.f};
  HB_UNROLL
  for (int i = 0; i < ROUTER_CHUNKS * 2; i++) {
    const int k = from + i * 32;
    u32 high[4] = {0, 0, 0, 0}, rest[4] = {0, 0, 0, 0};
    if (k < HIDDEN && row < r.rows)
      HB_UNROLL
      for (int j = 0; j < 2; j++) {
        const Four x = four(r.x + (size_t)row * HIDDEN + k + j * 4), w = norm_at(r, k + j * 4);
        HB_UNROLL
        for (int e = 0; e < 2; e++) {
          const float a = x.v[2 * e] * w.v[2 * e], b = x.v[2 * e + 1] * w.v[2 * e + 1];
          const u32 v = bf16_pair(a, b);
          high[2 * j + e] = v;
          rest[2 * j + e] = bf16_pair(a - bf16_low(v), b - bf16_high(v));
        }
      }
    mma(d, up[i].x, low[i].x, up[i].y, low[i].y, high[0], high[1]);
    mma(d, up[i].z, low[i].z, up[i].w, low[i].w, high[2], high[3]);
    mma(d, up[i].x, low[i].x, up[i].y, low[i].y, rest[0], rest[1]);
    mma(d, up[i].z, low[i].z, up[i].w, low[i].w, rest[2], rest[3]);
  }
  HB_UNROLL
  for (int i = 0; i < 4; i++) {
    const int column = first + 2 * t + (i & 1), expert = warp * 16 + g + (i >> 1) * 8;
    if (column < r.rows) r.logits[((size_t)part * r.rows + column) * EXPERTS + expert] = d[i];
  }
}

HB_DEV u32 orderable(float v) { const u32 b = as_bits(v); return b & 0x80000000u ? ~b : b | 0x80000000u; }
HB_DEV float from_orderable(u32 b) { return as_float(b & 0x80000000u ? b & 0x7fffffffu : ~b); }

// A block: one row's norm, its h, its experts (ties to the lower) and their weights.
extern "C" __global__ void __launch_bounds__(ROW_THREADS) batch_choose(const __grid_constant__ Rows r) {
  struct Table { float part[ROW_THREADS / 32]; u32 key[EXPERTS]; };
  Table& table = *(Table*)hb_shared();
  const int row = hb_block(), thread = hb_thread();
  Four weight[QUADS] = {}, x[QUADS] = {};
  HB_UNROLL
  for (int i = 0; i < QUADS; i++) {
    const int k = (thread + i * ROW_THREADS) * 4;
    if (k < HIDDEN) weight[i] = norm_at(r, k);
  }
  wait_for_previous();
  release_next();
  if (row == 0 && thread < 2 && r.tickets) r.tickets[thread] = 0;
  HB_UNROLL
  for (int i = 0; i < QUADS; i++) {
    const int k = (thread + i * ROW_THREADS) * 4;
    if (k < HIDDEN) x[i] = four(r.x + (size_t)row * HIDDEN + k);
  }
  float sum[(EXPERTS + ROW_THREADS - 1) / ROW_THREADS] = {};
  HB_UNROLL
  for (int i = 0; i * ROW_THREADS < EXPERTS; i++) {
    const int e = thread + i * ROW_THREADS;
    if (e >= EXPERTS) continue;
    HB_UNROLL
    for (int part = 0; part < ROUTER_PARTS; part++) sum[i] += as_float(load32(r.logits + ((size_t)part * r.rows + row) * EXPERTS + e));
  }
  const float scale = normalise(r, row, x, weight, table.part);
  HB_UNROLL
  for (int i = 0; i * ROW_THREADS < EXPERTS; i++) {
    const int e = thread + i * ROW_THREADS;
    if (e < EXPERTS) table.key[e] = orderable(sum[i] * scale + number(r.router_bias, r.bias_float, e));
  }
  sync_all();
  if (thread >= 32) return;
  constexpr int PER_LANE = (EXPERTS + 31) / 32;
  u32 key[PER_LANE];
  HB_UNROLL
  for (int i = 0; i < PER_LANE; i++) key[i] = i * 32 + thread < EXPERTS ? table.key[i * 32 + thread] : 0;
  float value[TOP_K];
  int expert[TOP_K];
  HB_UNROLL
  for (int k = 0; k < TOP_K; k++) {
    u32 best = 0;
    HB_UNROLL
    for (int i = 0; i < PER_LANE; i++) best = key[i] > best ? key[i] : best;
    best = warp_max(best);
    u32 where = EXPERTS;
    HB_UNROLL
    for (int i = PER_LANE - 1; i >= 0; i--) if (key[i] == best && i * 32 + thread < EXPERTS) where = i * 32 + thread;
    where = warp_min(where);
    HB_UNROLL
    for (int i = 0; i < PER_LANE; i++) if ((u32)(i * 32 + thread) == where) key[i] = 0;
    value[k] = from_orderable(best);
    expert[k] = where < (u32)EXPERTS ? (int)where : 0;
  }
  if (thread == 0) {
    float share[TOP_K], total = 0.f;
    HB_UNROLL
    for (int k = 0; k < TOP_K; k++) { share[k] = exp2_fast((value[k] - value[0]) * 1.4426950408889634f); total += share[k]; }
    HB_UNROLL
    for (int k = 0; k < TOP_K; k++) { r.ids[row * TOP_K + k] = expert[k]; r.weights[row * TOP_K + k] = divide(share[k], total); }
  }
}

#ifdef HB_EMULATE
extern "C" void hb_batch_rows(const char* entry, const Rows* r, int grid, u32 seed) {
  auto body = [=] { entry[6] == 'f' ? batch_finish(*r) : entry[6] == 'r' ? batch_router(*r) : batch_choose(*r); };
  emu::run(grid, entry[6] == 'r' ? ROUTER_THREADS : ROW_THREADS, 4096, seed, body);
}
extern "C" int hb_batch_rows_size(int what) { return what == 0 ? (int)sizeof(Rows) : what == 1 ? ROUTER_PARTS : ROUTER_THREADS; }
#endif
