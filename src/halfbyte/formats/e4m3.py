"""E4M3, the 8-bit element of MXFP8: 4 exponent bits (bias 7), 3 mantissa bits, no infinity.

Codes are held as uint8 (the bits of `torch.float8_e4m3fn`). Encoding rounds to nearest, ties to even, and saturates at
±448, infinities included; NaN stays NaN and keeps its sign (0x7F or 0xFF). Subnormals go down to 2^-9.

`ml_dtypes` and older torch turn values past the last rounding boundary (464) into NaN; saturation here is on purpose,
so the clamp comes before torch's cast and every torch gives the same bytes. This file knows nothing of scales or
groups.
"""

from __future__ import annotations

import torch

MAX = 448.0
EMAX = 8  # exponent of the largest value: 448 = 1.75 * 2^8
NAN = 0x7F


def encode(x: torch.Tensor) -> torch.Tensor:
    """E4M3 bits (uint8) of the nearest values."""
    return x.to(torch.float32).clamp(-MAX, MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """Values (float32) of E4M3 bits."""
    return codes.contiguous().view(torch.float8_e4m3fn).to(torch.float32)
