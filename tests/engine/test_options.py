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
        ("max_seqs", "8", "max_seqs is a str, not int"),
        ("max_seqs", 8.0, "max_seqs is a float, not int"),
        ("max_seqs", True, "max_seqs is a bool, not int"),
        ("max_seqs", None, "max_seqs is a NoneType, not int"),
        ("max_seqs", 0, "max_seqs is 0; give at least 1"),
        ("max_seqs", 1 << 70, "max_seqs is a number of more than 64 bits"),
        ("max_context", "4096", "max_context is a str, not int"),
        ("max_context", -1, "max_context is -1; give at least 1"),
        ("max_tokens", [1], "max_tokens is a list, not int"),
        ("max_waiting", 0, "max_waiting is 0; give at least 1"),
        ("page_size", "64", "page_size is a str, not int"),
        ("kv_gib", "2", "kv_gib is a str, not float"),
        ("kv_gib", float("nan"), "kv_gib is nan, which is not a number"),
        ("kv_gib", 10**400, "kv_gib is too large a number"),
        ("reserve_gib", -0.5, r"reserve_gib is -0\.5; give at least 0"),
        ("reserve_gib", float("inf"), "reserve_gib is inf, which is not a number"),
        ("allow_nan", "no", "allow_nan is a str, not bool"),
        ("run_ahead", 1, "run_ahead is an int, not bool"),
        ("prefix_cache", None, "prefix_cache is a NoneType, not bool"),
        ("max_draft", -1, "max_draft is -1; give at least 0"),
        ("model", 20, "model is an int, not str"),
        ("device", 0, "device is an int, not str"),
        ("draft", b"x", "draft is a bytes, not str"),
        ("warm_up", "slow", "--warm-up is 'slow'; use one of fast, full, off"),
        ("record", 1, "record is an int, not str"),
        ("gates", "fast", "gates are str, not Gates"),
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
