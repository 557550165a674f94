"""`pull`: fetch a model, only the files it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfbyte import gates as gates_
from halfbyte.cli.options import JsonOption, LoadingBar, err, print_json


def pull(
    model: Annotated[str, typer.Argument(help="As openai/gpt-oss-20b; or 20b, 120b.", show_default=False)],
    folder: Annotated[Path | None, typer.Option("--to", help="Where to put it.")] = None,
    revision: Annotated[str, typer.Option(help="Branch, tag or commit.")] = "main",
    file: Annotated[str | None, typer.Option(help="One file by name, for GGUF repositories.")] = None,
    json: JsonOption = False,
) -> None:
    """Fetch a model: only the files it needs, resumed where it stopped, every file checked."""
    from halfbyte.model import pull as pull_
    from halfbyte.model.hub import Hub

    environ = gates_.child_environment()
    gates_.check_environment(environ)
    root = gates_.setting("HALFBYTE_MODELS_DIR")
    with LoadingBar(f"pulling {model}") as progress:
        where = pull_.pull(
            model,
            folder,
            models=Path(root).expanduser() if root else None,
            hub=Hub.from_environ(environ),
            revision=revision,
            file=file,
            report=lambda p: progress(p.done, p.total, p.file),
        )
    if json:
        print_json({"folder": str(where)})
    else:
        err.print(f"{model} is in {where}; next: halfbyte serve {where}")


def register(app: typer.Typer) -> None:
    app.command()(pull)
