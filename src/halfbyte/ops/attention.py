"""Attention over a paged HND cache, with sinks, sliding window and grouped queries.

The cache is one pool [pages, layers_per_page, 2, kv_heads, page_size, D]; a sequence's block table names the page of
each block of page_size positions. A query at position p sees positions max(0, p - window + 1) .. p. The sink is one
logit per query head, in natural-log space, that joins the softmax denominator and nothing else.

Keys are visited in blocks of BLOCK absolute positions whatever the page size, each key and value in a unit of its own
(see `ops.products`), so a query's result depends neither on how the prompt was chunked nor on how long the cache has
grown since.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from halfbyte.ops.products import FixedPoint, exp, matmul, sum_rows

BLOCK = 64
_TOKENS, _SCORES = 64, 1 << 23  # at a time: what a block's tokens need not see is left out; memory is bounded
STORE_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def write_kv(pool: Tensor, layer: int, k: Tensor, v: Tensor, positions: Tensor, rows_table: Tensor) -> None:
    """Store k, v [R, kv_heads, D] at their positions; rows_table [R, blocks] is each row's block table."""
    page_size = pool.shape[4]
    block = (positions // page_size).long()
    page = rows_table.gather(1, block[:, None]).squeeze(1).long()
    slot = (positions % page_size).long()
    k, v = _to_store(k, pool.dtype), _to_store(v, pool.dtype)
    view = pool.view(torch.uint8) if pool.dtype == torch.float8_e4m3fn else pool
    if pool.dtype == torch.float8_e4m3fn:
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    view[page, layer, 0, :, slot] = k
    view[page, layer, 1, :, slot] = v


def _to_store(x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.float8_e4m3fn:  # saturate: an fp8 cache has no scale, and infinity would poison a sequence
        x = x.float().clamp(-448.0, 448.0)
    return x.to(dtype).contiguous()


def gather_kv(pool: Tensor, layer: int, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """K and V [kv_heads, length, D] in float32 of one sequence. Unwritten slots may hold anything: callers mask."""
    page_size = pool.shape[4]
    pages = table[: -(-length // page_size)].long()
    if pool.dtype == torch.float8_e4m3fn:
        both = pool.view(torch.uint8)[pages, layer].view(torch.float8_e4m3fn).float()
    else:
        both = pool[pages, layer].float()  # [blocks, 2, kv_heads, page, D]
    both = both.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
    return both[0], both[1]


def attend(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, sinks: Tensor | None, window: int | None, scale: float
) -> Tensor:
    """One sequence: q [T, heads, D] at `positions` [T]; k, v [kv_heads, length, D] from position 0. Returns as q."""
    size = max(1, min(_TOKENS, _SCORES // (q.shape[1] * max(1, k.shape[1]))))
    chunks = [
        _attend_chunk(q[i : i + size], k, v, positions[i : i + size], sinks, window, scale)
        for i in range(0, q.shape[0], size)
    ]
    return torch.cat(chunks)


def _attend_chunk(
    q: Tensor, k: Tensor, v: Tensor, positions: Tensor, sinks: Tensor | None, window: int | None, scale: float
) -> Tensor:
    count, heads, dim = q.shape
    kv_heads, length, _ = k.shape
    group = heads // kv_heads
    # Only blocks that some query can see; the first is BLOCK-aligned in absolute position.
    last = int(positions.max()) + 1
    first = max(0, int(positions.min()) - window + 1) // BLOCK * BLOCK if window else 0
    blocks = -(-(last - first) // BLOCK)
    pad = first + blocks * BLOCK - min(length, first + blocks * BLOCK)
    k = F.pad(k[:, first : first + blocks * BLOCK], (0, 0, 0, pad)).view(kv_heads, blocks, BLOCK, dim)
    v = F.pad(v[:, first : first + blocks * BLOCK], (0, 0, 0, pad)).view(kv_heads, blocks, BLOCK, dim)

    rows = count * group
    q_rows = q.view(count, kv_heads, group, dim).permute(1, 0, 2, 3).reshape(kv_heads, 1, rows, dim).float()
    key_at = first + torch.arange(blocks * BLOCK, device=q.device).view(blocks, 1, BLOCK)
    query_at = positions.repeat_interleave(group).view(1, rows, 1)
    seen = key_at <= query_at
    if window:
        seen &= key_at > query_at - window
    written = (key_at.view(blocks, BLOCK) < last).view(1, blocks, BLOCK, 1)
    zero = torch.zeros((), device=q.device)
    k, v = torch.where(written, k, zero), torch.where(written, v, zero)  # never let garbage meet a zero weight

    scores = matmul(q_rows, FixedPoint.of(k)) * scale  # [kv_heads, blocks, rows, BLOCK]
    scores = scores.masked_fill(~seen, -math.inf)
    top = scores.amax(dim=(1, 3))  # [kv_heads, rows]
    if sinks is not None:
        per_row = sinks.float().view(kv_heads, 1, group).expand(kv_heads, count, group).reshape(kv_heads, rows)
        top = torch.maximum(top, per_row)
    weights = exp(scores - top[:, None, :, None])
    # A value's unit goes with its weight, which is zero for values that a query does not see. A weight keeps 23 bits
    # below the largest of its block.
    values, units = FixedPoint.of(v).columns()
    partial = matmul(
        weights.double() * units[:, :, None, :], values, terms=BLOCK, fine=False
    )  # [kv_heads, blocks, rows, D]
    sums = sum_rows(weights).float()  # [kv_heads, blocks, rows]
    total, denominator = partial[:, 0], sums[:, 0]
    for b in range(1, blocks):
        total, denominator = total + partial[:, b], denominator + sums[:, b]
    if sinks is not None:
        denominator = denominator + exp(per_row - top)
    out = total / denominator[..., None]
    return out.view(kv_heads, count, group, dim).permute(1, 0, 2, 3).reshape(count, heads, dim)
