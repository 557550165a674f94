"""tile16: weights as the decode kernel streams them, for MXFP4, q8 and bf16. Lossless; nothing here rounds.

Rows in tiles of 16, K in chunks of 64; a chunk is contiguous, scales included, so that any run of chunks is one bulk
copy. Data is uint8 [..., ceil(N/16), ceil(K/64), chunk bytes]; rows past N and groups past K are zero.

A chunk feeds four steps i of mma.m16n8k16. Lane (g, t) = (lane / 4, lane % 4) holds rows g and g + 8 (r = 0, 1), and in
step i, pair p, element e the column k = 32 (i / 2) + 8 t + 4 (i % 2) + 2 p + e. The dot product does not care about the
order of k, and this one gives a lane eight consecutive k of every group of 32: activations load as whole words.

| format | bytes | order                                                                                          |
|--------|-------|------------------------------------------------------------------------------------------------|
| mxfp4  | 544   | [lane][i] words of eight codes; then scales [g][group][r]                                      |
| q8     | 1088  | [group][lane][i % 2][p][e][r] int8; then float16 scales [g][group][r]                          |
| bf16   | 2048  | [i][lane][p][r][e]                                                                             |

The word of MXFP4 holds four registers of two codes. A register has sign and magnitude of a code where bf16 has its sign
and its lowest exponent bits (mask 0x81c081c0, value x 2^-126). With w the word, registers (p, r) = (0,0), (0,1), (1,0),
(1,1) are w, w rotated right by 6, by 3, and (w & 0x001b001b) * 0x1084, each under that mask: eight instructions for
eight weights, none wasted on signs.

tile16_e5m2 is for products of a warpgroup with E5M2 (device/digits.cuh): MXFP4 only, chunks of the same size with their
scales where they were, and another order inside the 512 bytes of codes. Words are [lane][group][r]; byte j of a word
holds the codes of columns 4 t + j (bits 7, 3 to 1: where E5M2 has sign, lowest exponent bits and highest mantissa bit)
and 16 + 4 t + j of the group (bits 0, 6 to 4: the same, turned by three). Four tiles (a quad) are multiplied together,
six chunks of each at a time (an atom), so chunks follow each other as [quad][atom][tile of the quad][chunk of the
atom]; the last quad may have fewer tiles, the last atom fewer chunks. `data` has the shape of tile16's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from halfbyte.errors import FormatError
from halfbyte.formats.blocks import check_data, no_scales, pad_matrix, slices
from halfbyte.formats.tensor import GEOMETRY, MXTensor

ROWS, WIDTH = 16, 64
QUAD, ATOM = 4, 6  # of tile16_e5m2: tiles that lie together, chunks of each (shape.cuh, struct Quad)
CHUNK_BYTES = {"mxfp4": 544, "q8": 1088, "bf16": 2048}


def tile_shape(n: int, k: int, format: str) -> tuple[int, int, int]:
    """Shape of `data` for a matrix [n, k]."""
    return -(-n // ROWS), -(-k // WIDTH), CHUNK_BYTES[format]


def pack(t: MXTensor) -> MXTensor:
    """A plain mxfp4 or q8 tensor in this layout."""
    return _pack(t, "tile16", 1, _mxfp4_chunks if t.format == "mxfp4" else _q8_chunks)


def pack_e5m2(t: MXTensor) -> MXTensor:
    """A plain mxfp4 tensor in the layout tile16_e5m2."""
    return _pack(t, "tile16_e5m2", QUAD, _e5m2_chunks)


def _parts(tiles: int, together: int, chunks: int, device: torch.device) -> Iterator[slice]:
    """Slices of tiles that fit the work at a time; so many stay together."""
    for part in slices(-(-tiles // together), together * ROWS * chunks * WIDTH, device):
        yield slice(part.start * together, min(tiles, part.stop * together))


def _pack(t: MXTensor, layout: str, together: int, make: Callable[[Tensor, Tensor, int, int], Tensor]) -> MXTensor:
    *lead, n, k = _matrix(t)
    tiles, chunks, size = tile_shape(n, k, t.format)
    stack = math.prod(lead)
    out = torch.empty((stack, tiles, chunks, size), dtype=torch.uint8, device=t.device)
    data, scales = t.data.reshape(stack, n, t.data.shape[-1]), t.scales.reshape(stack, n, t.scales.shape[-1])
    for e in range(stack):
        for part in _parts(tiles, together, chunks, t.device):
            rows = slice(part.start * ROWS, part.stop * ROWS)
            count = rows.stop - rows.start
            codes = pad_matrix(data[e, rows], count, chunks * WIDTH * GEOMETRY[t.format].element_bits // 8)
            scale = pad_matrix(scales[e, rows], count, chunks * 2)
            out[e, part] = make(codes, scale, part.stop - part.start, chunks)
    return replace(t, data=out.view(*lead, tiles, chunks, size), scales=no_scales(out), layout=layout)


def unpack(t: MXTensor) -> MXTensor:
    """The plain tensor again, equal to the last byte."""
    return _unpack(t, 1, _mxfp4_rows if t.format == "mxfp4" else _q8_rows)


def unpack_e5m2(t: MXTensor) -> MXTensor:
    """The inverse of `pack_e5m2`."""
    return _unpack(t, QUAD, _e5m2_rows)


def _unpack(t: MXTensor, together: int, take: Callable[[Tensor, int, int], tuple[Tensor, Tensor]]) -> MXTensor:
    *lead, n, k = _matrix(t)
    tiles, chunks, size = tile_shape(n, k, t.format)
    check_data(t, (*lead, tiles, chunks, size))
    geometry = GEOMETRY[t.format]
    groups = geometry.padded(k) // 32
    flat = t.data.reshape(math.prod(lead), tiles, chunks, size)
    data = torch.empty((flat.shape[0], n, groups * geometry.group_bytes), dtype=geometry.data_dtype, device=t.device)
    scales = torch.empty((flat.shape[0], n, groups), dtype=geometry.scale_dtype, device=t.device)
    for e in range(flat.shape[0]):
        for part in _parts(tiles, together, chunks, t.device):
            codes, scale = take(flat[e, part].contiguous(), part.stop - part.start, chunks)
            rows = slice(part.start * ROWS, min(n, part.stop * ROWS))
            count = rows.stop - rows.start
            data[e, rows] = codes[:count, : data.shape[-1]]
            scales[e, rows] = scale[:count, :groups]
    data, scales = data.view(*lead, n, data.shape[-1]), scales.view(*lead, n, groups)
    return replace(t, data=data, scales=scales, layout="plain")


def pack_dense(w: Tensor) -> Tensor:
    """A bf16 matrix [..., n, k] as uint8 [..., tiles, chunks, 2048]."""
    if w.dtype != torch.bfloat16 or w.ndim < 2:
        raise FormatError(f"the layout 'tile16' holds bf16 matrices, not {w.dtype} of shape {tuple(w.shape)}")
    *lead, n, k = w.shape
    tiles, chunks, size = tile_shape(n, k, "bf16")
    stack = math.prod(lead)
    out = torch.empty((stack, tiles, chunks, size), dtype=torch.uint8, device=w.device)
    flat = w.reshape(stack, n, k)
    for e in range(stack):
        for part in slices(tiles, ROWS * chunks * WIDTH, w.device):
            first, last = part.start, part.stop
            x = pad_matrix(flat[e, first * ROWS : last * ROWS], (last - first) * ROWS, chunks * WIDTH).view(torch.int16)
            #                 tile, r, g, chunk, i / 2, t, i % 2, p, e
            x = x.view(last - first, 2, 8, chunks, 2, 4, 2, 2, 2).permute(0, 3, 4, 6, 2, 5, 7, 1, 8)
            out[e, first:last] = x.reshape(last - first, chunks, size // 2).view(torch.uint8)
    return out.view(*lead, tiles, chunks, size)


def unpack_dense(data: Tensor, n: int, k: int) -> Tensor:
    """The inverse of `pack_dense`."""
    *lead, tiles, chunks, _ = data.shape
    x = data.contiguous().view(torch.int16).view(-1, tiles, chunks, 2, 2, 8, 4, 2, 2, 2)
    x = x.permute(0, 1, 8, 5, 2, 3, 6, 4, 7, 9).reshape(*lead, tiles * ROWS, chunks * WIDTH)
    return x[..., :n, :k].contiguous().view(torch.bfloat16)


# ---- mxfp4 -----------------------------------------------------------------------------------------------------------


def _mxfp4_chunks(codes: Tensor, scales: Tensor, tiles: int, chunks: int) -> Tensor:
    """codes uint8 [tiles * 16, chunks * 32], scales uint8 [tiles * 16, chunks * 2] -> [tiles, chunks, 544]."""
    #                  tile, r, g, chunk, i / 2, t, i % 2, p
    c = codes.view(tiles, 2, 8, chunks, 2, 4, 2, 2).permute(0, 3, 2, 5, 4, 6, 7, 1)  # tile chunk g t i/2 i%2 p r
    pair = c.to(torch.int64)
    pair = (pair & 15) | ((pair >> 4) << 16)
    a = ((pair & 0x00070007) << 6) | ((pair & 0x00080008) << 12)
    word = a[..., 0, 0] | _rotate_left(a[..., 0, 1], 6) | _rotate_left(a[..., 1, 0], 3)
    last = pair[..., 1, 1]
    word |= ((last & 0x00010001) << 4) | ((last & 0x00060006) >> 1) | (last & 0x00080008)
    words = _as_int32(word).view(torch.uint8).view(tiles, chunks, 512)
    return torch.cat((words, _scale_bytes(scales, tiles, chunks)), -1)


def _scale_bytes(scales: Tensor, tiles: int, chunks: int) -> Tensor:
    return scales.view(tiles, 2, 8, chunks, 2).permute(0, 3, 2, 4, 1).reshape(tiles, chunks, 32)


def _scale_rows(data: Tensor, tiles: int, chunks: int) -> Tensor:
    scale = data[..., 512:].reshape(tiles, chunks, 8, 2, 2).permute(0, 4, 2, 1, 3)
    return scale.reshape(tiles * ROWS, chunks * 2)


def _mxfp4_rows(data: Tensor, tiles: int, chunks: int) -> tuple[Tensor, Tensor]:
    word = data[..., :512].contiguous().view(torch.int32).view(tiles, chunks, 8, 4, 2, 2).to(torch.int64) & 0xFFFFFFFF
    pairs = []
    for turn in (0, 6, 3):
        a = _rotate_left(word, (32 - turn) % 32)
        pairs.append(((a >> 6) & 0x00070007) | ((a >> 12) & 0x00080008))
    pairs.append(((word >> 4) & 0x00010001) | ((word << 1) & 0x00060006) | (word & 0x00080008))
    pair = torch.stack(pairs, -1).view(tiles, chunks, 8, 4, 2, 2, 2, 2)  # tile chunk g t i/2 i%2 p r
    byte = ((pair & 15) | ((pair >> 12) & 0xF0)).to(torch.uint8)
    codes = byte.permute(0, 7, 2, 1, 4, 3, 5, 6).reshape(tiles * ROWS, chunks * 32)
    return codes, _scale_rows(data, tiles, chunks)


def _e5m2_chunks(codes: Tensor, scales: Tensor, tiles: int, chunks: int) -> Tensor:
    """codes uint8 [tiles * 16, chunks * 32], scales uint8 [tiles * 16, chunks * 2] -> [tiles, chunks, 544]."""
    code = torch.stack((codes & 15, codes >> 4), -1)
    #                tile, r, g, chunk, group, half, t, byte -> tile, chunk, g, t, group, r, half, byte
    code = code.view(tiles, 2, 8, chunks, 2, 2, 4, 4).permute(0, 3, 2, 6, 4, 1, 5, 7)
    first, second = code[..., 0, :], code[..., 1, :]
    mine = (first & 8) << 4 | (first & 7) << 1 | (second & 8) >> 3 | (second & 7) << 4
    data = torch.cat((mine.reshape(tiles, chunks, 512), _scale_bytes(scales, tiles, chunks)), -1)
    order = _order_in_quads(tiles, chunks).to(data.device)
    return data.view(tiles * chunks, data.shape[-1])[order].view(data.shape)


def _e5m2_rows(data: Tensor, tiles: int, chunks: int) -> tuple[Tensor, Tensor]:
    order = torch.argsort(_order_in_quads(tiles, chunks)).to(data.device)
    data = data.view(tiles * chunks, data.shape[-1])[order].view(data.shape)
    byte = data[..., :512].reshape(tiles, chunks, 8, 4, 2, 2, 4)  # tile chunk g t group r byte
    first = byte >> 4 & 8 | byte >> 1 & 7
    second = byte << 3 & 8 | byte >> 4 & 7
    code = torch.stack((first, second), -2).permute(0, 5, 2, 1, 4, 6, 3, 7).reshape(tiles * ROWS, chunks * 32, 2)
    return code[..., 0] | code[..., 1] << 4, _scale_rows(data, tiles, chunks)


def _order_in_quads(tiles: int, chunks: int) -> Tensor:
    """Where among the chunks of these tiles, tile by tile, each one of tile16_e5m2 comes from."""
    number = torch.arange(tiles * chunks).view(tiles, chunks)
    quads, atoms = (number[i : i + QUAD] for i in range(0, tiles, QUAD)), range(0, chunks, ATOM)
    parts = [quad[:, i : i + ATOM].reshape(-1) for quad in quads for i in atoms]
    return torch.cat(parts) if parts else number.view(-1)


def scales_of(data: Tensor) -> Tensor:
    """A view of the scales of MXFP4 chunks: [..., g, group, r]."""
    return data[..., 512:].view(*data.shape[:-1], 8, 2, 2)


def groups_of_zeros(data: Tensor) -> Tensor:
    """Which groups of MXFP4 chunks hold nothing but zeros, so that no scale matters to them: [..., g, group, r]."""
    words = data[..., :512].contiguous().view(torch.int32).view(*data.shape[:-1], 8, 4, 2, 2)  # g t i/2 i%2
    magnitudes = (0x0FC00FC0, 0x70137013)  # of the codes of rows g, and g + 8
    return torch.stack([(words & m).eq(0).all(-1).all(-2) for m in magnitudes], -1)


def _rotate_left(v: Tensor, n: int) -> Tensor:
    return ((v << n) | (v >> (32 - n))) & 0xFFFFFFFF if n else v


def _as_int32(v: Tensor) -> Tensor:
    return torch.where(v >= 1 << 31, v - (1 << 32), v).to(torch.int32).contiguous()


# ---- q8 --------------------------------------------------------------------------------------------------------------


def _q8_chunks(codes: Tensor, scales: Tensor, tiles: int, chunks: int) -> Tensor:
    """codes int8 [tiles * 16, chunks * 64], scales float16 [tiles * 16, chunks * 2] -> [tiles, chunks, 1088]."""
    #              tile, r, g, chunk, group, t, i % 2, p, e
    c = codes.view(tiles, 2, 8, chunks, 2, 4, 2, 2, 2).permute(0, 3, 4, 2, 5, 6, 7, 8, 1)
    elements = c.contiguous().view(torch.uint8).view(tiles, chunks, 1024)
    scale = scales.view(tiles, 2, 8, chunks, 2).permute(0, 3, 2, 4, 1).contiguous().view(torch.uint8)
    return torch.cat((elements, scale.view(tiles, chunks, 64)), -1)


def _q8_rows(data: Tensor, tiles: int, chunks: int) -> tuple[Tensor, Tensor]:
    elements = data[..., :1024].contiguous().view(torch.int8).view(tiles, chunks, 2, 8, 4, 2, 2, 2, 2)
    codes = elements.permute(0, 8, 3, 1, 2, 4, 5, 6, 7).reshape(tiles * ROWS, chunks * WIDTH)
    scale = data[..., 1024:].contiguous().view(torch.float16).view(tiles, chunks, 8, 2, 2).permute(0, 4, 2, 1, 3)
    return codes, scale.reshape(tiles * ROWS, chunks * 2)


# ---- shared ----------------------------------------------------------------------------------------------------------


def _matrix(t: MXTensor) -> tuple[int, ...]:
    if len(t.shape) < 2:
        raise FormatError(f"the layout 'tile16' holds matrices or stacks of them, not a tensor of shape {t.shape}")
    return t.shape
