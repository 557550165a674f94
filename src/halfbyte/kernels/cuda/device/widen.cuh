// Weights in the layout "tile16" (formats/tile16.py), from the words of a chunk to the operands of a product: the one place
// that knows how an E2M1 code, an int8 or an E4M3 value becomes bf16, f16 or E5M2. Nothing here rounds.
//
// Why E2M1 needs no table. A code is a sign, two exponent bits and one mantissa bit, with bias 1 and subnormals. Put where bf16
// has its sign, the two lowest bits of its exponent and the highest of its mantissa, all other bits zero, the same bits mean
// the same value times 2^-126: for a normal code 2^(e - 127) (1 + m / 2) = 2^(e - 1) (1 + m / 2) 2^-126, and for a subnormal one,
// which is subnormal in bf16 too, m / 2 * 2^-126. (The products of tensor cores keep subnormal operands.) f16 has the same fields
// at other places and E5M2 is the upper byte of f16, so there the factor is 2^-14.
//
// A word of tile16 holds eight codes of a lane: two for each of the four registers a0 .. a3 of mma.m16n8k16, in the
// two halves of the word. Registers 0 to 2 are the word itself and the word rotated right by 6 and by 3, under one mask;
// the bits that are left over hold register 3, which a product with a constant spreads out to the same places.
//
// What differs between the kernels is only where the scale comes in. Decode and batch leave 2^-126 in the operand and scale the
// sums: x comes in times 2^100 and the sum goes out times 2^26, so that nothing leaves float's range. Prefill multiplies
// the operand by the scale, relative to a power of two that the matrix has for all its scales (prefill/weights.cuh), and has
// the exact weight times that. For fp8 that product is made in f16, relative to the row's largest scale, and its upper byte is kept. The block-scaled
// products of SM12x take codes and scales as they are.
#pragma once
#include "device/instructions.cuh"

enum { MXFP4 = 0, Q8 = 1, BF16 = 2 };
constexpr int CHUNK_BYTES[3] = {544, 1088, 2048};  // 16 rows x 64 k, scales included

// ---- E2M1 -----------------------------------------------------------------------------------------------------------

constexpr float E2M1_SCALE_IN = 1.2676506002282294e30f, E2M1_SCALE_OUT = 67108864.f;  // 2^100 and 2^26: with 2^-126, one
constexpr u32 E2M1_AS_BF16 = 0x81c081c0u;  // sign, two exponent bits, one mantissa bit, in both halves of a word
constexpr u32 E2M1_AS_F16 = 0x0e000e00u;   // the same without the sign

// Register 3 of a word, to be masked: sign at 3, exponent at 1 and 0, mantissa at 4 of each half go where the mask has them.
HB_DEV u32 spread_fourth(u32 word) { return (word & 0x001b001bu) * 0x1084u; }

// Register R of a word as two bf16, value * 2^-126. PRODUCT: register 2, which is the word rotated by 3, is made of register 1 by
// a multiplication (rotated by six, times eight; what that loses the mask drops), for a kernel whose shift pipe is the busier one.
template <int R, bool PRODUCT = false> HB_DEV u32 widen_e2m1(u32 word) {
  if (R == 0) return word & E2M1_AS_BF16;
  if (R == 1) return rotate_right(word, 6) & E2M1_AS_BF16;
  if (R == 2) return (PRODUCT ? rotate_right(word, 6) * 8 : rotate_right(word, 3)) & E2M1_AS_BF16;
  return spread_fourth(word) & E2M1_AS_BF16;
}

#ifdef HB_EMULATE
HB_DEV u32 signs_of(u32 a, u32 b) {  // bit 7 of bytes a1, b1, a3, b3, eight times each
  auto spread = [](u32 v, int byte) { return v >> (8 * byte + 7) & 1 ? 255u : 0u; };
  return spread(a, 1) | spread(b, 1) << 8 | spread(a, 3) << 16 | spread(b, 3) << 24;
}
#else
HB_DEV u32 signs_of(u32 a, u32 b) { u32 r; asm("prmt.b32 %0, %1, %2, 0xfbd9;" : "=r"(r) : "r"(a), "r"(b)); return r; }
#endif

// Registers 0 and 2 (up), 1 and 3 (low) of a word as four E5M2 each: magnitudes go where f16 has its exponent and mantissa,
// are multiplied by a power of two (`times_up`, `times_low`, in both halves), and their upper bytes are gathered with the signs.
// Exact as long as the product is a normal f16 or the code's own subnormal.
HB_DEV void widen_e2m1_e5m2(u32 word, u32 times_up, u32 times_low, u32& up, u32& low) {
  constexpr u32 m = E2M1_AS_F16, sign = 0x80808080u;
  const u32 first = half_mul((word << 3) & m, times_up), second = half_mul(word & m, times_up);
  up = permute(first, second, 0x7351) | (signs_of(word, rotate_right(word, 3)) & sign);
  const u32 third = half_mul((word >> 3) & m, times_low), fourth = half_mul(((word & 0x00130013u) * 0x420u) & m, times_low);
  low = permute(third, fourth, 0x7351) | (signs_of(rotate_right(word, 6), word << 12) & sign);
}

// The same codes unwidened, in the middle of bytes, where block-scaled products want them: registers 0 and 2 (up), 1 and 3 (low)
// as four bytes each; bytes 0 to 3 are k 0, 2, 1, 3.
struct Middle { u32 up, low; };
HB_DEV Middle e2m1_in_bytes(u32 word) {
  const u32 last = spread_fourth(word);
  const u32 m = 0x1c1c1c1cu, s = 0x20202020u, even = 0x00ff00ffu;
  const u32 up = ((word >> 4 & even) | (word << 1 & ~even)) & m, up_sign = ((word >> 10 & even) | (rotate_right(word, 5) & ~even)) & s;
  const u32 low = ((word >> 10 & even) | (last << 4 & ~even)) & m, low_sign = ((rotate_right(word, 16) & even) | (last >> 2 & ~even)) & s;
  return {up | up_sign, low | low_sign};
}

// ---- int8 and E4M3 --------------------------------------------------------------------------------------------------

// Bytes 0 and 2 of `v`, int8, as bf16: the low seven bits are the mantissa of 128 .. 255; minus 128, or minus 256 where the sign
// bit is set.
HB_DEV u32 widen_int8(u32 v) { return bf16_sub((v & 0x007f007fu) | 0x43004300u, (v & 0x00800080u) | 0x43004300u); }
// Two bytes of `v`, which `select` puts into both halves under 0x64, as f16: with its sign flipped (`v` has all of them
// flipped), a byte there is 1024 + 128 + value.
HB_DEV u32 widen_int8_f16(u32 v, u32 select) { return half_sub(permute(v, 0x64u, select), 0x64806480u); }
// Two E4M3 in the low half of `v` as bf16: shifted into place they are 2^-120 of their values.
HB_DEV u32 widen_e4m3(u32 v) {
  const u32 p = permute(v, 0u, 0x1404);
  return bf16_mul(((p >> 4) & 0x07f007f0u) | (p & 0x80008000u), 0x7b807b80u);
}

// ---- a chunk --------------------------------------------------------------------------------------------------------

// A lane's words of a chunk (16 rows x 64 k), and of them the A operands of its four steps; scales are left to sums.
// PRODUCT: see widen_e2m1.
template <int FORMAT, bool PRODUCT = false> struct Chunk;
template <bool PRODUCT> struct Chunk<MXFP4, PRODUCT> {
  u32x4 w;
  HB_DEV_MEMBER void load(u32 chunk, int lane) { w = lds128(chunk + lane * 16); }
  HB_DEV_MEMBER u32 loaded() const { return w.x; }  // a word of every load
  HB_DEV_MEMBER void operands(int step, u32 (&a)[4]) const {
    const u32 v = step == 0 ? w.x : step == 1 ? w.y : step == 2 ? w.z : w.w;
    a[0] = widen_e2m1<0>(v); a[1] = widen_e2m1<1>(v); a[2] = widen_e2m1<2, PRODUCT>(v); a[3] = widen_e2m1<3>(v);
  }
};
template <bool PRODUCT> struct Chunk<Q8, PRODUCT> {
  u32x4 w[2];
  HB_DEV_MEMBER void load(u32 chunk, int lane) { w[0] = lds128(chunk + lane * 16); w[1] = lds128(chunk + 512 + lane * 16); }
  HB_DEV_MEMBER u32 loaded() const { return w[0].x ^ w[1].x; }
  HB_DEV_MEMBER void operands(int step, u32 (&a)[4]) const {
    const u32x4& q = w[step / 2];
    const u32 first = step & 1 ? q.z : q.x, second = step & 1 ? q.w : q.y;
    a[0] = widen_int8(first); a[1] = widen_int8(first >> 8); a[2] = widen_int8(second); a[3] = widen_int8(second >> 8);
  }
};
template <bool PRODUCT> struct Chunk<BF16, PRODUCT> {
  u32x4 w[4];
  HB_DEV_MEMBER void load(u32 chunk, int lane) {
    HB_UNROLL
    for (int i = 0; i < 4; i++) w[i] = lds128(chunk + i * 512 + lane * 16);
  }
  HB_DEV_MEMBER u32 loaded() const { return w[0].x ^ w[1].x ^ w[2].x ^ w[3].x; }
  HB_DEV_MEMBER void operands(int step, u32 (&a)[4]) const { a[0] = w[step].x; a[1] = w[step].y; a[2] = w[step].z; a[3] = w[step].w; }
};
