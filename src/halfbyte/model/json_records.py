"""JSON of a model's files as records: bytes to dataclasses whose fields say what may be there.

Written by hand, because a model must load on a machine with a GPU, torch and little else, and because a key given twice
must be refused: every reader would pick another one. What would take far more memory than it has bytes is refused
before it is parsed.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from halfbyte.errors import CheckpointError
from halfbyte.model.plain_file import MIB, one_line, read_whole, shown

T = TypeVar("T")
_OBJECT, _VALUE = 88, 58  # bytes that a parsed list or object takes, and any other value


class Unset(enum.Enum):
    """A key that is not there, where null means something else."""

    UNSET = "unset"


UNSET = Unset.UNSET


class MismatchError(ValueError):
    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}" if field else problem)


def read_json(path: Path, type: type[T], limit: int) -> T:
    return parse_json(read_whole(path, limit), type, str(path))


def parse_json(raw: bytes, type: type[T], where: str) -> T:
    if _OBJECT * (raw.count(b"[") + raw.count(b"{")) + _VALUE * raw.count(b",") > 4 * len(raw) + 64 * MIB:
        raise CheckpointError(f"{where} has far more parts than such a file has; fetch it again.")
    try:
        value = json.loads(raw, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{where} cannot be read as JSON ({one_line(e)}); fetch it again.") from None
    return convert(value, type, where)


def convert(value: Any, type: type[T], where: str) -> T:
    """Parsed JSON as `type`, or an error that names the field."""
    try:
        converted: T = _convert(value, type, "")
        return converted
    except MismatchError as e:
        raise CheckpointError(f"{where} cannot be read ({e}); fetch it again.") from None


def keys_of(record: type[Any]) -> frozenset[str]:
    return frozenset(key for key, _, _ in _fields(record))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {shown(key)} is there twice")
            seen.add(key)
    return found


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _fields(record: type[Any]) -> tuple[tuple[str, dataclasses.Field[Any], Any], ...]:
    """(key in the file, field, type)"""
    hints = typing.get_type_hints(record)
    return tuple((f.metadata.get("key", f.name), f, hints[f.name]) for f in dataclasses.fields(record))


def _convert(value: Any, kind: Any, at: str) -> Any:
    if kind is Any:
        return value
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (typing.Union, types.UnionType):
        for one in inner:
            if _fits(value, one):
                return _convert(value, one, at)
        raise _mismatch(value, kind, at)
    if not _fits(value, kind):
        raise _mismatch(value, kind, at)
    if kind is float:
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise MismatchError(at, "the number is too large")
        return number
    if dataclasses.is_dataclass(kind):
        return _record(value, kind, at)  # type: ignore[arg-type]
    items = value.values() if origin is dict else value
    if origin in (dict, list) and inner[-1] in (int, str) and {type(item) for item in items} <= {inner[-1]}:
        return value  # a vocabulary: all at once
    if origin is dict:
        return {
            key: _convert(item, inner[1], f"{at}.{shown(key)}" if at else shown(key)) for key, item in value.items()
        }
    if origin is list:
        return [_convert(item, inner[0], f"{at}[{i}]") for i, item in enumerate(value)]
    if origin is tuple:
        if len(value) != len(inner):
            raise MismatchError(at, f"expected {len(inner)} entries, got {len(value)}")
        return tuple(_convert(item, one, f"{at}[{i}]") for i, (item, one) in enumerate(zip(value, inner)))
    return value


def _record(value: Mapping[str, Any], record: type[Any], at: str) -> Any:
    given = {}
    for key, field, kind in _fields(record):
        if key in value:
            given[field.name] = _convert(value[key], kind, f"{at}.{key}" if at else key)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise MismatchError(at, f"the field {key!r} is missing")
    return record(**given)


def _fits(value: Any, kind: Any) -> bool:
    if kind is float:
        return type(value) in (int, float)
    if dataclasses.is_dataclass(kind):
        return type(value) is dict
    outer = get_origin(kind) or kind
    return kind is Any or type(value) is (list if outer is tuple else outer)


def _mismatch(value: Any, kind: Any, at: str) -> MismatchError:
    kinds = get_args(kind) if get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    expected = " or ".join(_name(k) for k in kinds if k is not Unset)
    return MismatchError(at, f"expected {expected}, got {_name(type(value))}")


def _name(kind: Any) -> str:
    if dataclasses.is_dataclass(kind):
        return "an object"
    names = {
        int: "a whole number", float: "a number", str: "a string", bool: "true or false", types.NoneType: "null",
        dict: "an object", list: "a list", tuple: "a list",
    }  # fmt: skip
    return names.get(get_origin(kind) or kind, str(kind))
