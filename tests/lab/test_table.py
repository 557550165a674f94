"""README's table: the newest current receipt of a cell, beside its ceiling; what is stale or missing is said."""

from __future__ import annotations

from halfbyte.lab.receipts import Receipt
from halfbyte.lab.result import Ceiling, Cell, Result, ResultFile, figure
from halfbyte.lab.table import Row, markdown

ROW = Row("streams", "cmd", "decode", "speed", path="engine", model="120b", over="concurrency", values=(8, 32))


def receipt(name: str, state: str, date: str, **speeds: float) -> Receipt:
    results = [
        Result(
            Cell("decode", "120b", path="engine", shape={"concurrency": int(c[1:])}),
            (figure("speed", "tok/s", speed, Ceiling(20_000.0, "H200")),),
        )
        for c, speed in speeds.items()
    ]
    return Receipt(name, state, "", ResultFile("x", (), {"time": date}, {"a": "b"}, tuple(results)))


def line(*receipts: Receipt) -> str:
    return list(markdown(receipts, [ROW]))[-1]


def test_current_before_newer_and_newest_of_the_current() -> None:
    old = receipt("a", "current", "2026-01-01", c8=1000.0, c32=12_345.0)
    new = receipt("b", "current", "2026-02-01", c8=1234.5)
    stale = receipt("c", "STALE", "2026-03-01", c8=9999.0)
    assert line(old, new, stale) == "| streams | **1234** / **12.3k** tok/s | 20.0k / 20.0k | `cmd` |"


def test_stale_and_missing_are_said() -> None:
    stale = receipt("c", "STALE", "2026-03-01", c8=50.0)
    assert line(stale) == "| streams | **50** / – tok/s (STALE) | 20.0k | `cmd` |"
    assert line() == "| streams | – / –  (not measured) |  | `cmd` |"


def test_every_row_of_the_house_is_well_formed() -> None:
    lines = list(markdown([]))
    assert all(text.count("|") == 5 for text in lines)
