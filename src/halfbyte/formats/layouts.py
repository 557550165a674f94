"""Where the bytes of a block-scaled tensor lie. The only repacker: nothing else in the house moves weight bytes about.

Every layout is lossless: `convert` goes from any layout to any other through "plain" and changes no code and no scale.
It never changes a number format, and a layout that cannot hold a format refuses it. Work goes tile by tile, so a
gigabyte of experts is repacked with a few megabytes in addition to source and result.

| layout       | formats    | `data`                                              | `scales`       |
|--------------|------------|-----------------------------------------------------|----------------|
| `plain`      | all        | [..., N, K/2] or [..., N, K]: the checkpoint's      | [..., N, K/G]  |
| `gguf`       | mxfp4, q8  | [..., N, blocks * 17 or 34]: GGUF's blocks          | empty          |
| `tile16`     | mxfp4, q8  | [..., ceil(N/16), ceil(K/64), chunk]: `tile16.py`   | empty          |
| `tile16_e5m2` | mxfp4     | as `tile16`, codes and chunks in another order      | empty          |
| `rows16`     | mxfp4, q8  | [..., ceil(N/16), tile]: `rows16.py`                | empty          |
| `w4a8_split` | mxfp4      | [..., N, K/2], nibbles of a 128-wide tile split     | [..., N, K/32] |

To add one: write `pack` (plain to it) and `unpack` (back), both on whole MXTensors, and add a `Layout` to `LAYOUTS`;
`tests/formats/test_layouts.py` picks it up and checks that it is lossless. Leading dimensions (experts) must be kept,
so that `MXTensor.select` works in every layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from halfbyte.errors import FormatError
from halfbyte.formats import rows16, tile16
from halfbyte.formats.blocks import check_data, no_scales, pad_matrix, slices
from halfbyte.formats.tensor import GEOMETRY, FormatName, MXTensor

Repack = Callable[[MXTensor], MXTensor]


@dataclass(frozen=True)
class Layout:
    """`pack` takes a plain tensor of one of `formats`; `unpack` gives a plain tensor back, equal to the last byte."""

    name: str
    formats: tuple[FormatName, ...]
    pack: Repack
    unpack: Repack


def convert(t: MXTensor, layout: str) -> MXTensor:
    """`t` in another layout; `t` itself where it is already there."""
    source, target = _layout(t.layout, t.format), _layout(layout, t.format)
    if source is target:
        return t
    return target.pack(source.unpack(t))


def _layout(name: str, format: FormatName) -> Layout:
    if name not in LAYOUTS:
        raise FormatError(f"unknown weight layout {name!r}: use one of {', '.join(LAYOUTS)}")
    layout = LAYOUTS[name]
    if format not in layout.formats:
        raise FormatError(f"the layout {name!r} holds {' or '.join(layout.formats)}, not {format}")
    return layout


# The checkpoint's own shapes ---------------------------------------------------------------------------------------


def from_checkpoint(blocks: torch.Tensor, scales: torch.Tensor) -> MXTensor:
    """OpenAI's `*_blocks` uint8 [..., N, K/32, 16] and `*_scales` [..., N, K/32] as a plain tensor, by view."""
    if blocks.ndim < 2 or blocks.shape[-1] != 16 or blocks.shape[:-1] != scales.shape:
        raise FormatError(
            f"MXFP4 blocks must be [..., K/32, 16] with scales [..., K/32], not {tuple(blocks.shape)} with "
            f"{tuple(scales.shape)}"
        )
    return MXTensor(blocks.flatten(-2), scales, (*scales.shape[:-1], scales.shape[-1] * 32), "mxfp4")


def to_checkpoint(t: MXTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `from_checkpoint`, by view from "plain"; K must be whole groups, as a checkpoint has no other."""
    if t.format != "mxfp4":
        raise FormatError(f"the checkpoint's blocks and scales hold mxfp4, not {t.format}")
    if t.shape[-1] % 32:
        raise FormatError(f"a checkpoint's MXFP4 rows are whole groups of 32, not {t.shape[-1]} elements long")
    plain = convert(t, "plain")
    return plain.data.view(*plain.scales.shape, 16), plain.scales


def deinterleave(t: MXTensor) -> tuple[MXTensor, MXTensor]:
    """(gate, up) of a plain tensor whose rows alternate gate, up, gate, up, as gpt-oss checkpoints have them."""
    _check_rows(t)
    if t.shape[-2] % 2:
        raise FormatError(f"interleaved gate and up rows come in pairs, not {t.shape[-2]} of them")
    shape = (*t.shape[:-2], t.shape[-2] // 2, t.shape[-1])
    gate, up = (
        replace(t, data=t.data[..., i::2, :].contiguous(), scales=t.scales[..., i::2, :].contiguous(), shape=shape)
        for i in (0, 1)
    )
    return gate, up


def interleave(gate: MXTensor, up: MXTensor) -> MXTensor:
    """The inverse: rows gate, up, gate, up."""
    _check_rows(gate)
    _check_rows(up)
    if gate.format != up.format or gate.shape != up.shape:
        raise FormatError(
            f"gate and up must agree in format and shape, not {gate.format} {gate.shape} with {up.format} {up.shape}"
        )
    return replace(
        gate,
        data=torch.stack((gate.data, up.data), dim=-2).flatten(-3, -2),
        scales=torch.stack((gate.scales, up.scales), dim=-2).flatten(-3, -2),
        shape=(*gate.shape[:-2], gate.shape[-2] * 2, gate.shape[-1]),
    )


def _check_rows(t: MXTensor) -> None:
    if t.layout != "plain":
        raise FormatError(f"gate and up rows are taken apart in the layout 'plain', not {t.layout!r}: convert first")
    if len(t.shape) < 2:
        raise FormatError(f"gate and up rows need a matrix, not a tensor of shape {t.shape}")


# gguf: blocks of scale and elements, as GGUF files hold them --------------------------------------------------------
#
# MXFP4: 1 byte e, then 16 bytes of which byte j holds element j (low nibble) and j + 16 (high). Q8_0: float16 d, then
# 32 int8. ggml reads e as 2^(e - 127) like everyone, except 255, which it does not treat as NaN; we do.

GGUF_BLOCK_BYTES: dict[str, int] = {"mxfp4": 17, "q8": 34}


def from_gguf(data: torch.Tensor, format: FormatName) -> MXTensor:
    """The raw bytes of a GGUF tensor, uint8 [..., blocks * 17] (mxfp4) or [..., blocks * 34] (q8), in layout "gguf"."""
    _layout("gguf", format)
    size = GGUF_BLOCK_BYTES[format]
    if data.dtype != torch.uint8 or data.ndim == 0 or data.shape[-1] % size:
        raise FormatError(
            f"GGUF {format} rows are uint8 and whole blocks of {size} bytes, not {data.dtype} of shape "
            f"{tuple(data.shape)}"
        )
    shape = (*data.shape[:-1], data.shape[-1] // size * 32)
    return MXTensor(data, no_scales(data), shape, format, "gguf")


def _gguf_pack(t: MXTensor) -> MXTensor:
    geometry, size = GEOMETRY[t.format], GGUF_BLOCK_BYTES[t.format]
    data = t.data.reshape(-1, geometry.group_bytes).view(torch.uint8)
    scales = t.scales.reshape(-1, 1).view(torch.uint8)
    out = torch.empty((data.shape[0], size), dtype=torch.uint8, device=t.device)
    width = scales.shape[1]
    for part in slices(data.shape[0], 32, t.device):
        elements = data[part]
        if t.format == "mxfp4":
            low, high = elements & 15, elements >> 4  # elements 0, 2, 4 … and 1, 3, 5 …
            codes = torch.stack((low, high), -1).view(-1, 2, 16)
            elements = codes[:, 0] | (codes[:, 1] << 4)
        out[part, :width] = scales[part]
        out[part, width:] = elements
    lead = t.shape[:-1]
    return replace(t, data=out.view(*lead, t.scales.shape[-1] * size), scales=no_scales(out), layout="gguf")


def _gguf_unpack(t: MXTensor) -> MXTensor:
    geometry, size = GEOMETRY[t.format], GGUF_BLOCK_BYTES[t.format]
    *lead, k = t.shape
    blocks = geometry.padded(k) // geometry.group
    check_data(t, (*lead, blocks * size))
    flat = t.data.reshape(-1, size)
    width = geometry.scale_dtype.itemsize
    data = torch.empty((flat.shape[0], geometry.group_bytes), dtype=torch.uint8, device=t.device)
    for part in slices(flat.shape[0], 32, t.device):
        elements = flat[part, width:]
        if t.format == "mxfp4":  # two bytes hold elements 2i, 2i + 1 in their low nibbles, 16 more in the high ones
            pair = elements.clone(memory_format=torch.contiguous_format).view(torch.int16)
            data[part, :8] = (pair & 15) | ((pair >> 4) & 0xF0)
            data[part, 8:] = ((pair >> 4) & 15) | ((pair >> 8) & 0xF0)
        else:
            data[part] = elements
    scales = _fresh(flat[:, :width]).view(geometry.scale_dtype)
    return replace(
        t,
        data=data.view(geometry.data_dtype).view(*lead, blocks * geometry.group_bytes),
        scales=scales.view(*lead, blocks),
        layout="plain",
    )


# w4a8_split: nibbles apart by half a K tile, for e4m3 x e2m1 on SM12x -----------------------------------------------
#
# In each K tile of 128, byte j holds k = j (low nibble) and k = 64 + j (high), so that a kernel that widens low and
# high nibbles to two E4M3 tiles gets two contiguous runs of K. Scales keep their order. K is padded to whole tiles in
# both, with code 0 and scale 0, so that a kernel needs no mask along K on the weights.

W4A8_TILE = 128


def _split_pack(t: MXTensor) -> MXTensor:
    lead = t.shape[:-1]
    tiles = -(-t.shape[-1] // W4A8_TILE)
    rows = math.prod(lead)
    data, scales = t.data.reshape(rows, t.data.shape[-1]), t.scales.reshape(rows, t.scales.shape[-1])
    out = torch.empty((data.shape[0], tiles * 64), dtype=torch.uint8, device=t.device)
    for part in slices(data.shape[0], tiles * W4A8_TILE, t.device):
        row = pad_matrix(data[part], part.stop - part.start, tiles * 64).view(-1, tiles, 64)
        codes = torch.stack((row & 15, row >> 4), -1).view(-1, tiles, 2, 64)
        out[part] = (codes[:, :, 0] | (codes[:, :, 1] << 4)).view(-1, tiles * 64)
    scales = pad_matrix(scales, rows, tiles * 4).view(*lead, tiles * 4)
    return replace(t, data=out.view(*lead, tiles * 64), scales=scales, layout="w4a8_split")


def _split_unpack(t: MXTensor) -> MXTensor:
    *lead, k = t.shape
    tiles, groups = -(-k // W4A8_TILE), GEOMETRY[t.format].padded(k) // 32
    check_data(t, (*lead, tiles * 64))
    flat = t.data.reshape(math.prod(lead), tiles * 64)
    data = torch.empty((flat.shape[0], groups * 16), dtype=torch.uint8, device=t.device)
    for part in slices(flat.shape[0], tiles * W4A8_TILE, t.device):
        row = flat[part].view(-1, tiles, 64)
        codes = torch.cat((row & 15, row >> 4), -1).view(-1, tiles, 64, 2)
        data[part] = (codes[..., 0] | (codes[..., 1] << 4)).view(-1, tiles * 64)[:, : groups * 16]
    scales = t.scales[..., :groups].contiguous()
    return replace(t, data=data.view(*lead, groups * 16), scales=scales, layout="plain")


# Shared by the layouts above ---------------------------------------------------------------------------------------


def _fresh(x: torch.Tensor) -> torch.Tensor:
    """A contiguous, aligned copy of `x`, so that its bytes can be viewed as words."""
    return x.clone(memory_format=torch.contiguous_format).view(-1)


def _same(t: MXTensor) -> MXTensor:
    return t


LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("plain", ("mxfp4", "mxfp8", "q8"), _same, _same),
        Layout("gguf", ("mxfp4", "q8"), _gguf_pack, _gguf_unpack),
        Layout("tile16", ("mxfp4", "q8"), tile16.pack, tile16.unpack),
        Layout("tile16_e5m2", ("mxfp4",), tile16.pack_e5m2, tile16.unpack_e5m2),
        Layout("rows16", ("mxfp4", "q8"), rows16.pack, rows16.unpack),
        Layout("w4a8_split", ("mxfp4",), _split_pack, _split_unpack),
    )
}
