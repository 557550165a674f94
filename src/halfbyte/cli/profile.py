"""`profile`: where a token's time goes beside the roofline, or what a GPU that is not here would do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfbyte.cli.options import DeviceOption, JsonOption, ModelArgument, with_gates
from halfbyte.gates import Gates


@with_gates
def profile(
    model: ModelArgument = None,
    tokens: Annotated[int, typer.Option(min=1, help="How many decode steps to look at.")] = 16,
    depth: Annotated[int, typer.Option(min=1, help="How many tokens the cache holds already.")] = 2048,
    batch: Annotated[int, typer.Option(min=1, max=64, help="How many sequences decode together.")] = 1,
    pp: Annotated[int, typer.Option("--pp", min=0, help="The length of the prompt to look at; 0 leaves it out.")] = 512,
    device: DeviceOption = None,
    predicted: Annotated[
        str | None,
        typer.Option(
            "--predict", metavar="GPU[,GPU]", help="Predict how fast 120b or 20b decodes on these GPUs instead."
        ),
    ] = None,
    shape: Annotated[str, typer.Option("--model", help="With --predict: the same as MODEL.")] = "120b",
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", help="Read this file instead: torch's trace (JSON), an nsys export (SQLite), or a profile."
        ),
    ] = None,
    out_file: Annotated[Path | None, typer.Option("--out", help="Also write a receipt to this file.")] = None,
    json: JsonOption = False,
    *,
    gates: Gates,
) -> None:
    """Show where a token's time goes, by category, against the roofline; or predict the speed of a GPU by its name."""
    from halfbyte.cli import profiling

    if trace is not None:
        profiling.show_trace(trace, json)
    elif predicted is not None:
        profiling.show_predictions(predicted, (model or shape).removeprefix("random:"), gates, depth, json)
    else:
        profiling.show_model(model, tokens, depth, batch, pp, device, out_file, json, gates)


def register(app: typer.Typer) -> None:
    app.command()(profile)
