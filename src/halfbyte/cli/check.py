"""`check`: the test protocol, level by level, for any engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from halfbyte.cli.options import (
    Activity,
    DeviceOption,
    JsonOption,
    err,
    model_names,
    out,
    print_json,
    print_table,
    pull_if_missing,
    with_gates,
    with_record,
)
from halfbyte.errors import UsageError
from halfbyte.gates import Gates
from halfbyte.lab.options import CheckOptions, EngineStart, QualityOptions, StressCounts, Works

REASONS = 4  # of a verdict that a terminal shows

if TYPE_CHECKING:
    from halfbyte.lab.levels.protocol import Outcome
    from halfbyte.lab.levels.quality_report import QualityReport


@with_gates
@with_record("counts", StressCounts)
@with_record("works", Works)
@with_record("start", EngineStart)
@with_record("quality", QualityOptions)
@with_record("options", CheckOptions)
def check(
    levels: Annotated[
        list[str] | None,
        typer.Argument(metavar="LEVEL", help="1, 1.5, 2, 3, 4, 5, 6, their names, or all; or quality [MODEL]."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="The model to check, as for `serve`. Without it: the embedded model.",
            show_default=False,
            callback=pull_if_missing,
            autocompletion=model_names,
        ),
    ] = None,
    device: DeviceOption = None,
    json: JsonOption = False,
    *,
    options: CheckOptions,
    start: EngineStart,
    works: Works,
    counts: StressCounts,
    quality: QualityOptions,
    gates: Gates,
) -> None:
    """Run the test protocol: smoke, kernel path, correctness, stress, benchmark, regression, matrix; or `quality`."""
    options = replace(options, model=model, gates=gates, device=device, start=start, works=works, counts=counts)
    options = replace(options, quality=quality)
    if options.kit is not None:
        run_kit(options, options.kit, json)
    if levels and levels[0] == "quality":
        run_quality(levels[1:], options, json)
    if options.write_reference is not None:
        write_reference(options, options.write_reference)
    else:
        run_levels(levels or [], options, json)


def run_levels(levels: Sequence[str], options: CheckOptions, json: bool) -> NoReturn:
    """Ends the command."""
    from halfbyte.lab.check import run_check

    with Activity("preparing") as status:
        try:
            run = run_check(levels, options, status.update, lambda o: show(o, json))
        except KeyboardInterrupt:
            err.print("halfbyte: interrupted; the levels that had ended are in the folder of this run.")
            raise typer.Exit(130) from None
    ok, files = run.report.ok, [str(f) for f in run.files]
    if json:
        print_json({"ok": ok, "levels": [o.as_dict() for o in run.report.outcomes], "files": files})
    else:
        others = [f"level {o.level} {o.verdict}" for o in run.report.outcomes if o.verdict != "PASS"]
        passed = len(run.report.outcomes) - len(others)
        out.print(f"{passed} of {len(run.report.outcomes)} levels PASS" + "".join(f", {o}" for o in others) + ".")
        out.print(f"Files: {', '.join(files)}", markup=False)
    raise typer.Exit(0 if ok else 1)


def run_quality(models: Sequence[str], options: CheckOptions, json: bool) -> NoReturn:
    """Ends the command."""
    from halfbyte.cli.models import offer_to_pull
    from halfbyte.lab.check import run_quality as run

    if len(models) > 1 or (models and options.model is not None):
        raise UsageError("quality is checked alone, on one model: halfbyte check quality MODEL.")
    if models:
        options = replace(options, model=offer_to_pull(models[0]))
    with Activity("preparing") as status:
        report, files = run(options, status.update)
    if json:
        print_json({"ok": report.ok, "levels": [report.as_dict()], "files": [str(f) for f in files]})
    else:
        show_quality(report)
    raise typer.Exit(0 if report.ok else 1)


def show_quality(report: QualityReport) -> None:
    rows = [
        {
            "preset": c.label, "on": f"{x.section}{'' if x.judged else '*'}",
            "tokens": str(x.positions), "KL": f"{x.kl.value:.2g}", "95 %": f"{x.kl.low:.2g} to {x.kl.high:.2g}",
            "same": f"{x.same.value:.2%}", "perplexity": f"{x.perplexity.value - 1:+.2%}",
        }
        for c in report.candidates
        for x in c.comparisons
    ]  # fmt: skip
    if rows:
        print_table(rows, left=2)
    for c in report.candidates:
        same, right, exact_right, problems = c.answers
        answers = (
            f"needles {c.needles[0]} of {c.needles[2]} (exact {c.needles[1]}), answers {same} of {problems} the same"
        )
        right_text = f"{right} right (exact {exact_right})"
        out.print(f"{c.label}: {answers}, {right_text}" if not c.refused else c.label, markup=False)
        out.print(f"    {c.verdict}: {c.worst}", markup=False)
    if any(not x.judged for c in report.candidates for x in c.comparisons):
        out.print("* not judged: exact itself predicts this text worse than a uniform guess would", markup=False)
    out.print(
        f"{report.verdict} on {report.machine}; stored in {report.record or 'no place that can be written'}",
        markup=False,
    )


def write_reference(options: CheckOptions, path: Path) -> None:
    from halfbyte.lab.check import write_reference as write

    with Activity("preparing") as status:
        reference = write(options, path, status.update)
    err.print(f"{len(reference.answers)} answers, {reference.right} of them right, in {path}")


def run_kit(options: CheckOptions, archive: Path, json: bool) -> NoReturn:
    """Ends the command."""
    from halfbyte.lab.check import run_kit as run

    with Activity("the kit") as status:
        kit, names = run(options, archive, status.update, lambda o: show(o, json))
    ok = bool(kit.outcomes) and all(o.verdict == "PASS" for o in kit.outcomes)
    if json:
        levels = [o.as_dict() for o in kit.outcomes]
        print_json({"ok": ok, "archive": str(archive), "files": names, "left_out": kit.left_out, "levels": levels})
    else:
        for text in kit.left_out:
            out.print(f"left out: {text}", markup=False)
        out.print(f"{archive} has {len(names)} files; `halfbyte report {archive}` shows it.", markup=False)
    raise typer.Exit(0 if ok else 1)


def show(o: Outcome, json: bool) -> None:
    """A level as it ends, unless the output is JSON."""
    if not json:
        out.print(f"level {o.level:4} {o.name:12} {o.verdict:12} {o.seconds:6.1f} s  {o.count}.", markup=False)
        for reason in o.reasons[:REASONS]:
            out.print(f"    {reason}", markup=False)
        if len(o.reasons) > REASONS:
            out.print(f"    … and {len(o.reasons) - REASONS} more, in test_log.md.", markup=False)
        if o.advice:
            out.print(f"    What to do: {o.advice}", markup=False)
        for r in o.results if o.level == "4" else ():
            parts = [f"{f.name} {f.value:.5g} {f.unit}" for f in r.figures]
            if "ratio" in (b := r.detail.get("baseline") or {}):
                parts.append(f"{b['ratio'] - 1:+.1%} ({b['low'] - 1:+.1%} to {b['high'] - 1:+.1%}) against baseline")
            if (share := r.detail.get("acceptance")) is not None:
                parts.append(f"{share:.0%} of drafts accepted")
            if parts:
                out.print(f"    {r.cell.label}: {', '.join(parts)}", markup=False)


def register(app: typer.Typer) -> None:
    app.command()(check)
