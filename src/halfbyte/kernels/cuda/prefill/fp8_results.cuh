// What becomes of the sums of an fp8 item: bias and scales, then swiglu into the packed input of the next product, residual or
// bf16 into rows, or rotation into queries and pages.
//
// Sums lie in registers, which code can only name, not index: whatever is done to them there is written out once for every
// column. At 256 columns and a dozen widths that was 700 KB of instructions. So sums leave their registers as they are, 16
// columns of a warpgroup's 64 rows at a time, and the rest is a loop over shared memory.
#pragma once
#include "prefill/results.cuh"

#if HB_SHAPE == 3
constexpr int BLOCK = 16, LINE = 64 * 4 + 16, BUFFER = BLOCK * LINE;  // [column][row], padded against bank conflicts
static_assert(2 * BUFFER == STAGING, "two buffers in turn");

#ifdef HB_EMULATE
HB_DEV void sync_warpgroup(int group) { sync_group(group); }
#else
HB_DEV void sync_warpgroup(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }
#endif

// Four neighbouring rows of the item, the first of them `row`: what is added, and what they are multiplied by.
struct Rows4 {
  // Never without a value: what may be unset on some path is, for the compiler, alive all over the kernel, once for each width.
  float bias[4] = {0.f, 0.f, 0.f, 0.f}, scale[4] = {0.f, 0.f, 0.f, 0.f};
  HB_DEV_MEMBER void load(const Product& p, const Item& it, int row) {
    const size_t at = ((size_t)it.expert * p.m_tiles + it.first) * 64 + row;
    HB_UNROLL
    for (int i = 0; i < 4; i++) if (p.bias) bias[i] = bias_at(p, at + i);
    const u32 tops = *(const u32*)(p.row_max_scale + at);
    HB_UNROLL
    for (int i = 0; i < 4; i++) scale[i] = power_of_two((float)(int)(tops >> (8 * i) & 255) - 128.f);
  }
  HB_DEV_MEMBER void apply(const u8* from, float column, float (&v)[4]) const {
    const u32x4 w = lds128(from);
    const u32 words[4] = {w.x, w.y, w.z, w.w};
    HB_UNROLL
    for (int i = 0; i < 4; i++) v[i] = as_float(words[i]) * (scale[i] * column) + bias[i];
  }
};

// What one thread of a warpgroup does to a block of columns.
struct Hidden {  // four hidden values of one column: words (t, i) and (t + 1, i) of a group of 32, side by side in the packed form
  static constexpr int ACROSS = 8;
  Rows4 row[2];
  int part, column;
  HB_DEV_MEMBER void load(const Consumer& c, const Item& it, int thread) {
    part = thread % ACROSS;
    column = thread / ACROSS;
    HB_UNROLL
    for (int i = 0; i < 2; i++) row[i].load(c.p, it, c.group * 64 + at(i));
  }
  HB_DEV_MEMBER int at(int i) const { return (part & 1) * 32 + i * 16 + (part >> 1 & 3) * 4; }
  HB_DEV_MEMBER void ahead(const Consumer&, const Item&, int) {}
  HB_DEV_MEMBER void take(const Consumer& c, const Item& it, const u8* buffer, int first) {
    const Product& p = c.p;
    const int slot = it.slot + first + column, group = it.first + c.group;  // of 32 hidden values
    if (first + column >= it.valid) return;
    const float times = c.sh.scales[c.group][first + column];
    u32 words[2];
    HB_UNROLL
    for (int i = 0; i < 2; i++) {
      float v[4];
      row[i].apply(buffer + column * LINE + at(i) * 4, times, v);
      words[i] = bf16_pair(swiglu(p, v[0], v[1]), swiglu(p, v[2], v[3]));
    }
    const int unit = (group & 1) * 4 + (part >> 1 & 3);
    store_words<2>(p.packed + ((size_t)(group >> 1) * p.packed_slots + slot) * 64 + (unit ^ (slot & 7)) * 8 + (part & 1) * 4, words);
  }
};

struct Plain {  // four values of two columns; what is added to them is asked for AHEAD blocks before
  static constexpr int ACROSS = 16, DOWN = 128 / ACROSS, AHEAD = 1;
  Rows4 row;
  Four more[AHEAD + 1][2] = {};
  int part, column;
  size_t base = 0;
  HB_DEV_MEMBER void load(const Consumer& c, const Item& it, int thread) {
    part = thread % ACROSS;
    column = thread / ACROSS;
    row.load(c.p, it, c.group * 64 + part * 4);
    base = (size_t)(it.slot + column) * c.p.out_stride + (it.first + c.group) * 64 + part * 4;
    HB_UNROLL
    for (int i = 0; i < AHEAD; i++) ask(c, it, i * BLOCK, more[i + 1]);
  }
  HB_DEV_MEMBER void ask(const Consumer& c, const Item& it, int first, Four (&to)[2]) const {
    if (!c.p.residual) return;
    HB_UNROLL
    for (int i = 0; i < 2; i++)
      if (first + column + i * DOWN < it.valid) to[i] = *(const Four*)(c.p.residual + base + (size_t)(first + i * DOWN) * c.p.out_stride);
  }
  HB_DEV_MEMBER void ahead(const Consumer& c, const Item& it, int first) {
    HB_UNROLL
    for (int i = 0; i < AHEAD; i++)
      HB_UNROLL
      for (int k = 0; k < 2; k++) more[i][k] = more[i + 1][k];
    ask(c, it, first + AHEAD * BLOCK, more[AHEAD]);
  }
  HB_DEV_MEMBER void take(const Consumer& c, const Item& it, const u8* buffer, int first) {
    HB_UNROLL
    for (int i = 0; i < 2; i++) {
      const int here = column + i * DOWN, at = first + here;
      if (at >= it.valid) continue;
      float v[4];
      row.apply(buffer + here * LINE + part * 16, c.sh.scales[c.group][at], v);
      if (c.p.residual)
        HB_UNROLL
        for (int k = 0; k < 4; k++) v[k] += more[0][i].v[k];
      const size_t to = base + (size_t)(first + i * DOWN) * c.p.out_stride;
      if (c.p.out_bf16) {
        const u32 words[2] = {bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3])};
        store_words<2>((u16*)c.p.out + to, words);
      } else {
        const u32 words[4] = {as_bits(v[0]), as_bits(v[1]), as_bits(v[2]), as_bits(v[3])};
        store_words<4>(c.p.out + to, words);
      }
    }
  }
};

struct Turned {  // four values of a head and those 32 further on; angles are asked for a block before
  static constexpr int ACROSS = 8;
  Rows4 row[2];
  Four turn[2] = {}, next[2] = {};
  int part, column, head = 0;
  bool rotate = false;
  HB_DEV_MEMBER void load(const Consumer& c, const Item& it, int thread) {
    part = thread % ACROSS;
    column = thread / ACROSS;
    head = it.first + c.group;
    rotate = head < c.p.heads + c.p.kv_heads;
    HB_UNROLL
    for (int i = 0; i < 2; i++) row[i].load(c.p, it, c.group * 64 + at(i));
    ask(c, it, 0);
  }
  HB_DEV_MEMBER int at(int i) const { return i * 32 + (part & 7) * 4; }
  HB_DEV_MEMBER void ask(const Consumer& c, const Item& it, int first) {
    if (!rotate || first + column >= it.valid) return;
    HB_UNROLL
    for (int i = 0; i < 2; i++) next[i] = *(const Four*)(c.p.angles + ((size_t)(it.slot + first + column) * 32 + (part & 7) * 4) * 2 + i * 4);
  }
  HB_DEV_MEMBER void ahead(const Consumer& c, const Item& it, int first) {
    turn[0] = next[0];
    turn[1] = next[1];
    ask(c, it, first + BLOCK);
  }
  HB_DEV_MEMBER void take(const Consumer& c, const Item& it, const u8* buffer, int first) {
    const Product& p = c.p;
    const int slot = it.slot + first + column;
    if (first + column >= it.valid) return;
    const float times = c.sh.scales[c.group][first + column];
    float lower[4], upper[4];
    row[0].apply(buffer + column * LINE + at(0) * 4, times, lower);
    row[1].apply(buffer + column * LINE + at(1) * 4, times, upper);
    if (rotate)
      HB_UNROLL
      for (int i = 0; i < 4; i++) {
        const float cos = turn[i / 2].v[i % 2 * 2], sin = turn[i / 2].v[i % 2 * 2 + 1], x = lower[i];
        lower[i] = x * cos - upper[i] * sin;
        upper[i] = upper[i] * cos + x * sin;
      }
    u16* to = p.q + ((size_t)slot * p.heads + head) * 64;
    if (head >= p.heads) {
      const int other = head - p.heads;
      to = p.pool + p.cells[slot] + (other < p.kv_heads ? (size_t)other * 4096 : p.value_offset + (size_t)(other - p.kv_heads) * 4096);
    }
    const u32 words[2][2] = {{bf16_pair(lower[0], lower[1]), bf16_pair(lower[2], lower[3])}, {bf16_pair(upper[0], upper[1]), bf16_pair(upper[2], upper[3])}};
    store_words<2>(to + (part & 7) * 4, words[0]);
    store_words<2>(to + 32 + (part & 7) * 4, words[1]);
  }
};

template <bool HIDDEN, bool TURNED> struct Choice { using type = Plain; };
template <bool TURNED> struct Choice<true, TURNED> { using type = Hidden; };
template <> struct Choice<false, true> { using type = Turned; };
using Finish = Choice<SWIGLU, ROPE>::type;

// Whoever fills a buffer again has passed the barrier that all of its readers reached after reading.
template <int N> HB_DEV void finish(const Consumer& worker, const Item& it, const float (&sums)[N / 2]) {
  constexpr int STEPS = (N + BLOCK - 1) / BLOCK;
  // anew: what is made of these is the same for every item, and must not be kept in registers meanwhile
  const Consumer c{worker.p, worker.sh, anew(worker.group), anew(worker.warp), anew(worker.lane), {}, 0};
  Finish work;
  work.load(c, it, c.warp * 32 + c.lane);
  u8* const staging = c.sh.staging[c.group];
  u8* const mine = staging + (c.lane & 3) * 2 * LINE + (c.warp * 16 + (c.lane >> 2)) * 4;
  sync_warpgroup(c.group);  // the item before
  HB_ROLLED
  for (int step = 0; step < STEPS; step++) {
    const int buffer = (step & 1) * BUFFER;
    work.ahead(c, it, step * BLOCK);
    HB_UNROLL
    for (int s = 0; s < STEPS; s++)
      if (step == s)
        HB_UNROLL
        for (int i = 0; i < 8; i++)
          if (s * 8 + i < N / 2) put32(mine + buffer + (i / 4 * 8 + (i & 1)) * LINE + (i >> 1 & 1) * 32, as_bits(sums[s * 8 + i]));
    sync_warpgroup(c.group);
    work.take(c, it, staging + buffer, step * BLOCK);
  }
}
#endif
