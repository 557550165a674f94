"""Attention over a paged HND cache, with sinks, sliding window and grouped queries.

The cache is one pool [pages, layers_per_page, 2, kv_heads, page_size, D]; a sequence's block table names the page of
each block of page_size positions. A query at position p sees positions max(0, p - window + 1) .. p. The sink is one
logit per query head, in natural-log space, that joins the softmax denominator and nothing else.

Keys are visited in blocks of BLOCK absolute positions whatever the page size, and the denominator comes out of the
same product as the numerator (a column of ones beside V), so a query's result depends neither on how the prompt was
chunked nor on how long the cache has grown since.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from halfbyte.ops.rows import ROWS, exp

BLOCK = 64
_QUERY_CHUNK = 256  # rows at a time, to bound memory on long prompts


def store_dtype(name: str) -> torch.dtype:
    return {"f32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[name]


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
    chunks = [
        _attend_chunk(q[i : i + _QUERY_CHUNK], k, v, positions[i : i + _QUERY_CHUNK], sinks, window, scale)
        for i in range(0, q.shape[0], _QUERY_CHUNK)
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

    # Query rows of one kv head, padded to whole ROWS: [kv_heads, tiles, 1, ROWS, D]
    rows = count * group
    qk = q.view(count, kv_heads, group, dim).permute(1, 0, 2, 3).reshape(kv_heads, rows, dim).float()
    tiles = -(-rows // ROWS)
    qk = F.pad(qk, (0, 0, 0, tiles * ROWS - rows)).view(kv_heads, tiles, 1, ROWS, dim)

    key_at = first + torch.arange(blocks * BLOCK, device=q.device).view(blocks, 1, BLOCK)
    at = F.pad(positions.repeat_interleave(group), (0, tiles * ROWS - rows)).view(tiles, 1, ROWS, 1)
    seen = key_at <= at
    if window:
        seen &= key_at > at - window
    written = (key_at.view(blocks, BLOCK) < last).view(1, blocks, BLOCK, 1)
    zero = torch.zeros((), device=q.device)
    k, v = torch.where(written, k, zero), torch.where(written, v, zero)  # never let garbage meet a zero weight

    scores = torch.matmul(qk, k.transpose(-1, -2).unsqueeze(1)) * scale  # [kv_heads, tiles, blocks, ROWS, BLOCK]
    scores = scores.masked_fill(~seen, -math.inf)
    top = scores.amax(dim=(2, 4))  # [kv_heads, tiles, ROWS]
    if sinks is not None:
        per_row = sinks.float().view(kv_heads, 1, group).expand(kv_heads, count, group).reshape(kv_heads, rows)
        per_row = F.pad(per_row, (0, tiles * ROWS - rows)).view(kv_heads, tiles, ROWS)
        top = torch.maximum(top, per_row)
    weights = exp(scores - top[:, :, None, :, None])
    ones = torch.ones((*v.shape[:-1], 1), device=v.device)
    partial = torch.matmul(weights, torch.cat((v, ones), dim=-1).unsqueeze(1))  # [.., blocks, ROWS, D + 1]
    total = partial[:, :, 0]
    for b in range(1, blocks):
        total = total + partial[:, :, b]
    denominator = total[..., dim:]
    if sinks is not None:
        denominator = denominator + exp(per_row - top)[..., None]
    out = (total[..., :dim] / denominator).view(kv_heads, tiles * ROWS, dim)[:, :rows]
    return out.view(kv_heads, count, group, dim).permute(1, 0, 2, 3).reshape(count, heads, dim)
