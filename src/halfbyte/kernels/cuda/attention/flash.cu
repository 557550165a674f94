// Attention of whole prompts over the paged bf16 cache, on SM90. A tile is 8 tokens of one sequence for every warpgroup,
// times the 8 query heads of one kv head: 64 rows of the tensor core's product, so a page is read once for all of them.
// One warp asks the copy engine for pages (64 tokens by 64 dims, swizzled on the way); the warpgroups multiply, and each
// has the scores of the next page under way while it works out the weights of this one (as FlashAttention-3 does).
// Softmax, tiles and results: prompt.cuh.
#include "attention/prompt.cuh"

constexpr int GROUPS = HB_GROUPS, WARPS = GROUPS * 4, THREADS = GROUPS * 128 + 128, TOKENS = GROUPS * 8;
constexpr int STAGES = HB_STAGES;

struct Shared {
  u8 k[STAGES][PAGE_BYTES], v[STAGES][PAGE_BYTES];
  u64 k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};
HB_CONST_FN int shared_bytes() { return (int)sizeof(Shared) + 1024; }

#ifdef HB_EMULATE
HB_DEV void copy_page(u8* to, const Flash& p, int row, u64* bar) {
  const u8* from = (const u8*)(uintptr_t)p.pages[0] + (size_t)row * 128;
  for (int r = 0; r < PAGE; r++)
    for (int u = 0; u < 8; u++) bulk_copy(to + r * 128 + ((u ^ (r & 7)) << 4), from + r * 128 + u * 16, 16, bar, 0);
}
HB_DEV void product_of_scores(float (&d)[32], const u32* a, u64 b, bool first) {
  if (first) for (float& x : d) x = 0.f;
  wgmma<64>(d, a[0], a[1], a[2], a[3], b);
}
namespace emu {
struct Across {  // one warp's share of A (16 x 16) times B (16 x 64, rows along k), swizzled
  u32 a[4]; const u8* b; float* d;
  void bring(Warp& w, int p, int lane) { for (int i = 0; i < 4; i++) w.in[p][i][lane] = a[i]; }
  int take(Warp& w, int p, int lane) {
    for (int i = 0; i < 32; i++) {
      const int row = lane / 4 + ((i >> 1) & 1) * 8, col = i / 4 * 8 + 2 * (lane % 4) + (i & 1);
      double s = 0;
      for (int k = 0; k < 16; k++) {
        const u32 x = w.in[p][(row >= 8) + 2 * (k / 8)][(row % 8) * 4 + (k % 8) / 2];
        uintptr_t at = (uintptr_t)b + k * 128 + col * 2;
        at ^= (at >> 7 & 7) << 4;
        s += (double)bf(k & 1 ? x >> 16 : x & 0xffff) * (double)bf(*(const u16*)at);
      }
      d[i] += (float)s;
    }
    return 0;
  }
};
}  // namespace emu
HB_DEV void product_of_values(float (&d)[32], const u32* a, u64 b) {
  emu::Across x{{a[0], a[1], a[2], a[3]}, (const u8*)(uintptr_t)b, d};
  emu::collective<emu::Across&>(x);
}
HB_DEV void written_for_products() {}
#else
HB_DEV void copy_page(u8* to, const Flash& p, int row, u64* bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               ::"r"(smem(to)), "l"(&p), "r"(0), "r"(row), "r"(smem(bar)) : "memory");
}
// scores: B holds keys in rows, along the product's columns; the first of four products overwrites
HB_DEV void product_of_scores(float (&d)[32], const u32* a, u64 b, bool first) {
  if (first)
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" HB_D64 "}, {%32,%33,%34,%35}, %36, 0, 1, 1, 0;"
                 : HB_O64 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  else
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" HB_D64 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 0;"
                 : HB_O64 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// values: B holds tokens in rows, along k: the tensor core transposes it
HB_DEV void product_of_values(float (&d)[32], const u32* a, u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" HB_D64 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
               : HB_O64 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
HB_DEV void written_for_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#endif

HB_DEV void sync_group(int group) {
  if (group == 0) sync_some<1, 128>();
  else if (group == 1) sync_some<2, 128>();
  else sync_some<3, 128>();
}

// ---- pages, by the last warp ----------------------------------------------------------------------------------------

HB_DEV void feed(const Flash& p, Shared& sh, const Tile& t, int head, int lane) {
  const int* table = p.table + (size_t)t.sequence * p.table_stride + t.begin;
  const int n = t.last - t.begin, first = p.first_row + head * PAGE;
  int k_page = 0, v_page = 0;
  for (int j = 0; j <= n; j++) {  // keys run one page ahead of values
    if (j % 32 == 0) k_page = j + lane < n ? table[j + lane] : 0;
    const int key = shfl((u32)k_page, j & 31), value = v_page;
    v_page = key;
    if (lane != 0) continue;
    const int s = j % STAGES, before = (j + STAGES - 1) % STAGES;
    if (j < n) {
      if (j >= STAGES) wait_for(&sh.k_empty[s], (j / STAGES - 1) & 1);
      bar_expect(&sh.k_full[s], PAGE_BYTES);
      copy_page(sh.k[s], p, key * p.page_rows + first, &sh.k_full[s]);
    }
    if (j > 0) {
      if (j - 1 >= STAGES) wait_for(&sh.v_empty[before], ((j - 1) / STAGES - 1) & 1);
      bar_expect(&sh.v_full[before], PAGE_BYTES);
      copy_page(sh.v[before], p, value * p.page_rows + first + p.kv_heads * PAGE, &sh.v_full[before]);
    }
  }
}

// ---- products and softmax, by the warpgroups ------------------------------------------------------------------------

struct Worker {
  const Flash& p;
  Shared& sh;
  const Tile& t;
  int group, lane, warp;
  int oldest, newest;  // positions of this warpgroup's first and last token
  u32 q[16];

  HB_DEV_MEMBER void ask(float (&s)[32], int j) {  // scores of page j, asynchronously
    const int stage = j % STAGES;
    wait_for(&sh.k_full[stage], j / STAGES & 1);
    const auto b = b_low(sh.k[stage]);
    wgmma_fence();
    HB_UNROLL
    for (int k = 0; k < 4; k++) product_of_scores(s, q + 4 * k, b_tile(b, k * 32), k == 0);
    wgmma_commit();
  }
  HB_DEV_MEMBER void blank(int stage) const {  // tokens never written: whatever lies there must not meet a zero weight
    for (int i = (t.newest % PAGE + 1) * 128 + (warp % 4 * 32 + lane) * 16; i < PAGE_BYTES; i += 128 * 16) {
      u32* to = (u32*)(sh.v[stage] + i);
      to[0] = to[1] = to[2] = to[3] = 0;
    }
    written_for_products();
    sync_group(group);
  }

  // Page j: its scores are in `now`; those of page j + 1 go to `next` meanwhile, if there is one.
  template <bool LAST> HB_DEV_MEMBER void turn(float (&now)[32], float (&next)[32], float (&o)[32], Rows& r, int j) {
    const int stage = j % STAGES, block = t.begin + j;
    if constexpr (!LAST) ask(next, j + 1);
    if ((block + 1) * PAGE > oldest + 1 || (p.window && block * PAGE <= newest - p.window)) hide(now, r, block * PAGE, p.window, lane, as_float(0xff800000u));
    u32 w[16];
    weigh(now, w, o, r, p.scale);
    wait_for(&sh.v_full[stage], j / STAGES & 1);
    if (LAST && (t.newest + 1) % PAGE) blank(stage);
    const auto b = b_low(sh.v[stage]);
    wgmma_fence();
    HB_UNROLL
    for (int k = 0; k < 4; k++) product_of_values(o, w + 4 * k, b_tile(b, k * 2048));
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_settle(o);
    if constexpr (!LAST) wgmma_settle(next);
    if (lane == 0) {
      if constexpr (!LAST) bar_arrive(&sh.k_empty[(j + 1) % STAGES], 1);
      bar_arrive(&sh.v_empty[stage], 1);
    }
  }
};

HB_DEV void consume(const Flash& p, Shared& sh, const Tile& t, int head, int thread) {
  const int warp = thread / 32, lane = thread % 32, g = lane / 4;
  Worker w{p, sh, t, thread / 128, lane, warp, 0, 0, {}};
  const int first = t.row + w.group * 8, most = t.end - 1, width = p.kv_heads * GROUP * HEAD_DIM;
  w.oldest = p.positions[first < most ? first : most];
  w.newest = p.positions[first + 7 < most ? first + 7 : most];
  Rows r;
  size_t at[2];  // where the rows' queries and results lie
  HB_UNROLL
  for (int h = 0; h < 2; h++) {
    const int row = t.row + warp * 2 + h, real = row < most ? row : most;
    r.position[h] = p.positions[real];
    at[h] = (size_t)real * width + (head * GROUP + g) * HEAD_DIM + 2 * (lane & 3);
    HB_UNROLL
    for (int i = 0; i < 8; i++) w.q[i / 2 * 4 + (i & 1) * 2 + h] = *(const u32*)(p.q + at[h] + i * 8);
  }
  const int n = t.last - t.begin;
  float a[32] = {}, b[32] = {}, o[32] = {};
  w.ask(a, 0);
  wgmma_wait<0>();
  wgmma_settle(a);
  if (lane == 0) bar_arrive(&sh.k_empty[0], 1);
  int j = 0;
  HB_ROLLED
  for (; j + 2 < n; j += 2) {
    w.turn<false>(a, b, o, r, j);
    w.turn<false>(b, a, o, r, j + 1);
  }
  if (j + 1 < n) {
    w.turn<false>(a, b, o, r, j);
    w.turn<true>(b, a, o, r, j + 1);
  } else w.turn<true>(a, b, o, r, j);

  HB_UNROLL
  for (int h = 0; h < 2; h++) {
    const float factor = factor_of(p, r, h, head * GROUP + g);
    const int row = t.row + warp * 2 + h;
    if (row < t.end) leave(p, o, h, factor, at[h], row, head * GROUP + g, lane);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, HB_BLOCKS) flash(const __grid_constant__ Flash p) {
  Shared& sh = *(Shared*)(((size_t)hb_shared() + 1023) & ~(size_t)1023);
  const int thread = hb_thread(), head = hb_block() % p.kv_heads;
  if (thread == 0) {
    for (int s = 0; s < STAGES; s++) {
      bar_init(&sh.k_full[s], 1); bar_init(&sh.v_full[s], 1);
      bar_init(&sh.k_empty[s], WARPS); bar_init(&sh.v_empty[s], WARPS);
    }
    bar_init_done();
  }
  sync_all();
  wait_for_previous();
  Tile t;
  if (find_tile<TOKENS>(p, p.first_tile + p.tiles - 1 - hb_block() / p.kv_heads, t)) {  // the longest rows first
    // registers: what the feeding warpgroup gives, the others take (512 x 128, 384 x 168 or 2 x 256 x 128 in all)
    if (thread >= GROUPS * 128) {
      fewer_registers<GROUPS == 3 ? 32 : 40>();
      if (thread < GROUPS * 128 + 32) feed(p, sh, t, head, thread % 32);
    } else {
      more_registers<GROUPS == 3 ? 160 : GROUPS == 2 ? 232 : 216>();
      consume(p, sh, t, head, thread);
    }
  }
}

#ifdef HB_EMULATE
extern "C" void hb_run(const char*, const Flash* p, int grid, u32 seed) { emu::run(grid, THREADS, shared_bytes(), seed, [=] { flash(*p); }); }
extern "C" int hb_size(int what) { return what == 0 ? (int)sizeof(Flash) : what == 1 ? shared_bytes() : THREADS; }
#endif
