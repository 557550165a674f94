"""A stack of prompt layers on a GPU (`cuda.prefill_layer`): where a layer's time goes, kernel by kernel.

    python -m bench.kernels.prefill_layers --tokens 512,2048 --layers 6

Random weights of the true shapes. The stack is first compared with its phases run one by one (a stack that differs is
not timed), then timed as prompts run (queued eagerly) and as one CUDA graph, which shows what the host costs; the
driver's timeline of that graph says how long after the kernel before it each kernel ended. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from bench.kernels.prefill_products import random_mxfp4
from halfbyte.gates import Gates, Layers
from halfbyte.kernels.cuda.attention.flash import FlashAttention
from halfbyte.kernels.cuda.device.host import gpu
from halfbyte.kernels.cuda.prefill.builds import GroupedShape
from halfbyte.kernels.cuda.prefill.fp8 import Fp8Moe, Fp8Out, Fp8Qkv
from halfbyte.kernels.cuda.prefill.layer import Fp8PrefillLayer, PrefillLayer
from halfbyte.kernels.cuda.prefill.phases import GroupedMoe, GroupedOut, GroupedQkv
from halfbyte.kernels.launch import compile_program
from halfbyte.kernels.triton.rope import RopeAndWrite
from halfbyte.kernels.triton.router import NormAndRouter
from halfbyte.lab import environment, receipts
from halfbyte.model.config import NAMED
from halfbyte.model.gpt_oss import CHECKPOINT_FORMATS, formats_after, spec_of
from halfbyte.ops.rope import yarn_frequencies
from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import ARCHES, Binding, Launch, Phase, Spec
from halfbyte.plan.step import Step

BOUND = {"bf16": 1e-2, "fp8": 4e-2}  # between one layer and its phases
PRODUCTS = ("qkv", "o", "gate_up", "down")  # of a layer, in order


def compile_all(spec: Spec, fp8: bool) -> None:
    """Every kernel in the cache, at the same time."""
    phase = Fp8PrefillLayer() if fp8 else PrefillLayer()
    programs = [b.program for b in phase.builds(spec, ARCHES["sm90"])]
    with ThreadPoolExecutor(len(programs)) as pool:
        list(pool.map(lambda program: compile_program(program, gpu().arch), programs))


def layer_weights(s: Spec) -> SimpleNamespace:
    def vector(*shape: int, scale: float = 0.3, shift: float = 0.0) -> Tensor:
        return (torch.randn(shape, device="cuda") * scale + shift).bfloat16()

    width = (s.heads + 2 * s.kv_heads) * s.head_dim
    return SimpleNamespace(
        qkv=random_mxfp4(width, s.hidden), o=random_mxfp4(s.hidden, s.heads * s.head_dim),
        gate_up=random_mxfp4(s.experts, 2 * s.intermediate, s.hidden),
        down=random_mxfp4(s.experts, s.hidden, s.intermediate), qkv_bias=vector(width), o_bias=vector(s.hidden),
        gate_up_bias=vector(s.experts, 2 * s.intermediate), down_bias=vector(s.experts, s.hidden),
        attn_norm=vector(s.hidden, shift=1.0), mlp_norm=vector(s.hidden, shift=1.0),
        router=vector(s.experts, s.hidden, scale=s.hidden**-0.5), router_bias=vector(s.experts),
        sinks=vector(s.heads, scale=1.0),
    )  # fmt: skip


def a_step(tokens: int) -> Step:
    blocks = -(-tokens // 64)
    tables = (torch.randperm(2 * blocks, device="cuda").int() + 1).view(2, 1, blocks)

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    return Step(
        tokens=torch.zeros(tokens, dtype=torch.int32, device="cuda"),
        positions=torch.arange(tokens, dtype=torch.int32, device="cuda"), query_start=ints(0, tokens),
        kv_lens=ints(tokens), row_sequence=torch.zeros(tokens, dtype=torch.int32, device="cuda"),
        block_tables={"sliding": tables[0], "full": tables[1]}, logit_rows=ints(tokens - 1), max_kv_len=tokens,
    )  # fmt: skip


def bind(s: Spec, weights: list[SimpleNamespace], phases: tuple[Phase, ...], pool: Tensor) -> list[Launch]:
    buffers: dict[str, Tensor] = {}
    rope = yarn_frequencies(64, 150000.0, 32.0, 4096, 32.0, 1.0, False)
    bound = []
    for i, w in enumerate(weights):
        b = Binding(s, w, ("sliding", "full")[i % 2], i // 2, rope, lambda: pool, buffers, i)
        for phase in phases:
            through = replace(b, spec=replace(s, activation="bf16")) if isinstance(phase, NormAndRouter) else b
            bound.append(phase.bind(through))
    return bound


def run(bound: list[Launch], step: Step, x: Tensor) -> Tensor:
    acts = Activations(x=x)
    for launch in bound:
        launch(step, acts)
    found: Tensor = acts.x
    return found


def median_us(work: Callable[[], object], times: int) -> float:
    """Of one call, each begun when the one before has ended, as a prompt is."""
    found = []
    for _ in range(times):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - began) * 1e6)
    return statistics.median(found)


def timeline(work: Callable[[], object], layers: int, times: int) -> dict[str, float]:
    """Microseconds of a layer by kernel: from the end of the kernel before it to its own end."""
    work()
    torch.cuda.synchronize()
    with torch_profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(times):
            work()
        torch.cuda.synchronize()
    events = sorted((e for e in trace.events() if e.device_type == DeviceType.CUDA), key=lambda e: e.time_range.end)
    found: dict[str, list[float]] = {}
    before, products, gaps = None, 0, 0.0
    for e in events:
        name = "around" if "at::" in e.name else e.name.split("(")[0].removesuffix("_kernel")
        if name == "grouped":
            name = PRODUCTS[products % 4]
            products += 1
        if before is not None:
            found.setdefault(name, []).append(e.time_range.end - before)
            gaps += max(0.0, e.time_range.start - before)
        before = e.time_range.end
    us = {name: sum(v) / (layers * times) for name, v in found.items()}
    return dict(sorted(us.items(), key=lambda item: -item[1])) | {"of that, nothing ran": gaps / (layers * times)}


def measure(s: Spec, weights: list[SimpleNamespace], tokens: int, fp8: bool) -> dict[str, Any]:
    pool = torch.randn((2 * -(-tokens // 64) + 1, len(weights) // 2, 2, s.kv_heads, 64, 64), device="cuda").bfloat16()
    step, x = a_step(tokens), torch.randn((tokens, s.hidden), device="cuda")
    phases: tuple[Phase, ...] = (
        *((Fp8Qkv(), RopeAndWrite(), FlashAttention(), Fp8Out()) if fp8 else ()),
        *((GroupedQkv(), RopeAndWrite(), FlashAttention(), GroupedOut()) if not fp8 else ()),
        NormAndRouter(), Fp8Moe() if fp8 else GroupedMoe(),
    )  # fmt: skip
    fused: Phase = Fp8PrefillLayer() if fp8 else PrefillLayer()
    one = replace(s, layers=1)
    want, got = (run(bind(one, weights[:1], p, pool), step, x) for p in (phases, (fused,)))
    error = float((got - want).norm() / (want - x).norm())
    out: dict[str, Any] = {"tokens": tokens, "error": error}
    if not error < BOUND["fp8" if fp8 else "bf16"]:
        return out | {"wrong": True}
    bound = bind(s, weights, (fused,), pool)
    count = len(weights)

    def eager() -> Tensor:
        return run(bound, step, x)

    first = eager()
    torch.cuda.synchronize()
    out["repeats"] = torch.equal(first, eager())
    began = time.perf_counter()
    eager()
    out["host_us"] = (time.perf_counter() - began) * 1e6 / count
    times = max(5, 200_000 // (count * tokens))
    out["eager_us"] = median_us(eager, times) / count
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        eager()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        eager()
    out["graph_us"] = median_us(graph.replay, times) / count
    out["kernels_us"] = timeline(graph.replay, count, 3)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="512,2048")
    parser.add_argument("--layers", type=int, default=6, help="an even number")
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    environment.need_gpu()
    torch.set_grad_enabled(False)
    began = time.time()
    gates = Gates(layers=Layers("mxfp4", "mxfp4", "mxfp4", "mxfp4"), activation="fp8" if args.fp8 else "auto")
    s = spec_of(NAMED["120b"], gates, ARCHES["sm90"], formats_after(gates, CHECKPOINT_FORMATS))
    s = replace(s, layers=args.layers)
    compile_all(s, args.fp8)
    print(f"kernels ready after {time.time() - began:.1f} s", flush=True)
    weights = [layer_weights(s) for _ in range(args.layers)]
    report: dict[str, Any] = {
        "bench": "prefill_layers", "device": torch.cuda.get_device_name(), "layers": args.layers, "fp8": args.fp8,
        "sources": GroupedShape("mxfp4", "m256n128", False).program().hash(), "date": time.strftime("%Y-%m-%d"),
        "results": [],
        "measured": receipts.measured({Fp8PrefillLayer() if args.fp8 else PrefillLayer()}),
    }  # fmt: skip
    for tokens in (int(t) for t in args.tokens.split(",")):
        r = measure(s, weights, tokens, args.fp8)
        report["results"].append(r)
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in r.items() if k != "kernels_us"}, flush=True)
        print("  us a layer:", {k: round(v, 1) for k, v in r.get("kernels_us", {}).items()}, flush=True)
    if args.save:
        args.save.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    return int(any(r.get("wrong") for r in report["results"]))


if __name__ == "__main__":
    sys.exit(main())
