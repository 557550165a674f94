// Copies from memory into a slot of shared memory by a feeding warp; the slot's barrier says that all of them have landed.
//
// Where there is a copy engine one lane asks it for everything, and the barrier counts bytes. Elsewhere (HB_SM80) every lane
// copies its sixteen bytes of each 512, and each lane's arrival follows its last copy. Either way, by every lane that feeds:
//
//   wait until the slot is free;  begin_copies(bar, bytes);  copy_bytes(...), as often as needed;  end_copies(bar);
//
// with a barrier made for COPIERS arrivals of each feeding warp, and finish_copies() before a lane leaves the kernel. The end is
// no release of what a lane has stored itself: that needs an arrival of its own.
#pragma once
#include "device/async_copies.cuh"

#ifdef HB_SM80
constexpr int COPIERS = 32;
HB_DEV bool feeds(int) { return true; }
HB_DEV void begin_copies(u64*, u32) {}
HB_DEV void copy_bytes(void* to, const void* from, u32 bytes, u64*, u64 policy, int lane) {
  HB_UNROLL_4
  for (u32 at = (u32)lane * 16; at < bytes; at += 512) stream_unit((u8*)to + at, (const u8*)from + at, policy);
}
HB_DEV void end_copies(u64* bar) { arrive_after_copies(bar); }
HB_DEV void finish_copies() { wait_for_all_copies(); }
#else
constexpr int COPIERS = 1;
HB_DEV bool feeds(int lane) { return lane == 0; }
HB_DEV void begin_copies(u64* bar, u32 bytes) { bar_expect(bar, bytes); }
HB_DEV void copy_bytes(void* to, const void* from, u32 bytes, u64* bar, u64 policy, int) { bulk_copy(to, from, bytes, bar, policy); }
HB_DEV void end_copies(u64*) {}
HB_DEV void finish_copies() {}
#endif
// Of the lanes that feed, the one that publishes for all of them.
HB_DEV bool leads(int lane) { return COPIERS == 1 || lane == 0; }
