// o and the router's products, shared out by kv heads. A block has its head's attention in shared memory and a range of
// tiles of o: one warp multiplies one tile by the head's 512 values, so that no sums pass between warps, and adds the result
// to the residual. The router is linear but for the norm's root, so what the head adds to the residual is multiplied by the
// router's columns at once and added to the logits; the root joins where the experts are chosen.
#pragma once
#include "decode/attention.cuh"

// The tile of which `at` is the first slot, and `place` its place there. After it every lane has some of the 16 sums of some
// rows: OWNED of them, see owned_row() and owned_m(); with one batch row half of the lanes have what others have too.
constexpr int OWNED = LANE_ROWS == 4 ? 2 * SETS : 1;
HB_DEV int owned_row(int lane, int i) { return LANE_ROWS == 4 ? i / 2 * 4 + lane % 4 : LANE_ROWS == 2 ? lane % 2 : 0; }
HB_DEV int owned_m(int lane, int i) { return lane / 4 + 8 * (LANE_ROWS == 4 ? i % 2 : LANE_ROWS == 2 ? lane / 2 % 2 : lane % 2); }

constexpr int ROUTER_ROWS = (ROWS + 3) / 4;  // times four rows, in eight columns

template <int FORMAT> HB_DEV void multiply_piece(const Worker& w, Cursor at, int place, int readers, float (&sum)[OWNED]) {
  using P = Piece<FORMAT>;
  constexpr int AT_ONCE = 2, PASSES = 2 * AT_ONCE / GROUPS_AT_ONCE;  // chunks in registers; a loop, for the instruction cache's sake
  const int g = w.lane / 4, t = w.lane % 4, mine = t / LANE_ROWS, pair = g / 2, own = pair / LANE_ROWS;
  u32 here[GROUPS_AT_ONCE];  // one where a group is this lane's: a product with it takes another pipe than a selection would
  HB_UNROLL
  for (int j = 0; j < GROUPS_AT_ONCE; j++) here[j] = opaque(own == j ? 1u : 0u);
  float acc[SETS][2] = {}, d[SETS][HB_O_CHAINS][4] = {};
  HB_UNROLL
  for (int slot = 0; slot < P::SLOTS_EACH; slot++, at.advance(1)) {
    wait_bar(w.full(at.slot), at.phase, 0x320);
    const u32 base = w.ring(at.slot) + place * P::BYTES;
    u32 loaded = 0;
    HB_ROLLED
    for (int c = 0; c < P::EACH; c += AT_ONCE) {
      DecodeChunk<FORMAT> chunk[AT_ONCE];
      u32 scales[PASSES];
      HB_UNROLL
      for (int i = 0; i < AT_ONCE; i++) { chunk[i].load(base + (c + i) * P::CHUNK, w.lane); loaded ^= chunk[i].loaded(); }
      if (FORMAT != BF16)
        HB_UNROLL
        for (int i = 0; i < PASSES; i++) {
          const int group = i * GROUPS_AT_ONCE + mine;
          scales[i] = load_scales<FORMAT>(base + (c + (group >> 1)) * P::CHUNK + scale_at<FORMAT>(g, group & 1));
          loaded ^= scales[i];
        }
      HB_UNROLL
      for (int pass = 0; pass < PASSES; pass++) {
        const int k = 2 * (slot * P::EACH + c) + pass * GROUPS_AT_ONCE + own;  // this lane's group of the head's 16
        u32x4 x[SETS];
        HB_UNROLL
        for (int s = 0; s < SETS; s++) x[s] = lds128(&w.sh.attn[s * LANE_ROWS + pair % LANE_ROWS][g & 1][(k >> 1) * ATTN_HEAD + (k & 1) * 32 + t * 8]);
        HB_UNROLL
        for (int j = 0; j < GROUPS_AT_ONCE; j++) {
          const int group = pass * GROUPS_AT_ONCE + j;
          const u32 mask = GROUPS_AT_ONCE == 1 ? 1u : here[j];
          HB_UNROLL
          for (int s = 0; s < SETS; s++) {
            multiply_step(chunk[group / 2], group % 2 * 2, d[s][2 * j % HB_O_CHAINS], x[s].x * mask, x[s].y * mask);
            multiply_step(chunk[group / 2], group % 2 * 2 + 1, d[s][(2 * j + 1) % HB_O_CHAINS], x[s].z * mask, x[s].w * mask);
          }
        }
        HB_UNROLL
        for (int s = 0; s < SETS; s++) {
          HB_UNROLL
          for (int c = 1; c < HB_O_CHAINS; c++)
            HB_UNROLL
            for (int i = 0; i < 4; i++) { d[s][0][i] += d[s][c][i]; d[s][c][i] = 0.f; }
          apply_scales<FORMAT>(FORMAT == BF16 ? 0u : scales[pass], d[s][0], acc[s][0], acc[s][1]);
        }
      }
    }
    sync_warp();
    if (w.lane == 0) bar_arrive(w.empty(at.slot), (place ? 1 : ARRIVALS + 1 - readers) + w.after(loaded));
  }
  HB_UNROLL
  for (int s = 0; s < SETS; s++) {
    const float a0 = acc[s][0], a1 = acc[s][1];
    if (LANE_ROWS == 1) {
      sum[0] = (t & 1 ? a1 : a0) + shfl_xor(t & 1 ? a0 : a1, 1);
      sum[0] += shfl_xor(sum[0], 2);
    } else if (LANE_ROWS == 2) sum[0] = (mine ? a1 : a0) + shfl_xor(mine ? a0 : a1, 2);
    else { sum[OWNED > 1 ? 2 * s : 0] = a0; sum[OWNED > 1 ? 2 * s + 1 : 0] = a1; }
  }
}

// So many contributions to every logit: one from every set of every block and kv head.
HB_DEV u32 router_contributions(int grid) { return (u32)((grid > KV_HEADS ? grid : KV_HEADS) * (HB_ROUTER_JOINED ? 1 : ROUTER_SETS)); }
// In fixed point: where every contribution is below it, their sum has at most 31 bits before the point.
HB_DEV i64 router_limit(int grid) { return (i64)((1u << 31) / router_contributions(grid)) << (32 - LOGIT_COUNT); }

// Tiles from sh.o_first to sh.o_last of one kv head, and its part of the logits. `before`, `after`: the residual that comes
// in (or rows of the embedding), and goes on.
template <int FORMAT> HB_DEV void project(Worker& w, const Layer& l, int kv_head, const u64* before, u64* after, u64* logits) {
  using P = Piece<FORMAT>;
  Shared& sh = w.sh;
  const Step& p = w.p;
  const int g = w.lane / 4, t = w.lane % 4, set = w.warp / ROUTER_WARPS, which = w.warp % ROUTER_WARPS;
  i64 total[ROUTER_ROWS][ROUTER_EACH][2] = {};  // of row 4i + t: experts g and g + 8 of each 16
  HB_ROLLED
  for (int first = sh.o_first; first < sh.o_last; first += P::MOST) {
    const int n = sh.o_last - first < P::MOST ? sh.o_last - first : P::MOST;
    if (first > sh.o_first) w.sync();  // nobody still reads xs, nobody is a round of the ring ahead
    if (w.warp < n) {
      const int tile = first + w.warp, slot = P::FIT ? w.warp / (P::FIT ? P::FIT : 1) : w.warp * P::SLOTS_EACH;
      const int place = P::FIT ? w.warp % (P::FIT ? P::FIT : 1) : 0, left = n - (w.warp - place);
      const bool adds = tile % KV_HEADS == kv_head;  // the residual and the bias, once
      u16 norm[OWNED], bias[OWNED];  // widened where they are used: nothing waits for them here
      u64 x[OWNED];
      HB_UNROLL
      for (int i = 0; i < OWNED; i++) {
        const int row = owned_row(w.lane, i), k = tile * 16 + owned_m(w.lane, i);
        norm[i] = l.mlp_norm[k];
        bias[i] = 0;
        x[i] = 0;
        if (adds && row < w.rows) {
          bias[i] = l.o_bias[k];
          x[i] = before ? box_load(before + (size_t)row * HIDDEN + k) : p.embed[(size_t)sh.token[row] * HIDDEN + k];
        }
      }
      w.mark(1);
      float sum[OWNED];
      multiply_piece<FORMAT>(w, w.at.ahead(slot), place, P::FIT ? (left < P::FIT ? left : P::FIT) : 1, sum);
      w.mark(2);
      HB_UNROLL
      for (int i = 0; i < OWNED; i++) {
        const int row = owned_row(w.lane, i), m = owned_m(w.lane, i);
        if (row < w.rows && (LANE_ROWS > 1 || w.lane % 4 < 2)) {
          const float residual = before ? summed(x[i]) : bf16_low((u32)x[i]) * p.per_unit;
          const float v = sum[i] * (scale_out<FORMAT>() * p.per_unit) + (residual + bf16_low(bias[i]) * p.per_unit);
          if (!below(v, LIMIT)) break_row(row, AT_O);
          box_add(after + (size_t)row * HIDDEN + tile * 16 + m, contribution(v));
          const Parts y = split(v * bf16_low(norm[i]), 0.f);
          sh.xs[w.warp][row][0][m] = (u16)y.high; sh.xs[w.warp][row][1][m] = (u16)y.low;
        }
      }
    }
    w.at.advance_far(P::slots(n));
    w.sync();
    HB_ROLLED
    for (int from = 0; from < n; from += ROUTER_FIT, w.at.advance(1)) {
      const int end = n - from < ROUTER_FIT ? n : from + ROUTER_FIT;
      u32 wrong = 0;  // rows, of those 4 apart that this lane has, with a product that is no number
      wait_bar(w.full(w.at.slot), w.at.phase, 0x321);
      if (set < ROUTER_SETS)
        HB_ROLLED
        for (int i = from + set; i < end; i += ROUTER_SETS) {
          HB_UNROLL
          for (int n = 0; n < ROUTER_EACH; n++) {
            const int tile = which + n * ROUTER_WARPS;
            if (EXPERTS / 16 % ROUTER_WARPS && tile >= EXPERTS / 16) continue;
            const u32 at = w.ring(w.at.slot) + (i - from) * ROUTER_BYTES + (tile * 16 + g) * 32 + t * 8;  // k: 4t to 4t + 3
            const u64 a = lds64(at), b = lds64(at + 8 * 32);
            HB_UNROLL
            for (int r = 0; r < ROUTER_ROWS; r++) {
              float c[4] = {};
              const u64 x = r * 4 + g / 2 < ROWS ? lds64(&sh.xs[i][r * 4 + g / 2][g & 1][4 * t]) : 0;
              mma(c, (u32)a, (u32)b, (u32)(a >> 32), (u32)(b >> 32), (u32)x, (u32)(x >> 32));
              const float low = c[0] + c[1], high = c[2] + c[3];
              if (!(below(low, ROUTER_PART) && below(high, ROUTER_PART))) wrong |= 1u << r;
              total[r][n][0] += fixed_point<LOGIT_COUNT>(low);
              total[r][n][1] += fixed_point<LOGIT_COUNT>(high);
            }
          }
        }
      sync_warp();
      if (w.lane == 0) bar_arrive(w.empty(w.at.slot), (w.warp == 0 ? ARRIVALS - WORKERS + 1 : 1) + w.after(wrong));
      if (wrong)
        HB_UNROLL
        for (int r = 0; r < ROUTER_ROWS; r++) {  // a row that is not in use holds anything
          const int row = 4 * r + hb_thread() % 4;
          if (wrong >> r & 1 && row < rows_of(sh.step)) break_row(row, AT_ROUTER);
        }
    }
  }
  if (HB_ROUTER_JOINED) {  // merge's place: attention is through with it
    if (set > 0 && set < ROUTER_SETS)
      HB_UNROLL
      for (int i = 0; i < ROUTER_ROWS * ROUTER_EACH; i++) {
        const int row = i / ROUTER_EACH * 4 + t, tile = which + i % ROUTER_EACH * ROUTER_WARPS;
        if (row < w.rows && tile < EXPERTS / 16)
          HB_UNROLL
          for (int j = 0; j < 2; j++) sh.joined.sum[set - 1][row][tile * 16 + g + 8 * j] = total[i / ROUTER_EACH][i % ROUTER_EACH][j];
      }
    w.sync();
  }
  if (set < (HB_ROUTER_JOINED ? 1 : ROUTER_SETS))
    HB_UNROLL
    for (int i = 0; i < ROUTER_ROWS * ROUTER_EACH; i++) {
      const int row = i / ROUTER_EACH * 4 + t, tile = which + i % ROUTER_EACH * ROUTER_WARPS;
      if (row < w.rows && tile < EXPERTS / 16)
        HB_UNROLL
        for (int j = 0; j < 2; j++) {
          i64 sum = total[i / ROUTER_EACH][i % ROUTER_EACH][j];
          if (HB_ROUTER_JOINED)
            HB_UNROLL
            for (int other = 0; other < ROUTER_SETS - 1; other++) sum += sh.joined.sum[other][row][tile * 16 + g + 8 * j];
          if (sum >= router_limit(w.grid) || sum <= -router_limit(w.grid)) break_row(row, AT_ROUTER);
          box_add(logits + ((size_t)row * ROUTER_COPIES + w.block % ROUTER_COPIES) * EXPERTS + tile * 16 + g + 8 * j, contribution<LOGIT_COUNT>(sum));
        }
    }
}
