"""The JSON of a model's files as records, with errors that name the file and the field.

A key given twice is refused, because every reader would pick another of its values; msgspec's own parser would not
notice. A file that would take far more memory than it has bytes is refused before it is parsed.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from halfbyte import records
from halfbyte.errors import CheckpointError
from halfbyte.model.plain_file import MIB, one_line, quote, read_whole

T = TypeVar("T")
_OBJECT, _VALUE = 88, 58  # bytes that a parsed list or object takes, and any other value


def read_json(path: Path, type: type[T], limit: int) -> T:
    return parse_json(read_whole(path, limit), type, str(path))


def parse_json(raw: bytes, type: type[T], where: str) -> T:
    if _OBJECT * (raw.count(b"[") + raw.count(b"{")) + _VALUE * raw.count(b",") > 4 * len(raw) + 64 * MIB:
        raise CheckpointError(f"{where} has far more parts than such a file has; fetch it again.")
    try:
        value = json.loads(raw, object_pairs_hook=_object, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{where} cannot be read as JSON ({one_line(e)}); fetch it again.") from None
    return convert(value, type, where)


def convert(value: Any, type: type[T], where: str) -> T:
    """Parsed JSON as `type`, or an error that names the field."""
    try:
        return records.convert(value, type)
    except records.MismatchError as e:
        raise CheckpointError(f"{where} cannot be read ({one_line(e)}); fetch it again.") from None


def keys_of(record: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(record))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        keys: set[str] = set()
        for key, _ in pairs:
            if key in keys:
                raise ValueError(f"the key {quote(key)} is there twice")
            keys.add(key)
    return fields


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is not a finite number")
    return number
