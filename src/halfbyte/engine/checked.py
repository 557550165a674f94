"""The types of values, checked where a request or an engine's options come in, so that nothing behind has to wonder.

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


class WrongValueError(Exception):
    """A value that is not what was declared, as a clause that names it."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(f"{where} {what}")


def checked(request: Request) -> Request:
    """The same request with every value of its declared type, or RequestError that names the one which is not."""
    try:
        out: Request = typed(request, Request, "the request")
        if out.sampling.n < 1:
            raise WrongValueError("sampling.n", f"is {out.sampling.n}; ask for at least 1")
    except WrongValueError as e:
        raise RequestError(f"this request cannot be served: {e}.") from None
    return out


def typed(value: Any, kind: Any, where: str) -> Any:
    """The value as a plain one of the declared type; WrongValueError where it is another."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None else typed(value, inner[0], where)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not isinstance(value, kind):
            raise WrongValueError(where, f"is {_name(value)}, not {kind.__name__}")
        prefix = "" if kind is Request else f"{where}."
        return kind(**{name: typed(getattr(value, name), k, prefix + name) for name, k in _fields(kind)})
    if origin in (list, tuple):
        if not isinstance(value, Sequence) or isinstance(value, str | bytes):
            raise WrongValueError(where, f"is {_name(value)}, not a {origin.__name__}")
        if inner[0] is int and all(type(v) is int and -LARGEST <= v < LARGEST for v in value):
            return origin(value)  # a prompt may have a hundred thousand
        return origin(typed(v, inner[0], f"{where}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise WrongValueError(where, f"is {_name(value)}, not a dict")
        key, item = inner
        return {typed(k, key, f"a key of {where}"): typed(v, item, f"{where}[{k!r}]") for k, v in value.items()}
    if origin is typing.Literal:
        if value not in inner:
            raise WrongValueError(where, f"is {str(value)[:40]!r}, not known; use {', '.join(map(str, inner))}")
        return value
    wanted = (int, float) if kind is float else (kind,)
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
        raise WrongValueError(where, f"is {_name(value)}, not {kind.__name__}")
    if kind is int and not -LARGEST <= value < LARGEST:
        raise WrongValueError(where, "is a number of more than 64 bits")
    try:
        return kind(value)  # subclasses, such as numpy's float64, become the plain type
    except OverflowError:
        raise WrongValueError(where, "is too large a number") from None


@cache
def _fields(kind: type) -> tuple[tuple[str, Any], ...]:
    return tuple(typing.get_type_hints(kind).items())


def _name(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
