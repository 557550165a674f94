"""`check`: the test protocol, level by level, for any engine."""

from __future__ import annotations

import datetime
import json as json_
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from halfbyte.cli.engine_options import PANEL, EngineFlagOption, EnginePythonOption, EngineVariableOption
from halfbyte.cli.options import (
    DeviceOption,
    JsonOption,
    check_number,
    err,
    model_names,
    out,
    print_json,
    pull_if_missing,
    with_gates,
)
from halfbyte.errors import UsageError
from halfbyte.gates import PRESETS, Gates

if TYPE_CHECKING:
    from halfbyte.lab.levels.protocol import Outcome
    from halfbyte.lab.result import ResultFile

Stress = "Stress"
Benchmark = "Benchmark"


@with_gates
def check(
    levels: Annotated[
        list[str] | None, typer.Argument(metavar="LEVEL", help="1, 1.5, 2, 3, 4, 5, 6, their names, or all.")
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
    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            help="halfbyte, vllm, vllm+halfbyte, sglang, llama.cpp, or the address of a running one.",
            rich_help_panel=PANEL,
        ),
    ] = "halfbyte",
    engine_flag: EngineFlagOption = None,
    engine_env: EngineVariableOption = None,
    engine_python: EnginePythonOption = None,
    engine_log: Annotated[
        Path | None,
        typer.Option("--engine-log", help="The log of an engine that is already running.", rich_help_panel=PANEL),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            help="A profiler's trace of the engine: torch's JSON or an nsys .sqlite export.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    baseline: Annotated[str, typer.Option("--baseline", help="The preset to compare the gates with.")] = "exact",
    reference: Annotated[
        Path | None, typer.Option("--reference", help="The answers to compare with, from --write-reference.")
    ] = None,
    write_reference: Annotated[
        Path | None, typer.Option("--write-reference", help="Write this engine's answers as a reference, and exit.")
    ] = None,
    suite: Annotated[
        str | None, typer.Option("--suite", help="The problems of level 2: quick or tiny; by default the reference's.")
    ] = None,
    pp: Annotated[str, typer.Option("--pp", help="Prompt lengths in tokens.", rich_help_panel=Benchmark)] = "2048",
    tg: Annotated[str, typer.Option("--tg", help="How many tokens to generate.", rich_help_panel=Benchmark)] = "32,128",
    depth: Annotated[
        str, typer.Option("--depth", help="How many tokens the cache holds already.", rich_help_panel=Benchmark)
    ] = "0",
    concurrency: Annotated[
        str, typer.Option("--concurrency", help="Requests at once.", rich_help_panel=Benchmark)
    ] = "1",
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Timed runs of each.", rich_help_panel=Benchmark)
    ] = 5,
    targets: Annotated[
        Path | None,
        typer.Option("--targets", help="A file of figures to reach; by default this GPU's.", rich_help_panel=Benchmark),
    ] = None,
    prior: Annotated[
        str, typer.Option("--prior", help="Presets on top of which level 5 also measures the gates.")
    ] = "",
    against: Annotated[
        Path | None, typer.Option("--against", help="The results.json of an earlier run, for level 5.")
    ] = None,
    full: Annotated[
        str, typer.Option("--full", help="Gates to combine in full in the matrix, for example moe_kernel,activation.")
    ] = "",
    sequential: Annotated[
        int, typer.Option("--sequential", min=1, help="Requests one by one.", rich_help_panel=Stress)
    ] = 100,
    prefill: Annotated[
        int, typer.Option("--prefill", min=1, help="Tokens of a long prompt.", rich_help_panel=Stress)
    ] = 4096,
    generation: Annotated[
        int, typer.Option("--generation", min=1, help="Tokens of a long answer.", rich_help_panel=Stress)
    ] = 1024,
    load: Annotated[int, typer.Option("--load", min=1, help="Requests under load.", rich_help_panel=Stress)] = 200,
    at_once: Annotated[
        int, typer.Option("--at-once", min=1, help="How many of these at once.", rich_help_panel=Stress)
    ] = 8,
    kit: Annotated[
        Path | None,
        typer.Option(
            "--kit",
            metavar="FILE.zip",
            help="Run levels 1 to 4, self-test and profile, and put it all into one archive to send to us.",
        ),
    ] = None,
    minutes: Annotated[float, typer.Option("--minutes", help="The most minutes that --kit may take.")] = 20.0,
    start_s: Annotated[
        float, typer.Option("--start-limit", help="The most seconds to a first token after the start.")
    ] = 300.0,
    request_s: Annotated[float, typer.Option("--request-limit", help="The most seconds to an answer.")] = 120.0,
    debug: Annotated[
        bool, typer.Option("--debug", help="Start the engine with blocking launches, C++ stacks and API logs: slow.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the matrix that --out FOLDER began; other levels run again.")
    ] = False,
    folder: Annotated[
        Path | None, typer.Option("--out", help="The folder for results, log and diagnostics.", show_default=False)
    ] = None,
    device: DeviceOption = None,
    json: JsonOption = False,
    *,
    gates: Gates,
) -> None:
    """Run the test protocol: smoke, kernel path, correctness, stress, benchmark, regression, matrix."""
    from halfbyte.cli.bench import numbers
    from halfbyte.evals.suite import Suite
    from halfbyte.lab.bench import preset_of
    from halfbyte.lab.levels.answers import make_reference
    from halfbyte.lab.levels.benchmark import Works
    from halfbyte.lab.levels.check_run import finish
    from halfbyte.lab.levels.protocol import CheckOptions, level_numbers, run_levels
    from halfbyte.lab.levels.subject import Subject
    from halfbyte.lab.levels.under_load import Counts
    from halfbyte.lab.peers.engines import engine_named
    from halfbyte.lab.peers.launch import Setup, variables
    from halfbyte.lab.peers.process import Limits

    if kit is not None:
        run_kit(kit, folder, check_number(minutes, "--minutes"), device, json)
    if baseline not in PRESETS:
        raise UsageError(f"there is no preset {baseline!r}; use {', '.join(PRESETS)}.")
    wanted = level_numbers(levels or [])
    limits = Limits(check_number(start_s, "--start-limit"), check_number(request_s, "--request-limit"))
    peer = engine_named(engine)
    place = folder or Path(f"check-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    problems = Suite(suite) if suite else None
    with err.status("preparing") as status:
        started = Setup(model, gates, device, flags=tuple(engine_flag or ()), python=engine_python,
                        environment=variables(engine_env or ()))  # fmt: skip
        setup = peer.prepare(started, status.update)
        subject = Subject(
            peer, setup, place, PRESETS[baseline].gates, preset_of(gates), limits, debug, engine_log, trace,
            status.update,
        )  # fmt: skip
        if write_reference is not None:
            with subject.process("reference") as running:
                made = make_reference(subject, running.asker, problems or Suite("quick"))
            made.write(write_reference)
            err.print(f"{len(made.answers)} answers, {made.right} of them right, in {write_reference}")
            return

        counts = replace(
            Counts(), sequential=sequential, prefill=prefill, generation=generation, load=load, at_once=at_once
        )
        works = Works(
            numbers(pp, "--pp", 1), numbers(tg, "--tg", 2), numbers(depth, "--depth", 0),
            numbers(concurrency, "--concurrency", 1), repeats,
        )  # fmt: skip
        options = CheckOptions(
            counts,
            problems,
            reference,
            works,
            targets,
            prior=words(prior),
            before=earlier(against),
            full=words(full),
            log=matrix_log(folder, resume),
        )
        report = run_levels(subject, wanted, options, lambda o: show(o, json))
        files = finish(report, place)
    if json:
        print_json(
            {"ok": report.ok, "levels": [o.as_dict() for o in report.outcomes], "files": [str(f) for f in files]}
        )
    else:
        out.print(f"{'PASS' if report.ok else 'FAIL'}: {', '.join(str(f) for f in files)}", markup=False)
    raise typer.Exit(0 if report.ok else 1)


def run_kit(archive: Path, folder: Path | None, minutes: float, device: str | None, json: bool) -> NoReturn:
    """Ends the command."""
    import tempfile

    from halfbyte.lab.levels.kit import Kit, make_kit

    if archive.suffix != ".zip":
        raise UsageError(f"--kit writes a .zip archive, not {archive.name!r}.")
    with tempfile.TemporaryDirectory(prefix="halfbyte-kit-") as scratch, err.status("the kit") as status:
        made = Kit(folder or Path(scratch), 60 * minutes, device, status.update, lambda o: show(o, json))
        names = make_kit(made, archive)
    ok = bool(made.outcomes) and all(o.verdict == "PASS" for o in made.outcomes)
    if json:
        levels = [o.as_dict() for o in made.outcomes]
        print_json({"ok": ok, "archive": str(archive), "files": names, "left_out": made.left_out, "levels": levels})
    else:
        for text in made.left_out:
            out.print(f"left out: {text}", markup=False)
        out.print(f"{archive} has {len(names)} files; `halfbyte report {archive}` shows it.", markup=False)
    raise typer.Exit(0 if ok else 1)


def show(o: Outcome, json: bool) -> None:
    """A level as it ends, for whoever watches."""
    if not json:
        out.print(f"level {o.level:4} {o.name:12} {o.verdict:8} {o.seconds:6.1f} s", markup=False)
        for reason in o.reasons:
            out.print(f"    {reason}", markup=False)


def matrix_log(folder: Path | None, resume: bool) -> Path | None:
    """Cells of a matrix as they are measured. Without --resume what an interrupted one left is thrown away."""
    if folder is None:
        if resume:
            raise UsageError("--resume goes on with the matrix of a folder; name it with --out.")
        return None
    log = folder / "matrix.runs"
    if not resume:
        log.unlink(missing_ok=True)
    return log


def words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def earlier(path: Path | None) -> ResultFile | None:
    """The results of an earlier run."""
    from halfbyte.lab.result import from_json

    if path is None:
        return None
    try:
        return from_json(json_.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as e:
        raise UsageError(f"{path} holds no results ({e}).") from None


def register(app: typer.Typer) -> None:
    app.command()(check)
