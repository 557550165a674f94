"""A stack of prompt layers on a GPU (`cuda.prefill_layer`): where a layer's time goes, kernel by kernel.

    python -m bench run prefill-layers --set tokens=512,2048 --set layers=6
    python -m bench run prefill-layers --set fp8=yes --set tokens=4096,8192

Random weights of the true shapes. At every size a layer is first compared with its phases run one by one, with the
experts that the layer chose: all rows, and what the cache holds. A layer that differs is not timed. Then the stack is
timed as prompts run (queued eagerly) and as one CUDA graph, which shows what the host costs; the driver's timeline of
that graph says how long after the kernel before it each kernel ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from bench.kernels import timing
from bench.measurement import Run, measurement, option
from halfbyte.gates import Gates, Layers
from halfbyte.kernels.cuda.attention.flash import FlashAttention
from halfbyte.kernels.cuda.prefill.fp8 import Fp8Moe, Fp8Out, Fp8Qkv
from halfbyte.kernels.cuda.prefill.layer import Fp8PrefillLayer, PrefillLayer
from halfbyte.kernels.cuda.prefill.phases import GroupedMoe, GroupedOut, GroupedQkv
from halfbyte.kernels.triton.rope import RopeAndWrite
from halfbyte.kernels.triton.router import NormAndRouter
from halfbyte.lab import receipts
from halfbyte.lab.levels.verdict import Verdict
from halfbyte.lab.result import Cell, Result, figure
from halfbyte.model.config import NAMED
from halfbyte.model.gpt_oss import CHECKPOINT_FORMATS, formats_after, spec_of
from halfbyte.ops.rope import yarn_frequencies
from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import ARCHES, Binding, Launch, Phase, Spec
from halfbyte.plan.step import Step

BOUND = {"bf16": 1e-2, "fp8": 4e-2}  # between one layer and its phases, on what the layer adds; docs/numerics.md
WORST = 5  # times the bound, of a single row
SAME_EXPERTS = 0.99  # of the rows: both sides round x their own way in front of the router
PRODUCTS = ("qkv", "o", "gate_up", "down")  # of a layer, in order


def layer_weights(s: Spec) -> SimpleNamespace:
    def vector(*shape: int, scale: float = 0.3, shift: float = 0.0) -> Tensor:
        return (torch.randn(shape, device="cuda") * scale + shift).bfloat16()

    width = (s.heads + 2 * s.kv_heads) * s.head_dim
    return SimpleNamespace(
        qkv=timing.random_mxfp4(width, s.hidden), o=timing.random_mxfp4(s.hidden, s.heads * s.head_dim),
        gate_up=timing.random_mxfp4(s.experts, 2 * s.intermediate, s.hidden),
        down=timing.random_mxfp4(s.experts, s.hidden, s.intermediate), qkv_bias=vector(width), o_bias=vector(s.hidden),
        gate_up_bias=vector(s.experts, 2 * s.intermediate), down_bias=vector(s.experts, s.hidden),
        attn_norm=vector(s.hidden, shift=1.0), mlp_norm=vector(s.hidden, shift=1.0),
        router=vector(s.experts, s.hidden, scale=s.hidden**-0.5), router_bias=vector(s.experts),
        sinks=vector(s.heads, scale=1.0),
    )  # fmt: skip


def step_of(tokens: int) -> Step:
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
    return acts.x


def compare(s: Spec, weights: SimpleNamespace, pool: Tensor, step: Step, x: Tensor, fp8: bool) -> Verdict:
    """One layer against its phases, which take the layer's own experts."""
    verdict = Verdict(f"a layer of {step.rows} rows against its phases")
    bound = BOUND["fp8" if fp8 else "bf16"]
    fused: Phase = Fp8PrefillLayer() if fp8 else PrefillLayer()
    first = (Fp8Qkv(), RopeAndWrite(), FlashAttention(), Fp8Out(), NormAndRouter()) if fp8 else (
        GroupedQkv(), RopeAndWrite(), FlashAttention(), GroupedOut(), NormAndRouter()
    )  # fmt: skip
    pools, single = (pool.clone(), pool.clone()), replace(s, layers=1)
    layer, phases = Activations(x=x.clone()), Activations(x=x.clone())
    for launch in bind(single, [weights], (fused,), pools[0]):
        launch(step, layer)
    for launch in bind(single, [weights], first, pools[1]):
        launch(step, phases)
    same = (layer.topk_ids.sort(-1).values == phases.topk_ids.sort(-1).values).all(-1).float().mean()
    phases.topk_ids, phases.topk_weights = layer.topk_ids, layer.topk_weights
    for launch in bind(single, [weights], (Fp8Moe() if fp8 else GroupedMoe(),), pools[1]):
        launch(step, phases)
    off, added = layer.x.double() - phases.x.double(), phases.x.double() - x.double()
    verdict.add("all rows", float(off.norm() / added.norm()), bound)
    verdict.add("worst row", float((off.norm(dim=-1) / added.norm(dim=-1)).max()), WORST * bound)
    verdict.add("rows with other experts", 1 - float(same), 1 - SAME_EXPERTS)
    written = (pools[1] != pool).any(dim=(1, 2, 3, 5))  # [pages, slots]: cells of this layer's rows
    actual, expected = (p.transpose(1, 4)[written].double() for p in pools)
    verdict.add("keys and values", float((actual - expected).norm() / expected.norm()), bound)
    elsewhere = (pools[0] != pool).any(dim=(1, 2, 3, 5)) & ~written
    verdict.require("nothing else in the cache changed", not bool(elsewhere.any()))
    return verdict


def timeline(work: Callable[[], object], layers: int, times: int) -> dict[str, float]:
    """Microseconds of a layer by kernel: from the end of the kernel before it to its own end."""
    work()
    torch.cuda.synchronize()
    with torch_profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(times):
            work()
        torch.cuda.synchronize()
    events = sorted((e for e in trace.events() if e.device_type == DeviceType.CUDA), key=lambda e: e.time_range.end)
    spans: dict[str, list[float]] = {}
    before, products, gaps = None, 0, 0.0
    for e in events:
        name = "around" if "at::" in e.name else e.name.split("(")[0].removesuffix("_kernel")
        if name == "grouped":
            name = PRODUCTS[products % 4]
            products += 1
        if before is not None:
            spans.setdefault(name, []).append(e.time_range.end - before)
            gaps += max(0.0, e.time_range.start - before)
        before = e.time_range.end
    us = {name: sum(v) / (layers * times) for name, v in spans.items()}
    return dict(sorted(us.items(), key=lambda item: -item[1])) | {"of that, nothing ran": gaps / (layers * times)}


def measure(cell: Cell, s: Spec, weights: list[SimpleNamespace], tokens: int, fp8: bool, repeats: int) -> Result:
    pool = torch.randn((2 * -(-tokens // 64) + 1, len(weights) // 2, 2, s.kv_heads, 64, 64), device="cuda").bfloat16()
    step, x = step_of(tokens), torch.randn((tokens, s.hidden), device="cuda")
    verdict = compare(s, weights[0], pool, step, x, fp8)
    fused: Phase = Fp8PrefillLayer() if fp8 else PrefillLayer()
    bound, count = bind(s, weights, (fused,), pool), len(weights)
    eager = partial(run, bound, step, x)
    verdict.require("the stack repeats to the last bit", torch.equal(eager().clone(), eager()))
    check = verdict.as_check()
    if not check.ok:
        return Result(cell, checks=(check,))
    torch.cuda.synchronize()
    start = time.perf_counter()
    eager()
    host = (time.perf_counter() - start) * 1e6 / count
    graph = timing.captured(eager)
    figures = (
        figure("eager", "us", host_us(eager, repeats, count)),
        figure("graph", "us", host_us(graph.replay, repeats, count)),
        figure("host", "us", host),
    )
    kernels = timeline(graph.replay, count, 3)
    print("  us a layer:", {name: round(us, 1) for name, us in kernels.items()}, flush=True)
    return Result(cell, figures, (check,), detail={"kernels_us": kernels})


def host_us(work: Callable[[], object], repeats: int, layers: int) -> list[float]:
    """Host time of a layer. Each call begins when the one before has ended, as in a prompt."""
    samples = []
    for _ in range(repeats + timing.WARM_UP):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) * 1e6 / layers)
    return samples[timing.WARM_UP :]


@dataclass(frozen=True)
class Options:
    tokens: tuple[int, ...] = (512, 2048)
    layers: int = option(6, "an even number")
    fp8: bool = option(False, "fp8 activations")
    repeats: int = timing.REPEATS


@measurement("prefill-layers", needs=("gpu",), seconds=120, routine=False)
def prefill_layers(run: Run, options: Options) -> None:
    timing.begin()
    gates = Gates(layers=Layers("mxfp4", "mxfp4", "mxfp4", "mxfp4"), activation="fp8" if options.fp8 else "auto")
    arch = ARCHES["sm90"]
    s = replace(
        spec_of(NAMED["120b"], gates, arch, formats_after(NAMED["120b"], gates, CHECKPOINT_FORMATS)),
        layers=options.layers,
    )
    fused = Fp8PrefillLayer() if options.fp8 else PrefillLayer()
    timing.compile_all(build.program for build in fused.builds(s, arch))
    weights = [layer_weights(s) for _ in range(options.layers)]
    run.sources |= receipts.measured([fused])
    for tokens in options.tokens:
        cell = Cell("kernel", "120b", path=fused.name, shape={"rows": tokens, "layers": options.layers})
        run.measure(cell, partial(measure, cell, s, weights, tokens, options.fp8, options.repeats))
