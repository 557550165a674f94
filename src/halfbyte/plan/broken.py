"""Where a row first met a NaN or an Inf, as a NaN carries it from a kernel to the host.

A kernel that knows where a value stopped being finite makes every logit of the row a NaN with that location in its
lower 16 bits (decode/mailbox.cuh); the sampler returns the bits with the token. A NaN without a location (0 and 0xffff
are what arithmetic itself leaves) has to be searched for.
"""

from __future__ import annotations

PLACES = (
    "qkv and its bias",
    "attention, its cached keys and values",
    "attention, its sinks, o or the residual",
    "the router",
    "the experts' gate_up",
    "the experts' down or the residual",
)  # in the order in which a layer computes them, as decode/mailbox.cuh numbers them
PLACES_OF_A_LAYER = 8
NOT_A_NUMBER = 0x7FC00000
_FIRST = 0xFFFE


def broken_place(bits: int) -> str | None:
    """The location in the bits of a logit that is not finite, or None."""
    bits &= 0xFFFFFFFF
    code = bits & 0xFFFF
    if bits >> 16 != NOT_A_NUMBER >> 16 or not 0 < code <= _FIRST:
        return None
    layer, index = divmod(_FIRST - code, PLACES_OF_A_LAYER)
    return f"layer {layer}, {PLACES[index]}" if index < len(PLACES) else None
