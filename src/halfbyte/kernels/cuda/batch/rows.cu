// What stands between the products of a batch: experts' results summed into the residual with the next norm, and the choice of
// experts with the norm in front of them. A row's numbers depend on that row alone.
#include "batch/shape.cuh"

constexpr int HIDDEN = HB_HIDDEN, EXPERTS = HB_EXPERTS, TOP_K = HB_TOP_K;
constexpr int FINISH_THREADS = 256, CHOOSE_THREADS = 512;
HB_CONST_FN int quads(int threads) { return (HIDDEN / 4 + threads - 1) / threads; }  // fours of a row for each of them
constexpr int PARTS = HIDDEN / 16;  // of the router's products: one for each tile of o
static_assert(EXPERTS <= CHOOSE_THREADS, "a thread for each expert");
static_assert(HIDDEN % 64 == 0 && EXPERTS % 16 == 0 && EXPERTS <= 512 && TOP_K <= 8, "shape");

struct Rows {             // mirrored in products.py; every kernel of this file takes it
  float* x;               // [rows][HIDDEN], the residual; updated in place
  const float* parts;     // [rows][TOP_K][HIDDEN], experts' results to be added; null: none
  float* weights;         // [rows][TOP_K]
  int* ids;               // [rows][TOP_K]
  const void* norm;       // weight of the norm that makes h, float or bf16; null: no h
  u16* h;                 // bf16 [rows][HIDDEN]
  const void* router_bias;
  const float* logits;    // [PARTS][rows][EXPERTS]: products of the router with norm weight times x, without the row's scale
  const int* select;      // `finish` without parts: the rows of x that are normalised; null: all
  u32* tickets;           // of the products that follow: two, zeroed here if given
  u32* done;              // of the experts that follow: one for each choice, zeroed by `choose`
  int rows, norm_float, bias_float;
  float eps;
};

HB_MIRRORED(Rows, x, parts, weights, ids, norm, h, router_bias, logits, select, tickets, done, rows, norm_float, bias_float, eps)

template <int THREADS> HB_DEV float sum_of_block(float v, float* part) {
  HB_UNROLL
  for (int m = 16; m; m >>= 1) v += shfl_xor(v, m);
  if (hb_thread() % 32 == 0) part[hb_thread() / 32] = v;
  sync_all();
  v = 0.f;
  HB_UNROLL
  for (int w = 0; w < THREADS / 32; w++) v += part[w];
  return v;
}

HB_DEV Four norm_at(const Rows& r, int k) { return four_at(r.norm, r.norm_float, k); }

// A thread's i-th four values of a row. Past the end all read the last ones and drop them: a load under a condition would wait
// for the one before it.
template <int THREADS> HB_DEV bool mine(int thread, int i) { return (thread + i * THREADS) * 4 < HIDDEN; }
template <int THREADS> HB_DEV int place(int thread, int i) { return mine<THREADS>(thread, i) ? (thread + i * THREADS) * 4 : HIDDEN - 4; }

// One row of h from the values of x this thread holds: the quantisation point of the product that follows.
template <int THREADS>
HB_DEV float normalise(const Rows& r, int row, int thread, const Four (&x)[quads(THREADS)], const Four (&weight)[quads(THREADS)], float* part) {
  float squares = 0.f;
  HB_UNROLL
  for (int i = 0; i < quads(THREADS); i++)
    HB_UNROLL
    for (int j = 0; j < 4; j++) squares += mine<THREADS>(thread, i) ? x[i].v[j] * x[i].v[j] : 0.f;
  const float scale = norm_scale(sum_of_block<THREADS>(squares, part) / (float)HIDDEN + r.eps);
  HB_UNROLL
  for (int i = 0; i < quads(THREADS); i++) {
    if (!mine<THREADS>(thread, i)) continue;
    const Four &v = x[i], &w = weight[i];
    store64(r.h + (size_t)row * HIDDEN + place<THREADS>(thread, i), bf16_pair(v.v[0] * scale * w.v[0], v.v[1] * scale * w.v[1]),
            bf16_pair(v.v[2] * scale * w.v[2], v.v[3] * scale * w.v[3]));
  }
  return scale;
}

// A block sums one row: x + (w0 part 0 + w1 part 1 + ...), in the router's order, and makes its h for the next layer.
extern "C" __global__ void __maxnreg__(72) batch_finish(const __grid_constant__ Rows r) {
  const int row = hb_block(), thread = hb_thread(), source = r.select ? (int)load32(r.select + row) : row;
  Four weight[quads(FINISH_THREADS)] = {}, x[quads(FINISH_THREADS)] = {};
  if (r.norm)
    HB_UNROLL
    for (int i = 0; i < quads(FINISH_THREADS); i++) weight[i] = norm_at(r, place<FINISH_THREADS>(thread, i));
  release_next();
  wait_for_previous();
  HB_UNROLL
  for (int i = 0; i < quads(FINISH_THREADS); i++) x[i] = four(r.x + (size_t)source * HIDDEN + place<FINISH_THREADS>(thread, i));
  if (r.parts) {
    Four part[quads(FINISH_THREADS)][TOP_K];  // everything is asked for before anything is used: one wait, not one for each
    float share[TOP_K];
    HB_UNROLL
    for (int i = 0; i < quads(FINISH_THREADS); i++)
      HB_UNROLL
      for (int j = 0; j < TOP_K; j++) part[i][j] = four(r.parts + ((size_t)row * TOP_K + j) * HIDDEN + place<FINISH_THREADS>(thread, i));
    HB_UNROLL
    for (int j = 0; j < TOP_K; j++) share[j] = as_float(load32(r.weights + row * TOP_K + j));
    HB_UNROLL
    for (int i = 0; i < quads(FINISH_THREADS); i++) {
      HB_UNROLL
      for (int c = 0; c < 4; c++) {
        float sum = share[0] * part[i][0].v[c];
        HB_UNROLL
        for (int j = 1; j < TOP_K; j++) sum += share[j] * part[i][j].v[c];
        x[i].v[c] += sum;
      }
      const float* v = x[i].v;
      if (mine<FINISH_THREADS>(thread, i)) store128(r.x + (size_t)row * HIDDEN + place<FINISH_THREADS>(thread, i), as_bits(v[0]), as_bits(v[1]), as_bits(v[2]), as_bits(v[3]));
    }
  }
  if (row == 0 && thread < 2 && r.tickets) r.tickets[thread] = 0;
  if (r.norm) normalise<FINISH_THREADS>(r, row, thread, x, weight, (float*)hb_shared());
}

constexpr int LANES = EXPERTS / 4, TEAMS = CHOOSE_THREADS / LANES, EACH = (PARTS + TEAMS - 1) / TEAMS;  // four experts a lane
struct ChooseTable { float part[CHOOSE_THREADS / 32]; u32 key[EXPERTS]; float sum[TEAMS][EXPERTS]; };

// A block: one row's norm, its h, its experts (ties to the lower) and their weights. The router's products come in parts, one
// for 16 k, from the product that made x; the norm's scale is one number, and comes in here.
extern "C" __global__ void __launch_bounds__(CHOOSE_THREADS, 1) batch_choose(const __grid_constant__ Rows r) {
  ChooseTable& table = *(ChooseTable*)hb_shared();
  const int row = hb_block(), thread = hb_thread(), team = thread / LANES, lane = thread % LANES;
  Four weight[quads(CHOOSE_THREADS)] = {}, x[quads(CHOOSE_THREADS)] = {};
  HB_UNROLL
  for (int i = 0; i < quads(CHOOSE_THREADS); i++) weight[i] = norm_at(r, place<CHOOSE_THREADS>(thread, i));
  const float bias = thread < EXPERTS ? number(r.router_bias, r.bias_float, thread) : 0.f;
  release_next();
  wait_for_previous();
  HB_UNROLL
  for (int i = 0; i < quads(CHOOSE_THREADS); i++) x[i] = four(r.x + (size_t)row * HIDDEN + place<CHOOSE_THREADS>(thread, i));
  Four sum = {0.f, 0.f, 0.f, 0.f}, part[EACH];
  HB_UNROLL
  for (int i = 0; i < EACH; i++) {
    const int at = team * EACH + i < PARTS ? team * EACH + i : PARTS - 1;
    part[i] = four(r.logits + ((size_t)at * r.rows + row) * EXPERTS + lane * 4);
  }
  HB_UNROLL
  for (int i = 0; i < EACH; i++)
    HB_UNROLL
    for (int j = 0; j < 4; j++) sum.v[j] += team * EACH + i < PARTS ? part[i].v[j] : 0.f;
  if (team < TEAMS)
    HB_UNROLL
    for (int j = 0; j < 4; j++) table.sum[team][lane * 4 + j] = sum.v[j];
  if (row == 0) {
    if (thread < 2) r.tickets[thread] = 0;
    HB_ROLLED
    for (int i = thread; i < r.rows * TOP_K; i += CHOOSE_THREADS) r.done[i] = 0;
  }
  const float scale = normalise<CHOOSE_THREADS>(r, row, thread, x, weight, table.part);  // all threads meet in it
  if (thread < EXPERTS) {
    float logit = 0.f;
    HB_UNROLL
    for (int j = 0; j < TEAMS; j++) logit += table.sum[j][thread];
    table.key[thread] = broken_highest(logit * scale + bias);  // and so the row's weights are no numbers
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
extern "C" void hb_run(const char* entry, const Rows* r, int grid, u32 seed) {
  const bool finish = entry[6] == 'f';
  emu::run(grid, finish ? FINISH_THREADS : CHOOSE_THREADS, 16384, seed, [=] { finish ? batch_finish(*r) : batch_choose(*r); });
}
extern "C" int hb_size(int what) {
  const int sizes[] = {(int)sizeof(Rows), PARTS, FINISH_THREADS, CHOOSE_THREADS, FINISH_THREADS / 32 * (int)sizeof(float), (int)sizeof(ChooseTable)};
  return sizes[what];
}
#endif
