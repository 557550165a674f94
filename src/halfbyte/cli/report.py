"""`report`: one self-contained HTML page from results."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import typer

from halfbyte.cli.options import SHORT_SECONDS, Activity, JsonOption, err, out, print_json


def report(
    results: Annotated[
        list[Path] | None,
        typer.Argument(metavar="PATH", help="Result files, folders or archives; by default this project's receipts."),
    ] = None,
    page: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option("--title", help="Its heading.")] = "halfbyte: results",
    note: Annotated[str, typer.Option("--note", help="What a reader should know first; stands at the top.")] = "",
    json: JsonOption = False,
) -> None:
    """Make one HTML page of results: leaderboard, curves, matrix, kernel times, history, and the metadata behind it."""
    from halfbyte.lab.receipts import RESULTS
    from halfbyte.lab.report.page import render
    from halfbyte.lab.report.sources import collect

    with Activity("reading results", after=SHORT_SECONDS):
        collected = collect(results or [RESULTS], elsewhere=not results)
    with Activity("drawing", after=SHORT_SECONDS):
        date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
        text = render(collected, title, date, note)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
    states = [r.state for _, f in collected.files for r in f.results]
    counts = {s: states.count(s) for s in ("measured", "refused", "INVALID")}
    if json:
        print_json({"page": str(page), "files": len(collected.files), "bytes": len(text.encode()), **counts})
    else:
        summary = ", ".join(f"{n} {s}" for s, n in counts.items())
        out.print(f"{page}: {len(collected.files)} result files, cells {summary}", markup=False)
    for name, why in collected.unreadable:
        err.print(f"{name} cannot be read: {why}", style="red", markup=False)


def register(app: typer.Typer) -> None:
    app.command()(report)
