# mypy: ignore-errors
"""Tokens grouped by expert on the device: a counting sort that keeps the order of slots, and the list of row tiles.

A slot is (row, place among the row's experts). `order[p]` is the slot at sorted place p; expert e's slots are
contiguous. A tile is up to BM places of one expert: `tile_expert[t]` (-1: no such tile), `tile_begin[t]`,
`tile_count[t]`. Few slots take one launch of one program; many take three, with a count per chunk of slots.
"""

from __future__ import annotations

import triton
import triton.language as tl

SUB = tl.constexpr(64)  # slots compared with one another at a time


@triton.jit
def _count(ids, slots, first, last, BE: tl.constexpr):
    e = tl.arange(0, BE)
    total = tl.zeros((BE,), tl.int32)
    for at in range(first, last, SUB):
        i = at + tl.arange(0, SUB)
        expert = tl.load(ids + i, mask=i < slots, other=BE).to(tl.int32)
        total += tl.sum((expert[:, None] == e[None, :]).to(tl.int32), axis=0)
    return total


@triton.jit
def _tiles(total, tile_expert, tile_begin, tile_count, tiles, BM: tl.constexpr, BE: tl.constexpr):
    """Writes the tile list; returns each expert's first place."""
    e = tl.arange(0, BE)
    begin = tl.cumsum(total, axis=0) - total
    needed = (total + BM - 1) // BM
    end = tl.cumsum(needed, axis=0)
    for at in range(0, tiles, SUB):
        t = at + tl.arange(0, SUB)
        mine = (end[None, :] > t[:, None]) & ((end - needed)[None, :] <= t[:, None])  # one expert a tile, or none
        used = tl.sum(mine.to(tl.int32), axis=1) > 0
        skip = (t - tl.sum(tl.where(mine, (end - needed)[None, :], 0), axis=1)) * BM
        expert = tl.sum(tl.where(mine, e[None, :], 0), axis=1)
        count = tl.minimum(tl.sum(tl.where(mine, total[None, :], 0), axis=1) - skip, BM)
        start = tl.sum(tl.where(mine, begin[None, :], 0), axis=1) + skip
        tl.store(tile_expert + t, tl.where(used, expert, -1), mask=t < tiles)
        tl.store(tile_begin + t, tl.where(used, start, 0), mask=t < tiles)
        tl.store(tile_count + t, tl.where(used, count, 0), mask=t < tiles)
    return begin


@triton.jit
def _scatter(ids, order, slots, first, last, position, BE: tl.constexpr):
    """`position` [BE]: where the next slot of each expert goes."""
    e = tl.arange(0, BE)
    for at in range(first, last, SUB):
        i = at + tl.arange(0, SUB)
        expert = tl.load(ids + i, mask=i < slots, other=BE).to(tl.int32)
        again = tl.load(ids + at + tl.arange(0, SUB), mask=(at + tl.arange(0, SUB)) < slots, other=BE).to(tl.int32)
        earlier = tl.arange(0, SUB)[None, :] < tl.arange(0, SUB)[:, None]
        rank = tl.sum(((expert[:, None] == again[None, :]) & earlier).to(tl.int32), axis=1)
        mine = expert[:, None] == e[None, :]
        to = tl.sum(tl.where(mine, position[None, :], 0), axis=1) + rank
        tl.store(order + to, i, mask=i < slots)
        position += tl.sum(mine.to(tl.int32), axis=0)


@triton.jit
def group_kernel(ids, order, tile_expert, tile_begin, tile_count, slots, tiles, BM: tl.constexpr, BE: tl.constexpr):
    """All of it in one program."""
    total = _count(ids, slots, 0, slots, BE)
    begin = _tiles(total, tile_expert, tile_begin, tile_count, tiles, BM, BE)
    _scatter(ids, order, slots, 0, slots, begin, BE)


@triton.jit
def count_kernel(ids, counts, slots, chunk, BE: tl.constexpr):
    first = tl.program_id(0) * chunk
    total = _count(ids, slots, first, tl.minimum(first + chunk, slots), BE)
    tl.store(counts + tl.program_id(0) * BE + tl.arange(0, BE), total)


@triton.jit
def tiles_kernel(counts, tile_expert, tile_begin, tile_count, chunks, tiles, BM: tl.constexpr, BE: tl.constexpr):
    """Turns the counts per chunk into the place of each chunk's first slot per expert."""
    e = tl.arange(0, BE)
    total = tl.zeros((BE,), tl.int32)
    for chunk in range(0, chunks):
        total += tl.load(counts + chunk * BE + e)
    position = _tiles(total, tile_expert, tile_begin, tile_count, tiles, BM, BE)
    for chunk in range(0, chunks):
        count = tl.load(counts + chunk * BE + e)
        tl.store(counts + chunk * BE + e, position)
        position += count


@triton.jit
def scatter_kernel(ids, counts, order, slots, chunk, BE: tl.constexpr):
    first = tl.program_id(0) * chunk
    position = tl.load(counts + tl.program_id(0) * BE + tl.arange(0, BE))
    _scatter(ids, order, slots, first, tl.minimum(first + chunk, slots), position, BE)
