"""`list`: the models that are on this machine."""

from __future__ import annotations

import datetime

import typer

from halfbyte import gates as gates_
from halfbyte.cli.options import JsonOption, err, print_json, print_table


def list_models(json: JsonOption = False) -> None:
    """List the models on this machine: what was pulled, and the embedded one."""
    from halfbyte.model import pulled

    folder = gates_.models_folder()
    models = pulled.pulled_models(folder)
    if json:
        print_json(
            {
                "folder": str(folder),
                "models": [
                    {
                        "name": m.repo, "short": short_name(m.repo), "bytes": m.size, "complete": m.complete,
                        "commit": m.record.commit or None, "folder": str(m.folder.resolve()), "fetched": m.fetched,
                    }
                    for m in models
                ],
            }
        )  # fmt: skip
        return
    rows = [{"name": "tiny", "short": "", "size": "", "fetched": "part of halfbyte"}]
    for m in models:
        when = "" if m.fetched is None else f"{datetime.datetime.fromtimestamp(m.fetched):%Y-%m-%d %H:%M}"
        state = when if m.complete else "not complete; pull it again to go on"
        rows.append({"name": m.repo, "short": short_name(m.repo), "size": f"{m.size / 1e9:.1f} GB", "fetched": state})
    print_table(rows)
    if not models:
        err.print(f"nothing was pulled into {folder} yet; `halfbyte pull 20b` fetches gpt-oss-20b", markup=False)


def short_name(repo: str) -> str:
    """The shortest name that the command line takes for a repository."""
    from halfbyte.model.pulled import NAMES

    return min((name for name, target in NAMES.items() if target == repo), key=len, default="")


def register(app: typer.Typer) -> None:
    app.command("list")(list_models)
