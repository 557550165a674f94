// Sixteen bytes at a time on their way to shared memory without passing through registers (cp.async), as every GPU from SM80
// on has it: a thread asks, closes a group, and later waits for all but its newest groups. What others asked for is there
// after they have waited and a barrier. With HB_EMULATE the same names run on a CPU: a copy lands at once or as late as
// it may, as the seed decides.
#pragma once
#include "device/instructions.cuh"

#ifdef HB_EMULATE
#include <map>
namespace emu {
struct Unit { void* to; const void* from; int bytes; };
struct Asked { std::vector<Unit> open; std::deque<std::vector<Unit>> closed; };
inline Asked& asked() { static std::map<Fiber*, Asked> all; return all[machine()->now]; }
inline void land(const Unit& u) {
  memset(u.to, 0, 16);
  memcpy(u.to, u.from, u.bytes);
}
}  // namespace emu
HB_DEV void copy_unit(void* to, const void* from, int bytes) {
  if (((uintptr_t)to | (uintptr_t)from) & 15) { fprintf(stderr, "emulator: a unit of 16 bytes must be aligned\n"); abort(); }
  const emu::Unit u{to, from, bytes};
  if (emu::machine()->random() % 2) emu::land(u);
  else { memset(to, 0xA5, 16); emu::asked().open.push_back(u); }
}
HB_DEV void close_copies() { emu::asked().closed.push_back(std::move(emu::asked().open)); emu::asked().open = {}; }
template <int NEWEST> HB_DEV void wait_for_copies() {
  auto& groups = emu::asked().closed;
  for (; groups.size() > NEWEST; groups.pop_front())
    for (const emu::Unit& u : groups.front()) emu::land(u);
  emu::moved();
}
#else
// `bytes`: 16, or 0 for zeros instead of what lies there.
HB_DEV void copy_unit(void* to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem(to)), "l"(from), "r"(bytes) : "memory");
}
HB_DEV void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int NEWEST> HB_DEV void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(NEWEST) : "memory"); }
#endif
