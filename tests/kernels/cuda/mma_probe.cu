// One block-scaled product of a warp, its registers as the host gives them: what test_published_layouts.py asks.
#include "device/warp_products.cuh"

struct Probe {
  const u32 *a, *b, *sa, *sb;  // [lane][4], [lane][2], [lane], [lane]
  float* d;                    // [lane][4]
  int kind, byte;              // 1: m16n8k32 of E2M1 and E4M3, 2: m16n8k64 of E2M1; which byte of the scales is the first
};

HB_DEV void probe(const Probe& p) {
  const int lane = hb_thread();
  u32 a[4];
  float d[4] = {0.f, 0.f, 0.f, 0.f};
  for (int i = 0; i < 4; i++) a[i] = p.a[lane * 4 + i];
  const u32 b0 = p.b[lane * 2], b1 = p.b[lane * 2 + 1], sa = p.sa[lane], sb = p.sb[lane];
  if (p.kind == 1 && p.byte == 0) mma_mxf8<0, 0>(d, a, b0, b1, sa, sb);
  if (p.kind == 1 && p.byte == 3) mma_mxf8<3, 3>(d, a, b0, b1, sa, sb);
  if (p.kind == 2 && p.byte == 0) mma_mxf4<0, 0>(d, a, b0, b1, sa, sb);
  if (p.kind == 2 && p.byte == 2) mma_mxf4<2, 2>(d, a, b0, b1, sa, sb);
  for (int i = 0; i < 4; i++) p.d[lane * 4 + i] = d[i];
}

extern "C" void hb_run(const char*, const Probe* p, int grid, u32 seed) {
  emu::run(grid, 32, 64, seed, [p] { probe(*p); });
}
