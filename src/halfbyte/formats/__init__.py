"""Bits to numbers and back: the number formats, and where their bytes lie.

`quantize` and `dequantize` dispatch by format name; each format has a file of its own with its rules and special
values. Nothing here knows an operation, a model or a kernel, and nothing converts one format into another behind a
caller's back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halfbyte.errors import FormatError
from halfbyte.formats import mxfp4, mxfp8, q8
from halfbyte.formats.dense import DenseTiles
from halfbyte.formats.layouts import LAYOUTS, convert
from halfbyte.formats.tensor import GEOMETRY, FormatName, MXTensor

__all__ = [
    "FORMATS",
    "LAYOUTS",
    "DenseTiles",
    "FormatName",
    "FormatSpec",
    "MXTensor",
    "bytes_for",
    "convert",
    "dequantize",
    "format_spec",
    "quantize",
    "quantize_weight",
]


@dataclass(frozen=True)
class FormatSpec:
    """One number format: its group, its size with scales, its scale rules and the functions that make and read it."""

    name: FormatName
    group: int
    bits_per_weight: float
    rules: tuple[str, ...]
    quantize: Callable[..., MXTensor]
    dequantize: Callable[[MXTensor, torch.dtype], torch.Tensor]


def _spec(name: FormatName, module: Any, rules: Sequence[str]) -> FormatSpec:
    return FormatSpec(name, module.GROUP, module.BITS_PER_WEIGHT, tuple(rules), module.quantize, module.dequantize)


FORMATS: dict[str, FormatSpec] = {
    "mxfp4": _spec("mxfp4", mxfp4, ("ocp", "mse")),
    "mxfp8": _spec("mxfp8", mxfp8, ("ocp", "mse")),
    "q8": _spec("q8", q8, q8.RULES),
}


def format_spec(name: str) -> FormatSpec:
    if name not in FORMATS:
        raise FormatError(f"unknown number format {name!r}: use one of {', '.join(FORMATS)}")
    return FORMATS[name]


def quantize(x: torch.Tensor, format: str, rule: str = "ocp") -> MXTensor:
    """`x` in the named format, layout plain."""
    return format_spec(format).quantize(x, rule=rule)


WEIGHT_RULES = {"mxfp4": "mse", "q8": "rounded"}  # a weight is quantised once and read forever: take the better rule


def quantize_weight(x: torch.Tensor, format: str) -> MXTensor:
    """A weight in the named format, as `--layers` quantises it."""
    return quantize(x, format, WEIGHT_RULES.get(format, "ocp"))


def dequantize(t: MXTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The numbers of `t`, from any layout, rounded to `dtype`."""
    return format_spec(t.format).dequantize(t, dtype)


def bytes_for(shape: Sequence[int], format: str) -> int:
    """Bytes of a plain tensor of that logical shape, scales and the padding of K included."""
    format_spec(format)
    if not shape:
        raise FormatError(f"a {format} tensor needs at least one dimension to group along")
    geometry = GEOMETRY[format]
    groups = math.prod(shape[:-1]) * (geometry.padded(shape[-1]) // geometry.group)
    return groups * (geometry.group_bytes + geometry.scale_dtype.itemsize)
