# mypy: ignore-errors
"""Roundings and number formats on the device, bit for bit those of `halfbyte.formats`.

Triton's interpreter rounds to bf16 and fp8 by cutting bits off, multiplies bf16 as integers and knows no assembly, so
some functions have a second body for it, in plain integer and float32 arithmetic; the GPU uses the instructions.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRET = bool(triton.knobs.runtime.interpret)

if INTERPRET:

    @triton.jit
    def to_bf16(x):
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x != x, 0x7FC0, rounded)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)

    @triton.jit
    def dot(a, b, acc):
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")

    @triton.jit
    def dot_int8(a, b):
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")  # below 2^24: exact

    @triton.jit
    def e4m3_bits(x):
        return plain_e4m3_bits(x)

    @triton.jit
    def e4m3_to_bf16(bits):
        return plain_e4m3_to_bf16(bits)

    @triton.jit
    def e2m1_to_e4m3(packed):
        low = ((packed & 8) << 4) | ((packed & 7) << 2)
        high = (packed & 0x80) | ((packed & 0x70) >> 2)
        return low, high

else:

    @triton.jit
    def to_bf16(x):
        return x.to(tl.bfloat16)

    @triton.jit
    def dot(a, b, acc):
        return tl.dot(a, b, acc)

    @triton.jit
    def dot_int8(a, b):
        """float32, exact: a group of 32 products of 7 bits each."""
        return tl.dot(a, b, out_dtype=tl.int32).to(tl.float32)

    @triton.jit
    def e4m3_bits(x):
        """Nearest, ties to even, saturating at 448; NaN stays NaN."""
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)

    @triton.jit
    def e4m3_to_bf16(bits):
        return bits.to(tl.float8e4nv, bitcast=True).to(tl.bfloat16)

    @triton.jit
    def e2m1_to_e4m3(packed):
        """Bytes of two E2M1 -> (low nibbles, high nibbles) as E4M3 bits, 2^6 too small.

        Four bytes at a time: left to itself the compiler handles each byte alone, at five times the instructions."""
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 s, m;
            and.b32 s, $2, 0x08080808;
            and.b32 m, $2, 0x07070707;
            shl.b32 s, s, 4;
            shl.b32 m, m, 2;
            or.b32 $0, s, m;
            and.b32 s, $2, 0x80808080;
            and.b32 m, $2, 0x70707070;
            shr.u32 m, m, 2;
            or.b32 $1, s, m;
            }""",
            "=&r,=&r,r",
            [packed],
            dtype=(tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )


# E4M3 without the conversions that begin with SM89, and under the interpreter.


@triton.jit
def plain_e4m3_bits(x):
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), 448.0)
    m = magnitude.to(tl.uint32, bitcast=True)
    normal = ((m + 0x7FFFF + ((m >> 20) & 1)) >> 20) - 960
    small = (magnitude + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0.015625, small, normal)
    code = tl.where(x != x, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def plain_e4m3_to_bf16(bits):
    wide = bits.to(tl.uint16)
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    value = half.to(tl.float32) * 256.0
    return to_bf16(tl.where((wide & 0x7F) == 0x7F, float("nan"), value))


@triton.jit
def cache_bits(x, KV: tl.constexpr):
    """A value of an fp8 cache as its bits; KV is fp8, or fp8_bits where the GPU cannot convert."""
    if KV == "fp8":
        return e4m3_bits(x)
    else:
        return plain_e4m3_bits(x)


@triton.jit
def cache_value(bits, KV: tl.constexpr):
    if KV == "fp8":
        return e4m3_to_bf16(bits)
    else:
        return plain_e4m3_to_bf16(bits)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """float32 -> the element type of a buffer: bf16 or float32."""
    if dtype == tl.bfloat16:
        return to_bf16(x)
    else:
        return x


@triton.jit
def e8m0_ocp(bits, EMAX: tl.constexpr):
    """UE8M0 code (int32) of OCP's rule, floor(log2(amax)) - EMAX, from amax as float32 bits; 255 for NaN."""
    exponent = bits >> 23
    return tl.where(exponent == 255, 255, tl.maximum(exponent - EMAX, 0))


@triton.jit
def e8m0_inverse(scale):
    """1 / 2^(scale - 127) as float32, exact; any number for the NaN code."""
    field = tl.maximum(254 - scale, 0)
    return tl.where(field == 0, 0x00400000, field << 23).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_codes(x):
    """Codes 0..15 (int32) of the nearest E2M1 values: ties to even, saturating at 6."""
    bits = x.to(tl.uint32, bitcast=True).to(tl.int32, bitcast=True)
    magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x40E00000)
    rounded = ((magnitude + ((magnitude >> 22) & 1) + 0x1FFFFF) >> 22) - 252
    halves = (magnitude.to(tl.float32, bitcast=True) + 4194304.0).to(tl.int32, bitcast=True) - 0x4A800000
    code = tl.minimum(tl.where(magnitude < 0x3F800000, halves, rounded), 7)
    return code | ((bits >> 28) & 8)


@triton.jit
def e8m0_value(scale):
    """2^(scale - 127) as float32 from a code (int32), exact; NaN for 255."""
    bits = tl.where(scale == 0, 0x00400000, tl.where(scale == 255, 0x7FC00000, scale << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e2m1_doubled(packed):
    """Bytes of two E2M1 [rows, n] -> int8 [rows, 2 n]: twice the values, which are whole numbers up to 12."""
    wide = packed.to(tl.int32)
    low = (0xC8643210 >> ((wide & 7) * 4).to(tl.uint32)).to(tl.int32) & 15
    high = (0xC8643210 >> (((wide >> 4) & 7) * 4).to(tl.uint32)).to(tl.int32) & 15
    low = tl.where((wide & 8) != 0, -low, low)
    high = tl.where((wide & 0x80) != 0, -high, high)
    return tl.interleave(low.to(tl.int8), high.to(tl.int8))


@triton.jit
def int8_codes(groups):
    """float32 [..., 32] -> (int8 codes, float32 scales [...]): amax / 127, nearest, ties to even."""
    LAST: tl.constexpr = len(groups.shape) - 1
    bits = tl.max(groups.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=LAST)  # NaN above infinity above all
    scale = tl.div_rn(bits.to(tl.float32, bitcast=True), 127.0)
    good = (bits < 0x7F800000) & (scale > 0.0)  # else codes are 0: nothing, or NaN times the scale
    unit = tl.div_rn(groups, tl.expand_dims(tl.where(good, scale, 1.0), LAST) + 0.0 * groups)
    unit = tl.where(tl.expand_dims(good, LAST), unit, 0.0)
    unit = tl.minimum(tl.maximum((unit + 12582912.0) - 12582912.0, -127.0), 127.0)  # 1.5 * 2^23: the nearest integer
    return unit.to(tl.int8), scale


# A NaN and an infinity stay visible: a clamp, a maximum and a saturating conversion drop them, and so does the root of
# squares that overflowed.


@triton.jit
def keep_broken(value, origin):
    """`value`, or NaN where what it was made of was no number."""
    return value + origin * 0.0


@triton.jit
def norm_scale(squares, H, eps):
    """1 / root mean square; NaN where the squares are no number."""
    scale = tl.rsqrt(squares / H + eps)
    return tl.where(scale > 0.0, scale, float("nan"))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))
