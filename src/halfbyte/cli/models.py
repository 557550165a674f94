"""Models by name on the command line: fetching one, offering to fetch one that is missing, and names for completion."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from halfbyte import gates as gates_
from halfbyte.cli.options import LoadingBar
from halfbyte.model import pulled

if TYPE_CHECKING:
    from halfbyte.model.hub import Hub

SIZES = {"openai/gpt-oss-20b": "14 GB", "openai/gpt-oss-120b": "65 GB"}  # of the files that are needed


def hub() -> Hub:
    from halfbyte.model.hub import Hub

    environ = gates_.inherited()  # HF_TOKEN is for the hub
    gates_.check_environment(environ)
    return Hub.from_environ(environ)


def fetch(model: str, folder: Path | None = None, revision: str = "main", file: str | None = None) -> Path:
    """Pull a model with a progress bar; returns the folder or file that opens it."""
    from halfbyte.model.pull import pull

    with LoadingBar(f"pulling {model}") as progress:
        return pull(
            model, folder, models=gates_.models_folder(), hub=hub(), revision=revision, file=file,
            report=lambda p: progress(p.done, p.total, p.file),
        )  # fmt: skip


def offer_to_pull(text: str) -> str:
    """The model's name as it was typed. Where it could be pulled and is not here, a person at the terminal is asked."""
    name, file = pulled.named_file(text)
    repo = pulled.repository(name)
    if repo is None or Path(text).expanduser().exists() or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return text
    if pulled.path_of(text, gates_.models_folder()) is None:
        size = f" ({SIZES[repo]})" if repo in SIZES else ""
        if typer.confirm(f"{repo} is not on this machine yet. Pull it now{size}?", default=True, err=True):
            fetch(repo, file=file)
    return text


def complete_model(incomplete: str) -> list[str]:
    """What the shell offers for MODEL; where nothing fits it falls back to file names."""
    here = [m.repo for m in pulled.pulled_models(gates_.models_folder()) if m.complete]
    short = [name for name, repo in pulled.NAMES.items() if repo in here and ":" not in name]
    return [*short, *here, "tiny", "random:20b", "random:120b"]
