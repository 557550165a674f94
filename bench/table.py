"""The tables of results, from receipts: each figure beside its ceiling, and what is stale marked so.

    python -m bench table --write       fills the tables of README.md and docs/results.md and draws README's plot;
                                        --check says whether they are current

README has the headline rows, docs/results.md has all, and the tables with a column for each engine or format.

A row names cells by what they measured; the newest receipt that has the cell counts, current before stale. A cell that
has no receipt is shown as not measured. The rows and their commands are the measurements' own. Invents nothing and
rounds for people.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import plot
from bench.measurement import MEASUREMENTS, RESULTS, ROOT, Column, Row, SideBySide
from halfbyte.errors import UsageError
from halfbyte.lab.receipts import Receipt, read_all
from halfbyte.lab.result import Figure, Result
from halfbyte.lab.statistics import number

README, PAGE = ROOT / "README.md", ROOT / "docs" / "results.md"
BEGIN, END = "<!-- table: python -m bench table --write -->", "<!-- /table -->"
NAMED = re.compile(r"<!-- table (\S+): python -m bench table --write -->\n.*?<!-- /table -->", re.DOTALL)
COUNTS = {"ratio", "tests", "steps"}  # units that the label says


def rows(*, headline: bool = False) -> list[tuple[Row, str]]:
    """Every row with the command that makes it again, or the headline rows alone."""
    return [
        (row, row.command or m.command) for m in MEASUREMENTS.values() for row in m.rows if row.headline or not headline
    ]


def markdown(receipts: Sequence[Receipt], chosen: Sequence[tuple[Row, str]] | None = None) -> Iterator[str]:
    yield "| | measured | ceiling | command |"
    yield "|---|---|---|---|"
    for row, command in rows() if chosen is None else chosen:
        pairs = [_find(receipts, row, value) for value in row.values]
        figures = " / ".join("–" if pair is None else _value(pair[1]) for pair in pairs)
        units = {pair[1].unit for pair in pairs if pair is not None} - COUNTS
        ceilings = [pair[1].ceiling for pair in pairs if pair is not None]
        beside = " / ".join("–" if c is None else number(c.value) for c in ceilings) if any(ceilings) else ""
        states = {pair[0].state for pair in pairs if pair is not None} - {"current"}
        stale = f" ({', '.join(sorted(states))})" if states else ""
        missing = " (not measured)" if all(pair is None for pair in pairs) else ""
        yield f"| {row.label} | {figures} {' '.join(units)}{stale}{missing} | {beside} | `{command}` |"


def side_by_side(receipts: Sequence[Receipt], table: SideBySide, command: str) -> Iterator[str]:
    """Figures of a row stand beside each other in one receipt: the one that has most of them, then the newest."""
    yield f"| `{command}` | {' | '.join(c.label for c in table.columns)} |"
    yield "|---" * (len(table.columns) + 1) + "|"
    for row in table.rows:
        matches: list[list[tuple[Receipt, Result] | None]] = []
        best = (-1, False, "")
        for receipt in receipts:
            own = [[_match([receipt], _row_of(row, c), value, c) for value in row.values] for c in table.columns]
            order = sum(m is not None for column in own for m in column), receipt.state == "current", receipt.date
            if order > best:
                best, matches = order, own
        states = {m[0].state for column in matches for m in column if m} - {"current"}
        label = f"{row.label} ({', '.join(sorted(states))})" if states else row.label
        texts = [
            " / ".join(_beside(match, _row_of(row, c), c, table) for match in column)
            for c, column in zip(table.columns, matches)
        ]
        yield f"| {label} | {' | '.join(texts)} |"


def _row_of(row: Row, column: Column) -> Row:
    return replace(
        row,
        path=column.path or row.path,
        preset=column.preset or row.preset,
        figure=column.figure or row.figure,
    )


def _beside(match: tuple[Receipt, Result] | None, row: Row, column: Column, table: SideBySide) -> str:
    """A figure with its ratio to the peer, where the receipt has one, or with its share of the ceiling."""
    if match is None:
        return "–"
    if match[1].refused:
        return "INVALID"
    result_figure = match[1].figure(row.figure)
    ratio = next((f.value for f in match[1].figures if f.name == "ratio" and not column.figure), None)
    text = (
        _value(result_figure)
        if ratio is not None or not (column.engine or column.figure)
        else number(result_figure.value)
    )
    if ratio is not None:
        text += f" ({ratio:.2f}x)"
    if table.ceilings and result_figure.ceiling is not None:
        text += f" ({100 * result_figure.value / result_figure.ceiling.value:.0f} %)"
    return text


def _find(receipts: Sequence[Receipt], row: Row, value: Any) -> tuple[Receipt, Figure] | None:
    match = _match(receipts, row, value)
    return None if match is None else (match[0], match[1].figure(row.figure))


def _match(
    receipts: Sequence[Receipt], row: Row, value: Any, column: Column | None = None
) -> tuple[Receipt, Result] | None:
    """The newest cell, current before stale; with a column one of its cells, refused ones too."""
    matches = [
        (receipt, result)
        for receipt in receipts
        for result in receipt.results
        if _fits(result, row, value)
        and (column is None or _belongs(result, column))
        and (any(f.name == row.figure for f in result.figures) or (column is not None and result.refused))
    ]
    return max(matches, key=lambda pair: (pair[0].state == "current", pair[0].date, pair[0].name), default=None)


def _belongs(result: Result, column: Column) -> bool:
    cell = result.cell
    if cell.engine.startswith(column.engine) if column.engine else not cell.engine:
        return not column.moe_kernel or cell.gates.get("moe_kernel") == column.moe_kernel
    return False


def _fits(result: Result, row: Row, value: Any) -> bool:
    cell = result.cell
    model = cell.model.removeprefix("random:")  # receipts of older tools name a shape so
    expected: dict[str, Any] = {"path": row.path, "model": row.model, "preset": row.preset}
    shape = dict(row.shape)
    if row.over in expected:
        expected[row.over] = value
    elif row.over:
        shape[row.over] = value
    if cell.kind != row.kind or any(
        v and (model if name == "model" else getattr(cell, name)) != v for name, v in expected.items()
    ):
        return False
    if any(cell.shape.get(name) != v for name, v in shape.items()):
        return False
    if row.gates is None:
        return True
    activation = dict(cell.gates).get("activation", "auto")
    return bool(activation == row.gates.get("activation", "auto"))


def _value(figure: Figure) -> str:
    return f"**{number(figure.value)}**"


# ---- in documents ---------------------------------------------------------------------------------------------------


def filled(document: Path, receipts: Sequence[Receipt]) -> str:
    """The document's text with its table of these receipts between the markers."""
    before, begin, rest = document.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UsageError(f"{document.name} has no place for its table: {BEGIN} and {END}.")
    lines = markdown(receipts, rows(headline=document == README))
    text = "\n".join([before + BEGIN, "", *lines, "", END]) + after
    tables = {t.name: (t, m.command) for m in MEASUREMENTS.values() for t in m.side_by_side}

    def fill(match: re.Match[str]) -> str:
        if match[1] not in tables:
            raise UsageError(f"{document.name} asks for the table {match[1]!r}, and no measurement has it.")
        lines = side_by_side(receipts, *tables[match[1]])
        opening = match[0].partition("\n")[0]
        return "\n".join([opening, "", *lines, "", END])

    return NAMED.sub(fill, text)


def stale_documents() -> list[str]:
    """Documents that differ from what the receipts say now."""
    receipts = read_all(RESULTS)
    names = [d.name for d in (README, PAGE) if filled(d, receipts) != d.read_text(encoding="utf-8")]
    return names if plot.is_current() else [*names, plot.FILE.name]


def main(*, write: bool = False, check: bool = False) -> int:
    receipts = read_all(RESULTS)
    if check:
        stale = stale_documents()
        print(f"out of date: {', '.join(stale)}; run `python -m bench table --write`" if stale else "up to date")
        return int(bool(stale))
    if not write:
        print("\n".join(markdown(receipts)))
        return 0
    for document in (README, PAGE):
        document.write_text(filled(document, receipts), encoding="utf-8")
    plot.write()
    return 0
