"""The types of a request's values, checked where a request enters an engine, so that nothing behind that has to wonder.

Only types, and that there is a choice to wait for: which values are good is for the core to say, who knows the model.
"""

from __future__ import annotations

import msgspec

from halfbyte.engine.request import Request
from halfbyte.errors import RequestError


def checked(request: Request) -> Request:
    """The same request with every value of its declared type, or RequestError that names the one which is not."""
    try:
        request = msgspec.convert(msgspec.to_builtins(request, str_keys=False), Request)
    except (msgspec.ValidationError, TypeError, ValueError, RecursionError) as e:
        problem, _, place = str(e).partition(" - at ")
        where = place.replace("`", "").removeprefix("$.") or "a value"
        text = f"this request cannot be served: {where} is not of its type ({problem[:1].lower()}{problem[1:]})."
        raise RequestError(text) from None
    if request.sampling.n < 1:
        raise RequestError(f"this request cannot be served: sampling.n is {request.sampling.n}; ask for at least 1.")
    return request
