"""How another engine is started: the options that `check` and `bench` share."""

from __future__ import annotations

from typing import Annotated

import typer

PANEL = "Engine"

EngineFlagOption = Annotated[
    list[str] | None,
    typer.Option("--engine-flag", help="A flag to pass on to the engine; repeat it for more.", rich_help_panel=PANEL),
]
EngineVariableOption = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-env",
        metavar="NAME=VALUE",
        help="A variable for the engine's environment; repeat it for more.",
        rich_help_panel=PANEL,
    ),
]
EnginePythonOption = Annotated[
    str | None,
    typer.Option("--engine-python", help="The Python that vLLM or SGLang is installed in.", rich_help_panel=PANEL),
]
