// Rope, the KV write and attention of a batch in one launch, over the paged cache in bf16.
//
// A block is one row, one kv head and one part of its pages; its query heads are the columns of the mma, a warp takes 16
// tokens of every other page. Keys and values of earlier steps are asked for before the kernel in front is done. Tokens of this very
// step are not read from the cache: every block that sees one makes it from qkv, rounded as the cache will hold it, so no
// block waits for another, and rows of one sequence (drafts, the end of a prompt) need no second launch.
//
// How a row's keys are cut into parts depends on its position alone. The last block of a row's parts joins them, in
// order. The sink joins the denominator once, where the last sum is made.
#include "batch/shape.cuh"

constexpr int GROUP = HB_GROUP, KV_HEADS = HB_KV_HEADS, HEADS = GROUP * KV_HEADS, DIM = 64, PAGE = 64;
constexpr int WIDTH = (HEADS + 2 * KV_HEADS) * DIM, WARPS = 8, THREADS = WARPS * 32, HELD = DIM + 4;  // floats of a part
constexpr float LOG2E = 1.4426950408889634f, NEVER = -1e30f;
static_assert(GROUP >= 1 && GROUP <= 8, "one mma column per query head of a group");

struct Attention {              // mirrored in batch.py
  const float* qkv;             // [rows][WIDTH], before rope
  u16* pool;                    // this layer's keys in page 0; heads and positions follow
  const int *table, *positions, *sequence_of, *query_start;
  const float *cosines, *sines; // [rows][32]
  const void* sinks;            // [HEADS], float or bf16; null: none
  u16* out;                     // bf16 [rows][HEADS * DIM]
  float* sums;                  // [rows][KV_HEADS][parts][GROUP][HELD]: 64 values, maximum, sum
  u32* arrivals;                // [rows][KV_HEADS], zero between launches
  i64 page_stride, value_offset;
  int rows, table_stride, parts, window, sinks_float;
  float scale;
};

HB_MIRRORED(Attention, qkv, pool, table, positions, sequence_of, query_start, cosines, sines, sinks, out, sums, arrivals, page_stride,
            value_offset, rows, table_stride, parts, window, sinks_float, scale)

HB_CONST_FN int pages_in_part(int pages) { return pages <= 64 ? 8 : pages <= 512 ? 32 : 128; }

struct Row {
  int position, from, start, base;  // sees tokens from .. position; those from `base` on are this step's, in rows start ..
  int row, head;
};

struct Tokens { u32 k[2][2][4], v[2][2][4]; };  // of 16: [g or g + 8][half of the dims][word]: dims 32 half + 8 t + 2 word

HB_DEV void words(u32 (&to)[4], const u32x4& v) { to[0] = v.x; to[1] = v.y; to[2] = v.z; to[3] = v.w; }

HB_DEV void load_cached(Tokens& a, const Attention& p, const Row& r, const int* table, int page, int warp, int lane) {
  const int g = lane / 4, t = lane % 4, first = page * PAGE + warp % 4 * 16;
  const u16* at = p.pool + (size_t)load32(table + page) * p.page_stride + (size_t)(r.head * PAGE + warp % 4 * 16 + g) * DIM + t * 8;
  HB_UNROLL
  for (int i = 0; i < 2; i++) {
    const int token = first + g + 8 * i;
    const bool on = token >= r.from && token < r.base;  // what else lies there must not meet even a zero weight
    HB_UNROLL
    for (int half = 0; half < 2; half++) {
      u32x4 k = {0, 0, 0, 0}, v = {0, 0, 0, 0};
      if (on) { k = load128(at + i * 8 * DIM + half * 32); v = load128(at + p.value_offset + i * 8 * DIM + half * 32); }
      words(a.k[i][half], k);
      words(a.v[i][half], v);
    }
  }
}

// Dims 8 t .. and 32 + 8 t .. of a head's vector in a row of qkv; rotated if asked.
HB_DEV void fresh(const Attention& p, int row, int at, int t, bool rotate, u32 (&low)[4], u32 (&high)[4]) {
  const float* from = p.qkv + (size_t)row * WIDTH + at + t * 8;
  HB_UNROLL
  for (int j = 0; j < 2; j++) {
    const Four a = four(from + 4 * j), b = four(from + 32 + 4 * j);
    Four x = a, y = b;
    if (rotate) {
      const Four c = four(p.cosines + row * 32 + t * 8 + 4 * j), s = four(p.sines + row * 32 + t * 8 + 4 * j);
      HB_UNROLL
      for (int i = 0; i < 4; i++) { x.v[i] = a.v[i] * c.v[i] - b.v[i] * s.v[i]; y.v[i] = b.v[i] * c.v[i] + a.v[i] * s.v[i]; }
    }
    low[2 * j] = bf16_pair(x.v[0], x.v[1]); low[2 * j + 1] = bf16_pair(x.v[2], x.v[3]);
    high[2 * j] = bf16_pair(y.v[0], y.v[1]); high[2 * j + 1] = bf16_pair(y.v[2], y.v[3]);
  }
}

struct Softmax { float top[2] = {NEVER, NEVER}, sum[2] = {0.f, 0.f}, o[4][4] = {}; };  // heads 2 t and 2 t + 1

HB_DEV void visit(Softmax& m, Tokens& a, const Attention& p, const Row& r, const u32 (&q)[8], int page, int warp, int lane) {
  const int g = lane / 4, t = lane % 4, first = page * PAGE + warp % 4 * 16;
  if (first > r.position || first + 15 < r.from) return;
  float c[4] = {0.f, 0.f, 0.f, 0.f};
  if (first + 15 >= r.base)
    HB_UNROLL
    for (int i = 0; i < 2; i++) {
      const int token = first + g + 8 * i;
      if (token < r.base || token > r.position || token < r.from) continue;
      const int row = r.start + token - r.base, at = (HEADS + r.head) * DIM;
      fresh(p, row, at, t, true, a.k[i][0], a.k[i][1]);
      fresh(p, row, at + KV_HEADS * DIM, t, false, a.v[i][0], a.v[i][1]);
    }
  sync_warp();
  HB_UNROLL
  for (int i = 0; i < 4; i++) {
    const int half = i / 2, x = (i & 1) * 2;
    mma(c, a.k[0][half][x], a.k[1][half][x], a.k[0][half][x + 1], a.k[1][half][x + 1], q[2 * i], q[2 * i + 1]);
  }
  const int low = first + g, high = low + 8;
  const bool seen[2] = {low >= r.from && low <= r.position, high >= r.from && high <= r.position};
  float w[4];
  HB_UNROLL
  for (int h = 0; h < 2; h++) {
    const float s0 = seen[0] ? c[h] * (p.scale * LOG2E) : NEVER, s1 = seen[1] ? c[h + 2] * (p.scale * LOG2E) : NEVER;
    float top = s0 > s1 ? s0 : s1;
    HB_UNROLL
    for (int x = 4; x < 32; x *= 2) { const float o = shfl_xor(top, x); top = o > top ? o : top; }
    top = top > m.top[h] ? top : m.top[h];
    const float fade = exp2_fast(m.top[h] - top);
    m.top[h] = top;
    w[h] = seen[0] ? s0 * 0.f + exp2_fast(s0 - top) : 0.f;  // a score that is infinite either way has no weight
    w[h + 2] = seen[1] ? s1 * 0.f + exp2_fast(s1 - top) : 0.f;
    m.sum[h] = m.sum[h] * fade + w[h] + w[h + 2];
    HB_UNROLL
    for (int i = 0; i < 4; i++) { m.o[i][h] *= fade; m.o[i][h + 2] *= fade; }
  }
  const u32 b0 = transpose8x8(bf16_pair(w[0], w[1])), b1 = transpose8x8(bf16_pair(w[2], w[3]));
  HB_UNROLL
  for (int i = 0; i < 4; i++) {
    const int half = i / 2, x = (i & 1) * 2;
    const u32 a0 = transpose8x8(a.v[0][half][x]), a1 = transpose8x8(a.v[0][half][x + 1]);
    const u32 a2 = transpose8x8(a.v[1][half][x]), a3 = transpose8x8(a.v[1][half][x + 1]);
    mma(m.o[i], a0, a1, a2, a3, b0, b1);
  }
}

struct Shared { float o[WARPS][DIM][10], top[WARPS][8], sum[WARPS][8]; u32 last; };

HB_DEV void finish(const Attention& p, const Row& r, int head, int dim, float top, float sum, float (&o)[4]) {
  if (p.sinks) {
    const float sink = number(p.sinks, p.sinks_float, r.head * GROUP + head) * LOG2E, bound = sink > top ? sink : top, fade = exp2_fast(top - bound);
    sum = sum * fade + exp2_fast(sink - bound);
    HB_UNROLL
    for (int i = 0; i < 4; i++) o[i] *= fade;
  }
  const float f = divide(1.f, sum);
  store64(p.out + ((size_t)r.row * HEADS + r.head * GROUP + head) * DIM + dim, bf16_pair(o[0] * f, o[1] * f), bf16_pair(o[2] * f, o[3] * f));
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) batch_attention(const __grid_constant__ Attention p) {
  Shared& sh = *(Shared*)hb_shared();
  const int thread = hb_thread(), warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const int unit = hb_block() % (p.rows * KV_HEADS), part = hb_block() / (p.rows * KV_HEADS);
  Row r;
  r.row = unit / KV_HEADS;
  r.head = unit % KV_HEADS;
  r.position = (int)load32(p.positions + r.row);
  const int sequence = (int)load32(p.sequence_of + r.row);
  r.start = (int)load32(p.query_start + sequence);
  r.base = (int)load32(p.positions + r.start);
  r.from = p.window && r.position >= p.window ? r.position - p.window + 1 : 0;
  const int* table = p.table + (size_t)sequence * p.table_stride;
  const int begin = r.from / PAGE, pages = r.position / PAGE + 1 - begin, each = pages_in_part(pages), parts = (pages + each - 1) / each;
  if (part >= parts) return;
  int page = begin + part * each + warp / 4;
  const int last = begin + (part * each + each < pages ? part * each + each : pages);
  Tokens a = {};
  if (page < last) load_cached(a, p, r, table, page, warp, lane);
  release_next();
  wait_for_previous();
  u32 q[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  if (g < GROUP) {
    u32 low[4], high[4];
    fresh(p, r.row, (r.head * GROUP + g) * DIM, t, true, low, high);
    HB_UNROLL
    for (int i = 0; i < 4; i++) { q[i] = low[i]; q[4 + i] = high[i]; }
  }
  if (part == parts - 1 && warp == WARPS - 1 && g < 2) {  // the row's own key and value into the cache
    u32 low[4], high[4];
    fresh(p, r.row, (HEADS + g * KV_HEADS + r.head) * DIM, t, g == 0, low, high);
    u16* to = p.pool + (size_t)load32(table + r.position / PAGE) * p.page_stride + g * p.value_offset + (size_t)(r.head * PAGE + r.position % PAGE) * DIM + t * 8;
    store128(to, low[0], low[1], low[2], low[3]);
    store128(to + 32, high[0], high[1], high[2], high[3]);
  }
  sync_warp();
  Softmax m;
  HB_ROLLED
  for (; page < last; page += 2) {
    visit(m, a, p, r, q, page, warp, lane);
    if (page + 2 < last) load_cached(a, p, r, table, page + 2, warp, lane);
  }
  HB_UNROLL
  for (int h = 0; h < 2; h++) {
    HB_UNROLL
    for (int x = 4; x < 32; x *= 2) m.sum[h] += shfl_xor(m.sum[h], x);
    if (g == 0) { sh.top[warp][2 * t + h] = m.top[h]; sh.sum[warp][2 * t + h] = m.sum[h]; }
  }
  HB_UNROLL
  for (int i = 0; i < 8; i++) {  // dims as transpose8x8 left them
    const int dim = (i / 4) * 32 + 8 * (g / 2) + 2 * (i % 4) + g % 2;
    HB_UNROLL
    for (int h = 0; h < 2; h++) sh.o[warp][dim][2 * t + h] = m.o[i / 2][(i & 1) * 2 + h];
  }
  sync_all();
  const int head = thread % 8, dim = thread / 8 * 4;  // the first four warps
  const bool on = head < GROUP && dim < DIM;
  float top = NEVER, sum = 0.f, o[4] = {0.f, 0.f, 0.f, 0.f};
  HB_UNROLL
  for (int w = 0; w < WARPS; w++) top = sh.top[w][head] > top ? sh.top[w][head] : top;
  HB_UNROLL
  for (int w = 0; w < WARPS; w++) {
    const float f = exp2_fast(sh.top[w][head] - top);
    sum += sh.sum[w][head] * f;
    HB_UNROLL
    for (int i = 0; i < 4; i++) o[i] += on ? sh.o[w][dim + i][head] * f : 0.f;
  }
  if (parts == 1) {
    if (on) finish(p, r, head, dim, top, sum, o);
    return;
  }
  float* mine = p.sums + ((size_t)unit * p.parts * GROUP + head) * HELD;
  if (on) {
    float* to = mine + (size_t)part * GROUP * HELD;
    store128(to + dim, as_bits(o[0]), as_bits(o[1]), as_bits(o[2]), as_bits(o[3]));
    if (dim == 0) store64(to + DIM, as_bits(top), as_bits(sum));
  }
  fence_gpu();
  sync_all();
  if (thread == 0) sh.last = counter_add(p.arrivals + unit) == (u32)parts - 1;
  sync_all();
  if (!sh.last) return;
  fence_gpu();
  if (thread == 0) p.arrivals[unit] = 0;
  if (!on) return;
  top = NEVER; sum = 0.f; o[0] = o[1] = o[2] = o[3] = 0.f;
  for (int i = 0; i < parts; i++) {
    const float* from = mine + (size_t)i * GROUP * HELD;
    const u32x4 v = load128(from + dim), held = load128(from + DIM);
    const float theirs = as_float(held.x), now = theirs > top ? theirs : top, a = exp2_fast(top - now), b = exp2_fast(theirs - now);
    sum = sum * a + as_float(held.y) * b;
    o[0] = o[0] * a + as_float(v.x) * b; o[1] = o[1] * a + as_float(v.y) * b;
    o[2] = o[2] * a + as_float(v.z) * b; o[3] = o[3] * a + as_float(v.w) * b;
    top = now;
  }
  finish(p, r, head, dim, top, sum, o);
}

#ifdef HB_EMULATE
extern "C" void hb_run(const char*, const Attention* p, int grid, u32 seed) { emu::run(grid, THREADS, sizeof(Shared), seed, [=] { batch_attention(*p); }); }
extern "C" int hb_size(int what) { return what == 0 ? (int)sizeof(Attention) : what == 1 ? (int)sizeof(Shared) : HELD; }
#endif
