"""`halfbyte bench`: what a user of a model gets on this machine, each figure beside its ceiling.

    python -m halfbyte.lab.bench random:120b --preset fast --pp 2048 --tg 128 --depth 2048 --concurrency 1,8

needs none of the command line's packages. By default the engine is measured as `halfbyte serve` builds it. `--served`
also starts `halfbyte serve` and gives it the same work over HTTP; `--url` measures a server that runs already.
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
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from halfbyte import gates as gates_
from halfbyte.errors import HalfbyteError, UsageError
from halfbyte.gates import PRESETS, Gates
from halfbyte.lab import receipts
from halfbyte.lab.levels.correctness import BATCHES, PROMPTS, Comparison, compare
from halfbyte.lab.machine import limit_threads
from halfbyte.lab.measure import device_timing, eager, phase_timing
from halfbyte.lab.measure.engine_timing import (
    Client,
    Work,
    all_work,
    measure_engine,
    record_check,
    result_of,
    table,
    time_work,
)
from halfbyte.lab.measure.http_client import HttpClient, ServeProcess
from halfbyte.lab.result import Cell, Check, Result, ResultFile, figure, measure_cell
from halfbyte.model import load
from halfbyte.model.gpt_oss import GptOss

SERVED_WITHIN = 0.03  # of the engine's own figure


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

    @property
    def works(self) -> list[Work]:
        return all_work(self.prompts, self.tokens, self.depths, self.concurrency)


Progress = Callable[[str], None]
Load = Callable[[], GptOss]


def run_bench(options: BenchOptions, progress: Progress = lambda _: None, loaded: Load | None = None) -> ResultFile:
    """All that was asked for; `loaded` gives the model where somebody else shows how it is read."""
    if options.served and (options.eager or options.graph or options.phases or options.sustain or options.url):
        raise UsageError("--served compares the engine with a server; leave --eager, --graph and the like out.")
    if options.url is not None:
        return _file(measure_url(options, progress), {})
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
        results = _measure(model, options, cell, progress)
    if options.served:
        del model
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        results += measure_served(options, cell, results, progress)
    return _file(results, measured)


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


def _measure(model: GptOss, options: BenchOptions, cell: Cell, progress: Progress) -> list[Result]:
    if options.require_native and (reasons := phase_timing.not_native(model)):
        raise UsageError(f"this is not the native path: {'; '.join(reasons)}.")
    if not options.check or model.device.type != "cuda":
        return with_record(_timed(model, options, cell, (), progress), model)
    progress("comparing the regimes")
    comparison = compare_timed(model, options)
    results = _timed(model, options, cell, comparison.checks, progress)
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
    model: GptOss, options: BenchOptions, cell: Cell, checks: tuple[Check, ...], progress: Progress
) -> list[Result]:
    works, repeats = options.works, options.repeats
    if options.eager:
        return eager.measure_eager(model, works, repeats, cell=cell, checks=checks, progress=progress)
    if options.graph or options.phases or options.sustain:
        if model.device.type != "cuda":
            raise UsageError("--graph, --phases and --sustain measure a CUDA device; this is a CPU.")
        return _device(model, options, cell, checks, progress)
    tokenizer = load.tokenizer_of(load.resolve_model(options.model))
    return measure_engine(model, tokenizer, works, repeats, cell=cell, checks=checks, progress=progress)


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
            results += [replace(r, checks=(*checks, *r.checks)) for r in job()]
        except Exception as e:
            results.append(Result(each, checks=checks, refused=f"{type(e).__name__}: {e}"[:400]))
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


def measure_url(options: BenchOptions, progress: Progress) -> list[Result]:
    assert options.url is not None
    client = HttpClient(options.url)
    cell = Cell("", client.model, options.preset, options.gates.changes(), "http")
    return measure_client(client, options, cell, progress)


def measure_client(client: Client, options: BenchOptions, cell: Cell, progress: Progress) -> list[Result]:
    vocab = load.config_of(load.resolve_model(options.model)).vocab
    results = []
    for i, work in enumerate(options.works):
        each = replace(cell, kind="prompt" if work.prompt else "decode", shape=work.shape)
        progress(f"{each.label} over HTTP")
        results.append(measure_cell(each, partial(_client_result, client, work, each, vocab, options.repeats, i)))
    return results


def _client_result(client: Client, work: Work, cell: Cell, vocab: int, repeats: int, seed: int) -> Result:
    return result_of(time_work(client, work, vocab, repeats, seed), cell, None)


def measure_served(options: BenchOptions, cell: Cell, engine: Sequence[Result], progress: Progress) -> list[Result]:
    """`halfbyte serve` with the same gates, the same work over HTTP, and how it compares."""
    progress("starting halfbyte serve")
    with (
        tempfile.TemporaryDirectory() as folder,
        ServeProcess(options.model, options.gates, options.device, Path(folder) / "serve.log") as server,
    ):
        served = measure_client(HttpClient(server.url), options, replace(cell, path="http"), progress)
    return [*served, *(compare_served(a, b) for a, b in zip(engine, served, strict=True))]


def compare_served(engine: Result, served: Result) -> Result:
    cell = replace(engine.cell, kind=f"served {engine.cell.kind}", path="http / engine")
    if engine.refused or served.refused:
        return Result(cell, refused=engine.refused or served.refused)
    ratio = served.figure("speed").value / engine.figure("speed").value
    target = Check(f"within {SERVED_WITHIN:.0%} of the engine", abs(ratio - 1) <= SERVED_WITHIN, ratio, 1.0)
    return Result(cell, (figure("ratio", "ratio", ratio),), targets=(target,))


# ---- without the command line's packages -----------------------------------------------------------------------------


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n.strip())


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
    p.add_argument("--no-check", action="store_true")
    p.add_argument("--require-native", action="store_true")
    p.add_argument("--threads", help="of the CPU kernels; without it all cores")
    p.add_argument("--out", type=Path)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    a = parser().parse_args(argv)
    gates = gates_.parse({"activation": a.activation, "threads": a.threads}, preset=a.preset)
    options = BenchOptions(
        a.model, gates, a.preset, a.device, a.pp, a.tg, a.depth, a.concurrency, a.repeats, a.eager, a.graph, a.phases,
        a.sustain, a.served, a.url, not a.no_check, a.require_native,
    )  # fmt: skip
    try:
        file = run_bench(options, lambda text: print(f"... {text}", file=sys.stderr, flush=True))
    except HalfbyteError as e:
        print(f"halfbyte bench: {e}", file=sys.stderr)
        return e.exit_code
    for line in lines(file.results):
        print(line)
    if a.out:
        file.write(a.out)
    print(json.dumps(file.as_json(), default=str))
    return 1 if any(r.refused for r in file.results) else 0


def lines(results: Sequence[Result]) -> Iterator[str]:
    for r, row in zip(results, table(results)):
        beside = f"{row['ceiling t/s']:>10} {row['share']:>7} {row['ttft ms']:>9}"
        yield f"{row['by']:14} {row['test']:28} {row['t/s']:32} {beside}"
        if r.refused:
            yield f"    {r.refused}"


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
