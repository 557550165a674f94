"""`receipts`: what was measured before, each figure beside its ceiling, and which receipts are stale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from halfbyte.cli.options import JsonOption, err, out, print_json, print_table
from halfbyte.errors import UsageError

if TYPE_CHECKING:
    from halfbyte.lab.receipts import Receipt

COLORS = {"current": "green", "STALE": "red", "unreadable": "red"}
COLUMNS = ("  cell", "figure", "value", "ceiling", "share")


def receipts(
    folder: Annotated[
        Path | None, typer.Option("--folder", help="The folder that holds them; by default bench/results.")
    ] = None,
    table: Annotated[bool, typer.Option("--table", help="Print README's table of results, as markdown.")] = False,
    run: Annotated[bool, typer.Option("--run", help="Measure again whatever is not current; can be resumed.")] = False,
    part: Annotated[
        list[str] | None, typer.Option("--part", help="With --run: measure only this part; repeat it for more.")
    ] = None,
    answers: Annotated[
        Path | None, typer.Option("--answers", help="With --run: a file with the embedded model's answers on a CPU.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Show what was measured: figures, ceilings, and what is stale; or measure it again."""
    from halfbyte.lab.receipts import RESULTS, read_all

    if run:
        from halfbyte.lab import remeasure

        failed = remeasure.run_parts(folder or RESULTS, part or (), answers, lambda text: out.print(text, markup=False))
        if failed:
            err.print(f"failed: {', '.join(failed)}; their logs are in {folder or RESULTS}", markup=False)
            raise typer.Exit(1)
        return
    if part or answers:
        raise UsageError("--part and --answers are for --run; add it, or leave them out.")
    known = read_all(folder)
    if json:
        print_json({"receipts": [r.as_dict() for r in known]})
    elif table:
        from halfbyte.lab.table import markdown

        for line in markdown(known):
            out.print(line, markup=False)
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
