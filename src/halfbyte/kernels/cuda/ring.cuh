// The stream of weights and pages through shared memory. One lane of the feeding warp asks the copy engine for what the
// block will read, in the order it will be read, as far ahead as the ring is deep and whatever the other blocks do.
#pragma once
#include "box.cuh"

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

template <class Address> HB_DEV void wait_bar(Address bar, u32 parity, u32 where) {
  u32 spins = 0;
  while (!bar_try(bar, parity)) {
    if (++spins > (1u << 24)) give_up(where);
#ifdef HB_EMULATE
    emu::yield();
#endif
  }
}

struct Feeder {  // the feeding warp's lane 0
  Shared& sh;
  u64 policy;
  Cursor at;
  bool first = true;  // nobody has to free a slot in the first round

  HB_DEV_MEMBER void put(const void* src, u32 bytes) { put(src, bytes, nullptr, 0); }
  HB_DEV_MEMBER void put(const void* src, u32 bytes, const void* second, u32 more) {
    if (!first) wait_bar(&sh.empty[at.slot], at.phase ^ 1, 0x100);
    bar_expect(&sh.full[at.slot], bytes + more);
    if (bytes) bulk_copy(sh.ring[at.slot], src, bytes, &sh.full[at.slot], policy);
    if (more) bulk_copy(sh.ring[at.slot] + bytes, second, more, &sh.full[at.slot], policy);
    at.advance(1);
    if (at.slot == 0) first = false;
  }
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
