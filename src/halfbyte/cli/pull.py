"""`pull`: fetch a model, only the files it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfbyte.cli.options import JsonOption, err, print_json


def pull(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="20b, 120b, or a repository such as openai/gpt-oss-20b.", show_default=False
        ),
    ],
    folder: Annotated[
        Path | None, typer.Option("--to", help="The folder to put it in; by default where `halfbyte list` looks.")
    ] = None,
    revision: Annotated[str, typer.Option(help="A branch, tag or commit.")] = "main",
    file: Annotated[str | None, typer.Option(help="Fetch only this file; for GGUF repositories.")] = None,
    json: JsonOption = False,
) -> None:
    """Fetch a model: only the files it needs, resumed where it stopped, every file checked."""
    from halfbyte.cli.models import fetch

    where = fetch(model, folder, revision, file)
    if json:
        print_json({"folder": str(where)})
        return
    name = model if file is None or "/" not in model else f"{model}/{file}"
    err.print(f"{model} is in {where}; next: halfbyte serve {name}", markup=False)


def register(app: typer.Typer) -> None:
    app.command()(pull)
