"""E2M1, the 4-bit element of MXFP4: one sign bit, two exponent bits, one mantissa bit, bias 1.

    code      0   1   2   3   4   5   6   7      8 .. 15 are the same with the sign set (8 is -0)
    value     0  .5   1  1.5  2   3   4   6

Encoding rounds to nearest, ties to the even code, and saturates at ±6. The format has neither infinity nor NaN: an
infinity saturates, and a NaN saturates with its own sign, as if it lay beyond infinity. A group that must stay NaN says
so in its scale; that is the caller's business (see `e8m0.py`). Signs of zeros survive: -0.1 becomes code 8.

Two codes share a byte, the even element in the low nibble. This file knows nothing of scales or groups.
"""

from __future__ import annotations

import functools

import torch

from halfbyte.errors import FormatError

VALUES: tuple[float, ...] = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MAX = 6.0
EMAX = 2  # exponent of the largest value: 6 = 1.5 * 2^2

_SEVEN = 0x40E00000  # float32 bits of 7.0: everything from here up rounds to the largest code
_ONE = 0x3F800000
_SHIFTER = 4194304.0  # 2^22, where a float32 has steps of 0.5: adding it rounds a small number to halves, ties to even
_SHIFTER_BITS = 0x4A800000


def encode(x: torch.Tensor) -> torch.Tensor:
    """Codes 0..15 (uint8) of the nearest E2M1 values."""
    bits = x.to(torch.float32).contiguous().view(torch.int32)
    magnitude = (bits & 0x7FFFFFFF).clamp_(max=_SEVEN)
    # At 1 and above E2M1 is a float32 cut to one mantissa bit: round the other 22 away, then drop the exponent's bias.
    rounded = ((magnitude + ((magnitude >> 22) & 1) + 0x1FFFFF) >> 22).sub_(252)
    # Below 1 the codes are plain halves.
    halves = (magnitude.view(torch.float32) + _SHIFTER).view(torch.int32).sub_(_SHIFTER_BITS)
    code = torch.where(magnitude < _ONE, halves, rounded).clamp_(max=7)
    return (code | ((bits >> 28) & 8)).to(torch.uint8)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """Values (float32) of codes 0..15."""
    flat = codes.reshape(-1).to(torch.int32)
    return _values(codes.device).index_select(0, flat).reshape(codes.shape)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Two codes to a byte, the even element in the low nibble: [..., K] to [..., K/2]."""
    if codes.shape[-1] % 2:
        raise FormatError(f"packing nibbles needs an even number of them in a row, not {codes.shape[-1]}")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack`: [..., K/2] bytes to [..., K] codes."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def decode_packed(packed: torch.Tensor) -> torch.Tensor:
    """`decode(unpack(packed))` in one table look-up per byte: [..., K/2] bytes to [..., K] float32 values."""
    flat = packed.reshape(-1).to(torch.int32)
    return _pairs(packed.device).index_select(0, flat).reshape(*packed.shape[:-1], packed.shape[-1] * 2)


@functools.cache
def _values(device: torch.device) -> torch.Tensor:
    return torch.tensor(VALUES, dtype=torch.float32, device=device)


@functools.cache
def _pairs(device: torch.device) -> torch.Tensor:
    table = [[VALUES[byte & 15], VALUES[byte >> 4]] for byte in range(256)]
    return torch.tensor(table, dtype=torch.float32, device=device)
