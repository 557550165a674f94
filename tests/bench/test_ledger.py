"""The generated pages, the index and the published schema are what the store gives today."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import ledger
from bench.measurement import RESULTS
from bench.schema import json_schema
from halfbyte.lab.result import Cell, Check, FigureCeiling, Result, ResultFile, figure, from_json
from halfbyte.lab.store import Store

jsonschema = pytest.importorskip("jsonschema_rs")


def test_nothing_generated_is_out_of_date() -> None:
    stale = [str(p.relative_to(ledger.DOCS.parent)) for p in ledger.out_of_date()]
    assert not stale, f"run `python -m bench ledger`, which makes {', '.join(stale)}"


def example() -> ResultFile:
    speed = figure("speed", "tok/s", [99.0, 100.0, 101.0, 100.5, 99.5, 100.0], FigureCeiling(200.0, "H200"))
    return ResultFile(
        "halfbyte bench", ("--tg", "32"), {"time": "2026-01-02T03:04", "cpu": "Xeon", "commit": "abc"}, {"a.py": "1"},
        (
            Result(Cell("decode", "120b", "fast", {"moe_kernel": "decode=gemv"}, "engine", {"tg": 32}), (speed,)),
            Result(Cell("prompt", "120b", gates={"attention": "triton"}), checks=(Check("kernel path", False),)),
            Result(Cell("prompt", "120b", gates={"attention": "triton"}), refused="no | such kernel"),
        ),
    )  # fmt: skip


def test_a_page_has_every_cell_its_interval_its_ceiling_and_why_there_is_no_number(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add(example())
    text = "\n".join(ledger.results_page(store.all()))
    assert "1 files, cells: 1 measured, 1 refused, 1 INVALID." in text
    assert "speed **100** tok/s (99.2–101 at 95 %, 6 runs), 50% of 200" in text
    assert "**INVALID**: failed in front of the timing: kernel path" in text
    assert "**refused**: no \\| such kernel" in text


def test_the_matrix_counts_cells_by_value(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add(example())
    lines = list(ledger.matrix_page(store.all()))
    (gemv,) = (line for line in lines if line.startswith("| moe_kernel | gemv |"))
    assert gemv.endswith("| 1 measured |")
    (triton,) = (line for line in lines if line.startswith("| attention | triton |"))
    assert triton.endswith("| 1 refused, 1 **INVALID** |")
    assert "| attention triton | 1 refused, 1 **INVALID** |" in lines


def test_every_receipt_fits_the_published_schema_and_what_does_not_is_refused() -> None:
    schema = jsonschema.validator_for(json_schema())
    for path in RESULTS.glob("*.json"):
        raw = json.loads(path.read_text(encoding="utf-8"))
        schema.validate(raw)
        assert len(from_json(raw).results) == len(raw["results"])
    good = json.loads(json.dumps(example().as_json()))
    schema.validate(good)
    for wrong in (
        {**good, "schema": "other/1"},
        {**good, "extra": 1},
        {**good, "environment": {}},
        {**good, "results": [{"cell": {"kind": 5}}]},
        {**good, "results": [{"cell": {"kind": "x"}, "figures": [{"name": "a", "unit": "furlongs", "value": 1}]}]},
    ):
        assert not schema.is_valid(wrong)
