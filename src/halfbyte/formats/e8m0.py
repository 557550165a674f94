"""UE8M0, the shared scale of the OCP MX formats, and the rules that choose it.

A scale byte e means 2^(e - 127); 255 means NaN; there is no zero. 0 is 2^-127, a float32 subnormal, and exact here.

Rules, by name, for a group with largest magnitude `amax` and an element format whose largest exponent is `emax`:

- `ocp`: floor(log2(amax)) - emax, as OCP MX v1.0 has it. Elements between the largest element value and the next power
  of two saturate (MXFP4: amax in (6, 8) times the scale).
- `mse`: of that exponent, the one above and the one below, the one with the smallest sum of squared errors over the
  group; a draw goes to `ocp`'s choice, then to the larger scale.

Special groups, for every rule: all zeros take scale 0; amax under 2^(emax - 127) takes scale 0 as well, and the
elements round where they then fall; a NaN or an infinity anywhere makes the scale 255 and all codes 0, so that the
whole group reads back as NaN: one broken weight must not look like a healthy block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from halfbyte.errors import FormatError

BIAS = 127
NAN = 255


class Element(NamedTuple):
    """An element format, as a scale rule sees it."""

    encode: Callable[[torch.Tensor], torch.Tensor]
    decode: Callable[[torch.Tensor], torch.Tensor]
    emax: int


def encode(exponents: torch.Tensor) -> torch.Tensor:
    """Scale bytes of integer powers of two, saturating at 2^-127 and 2^127."""
    if exponents.is_floating_point():
        raise FormatError("e8m0.encode takes integer exponents, not a floating-point tensor: use a scale rule instead")
    return (exponents.clamp(-BIAS, BIAS) + BIAS).to(torch.uint8)


def decode(scales: torch.Tensor) -> torch.Tensor:
    """Exact float32 values of scale bytes; 255 is NaN."""
    if scales.dtype != torch.uint8:
        raise FormatError(f"UE8M0 scales are uint8, not {scales.dtype}")
    wide = scales.to(torch.int32)
    bits = (wide << 23).masked_fill_(wide == 0, 0x00400000).masked_fill_(wide == NAN, 0x7FC00000)
    return bits.view(torch.float32)


def scale_ocp(groups: torch.Tensor, element: Element) -> torch.Tensor:
    """The `ocp` rule over the last dimension of float32 `groups`."""
    amax = groups.abs().amax(-1)  # amax lets NaN through
    # The exponent field is floor(log2) + 127 for normal numbers and 0 for zeros and subnormals, which lie below the
    # smallest scale for any emax >= 0; for infinities and NaN it is 255. So the rule is one subtraction.
    field = amax.view(torch.int32) >> 23
    scale = (field - element.emax).clamp_(min=0).masked_fill_(field == 255, NAN)
    return scale.to(torch.uint8)


def scale_mse(groups: torch.Tensor, element: Element) -> torch.Tensor:
    """The `mse` rule over the last dimension of float32 `groups`."""
    base = scale_ocp(groups, element).to(torch.int32)
    # In units of the base scale nothing over- or underflows, whatever the group's magnitude.
    unit = groups * _inverse(base).unsqueeze(-1)
    best, best_error = base, _squared_error(unit, element, 0)
    for step in (1, -1):
        error = _squared_error(unit, element, step)
        moved = base + step
        # At the top a larger scale would describe the group well in numbers past float32's largest.
        # NaN groups lie above that too, and stay as they are.
        allowed = (moved >= 0) & (moved <= 2 * BIAS - element.emax)
        better = allowed & (error < best_error)
        best, best_error = torch.where(better, moved, best), torch.where(better, error, best_error)
    return best.to(torch.uint8)


RULES: dict[str, Callable[[torch.Tensor, Element], torch.Tensor]] = {"ocp": scale_ocp, "mse": scale_mse}


def quantize_groups(groups: torch.Tensor, element: Element, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., group] and scales [...] of float32 groups [..., group]."""
    if rule not in RULES:
        raise FormatError(f"unknown scale rule {rule!r}: use one of {', '.join(RULES)}")
    scales = RULES[rule](groups, element)
    codes = element.encode(groups * _inverse(scales.to(torch.int32)).unsqueeze(-1))
    return codes.masked_fill_((scales == NAN).unsqueeze(-1), 0), scales


def _inverse(scales: torch.Tensor) -> torch.Tensor:
    """1 / scale, exact for every scale but NaN, where it is 1."""
    return decode((2 * BIAS - scales).clamp_(min=0).to(torch.uint8)).masked_fill_(scales == NAN, 1.0)


def _squared_error(unit: torch.Tensor, element: Element, step: int) -> torch.Tensor:
    error = unit - element.decode(element.encode(unit * 2.0**-step)) * 2.0**step
    return error.square_().sum(-1, dtype=torch.float64)  # wide, so that the order of summation cannot change a choice
