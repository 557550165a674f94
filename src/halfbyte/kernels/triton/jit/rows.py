# mypy: ignore-errors
"""Kernels that work on rows: embedding, norms, rope with the KV write, routing, the sum over a row's experts."""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.triton.jit.numbers import cache_bits, dot, keep_broken, norm_scale, round_to, to_bf16


@triton.jit
def embed_kernel(tokens, table, x, H, BH: tl.constexpr):
    row = tl.program_id(0)
    i = tl.program_id(1) * BH + tl.arange(0, BH)
    token = tl.load(tokens + row).to(tl.int64)
    value = tl.load(table + token * H + i, mask=i < H, other=0.0).to(tl.float32)
    tl.store(x + row.to(tl.int64) * H + i, value, mask=i < H)


@triton.jit
def norm_kernel(x, weight, h, rows, H, eps, BH: tl.constexpr):
    """Row `rows[i]` of x (row i where `rows` is None), normalised, into row i of h."""
    row = tl.program_id(0)
    source = row
    if rows is not None:
        source = tl.load(rows + row)
    i = tl.arange(0, BH)
    inside = i < H
    value = tl.load(x + source.to(tl.int64) * H + i, mask=inside, other=0.0).to(tl.float32)
    scale = norm_scale(tl.sum(value * value, axis=0), H, eps)
    value = value * scale * tl.load(weight + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(h + row.to(tl.int64) * H + i, round_to(value, h.dtype.element_ty), mask=inside)


@triton.jit
def angles_kernel(positions, inverse, cos, sin, temperature, HALF: tl.constexpr):
    """cos and sin of each row's position, times the temperature: once a step, for every layer.

    The product is float32, as in the reference; the functions are float64, so that positions past 100,000 keep every
    bit of the reduction."""
    row = tl.program_id(0)
    i = tl.arange(0, HALF)
    angle = (tl.load(positions + row).to(tl.float32) * tl.load(inverse + i)).to(tl.float64)
    tl.store(cos + row * HALF + i, (tl.cos(angle) * temperature).to(tl.float32))
    tl.store(sin + row * HALF + i, (tl.sin(angle) * temperature).to(tl.float32))


@triton.jit
def rope_kernel(
    q, k, v, cos, sin, positions, sequence_of, table, pool, rotated,
    q_stride, k_stride, v_stride, table_stride, page_stride, layer_offset, value_offset,
    KV: tl.constexpr, GROUP: tl.constexpr, GROUP_P2: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """One row, one kv head: rotate its queries into `rotated`, its key into the cache, copy its value there."""
    row, head = tl.program_id(0), tl.program_id(1)
    D: tl.constexpr = 2 * HALF
    i = tl.arange(0, HALF)
    c = tl.load(cos + row * HALF + i)
    s = tl.load(sin + row * HALF + i)

    g = tl.arange(0, GROUP_P2)
    here = (head * GROUP + g) * D
    inside = (g < GROUP)[:, None]
    at = row.to(tl.int64) * q_stride + here[:, None] + i[None, :]
    a = tl.load(q + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(q + at + HALF, mask=inside, other=0.0).to(tl.float32)
    to = row.to(tl.int64) * (tl.num_programs(1) * GROUP * D) + here[:, None] + i[None, :]
    tl.store(rotated + to, to_bf16(a * c[None, :] - b * s[None, :]), mask=inside)
    tl.store(rotated + to + HALF, to_bf16(b * c[None, :] + a * s[None, :]), mask=inside)

    position = tl.load(positions + row)
    page = tl.load(table + tl.load(sequence_of + row) * table_stride + position // PAGE).to(tl.int64)
    cell = pool + page * page_stride + layer_offset + (head * PAGE + position % PAGE) * D
    at_k = row.to(tl.int64) * k_stride + head * D + i
    a = tl.load(k + at_k).to(tl.float32)
    b = tl.load(k + at_k + HALF).to(tl.float32)
    at_v = row.to(tl.int64) * v_stride + head * D + i
    lower = tl.load(v + at_v).to(tl.float32)
    upper = tl.load(v + at_v + HALF).to(tl.float32)
    if KV != "bf16":  # E4M3 has no infinity: it becomes NaN, not 448
        first = a * c - b * s
        second = b * c + a * s
        tl.store(cell + i, cache_bits(keep_broken(first, first), KV))
        tl.store(cell + i + HALF, cache_bits(keep_broken(second, second), KV))
        tl.store(cell + value_offset + i, cache_bits(keep_broken(lower, lower), KV))
        tl.store(cell + value_offset + i + HALF, cache_bits(keep_broken(upper, upper), KV))
    else:
        tl.store(cell + i, to_bf16(a * c - b * s))
        tl.store(cell + i + HALF, to_bf16(b * c + a * s))
        tl.store(cell + value_offset + i, to_bf16(lower))
        tl.store(cell + value_offset + i + HALF, to_bf16(upper))


@triton.jit
def router_kernel(
    x, norm, weight, partial, M, H, E, CHUNK,
    BM: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Products of (x * norm weight) with the router's rows over one part of K; the norm's scalar comes later.

    Activations go in as a sum of two bf16, so that a choice between experts is made with 16 bits and not with 8. So do
    the rows of a float32 router; the product of both low parts is below what float32 keeps, and is left out."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    e = tl.program_id(1) * BE + tl.arange(0, BE)
    part = tl.program_id(2)
    row = tl.minimum(m, M - 1).to(tl.int64)
    expert = tl.minimum(e, E - 1)
    acc = tl.zeros((BM, BE), tl.float32)
    for k0 in range(part * CHUNK, tl.minimum((part + 1) * CHUNK, H), BK):
        k = k0 + tl.arange(0, BK)
        inside = k < H
        value = tl.load(x + row[:, None] * H + k[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
        value = value * tl.load(norm + k, mask=inside, other=0.0).to(tl.float32)[None, :]
        w = tl.load(weight + expert[None, :] * H + k[:, None], mask=inside[:, None], other=0.0)
        high = to_bf16(value)
        low = to_bf16(value - high.to(tl.float32))
        if weight.dtype.element_ty == tl.float32:
            coarse = to_bf16(w)
            acc = dot(high, to_bf16(w - coarse.to(tl.float32)), acc)
            w = coarse
        acc = dot(low, w, acc)
        acc = dot(high, w, acc)
    at = (m[:, None].to(tl.int64) * tl.num_programs(2) + part) * E + e[None, :]
    tl.store(partial + at, acc, mask=(m < M)[:, None] & (e < E)[None, :])


@triton.jit
def choose_kernel(
    x, norm, bias, partial, h, ids, weights, H, E, eps,
    PARTS: tl.constexpr, TOP: tl.constexpr, TOP_P2: tl.constexpr, BH: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """One row: the norm, its router logits, the top experts (ties to the lower) and the softmax over them."""
    row = tl.program_id(0)
    i = tl.arange(0, BH)
    inside = i < H
    value = tl.load(x + row.to(tl.int64) * H + i, mask=inside, other=0.0).to(tl.float32)
    scale = norm_scale(tl.sum(value * value, axis=0), H, eps)
    value = value * scale * tl.load(norm + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(h + row.to(tl.int64) * H + i, round_to(value, h.dtype.element_ty), mask=inside)

    e = tl.arange(0, BE)
    real = e < E
    logits = tl.zeros((BE,), tl.float32)
    for part in tl.static_range(PARTS):
        logits += tl.load(partial + (row.to(tl.int64) * PARTS + part) * E + e, mask=real, other=0.0)
    logits = logits * scale + tl.load(bias + e, mask=real, other=0.0).to(tl.float32)
    # A broken row must still name real experts: NaN counts as the smallest, and the weights say that it is broken.
    numbers = tl.sum(tl.where(real, logits * 0.0, 0.0), axis=0)
    logits = tl.where(real & (logits == logits), logits, float("-inf"))
    largest = tl.max(logits, axis=0)
    slots = tl.arange(0, TOP_P2)
    chosen_ids = tl.zeros((TOP_P2,), tl.int32)
    shares = tl.zeros((TOP_P2,), tl.float32)
    total = 0.0
    left = real
    for slot in tl.static_range(TOP):
        best = tl.max(tl.where(left, logits, float("-inf")), axis=0)
        chosen = tl.min(tl.where(left & (logits == best), e, E - 1), axis=0)
        share = tl.exp(best - largest)
        total = total + share
        chosen_ids = tl.where(slots == slot, chosen, chosen_ids)
        shares = tl.where(slots == slot, share, shares)
        left = left & (e != chosen)
    tl.store(ids + row * TOP + slots, chosen_ids, mask=slots < TOP)
    tl.store(weights + row * TOP + slots, keep_broken(shares / total, numbers), mask=slots < TOP)


@triton.jit
def combine_kernel(x, parts, out, H, TOP: tl.constexpr, BH: tl.constexpr):
    """x + (part 0 + part 1 + ...), in the router's order."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BH + tl.arange(0, BH)
    inside = i < H
    total = tl.load(parts + row * TOP * H + i, mask=inside, other=0.0)
    for slot in tl.static_range(1, TOP):
        total += tl.load(parts + (row * TOP + slot) * H + i, mask=inside, other=0.0)
    value = tl.load(x + row * H + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * H + i, value + total, mask=inside)
