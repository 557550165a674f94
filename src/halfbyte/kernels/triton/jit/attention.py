# mypy: ignore-errors
"""Attention over pages of 64 positions: whole prompts at once, and few rows over a cache cut into parts.

The query heads of one kv head share a tile, so its keys are read once for all of them. Softmax runs in base 2. A block
of keys is one page; blocks that no row of the tile can see are never read, and slots past the newest position are never
multiplied. The sink joins the denominator once, at the very end: in `prefill_kernel` and the unsplit
`decode_kernel` after the last block, otherwise in `merge_kernel`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.triton.jit.numbers import cache_value, dot, keep_broken, round_to, to_bf16

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_block(pointer, KV: tl.constexpr):
    value = tl.load(pointer)
    if KV != "bf16":
        value = cache_value(value, KV)
    return value


@triton.jit
def _visit(
    query, top, total, acc, keys, table, page_stride, value_offset, block, position, newest, scale,
    KV: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """One block of keys: new running maximum, denominator and weighted sum of each query row."""
    slot = tl.arange(0, PAGE)
    d = tl.arange(0, D)
    page = tl.load(table + block).to(tl.int64)
    base = keys + page * page_stride
    k = _load_block(base + slot[None, :] * D + d[:, None], KV)
    score = dot(query, k, tl.zeros((query.shape[0], PAGE), tl.float32)) * scale
    score = keep_broken(score, score)  # a key of minus infinity would only be left out
    v = _load_block(base + value_offset + slot[:, None] * D + d[None, :], KV)
    if MASKED:
        at = block * PAGE + slot
        seen = at[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (at[None, :] > position[:, None] - WINDOW)
        score = tl.where(seen, score, float("-inf"))
        v = tl.where((at <= newest)[:, None], v, 0.0)  # whatever an unwritten slot holds must not meet a zero weight
    higher = tl.maximum(top, tl.max(score, axis=1))
    if MASKED:
        safe = tl.where(higher == float("-inf"), 0.0, higher)
    else:
        safe = higher
    weight = tl.exp2(score - safe[:, None])
    fade = tl.exp2(top - safe)
    total = total * fade + tl.sum(weight, axis=1)
    acc = dot(to_bf16(weight), v, acc * fade[:, None])
    return higher, total, acc


@triton.jit
def _finish(top, total, acc, sink):
    """The weighted sum over the denominator, the sink counted in; 0 where a row saw nothing at all."""
    if sink is not None:
        bound = tl.maximum(top, sink)
        fade = tl.exp2(top - bound)
        denominator = total * fade + tl.exp2(sink - bound)
        return acc * (fade / denominator)[:, None]
    else:
        return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def prefill_kernel(
    q, out, keys, table, sinks, positions, query_start, sequences, heads,
    table_stride, page_stride, value_offset, scale,
    KV: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """One tile: BM / GROUP rows of one sequence times the GROUP heads of one kv head. `keys` points at this layer's."""
    BQ: tl.constexpr = BM // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first
    head = tl.program_id(1)
    # Sequence s owns the tiles from query_start[s] // BQ + s on: enough for its rows, found without a list of tiles.
    low = 0
    high = sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // BQ + middle <= tile:
            low = middle
        else:
            high = middle
    start = tl.load(query_start + low)
    end = tl.load(query_start + low + 1)
    first_row = start + (tile - (start // BQ + low)) * BQ
    if first_row >= end:
        return

    m = tl.arange(0, BM)
    row = tl.minimum(first_row + m // GROUP, end - 1)
    d = tl.arange(0, D)
    column = (head * GROUP + m % GROUP) * D
    cell = row.to(tl.int64)[:, None] * (heads * D) + column[:, None] + d[None, :]
    query = tl.load(q + cell)
    position = tl.load(positions + row)
    oldest = tl.load(positions + first_row)
    newest = tl.load(positions + tl.minimum(first_row + BQ, end) - 1)

    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    keys += head * PAGE * D
    table += low * table_stride
    scale *= LOG2E
    last = newest // PAGE + 1
    if WINDOW > 0:
        begin = tl.maximum(oldest - WINDOW + 1, 0) // PAGE
    else:
        begin = (oldest + 1) // PAGE  # every row sees every block before this one whole
        for block in range(0, begin):
            top, total, acc = _visit(
                query, top, total, acc, keys, table, page_stride, value_offset, block, position, newest, scale,
                KV, 0, False, PAGE, D,
            )  # fmt: skip
    for block in range(begin, last):
        top, total, acc = _visit(
            query, top, total, acc, keys, table, page_stride, value_offset, block, position, newest, scale,
            KV, WINDOW, True, PAGE, D,
        )  # fmt: skip

    sink = None
    if sinks is not None:
        sink = tl.load(sinks + head * GROUP + m % GROUP).to(tl.float32) * LOG2E
    result = _finish(top, total, acc, sink)
    tl.store(out + cell, round_to(result, out.dtype.element_ty), mask=(first_row + m // GROUP < end)[:, None])


@triton.jit
def part_of(position, PAGE: tl.constexpr):
    """Blocks in one part of the cache of a row at this position: 2, 8 or 32 pages, so that 64 parts always suffice.

    A function of the row's own position alone: what else is in the batch cannot change how its sum is cut."""
    tokens = position + 1
    return tl.where(tokens <= 128 * PAGE, 2, tl.where(tokens <= 512 * PAGE, 8, 32))


@triton.jit
def decode_kernel(
    q, out, sums, stats, keys, table, sinks, positions, sequence_of, heads, splits,
    table_stride, page_stride, value_offset, scale,
    KV: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """One row, one kv head, one part of the cache. Without SPLIT one part is all there is (sliding layers)."""
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + row)
    last = position // PAGE + 1
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(position - WINDOW + 1, 0) // PAGE
    if SPLIT:
        length = part_of(position, PAGE)
        begin = part * length
        if begin >= last:
            return
        last = tl.minimum(begin + length, last)

    m = tl.arange(0, BM)
    mine = m < GROUP
    d = tl.arange(0, D)
    column = head * GROUP + tl.minimum(m, GROUP - 1)
    cell = row.to(tl.int64) * heads + column
    query = tl.load(q + cell[:, None] * D + d[None, :])
    at = tl.zeros((BM,), tl.int32) + position
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    keys += head * PAGE * D
    table += tl.load(sequence_of + row) * table_stride
    scale *= LOG2E
    for block in range(begin, last):
        top, total, acc = _visit(
            query, top, total, acc, keys, table, page_stride, value_offset, block, at, position, scale,
            KV, WINDOW, True, PAGE, D,
        )  # fmt: skip
    if SPLIT:
        index = cell * splits + part
        tl.store(sums + index[:, None] * D + d[None, :], acc, mask=mine[:, None])
        tl.store(stats + index * 2, top, mask=mine)
        tl.store(stats + index * 2 + 1, total, mask=mine)
    else:
        sink = None
        if sinks is not None:
            sink = tl.load(sinks + column).to(tl.float32) * LOG2E
        result = _finish(top, total, acc, sink)
        tl.store(out + cell[:, None] * D + d[None, :], round_to(result, out.dtype.element_ty), mask=mine[:, None])


@triton.jit
def merge_kernel(
    sums, stats, sinks, positions, out, heads, splits, CHUNK: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr
):
    """One row, one query head: the parts of its cache joined in order, the sink counted in once."""
    row, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + row)
    parts = tl.cdiv(position // PAGE + 1, part_of(position, PAGE))
    cell = row.to(tl.int64) * heads + head
    stats += cell * splits * 2
    sums += cell * splits * D
    i = tl.arange(0, CHUNK)
    d = tl.arange(0, D)
    bound = float("-inf")
    for first in range(0, parts, CHUNK):
        j = first + i
        bound = tl.maximum(bound, tl.max(tl.load(stats + j * 2, mask=j < parts, other=float("-inf")), axis=0))
    sink = 0.0
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        bound = tl.maximum(bound, sink)
    acc = tl.zeros((D,), tl.float32)
    denominator = 0.0
    for first in range(0, parts, CHUNK):
        j = first + i
        weight = tl.exp2(tl.load(stats + j * 2, mask=j < parts, other=float("-inf")) - bound)
        denominator += tl.sum(weight * tl.load(stats + j * 2 + 1, mask=j < parts, other=0.0), axis=0)
        block = tl.load(sums + j[:, None] * D + d[None, :], mask=(j < parts)[:, None], other=0.0)
        acc += tl.sum(block * weight[:, None], axis=0)
    if sinks is not None:
        denominator += tl.exp2(sink - bound)
    tl.store(out + cell * D + d, round_to(acc / denominator, out.dtype.element_ty))
