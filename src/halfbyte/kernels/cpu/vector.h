// Sixteen lanes, one for each row of a tile: the vocabulary in which the kernels are written, and the choice of the
// instruction set that speaks it. The choice is the compiler's flags' (instruction_sets.py lists them); one library holds
// one set. Each vector_*.h defines, in namespace halfbyte:
//
//   Floats, Ints        16 float32, 16 int32
//   Words               16 times four bytes
//   MXFP4_OFFSET        what unpack_e2m1 adds to twice an element so that the set's dot product can take it as unsigned
//   Q8_OFFSET           the same for offset_q8
//   STREAMS             tiles that are read side by side for one row of activations
//   BLOCK_TILES, BLOCK_ROWS   tiles and rows of activations whose dot products are in registers together
//   DENSE_ROWS          rows of float32 activations, with BLOCK_TILES tiles
//   Dot<F>              exact dot products of one group of 16 weight rows, word by word, with a coded group, from its start
//   arrange             the eight words of a group as dot_block wants them
//   dot_block<F, R, T>  dot products of R coded groups with words [8][T]; results [R][T]
//   any_special         whether one of 16 E8M0 bytes is 0, 1 or 255, which load_half_e8m0 does not take
//
// Float arithmetic is never contracted behind our back (-ffp-contract=off): where fma() stands, a set that has one
// instruction for it rounds once, and another twice.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>

#include "products.h"

#define HB_INLINE inline __attribute__((always_inline))
#define HB_LAMBDA __attribute__((always_inline))

namespace halfbyte {

// f(0), f(1) … f(N - 1) with constants for indices, so that small arrays become registers.
template <class F, int... I>
HB_INLINE void unroll_over(F&& f, std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
HB_INLINE void unroll(F&& f) {
    unroll_over(static_cast<F&&>(f), std::make_integer_sequence<int, N>{});
}

}  // namespace halfbyte

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include "vector_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "vector_avx2.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "vector_neon.h"
#else
#include "vector_portable.h"
#endif
