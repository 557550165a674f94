"""How another engine is started: the options that `check` and `bench` share."""

from __future__ import annotations

from typing import Annotated

import typer

PANEL = "Engine"

EngineFlagOption = Annotated[
    list[str] | None,
    typer.Option("--engine-flag", help="A flag of the engine's own, passed on; repeat it.", rich_help_panel=PANEL),
]
EngineVariableOption = Annotated[
    list[str] | None,
    typer.Option(
        "--engine-env", metavar="NAME=VALUE", help="A variable of the engine's own; repeat it.", rich_help_panel=PANEL
    ),
]
EnginePythonOption = Annotated[
    str | None,
    typer.Option("--engine-python", help="Interpreter of vLLM's or SGLang's environment.", rich_help_panel=PANEL),
]
