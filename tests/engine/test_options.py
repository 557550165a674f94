"""Values of another type, or out of range, are refused where an engine's options are made, in one sentence each."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

import pytest

from halfbyte.engine.options import EngineOptions
from halfbyte.engine.python_api import Engine
from halfbyte.errors import UsageError
from halfbyte.gates import Gates


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("max_seqs", "8", "max_seqs: expected int.*, got str"),
        ("max_seqs", 8.0, "max_seqs: expected int.*, got float"),
        ("max_seqs", True, "max_seqs: expected int.*, got bool"),
        ("max_seqs", None, "max_seqs: expected int, got null"),
        ("max_seqs", 0, "max_seqs is 0; give at least 1"),
        ("max_seqs", 1 << 70, "max_seqs is a number of more than 64 bits"),
        ("max_context", "4096", "max_context: expected int.*, got str"),
        ("max_context", -1, "max_context is -1; give at least 1"),
        ("max_rows_per_step", [1], "max_rows_per_step: expected int.*, got array"),
        ("max_waiting", 0, "max_waiting is 0; give at least 1"),
        ("page_size", "64", "page_size: expected int.*, got str"),
        ("kv_gib", "2", "kv_gib: expected float.*, got str"),
        ("kv_gib", float("nan"), "kv_gib is nan, which is not a finite number"),
        ("kv_gib", 10**400, "kv_gib: number out of range"),
        ("reserve_gib", -0.5, r"reserve_gib is -0\.5; give at least 0"),
        ("reserve_gib", float("inf"), "reserve_gib is inf, which is not a finite number"),
        ("allow_nan", "no", "allow_nan: expected bool.*, got str"),
        ("run_ahead", 1, "run_ahead: expected bool.*, got int"),
        ("prefix_cache", None, "prefix_cache: expected bool, got null"),
        ("max_draft", -1, "max_draft is -1; give at least 0"),
        ("model", 20, "model: expected str.*, got int"),
        ("device", 0, "device: expected str.*, got int"),
        ("draft", b"x", "draft: expected str.*, got bytes"),
        ("warm_up", "slow", "--warm-up is 'slow'; use one of fast, full, off"),
        ("record", 1, "record: expected str.*, got int"),
        ("gates", "fast", "gates is a str"),
    ],
)
def test_a_wrong_value_is_one_sentence(option: str, value: Any, said: str) -> None:
    for make in (EngineOptions, Engine):
        with pytest.raises(UsageError, match=said):
            make(**{option: value})


def test_numbers_become_plain_ones() -> None:
    numpy = pytest.importorskip("numpy")
    options = EngineOptions(kv_gib=numpy.float64(2.5), reserve_gib=1)
    assert type(options.kv_gib) is float
    assert options.kv_gib == 2.5
    assert type(options.reserve_gib) is float


def test_every_field_is_checked() -> None:
    """Nothing of the record's own types passes as an object of a type that nobody has."""
    for field in fields(EngineOptions):
        with pytest.raises(UsageError, match=field.name):
            EngineOptions(**{field.name: object()})  # type: ignore[arg-type]
    assert get_type_hints(EngineOptions)["gates"] is Gates
