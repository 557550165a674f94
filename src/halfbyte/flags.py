"""A field of a record that a person can set on the command line.

The record declares an option once: its default, its help and its limits are next to the field. `cli/options.py` builds
the command line from them; the record itself does not depend on command lines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Flag:
    name: str  # as typed, "--page/--no-page" for a switch with two ends
    help: str
    spellings: tuple[str, ...] = ()  # other servers' names for it, also accepted
    minimum: float | None = None
    maximum: float | None = None
    unit: int | None = None  # the person types a number of these, the record holds single ones
    parse: Callable[[str], Any] | None = None  # what is typed is text for this
    values: tuple[str, ...] = ()  # what the shell offers
    panel: str | None = None  # the heading it stands under in the help
    metavar: str | None = None  # its value in the help; None: by its type


def flag(
    default: Any,
    name: str,
    help: str,
    *,
    spellings: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    unit: int | None = None,
    parse: Callable[[str], Any] | None = None,
    values: tuple[str, ...] = (),
    panel: str | None = None,
    metavar: str | None = None,
) -> Any:
    """A dataclass field with its option."""
    option = Flag(name, help, spellings, minimum, maximum, unit, parse, values, panel, metavar)
    return dataclasses.field(default=default, metadata={"flag": option})


def flags_of(record: type[Any]) -> dict[str, tuple[Flag, Any]]:
    """Field name to (flag, default), in the record's order, for the fields that have a flag."""
    return {f.name: (f.metadata["flag"], f.default) for f in dataclasses.fields(record) if "flag" in f.metadata}
