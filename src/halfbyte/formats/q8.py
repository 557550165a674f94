"""q8: groups of 32 int8 elements under one float16 scale, 8.5 bits per weight; the numbers of GGUF's Q8_0, bit for bit.

The scale is amax / 127. Elements are divided by the scale before it is rounded to float16, and round half away from
zero: that is ggml's order and ggml's rounding, kept so that a file quantised here and one quantised there hold the
same bytes. There is one rule, called `ocp` like every format's default (OCP does not define this format).

Special groups: all zeros give scale 0. A scale under float16's reach rounds to a subnormal or to 0, as in ggml. Where
ggml leaves the result undefined this file does not: with amax so small that 127 / amax is infinite, codes are 0; with
a NaN, an infinity or a scale past float16's largest number (ggml writes an infinite scale), scale is NaN and codes are
0, so that the whole group reads back as NaN.
"""

from __future__ import annotations

import torch

from halfbyte.errors import FormatError
from halfbyte.formats import blocks, layouts
from halfbyte.formats.tensor import MXTensor

GROUP = 32
BITS_PER_WEIGHT = 8 + 16 / GROUP
RULES = ("ocp",)


def quantize(x: torch.Tensor, *, rule: str = "ocp") -> MXTensor:
    """`x` in q8, layout plain; the only rule is `ocp`."""
    blocks.check_input(x, "q8")
    if rule not in RULES:
        raise FormatError(f"q8 has one scale rule, 'ocp', not {rule!r}: its scale is exact enough to need no search")
    return blocks.quantize_plain(x, "q8", _groups_to_bytes)


def dequantize(t: MXTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The numbers of `t`, from any layout, rounded to `dtype`."""
    if t.format != "q8":
        raise FormatError(f"this tensor is {t.format}, not q8: the two are never mixed")

    def bytes_to_groups(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return data.to(torch.float32).mul_(scales.to(torch.float32).unsqueeze(-1))

    return blocks.dequantize_plain(layouts.convert(t, "plain"), dtype, bytes_to_groups)


def _groups_to_bytes(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    amax = groups.abs().amax(-1)
    # The divisor is a tensor because a GPU divides by a Python number through its reciprocal, one bit off.
    scale = amax / torch.full_like(amax, 127.0)
    half = scale.to(torch.float16)
    broken = ~torch.isfinite(half)
    inverse = torch.where(scale > 0, scale.reciprocal(), torch.zeros_like(scale))
    inverse = inverse.masked_fill_(~torch.isfinite(inverse) | broken, 0.0)
    scaled = groups * inverse.unsqueeze(-1)
    magnitude = scaled.abs()
    whole = magnitude.floor()
    whole += (magnitude - whole >= 0.5).to(torch.float32)
    codes = torch.copysign(whole, scaled).masked_fill_(broken.unsqueeze(-1), 0.0).to(torch.int8)
    return codes, half.masked_fill_(broken, float("nan"))
