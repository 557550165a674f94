"""`halfbyte bench`: what a user of a model gets on this machine, each figure beside its ceiling.

    python -m halfbyte.lab.bench random:120b --preset fast --pp 2048 --tg 128 --depth 2048 --concurrency 1,8

needs none of the command line's packages. By default the engine is measured as `halfbyte serve` builds it. `--served`
also starts `halfbyte serve` and gives it the same work over HTTP; `--engine` does that with any engine that `lab/peers`
can start, and `--url` with a server that runs already. `--workload` plays random prompts, chats or a recorded agent's
session to such a server and tells latencies. A run that was interrupted goes on with `--resume`.
`--eager` steps a single sequence, `--graph` replays bare graphs, `--phases` times every phase alone, `--sustain`
decodes for seconds and says what the card draws: none of these is what a user gets, and their cells say so. On a GPU
the regimes are compared with one another first; if one differs, nothing is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from halfbyte import gates as gates_
from halfbyte.errors import HalfbyteError, UsageError
from halfbyte.gates import PRESETS, Gates
from halfbyte.lab import environment, receipts
from halfbyte.lab.levels.correctness import BATCHES, PROMPTS, Comparison, compare
from halfbyte.lab.machine import limit_threads
from halfbyte.lab.measure import device_timing, eager, phase_timing
from halfbyte.lab.measure.engine_timing import Work, all_work, measure_engine, record_check, table
from halfbyte.lab.measure.http_client import HttpClient
from halfbyte.lab.measure.rounds import RunLog
from halfbyte.lab.measure.traffic import Limits
from halfbyte.lab.peers.launch import Setup, variables
from halfbyte.lab.result import Cell, Check, Result, ResultFile, failed_cell
from halfbyte.lab.served import (
    WORKLOADS,
    Traffic,
    arrivals,
    compare_served,
    latency_table,
    measure_client,
    measure_workloads,
    serving,
    under_ceilings,
    with_path,
    workloads,
)
from halfbyte.model import load
from halfbyte.model.gpt_oss import GptOss


@dataclass(frozen=True)
class BenchOptions:
    model: str | None = None
    gates: Gates = field(default_factory=Gates)
    preset: str = ""
    device: str | None = None
    prompts: tuple[int, ...] = (512,)
    tokens: tuple[int, ...] = (32,)
    depths: tuple[int, ...] = (0,)
    concurrency: tuple[int, ...] = (1,)
    repeats: int = 3
    eager: bool = False
    graph: bool = False
    phases: tuple[int, ...] = ()  # rows
    sustain: float = 0.0  # seconds
    served: bool = False
    url: str | None = None
    check: bool = True  # compare regimes first, on a GPU
    require_native: bool = False
    engine: str = ""  # measured over HTTP: a name of `lab/peers/engines.py`, or an address
    started: Setup = field(default_factory=lambda: Setup(None))  # flags, interpreter and variables of that engine
    traffic: Traffic = field(default_factory=Traffic)
    log: Path | None = None  # of runs, so that what was interrupted can go on

    @property
    def setup(self) -> Setup:
        return replace(self.started, model=self.model, gates=self.gates, device=self.device)

    @property
    def works(self) -> list[Work]:
        return all_work(self.prompts, self.tokens, self.depths, self.concurrency)


LOG = ".runs"  # behind a receipt's name: runs of a measurement that has not ended
Progress = Callable[[str], None]
Load = Callable[[], GptOss]


def run_bench(options: BenchOptions, progress: Progress = lambda _: None, loaded: Load | None = None) -> ResultFile:
    """All that was asked for; `loaded` gives the model where somebody else shows how it is read."""
    alone = bool(options.url) + bool(options.engine)
    if alone > 1 or (alone and options.served):
        raise UsageError("--url, --engine and --served name different servers; use one of them.")
    if options.served and (options.eager or options.graph or options.phases or options.sustain or options.url):
        raise UsageError("--served compares the engine with a server; leave --eager, --graph and the like out.")
    log = None if options.log is None else RunLog(options.log, identity(options))
    if options.traffic.workload and not (options.url or options.engine):
        options = replace(options, engine="halfbyte")
    if options.url or options.engine:
        return _file(measure_http(options, progress, log), {})
    name = load.resolve_model(options.model)
    device = load.resolve_device(options.device)
    progress(f"loading {name.label}")
    model = loaded() if loaded else load.load_model(name, options.gates, device=device)
    longest = max((work.length for work in options.works), default=0)
    if longest > model.config.max_context:
        raise UsageError(f"{longest} tokens are more than this model's context of {model.config.max_context}.")
    measured = receipts.measured({b.phase for bound in model.plan.bound.values() for b in bound})
    preset = options.preset or preset_of(options.gates)
    cell = Cell("", name.label.removeprefix("random:"), preset, options.gates.changes(), "engine")
    limit_threads(device, model.weights.nbytes)
    with torch.inference_mode():
        results = _measure(model, options, cell, progress, log)
    if options.served:
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        results += measure_served(options, cell, results, progress)
    return _file(results, measured)


def identity(options: BenchOptions) -> dict[str, Any]:
    """What must be the same for runs before an interruption to count."""
    question = {k: v for k, v in vars(options).items() if k not in ("log", "gates")}
    machine = [g.get("name") for g in environment.gpus()] or environment.cpu_name()
    return {
        "question": str(sorted(question.items(), key=str)), "gates": options.gates.as_dict(), "machine": machine,
        "kernels": environment.source_hash(), "engine": environment.source_hash("engine"),
    }  # fmt: skip


def preset_of(gates: Gates) -> str:
    """The preset that these gates are, but for the activations; empty if they are none."""
    return next((name for name, p in PRESETS.items() if replace(p.gates, activation=gates.activation) == gates), "")


def _file(results: Sequence[Result], measured: dict[str, str]) -> ResultFile:
    measured = measured | receipts.hashes(receipts.sources_of([receipts.PACKAGE / "engine" / "build.py"], ("engine",)))
    return receipts.result_file("halfbyte bench", results, measured)


def with_record(results: Sequence[Result], model: GptOss) -> list[Result]:
    """Each with the kernels that ran; where those are not the chosen ones, without a number."""
    record, ran = model.plan.record.as_dict(), record_check(model)
    return [
        replace(r, checks=(*r.checks, ran), record=record, figures=r.figures if ran.ok else ())
        if r.record is None
        else r
        for r in results
    ]


def _measure(
    model: GptOss, options: BenchOptions, cell: Cell, progress: Progress, log: RunLog | None = None
) -> list[Result]:
    if options.require_native and (reasons := phase_timing.not_native(model)):
        raise UsageError(f"this is not the native path: {'; '.join(reasons)}.")
    if not options.check or model.device.type != "cuda":
        return with_record(_timed(model, options, cell, (), progress, log), model)
    progress("comparing the regimes")
    comparison = compare_timed(model, options)
    results = _timed(model, options, cell, comparison.checks, progress, log)
    results = with_record(results, model)
    return [
        replace(r, targets=(*r.targets, comparison.covers(r.record))) if r.figures and r.record else r for r in results
    ]


def compare_timed(model: GptOss, options: BenchOptions) -> Comparison:
    """The usual cases, and every size of prompt and batch that will be timed."""
    longest, limits = max(PROMPTS), model.plan.limits
    prompts = [*PROMPTS, *(min(work.prompt, longest) for work in options.works if work.prompt > limits.batch)]
    batches = [
        *BATCHES,
        *(work.concurrency for work in options.works if limits.decode < work.concurrency <= limits.batch),
    ]
    return compare(model, tuple(dict.fromkeys(prompts)), tuple(dict.fromkeys(batches)))


def _timed(
    model: GptOss,
    options: BenchOptions,
    cell: Cell,
    checks: tuple[Check, ...],
    progress: Progress,
    log: RunLog | None,
) -> list[Result]:
    works, repeats = options.works, options.repeats
    if options.eager:
        return eager.measure_eager(model, works, repeats, cell=cell, checks=checks, progress=progress)
    if options.graph or options.phases or options.sustain:
        if model.device.type != "cuda":
            raise UsageError("--graph, --phases and --sustain measure a CUDA device; this is a CPU.")
        return _device(model, options, cell, checks, progress)
    tokenizer = load.tokenizer_of(load.resolve_model(options.model))
    return measure_engine(model, tokenizer, works, repeats, cell=cell, checks=checks, progress=progress, log=log)


def _device(
    model: GptOss, options: BenchOptions, cell: Cell, checks: tuple[Check, ...], progress: Progress
) -> list[Result]:
    """Bare replays, single phases, seconds of decode: what the device does without an engine."""
    jobs: list[tuple[Cell, Callable[[], Sequence[Result]]]] = []
    for work in options.works if options.graph else []:
        if work.prompt:
            if work.concurrency == 1:
                each = replace(cell, kind="prompt", path="eager chunks", shape=work.shape)
                jobs.append((each, partial(_chunks, model, each, work, options.repeats)))
        else:
            each = replace(cell, kind="decode", path="graph", shape=work.shape)
            jobs.append((each, partial(_graph, model, each, work, options.repeats)))
    for rows in options.phases:
        each = replace(cell, kind="phase", path="all phases", shape={"rows": rows})
        jobs.append((each, partial(phase_timing.time_phases, model, each, rows, max(options.depths))))
    for depth in options.depths if options.sustain else []:
        for c in options.concurrency:
            shape = {"seconds": options.sustain, "depth": depth, "concurrency": c}
            each = replace(cell, kind="sustained decode", path="graph", shape=shape)
            jobs.append((each, partial(_sustained, model, each, c, depth, options.sustain)))
    results: list[Result] = []
    for each, job in jobs:
        if any(not c.ok for c in checks):
            results.append(Result(each, checks=checks))
            continue
        progress(each.label)
        try:
            found = list(job())
        except Exception as e:
            found = [failed_cell(each, e)]
        results += [replace(r, checks=(*checks, *r.checks)) for r in found]
        model.release_kv()
        torch.cuda.empty_cache()
    return results


def _graph(model: GptOss, cell: Cell, work: Work, repeats: int) -> list[Result]:
    return [device_timing.time_graph(model, cell, work.concurrency, work.depth, work.tokens, repeats)]


def _chunks(model: GptOss, cell: Cell, work: Work, repeats: int) -> list[Result]:
    return [device_timing.time_chunks(model, cell, work.prompt, 8192, work.depth, repeats)]


def _sustained(model: GptOss, cell: Cell, rows: int, context: int, seconds: float) -> list[Result]:
    return [device_timing.time_sustained(model, cell, rows, context, seconds)]


# ---- over HTTP -------------------------------------------------------------------------------------------------------


def measure_http(options: BenchOptions, progress: Progress, log: RunLog | None) -> list[Result]:
    """Speeds of a server, or a workload played to it."""
    name = load.resolve_model(options.model)
    vocab = load.config_of(name).vocab
    traffic = options.traffic
    works = workloads(traffic, options.prompts, options.tokens, vocab) if traffic.workload else []
    when = arrivals(traffic, options.concurrency)
    with serving(options.url or options.engine, options.setup, progress) as server:
        client = HttpClient(server.url)
        model = client.model if server.startup_s is None else name.label.removeprefix("random:")
        preset = options.preset or preset_of(options.gates)
        cell = Cell("", model, preset, options.gates.changes(), "http", engine=server.name)
        if works:
            results = measure_workloads(client, traffic, works, when, cell, progress, log)
        else:
            results = measure_client(client, options.works, options.repeats, cell, vocab, progress, log)
    return with_path(results, server)


def measure_served(options: BenchOptions, cell: Cell, engine: Sequence[Result], progress: Progress) -> list[Result]:
    """`halfbyte serve` with the same gates, the same work over HTTP, and how it compares."""
    vocab = load.config_of(load.resolve_model(options.model)).vocab
    with serving("halfbyte", options.setup, progress) as server:
        client, cell = HttpClient(server.url), replace(cell, path="http")
        served = measure_client(client, options.works, options.repeats, cell, vocab, progress)
    served = under_ceilings(engine, with_path(served, server))
    return [*served, *(compare_served(a, b) for a, b in zip(engine, served, strict=True))]


# ---- without the command line's packages -----------------------------------------------------------------------------


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n.strip())


def rates(text: str) -> tuple[float, ...]:
    return tuple(float(n) for n in text.split(",") if n.strip())


def run_log(out: Path | None, resume: bool) -> Path | None:
    """Beside the receipt. Without --resume what an interrupted measurement left is thrown away."""
    if out is None:
        if resume:
            raise UsageError("--resume goes on with the runs beside a receipt; name it with --out.")
        return None
    log = out.with_name(out.name + LOG)
    if not resume:
        log.unlink(missing_ok=True)
    return log


def keep(file: ResultFile, out: Path | None) -> None:
    """The receipt, after which the runs behind it are of no more use."""
    if out is not None:
        file.write(out)
        out.with_name(out.name + LOG).unlink(missing_ok=True)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", nargs="?", help="a folder, a .gguf file, random:120b; without it the embedded model")
    p.add_argument("--preset", default="exact", help=", ".join(PRESETS))
    p.add_argument("--activation", help="as `halfbyte bench --activation`: prefill=fp8")
    p.add_argument("--device")
    p.add_argument("--pp", type=numbers, default=(512,), help="prompt lengths")
    p.add_argument("--tg", type=numbers, default=(32,), help="tokens to generate")
    p.add_argument("--depth", type=numbers, default=(0,), help="tokens already in the cache")
    p.add_argument("--concurrency", type=numbers, default=(1,), help="requests at once")
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--eager", action="store_true")
    p.add_argument("--graph", action="store_true")
    p.add_argument("--phases", type=numbers, default=(), metavar="ROWS")
    p.add_argument("--sustain", type=float, default=0.0, metavar="SECONDS")
    p.add_argument("--served", action="store_true")
    p.add_argument("--url")
    p.add_argument("--engine", default="", help="measure this engine over HTTP: halfbyte, llamacpp, vllm …")
    p.add_argument("--engine-flag", action="append", default=[], metavar="FLAG", help="of its own, passed on")
    p.add_argument("--engine-env", action="append", default=[], metavar="NAME=VALUE", help="a variable of its own")
    p.add_argument("--engine-python", help="interpreter of its environment")
    p.add_argument("--workload", default="", help=", ".join(WORKLOADS))
    p.add_argument("--rate", type=rates, default=(), help="sessions a second, as Poisson arrivals")
    p.add_argument("--sessions", type=int, default=0)
    p.add_argument("--turns", type=int)
    p.add_argument("--limits", default="", help="of goodput, in ms: ttft=1000,tpot=50")
    p.add_argument("--pace", type=float, default=1.0, help="divides the pauses of a recording")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--resume", action="store_true", help="go on with what --out began")
    p.add_argument("--no-check", action="store_true")
    p.add_argument("--require-native", action="store_true")
    p.add_argument("--threads", help="of the CPU kernels; without it all cores")
    p.add_argument("--out", type=Path)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    a = parser().parse_args(argv)
    try:
        gates = gates_.parse({"activation": a.activation, "threads": a.threads}, preset=a.preset)
        options = BenchOptions(
            a.model, gates, a.preset, a.device, a.pp, a.tg, a.depth, a.concurrency, a.repeats, a.eager, a.graph,
            a.phases, a.sustain, a.served, a.url, not a.no_check, a.require_native, a.engine,
            Setup(None, flags=tuple(a.engine_flag), python=a.engine_python, environment=variables(a.engine_env)),
            Traffic(a.workload, a.rate, a.sessions, Limits.parse(a.limits), a.turns, a.pace, a.seed),
            run_log(a.out, a.resume),
        )  # fmt: skip
        file = run_bench(options, lambda text: print(f"... {text}", file=sys.stderr, flush=True))
    except HalfbyteError as e:
        print(f"halfbyte bench: {e}", file=sys.stderr)
        return e.exit_code
    for line in lines(file.results):
        print(line)
    keep(file, a.out)
    print(json.dumps(file.as_json(), default=str))
    return 1 if any(r.refused for r in file.results) else 0


def rows_of(results: Sequence[Result]) -> list[dict[str, str]]:
    """For a terminal: speeds beside ceilings, or a workload's latencies."""
    return latency_table(results) if any(r.cell.kind == "serving" for r in results) else table(results)


def lines(results: Sequence[Result]) -> Iterator[str]:
    for r, row in zip(results, rows_of(results)):
        test, by, speed, *rest = row.values()
        yield f"{by:14} {test:28} {speed:32} {' '.join(f'{text:>9}' for text in rest)}"
        if r.refused:
            yield f"    {r.refused}"


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
