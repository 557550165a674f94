"""`bench`: how fast the engine is here, each figure with its physical ceiling."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from halfbyte.cli.options import (
    Activity,
    DeviceOption,
    JsonOption,
    LoadingBar,
    ModelArgument,
    announce,
    err,
    print_json,
    print_table,
    with_gates,
    with_record,
)
from halfbyte.gates import Gates
from halfbyte.lab.options import BenchOptions, EngineStart, WorkloadOptions

if TYPE_CHECKING:
    from halfbyte.lab.result import ResultFile


@with_gates
@with_record("load", WorkloadOptions)
@with_record("start", EngineStart)
@with_record("options", BenchOptions)
def bench(
    model: ModelArgument = None,
    device: DeviceOption = None,
    json: JsonOption = False,
    *,
    options: BenchOptions,
    start: EngineStart,
    load: WorkloadOptions,
    gates: Gates,
) -> None:
    """Measure the speed of prompts and of generation, each beside what the hardware could do."""
    from halfbyte.lab.bench import run_bench
    from halfbyte.model.load import resolve_device, resolve_model

    options = replace(options, model=model, gates=gates, device=device, start=start, load=load)
    if not options.peer:
        where = resolve_device(device)
        announce(gates, f"{resolve_model(model).label} on {where}", cpu=where.type == "cpu")
    with ExitStack() as stack:
        activity: list[Activity] = []

        def progress(text: str) -> None:
            if not activity:  # not before the model is read, which has a bar of its own
                activity.append(stack.enter_context(Activity(f"measuring {text}")))
            activity[0].update(f"measuring {text}")

        file = run_bench(options, progress, LoadingBar)
    if json:
        print_json(file.as_json())
    else:
        show(file)
    if any(r.refused for r in file.results):
        sys.exit(1)


def show(file: ResultFile) -> None:
    from halfbyte.lab.bench import rows_of

    sources = {f.ceiling.source for r in file.results for f in r.figures if f.ceiling is not None}
    print_table(rows_of(file.results), title=f"ceilings: {', '.join(sorted(sources))}" if sources else None)
    for r in file.results:
        if r.refused:
            err.print(f"{r.cell.path} {r.cell.label} is {r.state}: {r.refused}", style="red", markup=False)
        for target in (t for t in r.targets if not t.ok):
            note = f" ({target.note})" if target.note else ""
            err.print(f"{r.cell.path} {r.cell.label}: not so: {target.what}{note}", style="yellow", markup=False)


def register(app: typer.Typer) -> None:
    app.command()(bench)
