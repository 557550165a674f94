// Sixteen bytes at a time on their way to shared memory without passing through registers (cp.async), as every GPU from SM80
// on has it: a thread asks, closes a group, and later waits for all but its newest groups. What others asked for is there
// after they have waited and a barrier; or a thread's arrival at an mbarrier follows its last copy, and whoever sees the
// barrier complete has all of them. With HB_EMULATE the same names run on a CPU: a copy lands at once or as late as
// it may, as the seed decides, and until then its target holds nothing that could be mistaken for data.
#pragma once
#include "device/instructions.cuh"

#ifdef HB_EMULATE
HB_DEV void copy_unit(void* to, const void* from, int bytes) { emu::ask_unit({to, from, bytes}); }
HB_DEV void stream_unit(void* to, const void* from, u64) { emu::ask_unit({to, from, 16}); }
HB_DEV void arrive_after_copies(u64* bar) { emu::arrive_after_units(bar); }
HB_DEV void wait_for_all_copies() { emu::wait_for_units(); }
HB_DEV void close_copies() {
  emu::Fiber* f = emu::machine()->now;
  f->closed.push_back(std::move(f->asked));
  f->asked = {};
}
template <int NEWEST> HB_DEV void wait_for_copies() {
  auto& groups = emu::machine()->now->closed;
  for (; groups.size() > NEWEST; groups.pop_front())
    for (const emu::Unit& u : groups.front()) emu::land(u);
  emu::moved();
}
#else
// `bytes`: 16, or 0 for zeros instead of what lies there.
HB_DEV void copy_unit(void* to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem(to)), "l"(from), "r"(bytes) : "memory");
}
HB_DEV void stream_unit(void* to, const void* from, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(smem(to)), "l"(from), "l"(policy) : "memory");
}
// One of the arrivals that the barrier expects, when all that this thread asked for has landed.
HB_DEV void arrive_after_copies(u64* bar) { asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(smem(bar)) : "memory"); }
HB_DEV void wait_for_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
HB_DEV void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int NEWEST> HB_DEV void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(NEWEST) : "memory"); }
#endif
