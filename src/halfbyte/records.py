"""Plain values as typed records, by msgspec, with errors that name the field.

Everything that comes from outside (a model's JSON, a result file, a request, an engine's options) becomes a record
here. HTTP bodies are pydantic's.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
_PATH = re.compile(r" - at `(?:(?P<part>key|value)` in `)?\$(?P<path>[^`]*)`$")


class MismatchError(ValueError):
    """A value that does not fit its type: `field` is its path, empty for the value itself."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}" if field else problem)
        self.field = field


def convert(value: Any, kind: type[T]) -> T:
    """`value`, made of dicts, lists and scalars, as a `kind`; MismatchError where it does not fit."""
    try:
        record: T = msgspec.convert(value, kind)
        return record
    except (msgspec.ValidationError, RecursionError, UnicodeEncodeError) as e:  # the last: half a surrogate pair
        raise mismatch(e) from None


def mismatch(e: Exception) -> MismatchError:
    text = str(e)
    match = _PATH.search(text)
    problem = (text if match is None else text[: match.start()]).replace("`", "")
    path = "" if match is None else match["path"].removeprefix(".")
    return MismatchError(path, problem[:1].lower() + problem[1:])
