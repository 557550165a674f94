"""`explain`: which kernels each regime would take, and why each other one is refused, for any GPU, without that GPU."""

from __future__ import annotations

from typing import Annotated

import typer

from halfbyte.cli.models import complete_model
from halfbyte.cli.options import MODEL, JsonOption, with_gates
from halfbyte.gates import Gates

ARCHES = ("cpu", "sm90", "sm100", "sm120", "sm121")  # of plan.phase, which needs torch; a test holds them together


@with_gates
def explain(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", show_default=False,
            help=f"{MODEL}. Without it: gpt-oss-120b as OpenAI publishes it, which need not be here.",
            autocompletion=complete_model,
        ),
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(
            help=f"The machine to explain: {', '.join(ARCHES)}, or a GPU (rtx5090, pro6000, b200, gb10, h200). "
            "By default this one.",
            autocompletion=lambda: ARCHES,
        ),
    ] = None,
    prove: Annotated[
        bool, typer.Option("--prove", help="Also compile the kernels for it and read their machine code.")
    ] = False,
    engine: Annotated[str, typer.Option(help="halfbyte, or vllm: our kernels inside vLLM.")] = "halfbyte",
    json: JsonOption = False,
    *,
    gates: Gates,
) -> None:  # fmt: skip
    """Say which kernels would run on a machine, this one or another, and why every other one is refused."""
    from halfbyte.cli.explanation import explain as explain_

    explain_(model, arch, prove, engine, json, gates)


def register(app: typer.Typer) -> None:
    app.command()(explain)
