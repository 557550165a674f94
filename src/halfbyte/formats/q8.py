"""q8: groups of 32 int8 elements under one float16 scale, 8.5 bits per weight; read as GGUF's Q8_0 is, bit for bit.

The scale is amax / 127 in float16, and elements round half away from zero. Two rules differ in the scale that elements
are divided by:

- `ocp`, ggml's order under the name of every format's default (OCP does not define this format): the scale before it
  is rounded. A file quantised here and one quantised by ggml hold the same bytes.
- `rounded`: the scale that is stored, so that codes make up for its rounding, which is large where it is subnormal
  (amax below 7.8e-3). The scale is the next larger float16 where the largest element would not reach its code.

Special groups: all zeros give scale 0. A scale under float16's reach rounds to a subnormal or, by `ocp`, to 0, as in
ggml. Where ggml leaves the result undefined this file does not: with amax so small that 127 / amax is infinite, codes
are 0 by `ocp`; with a NaN, an infinity or a scale past float16's largest number (ggml writes an infinite scale), scale
is NaN and codes are 0, so that the whole group reads back as NaN.
"""

from __future__ import annotations

import torch

from halfbyte.errors import FormatError
from halfbyte.formats import blocks, layouts
from halfbyte.formats.tensor import MXTensor

GROUP = 32
TOO_LARGE = 127.5  # times the scale: rounds to 128, which is no code
BITS_PER_WEIGHT = 8 + 16 / GROUP
RULES = ("ocp", "rounded")


def quantize(x: torch.Tensor, *, rule: str = "ocp") -> MXTensor:
    """`x` in q8, layout plain; `rule` is `ocp` or `rounded`."""
    blocks.check_input(x, "q8")
    if rule not in RULES:
        raise FormatError(f"unknown scale rule {rule!r}: q8 has {', '.join(RULES)}")
    return blocks.quantize_plain(x, "q8", lambda groups: _groups_to_bytes(groups, stored=rule == "rounded"))


def dequantize(t: MXTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The numbers of `t`, from any layout, rounded to `dtype`."""
    if t.format != "q8":
        raise FormatError(f"this tensor is {t.format}, not q8: the two are never mixed")

    def bytes_to_groups(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return data.to(torch.float32).mul_(scales.to(torch.float32).unsqueeze(-1))

    return blocks.dequantize_plain(layouts.convert(t, "plain"), dtype, bytes_to_groups)


def _groups_to_bytes(groups: torch.Tensor, *, stored: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`stored`: divide by the scale as float16 holds it."""
    amax = groups.abs().amax(-1)
    # The divisor is a tensor because a GPU divides by a Python number through its reciprocal, one bit off.
    scale = amax / torch.full_like(amax, 127.0)
    half = scale.to(torch.float16)
    if stored:
        short = (amax > 0) & (amax >= half.to(torch.float32) * TOO_LARGE)
        half = (half.view(torch.int16) + (short & torch.isfinite(half)).to(torch.int16)).view(torch.float16)
        scale = half.to(torch.float32)
    broken = ~torch.isfinite(half)
    inverse = torch.where(scale > 0, scale.reciprocal(), torch.zeros_like(scale))
    inverse = inverse.masked_fill_(~torch.isfinite(inverse) | broken, 0.0)
    scaled = groups * inverse.unsqueeze(-1)
    magnitude = scaled.abs()
    rounded = magnitude.floor()
    rounded += (magnitude - rounded >= 0.5).to(torch.float32)
    rounded.clamp_(max=127.0)  # an inverse that was rounded up may reach 127.5
    codes = torch.copysign(rounded, scaled).masked_fill_(broken.unsqueeze(-1), 0.0).to(torch.int8)
    return codes, half.masked_fill_(broken, float("nan"))
