# mypy: ignore-errors
"""Activations at their quantisation point: one row -> codes and scales, as `halfbyte.ops.linear.round_activation`.

K is a multiple of 32: callers refuse anything else. Rows are stored WIDTH wide, the rest zeros, for kernels that take
whole K tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.triton.jit.numbers import e2m1_codes, e4m3_bits, e8m0_inverse, e8m0_ocp, int8_codes


@triton.jit
def mx_codes(groups, FORMAT: tl.constexpr):
    """float32 [..., 32] -> (codes of the same shape, scales [...]): E4M3 bits (uint8) or E2M1 codes (int32)."""
    LAST: tl.constexpr = len(groups.shape) - 1
    # Magnitudes of float32 order like their bits, NaN above infinity above all: one maximum finds both.
    amax = tl.max(groups.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=LAST)
    if FORMAT == "mxfp8":
        scale = e8m0_ocp(amax, 8)
    else:
        scale = e8m0_ocp(amax, 2)
    unit = groups * tl.expand_dims(e8m0_inverse(scale), LAST)
    unit = tl.where(tl.expand_dims(scale, LAST) == 255, 0.0, unit)
    if FORMAT == "mxfp8":
        return e4m3_bits(unit), scale.to(tl.uint8)
    else:
        return e2m1_codes(unit), scale.to(tl.uint8)


@triton.jit
def quantize_kernel(x, codes, scales, K, WIDTH, FORMAT: tl.constexpr, BK: tl.constexpr):
    """One row. mxfp8, mxfp4: UE8M0 scales per 32; int8: float32 ones; fp8: one float32 scale for the row."""
    row = tl.program_id(0).to(tl.int64)
    if FORMAT == "fp8":
        i = tl.arange(0, BK)
        value = tl.load(x + row * K + i, mask=i < K, other=0.0).to(tl.float32)
        scale = tl.div_rn(tl.max(tl.abs(value), axis=0), 448.0)
        safe = tl.where(scale > 0.0, scale, 1.0)
        tl.store(codes + row * WIDTH + i, e4m3_bits(tl.div_rn(value, safe + 0.0 * value)), mask=i < WIDTH)
        tl.store(scales + row, safe)
    else:
        g = tl.arange(0, BK // 32)
        i = g[:, None] * 32 + tl.arange(0, 32)[None, :]
        value = tl.load(x + row * K + i, mask=i < K, other=0.0).to(tl.float32)
        if FORMAT == "int8":
            code, scale = int8_codes(value)
        else:
            code, scale = mx_codes(value, FORMAT)
        tl.store(scales + row * (WIDTH // 32) + g, scale, mask=g * 32 < WIDTH)
        if FORMAT == "mxfp8" or FORMAT == "int8":
            tl.store(codes + row * WIDTH + i, code, mask=i < WIDTH)
        else:
            low, high = tl.split(tl.reshape(code, (BK // 32, 16, 2)))
            j = g[:, None] * 16 + tl.arange(0, 16)[None, :]
            tl.store(codes + row * (WIDTH // 2) + j, (low | (high << 4)).to(tl.uint8), mask=j < WIDTH // 2)
