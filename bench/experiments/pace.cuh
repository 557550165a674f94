// A slower memory, for rehearsals (bench/experiments/rehearsal.py), pre-included in front of a kernel whose sources stay as they are.
//
// All blocks share one memory: a queue that takes HB_PACE of time per megabyte, in the order in which it is asked. A copy
// starts when the queue has come to it; meanwhile its block asks for nothing else, so blocks take turns, and what one leaves
// the others get. What several blocks ask for (router columns, a window's pages) is read once: asked for again within
// HB_KEPT nanoseconds it comes from L2, which gives every block HB_L2 nanoseconds per megabyte and no more.
#pragma once
#include "device/instructions.cuh"

constexpr int PACE_ENTRIES = 1 << 17;
__device__ u64 pace_drained;             // when the queue will be empty, in 1/1024 ns
__device__ u64 pace_seen[PACE_ENTRIES];  // address above, nanoseconds below

HB_DEV u64 pace_now() { return clock_global() & ((1ull << 44) - 1); }  // five hours, then it would begin again
HB_DEV void pace_wait(u64 end) { while (pace_now() < end) {} }
HB_DEV u64 pace_queue(u32 bytes, u64 now) {
  u64 start;
  const u64 takes = (u64)bytes * HB_PACE >> 20;
  asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(&pace_drained), "l"(now << 10) : "memory");
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(start) : "l"(&pace_drained), "l"(takes) : "memory");
  return (start + takes) >> 10;
}
HB_DEV bool pace_kept(const void* src, u64 now) {
  const u64 line = (u64)src >> 4, entry = (line * 0x9e3779b97f4a7c15ull) >> 47;  // of 2^17
  const u64 mark = line << 32 | (now & 0xffffffffull);
  u64 was;
  asm volatile("atom.relaxed.gpu.global.exch.b64 %0, [%1], %2;" : "=l"(was) : "l"(pace_seen + entry), "l"(mark) : "memory");
  return was >> 32 == (line & 0xffffffffull) && (u32)now - (u32)was < HB_KEPT;
}

HB_DEV void paced_copy(void* dst, const void* src, u32 bytes, u64* bar, u64 policy) {
  __shared__ u64 port;  // when this block's way to L2 is free
  const u64 now = pace_now();
  // What is shared comes in these sizes; a look at everything else would cost more time than the memory takes.
  if (bytes % 4096 == 0 && pace_kept(src, now)) {
    const u64 before = *(volatile u64*)&port;  // anything, at first
    const u64 end = (before - now < (1ull << 20) ? before : now) + ((u64)bytes * HB_L2 >> 20);
    pace_wait(end);
    *(volatile u64*)&port = end;
  } else pace_wait(pace_queue(bytes, now));
  bulk_copy(dst, src, bytes, bar, policy);
}
#define bulk_copy paced_copy
