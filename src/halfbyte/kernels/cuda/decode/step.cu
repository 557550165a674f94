// One decode step of gpt-oss in one kernel: embedding, all layers, lm_head, argmax. One block per multiprocessor stays
// for the whole step. Its feeding warp streams the block's weights and pages into a ring in shared memory, without
// regard to what the other blocks do; only the experts must be known before theirs can be asked for. Its
// working warps go through five phases a layer; what passes between blocks goes through mailboxes, whose table and whose
// order are in mailbox.cuh. House words are in docs/glossary.md.
//
//   A  norm, qkv                          reads x       writes qkv
//   B  rope, attention, KV write          reads qkv     (long contexts: parts, read by every block of the kv head)
//   C  o, residual, router products                     adds to mid and to router logits
//   D  norm, top-4, gate_up, swiglu       reads mid     writes h
//   E  down, weighted                     reads h       adds to the next x
//
// Results do not depend on timing: floats are added in a fixed order, and what is added in any order is integer.
#include "decode/output.cuh"
#include "decode/digits.cuh"

constexpr int F_QKV = HB_FORMAT_QKV, F_O = HB_FORMAT_O;
// Layers, as bits, whose qkv or o has a second format: both loops are compiled where there are any.
#ifdef HB_OTHER_QKV
constexpr int F_QKV_OTHER = HB_FORMAT_OTHER_QKV;
constexpr u64 OTHER_QKV = HB_OTHER_QKV;
#else
constexpr int F_QKV_OTHER = F_QKV;
constexpr u64 OTHER_QKV = 0;
#endif
#ifdef HB_OTHER_O
constexpr int F_O_OTHER = HB_FORMAT_OTHER_O;
constexpr u64 OTHER_O = HB_OTHER_O;
#else
constexpr int F_O_OTHER = F_O;
constexpr u64 OTHER_O = 0;
#endif
HB_DEV bool has_bit(u64 layers, int layer) { return layers && (layers >> layer & 1); }
#ifndef HB_LENT
constexpr int F_HEAD = HB_FORMAT_HEAD;
#endif
constexpr int ADDED_X = TOP_K + 1;  // contributions to x: every expert, and the residual
constexpr int QKV_TILES = QKV / 16, O_TILES = HIDDEN / 16, UP_TILES = 2 * INTER / 16, DOWN_TILES = HIDDEN / 16, HEAD_TILES = VOCAB / 16;

// Tiles of experts that stay with one block: by digits four of gate_up and two of down are as cheap as one.
enum : int { UP_UNIT = HB_TILE_BODY ? 4 : 1, DOWN_UNIT = HB_TILE_BODY ? 2 : 1 };
static_assert(!HB_TILE_BODY || (UP_TILES % 4 == 0 && DOWN_TILES % 4 == 0), "quads of one matrix");

// The gate_up tiles of a block: so many, and the one that is number `tile` of them.
HB_DEV int up_share(int count, int block, int grid) { return share_of(count * UP_TILES / UP_UNIT, block, grid) * UP_UNIT; }
HB_DEV int up_tile(int tile, int block, int grid) { return UP_UNIT == 1 ? block + tile * grid : (block + tile / UP_UNIT * grid) * UP_UNIT + tile % UP_UNIT; }

// The down tiles of a block: blocks are dealt out evenly to experts where that comes out even, else tiles to blocks.
HB_DEV void down_range(int count, int block, int grid, int& first, int& last) {
  if (grid % count == 0) {
    const int each = grid / count, expert = block / each, i = block % each;
    first = expert * DOWN_TILES + DOWN_TILES / DOWN_UNIT * i / each * DOWN_UNIT;
    last = expert * DOWN_TILES + DOWN_TILES / DOWN_UNIT * (i + 1) / each * DOWN_UNIT;
  } else {
    const int all = count * DOWN_TILES / DOWN_UNIT;
    first = all * block / grid * DOWN_UNIT;
    last = all * (block + 1) / grid * DOWN_UNIT;
  }
}

HB_DEV void down_share(const Shared& sh, int count, int block, int grid, int& first, int& last) {
  if (ROWS == 1 || count == TOP_K) { first = sh.down_first; last = sh.down_last; }
  else down_range(count, block, grid, first, last);
}

// One over the norm's root, from the squares that the working warps met in a row.
HB_DEV float root_of(const Shared& sh, const Step& p, int row) {
  float v = 0.f;
  HB_UNROLL
  for (int i = 0; i < 16; i++) v += sh.ssq[row][i];
  return recip_sqrt_normal(v * (1.f / HIDDEN) + p.norm_eps);
}

// ---- routing, by the feeding warp -----------------------------------------------------------------------------------

// Sums that several blocks add to exist twice, for layers in turn, counted through the steps. When the experts of a layer are
// chosen, nobody reads the sums of the layer before any more: pass_on() clears them for the layer after.
HB_DEV u32 half_of(const Shared& sh, int layer) { return (sh.epoch * LAYERS + (u32)layer) & 1; }
HB_DEV u64* x_after(const Shared& sh, int layer) { return sh.step.box.x + (size_t)half_of(sh, layer) * ROWS * HIDDEN; }
HB_DEV u64* mid_of(const Shared& sh, int layer) { return sh.step.box.mid + (size_t)half_of(sh, layer) * ROWS * HIDDEN; }
HB_DEV u64* logits_of(const Shared& sh, int layer) { return sh.step.box.logits + (size_t)half_of(sh, layer) * ROWS * ROUTER_COPIES * EXPERTS; }

// The logits of the chosen become their weights: nobody needs these before down, so the first experts are asked for first, and
// the barriers of later slots hand them over. Not where copies alone arrive there: then the arrival at `routed` has to.
constexpr bool WEIGHED_LATE = COPIERS == 1;
HB_DEV void weigh(Routing& r, int rows) {
  HB_ROLLED
  for (int row = 0; row < rows; row++) {
    float weight[TOP_K], total = 0.f;
    HB_UNROLL
    for (int k = 0; k < TOP_K; k++) { weight[k] = exp2_fast((r.weight[row][k] - r.weight[row][0]) * LOG2E); total += weight[k]; }
    HB_UNROLL
    for (int k = 0; k < TOP_K; k++) r.weight[row][k] = divide(weight[k], total);
  }
}

HB_DEV void route(Shared& sh, const Step& p, const Layer& weights, int layer, int lane, int grid) {
  constexpr int PER_LANE = EXPERTS / 32;
  const u32 all = router_contributions(grid);
  Routing& out = sh.routing[layer & 1];
  HB_ROLLED
  for (int row = 0; row < rows_of(p); row++) {
    const u64* logits = logits_of(sh, layer) + (size_t)row * ROUTER_COPIES * EXPERTS;
    u64 sum[PER_LANE];
    float bias[PER_LANE];
    HB_UNROLL
    for (int i = 0; i < PER_LANE; i++) bias[i] = bf16_at(weights.router_bias, lane * PER_LANE + i);
    // not before this block is through with o: until x was whole, logits of two layers ago could stand here
    if (row == 0) wait_bar(&sh.attended, layer & 1, 0x504);
    const int probed = (hb_block() * 37 + EXPERTS - 1) % EXPERTS;  // no word is everybody's
    Patience patience;
    HB_ROLLED
    for (;;) {
      for (;;) {  // one expert first, see load_operand
        u64 probe = 0;
        HB_UNROLL
        for (int c = 0; c < ROUTER_COPIES; c++) probe += box_load(logits + c * EXPERTS + probed);
        if (contributions<LOGIT_COUNT>(probe) == all) break;
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
      for (int i = 0; i < PER_LANE; i++) {
        sum[i] = 0;
        HB_UNROLL
        for (int c = 0; c < ROUTER_COPIES; c++) sum[i] += word[c][i];
        ready &= contributions<LOGIT_COUNT>(sum[i]) == all;
      }
      if (warp_ballot(ready) == 0xffffffffu) break;
      patience.wait(0x500);
    }
    if (row == 0) wait_bar(&sh.squared, layer & 1, 0x503);
    const float scale = root_of(sh, p, row);
    u32 key[PER_LANE];
    bool numbers = true;
    HB_UNROLL
    for (int i = 0; i < PER_LANE; i++) {
      const float logit = summed<LOGIT_COUNT>(sum[i]) * scale + bias[i];
      numbers = numbers && below(logit, FINITE);
      key[i] = orderable(logit);
    }
    if (!numbers) {  // four experts are chosen all the same
      break_row(row, AT_ROUTER);
      HB_UNROLL
      for (int i = 0; i < PER_LANE; i++) key[i] = orderable(0.f);
    }
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
    if (lane == 0) {
      HB_UNROLL
      for (int k = 0; k < TOP_K; k++) {
        out.expert[row][k] = expert[k]; out.weight[row][k] = value[k];
        if (ROWS == 1) out.list[k] = expert[k];
      }
      out.scale[row] = scale;
    }
  }
  sync_warp();
  if (lane == 0) {  // distinct experts, in order of first appearance
    int n = TOP_K;
    if (ROWS > 1) for (int i = n = 0; i < p.rows * TOP_K; i++) {
      const int e = out.expert[i / TOP_K][i % TOP_K];
      bool known = false;
      for (int j = 0; j < n; j++) known |= out.list[j] == e;
      if (!known) out.list[n++] = e;
    }
    out.count = n;
    if (!WEIGHED_LATE) weigh(out, rows_of(p));
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
}

// The residual goes on into the next x, and sums of the layer after are cleared: whoever finds x whole finds them clear.
// A thread that clears a word of the logits of rows in use owns the word of x of the same number, and releases after clearing.
static_assert(ROUTER_COPIES * EXPERTS <= HIDDEN, "who clears logits must have a word of x to release");
HB_DEV void pass_on(const Shared& sh, const Step& p, int layer, int i, int n) {
  HB_ROLLED
  for (int k = i; k < ROWS * ROUTER_COPIES * EXPERTS; k += n) box_store(logits_of(sh, layer + 1) + k, 0);
  HB_ROLLED
  for (int k = i; k < ROWS * HIDDEN; k += n) {
    box_store(mid_of(sh, layer + 1) + k, 0);
    box_store(x_after(sh, layer + 1) + k, 0);
    if (k < rows_of(p) * HIDDEN) box_add_released(x_after(sh, layer) + k, contribution<COUNT>((i64)box_load(mid_of(sh, layer) + k) >> COUNT));
  }
}

// One kv head's pieces of this block's tiles of o, then the router's columns for the same tiles.
template <int FORMAT> HB_DEV void feed_o(Feeder& f, const Layer& l, int head) {
  using P = Piece<FORMAT>;
  HB_ROLLED
  for (int first = f.sh.o_first; first < f.sh.o_last; first += P::MOST) {
    const int end = f.sh.o_last - first < P::MOST ? f.sh.o_last : first + P::MOST;
    const u8* from = l.o + ((size_t)first * KV_HEADS + head) * P::BYTES;
    HB_ROLLED
    for (int i = first; i < end;) {
      const int n = P::FIT ? (end - i < P::FIT ? end - i : P::FIT) : 1;
      HB_ROLLED
      for (int part = 0; part < P::SLOTS_EACH; part++) {
        f.open(n * P::EACH * P::CHUNK);
        HB_ROLLED
        for (int j = 0; j < n; j++) f.copy(j * P::BYTES, from + (size_t)j * KV_HEADS * P::BYTES + part * P::EACH * P::CHUNK, P::EACH * P::CHUNK);
        f.close();
      }
      i += n;
      from += (size_t)n * KV_HEADS * P::BYTES;
    }
    f.shared(true);
    HB_ROLLED
    for (int i = first; i < end; i += ROUTER_FIT)
      f.put((const u8*)l.router + (size_t)i * ROUTER_BYTES, (end - i < ROUTER_FIT ? end - i : ROUTER_FIT) * ROUTER_BYTES);
    f.shared(false);
  }
}

#if HB_TILE_BODY
// Quads, or two tiles of one.
HB_DEV void feed_experts(Feeder& f, const Layer& l, Routing& r, int count, int block, int grid, int rows) {
  const int tiles = up_share(count, block, grid);
  HB_ROLLED
  for (int n = 0; n < tiles; n += QUAD) {
    const int i = up_tile(n, block, grid);
    feed_quad<HIDDEN>(f, l.gate_up + ((size_t)r.list[i / UP_TILES] * UP_TILES + i % UP_TILES) * Quad<HIDDEN>::BYTES);
    if (WEIGHED_LATE && n == 0) weigh(r, rows);
  }
  if (WEIGHED_LATE && !tiles) weigh(r, rows);
  if (leads(f.lane)) stamp(f.sh.step, block, f.sh.layer_of[WORKERS], 27);
  int first, last;
  down_share(f.sh, count, block, grid, first, last);
  HB_ROLLED
  while (first < last) {
    const int from = first % QUAD, to = last - first < QUAD - from ? from + last - first : QUAD;
    const u8* quad = l.down + ((size_t)r.list[first / DOWN_TILES] * DOWN_TILES + first % DOWN_TILES - from) * Quad<INTER>::BYTES;
    if (to - from == QUAD) feed_quad<INTER>(f, quad);
    else feed_part<INTER>(f, quad, from, to);
    first += to - from;
  }
}
#endif

HB_PHASE void feed() {
  Shared& sh = *(Shared*)hb_shared();
  const Step& p = sh.step;
  const int lane = hb_thread() % 32, block = hb_block(), grid = hb_grid();
  Feeder f{sh, streaming_policy(), Cursor(), AHEAD_REST, lane};
  for (int layer = 0; layer < LAYERS; layer++) {
    const Layer& l = sh.layers[layer];
    const bool sliding = layer % 2 == 0;
    if (feeds(lane)) {
      sh.layer_of[WORKERS] = layer;
      if (has_bit(OTHER_QKV, layer)) {
        HB_ROLLED
        for (int i = block; i < QKV_TILES; i += grid) f.tile<F_QKV_OTHER, HIDDEN>(l.qkv, i);
      } else {
        HB_ROLLED
        for (int i = block; i < QKV_TILES; i += grid) f.tile<F_QKV, HIDDEN>(l.qkv, i);
      }
      HB_ROLLED
      for (int turn = 0, head = sh.seat.head; turn < sh.turns; turn++, head += grid) {
        HB_ROLLED
        for (int n = 0; n < sh.units[sliding]; n++) {
          const Unit u = n ? find_unit(sh, rows_of(p), sliding, n) : sh.unit[sliding];
          f.shared(u.alone);
          HB_ROLLED
          for (int page = u.first; page < u.last; page++) {
            const u8 *keys = page_at(p, l, page_table(p, sh, sliding, u.row)[page], layer / 2, 0, head), *values = keys + KV_HEADS * PAGE_BYTES;
            if (PAGE_WHOLE) { f.open(2 * PAGE_BYTES); f.copy(0, keys, PAGE_BYTES); f.copy(PAGE_BYTES, values, PAGE_BYTES); f.close(); }
            else { f.put(keys, PAGE_BYTES); f.put(values, PAGE_BYTES); }
          }
        }
        f.shared(false);
        if (has_bit(OTHER_O, layer)) feed_o<F_O_OTHER>(f, l, head);
        else feed_o<F_O>(f, l, head);
      }
    }
    sync_warp();
    if (lane == 0) stamp(p, block, layer, 24);
    if (layer + 1 < LAYERS) warm(sh.layers[layer + 1], lane, block, grid);
    route(sh, p, l, layer, lane, grid);
    if (feeds(lane)) {
      if (leads(lane)) stamp(p, block, layer, 26);
      Routing& r = sh.routing[layer & 1];
      f.window = AHEAD;
      const int count = ROWS == 1 ? TOP_K : r.count;
#if HB_TILE_BODY
      feed_experts(f, l, r, count, block, grid, rows_of(p));
#else
      HB_ROLLED
      for (int i = block; i < count * UP_TILES; i += grid) {
        f.tile<MXFP4, HIDDEN>(l.gate_up, (size_t)r.list[i / UP_TILES] * UP_TILES + i % UP_TILES);
        if (WEIGHED_LATE && i == block) weigh(r, rows_of(p));
      }
      if (WEIGHED_LATE && block >= count * UP_TILES) weigh(r, rows_of(p));
      if (leads(lane)) stamp(p, block, layer, 27);
      int first, last;
      down_share(sh, count, block, grid, first, last);
      HB_ROLLED
      for (int i = first; i < last; i++)
        f.tile<MXFP4, INTER>(l.down, (size_t)r.list[i / DOWN_TILES] * DOWN_TILES + i % DOWN_TILES);
#endif
      if (leads(lane)) stamp(p, block, layer, 28);
      f.window = AHEAD_REST;
    }
    sync_warp();
  }
#ifndef HB_LENT
  if (feeds(lane))
    HB_ROLLED
    for (int i = block; i < HEAD_TILES; i += grid) f.tile<F_HEAD, HIDDEN>(p.head, i);
#endif
  finish_copies();
}

// ---- the phases, by the working warps -------------------------------------------------------------------------------

template <int FORMAT, int ADDED> HB_DEV FromResidual<FORMAT, ADDED> residual(const Worker& w, const u64* box, const u16* norm) {
  FromResidual<FORMAT, ADDED> s;
  s.box = box;
  s.embed = w.p.embed; s.token = w.sh.token; s.norm = norm; s.per_unit = w.p.per_unit;
  return s;
}
// HB_TAPS: the residual that enters a layer, for whoever asked for it. The blocks with tiles of the phase that has read it
// share it out; its words are cleared only when every block is through with this layer's C.
template <bool FIRST> HB_DEV void write_tap(const Worker& w, int tiles) {
#ifdef HB_TAPS
  const u64 layers = w.p.tap_layers, before = layers & (((u64)1 << w.layer) - 1);
  if (!(layers >> w.layer & 1)) return;
  const int blocks = w.grid < tiles ? w.grid : tiles, count = w.rows * HIDDEN;
  const u64* x = FIRST ? nullptr : x_after(w.sh, w.layer - 1);
  float* out = w.p.taps + (size_t)(popcount((u32)before) + popcount((u32)(before >> 32))) * count;
  HB_ROLLED
  for (int i = w.block * WORK_THREADS + w.thread; i < count; i += blocks * WORK_THREADS)
    out[i] = FIRST ? bf16_at(w.p.embed, (size_t)w.sh.token[i / HIDDEN] * HIDDEN + i % HIDDEN) : w.p.unit * summed(box_load(x + i));
#endif
  (void)w; (void)tiles;
}
static_assert(LAYERS < 64, "boundaries of layers as bits");
template <bool FIRST, int FORMAT> HB_PHASE State phase_qkv(State state, int layer) {
  Worker w(state, layer, 0);
  const Layer& l = w.sh.layers[layer];
  const int tiles = w.sh.qkv_tiles;
  if (!tiles) return state;
  Operand<FORMAT, HIDDEN> x;
  gemv<FORMAT, HIDDEN, 1>(w, x, tiles,
    [&](int tile, int, int m) { return Early{l.qkv_bias[(w.block + tile * w.grid) * 16 + m]}; },
    [&] {
      auto source = residual<FORMAT, FIRST ? 0 : ADDED_X>(w, x_after(w.sh, layer - 1), l.attn_norm);
      load_operand(w, x, source);
    },
    [&](int tile, int row, int m, const float (&sum)[1], Early bias) {
      const float v = sum[0] * root_of(w.sh, w.p, row) + bf16_low(bias.a);
      if (!below(v, FINITE)) break_row(row, AT_QKV);
      box_store(w.p.box.qkv + (size_t)row * QKV + (w.block + tile * w.grid) * 16 + m, tagged(as_bits(v), w.tag));
    });
  write_tap<FIRST>(w, QKV_TILES);
  w.mark(3);
  return w.state();
}

template <int FORMAT> HB_PHASE State phase_attention(State state, int layer) {  // and o
  Worker w(state, layer, 1);
  const Layer& l = w.sh.layers[layer];
  const bool sliding = layer % 2 == 0;
  HB_ROLLED
  for (int turn = 0, head = w.sh.seat.head; turn < w.sh.turns; turn++, head += w.grid) {
    HB_ROLLED
    for (int n = 0; n < w.sh.units[sliding]; n++) attend<FORMAT>(w, l, head, layer / 2, sliding, n ? find_unit(w.sh, w.rows, sliding, n) : w.sh.unit[sliding]);
    for (int i = w.warp; i < w.rows * GROUP; i += WORKERS) {
      const int parts = w.sh.parts[sliding][i / GROUP];
      if (!ALONE || parts > 1) merge_head<FORMAT>(w, l, head, i / GROUP, i % GROUP, parts);
    }
    w.mark(3);
    w.sync();
    w.acquire();
    w.phase = 2;
    w.mark(0);
    project<FORMAT>(w, l, head, layer ? x_after(w.sh, layer - 1) : nullptr, mid_of(w.sh, layer), logits_of(w.sh, layer));
    w.mark(3);
    if (turn + 1 < w.sh.turns) w.sync();
  }
  if (w.thread == 0) bar_arrive(&w.sh.attended, 1);  // every block has met values that came of x, and its warps each other
  return w.state();
}

HB_DEV int place_of(const Routing& r, int row, int index) {  // of an expert of the list among those the row chose, or -1
  if (ROWS == 1) return index;
  const int expert = r.list[index];
  int k = -1;
  HB_UNROLL
  for (int i = 0; i < TOP_K; i++) k = r.expert[row][i] == expert ? i : k;
  return k;
}

EXPERT_PHASE State phase_up(State state, int layer) {
  Worker w(state, layer, 3);
  const Layer& l = w.sh.layers[layer];
  const Step& p = w.p;
  ExpertOperand<MXFP4, HIDDEN> x;
#if HB_TILE_BODY
  clear_digits<HIDDEN>(w);
#endif
  load_operand(w, x, residual<MXFP4, KV_HEADS>(w, mid_of(w.sh, layer), l.mlp_norm));  // while the feeding warp still chooses
  sync_warp();
  if (w.lane == 0) bar_arrive(&w.sh.squared, 1);
  wait_bar(&w.sh.routed, layer & 1, 0x701);
  const Routing& r = w.sh.routing[layer & 1];
  const int tiles = ROWS == 1 || r.count == TOP_K ? w.sh.up_tiles : up_share(r.count, w.block, w.grid);
  gemv<MXFP4, HIDDEN, 4>(w, x, tiles,
    [&](int tile, int, int m) {
      const int i = up_tile(tile, w.block, w.grid);
      Early e;
      e.x[0] = *(const u64*)(l.gate_up_bias + (size_t)r.list[i / UP_TILES] * 2 * INTER + i % UP_TILES * 16 + m);
      return e;
    },
    [] {},
    [&](int tile, int row, int m, const float (&sum)[4], Early early) {
      const int i = up_tile(tile, w.block, w.grid);
      const int k = place_of(r, row, i / UP_TILES);
      if (k < 0) return;
      float h[2];
      bool numbers = true;
      HB_UNROLL
      for (int j = 0; j < 2; j++) {
        const u32 bias = (u32)(early.x[0] >> (32 * j));
        float gate = sum[2 * j] * r.scale[row] + bf16_low(bias), up = sum[2 * j + 1] * r.scale[row] + bf16_high(bias);
        numbers = numbers && below(gate, FINITE) && below(up, FINITE);  // before a clamp hides it
        gate = gate > p.swiglu_limit ? p.swiglu_limit : gate;
        up = up > p.swiglu_limit ? p.swiglu_limit : up < -p.swiglu_limit ? -p.swiglu_limit : up;
        h[j] = divide((up + 1.f) * gate, 1.f + exp2_fast(-p.swiglu_alpha * LOG2E * gate)) * scale_in<MXFP4>();
      }
      if (!numbers) break_row(row, AT_GATE_UP);
      box_store(p.box.h + ((size_t)(row * TOP_K + k) * INTER + i % UP_TILES * 8 + m / 2) / 2, paired(h[0], h[1], w.tag));
    });
  w.mark(3);
  return w.state();
}

EXPERT_PHASE State phase_down(State state, int layer) {
  Worker w(state, layer, 4);
  const Layer& l = w.sh.layers[layer];
  const Step& p = w.p;
  const Routing& r = w.sh.routing[layer & 1];
  u64* next = x_after(w.sh, layer);
  if (w.warp == WORKERS - 1) pass_on(w.sh, p, layer, w.block * 32 + w.lane, w.grid * 32);  // while h is on its way
#if HB_TILE_BODY
  if (INTER != HIDDEN) clear_digits<INTER>(w);
#endif
  int first, last;
  down_share(w.sh, r.count, w.block, w.grid, first, last);
  while (first < last) {  // one expert at a time
    const int index = first / DOWN_TILES, end = (index + 1) * DOWN_TILES < last ? (index + 1) * DOWN_TILES : last;
    const int expert = r.list[index], base = first - index * DOWN_TILES;
    ExpertOperand<MXFP4, INTER> x;
#if HB_TILE_BODY
    x.skip = base % QUAD;
#endif
    gemv<MXFP4, INTER, 1>(w, x, end - first,
      [&](int tile, int, int m) { return Early{l.down_bias[(size_t)expert * HIDDEN + (base + tile) * 16 + m]}; },
      [&] {
        FromExpert source(w, p.box.h, r, index);
        load_operand(w, x, source);
      },
      [&](int tile, int row, int m, const float (&sum)[1], Early bias) {
        const int k = place_of(r, row, index);
        if (k < 0) return;
        const float v = r.weight[row][k] * (sum[0] + bf16_low(bias.a)) * p.per_unit;
        if (!below(v, LIMIT)) break_row(row, AT_DOWN);
        box_add(next + (size_t)row * HIDDEN + (base + tile) * 16 + m, contribution(v));
      });
    first = end;
  }
  w.mark(3);
  return w.state();
}

#define INFINITE as_float(0x7f800000u)
HB_DEV void clear(u64* words, int n, int thread) {
  HB_ROLLED
  for (int i = thread; i < n; i += WORK_THREADS) box_store(words + i, 0);
}
// Everyone is done: everything as the next step expects to find it.
HB_DEV void end_step(Worker& w) {
  const Step& p = w.p;
  w.sync();
  if (w.thread < ROWS) { box_store(p.box.best + w.thread, 0); box_store(p.box.broken + w.thread, 0); }
  const bool anew = w.sh.epoch + 1 == PERIOD;
  if (w.thread == 0) { p.control[0] = anew ? 0 : w.sh.epoch + 1; p.control[1] = 0; }
  if (!anew) return;
  clear(p.box.qkv, ROWS * QKV, w.thread);
  clear(p.box.part, ROWS * HEADS * SPLITS * PART_WORDS, w.thread);
  clear(p.box.h, ROWS * TOP_K * INTER / 2, w.thread);
}
// Whether this block is the last to come here: it then sees what all others have left.
HB_DEV bool last_block(Worker& w) {
  fence_gpu();
  w.sync();
  if (w.thread == 0) w.sh.last = counter_add(w.p.control + 1) == (u32)w.grid - 1;
  w.sync();
  if (!w.sh.last) return false;
  fence_gpu();
  return true;
}
#ifdef HB_LENT
// The norm and the head are another engine's: the residual as it is.
HB_PHASE void phase_leave(State state) {
  Worker w(state, LAYERS, 5);
  if (!last_block(w)) return;
  const u64* x = x_after(w.sh, LAYERS - 1);
  HB_ROLLED
  for (int i = w.thread; i < w.rows * HIDDEN; i += WORK_THREADS) {
    const u32 broken = (u32)box_load(w.p.box.broken + i / HIDDEN);
    w.p.logits_out[i] = broken ? as_float(NOT_A_NUMBER | broken) : w.p.unit * summed(box_load(x + i));
  }
  end_step(w);
}
#else
HB_PHASE void phase_head(State state) {
  Worker w(state, LAYERS, 5);
  const Step& p = w.p;
  const int tiles = w.sh.head_tiles;
  u64 best = 0;  // logit in order-preserving bits above, complement of the token below: ties go to the lower token
  if (tiles) {
    Operand<F_HEAD, HIDDEN> x;
    float root = 0.f;
    u32 broken = 0;
    gemv<F_HEAD, HIDDEN, 1>(w, x, tiles,
      [&](int, int, int) { return Early(); },
      [&] {
        auto source = residual<F_HEAD, ADDED_X>(w, x_after(w.sh, LAYERS - 1), p.final_norm);
        load_operand(w, x, source);
        },
      [&](int tile, int row, int m, const float (&sum)[1], Early) {
        if (root == 0.f) {  // the warps have met since each saw its part of x whole
          root = root_of(w.sh, w.p, row);
          broken = (u32)box_load(p.box.broken + row);
        }
        const int token = (w.block + tile * w.grid) * 16 + m;
        const float v = broken ? as_float(NOT_A_NUMBER | broken) : sum[0] * root;
        p.logits_out[(size_t)row * VOCAB + token] = v;
        const u64 key = (u64)(below(v, INFINITE) ? orderable(v) : ~0u) << 32 | (0xffffffffu - (u32)token);
        best = key > best ? key : best;
      });
    if (best) box_max(p.box.best + w.thread / 16 % ROWS, best);
    write_tap<false>(w, HEAD_TILES);
  }
  if (!last_block(w)) return;
  if (w.thread < w.rows) {
    const int row = w.thread;
    const u64 highest = box_load(p.box.best + row);
    const int token = (u32)(highest >> 32) == ~0u ? -1 : (int)(0xffffffffu - (u32)highest);  // -1: some logit is no number
    p.next_tokens[row] = token;
    if (p.advance) { p.tokens[row] = token < 0 ? 0 : token; p.positions[row] += 1; }
  }
  end_step(w);
}
#endif

#ifdef HB_EMULATE
static void decode_step(const Step& p)
#else
extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_step(const __grid_constant__ Step p)
#endif
{
  Shared& sh = *(Shared*)hb_shared();
  const int thread = hb_thread(), warp = thread / 32;
  if (thread == 0) {
    for (int i = 0; i < SLOTS; i++) { bar_init(&sh.full[i], COPIERS); bar_init(&sh.empty[i], ARRIVALS); }
    bar_init(&sh.routed, 1);
    bar_init(&sh.squared, WORKERS);
    bar_init(&sh.attended, 1);
    bar_init_done();
    sh.epoch = p.control[0];
#if HB_TILE_BODY
    if (shared_base() & 1023) give_up(p.failure, 0x902);  // where the tensor core looks for permuted rows
#endif
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
    sh.seat = grid >= KV_HEADS ? Seat{block % KV_HEADS, block / KV_HEADS, share_of(grid, block % KV_HEADS, KV_HEADS)} : Seat{block, 0, 1};
    sh.turns = grid >= KV_HEADS ? 1 : share_of(KV_HEADS, block, grid);
    sh.o_first = O_TILES * sh.seat.index / sh.seat.of;
    sh.o_last = O_TILES * (sh.seat.index + 1) / sh.seat.of;
    sh.up_tiles = up_share(TOP_K, block, grid);
    sh.head_tiles = share_of(HEAD_TILES, block, grid);
    down_range(TOP_K, block, grid, sh.down_first, sh.down_last);
  }
  sync_all();
  if (thread < 2) {
    const bool sliding = thread == 1;
    int n = 0;
    for (Unit u = sh.unit[thread] = find_unit(sh, p.rows, sliding, 0); u.on; u = find_unit(sh, p.rows, sliding, n)) n++;
    sh.units[thread] = n;
    for (int row = 0; row < p.rows; row++) {
      int from, to, first, pages;
      key_range(sh, row, sliding, from, to, first, pages);
      sh.parts[thread][row] = parts_of(pages, sliding);
    }
  }
  sync_all();
  if (warp == WORKERS) {
    feed();
    return;
  }
  State s = 0;
  HB_ROLLED
  for (int layer = 0; layer < LAYERS; layer++) {
    if (has_bit(OTHER_QKV, layer)) s = layer ? phase_qkv<false, F_QKV_OTHER>(s, layer) : phase_qkv<true, F_QKV_OTHER>(s, layer);
    else s = layer ? phase_qkv<false, F_QKV>(s, layer) : phase_qkv<true, F_QKV>(s, layer);
    if (has_bit(OTHER_O, layer)) s = phase_attention<F_O_OTHER>(s, layer);
    else s = phase_attention<F_O>(s, layer);
    s = phase_up(s, layer);
    s = phase_down(s, layer);
  }
#ifdef HB_LENT
  phase_leave(s);
#else
  phase_head(s);
#endif
}

#ifdef HB_EMULATE
extern "C" void hb_run(const char*, const Step* p, int grid, u32 seed) {
  emu::run(grid, THREADS, sizeof(Shared), seed, [p] { decode_step(*p); });
}
extern "C" int hb_size(int what) { return what == 0 ? (int)sizeof(Step) : what == 1 ? (int)sizeof(Shared) : what == 2 ? THREADS : (int)sizeof(Layer); }
#endif
