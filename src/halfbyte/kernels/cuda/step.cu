// One decode step of gpt-oss in one kernel: embedding, all layers, lm_head, argmax. One block per multiprocessor stays
// for the whole step. Its feeding warp streams the block's weights and pages into a ring in shared memory, without
// regard to what the other blocks do; only the experts must be known before theirs can be asked for. Its
// working warps go through five phases a layer; what passes between blocks goes through mailboxes (box.cuh).
//
//   A  norm, qkv                          reads x       writes qkv
//   B  rope, attention, KV write          reads qkv     writes attn (long contexts: parts, merged by another block)
//   C  o, residual, router products       reads attn    writes mid, router logits, the start of the next x
//   D  top-4, gate_up, swiglu             reads mid     writes h
//   E  down, weighted                     reads h       adds to the next x
//
// Results do not depend on timing: floats are added in a fixed order, and what is added in any order is integer.
#include "attention.cuh"

constexpr int F_QKV = HB_FORMAT_QKV, F_O = HB_FORMAT_O, F_HEAD = HB_FORMAT_HEAD;
constexpr int QKV_TILES = QKV / 16, O_TILES = HIDDEN / 16, UP_TILES = 2 * INTER / 16, DOWN_TILES = HIDDEN / 16, HEAD_TILES = VOCAB / 16;
static_assert(O_TILES < 512, "contributions are counted in nine bits");

// The down tiles of a block: blocks are dealt out evenly to experts where that comes out even, else tiles to blocks.
HB_DEV void down_range(int count, int block, int grid, int& first, int& last) {
  if (grid % count == 0) {
    const int each = grid / count, expert = block / each, i = block % each;
    first = expert * DOWN_TILES + DOWN_TILES * i / each;
    last = expert * DOWN_TILES + DOWN_TILES * (i + 1) / each;
  } else {
    const int all = count * DOWN_TILES;
    first = all * block / grid;
    last = all * (block + 1) / grid;
  }
}

HB_DEV void down_share(const Shared& sh, int count, int block, int grid, int& first, int& last) {
  if (count == TOP_K) { first = sh.down_first; last = sh.down_last; }
  else down_range(count, block, grid, first, last);
}

// ---- routing, by the feeding warp -----------------------------------------------------------------------------------

HB_DEV void route(Shared& sh, const Step& p, const Layer& weights, int layer, int lane, u32 tag) {
  constexpr int PER_LANE = EXPERTS / 32, PAIRS = O_TILES / 2, MINE = (PAIRS + 31) / 32;  // experts and pairs of squares of a lane
  Routing& out = sh.routing[layer & 1];
  for (int row = 0; row < p.rows; row++) {
    const u64* logits = p.box.logits + ((size_t)(layer % 3) * ROWS + row) * ROUTER_COPIES * EXPERTS;
    const u64* ssq = p.box.ssq + (size_t)row * O_TILES;
    u64 sum[PER_LANE];
    u64x2 square[MINE];
    float bias[PER_LANE];
    HB_UNROLL
    for (int i = 0; i < PER_LANE; i++) bias[i] = bf16_at(weights.router_bias, lane * PER_LANE + i);
    Patience patience;
    HB_ROLLED
    for (;;) {
      for (;;) {  // one expert first, see load_operand
        u64 probe = 0;
        HB_UNROLL
        for (int c = 0; c < ROUTER_COPIES; c++) probe += box_load(logits + c * EXPERTS + EXPERTS - 1);
        if (contributions(probe) == O_TILES) break;
        patience.wait(0x502);
      }
      if (lane == 0) stamp(p, hb_block(), layer, 25);
      bool ready = true;
      u64 word[ROUTER_COPIES][PER_LANE];
      HB_UNROLL
      for (int c = 0; c < ROUTER_COPIES; c++)
        HB_UNROLL
        for (int i = 0; i < PER_LANE; i += PER_LANE % 2 ? 1 : 2) {
          const u64* from = logits + c * EXPERTS + lane * PER_LANE + i;
          if (PER_LANE % 2) word[c][i] = box_load(from);
          else { const u64x2 two = box_load2(from); word[c][i] = two.x; word[c][i + 1] = two.y; }
        }
      HB_UNROLL
      for (int i = 0; i < MINE; i++) {
        square[i] = {tag, tag};
        if (i * 32 + lane < PAIRS) square[i] = box_load2(ssq + 2 * (i * 32 + lane));
      }
      HB_UNROLL
      for (int i = 0; i < PER_LANE; i++) {
        sum[i] = 0;
        HB_UNROLL
        for (int c = 0; c < ROUTER_COPIES; c++) sum[i] += word[c][i];
        ready &= contributions(sum[i]) == O_TILES;
      }
      HB_UNROLL
      for (int i = 0; i < MINE; i++) ready &= has(square[i].x, tag) && has(square[i].y, tag);
      if (warp_ballot(ready) == 0xffffffffu) break;
      patience.wait(0x500);
    }
    float squares = 0.f;
    HB_UNROLL
    for (int i = 0; i < MINE; i++) squares += as_float(payload(square[i].x)) + as_float(payload(square[i].y));  // zero where there is none
    HB_UNROLL
    for (int x = 1; x < 32; x *= 2) squares += shfl_xor(squares, x);
    const float scale = recip_sqrt_normal(squares * (1.f / HIDDEN) + p.norm_eps);
    u32 key[PER_LANE];
    HB_UNROLL
    for (int i = 0; i < PER_LANE; i++) key[i] = orderable(summed(sum[i]) * scale + bias[i]);
    float value[TOP_K];
    int expert[TOP_K];
    HB_UNROLL
    for (int k = 0; k < TOP_K; k++) {  // ties go to the lower expert
      u32 best = 0;
      HB_UNROLL
      for (int i = 0; i < PER_LANE; i++) best = key[i] > best ? key[i] : best;
      best = warp_max(best);
      u32 where = EXPERTS;
      HB_UNROLL
      for (int i = PER_LANE - 1; i >= 0; i--) if (key[i] == best) where = lane * PER_LANE + i;
      where = warp_min(where);
      HB_UNROLL
      for (int i = 0; i < PER_LANE; i++) if ((u32)(lane * PER_LANE + i) == where) key[i] = 0;
      value[k] = from_orderable(best);
      expert[k] = (int)where;
    }
    float weight[TOP_K], total = 0.f;
    HB_UNROLL
    for (int k = 0; k < TOP_K; k++) { weight[k] = exp2_fast((value[k] - value[0]) * LOG2E); total += weight[k]; }
    if (lane == 0) {
      HB_UNROLL
      for (int k = 0; k < TOP_K; k++) { out.expert[row][k] = expert[k]; out.weight[row][k] = divide(weight[k], total); }
      out.scale[row] = scale;
    }
  }
  sync_warp();
  if (lane == 0) {  // distinct experts, in order of first appearance
    int n = 0;
    if (p.rows == 1) for (; n < TOP_K; n++) out.list[n] = out.expert[0][n];
    else for (int i = 0; i < p.rows * TOP_K; i++) {
      const int e = out.expert[i / TOP_K][i % TOP_K];
      bool known = false;
      for (int j = 0; j < n; j++) known |= out.list[j] == e;
      if (!known) out.list[n++] = e;
    }
    out.count = n;
    bar_arrive(&sh.routed, 1);
  }
  sync_warp();
}

// The small vectors of a layer are read where nothing hides their latency: have them in L2 a layer ahead, all blocks
// together, each its share.
HB_DEV void warm(const Layer& l, int lane, int block, int grid) {
  const int i = block * 32 + lane, n = grid * 32;
  for (int k = i * 64; k < HIDDEN; k += n * 64) { prefetch_l2(l.attn_norm + k); prefetch_l2(l.mlp_norm + k); prefetch_l2(l.o_bias + k); }
  for (int k = i * 64; k < QKV; k += n * 64) prefetch_l2(l.qkv_bias + k);
  for (int k = i * 64; k < EXPERTS; k += n * 64) prefetch_l2(l.router_bias + k);
  for (int k = i * 64; k < HEADS; k += n * 64) prefetch_l2(l.sinks + k);
  for (int tile = block; tile < O_TILES; tile += grid)
    for (int k = lane * 64; k < EXPERTS * 16; k += 32 * 64) prefetch_l2(l.router + (size_t)tile * EXPERTS * 16 + k);
}

HB_DEV int kept_of(int tiles, int grid) { return tiles / grid > OPEN ? tiles / grid - OPEN : 0; }

// The memory serves some multiprocessors half as fast again as others. So a block's first tiles of gate_up are its own, the
// rest go to whoever has room; a ticket is asked for one tile ahead. Whoever multiplies a tile, its bits are the same.
HB_DEV void give_tiles(Feeder& f, const Step& p, const Layer& l, const Routing& r, int layer, int block, int grid) {
  const int all = r.count * UP_TILES, kept = r.count == TOP_K ? f.sh.up_kept : kept_of(all, grid);
  u32 ticket = take_ticket(p.control + 2 + layer);
  HB_ROLLED
  for (int n = 0;; n++) {
    int i = block + n * grid;
    if (n >= kept) {
      i = kept * grid + (int)ticket;
      if (i >= all) i = -1; else ticket = take_ticket(p.control + 2 + layer);
    }
    f.sh.given[n % GIVEN] = i;
    if (i < 0) break;
    f.tile<MXFP4, HIDDEN>(l.gate_up, (size_t)r.list[i / UP_TILES] * UP_TILES + i % UP_TILES);
  }
  for (int s = 0; s < Tile<MXFP4, HIDDEN>::slots(); s++) f.put(nullptr, 0);
}

HB_PHASE void feed() {
  Shared& sh = *(Shared*)hb_shared();
  const Step& p = sh.step;
  const int lane = hb_thread() % 32, block = hb_block(), grid = hb_grid();
  Feeder f{sh, streaming_policy(), Cursor(), true};
  for (int layer = 0; layer < LAYERS; layer++) {
    const Layer& l = sh.layers[layer];
    const bool sliding = layer % 2 == 0;
    if (lane == 0) {
      for (int i = block; i < QKV_TILES; i += grid) f.tile<F_QKV, HIDDEN>(l.qkv, i);
      Unit u = sh.unit[sliding];
      for (int i = grid - 1 - block; u.on; u = find_unit(sh, p.rows, sliding, i += grid))
        for (int page = u.first; page < u.last; page++) {
          const u8 *keys = page_of(p, sh, sliding, u.row, page, layer / 2, 0, u.head), *values = keys + KV_HEADS * PAGE_BYTES;
          if (PAGE_WHOLE) f.put(keys, PAGE_BYTES, values, PAGE_BYTES);
          else { f.put(keys, PAGE_BYTES); f.put(values, PAGE_BYTES); }
        }
      for (int i = block; i < O_TILES; i += grid) f.tile<F_O, Q_DIM>(l.o, i);
    }
    sync_warp();
    if (lane == 0) stamp(p, block, layer, 24);
    if (layer + 1 < LAYERS) warm(sh.layers[layer + 1], lane, block, grid);
    route(sh, p, l, layer, lane, sh.epoch * (LAYERS + 1) + layer + 1);
    if (lane == 0) {
      stamp(p, block, layer, 26);
      const Routing& r = sh.routing[layer & 1];
      if (OPEN) give_tiles(f, p, l, r, layer, block, grid);
      else for (int i = block; i < r.count * UP_TILES; i += grid)
        f.tile<MXFP4, HIDDEN>(l.gate_up, (size_t)r.list[i / UP_TILES] * UP_TILES + i % UP_TILES);
      stamp(p, block, layer, 27);
      int first, last;
      down_share(sh, r.count, block, grid, first, last);
      for (int i = first; i < last; i++)
        f.tile<MXFP4, INTER>(l.down, (size_t)r.list[i / DOWN_TILES] * DOWN_TILES + i % DOWN_TILES);
      stamp(p, block, layer, 28);
    }
    sync_warp();
  }
  if (lane == 0)
    for (int i = block; i < HEAD_TILES; i += grid) f.tile<F_HEAD, HIDDEN>(p.head, i);
}

// ---- the phases, by the working warps -------------------------------------------------------------------------------

template <int FORMAT, bool FIRST> HB_DEV FromResidual<FORMAT, FIRST> residual(const Worker& w, int layer, const u16* norm) {
  FromResidual<FORMAT, FIRST> s;
  s.box = w.p.box.x + (size_t)((layer - 1) & 1) * ROWS * HIDDEN;
  s.embed = w.p.embed; s.token = w.sh.token; s.norm = norm;
  return s;
}
HB_DEV float root_of(const Worker& w, int row) {
  float v = 0.f;
  HB_UNROLL
  for (int i = 0; i < 16; i++) v += w.sh.ssq[row][i];
  return recip_sqrt_normal(v * (1.f / HIDDEN) + w.p.norm_eps);
}

template <bool FIRST> HB_PHASE State phase_qkv(State state, int layer) {
  Worker w(state, layer, 0);
  const Layer& l = w.sh.layers[layer];
  const int tiles = w.sh.qkv_tiles;
  if (!tiles) return state;
  Operand<F_QKV, HIDDEN> x;
  gemv<F_QKV, HIDDEN, 1, false>(w, x, tiles,
    [&](int tile, int, int m) { return Early{l.qkv_bias[(w.block + tile * w.grid) * 16 + m]}; },
    [&] {
      auto source = residual<F_QKV, FIRST>(w, layer, l.attn_norm);
      load_operand(w, x, source);
    },
    [&](int tile, int row, int m, const float (&sum)[1], Early bias) {
      const float v = sum[0] * root_of(w, row) + bf16_low(bias.a);
      box_store(w.p.box.qkv + (size_t)row * QKV + (w.block + tile * w.grid) * 16 + m, tagged(as_bits(v), w.tag));
    }, Nothing());
  w.mark(3);
  return w.state();
}

HB_PHASE State phase_attention(State state, int layer) {
  Worker w(state, layer, 1);
  const Layer& l = w.sh.layers[layer];
  const bool sliding = layer % 2 == 0;
  Unit u = w.sh.unit[sliding];
  for (int i = w.grid - 1 - w.block; u.on; u = find_unit(w.sh, w.rows, sliding, i += w.grid)) attend<F_O>(w, l, layer / 2, sliding, u);
  if (sliding) { w.mark(3); return w.state(); }
  int turn = 0;
  for (int i = w.block; i < w.rows * HEADS; i += w.grid, turn++) {
    const int row = i / HEADS;
    int from, to, first, pages;
    key_range(w.sh, row, sliding, from, to, first, pages);
    const int parts = parts_of(pages, sliding);
    if (parts > 1 && turn % WORKERS == w.warp) merge_head<F_O>(w, l, row, i % HEADS, parts);
  }
  w.mark(3);
  return w.state();
}

HB_PHASE State phase_o(State state, int layer) {
  Worker w(state, layer, 2);
  const Layer& l = w.sh.layers[layer];
  using T = Tile<F_O, Q_DIM>;
  const int tiles = w.sh.o_tiles;
  if (!tiles) return state;
  const Step& p = w.p;
  u64* next = p.box.x + (size_t)(layer & 1) * ROWS * HIDDEN;
  const u64* now = p.box.x + (size_t)((layer - 1) & 1) * ROWS * HIDDEN;
  // router weights of this thread's expert and tile are on their way before the attention output is here
  const int my_tile = w.thread / EXPERTS, my_expert = w.thread % EXPERTS;
  u32x4 r0 = {}, r1 = {};
  if (my_tile < tiles) {
    const u16* r = l.router + ((size_t)(w.block + my_tile * w.grid) * EXPERTS + my_expert) * 16;
    r0 = ldg128(r); r1 = ldg128(r + 8);
  }
  Operand<F_O, Q_DIM> x;
  gemv<F_O, Q_DIM, 2, false>(w, x, tiles,
    [&](int tile, int row, int m) {
      const int k = (w.block + tile * w.grid) * 16 + m;
      Early e;
      e.a = *(const u32*)(l.o_bias + k);
      e.b = *(const u32*)(l.mlp_norm + k);
      if (layer) { const u64x2 v = box_load2(now + (size_t)row * HIDDEN + k); e.x[0] = v.x; e.x[1] = v.y; }
      else e.x[0] = *(const u32*)(p.embed + (size_t)w.sh.token[row] * HIDDEN + k);
      return e;
    },
    [&] {
      FromPaired source{p.box.attn, (size_t)Q_DIM / 2, w.tag};
      load_operand(w, x, source);
    },
    [&](int tile, int row, int m, const float (&sum)[2], Early early) {
      const int k = (w.block + tile * w.grid) * 16 + m;
      float mid[2] = {bf16_low((u32)early.x[0]), bf16_high((u32)early.x[0])};
      if (layer) {
        Patience patience;
        while (!(contributions(early.x[0]) == TOP_K + 1 && contributions(early.x[1]) == TOP_K + 1)) {
          patience.wait(0x601);
          const u64x2 v = box_load2(now + (size_t)row * HIDDEN + k);
          early.x[0] = v.x; early.x[1] = v.y;
        }
        mid[0] = summed(early.x[0]); mid[1] = summed(early.x[1]);
      }
      mid[0] += sum[0] + bf16_low(early.a);
      mid[1] += sum[1] + bf16_high(early.a);
      const float scaled[2] = {mid[0] * bf16_low(early.b), mid[1] * bf16_high(early.b)};
      HB_UNROLL
      for (int i = 0; i < 2; i++) {
        box_store(next + (size_t)row * HIDDEN + k + i, contribution(mid[i]));  // before anyone can know that this phase is over
        w.sh.xs[tile % T::FLUSH * ROWS + row][m + i] = scaled[i];
        w.sh.squares[tile % T::FLUSH * ROWS + row][m + i] = mid[i] * mid[i];
      }
      box_store(p.box.mid + ((size_t)row * HIDDEN + k) / 2, paired(scaled[0] * scale_in<MXFP4>(), scaled[1] * scale_in<MXFP4>(), w.tag));
    },
    [&](int first, int n) {
      w.sync();
      if (w.thread >= WORK_THREADS - 32 && w.thread - (WORK_THREADS - 32) < n * w.rows) {
        const int i = (w.thread - (WORK_THREADS - 32)) / w.rows, row = (w.thread - (WORK_THREADS - 32)) % w.rows;
        float s = 0.f;
        HB_UNROLL
        for (int m = 0; m < 16; m++) s += w.sh.squares[i * ROWS + row][m];
        box_store(p.box.ssq + (size_t)row * O_TILES + w.block + (first + i) * w.grid, tagged(as_bits(s), w.tag));
      }
      for (int i = w.thread; i < n * EXPERTS; i += WORK_THREADS) {
        const int tile = first + i / EXPERTS, expert = i % EXPERTS;
        if (tile != my_tile || expert != my_expert) {
          const u16* r = l.router + ((size_t)(w.block + tile * w.grid) * EXPERTS + expert) * 16;
          r0 = ldg128(r); r1 = ldg128(r + 8);
        }
        const u32 r[8] = {r0.x, r0.y, r0.z, r0.w, r1.x, r1.y, r1.z, r1.w};
        for (int row = 0; row < w.rows; row++) {
          const float* xs = w.sh.xs[i / EXPERTS * ROWS + row];
          float s = 0.f;
          HB_UNROLL
          for (int m = 0; m < 8; m++) s += xs[2 * m] * bf16_low(r[m]) + xs[2 * m + 1] * bf16_high(r[m]);
          box_add(p.box.logits + (((size_t)(layer % 3) * ROWS + row) * ROUTER_COPIES + (w.block + tile) % ROUTER_COPIES) * EXPERTS + expert, contribution(s));
        }
      }
    });
  w.mark(3);
  return w.state();
}

HB_PHASE State phase_up(State state, int layer) {
  Worker w(state, layer, 3);
  const Layer& l = w.sh.layers[layer];
  const Step& p = w.p;
  // accumulators of the next layer's router, clean long before anyone adds to them
  int cleaner = layer;
  while (cleaner >= w.grid) cleaner -= w.grid;
  if (w.block == cleaner && w.warp == WORKERS - 1) {
    u64* z = p.box.logits + (size_t)((layer + 1) % 3) * ROWS * ROUTER_COPIES * EXPERTS;
    for (int i = w.lane; i < ROWS * ROUTER_COPIES * EXPERTS; i += 32) box_store(z + i, 0);
    fence_gpu();
  }
  Operand<MXFP4, HIDDEN> x;
  FromPaired source{p.box.mid, (size_t)HIDDEN / 2, w.tag};
  load_operand(w, x, source);  // while the feeding warp still chooses
  wait_bar(&w.sh.routed, layer & 1, 0x701);
  const Routing& r = w.sh.routing[layer & 1];
  const int tiles = OPEN ? 0 : r.count == TOP_K ? w.sh.up_tiles : share_of(r.count * UP_TILES, w.block, w.grid);
  gemv<MXFP4, HIDDEN, 4, (OPEN > 0)>(w, x, tiles,
    [&](int tile, int, int m) {
      const int i = OPEN ? w.sh.given[tile % GIVEN] : w.block + tile * w.grid;
      Early e;
      e.x[0] = *(const u64*)(l.gate_up_bias + (size_t)r.list[i / UP_TILES] * 2 * INTER + i % UP_TILES * 16 + m);
      return e;
    },
    [] {},
    [&](int tile, int row, int m, const float (&sum)[4], Early early) {
      const int i = OPEN ? w.sh.given[tile % GIVEN] : w.block + tile * w.grid, expert = r.list[i / UP_TILES];
      HB_UNROLL
      for (int k = 0; k < TOP_K; k++)
        if (r.expert[row][k] == expert) {
          float h[2];
          HB_UNROLL
          for (int j = 0; j < 2; j++) {
            const u32 bias = (u32)(early.x[0] >> (32 * j));
            float gate = sum[2 * j] * r.scale[row] + bf16_low(bias), up = sum[2 * j + 1] * r.scale[row] + bf16_high(bias);
            gate = gate > p.swiglu_limit ? p.swiglu_limit : gate;
            up = up > p.swiglu_limit ? p.swiglu_limit : up < -p.swiglu_limit ? -p.swiglu_limit : up;
            h[j] = divide((up + 1.f) * gate, 1.f + exp2_fast(-p.swiglu_alpha * LOG2E * gate)) * scale_in<MXFP4>();
          }
          box_store(p.box.h + ((size_t)(row * TOP_K + k) * INTER + i % UP_TILES * 8 + m / 2) / 2, paired(h[0], h[1], w.tag));
        }
    }, Nothing());
  w.mark(3);
  return w.state();
}

HB_PHASE State phase_down(State state, int layer) {
  Worker w(state, layer, 4);
  const Layer& l = w.sh.layers[layer];
  const Step& p = w.p;
  const Routing& r = w.sh.routing[layer & 1];
  u64* next = p.box.x + (size_t)(layer & 1) * ROWS * HIDDEN;
  int first, last;
  down_share(w.sh, r.count, w.block, w.grid, first, last);
  while (first < last) {  // one expert at a time
    const int index = first / DOWN_TILES, end = (index + 1) * DOWN_TILES < last ? (index + 1) * DOWN_TILES : last;
    const int expert = r.list[index], base = first - index * DOWN_TILES;
    Operand<MXFP4, INTER> x;
    gemv<MXFP4, INTER, 1, false>(w, x, end - first,
      [&](int tile, int, int m) { return Early{l.down_bias[(size_t)expert * HIDDEN + (base + tile) * 16 + m]}; },
      [&] {
        FromExpert source(w, p.box.h, r, expert);
        load_operand(w, x, source);
      },
      [&](int tile, int row, int m, const float (&sum)[1], Early bias) {
        HB_UNROLL
        for (int k = 0; k < TOP_K; k++)
          if (r.expert[row][k] == expert)
            box_add(next + (size_t)row * HIDDEN + (base + tile) * 16 + m, contribution(r.weight[row][k] * (sum[0] + bf16_low(bias.a))));
      }, Nothing());
    first = end;
  }
  w.mark(3);
  return w.state();
}

HB_PHASE void phase_head(State state) {
  Worker w(state, LAYERS, 5);
  const Step& p = w.p;
  const int tiles = w.sh.head_tiles;
  u64 best = 0;  // logit in order-preserving bits above, complement of the token below: ties go to the lower token
  if (tiles) {
    Operand<F_HEAD, HIDDEN> x;
    float root = 0.f;
    gemv<F_HEAD, HIDDEN, 1, false>(w, x, tiles,
      [&](int, int, int) { return Early(); },
      [&] {
        auto source = residual<F_HEAD, false>(w, LAYERS, p.final_norm);
        load_operand(w, x, source);
        },
      [&](int tile, int row, int m, const float (&sum)[1], Early) {
        if (root == 0.f) root = root_of(w, row);
        const int token = (w.block + tile * w.grid) * 16 + m;
        const float v = sum[0] * root;
        p.out_logits[(size_t)row * VOCAB + token] = v;
        const u64 key = (u64)orderable(v) << 32 | (0xffffffffu - (u32)token);
        best = key > best ? key : best;
      }, Nothing());
    if (best) box_max(p.box.best + w.thread / 16 % ROWS, best);
  }
  fence_gpu();
  w.sync();
  if (w.thread == 0) w.sh.last = counter_add(p.control + 1) == (u32)w.grid - 1;
  w.sync();
  if (!w.sh.last) return;
  fence_gpu();
  // everyone is done: the token, and everything as the next step expects to find it
  if (w.thread < w.rows) {
    const int row = w.thread, token = (int)(0xffffffffu - (u32)box_load(p.box.best + row));
    p.next_tokens[row] = token;
    if (p.advance) { p.tokens[row] = token; p.positions[row] += 1; }
  }
  w.sync();
  if (w.thread < ROWS) box_store(p.box.best + w.thread, 0);
  for (int i = w.thread; i < 3 * ROWS * ROUTER_COPIES * EXPERTS; i += WORK_THREADS) box_store(p.box.logits + i, 0);
  for (int i = w.thread; i < LAYERS; i += WORK_THREADS) p.control[2 + i] = 0;
  if (w.thread == 0) { p.control[0] += 1; p.control[1] = 0; }
}

#ifdef HB_EMULATE
static void decode_step(const Step& p)
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_step(const __grid_constant__ Step p)
#endif
{
  Shared& sh = *(Shared*)hb_shared();
  const int thread = hb_thread(), warp = thread / 32;
  if (thread == 0) {
    for (int i = 0; i < SLOTS; i++) { bar_init(&sh.full[i], 1); bar_init(&sh.empty[i], ARRIVALS); }
    bar_init(&sh.routed, 1);
    bar_init_done();
    sh.epoch = p.control[0];
  }
  if (thread < ROWS) {
    const bool on = thread < p.rows;
    sh.token[thread] = on ? p.tokens[thread] : 0;
    sh.position[thread] = on ? p.positions[thread] : 0;
    sh.seq[thread] = on ? p.row_seq[thread] : -1;
    int base = sh.position[thread];
    for (int i = 0; i < p.rows; i++) if (p.row_seq[i] == sh.seq[thread] && p.positions[i] < base) base = p.positions[i];
    sh.base[thread] = base;
  }
  for (int i = thread; i < 2 * 16 * HEAD_DIM; i += THREADS) (&sh.fresh[0][0][0])[i] = 0;
  for (int i = thread; i < ROWS * 16; i += THREADS) (&sh.ssq[0][0])[i] = 0.f;
  if (thread == 0) sh.step = p;
  for (int i = thread; i < (int)(sizeof(Layer) * LAYERS / 8); i += THREADS) ((u64*)sh.layers)[i] = ((const u64*)p.layers)[i];
  sync_all();
  if (thread == 2) {
    const int block = hb_block(), grid = hb_grid();
    sh.qkv_tiles = share_of(QKV_TILES, block, grid);
    sh.o_tiles = share_of(O_TILES, block, grid);
    sh.up_tiles = share_of(TOP_K * UP_TILES, block, grid);
    sh.up_kept = kept_of(TOP_K * UP_TILES, grid);
    sh.head_tiles = share_of(HEAD_TILES, block, grid);
    down_range(TOP_K, block, grid, sh.down_first, sh.down_last);
  }
  if (thread < 2) sh.unit[thread] = find_unit(sh, p.rows, thread == 1, hb_grid() - 1 - hb_block());
  sync_all();
  if (warp == WORKERS) {
    feed();
    return;
  }
  State s = 0;
  HB_ROLLED
  for (int layer = 0; layer < LAYERS; layer++) {
    s = layer ? phase_qkv<false>(s, layer) : phase_qkv<true>(s, layer);
    s = phase_attention(s, layer);
    s = phase_o(s, layer);
    s = phase_up(s, layer);
    s = phase_down(s, layer);
  }
  phase_head(s);
}

#ifdef HB_EMULATE
extern "C" void hb_emulate(const Step* p, int grid, unsigned seed) {
  emu::run(grid, THREADS, sizeof(Shared), seed, [p] { decode_step(*p); });
}
extern "C" int hb_sizes(int which) { return which == 0 ? (int)sizeof(Step) : which == 1 ? (int)sizeof(Layer) : (int)sizeof(Shared); }
#endif
