"""MXFP4 (OCP MX v1.0): groups of 32 E2M1 elements under one UE8M0 scale, 4.25 bits per weight.

Quantising defines every input (see `e8m0.py` for zeros, subnormals, NaN and infinities); dequantising is exact in
float32 except that values of 2^128 and above, which only scales from 2^126 up can make, read as infinity.

GGUF's quantiser differs from this one in four ways, each shown in a test: ties go towards zero instead of to even; zero
never carries a sign; it takes the exponent from a rounded float32 logarithm, which is one too high just below some
powers of two; and it does not define groups whose exponent would be under -127. Its dequantiser reads scale 255 as
2^128 where OCP, and we, read NaN, and drops the sign of -0; all else is bit-identical.
"""

from __future__ import annotations

import torch

from halfbyte.errors import FormatError
from halfbyte.formats import blocks, e2m1, e8m0, layouts
from halfbyte.formats.tensor import MXTensor

GROUP = 32
EMAX = e2m1.EMAX
BITS_PER_WEIGHT = 4 + 8 / GROUP
ELEMENT = e8m0.Element(e2m1.encode, e2m1.decode, EMAX)


def quantize(x: torch.Tensor, *, rule: str = "ocp") -> MXTensor:
    """`x` in MXFP4, layout plain; `rule` is `ocp` or `mse`."""
    blocks.check_input(x, "mxfp4")

    def groups_to_bytes(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales = e8m0.quantize_groups(groups, ELEMENT, rule)
        return e2m1.pack(codes), scales

    return blocks.quantize_plain(x, "mxfp4", groups_to_bytes)


def dequantize(t: MXTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The numbers of `t`, from any layout, rounded to `dtype`."""
    if t.format != "mxfp4":
        raise FormatError(f"this tensor is {t.format}, not mxfp4: the two are never mixed")

    def bytes_to_groups(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return e2m1.decode_packed(data).mul_(e8m0.decode(scales).unsqueeze(-1))

    return blocks.dequantize_plain(layouts.convert(t, "plain"), dtype, bytes_to_groups)
