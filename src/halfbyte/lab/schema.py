"""The result schema as JSON Schema, made from the dataclasses of `result.py`, for readers that are not Python.

    python -m halfbyte.lab.schema > docs/result.schema.json

Says what a file may hold; that a median lies within its spread and below its ceiling is for `result.py` to check.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any

from halfbyte.lab import result
from halfbyte.lab.receipts import PACKAGE

PUBLISHED = PACKAGE.parents[1] / "docs" / "result.schema.json"
_PLAIN = {float: "number", int: "integer", str: "string", bool: "boolean"}


def json_schema() -> dict[str, Any]:
    definitions: dict[str, Any] = {}
    _definition(result.ResultFile, definitions)
    definitions["ResultFile"]["properties"]["schema"] = {"const": result.SCHEMA}
    definitions["ResultFile"]["required"].append("schema")
    definitions["Figure"]["properties"]["unit"] = {"enum": sorted(result.UNITS)}
    definitions["ResultFile"]["properties"]["environment"] = {
        "type": "object",
        "required": ["time"],
        "properties": {"time": {"type": "string"}},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": result.SCHEMA,
        "title": "A halfbyte result file",
        "$ref": "#/$defs/ResultFile",
        "$defs": definitions,
    }


def _definition(kind: type, definitions: dict[str, Any]) -> None:
    hints, properties, required = typing.get_type_hints(kind), {}, []
    definitions[kind.__name__] = {}  # before its fields: a kind may hold itself
    for f in dataclasses.fields(kind):
        properties[f.name] = _schema(hints[f.name], definitions)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            required.append(f.name)
    about = (kind.__doc__ or "").strip().split("\n")[0]
    plain = {} if about.startswith(f"{kind.__name__}(") else {"description": about}
    definitions[kind.__name__] = plain | {
        "type": "object", "properties": properties, "required": required, "additionalProperties": False
    }  # fmt: skip


def _schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [{"type": "null"} if k is type(None) else _schema(k, definitions) for k in inner]}
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        if kind.__name__ not in definitions:
            _definition(kind, definitions)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    if origin is tuple:
        return {"type": "array", "items": _schema(inner[0], definitions)}
    if origin is not None:
        assert issubclass(origin, Mapping), kind
        values = _schema(inner[1], definitions)
        return {"type": "object", **({"additionalProperties": values} if values else {})}
    return {} if kind is Any else {"type": _PLAIN[kind]}


def text() -> str:
    return json.dumps(json_schema(), indent=1) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print(text(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
