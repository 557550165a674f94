"""`bench`: how fast the engine is here, each figure beside the physical ceiling."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from halfbyte.cli.engine_options import EngineFlagOption, EnginePythonOption, EngineVariableOption
from halfbyte.cli.options import (
    DeviceOption,
    JsonOption,
    LoadingBar,
    ModelArgument,
    SelfTestOption,
    announce,
    check_number,
    err,
    print_json,
    print_table,
    with_gates,
)
from halfbyte.errors import UsageError
from halfbyte.gates import Gates

Other = "Other measurements"
Load = "A server under load"


def numbers(text: str, what: str, least: int) -> tuple[int, ...]:
    try:
        values = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise UsageError(f"{what} takes numbers with commas between, not {text!r}.") from None
    if any(v < least for v in values):
        raise UsageError(f"{what} takes numbers of at least {least}, not {text!r}.")
    return values


def rates(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        values = (float("nan"),)
    if any(not 0 < v < float("inf") for v in values):
        raise UsageError(f"--rate takes numbers above 0 with commas between, not {text!r}.")
    return values


@with_gates
def bench(
    model: ModelArgument = None,
    pp: Annotated[str, typer.Option("--pp", help="Prompt lengths in tokens, for example 512,2048.")] = "512",
    tg: Annotated[str, typer.Option("--tg", help="How many tokens to generate.")] = "32",
    depth: Annotated[str, typer.Option("--depth", help="How many tokens the cache holds already.")] = "0",
    concurrency: Annotated[
        str, typer.Option("--concurrency", help="How many requests at once; speeds are their total.")
    ] = "1",
    repeats: Annotated[
        int, typer.Option("--repeats", "--runs", help="Timed runs of each figure, after a warm-up.", min=1)
    ] = 3,
    out_file: Annotated[Path | None, typer.Option("--out", help="Also write a receipt to this file.")] = None,
    served: Annotated[
        bool, typer.Option("--served", help="Then do the same over HTTP through `halfbyte serve`, and print the ratio.")
    ] = False,
    url: Annotated[str | None, typer.Option("--url", help="Measure the server at this address.")] = None,
    engine: Annotated[
        str, typer.Option("--engine", help="Measure this engine over HTTP: halfbyte, vllm, llama.cpp … or an address.")
    ] = "",
    engine_flag: EngineFlagOption = None,
    engine_env: EngineVariableOption = None,
    engine_python: EnginePythonOption = None,
    workload: Annotated[
        str,
        typer.Option(
            "--workload", help="What users do: synthetic, chat, replay, or replay:FILE.", rich_help_panel=Load
        ),
    ] = "",
    rate: Annotated[
        str,
        typer.Option(
            "--rate",
            help="How many sessions begin each second, at random, whatever the server does.",
            rich_help_panel=Load,
        ),
    ] = "",
    sessions: Annotated[
        int,
        typer.Option("--sessions", min=0, help="How many sessions each figure takes; 0: a few.", rich_help_panel=Load),
    ] = 0,
    turns: Annotated[
        int | None,
        typer.Option(
            "--turns",
            min=1,
            help="How many turns a chat has, or how many of a recording to play.",
            rich_help_panel=Load,
        ),
    ] = None,
    limits: Annotated[
        str,
        typer.Option(
            "--limits",
            help="What counts as in time, in milliseconds: ttft=1000,tpot=50,e2e=20000.",
            rich_help_panel=Load,
        ),
    ] = "",
    pace: Annotated[
        float,
        typer.Option(
            "--pace",
            help="Play a recording this many times as fast: its pauses are divided by it.",
            rich_help_panel=Load,
            callback=lambda n: check_number(n, "--pace"),
        ),
    ] = 1.0,
    seed: Annotated[
        int, typer.Option("--seed", help="The seed of everything that is drawn at random.", rich_help_panel=Load)
    ] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue what --out FILE began.")] = False,
    store: Annotated[Path | None, typer.Option("--store", help="Also keep the result in this folder.")] = None,
    eager: Annotated[
        bool, typer.Option("--eager", help="Time a single sequence, without engine or graphs.", rich_help_panel=Other)
    ] = False,
    graph: Annotated[
        bool,
        typer.Option("--graph", help="Time graph replays alone, without engine or sampler.", rich_help_panel=Other),
    ] = False,
    phases: Annotated[
        str, typer.Option("--phases", help="Time every phase alone, over this many rows.", rich_help_panel=Other)
    ] = "",
    sustain: Annotated[
        float,
        typer.Option(
            "--sustain",
            help="Decode for this many seconds, and show watts and MHz.",
            rich_help_panel=Other,
            callback=lambda seconds: check_number(seconds, "--sustain"),
        ),
    ] = 0.0,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="On a GPU, first compare the kernels with the reference.")
    ] = True,
    require_native: Annotated[
        bool, typer.Option("--require-native", help="Fail unless our own kernels run everywhere.")
    ] = False,
    self_test: SelfTestOption = "auto",
    device: DeviceOption = None,
    json: JsonOption = False,
    *,
    gates: Gates,
) -> None:
    """Measure the speed of prompts and of generation, each beside what the hardware could do."""
    from halfbyte.lab.bench import BenchOptions, keep, rows_of, run_bench, run_log
    from halfbyte.lab.measure.traffic import Limits
    from halfbyte.lab.peers.launch import Setup, variables
    from halfbyte.lab.served import Traffic
    from halfbyte.lab.store import Store
    from halfbyte.model import load

    started = Setup(None, flags=tuple(engine_flag or ()), python=engine_python, environment=variables(engine_env or ()))
    options = BenchOptions(
        model=model, gates=gates, device=device, prompts=numbers(pp, "--pp", 1), tokens=numbers(tg, "--tg", 2),
        depths=numbers(depth, "--depth", 0), concurrency=numbers(concurrency, "--concurrency", 1), repeats=repeats,
        eager=eager, graph=graph, phases=numbers(phases, "--phases", 1), sustain=sustain, served=served, url=url,
        check=check, require_native=require_native, engine=engine, started=started, log=run_log(out_file, resume),
        traffic=Traffic(workload, rates(rate), sessions, Limits.parse(limits), turns, pace, seed),
    )  # fmt: skip
    loaded = None
    if not (url or engine or workload):
        name, where = load.resolve_model(model), load.resolve_device(device)
        announce(gates, f"{name.label} on {where}", cpu=where.type == "cpu")
        with LoadingBar(f"loading {name.label}") as progress:
            weights = load.load_model(name, gates, device=where, progress=progress, self_test=self_test)
        loaded = [weights]
        del weights
    with err.status("measuring") as status:
        file = run_bench(options, lambda text: status.update(f"measuring {text}"), loaded.pop if loaded else None)
    keep(file, out_file)
    if store is not None:
        Store(store).add(file)
    if json:
        print_json(file.as_json())
    else:
        sources = {f.ceiling.source for r in file.results for f in r.figures if f.ceiling is not None}
        print_table(rows_of(file.results), title=f"ceilings: {', '.join(sorted(sources))}" if sources else None)
        for r in file.results:
            if r.refused:
                err.print(f"{r.cell.path} {r.cell.label} is {r.state}: {r.refused}", style="red", markup=False)
            for target in (t for t in r.targets if not t.ok):
                note = f" ({target.note})" if target.note else ""
                err.print(f"{r.cell.path} {r.cell.label}: not so: {target.what}{note}", style="yellow", markup=False)
    if any(r.refused for r in file.results):
        sys.exit(1)


def register(app: typer.Typer) -> None:
    app.command()(bench)
