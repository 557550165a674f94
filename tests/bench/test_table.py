"""README's table: the newest current receipt of a cell, beside its ceiling; what is stale or missing is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench import catalog, plot, table
from bench.measurement import Row
from bench.table import markdown
from halfbyte.errors import UsageError
from halfbyte.lab.receipts import Receipt
from halfbyte.lab.result import Cell, FigureCeiling, Result, ResultFile, figure

ROW = Row("streams", "decode", "speed", path="engine", model="120b", over="concurrency", values=(8, 32))


def receipt(name: str, state: str, date: str, **speeds: float) -> Receipt:
    results = [
        Result(
            Cell("decode", "120b", path="engine", shape={"concurrency": int(c[1:])}),
            (figure("speed", "tok/s", speed, FigureCeiling(20_000.0, "H200")),),
        )
        for c, speed in speeds.items()
    ]
    return Receipt(name, state, "", ResultFile("x", (), {"time": date}, {"a": "b"}, tuple(results)))


def line(*receipts: Receipt) -> str:
    return list(markdown(receipts, [(ROW, "cmd")]))[-1]


def test_current_before_newer_and_newest_of_the_current() -> None:
    old = receipt("a", "current", "2026-01-01", c8=1000.0, c32=12_345.0)
    new = receipt("b", "current", "2026-02-01", c8=1234.5)
    stale = receipt("c", "STALE", "2026-03-01", c8=9999.0)
    assert line(old, new, stale) == "| streams | **1234** / **12.3k** tok/s | 20.0k / 20.0k | `cmd` |"


def test_stale_and_missing_are_said() -> None:
    stale = receipt("c", "STALE", "2026-03-01", c8=50.0)
    assert line(stale) == "| streams | **50** / – tok/s (STALE) | 20.0k | `cmd` |"
    assert line() == "| streams | – / –  (not measured) |  | `cmd` |"


def test_every_row_is_well_formed() -> None:
    catalog.load()
    lines = list(markdown([]))
    assert len(lines) > 20
    assert all(text.count("|") == 5 for text in lines)


def test_an_older_name_of_a_shape_is_the_same_cell() -> None:
    known = receipt("a", "current", "2026-01-01", c8=1000.0)
    assert known.file is not None
    cells = [replace(r, cell=replace(r.cell, model="random:120b")) for r in known.results]
    assert line(replace(known, file=replace(known.file, results=tuple(cells)))) == line(known)


def test_documents_have_the_tables_and_the_plot_of_todays_receipts() -> None:
    catalog.load()
    assert not table.stale_documents(), "run `python -m bench table --write`"


def test_another_figure_makes_a_document_stale(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    catalog.load()
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.BEGIN}\n\nold\n\n{table.END}\nafter\n", encoding="utf-8")
    monkeypatch.setattr(table, "PAGE", page)
    assert "page.md" in table.stale_documents()
    text = table.filled(page, [])
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text


def test_a_document_without_markers_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("no markers", encoding="utf-8")
    with pytest.raises(UsageError, match=r"page\.md"):
        table.filled(page, [])


def test_a_cell_without_a_figure_has_no_bar() -> None:
    panel = plot.Panel("t", "s", (), (plot.BarGroup("8", (plot.Bar("fast", 10.0), plot.Bar("peer", None))),), 0, 100)
    drawing = "".join(plot.draw(panel))
    assert drawing.count("<rect") == 1
    assert "–" in drawing
