"""README's table: the newest current receipt of a cell, beside its ceiling; what is stale or missing is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench import catalog, plot, table
from bench.measurement import Column, Row, SideBySide
from bench.table import markdown, side_by_side
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


TABLE = SideBySide("pairs", (Column("ours"), Column("theirs", "peer")), (ROW,), ceilings=True)


def with_peer(known: Receipt, *, refused: str = "", **speeds: float) -> Receipt:
    assert known.file is not None
    cells = [
        Result(
            Cell("decode", "120b", engine="peer 1.0", path="engine", shape={"concurrency": int(c[1:])}),
            (figure("speed", "tok/s", speed),) if not refused else (),
            refused=refused,
        )
        for c, speed in speeds.items()
    ]
    return replace(known, file=replace(known.file, results=(*known.file.results, *cells)))


def test_figures_side_by_side_are_of_one_receipt() -> None:
    both = with_peer(receipt("a", "STALE", "2026-01-01", c8=1000.0, c32=2000.0), c8=500.0, c32=600.0)
    alone = receipt("b", "current", "2026-02-01", c8=4000.0, c32=5000.0)
    text = list(side_by_side([both, alone], TABLE, "cmd"))[-1]
    assert text == "| streams (STALE) | **1000** (5 %) / **2000** (10 %) | 500 / 600 |"
    assert list(side_by_side([], TABLE, "cmd"))[-1].startswith("| streams |")


def test_a_refused_cell_of_a_side_by_side_table_is_said() -> None:
    both = with_peer(receipt("a", "current", "2026-01-01", c8=1000.0), refused="not warm", c8=0.0)
    assert list(side_by_side([both], TABLE, "cmd"))[-1] == "| streams | **1000** (5 %) / – | INVALID / – |"


def test_a_table_that_no_measurement_has_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    named = "<!-- table nothing: python -m bench table --write -->\n<!-- /table -->"
    page.write_text(f"{table.BEGIN}\n{table.END}\n{named}\n", encoding="utf-8")
    with pytest.raises(UsageError, match="'nothing'"):
        table.filled(page, [])
