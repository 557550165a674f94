"""`bench`: pp/tg figures beside the physical ceiling."""

from __future__ import annotations

from typing import Annotated

import typer

from halfbyte.cli.options import (
    DeviceOption,
    JsonOption,
    LoadingBar,
    ModelArgument,
    announce,
    err,
    print_json,
    print_table,
    with_gates,
)
from halfbyte.errors import UsageError
from halfbyte.gates import Gates
from halfbyte.lab import bench as bench_
from halfbyte.lab import environment
from halfbyte.model import ready


def numbers(text: str, what: str, least: int) -> list[int]:
    try:
        values = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise UsageError(f"{what} takes numbers with commas between, not {text!r}.") from None
    if any(v < least for v in values):
        raise UsageError(f"{what} takes numbers of at least {least}, not {text!r}.")
    return values


@with_gates
def bench(
    model: ModelArgument = None,
    pp: Annotated[str, typer.Option("--pp", help="Prompt lengths.")] = "512",
    tg: Annotated[str, typer.Option("--tg", help="Tokens to generate.")] = "32",
    depth: Annotated[str, typer.Option("--depth", help="Tokens already in the cache, untimed.")] = "0",
    runs: Annotated[int, typer.Option(help="Timed runs of each figure, after one to warm up.", min=1)] = 3,
    device: DeviceOption = None,
    json: JsonOption = False,
    *,
    gates: Gates,
) -> None:
    """Prompt and generation speed, each beside what the hardware could do."""
    name = ready.resolve(model)
    where = ready.pick_device(device)
    lengths, counts, depths = numbers(pp, "--pp", 1), numbers(tg, "--tg", 2), numbers(depth, "--depth", 0)
    with LoadingBar(f"loading {name.label}") as progress:
        loaded = ready.load(name, gates, device=where, progress=progress)
    longest = max(depths, default=0) + max([*lengths, *counts], default=0) + 1
    if longest > loaded.config.max_context:
        raise UsageError(f"{longest} tokens are more than this model's context of {loaded.config.max_context}.")
    announce(gates, f"{name.label} on {where}")
    with err.status("measuring") as status:
        figures = bench_.run(loaded, lengths, counts, depths, runs, progress=lambda t: status.update(f"measuring {t}"))
    if json:
        print_json(
            {
                "model": name.label,
                "figures": [f.as_dict() for f in figures],
                "phases": {r: sorted(loaded.plan.record.phases(r)) for r in loaded.plan.selection.chosen},
                "environment": environment.collect(gates),
            }
        )
        return
    print_table(bench_.table(figures), title=f"{name.label}, {figures[0].ceiling_from if figures else ''}")
    for f in figures:
        if not f.valid:
            err.print(f"[red]{f.test} is invalid: {f.reason}[/red]")


def register(app: typer.Typer) -> None:
    app.command()(bench)
