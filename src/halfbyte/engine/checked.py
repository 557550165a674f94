"""Type-checks requests where they enter an engine.

A request is checked as it would travel to the engine's process: written as MessagePack and read back as its declared
types. Whether its values suit the model is for the core to decide.
"""

from __future__ import annotations

import msgspec

from halfbyte.engine.request import Request
from halfbyte.errors import RequestError
from halfbyte.records import mismatch


def _plain(value: object) -> object:
    """The Python number behind a numpy scalar."""
    item = getattr(value, "item", None)
    if item is None:
        raise TypeError(f"{type(value).__name__} is not a type that a request can hold")
    return item()


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_decoder = msgspec.msgpack.Decoder(Request)


def checked(request: Request) -> Request:
    """A copy of the request with plain values of the declared types; RequestError names a value that does not fit."""
    try:
        copy = _decoder.decode(_encoder.encode(request))
    except (msgspec.ValidationError, TypeError, ValueError, OverflowError) as e:
        raise RequestError(f"this request cannot be served: {mismatch(e)}.") from None
    if copy.sampling.n < 1:
        raise RequestError(f"this request cannot be served: sampling.n is {copy.sampling.n}; ask for at least 1.")
    return copy
