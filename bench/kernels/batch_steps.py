"""Whole steps of a batch through the GPU plan (SM90), in several ways over the same weights, and a layer's timeline.

    python -m bench.kernels.batch_steps --rows 8,32 --ways auto,triton --profile 8 --save FILE

A way is an attention gate with switches behind it: `cuda+decode=1` takes the batch kernels from two rows on. Every way
starts from the same cache and tokens. Its logits must have the same bits as those of the first way with the same
attention and regime; how far they are from the very first is shown (random weights carry a rounding far: a few tenths
are usual). Times are medians of graph replays, other tokens in each run. The timeline is what the profiler saw of two
layers in the middle, start to end. The last line is JSON.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from halfbyte import gates as gates_
from halfbyte.engine.graphs import DecodeGraph
from halfbyte.lab import environment, receipts
from halfbyte.lab.measure.device_timing import device_us, experts_touched, fill, random_tokens
from halfbyte.model import load
from halfbyte.model.gpt_oss import GptOss

SWITCHES = ("decode",)  # limits of the plan that a way may move
CONTEXT = 128


def start(graph: DecodeGraph, seed: int) -> None:
    graph.step.tokens.copy_(random_tokens(graph.model, graph.step.rows, seed))
    graph.step.positions.fill_(CONTEXT)
    graph.step.kv_lens.fill_(CONTEXT + 1)


def captured(model: GptOss, rows: int, count: int) -> DecodeGraph:
    cache = fill(model, rows, CONTEXT + count + 64)
    graph = DecodeGraph(model, rows, cache.blocks, feed_back=True)
    graph.capture()
    for kind, table in cache.tables.items():
        graph.step.block_tables[kind].copy_(table)
    return graph


def touched(graph: DecodeGraph, count: int) -> dict[str, float]:
    """Distinct experts of a layer and distinct tokens, in the middle and at the end of the timed runs: the runs write
    different tokens, and streams that come to write the same ones share their experts."""
    experts, tokens = [], []
    for run in range(1, 4):
        start(graph, run)
        for i in range(count):
            graph.replay()
            if i in (count // 2, count - 1):
                found = experts_touched(graph.model, graph.step)
                assert found is not None, "a batch shows its choices"
                experts.append(found[0])
                tokens.append(len(set(graph.step.tokens.tolist())))
    return {"experts": statistics.fmean(experts), "tokens": statistics.fmean(tokens), "experts_each": experts}


def timed(graph: DecodeGraph, count: int) -> list[float]:
    times = []
    for run in range(4):
        start(graph, run)
        graph.replay()
        times.append(device_us(graph.replay, count - 1))
    assert bool(torch.isfinite(graph.logits).all()), "the logits are not numbers"
    return times[1:]


def timeline(graph: DecodeGraph) -> dict[str, Any]:
    """Time of every kernel of a step by name, and one layer's kernels in order."""
    from torch.profiler import ProfilerActivity, profile

    start(graph, 0)
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


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(n) for n in text.split(",") if n]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="120b")
    parser.add_argument("--preset", default="fast")
    parser.add_argument("--rows", type=numbers, default=[8, 32])
    parser.add_argument("--ways", default="auto", help="for example triton,auto,auto+decode=1")
    parser.add_argument("--count", type=int, default=32, help="tokens of a run")
    parser.add_argument("--profile", type=numbers, default=[], help="rows whose last way is taken apart")
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    environment.need_gpu()
    torch.set_grad_enabled(False)
    gates = gates_.PRESETS[args.preset].gates
    first = load.load_model(load.resolve_model(f"random:{args.model}"), gates, device=torch.device("cuda"))
    result: dict[str, Any] = {
        "bench": "batch_steps", "model": args.model, "preset": args.preset, "device": torch.cuda.get_device_name(),
        "argv": sys.argv[1:], "measured": {}, "steps": [],
    }  # fmt: skip
    models: dict[str, GptOss] = {"auto": first}
    usual = {name: getattr(first.arch.limits, name) for name in SWITCHES}
    for rows in args.rows:
        seen: dict[str, torch.Tensor] = {}
        for way in args.ways.split(","):
            attention, *switches = way.split("+")
            if attention not in models:
                models[attention] = GptOss(first.weights, replace(gates, attention=attention))
            model = models[attention]
            result["measured"] |= receipts.measured({b.phase for r in ("decode", "batch") for b in model.plan.bound[r]})
            asked = usual | {k: int(v) for k, v in (s.split("=") for s in switches)}
            model.plan.limits = replace(model.arch.limits, **asked)
            graph = captured(model, rows, args.count)
            start(graph, 99)
            logits = graph.replay().clone()
            base = seen.setdefault("first", logits)
            error = float((logits - base).norm() / base.norm())
            regime = model.plan.limits.regime(rows)
            equal = bool(torch.equal(logits, seen.setdefault(f"{attention} {regime}", logits)))
            times = timed(graph, args.count)
            us = statistics.median(times)
            found = {
                "rows": rows, "way": way, "regime": regime, "switches": asked, "us_per_step": us,
                "tokens_per_s": rows * 1e6 / us, "spread_us": max(times) - min(times), "error": error, "equal": equal,
                "touched": touched(graph, args.count), "each_us": times,
            }  # fmt: skip
            result["steps"].append(found)
            print(
                f"{rows:3d} {way:36s} {us:8.1f} us ±{found['spread_us']:.1f} {rows * 1e6 / us:7.1f} tok/s"
                f"  error {error:.1e}{'' if equal else ' OTHER BITS'}  {[round(t) for t in times]} us,"
                f" experts {[round(e, 1) for e in found['touched']['experts_each']]}",
                flush=True,
            )
            if rows in args.profile and way == args.ways.split(",")[-1]:
                found["profile"] = timeline(graph)
            model.release_kv()
            del graph
    text = json.dumps(result)
    if args.save:
        args.save.write_text(text, encoding="utf-8")
    print(text[:200])


if __name__ == "__main__":
    main()
