"""`compare`: what changed between two results, and whether it is more than noise."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from halfbyte.cli.options import JsonOption, check_number, err, out, print_json, print_table

ONLY = 8  # cells of one file alone that are named
COLORS = {
    "regression": "red", "improvement": "green", "too few runs": "yellow", "inconclusive": "yellow",
    "no samples": "dim",
}  # fmt: skip


def compare(
    before: Annotated[str, typer.Argument(metavar="A", help="A result file, or a name in the store.")],
    after: Annotated[str, typer.Argument(metavar="B", help="The one to compare with it; `latest` is the newest.")],
    store: Annotated[
        Path | None, typer.Option("--store", help="Where results are; by default this project's receipts.")
    ] = None,
    threshold: Annotated[
        float,
        typer.Option(
            "--threshold", min=0.0, help="By how many percent a figure must be worse to count as a regression.",
            callback=lambda percent: check_number(percent, "--threshold"),
        ),
    ] = 5.0,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with status 1 if something became slower.")] = False,
    json: JsonOption = False,
) -> None:  # fmt: skip
    """Show what changed between two results: the environment, and every figure that differs beyond its noise."""
    from halfbyte.lab.compare import compare_files
    from halfbyte.lab.receipts import RESULTS
    from halfbyte.lab.store import Store

    folder = Store(store or RESULTS)
    comparison = compare_files(folder.read(before), folder.read(after), threshold / 100)
    if json:
        print_json(comparison.as_dict())
    else:
        if comparison.environment:
            rows = [dict(zip(("environment", before, after), change)) for change in comparison.environment]
            print_table([{k: str(v) for k, v in row.items()} for row in rows])
        else:
            out.print("the environment is the same", markup=False)
        for c in (c for c in comparison.changes if c.shows):
            text = f"{c.cell}, {c.figure}: {c.before:.4g} → {c.after:.4g} {c.unit}, {c.sentence}"
            out.print(text, style=COLORS.get(c.verdict), markup=False)
        for text in comparison.only[:ONLY]:
            out.print(text, style="yellow", markup=False)
        if len(comparison.only) > ONLY:
            more = len(comparison.only) - ONLY
            out.print(
                f"… and {more} more cells that cannot be compared (--json has them)", style="yellow", markup=False
            )
        if comparison.changes:
            kinds = Counter(c.verdict if c.shows else "as before" for c in comparison.changes)
            counts = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items(), key=lambda k: k[0] == "as before"))
            out.print(f"{len(comparison.changes)} figures: {counts}", markup=False)
        else:
            err.print("the two have no figure in common", markup=False)
    if strict and comparison.regressions:
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    app.command()(compare)
