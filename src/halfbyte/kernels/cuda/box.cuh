// Mailboxes between blocks: 64-bit words that say themselves whether they are valid, so that a value needs no fence, no
// flag and no grid barrier, one trip through L2 instead of three.
//
// tagged   a float (or a split float) above, a tag below that names step and layer. One writer.
// summed   fixed point with 23 bits after the point, shifted left by 9; the low 9 bits count the contributions. Integer
//          addition commutes, so the sum is the same in any order of arrival, and it is complete when the count is.
#pragma once
#include "shape.cuh"

constexpr float FIXED = 8388608.f;  // 2^23

HB_DEV u64 tagged(u32 value, u32 tag) { return (u64)value << 32 | tag; }
HB_DEV bool has(u64 word, u32 tag) { return (u32)word == tag; }
HB_DEV u32 payload(u64 word) { return (u32)(word >> 32); }

HB_DEV u64 contribution(float v) { return ((u64)round_i64(v * FIXED) << 9) + 1; }
HB_DEV u32 contributions(u64 word) { return (u32)word & 511u; }
HB_DEV float summed(u64 word) {  // integer part from the high word, fraction as the mantissa of [1, 2)
  return from_i32((int)(word >> 32)) + (as_float(((u32)word >> 9) | 0x3f800000u) - 1.f);
}

// A float as two bf16 in one word, high part above: together 16 bits of mantissa.
HB_DEV u32 split(float v) {
  float high = as_float((as_bits(v) + 0x8000u) & 0xffff0000u);  // ties away from zero: the low part takes up the rest
  return as_bits(high) | (bf16_pair(v - high, 0.f) & 0xffffu);
}

// A wait that never ends is a bug: say where, then stop, instead of hanging the device.
HB_PHASE void give_up(u32 where) {
  u32* failure = ((Shared*)hb_shared())->step.failure;
  failure[0] = where;
  failure[1] = (u32)hb_block() << 16 | (u32)hb_thread();
  fence_gpu();
  hb_trap();
}
struct Patience {
  u32 spins = 0;
  HB_DEV_MEMBER void wait(u32 where) {
    if (++spins > (1u << 22)) give_up(where);
    nap(HB_NAP);
  }
};
