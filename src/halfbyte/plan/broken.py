"""Where a row first met a value that is no number, as a NaN can carry it from a kernel to the host.

A kernel that knows the place makes every logit of the row a NaN with the place in its lower 16 bits
(decode/mailbox.cuh); the sampler hands the bits on beside the token. A NaN without a place says only that there is one
(0 and 0xffff are what arithmetic itself leaves): who wants to know more looks for it.
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


def place_code(layer: int, place: int) -> int:
    """The first place of all is the largest, so that a maximum keeps it."""
    return _FIRST - (layer * PLACES_OF_A_LAYER + place)


def broken_place(bits: int) -> str | None:
    """What the bits of a logit that is no number say about its origin, or None."""
    bits &= 0xFFFFFFFF
    code = bits & 0xFFFF
    if bits >> 16 != NOT_A_NUMBER >> 16 or not 0 < code <= _FIRST:
        return None
    layer, place = divmod(_FIRST - code, PLACES_OF_A_LAYER)
    return f"layer {layer}, {PLACES[place]}" if place < len(PLACES) else None
