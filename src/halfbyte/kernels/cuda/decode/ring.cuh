// The stream of weights and pages through shared memory. One lane of the feeding warp asks the copy engine for what the
// block will read, in the order it will be read, as far ahead as the ring is deep and whatever the other blocks do; where there
// is no copy engine all of its lanes copy (feeding.cuh).
#pragma once
#include "decode/mailbox.cuh"
#include "device/feeding.cuh"

struct Cursor {
  int slot = 0;
  u32 phase = 0;
  HB_DEV_MEMBER void advance(int n) {  // n up to SLOTS
    slot += n;
    if (slot >= SLOTS) { slot -= SLOTS; phase ^= 1; }
  }
  HB_DEV_MEMBER void advance_far(int n) {
    slot += n;
    while (slot >= SLOTS) { slot -= SLOTS; phase ^= 1; }
  }
  HB_DEV_MEMBER void back(int n) {
    slot -= n;
    if (slot < 0) { slot += SLOTS; phase ^= 1; }
  }
  HB_DEV_MEMBER Cursor ahead(int n) const { Cursor c = *this; c.advance(n); return c; }
  HB_DEV_MEMBER Cursor far_ahead(int n) const { Cursor c = *this; c.advance_far(n); return c; }
};

template <class Address> HB_DEV void wait_longer(Address bar, u32 parity, u32 where) {
  u32 spins = 0;
  while (!bar_try(bar, parity)) {
    if (++spins > (1u << 24)) give_up(where);
#ifdef HB_EMULATE
    emu::yield();
#endif
  }
}
// Who has to wait does so in a function: waits stand all over the code, and what a layer runs should fit the instruction cache. Not
// with small slots, which come so fast that the feeding warp sets the pace (docs/LOG.md).
constexpr bool SMALL_SLOTS = SLOT_BYTES < 12288;
HB_PHASE void wait_in_function(u64* bar, u32 parity, u32 where) { wait_longer(bar, parity, where); }
HB_PHASE void wait_in_function(u32 bar, u32 parity, u32 where) { wait_longer(bar, parity, where); }
template <class Address> HB_DEV void wait_bar(Address bar, u32 parity, u32 where) {
  if (SMALL_SLOTS) wait_longer(bar, parity, where);
  else if (!bar_try(bar, parity)) wait_in_function(bar, parity, where);
}

// Waits until a slot may be filled and says how many bytes will come. `window`: a deep queue makes the memory's answers late for
// all, so no more slots than this are asked for and not yet used. `filled`: nobody has to free a slot that was never filled.
HB_DEV void open_here(int slot, u32 phase, int filled, int window, u32 bytes) {
  Shared& sh = *(Shared*)hb_shared();
  if (window < SLOTS && filled >= window) {
    Cursor c{slot, phase};
    c.back(window);
    wait_bar(&sh.empty[c.slot], c.phase, 0x101);
  }
  if (filled == SLOTS) wait_bar(&sh.empty[slot], phase ^ 1, 0x100);
  begin_copies(&sh.full[slot], bytes);
}
// The same as a function of its own, for the same reason; not with small slots.
HB_PHASE void open_slot(int slot, u32 phase, int filled, int window, u32 bytes) { open_here(slot, phase, filled, window, bytes); }

struct Feeder {  // a lane of the feeding warp that feeds
  Shared& sh;
  u64 policy;
  Cursor at;
  int window, lane;  // slots asked for at most; of the warp
  int filled = 0;    // slots

  HB_DEV_MEMBER void shared(bool by_several) {  // who else copies what comes next
    if (KEEP_SHARED) policy = by_several ? ordinary_policy() : streaming_policy();
  }
  // A slot for so many bytes; then copies into it, which come to that.
  HB_DEV_MEMBER void open(u32 bytes) {
    if (SMALL_SLOTS) open_here(at.slot, at.phase, filled, window, bytes);
    else open_slot(at.slot, at.phase, filled, window, bytes);
    if (filled < SLOTS) filled++;
  }
  HB_DEV_MEMBER void copy(u32 to, const void* src, u32 bytes) { copy_bytes(sh.ring[at.slot] + to, src, bytes, &sh.full[at.slot], policy, lane); }
  HB_DEV_MEMBER void close() { end_copies(&sh.full[at.slot]); at.advance(1); }
  HB_DEV_MEMBER void put(const void* src, u32 bytes) { open(bytes); copy(0, src, bytes); close(); }
  template <int FORMAT, int K> HB_DEV_MEMBER void tile(const u8* weights, size_t index) {
    using T = Tile<FORMAT, K>;
    const u8* base = weights + index * (size_t)T::BYTES;
    HB_ROLLED
    for (int piece = 0; piece < T::PIECES; piece++) {
      const int end = piece < T::PIECES - 1 ? (piece + 1) * T::WIDTH : T::CHUNKS;
      HB_ROLLED
      for (int from = piece * T::WIDTH; from < end; from += T::PER_SLOT)
        put(base + from * T::CHUNK, (end - from < T::PER_SLOT ? end - from : T::PER_SLOT) * T::CHUNK);
    }
  }
};
