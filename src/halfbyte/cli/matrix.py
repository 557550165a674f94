"""`matrix`: level 6 of `check` alone."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated

import typer

from halfbyte.cli.check import check
from halfbyte.cli.options import DeviceOption, JsonOption, ModelArgument
from halfbyte.gates import Gates


def matrix(
    model: ModelArgument = None,
    engine: Annotated[str, typer.Option("--engine", help="The engine, as for `check`.")] = "halfbyte",
    full: Annotated[
        str,
        typer.Option(
            "--full", help="Gates to combine in full, for example moe_kernel,activation; by default in pairs."
        ),
    ] = "",
    folder: Annotated[Path | None, typer.Option("--out", help="The folder for results and logs.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue what --out FOLDER began.")] = False,
    device: DeviceOption = None,
    json: JsonOption = False,
) -> None:
    """Try every preset, and gates (switches for kernels and formats) in pairs: start, compare, time briefly."""
    run = inspect.unwrap(check)  # as it is called once its gates are made
    run(
        ["6"], model=model, engine=engine, full=full, folder=folder, resume=resume, device=device, json=json,
        gates=Gates(),
    )  # fmt: skip


def register(app: typer.Typer) -> None:
    app.command()(matrix)
