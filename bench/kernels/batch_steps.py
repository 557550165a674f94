"""Whole steps of a batch through the GPU plan, in several ways over the same weights, and a layer's timeline.

    python -m bench run batch-steps --set rows=8,32 --set ways=auto,triton --set profile=8

A way is an attention gate with switches behind it: `cuda+decode=1` takes the batch kernels from two rows on. Every way
is compared with the reference (halfbyte.lab.plan_comparison) before it is timed, and its logits must have the same
bits as those of the first way with the same attention and regime. Times are of bare graph replays, other tokens in each
run; experts are counted on the tokens of the timed runs. The timeline is what the profiler saw of two layers in the
middle, start to end.
"""

from __future__ import annotations

import collections
import statistics
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.kernels import timing
from bench.measurement import Run, measurement, option
from halfbyte import gates as gates_
from halfbyte.engine.graphs import DecodeGraph
from halfbyte.lab import receipts
from halfbyte.lab.measure.device_timing import device_us, experts_touched, fill, random_tokens
from halfbyte.lab.plan_comparison import compare
from halfbyte.lab.result import Cell, Check, FigureCeiling, Result, figure
from halfbyte.model import load
from halfbyte.model.gpt_oss import GptOss
from halfbyte.plan.record import Record
from halfbyte.roofline import decode_ceiling

SWITCHES = ("decode",)  # limits of the plan that a way may move


def restart(graph: DecodeGraph, context: int, seed: int) -> None:
    graph.step.tokens.copy_(random_tokens(graph.model, graph.step.rows, seed))
    graph.step.positions.fill_(context)
    graph.step.kv_lens.fill_(context + 1)


def captured(model: GptOss, rows: int, context: int, count: int) -> DecodeGraph:
    cache = fill(model, rows, context + count + 64)
    graph = DecodeGraph(model, rows, cache.blocks, feed_back=True)
    graph.capture()
    for kind, table in cache.tables.items():
        graph.step.block_tables[kind].copy_(table)
    return graph


def experts_of_runs(graph: DecodeGraph, context: int, count: int, repeats: int) -> tuple[float, float]:
    """Distinct experts of a layer and distinct tokens, in the middle and at the end of the timed runs: the runs write
    different tokens, and streams that come to write the same ones share their experts."""
    experts, tokens = [], []
    for run in range(1, repeats + 1):
        restart(graph, context, run)
        for i in range(count):
            graph.replay()
            if i in (count // 2, count - 1):
                touched = experts_touched(graph.model, graph.step)
                assert touched is not None, "a batch shows its choices"
                experts.append(touched[0])
                tokens.append(len(set(graph.step.tokens.tolist())))
    return statistics.fmean(experts), statistics.fmean(tokens)


def time_runs(graph: DecodeGraph, context: int, count: int, repeats: int) -> list[float]:
    times = []
    for run in range(repeats + 1):  # the first warms up
        restart(graph, context, run)
        graph.replay()
        times.append(device_us(graph.replay, count - 1))
    return times[1:]


def timeline(graph: DecodeGraph, context: int) -> dict[str, Any]:
    """Time of every kernel of a step by name, and one layer's kernels in order."""
    from torch.profiler import ProfilerActivity, profile

    restart(graph, context, 0)
    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    us: dict[str, float] = collections.defaultdict(float)
    count: dict[str, int] = collections.defaultdict(int)
    events = sorted((e for e in p.events() if e.device_time > 0), key=lambda e: e.time_range.start)
    for e in events:
        us[e.name[:60]] += e.device_time / 3
        count[e.name[:60]] += 1
    best = sorted(us, key=lambda n: -us[n])[:14]
    for n in best:
        print(f"  {us[n]:9.0f} us {count[n] // 3:4d} x {us[n] * 3 / count[n]:8.1f}  {n}", flush=True)
    begins = [i for i, e in enumerate(events) if "batch_finish" in e.name]
    layers = []
    for at in (len(begins) // 2, len(begins) // 2 + 1):  # one of each kind of attention
        zero = events[begins[at]].time_range.start
        layer = events[begins[at] : begins[at + 1] + 1]
        layers.append([(e.name[:40], e.time_range.start - zero, e.time_range.end - zero) for e in layer])
        print("  " + "; ".join(f"{n} {a:.1f}-{b:.1f}" for n, a, b in layers[-1]), flush=True)
    return {"us": {n: us[n] for n in best}, "launches": {n: count[n] // 3 for n in best}, "layers": layers}


def measure(cell: Cell, model: GptOss, repeats: int, first: dict[str, Tensor], profile: bool) -> Result:
    """One cell; `first` holds the logits of the first way with each attention and regime."""
    rows, context, count = (int(cell.shape[name]) for name in ("concurrency", "depth", "tg"))
    comparison = compare(model, (), (rows,), (), batch_context=context)
    checks = list(comparison.checks)
    model.plan.record = Record()  # of this cell alone
    graph = captured(model, rows, context, count)
    restart(graph, context, 99)
    logits = graph.replay().clone()
    alike = f"{model.gates.attention} {model.plan.limits.regime(rows)}"
    checks.append(Check("logits are numbers", bool(torch.isfinite(logits).all())))
    checks.append(Check("bits of the first way like it", bool(torch.equal(logits, first.setdefault(alike, logits)))))
    if not all(c.ok for c in checks):
        return Result(cell, checks=tuple(checks))
    samples = time_runs(graph, context, count, repeats)
    checks.append(comparison.covers(model.plan.record.as_dict()))
    if not checks[-1].ok:
        return Result(cell, checks=tuple(checks))
    experts, tokens = experts_of_runs(graph, context, count, repeats)
    gpu, spec = timing.roof(), model.spec
    best = decode_ceiling(gpu, model.config, spec.formats, context + count // 2, rows, spec.kv_dtype, experts)
    ceiling = FigureCeiling(best.tokens_per_second, f"{gpu.name}: read bandwidth in roofline.py")
    figures = (
        figure("speed", "tok/s", [rows * 1e6 / us for us in samples], ceiling),
        figure("step", "us", samples),
        figure("experts of a layer", "experts", experts),
    )
    detail: dict[str, Any] = {"distinct_tokens": tokens}
    if profile:
        detail["profile"] = timeline(graph, context)
    return Result(cell, figures, tuple(checks), detail=detail)


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = ("120b",)
    preset: str = "fast"
    rows: tuple[int, ...] = (8, 32, 64)
    context: int = option(128, "tokens in every sequence at the start of a run")
    ways: tuple[str, ...] = option(("auto",), "for example triton,auto,auto+decode=1")
    count: int = option(32, "tokens of a run")
    profile: tuple[int, ...] = option((), "rows whose last way is taken apart")
    repeats: int = 3


@measurement("batch-steps", needs=("gpu",), seconds=180, routine=False)
def batch_steps(run: Run, options: Options) -> None:
    timing.begin()
    gates = gates_.PRESETS[options.preset].gates
    for name in options.models:
        loaded = load.load_model(load.resolve_model(f"random:{name}"), gates, device=torch.device("cuda"))
        models: dict[str, GptOss] = {"auto": loaded}
        for rows in options.rows:
            first: dict[str, Tensor] = {}
            for way in options.ways:
                attention, *switches = way.split("+")
                if attention not in models:
                    models[attention] = GptOss(loaded.weights, replace(gates, attention=attention))
                model = models[attention]
                run.sources |= receipts.measured({b.phase for r in ("decode", "batch") for b in model.plan.bound[r]})
                moved: dict[str, Any] = {k: int(v) for k, v in (s.split("=") for s in switches) if k in SWITCHES}
                model.plan.limits = replace(model.arch.limits, **moved)
                shape = {"tg": options.count, "depth": options.context, "concurrency": rows, "way": way}
                cell = Cell("decode", name, options.preset, gates.changes(), "graph", shape)
                profile = rows in options.profile and way == options.ways[-1]
                run.measure(cell, partial(measure, cell, model, options.repeats, first, profile))
                model.release_kv()
        models.clear()
        del loaded
        torch.cuda.empty_cache()
