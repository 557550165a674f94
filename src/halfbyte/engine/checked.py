"""The types of a request's values, checked where a request enters an engine, so that nothing behind that has to wonder.

Only types, and that there is a choice to wait for: which values are good is for the core to say, who knows the model.
Written by hand, because the engine in this process runs on a machine with torch and little else.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Sequence
from functools import cache
from typing import Any

from halfbyte.engine.request import Request
from halfbyte.errors import RequestError

LARGEST = 1 << 63  # what travels to another process has 64 bits


def checked(request: Request) -> Request:
    """The same request with every value of its declared type, or RequestError that names the one which is not."""
    out: Request = _convert(request, Request, "the request")
    if out.sampling.n < 1:
        raise _problem("sampling.n", f"is {out.sampling.n}; ask for at least 1")
    return out


def _convert(value: Any, kind: Any, where: str) -> Any:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None else _convert(value, inner[0], where)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not isinstance(value, kind):
            raise _problem(where, f"is {_name(value)}, not {kind.__name__}")
        prefix = "" if kind is Request else f"{where}."
        return kind(**{name: _convert(getattr(value, name), k, prefix + name) for name, k in _fields(kind)})
    if origin in (list, tuple):
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise _problem(where, f"is {_name(value)}, not a {origin.__name__}")
        if inner[0] is int and all(type(v) is int and -LARGEST <= v < LARGEST for v in value):
            return origin(value)  # a prompt may have a hundred thousand
        return origin(_convert(v, inner[0], f"{where}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise _problem(where, f"is {_name(value)}, not a dict")
        key, item = inner
        return {_convert(k, key, f"a key of {where}"): _convert(v, item, f"{where}[{k!r}]") for k, v in value.items()}
    if origin is typing.Literal:
        if value not in inner:
            raise _problem(where, f"is {str(value)[:40]!r}, not known; use {', '.join(map(str, inner))}")
        return value
    wanted = (int, float) if kind is float else (kind,)
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
        raise _problem(where, f"is {_name(value)}, not {kind.__name__}")
    if kind is int and not -LARGEST <= value < LARGEST:
        raise _problem(where, "is a number of more than 64 bits")
    try:
        return kind(value)  # subclasses, such as numpy's float64, become the plain type
    except OverflowError:
        raise _problem(where, "is too large a number") from None


@cache
def _fields(kind: type) -> tuple[tuple[str, Any], ...]:
    return tuple(typing.get_type_hints(kind).items())


def _name(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _problem(where: str, what: str) -> RequestError:
    return RequestError(f"this request cannot be served: {where} {what}.")
