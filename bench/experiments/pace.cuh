// A slower memory, for rehearsals (bench/rehearse_gpu.py): every bulk copy of a block takes HB_PACE nanoseconds per megabyte
// of a queue of its own, then starts. Pre-included in front of a kernel, whose sources stay as they are. One thread of a block
// copies, in order, and is held up here; where it comes late by less than half a copy it would have been in the queue.
#pragma once
#include "intrin.cuh"

HB_DEV void paced_copy(void* dst, const void* src, u32 bytes, u64* bar, u64 policy) {
  __shared__ u64 done;
  const u64 now = clock_global(), before = *(volatile u64*)&done;
  const u64 takes = (u64)bytes * HB_PACE >> 20, end = (now - before < takes / 2 ? before : now) + takes;
  while (clock_global() < end) {}
  *(volatile u64*)&done = end;
  bulk_copy(dst, src, bytes, bar, policy);
}
#define bulk_copy paced_copy
