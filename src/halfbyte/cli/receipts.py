"""`receipts`: what was measured before, each figure beside its ceiling, and which receipts are stale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfbyte.cli.options import JsonOption, out, print_json, print_table

if TYPE_CHECKING:
    from halfbyte.lab.receipts import Receipt

COLORS = {"current": "green", "STALE": "red", "unreadable": "red"}
COLUMNS = ("  cell", "figure", "value", "ceiling", "share")


def receipts(
    folder: Annotated[Path | None, typer.Option("--folder", help="Where they are; default: bench/results.")] = None,
    json: JsonOption = False,
) -> None:
    """List what was measured before: figures, ceilings, and what is stale."""
    from halfbyte.lab.receipts import read_all

    known = read_all(folder)
    if json:
        print_json({"receipts": [r.as_dict() for r in known]})
    else:
        _show(known)


def _show(known: Sequence[Receipt]) -> None:
    for r in known:
        color = COLORS.get(r.state, "yellow")
        where = " · ".join(t for t in (r.gpu, r.date) if t)
        out.print(f"[bold]{r.name}[/bold]  [{color}]{r.state}[/{color}]  {r.why or ''}[dim]  {where}[/dim]")
        rows: list[Mapping[str, str]] = []
        for result in r.results:
            cell = result.cell
            label = " ".join(t for t in (cell.model, cell.preset, cell.label) if t)
            if result.refused:
                rows.append(
                    {
                        "  cell": f"  {label}",
                        "figure": "REFUSED",
                        "value": result.refused[:60],
                        "ceiling": "",
                        "share": "",
                    }
                )
            for f in result.figures:
                ceiling = "" if f.ceiling is None else f"{f.ceiling.value:.4g}"
                share = "" if f.share is None else f"{f.share:.0%}"
                rows.append(dict(zip(COLUMNS, (f"  {label}", f.name, f"{f.value:.4g} {f.unit}", ceiling, share))))
        if rows:
            print_table(rows)


def register(app: typer.Typer) -> None:
    app.command()(receipts)
