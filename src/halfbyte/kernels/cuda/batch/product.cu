// The product of a batch: Y = W_e X_e + bias for groups of up to eight columns, exact W4A16, at the speed of the memory.
//
// A group is a matrix (an expert, or the only one) and up to eight columns (tokens) that it multiplies: as many as
// mma.m16n8k16 has. The tiles (16 rows, all of K) of all groups form one line, which is cut into a run for each block; the
// end of the line is left to whoever comes first, in pieces, because multiprocessors see unequal bandwidth.
//
// One block per multiprocessor. One warp feeds: it asks the copy engine for the block's tiles (or copies them, see feeding.cuh), as
// far ahead as the ring in shared memory is deep, and cuts runs into items at the borders of groups. WORKERS warps multiply: each holds its part of
// K of the group's columns in registers for as long as the group lasts, and multiplies its chunks of every tile. SUMMERS
// warps add the workers' sums in order and store: one tile each in turn, so that no worker ever waits for another.
//
// Two things ride along, because the end of one kernel and the start of the next cost as much as 35 MB. BOTH: gate_up and down
// are two lines that follow each other, and a group's down begins once all tiles of its gate_up are counted as stored; every
// block is resident (host.py looks at load that it can be) and does its gate_up first, so nobody waits for work that nobody
// does, and who waits for seconds stops the kernel. ROUTER: o's summing warps multiply
// what they store by the router.
//
// A column's result depends on that column alone: its products are added in the order of k, group of 32 by group of 32
// within a warp, then warp by warp, whoever computes them.
#include "batch/weights.cuh"

// ---- groups ---------------------------------------------------------------------------------------------------------

struct Group { int expert, first, count; };  // columns first .. of the list

HB_DEV int groups_of(const Product& p, const Shared& sh) { return IDS ? sh.groups : (p.columns + COLUMNS - 1) / COLUMNS; }
HB_DEV Group group_at(const Product& p, const Shared& sh, int index) {
  if (IDS) {
    const u32 g = sh.group[index];
    return {(int)(g >> 16), (int)(g >> 4 & 0xfffu), (int)(g & 15u)};
  }
  const int left = p.columns - index * COLUMNS;
  return {0, index * COLUMNS, left < COLUMNS ? left : COLUMNS};
}
HB_DEV bool paired(const Group& group) { return PAIRED && group.count <= COLUMNS / 2; }
HB_DEV int column_at(const Product& p, const Shared& sh, int index) { return IDS ? sh.list[index] : index; }

// Counts are zero, and all threads have met. The feeding warp needs the groups only and does not wait for the lists.
HB_DEV void group_columns(const Product& p, Shared& sh, int thread, int warp) {
  HB_ROLLED
  for (int i = thread; i < p.columns; i += THREADS) {
    const int e = (int)load32(p.ids + i);
    sh.id[i] = (u16)e;
    shared_count(&sh.count[e]);
  }
  sync_all();
  if (thread < 32) {  // running sums over the experts, some neighbours to a lane: columns below, groups above
    const int each = (p.experts + 31) / 32, first = thread * each, last = first + each < p.experts ? first + each : p.experts;
    u32 mine = 0;
    HB_ROLLED
    for (int e = first; e < last; e++) mine += (u32)sh.count[e] | (u32)((sh.count[e] + COLUMNS - 1) / COLUMNS) << 16;
    u32 sum = mine;
    HB_UNROLL
    for (int d = 1; d < 32; d *= 2) {
      const u32 y = shfl(sum, thread - d);
      if (thread >= d) sum += y;
    }
    u32 before = sum - mine;
    bool crowded = false;
    HB_ROLLED
    for (int e = first; e < last; e++) {
      const int n = sh.count[e];
      crowded = crowded || n > COLUMNS;
      sh.start[e] = (int)(before & 0xffffu);
      HB_ROLLED
      for (int left = n; left > 0; left -= COLUMNS) {
        sh.group[before >> 16] = (u32)e << 16 | (before & 0xffffu) << 4 | (u32)(left < COLUMNS ? left : COLUMNS);
        before += (u32)(left < COLUMNS ? left : COLUMNS) | 1u << 16;
      }
    }
    if (thread == 31) sh.groups = (int)(before >> 16);
    const u32 votes = warp_ballot(crowded);
    if (thread == 0) sh.crowded = votes;
  }
  sync_all();
  if (warp == WORKERS) return;
  // In which place of a group a column comes does not change its result; in which group it comes, blocks must agree on.
  HB_ROLLED
  for (int i = warp < WORKERS ? thread : thread - 32; i < p.columns; i += THREADS - 32) {
    const int e = sh.id[i];
    if (sh.count[e] <= COLUMNS) sh.list[shared_count(&sh.start[e])] = (u16)i;
  }
  // The columns of an expert of several groups are in order: a warp passes over all columns once for each such expert.
  const int each = (p.experts + 31) / 32, lane = thread % 32;
  HB_ROLLED
  for (int l = warp < WORKERS ? warp : warp - 1; l < 32; l += THREADS / 32 - 1) {
    if (!(sh.crowded >> l & 1)) continue;
    HB_ROLLED
    for (int e = l * each; e < l * each + each && e < p.experts; e++) {
      if (sh.count[e] <= COLUMNS) continue;
      int place = sh.start[e];
      HB_ROLLED
      for (int from = 0; from < p.columns; from += 32) {
        const bool mine = from + lane < p.columns && sh.id[from + lane] == e;
        const u32 votes = warp_ballot(mine);
        if (mine) sh.list[place + popcount(votes & ((1u << lane) - 1))] = (u16)(from + lane);
        place += popcount(votes);
      }
    }
  }
  sync_some<1, THREADS - 32>();
}

// ---- the feeding warp -----------------------------------------------------------------------------------------------

constexpr u64 PATIENCE = 20'000'000'000ull;  // ns

struct Feeder {  // a lane that feeds
  const Product& p;
  Shared& sh;
  u64 policy;
  int lane;
  int slot = 0, turn = 0;
  u32 phase = 0;

  // If a copy never arrived, the workers would wait for it for ever, and this warp for them: it has registers to spare for a clock.
  // Of the experts alone, whose host gives it a place to say so.
  HB_DEV_MEMBER void wait(u64* bar, u32 parity) {
    if (!BOTH) { wait_for(bar, parity); return; }
    u64 since = 0;
    for (u32 tries = 1; !bar_try(bar, parity); wait_a_bit(), tries++) {
      if (tries % 1024) continue;
      const u64 now = clock_global();
      if (!since) since = now;
      if (now - since > PATIENCE) give_up(p.failure, 0x900);
    }
  }
  HB_DEV_MEMBER void publish(int stage, int group, int tile, int count) {
    const int q = turn % QUEUE;
    wait(&sh.item_empty[q], (u32)(turn / QUEUE & 1) ^ 1);
    if (leads(lane)) {
      sh.item[q] = Item{group, tile, count, stage};
      bar_arrive(&sh.item_full[q], 1);
    }
    turn++;
  }
  HB_DEV_MEMBER void run(int stage, int at, int end) {  // tiles of the line
    const int tiles = p.stage[stage].tiles;
    while (at < end) {
      const int group = at / tiles, tile = at - group * tiles;
      const int count = tiles - tile < end - at ? tiles - tile : end - at;
      publish(stage, group, tile, count);
      const u8* from = p.stage[stage].weights + ((size_t)group_at(p, sh, group).expert * tiles + tile) * (size_t)TILE_BYTES;
      HB_ROLLED
      for (int i = 0; i < count; i++)
        HB_UNROLL
        for (int part = 0; part < PARTS; part++) {
          const int bytes = part_bytes(part);
          wait(&sh.empty[slot], phase ^ 1);
          begin_copies(&sh.full[slot], bytes);
          copy_bytes(sh.ring[slot], from, bytes, &sh.full[slot], policy, lane);
          end_copies(&sh.full[slot]);
          from += bytes;
          if (++slot == SLOTS) { slot = 0; phase ^= 1; }
        }
      at += count;
    }
  }
  // The next number of a counter, for all lanes that feed.
  HB_DEV_MEMBER int draw(u32* counter) const {
    if (COPIERS == 1) return (int)counter_add(counter);
    return (int)shfl(lane == 0 ? counter_add(counter) : 0, 0);
  }
};

HB_DEV void mark(const Product& p, int i) { if (p.trace) p.trace[hb_block() * 4 + i] = clock_global(); }

// Seven eighths of the line are cut into even runs. Of the rest, three quarters go in pieces of PIECE tiles to whoever asks
// first, and the last in single tiles, so that all blocks end together. Runs of the second stage are of groups whose first
// stage was cut into runs as well, so it is stored long before they come, and what was dealt out last comes last again.
HB_DEV void feed(const Product& p, Shared& sh, int lane) {
  Feeder f{p, sh, IDS ? streaming_policy() : ordinary_policy(), lane};  // kept in L2, the experts' stream is 14 % slower
  const int block = hb_block(), grid = hb_grid(), groups = groups_of(p, sh);
  HB_ROLLED
  for (int stage = 0; stage < (BOTH ? 2 : 1); stage++) {
    const int all = groups * p.stage[stage].tiles;
    const int pieces = p.tickets ? all / 8 * 3 / 4 / PIECE : 0, fixed = p.tickets ? all - all / 8 : all;
    f.run(stage, (int)((i64)fixed * block / grid), (int)((i64)fixed * (block + 1) / grid));
    if (p.tickets) {
      if (p.early) wait_for_previous();  // which may have zeroed them
      for (;;) {
        const int t = f.draw(p.tickets + stage), at = fixed + (t < pieces ? t * PIECE : pieces * (PIECE - 1) + t);
        if (at >= all) break;
        f.run(stage, at, t < pieces ? at + PIECE : at + 1);
      }
    }
  }
  if (leads(lane)) mark(p, 2);
  f.publish(0, 0, 0, 0);
  finish_copies();
}

// ---- items, for workers and summers ---------------------------------------------------------------------------------

struct Items {
  Shared& sh;
  int lane, turn = 0;
  HB_DEV_MEMBER Item next() {
    const int q = turn % QUEUE;
    wait_for(&sh.item_full[q], (u32)(turn / QUEUE & 1));
    const Item it = sh.item[q];
    sync_warp();
    if (lane == 0) bar_arrive(&sh.item_empty[q], 1);
    turn++;
    return it;
  }
};

// ---- the multiplying warps ------------------------------------------------------------------------------------------

// Lane (g, t): eight consecutive k of every group of 32 of column g. See tile16 for the order. PAIR: of the even groups of column
// g for g < 4, of the odd ones of column g - 4 otherwise; zeros for the others.
template <bool PAIR> struct Operand {
  u32 b[EACH][8];
  HB_DEV_MEMBER void load(const Product& p, const Stage& s, const Shared& sh, const Group& group, int warp, bool whole, int lane) {
    const int g = lane / 4, t = lane % 4, column = PAIR ? g % 4 : g;
    const bool on = column < group.count;
    const u16* x = s.x;
    if (on) x += (size_t)(column_at(p, sh, group.first + column) / s.share) * K + first_chunk(warp) * 64 + t * 8;
    HB_UNROLL
    for (int c = 0; c < EACH; c++)
      HB_UNROLL
      for (int half = 0; half < 2; half++) {
        u32x4 v = {0, 0, 0, 0};
        if (on && (!PAIR || half == g / 4) && (!SHORT || c < EACH - 1 || whole)) v = load128(x + c * 64 + half * 32);
        u32* to = b[c] + half * 4;
        to[0] = scale_in(v.x); to[1] = scale_in(v.y); to[2] = scale_in(v.z); to[3] = scale_in(v.w);
      }
  }
};

struct Worker {
  const Product& p;
  Shared& sh;
  u32 base;
  int warp, lane;
  int slot = warp / TEAM, buffer = 0;
  u32 phase = 0, red_phase = 1;

  template <bool PAIR> HB_DEV_MEMBER void run(const Item& it, const Group& group) {
    const int g = lane / 4, t = lane % 4;
    const bool whole = !SHORT || opaque(warp < WORKERS - SHORT);  // opaque: it would be worked out again for every tile
    const u32 from = base + (first_chunk(warp) - first_of(warp / TEAM)) * CHUNK, full = base + HB_AT(full), empty = base + HB_AT(empty);
    const u32 to = base + HB_AT(red) + warp * (COLUMNS * 16 * 4);
    const u32 at_low = red_at(t, g) * 4, at_high = red_at(t, g + 8) * 4;  // columns 2 t; 2 t + 1 four places on
    Operand<PAIR> x;
    x.load(p, p.stage[BOTH ? it.stage : 0], sh, group, warp, whole, lane);
    HB_ROLLED
    for (int i = 0; i < it.count; i++) {
      float acc[4] = {0.f, 0.f, 0.f, 0.f};
      wait_for(full + slot * 8, phase);
      multiply_chunks<PAIR>(acc, x.b, from + slot * SLOT_BYTES, whole, lane);
      wait_for(base + HB_AT(red_empty) + buffer * 8, red_phase);
      const u32 red = to + buffer * (WORKERS * COLUMNS * 16 * 4);
      sts32(red + at_low, as_bits(acc[0]));
      sts32(red + at_low + 256, as_bits(acc[1]));
      sts32(red + at_high, as_bits(acc[2]));
      sts32(red + at_high + 256, as_bits(acc[3]));
      sync_warp();
      // The slot is free once the sums are stored, not before: only then have the weights arrived in registers. A load
      // that waits behind others' loads of x can be overtaken by an arrival, and then by the copy engine's next tile.
      if (lane == 0) { bar_arrive(base + HB_AT(red_full) + buffer * 8, 1); bar_arrive(empty + slot * 8, 1); }
      slot += PARTS;
      if (slot >= SLOTS) { slot -= SLOTS; phase ^= 1; }
      if (++buffer == SUMMERS) { buffer = 0; red_phase ^= 1; }
    }
  }
};

HB_DEV void multiply(const Product& p, Shared& sh, int warp, int lane) {
  Worker worker{p, sh, shared_base(), warp, lane};
  Items items{sh, lane};
  bool waited = !p.early;
  for (;;) {
    const Item it = items.next();
    if (it.count == 0) break;
    if (!waited) {
      wait_for_previous();
      if (warp == 0 && lane == 0) mark(p, 1);
      waited = true;
    }
    if (BOTH && it.stage)
      for (u32 tries = 0; load_acquire(p.done + it.group) < (u32)p.stage[0].tiles; wait_a_bit())
        if (++tries > (1u << 23)) give_up(p.failure, 0x800);  // seconds
    const Group group = group_at(p, sh, it.group);
    if (paired(group)) worker.run<PAIRED>(it, group);
    else worker.run<false>(it, group);
  }
}

// ---- the summing warps ----------------------------------------------------------------------------------------------

HB_DEV float swiglu(const Product& p, float gate_in, float up_in) {
  const float gate = fminf(gate_in, p.limit), up = fminf(fmaxf(up_in, -p.limit), p.limit);
  return keep_broken(divide((up + 1.f) * gate, 1.f + exp2_fast(gate * (p.alpha * -1.4426950408889634f))), gate_in, up_in);
}

// The router's products with 16 values of each column, as the summing warp has them: lane (place, quad) four of a column, which
// is an operand of the mma if its k are counted that way. x enters as two bf16, so that a choice between experts is made with
// 16 bits and not with eight.
struct Routing {
  static constexpr int ALL = ROUTER / 16, HELD = ALL < 8 ? ALL : 8;
  u32x4 w[HELD ? HELD : 1];  // of experts g and g + 8
  HB_DEV_MEMBER void load(const Product& p, int first, int row, int lane) {
    const u16* from = p.router + (size_t)(row / 16) * (ROUTER * 16) + (first * 32 + lane) * 8;
    HB_UNROLL
    for (int i = 0; i < HELD; i++)
      if (first + i < ALL) w[i] = ldg128(from + i * 256);
  }
  HB_DEV_MEMBER void run(const Product& p, const float (&v)[4], const Group& group, int row, int lane) {
    const int g = lane / 4, t = lane % 4;
    const Four n = four_at<true>(p.norm, p.norm_float, row);
    const float a = v[0] * n.v[0], b = v[1] * n.v[1], c = v[2] * n.v[2], d = v[3] * n.v[3];
    const u32 h0 = bf16_pair(a, b), h1 = bf16_pair(c, d);
    const u32 r0 = bf16_pair(a - bf16_low(h0), b - bf16_high(h0)), r1 = bf16_pair(c - bf16_low(h1), d - bf16_high(h1));
    HB_UNROLL
    for (int first = 0; first < ALL; first += 8) {
      if (first) load(p, first, row, lane);
      HB_UNROLL
      for (int i = 0; i < HELD; i++) {
        if (first + i >= ALL) continue;
        float sum[4] = {0.f, 0.f, 0.f, 0.f};
        mma(sum, w[i].x, w[i].z, w[i].y, w[i].w, h0, h1);
        mma(sum, w[i].x, w[i].z, w[i].y, w[i].w, r0, r1);
        HB_UNROLL
        for (int j = 0; j < 2; j++) {
          const int column = column_of(2 * t + j);
          float* to = p.logits + ((size_t)(row / 16) * p.columns + group.first + column) * ROUTER + (first + i) * 16 + g;
          if (column < group.count) { to[0] = sum[j]; to[8] = sum[2 + j]; }
        }
      }
    }
  }
};

// A lane adds four rows of a column: the first half of the warps, the second half, then both. Paired columns have their odd groups
// two places on, and leave half of the lanes: a half of the warps each.
struct Summer {
  static constexpr int HALF = (WORKERS + 1) / 2, STRIDE = COLUMNS * 16 * 4;
  u32 at;  // of this summer's sums
  int lane;
  HB_DEV_MEMBER int place(bool pair) const { return pair ? (lane / 4 & 1) + (lane / 8 & 1) * 4 : lane / 4; }
  static HB_DEV_MEMBER void add(float (&v)[4], u32 from) {
    const u32x4 s = lds128(from);
    v[0] += as_float(s.x); v[1] += as_float(s.y); v[2] += as_float(s.z); v[3] += as_float(s.w);
  }
  static HB_DEV_MEMBER void add(float (&v)[4], const float (&w)[4]) {
    HB_UNROLL
    for (int k = 0; k < 4; k++) v[k] += w[k];
  }
  template <bool PAIR> HB_DEV_MEMBER void sum(float (&v)[4]) const {
    const int quad = lane % 4, p = place(PAIR);
    if (!PAIR) {
      const u32 from = at + red_at(p, quad * 4) * 4;
      float second[4] = {0.f, 0.f, 0.f, 0.f};
      HB_UNROLL
      for (int w = 0; w < WORKERS; w++) add(w < HALF ? v : second, from + w * STRIDE);
      add(v, second);
      return;
    }
    const int mine = lane / 16;
    const u32 even = at + mine * (HALF * STRIDE) + red_at(p, quad * 4) * 4, odd = at + mine * (HALF * STRIDE) + red_at(p + 2, quad * 4) * 4;
    HB_UNROLL
    for (int w = 0; w < HALF; w++) {
      if (2 * HALF > WORKERS && w == HALF - 1 && mine) continue;
      float one[4] = {0.f, 0.f, 0.f, 0.f}, other[4] = {0.f, 0.f, 0.f, 0.f};
      add(one, even + w * STRIDE);
      add(other, odd + w * STRIDE);
      add(one, other);
      add(v, one);
    }
    HB_UNROLL
    for (int k = 0; k < 4; k++) v[k] += shfl_xor(v[k], 16);
  }
};

HB_DEV void sum_up(const Product& p, Shared& sh, int summer, int lane) {
  const u32 base = shared_base();
  const int quad = lane % 4;
  const Summer sums{base + (u32)HB_AT(red) + summer * (WORKERS * COLUMNS * 16 * 4), lane};
  const u32 full = base + HB_AT(red_full) + summer * 8, empty = base + HB_AT(red_empty) + summer * 8;
  u32 phase = 0;
  int next = summer;  // tiles from now until mine
  Items items{sh, lane};
  if (p.early) wait_for_previous();  // out may be read by the kernel before this one
  for (;;) {
    const Item it = items.next();
    if (it.count == 0) break;
    const int stage = BOTH ? it.stage : 0;
    const Stage& s = p.stage[stage];
    const Group group = group_at(p, sh, it.group);
    const bool pair = paired(group);
    const int column = column_of(sums.place(pair));
    const bool on = column < group.count && !(pair && lane >= 16);
    const size_t to = on ? (size_t)column_at(p, sh, group.first + column) * s.tiles * (has_swiglu(stage) ? 8 : 16) : 0;
    const size_t first = (size_t)group.expert * s.tiles * 16;
    u32 stored = 0;
    int i = next;
    HB_ROLLED
    for (; i < it.count; i += SUMMERS) {
      const int row = (it.tile + i) * 16 + quad * 4;
      const Four bias = four_at<true>(s.bias, s.bias_float, first + row);
      u32x4 before = {0, 0, 0, 0};
      if (!SWIGLU && p.residual && on) before = load128(p.residual + to + row);
      Routing routing;
      if (ROUTER) routing.load(p, 0, row, lane);
      float v[4] = {0.f, 0.f, 0.f, 0.f};
      wait_for(full, phase);
      phase ^= 1;
      if (pair) sums.sum<PAIRED>(v);
      else sums.sum<false>(v);
      sync_warp();
      if (lane == 0) bar_arrive(empty, 1);
      HB_UNROLL
      for (int k = 0; k < 4; k++) v[k] = v[k] * SCALE_OUT + bias.v[k];
      if (has_swiglu(stage)) {
        if (on) store32((u16*)s.out + to + row / 2, bf16_pair(swiglu(p, v[0], v[1]), swiglu(p, v[2], v[3])));
      } else {
        const u32 r[4] = {before.x, before.y, before.z, before.w};
        HB_UNROLL
        for (int k = 0; k < 4; k++) v[k] += as_float(r[k]);
        if (on) store128((float*)s.out + to + row, as_bits(v[0]), as_bits(v[1]), as_bits(v[2]), as_bits(v[3]));
        if (ROUTER) routing.run(p, v, group, row, lane);
      }
      stored++;
    }
    next = i - it.count;
    if (BOTH && stage == 0) {
      sync_warp();
      if (lane == 0 && stored) add_release(p.done + it.group, stored);
    }
  }
}

#if HB_STAGES == 2
#define batch_product batch_experts  // its name in a profile
#endif
extern "C" __global__ void __maxnreg__(REGISTERS) batch_product(const __grid_constant__ Product p) {
  Shared& sh = *(Shared*)hb_shared();
  const int thread = hb_thread(), warp = thread / 32, lane = thread % 32;
  if (thread == 0) { mark(p, 0); if (RELEASES) release_next(); }
  if (warp == 0) {  // one warp, so that few threads pay for the fence
    HB_ROLLED
    for (int s = lane; s < SLOTS; s += 32) {
      bar_init(&sh.full[s], COPIERS);
      bar_init(&sh.empty[s], s % PARTS < PARTS - 1 ? TEAM : WORKERS - TEAM * (PARTS - 1));
    }
    if (lane < SUMMERS) { bar_init(&sh.red_full[lane], WORKERS); bar_init(&sh.red_empty[lane], 1); }
    if (lane < QUEUE) { bar_init(&sh.item_full[lane], 1); bar_init(&sh.item_empty[lane], WORKERS + SUMMERS); }
    bar_init_done();
  }
  if (IDS)
    HB_ROLLED
    for (int e = thread; e < p.experts; e += THREADS) sh.count[e] = 0;
  sync_all();
  if (!p.early) {
    wait_for_previous();
    if (thread == 0) { if (!RELEASES) release_next(); mark(p, 1); }
  }
  if (IDS) group_columns(p, sh, thread, warp);
  if (warp < WORKERS) multiply(p, sh, warp, lane);
  else if (warp > WORKERS) sum_up(p, sh, warp - WORKERS - 1, lane);
  else if (feeds(lane)) feed(p, sh, lane);
  if (thread == 0) mark(p, 3);
}

#ifdef HB_EMULATE
extern "C" void hb_run(const char*, const Product* p, int grid, u32 seed) { emu::run(grid, THREADS, sizeof(Shared), seed, [=] { batch_product(*p); }); }
extern "C" int hb_size(int what) { return what == 0 ? (int)sizeof(Product) : what == 1 ? (int)sizeof(Shared) : THREADS; }
#endif
