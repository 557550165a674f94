"""Walks big tensors group by group in bounded memory; the only file that knows about chunks and about padding K.

A weight of a gigabyte is quantised and dequantised through temporaries of a few megabytes. A K that is not a multiple
of the group is padded with zeros up to the next group; the logical shape is kept and dequantising crops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from halfbyte.errors import FormatError
from halfbyte.formats.tensor import GEOMETRY, FormatName, MXTensor

Quantizer = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
Dequantizer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def chunk_elements(device: torch.device) -> int:
    """Elements worked on at a time: about a cache's worth on a CPU, enough to fill a GPU."""
    return 1 << (24 if device.type == "cuda" else 20)


def check_input(x: torch.Tensor, name: str) -> None:
    if not x.is_floating_point() or x.ndim == 0:
        raise FormatError(
            f"{name} quantises floating-point tensors with at least one dimension, not {x.dtype} of "
            f"shape {tuple(x.shape)}"
        )


def float_groups(x: torch.Tensor, group: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields (index of the first group, float32 groups [n, group]); the last group of a row is padded with zeros."""
    k = x.shape[-1]
    if x.numel() == 0:
        return
    rows = x.reshape(-1, k) if k % group else x.reshape(-1, group)
    padding = -k % group
    per_row = (rows.shape[1] + padding) // group
    step = max(1, chunk_elements(x.device) // rows.shape[1])
    for start in range(0, rows.shape[0], step):
        chunk = rows[start : start + step].to(torch.float32)
        if padding:
            chunk = torch.nn.functional.pad(chunk, (0, padding))
        yield start * per_row, chunk.reshape(-1, group)


def quantize_plain(x: torch.Tensor, name: FormatName, quantizer: Quantizer) -> MXTensor:
    """A plain MXTensor; `quantizer` maps float32 groups [n, group] to (bytes [n, group_bytes], scales [n])."""
    geometry = GEOMETRY[name]
    *lead, k = x.shape
    per_row = geometry.padded(k) // geometry.group
    count = math.prod(lead) * per_row
    data = torch.empty((count, geometry.group_bytes), dtype=geometry.data_dtype, device=x.device)
    scales = torch.empty(count, dtype=geometry.scale_dtype, device=x.device)
    for first, groups in float_groups(x, geometry.group):
        data[first : first + len(groups)], scales[first : first + len(groups)] = quantizer(groups)
    data, scales = data.view(*lead, per_row * geometry.group_bytes), scales.view(*lead, per_row)
    return MXTensor(data, scales, tuple(x.shape), name)


def dequantize_plain(t: MXTensor, dtype: torch.dtype, dequantizer: Dequantizer) -> torch.Tensor:
    """The inverse: `dequantizer` maps (bytes [n, group_bytes], scales [n]) to float32 groups [n, group]."""
    assert t.layout == "plain"
    geometry = GEOMETRY[t.format]
    k = t.shape[-1]
    out = torch.empty(t.shape, dtype=dtype, device=t.device)
    if out.numel() == 0:
        return out
    cropped = k % geometry.group != 0
    rows = out.view(-1, k) if cropped else out.view(-1, geometry.group)
    per_row = geometry.padded(k) // geometry.group if cropped else 1
    data, scales = t.data.reshape(-1, geometry.group_bytes), t.scales.reshape(-1)
    step = max(1, chunk_elements(t.device) // rows.shape[1])
    for start in range(0, rows.shape[0], step):
        part = slice(start * per_row, (start + step) * per_row)
        values = dequantizer(data[part], scales[part])
        rows[start : start + step] = values.view(-1, per_row * geometry.group)[:, : rows.shape[1]]
    return out


# For layouts --------------------------------------------------------------------------------------------------------


def slices(count: int, elements_each: int, device: torch.device) -> list[slice]:
    """Slices of `count` items with `elements_each` elements, small enough to keep temporaries small."""
    if elements_each == 0:
        return []
    step = max(1, chunk_elements(device) // elements_each)
    return [slice(start, min(count, start + step)) for start in range(0, count, step)]


def pad_matrix(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Zeros below and to the right, up to that size."""
    return F.pad(x, (0, columns - x.shape[1], 0, rows - x.shape[0])).contiguous()


def no_scales(data: torch.Tensor) -> torch.Tensor:
    """The `scales` of a layout that keeps them inside `data`."""
    return torch.empty(0, dtype=torch.uint8, device=data.device)


def check_data(t: MXTensor, shape: tuple[int, ...]) -> None:
    if tuple(t.data.shape) != shape or t.data.dtype != torch.uint8:
        raise FormatError(
            f"the data of a {t.format} tensor of shape {t.shape} in layout {t.layout!r} must be uint8 of shape "
            f"{shape}, not {t.data.dtype} of shape {tuple(t.data.shape)}"
        )
