"""The result schema as JSON Schema, made by msgspec from the records of `lab/result.py` for readers that do not use
Python. `python -m bench ledger` writes it.

It describes what a file may hold; `lab/result.py` checks that a median lies within its spread and below its ceiling.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from halfbyte.lab import result
from halfbyte.lab.receipts import PACKAGE

PUBLISHED = PACKAGE.parents[1] / "docs" / "result.schema.json"


def json_schema() -> dict[str, Any]:
    (reference,), definitions = msgspec.json.schema_components([result.ResultFile], ref_template="#/$defs/{name}")
    for definition in definitions.values():
        definition["additionalProperties"] = False
    file = definitions["ResultFile"]
    file["properties"]["schema"] = {"const": result.SCHEMA}
    file["required"].append("schema")
    file["properties"]["environment"] |= {"required": ["time"], "properties": {"time": {"type": "string"}}}
    definitions["Figure"]["properties"]["unit"] = {"enum": sorted(result.UNITS)}
    header = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": result.SCHEMA}
    return {**header, "title": "A halfbyte result file", **reference, "$defs": definitions}


def text() -> str:
    return json.dumps(json_schema(), indent=1) + "\n"
