"""`bench` and `eval`: how fast, beside the physical ceiling, and how right."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfbyte.cli import talk
from halfbyte.cli.options import (
    DeviceOption,
    JsonOption,
    LoadingBar,
    ModelArgument,
    announce,
    err,
    out,
    print_json,
    print_table,
    with_gates,
)
from halfbyte.engine.request import SamplingParams
from halfbyte.errors import UsageError
from halfbyte.evals.suite import Suite
from halfbyte.gates import Gates
from halfbyte.lab import environment
from halfbyte.lab import receipts as receipts_
from halfbyte.lab.machine import limit_threads
from halfbyte.lab.measure import eager as eager_
from halfbyte.lab.measure.accuracy import accuracy_result
from halfbyte.lab.result import Cell
from halfbyte.model import load


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
    name = load.resolve_model(model)
    where = load.resolve_device(device)
    lengths, counts, depths = numbers(pp, "--pp", 1), numbers(tg, "--tg", 2), numbers(depth, "--depth", 0)
    with LoadingBar(f"loading {name.label}") as progress:
        loaded = load.load_model(name, gates, device=where, progress=progress)
    longest = max(depths, default=0) + max([*lengths, *counts], default=0) + 1
    if longest > loaded.config.max_context:
        raise UsageError(f"{longest} tokens are more than this model's context of {loaded.config.max_context}.")
    announce(gates, f"{name.label} on {where}")
    with err.status("measuring") as status:
        figures = eager_.run(loaded, lengths, counts, depths, runs, progress=lambda t: status.update(f"measuring {t}"))
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
    print_table(eager_.table(figures), title=f"{name.label}, {figures[0].ceiling_from if figures else ''}")
    for f in figures:
        if not f.valid:
            err.print(f"[red]{f.test} is invalid: {f.reason}[/red]")


@with_gates
def evaluate(
    model: ModelArgument = None,
    suite: Annotated[str, typer.Option(help="Which problems: tiny, or quick (under a minute on 2 cores).")] = "tiny",
    per_task: Annotated[
        int | None, typer.Option("--per-task", min=1, help="Of each task: 8 of tiny, 2 of quick.")
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="Only these, with commas between.")] = None,
    seed: Annotated[int, typer.Option(help="Of the held-out problems.")] = 0,
    wrong: Annotated[bool, typer.Option("--wrong", help="Print every miss.")] = False,
    out_file: Annotated[Path | None, typer.Option("--out", help="Also write a receipt here.")] = None,
    device: DeviceOption = None,
    json: JsonOption = False,
    *,
    gates: Gates,
) -> None:
    """Accuracy per task on held-out problems, greedy and deterministic."""
    problems = Suite(suite, seed, per_task, [t.strip() for t in tasks.split(",")] if tasks else None)
    limit_threads(load.resolve_device(device), load.weight_bytes(load.resolve_model(model), gates))
    with talk.open_engine(model, device, gates) as engine:

        def answer(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
            made = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens))
            return [c.tokens for c in made]

        with err.status("evaluating") as status:
            report = problems.run(
                engine.tokenizer, answer, progress=lambda t, s: status.update(f"evaluated {t}: {s.right}/{s.problems}")
            )
    name = load.resolve_model(model)
    if out_file is not None:
        shape = {"suite": suite, "seed": seed, "per_task": report.per_task}
        cell = Cell("accuracy", name.label, gates=gates.changes(), path="engine", shape=shape)
        measured = {} if name.path is None else receipts_.weights(name.path)
        receipts_.result_file("halfbyte eval", [accuracy_result(report.to_json(), cell)], measured).write(out_file)
    if json:
        print_json(report.to_json() | {"environment": environment.collect(gates)})
        return
    out.print(report.table(), markup=False)
    if wrong:
        for miss in report.wrong:
            out.print(
                f"\n{miss['task']}: …{miss['question']}\n  {miss['expected']!r} expected, {miss['got']!r}", markup=False
            )


def register(app: typer.Typer) -> None:
    app.command()(bench)
    app.command("eval")(evaluate)
