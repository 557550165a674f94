"""`rm`: remove models that were pulled."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from halfbyte import gates as gates_
from halfbyte.cli.models import complete_model
from halfbyte.cli.options import JsonOption, err, print_json
from halfbyte.errors import UsageError


def rm(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL", help="Names as `halfbyte list` shows them.", autocompletion=complete_model),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: JsonOption = False,
) -> None:
    """Remove models that were pulled, and free the disk space they take."""
    from halfbyte.cli.servers import running
    from halfbyte.model import pulled

    folder = gates_.models_folder()
    pulled_models = []
    for name in dict.fromkeys(models):
        model = pulled.find(name, folder)
        if model is None:
            raise UsageError(f"{name} was not pulled; `halfbyte list` shows what was. Folders of your own stay yours.")
        places = {str(model.folder), str(model.folder.resolve())}
        for server in running():
            if server.path and any(server.path == p or server.path.startswith(f"{p}/") for p in places):
                raise UsageError(f"{name} is being served (process {server.pid}); stop it first: halfbyte stop {name}")
        if model not in pulled_models:
            pulled_models.append(model)
    size = sum(m.size for m in pulled_models)
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("stdin is not a terminal; pass --yes to remove without confirmation.")
        names = ", ".join(m.repo for m in pulled_models)
        if not typer.confirm(f"Remove {names} ({size / 1e9:.1f} GB)?", err=True):
            raise typer.Exit(1)
    leftovers = [path for m in pulled_models for path in pulled.remove(m)]
    if json:
        print_json({"removed": [m.repo for m in pulled_models], "bytes": size, "kept": [str(p) for p in leftovers]})
        return
    for m in pulled_models:
        err.print(f"removed {m.repo} ({m.size / 1e9:.1f} GB)", markup=False)
    for path in leftovers:
        err.print(f"left {path}, which no pull had put there", markup=False)


def register(app: typer.Typer) -> None:
    app.command()(rm)
