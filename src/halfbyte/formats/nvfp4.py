"""NVFP4: groups of 16 E2M1 elements, an E4M3 scale per group and one float32 scale per tensor, 4.5 bits per weight.

Not MXFP4: other group, other scale, one more level. The two share only their element, and nothing here reads the other.

value = element * group scale * tensor scale; the first product is exact, the second rounds once. The tensor scale is
(largest finite magnitude) / (448 * 6), at least 2^-126, and 1 for a tensor of zeros. Rules for the group scale:

- `ocp` (the name of the default rule for every format; for this one it is NVIDIA's, OCP does not define NVFP4): group
  amax / 6 / tensor scale, rounded to E4M3.
- `mse`: the E4M3 code with the smallest squared error among the eight from two below that one to five above it: five
  steps up bring the largest element from 6 down to 4.

Special groups: all zeros, and groups so small that their scale rounds to zero, take scale 0 and codes 0; a NaN or an
infinity makes the group scale NaN (0x7F) and all codes 0.
"""

from __future__ import annotations

import torch

from halfbyte.errors import FormatError
from halfbyte.formats import blocks, e2m1, e4m3, layouts
from halfbyte.formats.tensor import MXTensor

GROUP = 16
EMAX = e2m1.EMAX
BITS_PER_WEIGHT = 4 + 8 / GROUP
RULES = ("ocp", "mse")
_MSE_STEPS = (1, 2, 3, 4, 5, -1, -2)


def quantize(x: torch.Tensor, *, rule: str = "ocp") -> MXTensor:
    """`x` in NVFP4, layout plain; `rule` is `ocp` or `mse`."""
    blocks.check_input(x, "nvfp4")
    if rule not in RULES:
        raise FormatError(f"unknown scale rule {rule!r}: use one of {', '.join(RULES)}")
    tensor_scale = _tensor_scale(x)

    def groups_to_bytes(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        amax = groups.abs().amax(-1)
        broken = ~torch.isfinite(amax)
        # Divisors are tensors because a GPU divides by a Python number through its reciprocal, one bit off.
        scales = e4m3.encode(amax / torch.full_like(amax, e2m1.MAX) / tensor_scale)
        if rule == "mse":
            scales = _least_error(groups, scales, tensor_scale)
        scales = scales.masked_fill_(broken, e4m3.NAN)
        codes = e2m1.encode(_scaled(groups, scales, tensor_scale))
        return e2m1.pack(codes), scales

    return blocks.quantize_plain(x, "nvfp4", groups_to_bytes, tensor_scale)


def dequantize(t: MXTensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The numbers of `t`, from any layout, rounded to `dtype`."""
    if t.format != "nvfp4" or t.tensor_scale is None:
        raise FormatError(f"this tensor is {t.format}, not nvfp4: the two are never mixed")
    tensor_scale = t.tensor_scale

    def bytes_to_groups(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return e2m1.decode_packed(data).mul_(e4m3.decode(scales).unsqueeze(-1)).mul_(tensor_scale)

    return blocks.dequantize_plain(layouts.convert(t, "plain"), dtype, bytes_to_groups)


def _tensor_scale(x: torch.Tensor) -> torch.Tensor:
    amax = torch.zeros((), dtype=torch.float32, device=x.device)
    for _, groups in blocks.float_groups(x, GROUP):
        magnitude = groups.abs()
        amax = torch.maximum(amax, magnitude.masked_fill_(~torch.isfinite(magnitude), 0).amax())
    scale = (amax / torch.full_like(amax, e4m3.MAX * e2m1.MAX)).clamp(min=2.0**-126)
    return torch.where(amax > 0, scale, torch.ones_like(scale))


def _scaled(groups: torch.Tensor, scales: torch.Tensor, tensor_scale: torch.Tensor) -> torch.Tensor:
    """Groups in units of their scale; zero where the scale is zero or NaN, since nothing can be said in such units."""
    unit = (e4m3.decode(scales) * tensor_scale).unsqueeze(-1)
    return torch.where(unit > 0, groups / unit, torch.zeros_like(groups))


def _least_error(groups: torch.Tensor, base: torch.Tensor, tensor_scale: torch.Tensor) -> torch.Tensor:
    def error(scales: torch.Tensor) -> torch.Tensor:
        value = e2m1.decode(e2m1.encode(_scaled(groups, scales, tensor_scale))) * e4m3.decode(scales).unsqueeze(-1)
        return (groups / tensor_scale - value).square_().sum(-1, dtype=torch.float64)

    best, best_error = base, error(base)
    for step in _MSE_STEPS:
        moved = (base.to(torch.int32) + step).clamp_(0, e4m3.NAN - 1).to(torch.uint8)
        moved_error = error(moved)
        better = moved_error < best_error
        best, best_error = torch.where(better, moved, best), torch.where(better, moved_error, best_error)
    return best
