"""rows16: weights as the CPU kernels read them, for MXFP4, q8 and dense numbers. Lossless; nothing here rounds.

Rows in tiles of 16 whose words are interleaved, so that one lane of a vector belongs to one row. Data is uint8
[..., ceil(N/16), tile bytes]; a tile is its codes, then its scales, each padded with zeros to whole lines of 64 bytes.
Rows past N and elements past K, up to whole groups of 32, are zero.
A group of zeros whose UE8M0 byte is 0 or 1 gets the byte 127 (scale 1): the numbers are the same, and the kernels'
vector code need not leave for the subnormal scales that those bytes mean.

| format         | codes                                              | scales                 |
|----------------|----------------------------------------------------|------------------------|
| mxfp4          | [group][4][16 rows] words of 4 bytes, as in plain  | [group][16 rows] UE8M0 |
| q8             | [group][8][16 rows] words of four consecutive k    | [group][16 rows] f16   |
| f32, f16, bf16 | [k][16 rows]                                       | none                   |

Packing is one transposition of words for each tile, which a CPU does about as fast as it reads memory: a model is laid
out in the time that its disk needs.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from halfbyte.errors import FormatError
from halfbyte.formats.blocks import check_data, no_scales
from halfbyte.formats.tensor import GEOMETRY, MXTensor

ROWS, GROUP, LINE = 16, 32, 64
ONE = 127  # the UE8M0 byte of scale 1
DENSE = (torch.float32, torch.float16, torch.bfloat16)


def pack(t: MXTensor) -> MXTensor:
    """A plain mxfp4 or q8 tensor in this layout."""
    *lead, n, k = _matrix(t.shape)
    geometry, stack, tiles, groups = GEOMETRY[t.format], math.prod(lead), -(-n // ROWS), -(-k // GROUP)
    codes, scales = _part_bytes(t.format, groups)
    out = torch.empty((stack, tiles, codes + scales), dtype=torch.uint8, device=t.device)
    words = groups * geometry.group_bytes // 4
    _transpose(_view_as(t.data, torch.int32).view(stack, n, words), _columns(out, 0, words, torch.int32))
    dtype = geometry.scale_dtype
    _transpose(_view_as(t.scales, dtype).view(stack, n, groups), _columns(out, codes, groups, dtype))
    out[..., codes + groups * ROWS * dtype.itemsize :] = 0
    if t.format == "mxfp4":
        _name_zero_groups(out, codes, groups)
    return replace(t, data=out.view(*lead, tiles, codes + scales), scales=no_scales(out), layout="rows16")


def _name_zero_groups(out: Tensor, codes: int, groups: int) -> None:
    """Give groups of zeros an ordinary scale."""
    scales = out[..., codes : codes + groups * ROWS]
    subnormal = scales < 2
    if bool(subnormal.any()):
        words = out[..., : groups * GROUP // 2 * ROWS].view(torch.int32)
        zeros = ((words.view(*words.shape[:-1], groups, 4, ROWS) & 0x77777777) == 0).all(-2)
        scales.masked_fill_(subnormal & zeros.flatten(-2), ONE)


def unpack(t: MXTensor) -> MXTensor:
    """The plain tensor again, equal to the last byte but for the scales of groups of zeros."""
    *lead, n, k = _matrix(t.shape)
    geometry, stack, tiles, groups = GEOMETRY[t.format], math.prod(lead), -(-n // ROWS), -(-k // GROUP)
    codes, scales = _part_bytes(t.format, groups)
    check_data(t, (*lead, tiles, codes + scales))
    tile_bytes = _view_as(t.data, torch.int32).view(torch.uint8).view(stack, tiles, codes + scales)
    words, dtype = groups * geometry.group_bytes // 4, geometry.scale_dtype
    data = _rows(_columns(tile_bytes, 0, words, torch.int32), n)
    return replace(
        t,
        data=data.view(geometry.data_dtype).view(*lead, n, groups * geometry.group_bytes),
        scales=_rows(_columns(tile_bytes, codes, groups, dtype), n).view(*lead, n, groups),
        layout="plain",
    )


def pack_dense(w: Tensor) -> Tensor:
    """A matrix [..., n, k] of float32, float16 or bfloat16 as uint8 [..., tiles, tile bytes]."""
    *lead, n, k = _matrix(tuple(w.shape))
    stack, tiles, padded = math.prod(lead), -(-n // ROWS), -(-k // GROUP) * GROUP
    out = torch.empty((stack, tiles, padded * ROWS * w.dtype.itemsize), dtype=torch.uint8, device=w.device)
    elements = _columns(out, 0, padded, w.dtype)
    _transpose(w.reshape(stack, n, k), elements[:, :, :k])
    elements[:, :, k:] = 0
    return out.view(*lead, tiles, out.shape[-1])


def unpack_dense(data: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The inverse of `pack_dense`."""
    *lead, n, k = shape
    stack, padded = math.prod(lead), -(-k // GROUP) * GROUP
    tiles = data.contiguous().view(stack, -(-n // ROWS), padded * ROWS * dtype.itemsize)
    return _rows(_columns(tiles, 0, padded, dtype)[:, :, :k], n).view(shape)


def tile_bytes(format: str, k: int) -> int:
    """Bytes of one tile of a matrix with K columns in a weight format: mxfp4, q8, f32, f16 or bf16."""
    groups = -(-k // GROUP)
    if format in GEOMETRY:
        return sum(_part_bytes(format, groups))
    return groups * GROUP * ROWS * (4 if format == "f32" else 2)


# ---- parts -----------------------------------------------------------------------------------------------------------


def _part_bytes(format: str, groups: int) -> tuple[int, int]:
    """(codes, scales) of one tile."""
    geometry = GEOMETRY[format]
    scales = groups * ROWS * geometry.scale_dtype.itemsize
    return groups * ROWS * geometry.group_bytes, -(-scales // LINE) * LINE


def _columns(out: Tensor, start: int, count: int, dtype: torch.dtype) -> Tensor:
    """A view of `count` columns of 16 elements from byte `start` of every tile on: [stack, tiles, count, 16]."""
    if count == 0:  # torch views no empty bytes as words
        return out.new_empty((*out.shape[:-1], 0, ROWS), dtype=dtype)
    stop = start + count * ROWS * dtype.itemsize
    return out[..., start:stop].view(dtype).view(*out.shape[:-1], count, ROWS)


def _transpose(rows: Tensor, columns: Tensor) -> None:
    """rows [stack, n, count] into [stack, tiles, count, 16]; zeros where the last tile has no row."""
    stack, n, count = rows.shape
    full, left = divmod(n, ROWS)
    if full:
        columns[:, :full] = rows[:, : full * ROWS].view(stack, full, ROWS, count).transpose(2, 3)
    if left:
        columns[:, full, :, :left] = rows[:, full * ROWS :].transpose(1, 2)
        columns[:, full, :, left:] = 0


def _rows(columns: Tensor, n: int) -> Tensor:
    """The inverse: [stack, n, count], in memory of its own."""
    stack, _, count, _ = columns.shape
    rows = torch.empty((stack, n, count), dtype=columns.dtype, device=columns.device)
    full, left = divmod(n, ROWS)
    if full:
        rows[:, : full * ROWS].view(stack, full, ROWS, count).copy_(columns[:, :full].transpose(2, 3))
    if left:
        rows[:, full * ROWS :] = columns[:, full, :, :left].transpose(1, 2)
    return rows


def _view_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of `x` as `dtype`; copied where they are not aligned to it."""
    flat = x.contiguous().view(-1)
    if flat.storage_offset() * flat.dtype.itemsize % dtype.itemsize or flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype)


def _matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) < 2:
        raise FormatError(f"the layout 'rows16' holds matrices or stacks of them, not a tensor of shape {shape}")
    return shape
