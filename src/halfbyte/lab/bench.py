"""`halfbyte bench`: what a user of a model gets on this machine, each figure with its ceiling.

By default the engine is measured in this process, built as `halfbyte serve` builds it. `--served` also starts
`halfbyte serve` and gives it the same work over HTTP; `--engine` does that with any engine that `lab/peers` can start,
and `--url` with a server that already runs. `--workload` plays random prompts, chats or a recorded agent's session to
such a server and reports latencies. An interrupted run continues with `--resume`. `--eager` steps a single sequence,
`--graph` replays bare graphs, `--phases` times every phase alone, `--sustain` decodes for seconds and reports what the
card draws: none of these is what a user gets, and their cells say so. On a GPU the regimes are compared with the
reference first; if one differs, nothing is timed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from halfbyte.engine.placement import placed_gates
from halfbyte.errors import UsageError
from halfbyte.lab import environment, receipts
from halfbyte.lab.machine import limit_threads
from halfbyte.lab.measure import device_timing, eager, phase_timing
from halfbyte.lab.measure.disturbance import DisturbanceMeter
from halfbyte.lab.measure.engine_timing import TimedWork, measure_client, measure_engine, new_seed, record_check, table
from halfbyte.lab.measure.http_client import HttpClient
from halfbyte.lab.measure.rounds import RunLog
from halfbyte.lab.options import BenchOptions, preset_of, preset_served, run_log
from halfbyte.lab.plan_comparison import BATCHES, PROMPTS, PlanComparison, compare
from halfbyte.lab.result import Cell, Check, Result, ResultFile, failed_cell
from halfbyte.lab.served import (
    arrivals,
    compare_served,
    latency_table,
    measure_workloads,
    serving,
    under_ceilings,
    with_path,
    workloads,
)
from halfbyte.lab.store import Store
from halfbyte.model import checkpoint, load
from halfbyte.model.gpt_oss import GptOss

Progress = Callable[[str], None]
Loading = Callable[
    [str], AbstractContextManager[checkpoint.Progress | None]
]  # shows how a model is read, under a title


def run_bench(
    options: BenchOptions, progress: Progress = lambda _: None, loading: Loading = lambda _: nullcontext()
) -> ResultFile:
    """Measures what the options ask for; writes the receipt and keeps it in the store where they name one."""
    options.check_consistency()
    path = run_log(options.out and options.out.with_name(f"{options.out.name}.runs"), options.resume, "FILE")
    log = None if path is None else RunLog(path, identity(options))
    if options.load.seed is None:
        options = replace(options, load=replace(options.load, seed=new_seed()))
    meter = DisturbanceMeter() if not options.url and load.resolve_device(options.device).type == "cpu" else None
    begin = None if meter is None else meter.read()
    file = (
        _file(measure_http(options, progress, log), {})
        if options.peer
        else _in_process(options, progress, loading, log)
    )
    if meter is not None and begin is not None:
        file = replace(file, results=tuple(disturbed(file.results, meter.read().since(begin).problem)))
    if options.out is not None:
        file.write(options.out)
    if path is not None:
        path.unlink(missing_ok=True)  # all of it is in the receipt now
    if options.store is not None:
        Store(options.store).add(file)
    return file


def disturbed(results: Sequence[Result], problem: str) -> list[Result]:
    """Marks figures that were taken beside other work: here they stand, with a target that they miss; `halfbyte check`
    measures them again, or calls them INVALID."""
    quiet = Check("the machine did nothing else", False, note=f"{problem}, so that speeds may be too low")
    return [replace(r, targets=(*r.targets, quiet)) if problem and r.figures else r for r in results]


def _in_process(options: BenchOptions, progress: Progress, loading: Loading, log: RunLog | None) -> ResultFile:
    name = load.resolve_model(options.model)
    device = load.resolve_device(options.device)
    with load.OpenCheckpoint(name) as opened, loading(f"loading {name.label}") as reading:
        gates = placed_gates(opened.facts, options.gates, device, options.gpu_memory)
        model = load.load_model(opened, gates, device=device, progress=reading, self_test=options.self_test)
    longest = max((work.length for work in options.works), default=0)
    if longest > model.config.max_context:
        raise UsageError(f"{longest} tokens are more than this model's context of {model.config.max_context}.")
    measured = receipts.measured({b.phase for bound in model.plan.bound.values() for b in bound})
    preset = preset_of(model.gates, gpu=device.type != "cpu")
    cell = Cell("", name.shape_name, preset, options.gates.changes(), "engine")
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
    question = {k: v for k, v in vars(options).items() if k not in ("out", "resume", "store", "gates")}
    machine = [g.get("name") for g in environment.gpus()] or environment.cpu_name()
    return {
        "question": str(sorted(question.items(), key=str)), "gates": options.gates.as_dict(), "machine": machine,
        "kernels": environment.source_hash(), "engine": environment.source_hash("engine"),
    }  # fmt: skip


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


def compare_timed(model: GptOss, options: BenchOptions) -> PlanComparison:
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
    return measure_engine(
        model, tokenizer, works, repeats, cell=cell, checks=checks, progress=progress, log=log, seed=options.load.seed,
        gpu_memory=options.gpu_memory,
    )  # fmt: skip


def _device(
    model: GptOss, options: BenchOptions, cell: Cell, checks: tuple[Check, ...], progress: Progress
) -> list[Result]:
    """Bare replays, single phases, seconds of decode: what the device does without an engine."""
    jobs: list[tuple[Cell, Callable[[], Sequence[Result]]]] = []
    for work in options.works if options.graph else []:
        if work.prompt:
            if work.concurrency == 1:
                job_cell = replace(cell, kind="prompt", path="eager chunks", shape=work.shape)
                jobs.append((job_cell, partial(_chunks, model, job_cell, work, options.repeats)))
        else:
            job_cell = replace(cell, kind="decode", path="graph", shape=work.shape)
            jobs.append((job_cell, partial(_graph, model, job_cell, work, options.repeats)))
    for rows in options.phases:
        job_cell = replace(cell, kind="phase", path="all phases", shape={"rows": rows})
        jobs.append((job_cell, partial(phase_timing.time_phases, model, job_cell, rows, max(options.depths))))
    for depth in options.depths if options.sustain else []:
        for c in options.concurrency:
            shape = {"seconds": options.sustain, "depth": depth, "concurrency": c}
            job_cell = replace(cell, kind="sustained decode", path="graph", shape=shape)
            jobs.append((job_cell, partial(_sustained, model, job_cell, c, depth, options.sustain)))
    results: list[Result] = []
    for job_cell, job in jobs:
        if any(not c.ok for c in checks):
            results.append(Result(job_cell, checks=checks))
            continue
        progress(job_cell.label)
        try:
            measured = list(job())
        except Exception as e:
            measured = [failed_cell(job_cell, e)]
        results += [replace(r, checks=(*checks, *r.checks)) for r in measured]
        model.release_kv()
        torch.cuda.empty_cache()
    return results


def _graph(model: GptOss, cell: Cell, work: TimedWork, repeats: int) -> list[Result]:
    return [device_timing.time_graph(model, cell, work.concurrency, work.depth, work.tokens, repeats)]


def _chunks(model: GptOss, cell: Cell, work: TimedWork, repeats: int) -> list[Result]:
    return [device_timing.time_chunks(model, cell, work.prompt, 8192, work.depth, repeats)]


def _sustained(model: GptOss, cell: Cell, rows: int, context: int, seconds: float) -> list[Result]:
    return [device_timing.time_sustained(model, cell, rows, context, seconds)]


# ---- over HTTP -------------------------------------------------------------------------------------------------------


def measure_http(options: BenchOptions, progress: Progress, log: RunLog | None) -> list[Result]:
    """Speeds of a server, or a workload played to it."""
    name = load.resolve_model(options.model)
    vocab = load.config_of(name).vocab
    played = options.load
    works = workloads(played, options.prompts, options.tokens, vocab) if played.workload else []
    when = arrivals(played, options.concurrency)
    with serving(options.peer, options.setup, progress) as server:
        model_known = (
            server.startup_s is not None or options.model is not None
        )  # which model it is, and so its tokenizer
        client = HttpClient(server.url, tokenizer=load.tokenizer_of(name) if model_known else None)
        model = client.model if server.startup_s is None else name.shape_name
        preset = preset_served(options.gates, options.peer, options.setup)
        cell = Cell("", model, preset, options.gates.changes(), "http", engine=server.name)
        if works:
            results = measure_workloads(client, played, works, when, cell, progress, log)
        else:
            results = measure_client(client, options.works, options.repeats, cell, vocab, progress, log, played.seed)
    return with_path(results, server)


def measure_served(options: BenchOptions, cell: Cell, engine: Sequence[Result], progress: Progress) -> list[Result]:
    """`halfbyte serve` with the same gates, the same work over HTTP, and how it compares."""
    vocab = load.config_of(load.resolve_model(options.model)).vocab
    with serving("halfbyte", options.setup, progress) as server:
        tokenizer = load.tokenizer_of(load.resolve_model(options.model))
        client, cell = HttpClient(server.url, tokenizer=tokenizer), replace(cell, path="http")
        seed = options.load.seed
        served = measure_client(client, options.works, options.repeats, cell, vocab, progress, seed=seed)
    served = under_ceilings(engine, with_path(served, server))
    return [*served, *(compare_served(a, b) for a, b in zip(engine, served, strict=True))]


def rows_of(results: Sequence[Result]) -> list[dict[str, str]]:
    """For a terminal: speeds beside ceilings, or a workload's latencies."""
    return latency_table(results) if any(r.cell.kind == "serving" for r in results) else table(results)
