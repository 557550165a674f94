// Mailboxes between blocks: 64-bit words that say themselves whether they are valid, so that a value needs no fence, no
// flag and no grid barrier, one trip through L2 instead of three.
//
// tagged   a float above, a tag below that names step and layer. One writer.
// paired   two floats of 22 bits (sign, exponent, 13 bits of mantissa) above, 20 bits of the tag below. One writer. What
//          every block reads is kept this way: a vector of 2880 is 11.5 KB, and 132 blocks fetch it at the same moment.
// summed   fixed point above, and in the low BITS (9, or 11 for router logits) the count of contributions; the point is
//          between the two halves of the word. Integer addition commutes, so the sum is the same in any order of
//          arrival, and it is complete when the count is.
#pragma once
#include "decode/shape.cuh"


HB_DEV u64 tagged(u32 value, u32 tag) { return (u64)value << 32 | tag; }
HB_DEV bool has(u64 word, u32 tag) { return (u32)word == tag; }
HB_DEV u32 payload(u64 word) { return (u32)(word >> 32); }

constexpr int COUNT = 9, LOGIT_COUNT = 11;
template <int BITS> HB_DEV i64 fixed_point(float v) { return round_i64(v * (float)(1u << (32 - BITS))); }
template <int BITS = COUNT> HB_DEV u64 contribution(i64 fixed) { return ((u64)fixed << BITS) + 1; }
HB_DEV u64 contribution(float v) { return contribution<COUNT>(fixed_point<COUNT>(v)); }
template <int BITS = COUNT> HB_DEV u32 contributions(u64 word) { return (u32)word & ((1u << BITS) - 1); }
template <int BITS = COUNT> HB_DEV float summed(u64 word) {  // integer part from the high word, fraction as the mantissa of [1, 2)
  return from_i32((int)(word >> 32)) + (as_float((((u32)word & (~0u << BITS)) >> 9) | 0x3f800000u) - 1.f);
}

constexpr u32 PAIR_TAG = 0xfffffu, PAIR_VALUE = 0xfffffc00u;
HB_DEV u64 paired(float a, float b, u32 tag) {
  const u64 x = (as_bits(a) + 0x200u) >> 10, y = (as_bits(b) + 0x200u) >> 10;  // nearest; ties away from zero
  return x << 42 | y << 20 | (tag & PAIR_TAG);
}
HB_DEV bool pair_has(u64 word, u32 tag) { return ((u32)word & PAIR_TAG) == (tag & PAIR_TAG); }
HB_DEV float pair_first(u64 word) { return as_float((u32)(word >> 32) & PAIR_VALUE); }
HB_DEV float pair_second(u64 word) { return as_float((u32)(word >> 10) & PAIR_VALUE); }

// Two floats as bf16 pairs: high parts (cut off), and low parts, what is left of each. Together 16 bits of mantissa.
struct Parts { u32 high, low; };
HB_DEV Parts split(float a, float b) {
  const float x = as_float(as_bits(a) & 0xffff0000u), y = as_float(as_bits(b) & 0xffff0000u);
  return {permute(as_bits(a), as_bits(b), 0x7632), bf16_pair(a - x, b - y)};
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
