// Token embedding: rows of a bf16 table as the float32 residual stream. A block takes one row, a thread sixteen bytes of
// it at a time. It waits before it reads a token, which the step before may just have sampled.
#include "device/warpgroup.cuh"

constexpr int THREADS = 192;

struct Embed {         // mirrored in phase.py
  const int* tokens;   // [rows]
  const u16* table;    // [vocab][hidden], bf16
  float* x;            // [rows][hidden]
  int hidden;          // a multiple of eight
};
HB_MIRRORED(Embed, tokens, table, x, hidden)

extern "C" __global__ void __launch_bounds__(THREADS) embed(const __grid_constant__ Embed e) {
  wait_for_previous();
  release_next();
  const int row = hb_block();
  const u16* from = e.table + (size_t)e.tokens[row] * e.hidden;
  float* to = e.x + (size_t)row * e.hidden;
  for (int k = hb_thread() * 8; k < e.hidden; k += THREADS * 8) {
    const u32x4 v = ldg128(from + k);
    const u32 low[4] = {v.x << 16, v.x & 0xffff0000u, v.y << 16, v.y & 0xffff0000u};
    const u32 high[4] = {v.z << 16, v.z & 0xffff0000u, v.w << 16, v.w & 0xffff0000u};
    store_words<4>(to + k, low);
    store_words<4>(to + k + 4, high);
  }
}

#ifdef HB_EMULATE
extern "C" void hb_run(const char*, const Embed* e, int grid, u32 seed) { emu::run(grid, THREADS, 0, seed, [=] { embed(*e); }); }
extern "C" int hb_size(int what) { return what == 0 ? (int)sizeof(Embed) : what == 1 ? 0 : THREADS; }
#endif
