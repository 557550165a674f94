"""halfbyte and llama.cpp on the same cores, the same weights, in turn: tokens a second of both, and the ratio.

    python -m bench run llamacpp --set models=tiny,20b-q8 --set threads=1,2 --set rounds=3

The first run builds llama.cpp and writes the files (minutes; both are kept). Then, for every model and number of
threads, one process at a time and the engines in turn, each with its file in the page cache before its clock starts.
`through` says what of halfbyte is measured: the plan alone (what llama-bench measures of llama.cpp), the engine as
`halfbyte bench` has it, or `halfbyte serve` over HTTP. A speed is the median of the rounds, a ratio that of the
medians between the least and the largest of a round. The read bandwidth is measured on the spot, before every turn.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.measurement import Column, Row, Run, SideBySide, bench_results, measurement, option
from halfbyte.errors import UsageError
from halfbyte.lab import receipts
from halfbyte.lab.machine import cores, measure_read
from halfbyte.lab.measure.engine_timing import TimedWork, all_work
from halfbyte.lab.peers import llamacpp, shared_weights
from halfbyte.lab.result import Cell, Check, Figure, FigureCeiling, Result, ResultFile, figure

PEER = "llama.cpp"
PATHS = {"plan": ("--eager",), "engine": (), "http": ("--served",)}
# With all threads: model, path, test -> the least ratio, and on which model's file llama.cpp's figure was taken.
TARGETS: dict[tuple[str, str, str], tuple[float, str]] = {
    ("20b-q8", "plan", "tg16"): (1.35, "20b-q8"),
    ("20b-mxfp4", "plan", "tg16"): (1.75, "20b-q8"),
    ("20b-q8", "plan", "pp256"): (3.0, "20b-q8"),
    ("tiny", "plan", "tg64"): (1.4, "tiny"),
    ("tiny", "plan", "pp256"): (1.3, "tiny"),
    ("tiny", "engine", "tg64"): (0.9, "tiny"),
    ("tiny", "http", "tg64"): (800 / 1700, "tiny"),
}


@dataclass(frozen=True)
class Key:
    """One figure: a model's file, whose it is (llama.cpp, or a path of ours), with how many threads, of what work."""

    model: str
    who: str
    threads: int
    work: TimedWork


@dataclass
class TurnSamples:
    speeds: dict[Key, list[float]] = field(default_factory=dict)  # one number a round: the median of its process's runs
    ceilings: dict[Key, FigureCeiling] = field(default_factory=dict)
    records: dict[Key, Mapping[str, object]] = field(default_factory=dict)
    refused: dict[Key, str] = field(default_factory=dict)
    reads: list[float] = field(default_factory=list)  # bytes/s


@dataclass(frozen=True)
class TurnOptions:
    models: tuple[str, ...]
    works: tuple[TimedWork, ...]
    threads: tuple[int, ...]
    paths: tuple[str, ...] = ("plan", "engine")
    rounds: int = 3
    repeats: int = 3

    def __post_init__(self) -> None:
        if unknown := [p for p in self.paths if p not in PATHS]:
            raise UsageError(f"through takes {', '.join(PATHS)}, not {', '.join(unknown)}.")
        for name in self.models:
            shared_weights.model_named(name)


# ---- running ---------------------------------------------------------------------------------------------------------


def play(comparison: TurnOptions, progress: llamacpp.Progress = lambda _: None) -> TurnSamples:
    samples = TurnSamples()
    programs = llamacpp.build(progress=progress)
    for name in comparison.models:
        file = shared_weights.write(shared_weights.model_named(name), progress)
        for number in range(comparison.rounds):
            for threads in comparison.threads:
                turn = [PEER, *comparison.paths]
                for who in turn if number % 2 == 0 else turn[::-1]:
                    progress(f"{name}, {threads} of {cores()} threads, round {number + 1}: {who}")
                    shared_weights.warm(file)
                    samples.reads.append(measure_read(torch.device("cpu")))
                    if who == PEER:
                        measured = llamacpp.measure(programs, file, comparison.works, threads, comparison.repeats)
                        for work, speeds in measured.items():
                            _add(samples, Key(name, PEER, threads, work), statistics.median(speeds))
                    else:
                        arguments = bench_words(file, comparison.works, threads, comparison.repeats, who)
                        read_ours(samples, name, threads, who, bench_results(arguments))
    return samples


def bench_words(file: Path, works: Sequence[TimedWork], threads: int, repeats: int, who: str) -> list[str]:
    """What `halfbyte bench` is asked."""

    def listed(counts: Sequence[int]) -> str:
        return ",".join(str(n) for n in dict.fromkeys(counts) if n)

    depths = ",".join(str(d) for d in sorted({w.depth for w in works}))
    prompts, tokens = listed([w.prompt for w in works]), listed([w.tokens for w in works])
    arguments = [str(file), "--device", "cpu", "--threads", str(threads)]
    arguments += ["--pp", prompts, "--tg", tokens, "--depth", depths, "--repeats", str(repeats)]
    return [*arguments, *PATHS[who]]


def read_ours(samples: TurnSamples, model: str, threads: int, who: str, file: ResultFile) -> None:
    """Speeds and ceilings of our own bench, and why a cell has none."""
    ran = "eager" if who == "plan" else who
    for r in file.results:
        if r.cell.path != ran:
            continue
        shape = r.cell.shape
        work = TimedWork(int(shape.get("pp", 0)), int(shape.get("tg", 0)), int(shape.get("depth", 0)))
        key = Key(model, who, threads, work)
        if r.refused:
            samples.refused[key] = r.refused
            continue
        speed = r.figure("speed")
        _add(samples, key, speed.value)
        if speed.ceiling is not None:
            samples.ceilings[key] = speed.ceiling
        if r.record is not None:
            samples.records[key] = r.record


def _add(samples: TurnSamples, key: Key, speed: float) -> None:
    samples.speeds.setdefault(key, []).append(speed)


# ---- results ---------------------------------------------------------------------------------------------------------


def results_of(comparison: TurnOptions, samples: TurnSamples) -> list[Result]:
    """The bandwidth, then a result for each model, path, number of threads and work."""
    read = figure("read", "GB/s", [b / 1e9 for b in samples.reads])
    results = [Result(Cell("bandwidth", path="all threads"), (read,))]
    for model in comparison.models:
        for threads in comparison.threads:
            for who in comparison.paths:
                results += [_result(comparison, samples, Key(model, who, threads, w)) for w in comparison.works]
    return results


def _result(comparison: TurnOptions, samples: TurnSamples, key: Key) -> Result:
    work = key.work
    shape = {k: v for k, v in work.shape.items() if k != "concurrency"} | {"threads": key.threads}
    kind = "prompt" if work.prompt else "decode"
    cell = Cell(kind, key.model, path=f"{key.who} / {PEER}", shape=shape)
    peer_key = Key(key.model, PEER, key.threads, work)
    if key in samples.refused:
        return Result(cell, refused=samples.refused[key])
    if key not in samples.speeds or peer_key not in samples.speeds:
        return Result(cell, refused="one of the two was not measured")
    own, peer = samples.speeds[key], samples.speeds[peer_key]
    figures = [figure("speed", "tok/s", own, samples.ceilings.get(key)), figure("peer_speed", "tok/s", peer)]
    figures.append(_ratio("ratio", own, peer))
    targets = []
    test = f"pp{work.prompt}" if work.prompt else f"tg{work.tokens}"
    target = TARGETS.get((key.model, key.who, test))
    if target is not None and not work.depth and key.threads == max(comparison.threads):
        least, other = target
        other_peer = samples.speeds.get(Key(other, PEER, key.threads, work))
        if other != key.model and other_peer:
            figures.append(_ratio(f"ratio_to_{other}", own, other_peer))
        if other_peer:
            reached = statistics.median(own) / statistics.median(other_peer)
            claim = f"at least {least:g}x {PEER}" + (f" on {other}" if other != key.model else "")
            targets.append(Check(claim, reached >= least, reached, least))
    return Result(cell, tuple(figures), targets=tuple(targets), record=samples.records.get(key))


def _ratio(name: str, own: Sequence[float], peer: Sequence[float]) -> Figure:
    """The ratio of the medians; its spread is over the rounds, whose two halves ran one after the other."""
    middle = statistics.median(own) / statistics.median(peer)
    ratios = [a / b for a, b in zip(own, peer)]
    return Figure(name, "ratio", middle, min([*ratios, middle]), max([*ratios, middle]), len(ratios))


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = option(("tiny", "20b-q8", "20b-mxfp4"), ", ".join(shared_weights.MODELS))
    pp: tuple[int, ...] = option((64, 256, 512), "prompt lengths")
    tg: tuple[int, ...] = option((16, 64), "tokens to generate")
    depth: tuple[int, ...] = option((0, 2048), "tokens already in the cache")
    threads: tuple[int, ...] = option(tuple(sorted({1, cores()})), "of both engines")
    through: tuple[str, ...] = option(tuple(PATHS), "paths of halfbyte")
    rounds: int = 3
    repeats: int = option(3, "runs inside of one process")


def _row(label: str, kind: str, model: str, **shape: Any) -> Row:
    return Row(label, kind, "speed", "plan / llama.cpp", model, shape=shape)


@measurement(
    "llamacpp", needs=("compiler",), seconds=7200,
    side_by_side=(
        SideBySide(
            "llamacpp",
            (
                Column("halfbyte's plan"),
                Column("engine", path="engine / llama.cpp"),
                Column("over HTTP", path="http / llama.cpp"),
                Column("llama.cpp", figure="peer_speed"),
            ),
            (
                _row("20b shape, q8 attention and head, tg16", "decode", "20b-q8", tg=16, depth=0),
                _row("the same, pp256", "prompt", "20b-q8", pp=256, depth=0),
                _row("20b shape, every layer MXFP4, tg16", "decode", "20b-mxfp4", tg=16, depth=0),
                _row("the same, pp256", "prompt", "20b-mxfp4", pp=256, depth=0),
                _row("embedded model, tg64", "decode", "tiny", tg=64, depth=0),
                _row("the same at 2,048 tokens of depth", "decode", "tiny", tg=64, depth=2048),
                _row("the same, pp256", "prompt", "tiny", pp=256, depth=0),
            ),
        ),
    ),
)  # fmt: skip
def llamacpp_turns(run: Run, options: Options) -> None:
    comparison = TurnOptions(
        options.models, tuple(all_work(options.pp, options.tg, options.depth, [1])), options.threads, options.through,
        options.rounds, options.repeats,
    )  # fmt: skip
    room = receipts.PACKAGE
    measured = receipts.sources_of([room / "engine" / "build.py", *(room / "kernels" / "cpu").glob("*")], ("engine",))
    run.sources |= receipts.hashes(measured)
    run.add(*results_of(comparison, play(comparison, lambda text: print(f"... {text}", file=sys.stderr, flush=True))))
