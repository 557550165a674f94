"""MXFP8 (OCP MX v1.0) with E4M3 elements: groups of 32 under one UE8M0 scale, 8.25 bits per weight.

Scale rules and special groups are those of MXFP4. A NaN makes its whole group NaN here too, although E4M3 could hold it
in place: the meaning of a broken group then does not depend on the element format.
"""

from __future__ import annotations

import torch

from halfbyte.errors import FormatError
from halfbyte.formats import blocks, e4m3, e8m0, layouts
from halfbyte.formats.tensor import MXTensor

GROUP = 32
EMAX = e4m3.EMAX
BITS_PER_WEIGHT = 8 + 8 / GROUP
ELEMENT = e8m0.Element(e4m3.encode, e4m3.decode, EMAX)


def quantize(x: torch.Tensor, *, rule: str = "ocp") -> MXTensor:
    """`x` in MXFP8, layout plain; `rule` is `ocp` or `mse`."""
    blocks.check_input(x, "mxfp8")
    return blocks.quantize_plain(x, "mxfp8", lambda groups: e8m0.quantize_groups(groups, ELEMENT, rule))


def dequantize(t: MXTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The numbers of `t`, from any layout, rounded to `dtype`."""
    if t.format != "mxfp8":
        raise FormatError(f"this tensor is {t.format}, not mxfp8: the two are never mixed")

    def bytes_to_groups(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return e4m3.decode(data).mul_(e8m0.decode(scales).unsqueeze(-1))

    return blocks.dequantize_plain(layouts.convert(t, "plain"), dtype, bytes_to_groups)
