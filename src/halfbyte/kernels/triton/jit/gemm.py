# mypy: ignore-errors
"""Matrix products with dense, q8 and MXFP4 weights: projections, and the two halves of the expert MLP.

One main loop, `accumulate`, for every pair of formats:

| WF    | XF                                | how                                                                     |
|-------|-----------------------------------|-------------------------------------------------------------------------|
| dense | bf16                              | bf16 MMA                                                                |
| q8    | bf16                              | codes are exact in bf16; each group's product is scaled in float32      |
| both  | int8                              | int8 MMA of each group (E2M1 doubled is whole), scaled in float32       |
| mxfp4 | bf16, e4m3, e2m1                  | `dot_scaled`: block-scaled MMA where there is one, exact bf16 elsewhere |
| split | e4m3                              | nibbles widened to E4M3 in registers: block-scaled MMA on SM12x         |

SWAP makes the weights the M operand (SM100's MMA needs 128 rows there). Rows and columns past the end read the last
one again and are not stored, so loads need masks along K only, and only where K is not whole tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.triton.jit.numbers import (
    dot,
    dot_int8,
    e2m1_doubled,
    e2m1_to_e4m3,
    e8m0_value,
    keep_broken,
    round_to,
    sigmoid,
    to_bf16,
)
from halfbyte.kernels.triton.jit.quantize import mx_codes


@triton.jit
def _load(pointer, inside, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=inside, other=0)


@triton.jit
def _bytes(word, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """[rows] int32 -> [rows, COUNT] int32: bytes of it, from bit FIRST up."""
    return (word[:, None] >> (FIRST + 8 * tl.arange(0, COUNT))[None, :]) & 0xFF


@triton.jit
def _product(a, a_scale, A: tl.constexpr, b, b_scale, B: tl.constexpr, acc, SWAP: tl.constexpr):
    """acc + a @ b.T, a [BM, k], b [BN, k]; scales [rows, k / 32]; acc is transposed where SWAP."""
    if SWAP:
        return tl.dot_scaled(b, b_scale, B, tl.trans(a), a_scale, A, acc)
    else:
        return tl.dot_scaled(a, a_scale, A, tl.trans(b), b_scale, B, acc)


@triton.jit
def accumulate(
    x, xs, row, x_stride, xs_stride, w, ws, n, w_stride, ws_stride, K,
    XF: tl.constexpr, WF: tl.constexpr, SWAP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """float32 [BM, BN]: rows `row` of x times rows `n` of w. Offsets have 32 bits, so no matrix reaches 2^31."""
    if SWAP:
        acc = tl.zeros((BN, BM), tl.float32)
    else:
        acc = tl.zeros((BM, BN), tl.float32)
    x_row = x + row[:, None] * x_stride
    w_row = w + n[:, None] * w_stride
    if WF == "dense":
        k = tl.arange(0, BK)
        for k0 in range(0, K, BK):
            inside = (k0 + k < K)[None, :]
            a = _load(x_row + (k0 + k)[None, :], inside, EVEN)
            if x.dtype.element_ty != tl.bfloat16:
                a = to_bf16(a)
            b = _load(w_row + (k0 + k)[None, :], inside, EVEN)
            if SWAP:
                acc = dot(b, tl.trans(a), acc)
            else:
                acc = dot(a, tl.trans(b), acc)
    elif XF == "int8":
        # A group of 32 a step: its product is a whole number, its two scales are float32.
        k = tl.arange(0, 32)
        j = tl.arange(0, 16)
        for k0 in range(0, K, 32):
            a = tl.load(x_row + (k0 + k)[None, :])
            a_scale = tl.load(xs + row * xs_stride + k0 // 32)
            if WF == "q8":
                b = tl.load(w_row + (k0 + k)[None, :])
                word = tl.load(ws + n * ws_stride + k0 // 64)
                half = ((word >> (16 * ((k0 // 32) % 2))) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
                b_scale = half.to(tl.float32)
            else:
                b = e2m1_doubled(tl.load(w_row + (k0 // 2 + j)[None, :]))
                first = n * ws_stride + k0 // 32
                word = tl.load(ws + (first >> 2))
                b_scale = e8m0_value((word >> ((first & 3) * 8)) & 0xFF)
            acc += dot_int8(a, tl.trans(b)) * (a_scale[:, None] * b_scale[None, :])
        if WF == "mxfp4":
            acc *= 0.5
    elif WF == "q8":
        # Two groups a step, whose two float16 scales are one word (K is whole pairs of groups).
        k = tl.arange(0, 32)
        for k0 in range(0, K, 64):
            word = tl.load(ws + n * ws_stride + k0 // 64)
            for half in tl.static_range(2):
                a = tl.load(x_row + (k0 + 32 * half + k)[None, :])
                if x.dtype.element_ty != tl.bfloat16:
                    a = to_bf16(a)
                b = to_bf16(tl.load(w_row + (k0 + 32 * half + k)[None, :]).to(tl.float32))
                part = dot(a, tl.trans(b), tl.zeros((BM, BN), tl.float32))
                scale = ((word >> (16 * half)) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
                acc += part * scale.to(tl.float32)[None, :]
    elif WF == "mxfp4":
        XPACK: tl.constexpr = 2 if XF == "e2m1" else 1
        GROUPS: tl.constexpr = BK // 32
        k = tl.arange(0, BK // XPACK)
        j = tl.arange(0, BK // 2)
        g = tl.arange(0, GROUPS)
        for k0 in range(0, K, BK):
            b = _load(w_row + (k0 // 2 + j)[None, :], (k0 // 2 + j < K // 2)[None, :], EVEN)
            # By bytes: two words and a shift, which can be copied ahead, gave wrong products (docs/LOG.md).
            at = ws.to(tl.pointer_type(tl.uint8)) + n[:, None] * ws_stride
            b_scale = _load(at + (k0 // 32 + g)[None, :], (k0 // 32 + g < K // 32)[None, :], EVEN)
            if XF == "bf16":
                a = _load(x_row + (k0 + k)[None, :], (k0 + k < K)[None, :], EVEN)
                if x.dtype.element_ty != tl.bfloat16:
                    a = to_bf16(a)
                acc = _product(a, None, "bf16", b, b_scale, "e2m1", acc, SWAP)
            else:
                a = tl.load(x_row + (k0 // XPACK + k)[None, :])  # padded with zeros to whole steps of 128
                if xs is None:
                    a_scale = tl.full((BM, GROUPS), 127, tl.uint8)
                else:
                    a_scale = _bytes(tl.load(xs + row * xs_stride + k0 // 128), 0, GROUPS).to(tl.uint8)
                acc = _product(a, a_scale, XF, b, b_scale, "e2m1", acc, SWAP)
    else:
        # K tiles of 128: byte j holds k = j (low) and k = 64 + j (high); weights and activations are padded to whole
        # tiles. E2M1 bits in an E4M3 are 2^6 too small. A row's four scales of a tile are one word.
        j = tl.arange(0, 64)
        for k0 in range(0, K, 128):
            low_x = tl.load(x_row + (k0 + j)[None, :])
            high_x = tl.load(x_row + (k0 + 64 + j)[None, :])
            low, high = e2m1_to_e4m3(tl.load(w_row + (k0 // 2 + j)[None, :]))
            # A scale that cannot take the 6 (2^122 and up) reads as NaN, as the code for NaN does.
            word = tl.load(ws + n * ws_stride + k0 // 128)
            low_scale = (tl.minimum(_bytes(word, 0, 2), 249) + 6).to(tl.uint8)
            high_scale = (tl.minimum(_bytes(word, 16, 2), 249) + 6).to(tl.uint8)
            if xs is None:
                low_xs = tl.full((BM, 2), 127, tl.uint8)
                high_xs = tl.full((BM, 2), 127, tl.uint8)
            else:
                x_word = tl.load(xs + row * xs_stride + k0 // 128)
                low_xs = _bytes(x_word, 0, 2).to(tl.uint8)
                high_xs = _bytes(x_word, 16, 2).to(tl.uint8)
            acc = _product(low_x, low_xs, "e4m3", low, low_scale, "e4m3", acc, SWAP)
            acc = _product(high_x, high_xs, "e4m3", high, high_scale, "e4m3", acc, SWAP)
    if SWAP:
        acc = tl.trans(acc)
    return acc


@triton.jit
def linear_kernel(
    x, xs, row_scale, w, ws, bias, residual, out, M, N, K, x_stride, xs_stride, w_stride, ws_stride,
    XF: tl.constexpr, WF: tl.constexpr, SWAP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """out = x @ w.T + bias + residual, float32."""
    # Eight tiles of rows share each pass over the columns, so that weights stay in the L2.
    across = tl.cdiv(N, BN)
    down = tl.cdiv(M, BM)
    width = 8 * across
    group = tl.program_id(0) // width
    high = tl.minimum(down - group * 8, 8)
    tile_m = group * 8 + (tl.program_id(0) % width) % high
    tile_n = (tl.program_id(0) % width) // high

    m = tile_m * BM + tl.arange(0, BM)
    n = tile_n * BN + tl.arange(0, BN)
    row = tl.minimum(m, M - 1)
    column = tl.minimum(n, N - 1)
    acc = accumulate(
        x, xs, row, x_stride, xs_stride, w, ws, column, w_stride, ws_stride, K,
        XF, WF, SWAP, BM, BN, BK, EVEN,
    )  # fmt: skip
    if row_scale is not None:
        acc *= tl.load(row_scale + row)[:, None]
    if bias is not None:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    at = m[:, None] * N + n[None, :]  # not the clamped indices: stores are as wide as their addresses are regular
    keep = (m < M)[:, None] & (n < N)[None, :]
    if residual is not None:
        acc += tl.load(residual + at, mask=keep, other=0.0).to(tl.float32)
    tl.store(out + at, acc, mask=keep)


@triton.jit
def gate_up_kernel(
    x, xs, row_scale, w, ws, bias, order, tile_expert, tile_begin, tile_count, out, out_scales,
    N, K, x_stride, xs_stride, w_stride, ws_stride, w_expert, ws_expert, limit, alpha, WIDTH,
    TOP: tl.constexpr, OUT: tl.constexpr, XF: tl.constexpr, WF: tl.constexpr, SWAP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """swiglu(x @ gate_up.T + bias) of one tile of sorted slots, stored at its sorted places in format OUT."""
    tile = tl.program_id(1)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    begin = tl.load(tile_begin + tile)
    count = tl.load(tile_count + tile)
    m = tl.arange(0, BM)
    i = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
    position = begin + m
    keep = (m < count)[:, None]
    if tl.program_id(0) * BN >= N:
        # A tile of nothing but padding (see below).
        if OUT != "plain":
            PACK: tl.constexpr = 2 if OUT == "mxfp4" else 1
            j = tl.program_id(0) * (BN // 2 // PACK) + tl.arange(0, BN // 2 // PACK)
            at = position[:, None] * (WIDTH // PACK) + j[None, :]
            none = tl.zeros((BM, BN // 2 // PACK), tl.uint8)
            tl.store(out + at, none, mask=keep & (j < WIDTH // PACK)[None, :])
            g = tl.program_id(0) * (BN // 64) + tl.arange(0, BN // 64)
            at = position[:, None] * (WIDTH // 32) + g[None, :]
            tl.store(out_scales + at, tl.zeros((BM, BN // 64), tl.uint8), mask=keep & (g * 32 < WIDTH)[None, :])
        return
    slot = tl.load(order + begin + tl.minimum(m, count - 1))
    row = slot // TOP
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    column = tl.minimum(n, N - 1)
    if ws is not None:
        ws += expert.to(tl.int64) * ws_expert
    acc = accumulate(
        x, xs, row, x_stride, xs_stride, w + expert.to(tl.int64) * w_expert, ws,
        column, w_stride, ws_stride, K,
        XF, WF, SWAP, BM, BN, BK, EVEN,
    )  # fmt: skip
    if row_scale is not None:
        acc *= tl.load(row_scale + row)[:, None]
    acc += tl.load(bias + expert * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    gate, up = tl.split(tl.reshape(acc, (BM, BN // 2, 2)))
    numbers = gate * 0.0 + up * 0.0
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    value = keep_broken((up + 1.0) * gate * sigmoid(alpha * gate), numbers)

    # Columns past the last are zeros up to WIDTH, the whole K tiles of the next product.
    value = tl.where((i < N // 2)[None, :], value, 0.0)
    if OUT == "plain":
        at = position[:, None] * WIDTH + i[None, :]
        tl.store(out + at, round_to(value, out.dtype.element_ty), mask=keep & (i < WIDTH)[None, :])
    else:
        GROUPS: tl.constexpr = BN // 64
        code, scale = mx_codes(tl.reshape(value, (BM, GROUPS, 32)), OUT)
        g = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
        at = position[:, None] * (WIDTH // 32) + g[None, :]
        tl.store(out_scales + at, scale, mask=keep & (g * 32 < WIDTH)[None, :])
        if OUT == "mxfp8":
            at = position[:, None] * WIDTH + i[None, :]
            tl.store(out + at, tl.reshape(code, (BM, BN // 2)), mask=keep & (i < WIDTH)[None, :])
        else:
            low, high = tl.split(tl.reshape(code, (BM, BN // 4, 2)))
            j = tl.program_id(0) * (BN // 4) + tl.arange(0, BN // 4)
            at = position[:, None] * (WIDTH // 2) + j[None, :]
            tl.store(out + at, (low | (high << 4)).to(tl.uint8), mask=keep & (j < WIDTH // 2)[None, :])


@triton.jit
def _store_part(acc, bias, weight, parts, slot, keep, n, N):
    """weight * (acc + bias) into the slots' rows."""
    value = (acc + tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]) * weight[:, None]
    tl.store(parts + slot[:, None] * N + n[None, :], value, mask=keep[:, None] & (n < N)[None, :])


@triton.jit
def down_kernel(
    x, xs, row_scale, w, ws, bias, weights, order, tile_expert, tile_begin, tile_count, parts,
    N, K, x_stride, xs_stride, w_stride, ws_stride, w_expert, ws_expert,
    XF: tl.constexpr, WF: tl.constexpr, SWAP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """weight * (x @ down.T + bias) of one tile of sorted places, stored at its slots."""
    tile = tl.program_id(1)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    begin = tl.load(tile_begin + tile)
    count = tl.load(tile_count + tile)
    m = tl.arange(0, BM)
    position = begin + tl.minimum(m, count - 1)
    slot = tl.load(order + position)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    column = tl.minimum(n, N - 1)
    if ws is not None:
        ws += expert.to(tl.int64) * ws_expert
    acc = accumulate(
        x, xs, position, x_stride, xs_stride, w + expert.to(tl.int64) * w_expert, ws,
        column, w_stride, ws_stride, K,
        XF, WF, SWAP, BM, BN, BK, EVEN,
    )  # fmt: skip
    if row_scale is not None:
        acc *= tl.load(row_scale + position)[:, None]
    weight = tl.load(weights + slot)
    keep = m < count
    if BM * BN > 64 * 128:
        # In two halves: the addresses of all columns at once would not fit beside the accumulator.
        left, right = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
        n = tl.program_id(0) * BN + tl.arange(0, BN // 2)
        _store_part(left, bias + expert * N, weight, parts, slot, keep, n, N)
        _store_part(right, bias + expert * N, weight, parts, slot, keep, n + BN // 2, N)
    else:
        _store_part(acc, bias + expert * N, weight, parts, slot, keep, n, N)
