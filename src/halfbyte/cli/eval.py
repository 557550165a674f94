"""`eval`: how right a model's answers are, task by task."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from halfbyte.cli.options import (
    Activity,
    DeviceOption,
    JsonOption,
    ModelArgument,
    open_engine,
    out,
    print_json,
    with_gates,
)
from halfbyte.gates import Gates


@with_gates
def evaluate(
    model: ModelArgument = None,
    suite: Annotated[
        str,
        typer.Option(
            help="Which problems to ask: tiny, quick (under a minute on 2 cores), or natural (100 written by hand)."
        ),
    ] = "tiny",
    per_task: Annotated[
        int | None,
        typer.Option("--per-task", min=1, help="How many problems of each task; by default 8 of tiny, 2 of quick."),
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="Ask only these tasks, for example arithmetic,lists.")] = None,
    seed: Annotated[int, typer.Option(help="The seed that the problems are drawn with.")] = 0,
    wrong: Annotated[bool, typer.Option("--wrong", help="Print every problem that was answered wrong.")] = False,
    out_file: Annotated[Path | None, typer.Option("--out", help="Also write the result to this file.")] = None,
    device: DeviceOption = None,
    json: JsonOption = False,
    *,
    gates: Gates,
) -> None:
    """Measure accuracy on held-out problems, task by task, greedy and deterministic."""
    from halfbyte.engine.request import SamplingParams
    from halfbyte.evals.suite import Suite
    from halfbyte.lab import environment
    from halfbyte.lab import receipts as receipts_
    from halfbyte.lab.machine import limit_threads
    from halfbyte.lab.measure.accuracy import accuracy_result
    from halfbyte.lab.options import preset_of
    from halfbyte.lab.result import Cell
    from halfbyte.model import load

    problems = Suite(suite, seed, per_task, [t.strip() for t in tasks.split(",")] if tasks else None)
    limit_threads(load.resolve_device(device), load.weight_bytes(load.resolve_model(model), gates))
    with open_engine(model, device, gates) as engine:

        def answer(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
            answers = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens))
            return [c.tokens for c in answers]

        with Activity("evaluating") as status:
            report = problems.run(
                engine.tokenizer, answer, progress=lambda t, s: status.update(f"evaluated {t}: {s.right}/{s.problems}")
            )
    name = load.resolve_model(model)
    if out_file is not None:
        shape = {"suite": suite, "seed": seed, "per_task": report.per_task}
        facts, gpu = load.read_facts(name), load.resolve_device(device).type != "cpu"
        preset = preset_of(gates, gpu=gpu, stored=facts.formats.coarsest())
        cell = Cell("accuracy", name.label, preset, gates.changes(), "engine", shape)
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
    app.command("eval")(evaluate)
