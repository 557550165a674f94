"""`receipts`: what was measured before, which receipts are stale, and the figures of one beside their ceilings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfbyte.cli.options import JsonOption, out, print_json, print_table
from halfbyte.errors import UsageError

if TYPE_CHECKING:
    from halfbyte.lab.receipts import Receipt
    from halfbyte.lab.result import Result

COLORS = {"current": "green", "STALE": "red", "unreadable": "red"}
COLUMNS = ("cell", "figure", "value", "ceiling", "share")


def receipts(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Show every figure of these; without one: a list.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="The folder that holds them; by default this project's own.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show what was measured, and which receipts are stale; with a NAME every figure of it beside its ceiling."""
    from halfbyte.lab.receipts import read_all

    stored = read_all(folder)
    if missing := [name for name in names or () if name not in {r.name for r in stored}]:
        raise UsageError(f"there is no receipt {missing[0]!r}; `halfbyte receipts` lists them.")
    chosen = [r for r in stored if not names or r.name in names]
    if json:
        print_json({"receipts": [r.as_dict() for r in chosen]})
    elif names:
        for receipt in chosen:
            show_figures(receipt)
    else:
        show_list(chosen)


def show_list(chosen: Sequence[Receipt]) -> None:
    """A line for each receipt, cut at the edge of the screen; stale ones behind the current ones."""
    width = max((len(r.name) for r in chosen), default=0)
    for r in sorted(chosen, key=lambda r: r.state == "STALE"):
        color, count = COLORS.get(r.state, "yellow"), sum(len(x.figures) for x in r.results)
        facts = " · ".join(text for text in (r.date, f"{count} figures", r.gpu.removeprefix("NVIDIA "), r.why) if text)
        line = f"{r.name:{width}}  [{color}]{r.state:8}[/{color}]  [dim]{facts}[/dim]"
        out.print(line, overflow="ellipsis", no_wrap=True)
    stale = sum(r.state == "STALE" for r in chosen)
    out.print(
        f"{len(chosen)} receipts, {stale} stale; `halfbyte receipts NAME` shows the figures of one.", markup=False
    )


def show_figures(r: Receipt) -> None:
    """What all cells of a receipt have in common stands above; the rows have what differs."""
    common, labels = split_labels(r.results)
    facts = " · ".join(text for text in (r.state, r.why, r.gpu, r.date, common) if text)
    out.print(f"{r.name}: {facts}", markup=False)
    rows: list[Mapping[str, str]] = []
    for label, result in zip(labels, r.results):
        if result.refused:
            rows.append(dict(zip(COLUMNS, (label, result.state, result.refused[:60], "", ""))))
        for f in result.figures:
            ceiling = "" if f.ceiling is None else f"{f.ceiling.value:.4g}"
            share = "" if f.share is None else f"{f.share:.0%}"
            rows.append(dict(zip(COLUMNS, (label, f.name, f"{f.value:.4g} {f.unit}", ceiling, share))))
    if rows:
        print_table(rows, left=2)


def split_labels(results: Sequence[Result]) -> tuple[str, list[str]]:
    """(parts that the labels of all cells have, the rest of each label)."""
    labels = [[part for part in (r.cell.model, r.cell.preset, *r.cell.label.split(", ")) if part] for r in results]
    shared = [part for part in labels[0] if all(part in parts for parts in labels)] if len(labels) > 1 else []
    rests = [", ".join(part for part in parts if part not in shared) for parts in labels]
    return ", ".join(shared), rests


def register(app: typer.Typer) -> None:
    app.command()(receipts)
