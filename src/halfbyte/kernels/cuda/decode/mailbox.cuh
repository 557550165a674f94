// Mailboxes between blocks: 64-bit words that say themselves whether they are valid, so that a value needs no fence, no
// flag and no grid barrier, one trip through L2 instead of three.
//
// tagged   a float above, a tag below that names step and layer. One writer.
// paired   two floats of 22 bits (sign, exponent, 13 bits of mantissa) above, 20 bits of the tag below. One writer. What
//          every block reads is kept this way: a vector of 2880 is 11.5 KB, and 132 blocks fetch it at the same moment.
// summed   fixed point above, and in the low BITS (9, or 11 for router logits) the count of contributions; the point is
//          between the two halves of the word. Integer addition commutes, so the sum is the same in any order of
//          arrival, and it is complete when the count is. x, mid and logits are counted in Step::unit, which norms take out again.
//
// Every mailbox (sizes in shape.cuh, struct Boxes). L is the layer; "half" is one of two copies, taken in turn by layers
// counted through the steps (half_of in step.cu), so that L writes where L - 2 wrote.
//
// box     kind            written by                          complete when             read by                      cleared
// x       summed          E of L: every chosen expert's down  TOP_K + 1 contributions   A of L + 1, C of L + 1 (the  E of L + 1
//                         tile adds, pass_on adds mid         to every word             residual); the head          (pass_on)
// mid     summed          C of L: every kv head adds its      KV_HEADS contributions    D of L in every block, and   E of L + 1
//                         product with o                      to every word             pass_on of L                 (pass_on)
// logits  summed (11)     C of L: every set of router warps   router_contributions()    route() of L, by every       E of L + 1
//                         of every block and kv head adds     over the copies together  block's feeding warp         (pass_on)
// qkv     tagged          A of L: the block with the tile     tag of (step, L)          B of L in the kv head's      never
//                                                                                       blocks
// part    paired; maximum B of L: the block with the part     tags of (step, L)         B of L in all blocks of the  never
//         and sum tagged                                                                kv head (merge_head)
// h       paired          D of L: the block with the tile     20 bits of the tag        E of L, blocks with down     never
//                                                                                       tiles of that expert
// best    maximum         head: every thread with a logit     the last block to come    that last block              by it, then
//                                                             (control[1])                                           the step ends
// broken  maximum         whoever makes a value that is no    x after the last layer    the head, once a thread      with best
//                         number, before it is published      is whole
//
// Why no reader meets words of another layer or step.
//  1. Every block adds to the logits of L at the end of its C, also a block without a tile of o. So logits that are complete
//     (and `routed`, which follows) say that every block is through with A, B and C of L, and with all of L - 1.
//  2. pass_on(L), in the last working warp of each block, runs after `routed` of L. By 1. nobody reads x after L - 1, mid of
//     L - 1 or the logits of L - 1 any more; it clears them, and they are the halves of x after L + 1, mid of L + 1 and logits
//     of L + 1. It may read mid without looking at counts: `routed` waits for `squared`, where every warp of the block
//     has seen its part of mid complete.
//  3. A thread clears its words first and then adds mid to x with release. x after L is complete only with all of these, so
//     whoever has seen all of x after L may add to what was cleared. A warp sees its part of x; it meets the others at
//     a barrier before anything of L + 1 is written. Blocks without a tile of qkv see x through a word of qkv, whose writer
//     had all rows of x, and likewise read the residual in C without looking at counts.
//     A thread that clears logits of rows in use must own a word of x, or it releases nothing: see the assertion at pass_on.
//  4. The half that L uses holds complete sums of L - 2 until pass_on(L - 1). A reader therefore first has to know x after
//     L - 1: D has it through C, A of L + 1 through D of L, and the feeding warp, which runs ahead of its block, waits
//     at `attended`.
//  5. Words that carry a tag are not cleared but overwritten by L + 1, whose writers have seen x after L. By 1. all readers of
//     qkv and part were done before; readers of h had it in registers before they added to x.
//  6. Steps are ordered by the end of the kernel; the epoch in control[0] makes tags and halves go on through them. After PERIOD
//     steps it begins anew, which is so many that no tag of 20 bits comes twice and none is 0, and an even number, so that
//     halves go on; the last block of that step clears every word that carries a tag. So a word with the right tag was written in
//     this very layer, however long its row or part was not in use before.
//
// Where the argument is weak.
//  - 3. pairs a release with loads that are relaxed (FromResidual, box_load): by PTX's memory model a race. It holds on
//    the hardware because all of these words are read and written at L2, past L1, and what a reader does next depends
//    on the values it read: tests/kernels/cuda/test_memory_order.py tries every order of such a machine, and shows what
//    breaks without the release or without the dependency. An acquire would drop the L1's norms and biases in every phase;
//    where the argument has not been tried on the hardware (off SM90: two dies may mean two copies of a word) one thread
//    of a block makes one in each phase, behind the barrier that all warps reach with what they read (HB_ACQUIRE).
//  - Counts have room for 511 (x, mid) and 2047 contributions (logits: 682 blocks); the first is asserted here, the second by
//    the host (step.py), who knows the grid.
//
// The batch kernels pass little between blocks of one launch, by counters: product.cu's `tickets` (zeroed by batch_finish or
// batch_choose, which waits for the kernel before it; used after wait_for_previous) and `done` (one for each group: summing
// warps add stored tiles with release, multiplying warps of the second stage wait with acquire; zeroed by batch_choose. The wait
// ends because every block is resident, one to a multiprocessor, and does its first stage first: the host asks at load whether
// one fits, the launch in front ends, and the one behind starts when all blocks of this one have). attention/batch.cu's `arrivals` and sampling's `best`, `tickets` and `bins` follow
// one pattern: store, fence, acquire-release ticket, and the last block reads all and leaves zeros for the next launch.
#pragma once
#include "decode/shape.cuh"

HB_DEV u64 tagged(u32 value, u32 tag) { return (u64)value << 32 | tag; }
HB_DEV bool has(u64 word, u32 tag) { return (u32)word == tag; }
HB_DEV u32 payload(u64 word) { return (u32)(word >> 32); }

// ---- what is no number ------------------------------------------------------------------------------------------------
// Neither fixed point nor a float of 22 bits has a NaN, and a clamp hides infinity. So whoever makes a value that other blocks
// read looks at it first, by one comparison that NaN fails as well. A row with a value that failed is broken: its word names
// the first place, is written before the value is published, and turns every logit of the row into a NaN that names the place
// (phase_head). What is published instead is some number, so nobody waits for it in vain and other rows are not touched.
enum Place { AT_QKV, AT_ATTENTION, AT_O, AT_ROUTER, AT_GATE_UP, AT_DOWN, PLACES = 8 };  // mirrored in plan/broken.py
constexpr u32 NOT_A_NUMBER = 0x7fc00000u;  // the place is in its lower 16 bits: 0 and 0xffff are the hardware's own
static_assert(LAYERS * PLACES < 0xffff, "places of all layers in 16 bits");
HB_DEV u32 place_code(int layer, int place) { return 0xfffeu - (u32)(layer * PLACES + place); }  // the first is the largest
HB_DEV void break_row(int row, int place) {  // of the layer that this warp is in, which is not worth a register
  const Shared& sh = *(const Shared*)hb_shared();
  box_max(sh.step.box.broken + row, place_code(sh.layer_of[(u32)hb_thread() / 32], place));
  fence_gpu();
}
HB_DEV bool below(float v, float limit) { return fabsf(v) < limit; }
constexpr float FINITE = 1e30f;  // of what passes as a float: squares and products of two are finite as well
// Of sums in fixed point, 31 bits before the point. The residual enters mid through one contribution, so it is below LIMIT,
// mid below KV_HEADS and x below KV_HEADS + TOP_K times that. A tile's part of a router logit only has to leave its block's sum,
// of HIDDEN / 16 parts at most, within 64 bits; that sum is what blocks add up, and what router_limit() bounds.
constexpr float LIMIT = (float)(1u << 31) / (KV_HEADS + TOP_K), ROUTER_PART = (float)(1u << 31);
static_assert(HIDDEN / 16 < 1 << 10, "the parts of a block's router sums fit 64 bits");

constexpr int COUNT = 9, LOGIT_COUNT = 11;
static_assert(KV_HEADS < 1 << COUNT && TOP_K + 1 < 1 << COUNT, "contributions to mid and to x are counted in COUNT bits");
template <int BITS> HB_DEV i64 fixed_point(float v) { return round_i64(v * (float)(1u << (32 - BITS))); }
template <int BITS = COUNT> HB_DEV u64 contribution(i64 fixed) { return ((u64)fixed << BITS) + 1; }
HB_DEV u64 contribution(float v) { return contribution<COUNT>(fixed_point<COUNT>(v)); }
template <int BITS = COUNT> HB_DEV u32 contributions(u64 word) { return (u32)word & ((1u << BITS) - 1); }
template <int BITS = COUNT> HB_DEV float summed(u64 word) {  // integer part from the high word, fraction as the mantissa of [1, 2)
  return from_i32((int)(word >> 32)) + (as_float((((u32)word & (~0u << BITS)) >> 9) | 0x3f800000u) - 1.f);
}

constexpr u32 PAIR_TAG = 0xfffffu, PAIR_VALUE = 0xfffffc00u;
constexpr u32 PERIOD = PAIR_TAG / (LAYERS + 1) & ~1u;  // steps until tags begin anew
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

HB_PHASE void give_up(u32 where) { give_up(((Shared*)hb_shared())->step.failure, where); }
struct Patience {
  u32 spins = 0;
  HB_DEV_MEMBER void wait(u32 where) {
    if (++spins > (1u << 22)) give_up(where);
    nap(HB_NAP);
  }
};
