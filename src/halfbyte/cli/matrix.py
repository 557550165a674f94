"""`matrix`: level 6 of `check` alone."""

from __future__ import annotations

from dataclasses import replace

import typer

from halfbyte.cli.check import run_levels
from halfbyte.cli.options import DeviceOption, JsonOption, ModelArgument, with_record
from halfbyte.lab.options import CheckOptions


@with_record("options", CheckOptions, only=("engine", "full", "out", "resume"))
def matrix(
    model: ModelArgument = None, device: DeviceOption = None, json: JsonOption = False, *, options: CheckOptions
) -> None:
    """Try every preset, and gates (switches for kernels and formats) in pairs: start, compare, time briefly."""
    run_levels(["6"], replace(options, model=model, device=device), json)


def register(app: typer.Typer) -> None:
    app.command()(matrix)
