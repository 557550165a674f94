// Bytes through a ring of shared memory, as kernels bring theirs: what test_sm8x.py asks. `fault` is a mistake that must show.
#include "device/feeding.cuh"

enum { ARRIVES_EARLY = 1, READS_EARLY = 2, FREES_EARLY = 3, WAITS_FOR_TOO_FEW = 4 };

constexpr int SLOTS = 3, FIRST = 528, SECOND = 1024, BYTES = FIRST + SECOND, PAGE = 1024;  // no multiple of 512 in the first

struct Probe {
  const u8* from;
  u8* to;
  int pieces, fault;
};
struct Shared {
  u8 ring[SLOTS][BYTES];
  u64 full[SLOTS], empty[SLOTS];
};

// One warp feeds, one reads; the slot is free when it has read all of it.
extern "C" __global__ void through_a_ring(const __grid_constant__ Probe p) {
  Shared& sh = *(Shared*)hb_shared();
  const int thread = hb_thread(), lane = thread % 32;
  if (thread == 0) {
    for (int i = 0; i < SLOTS; i++) { bar_init(&sh.full[i], COPIERS); bar_init(&sh.empty[i], 1); }
    bar_init_done();
  }
  sync_all();
  if (thread >= 32) {
    if (feeds(lane))
      for (int i = 0; i < p.pieces; i++) {
        u64* full = &sh.full[i % SLOTS];
        wait_for(&sh.empty[i % SLOTS], (u32)(i / SLOTS & 1) ^ 1);
        begin_copies(full, BYTES);
        copy_bytes(sh.ring[i % SLOTS], p.from + (size_t)i * BYTES, FIRST, full, streaming_policy(), lane);
        copy_bytes(sh.ring[i % SLOTS] + FIRST, p.from + (size_t)i * BYTES + FIRST, SECOND, full, streaming_policy(), lane);
        if (p.fault == ARRIVES_EARLY) bar_arrive(full, 1);
        else end_copies(full);
      }
    finish_copies();
    return;
  }
  for (int i = 0; i < p.pieces; i++) {
    if (p.fault != READS_EARLY) wait_for(&sh.full[i % SLOTS], (u32)(i / SLOTS & 1));
    if (p.fault == FREES_EARLY && lane == 0) bar_arrive(&sh.empty[i % SLOTS], 1);
    if (p.fault) for (int n = 0; n < 4; n++) wait_a_bit();
    for (int b = lane * 16; b < BYTES; b += 512) {
      const u32x4 v = lds128(sh.ring[i % SLOTS] + b);
      *(u32x4*)(p.to + (size_t)i * BYTES + b) = v;
    }
    sync_warp();
    if (p.fault != FREES_EARLY && lane == 0) bar_arrive(&sh.empty[i % SLOTS], 1);
  }
}

// Every thread asks for its units of a page, and waits for the oldest of three groups; what others asked for is there after
// a barrier. Past the last piece there are zeros.
extern "C" __global__ void by_groups(const __grid_constant__ Probe p) {
  u8* stage = hb_shared();
  const int thread = hb_thread();
  auto ask = [&](int i) {
    copy_unit(stage + i % SLOTS * PAGE + thread * 16, p.from + (size_t)(i < p.pieces ? i : 0) * PAGE + thread * 16, i < p.pieces ? 16 : 0);
    close_copies();
  };
  ask(0);
  ask(1);
  for (int i = 0; i <= p.pieces; i++) {
    if (p.fault == WAITS_FOR_TOO_FEW) wait_for_copies<2>();
    else wait_for_copies<1>();
    sync_all();  // page i is there for all, and all are done with the stage of page i - 1
    ask(i + 2);
    const int other = (thread * 7 + 3) % 64;
    *(u32x4*)(p.to + (size_t)i * PAGE + other * 16) = lds128(stage + i % SLOTS * PAGE + other * 16);
  }
  wait_for_copies<0>();
}

#ifdef HB_EMULATE
extern "C" void hb_run(const char* entry, const Probe* p, int grid, u32 seed) {
  const bool ring = entry[0] == 't';
  emu::run(grid, 64, sizeof(Shared), seed, [=] { ring ? through_a_ring(*p) : by_groups(*p); });
}
extern "C" int hb_size(int what) { return what == 0 ? (int)sizeof(Probe) : (int)sizeof(Shared); }
#endif
