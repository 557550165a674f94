"""The products of a batch (kernels/cuda/batch) on a GPU at true shapes: compared with float32 torch, then timed.

    python -m bench run batch-kernels --set rows=2,8,16,32,64

Layers with distinct random weights in turn, so nothing sits in the L2 cache; routing is what the router chooses, the
experts of timed steps are counted. A size whose output is wrong is not timed. Times are of graphs that run every
layer's product once, beside what the memory could do; `experts` is gate_up and down. `seconds`: the experts for so
long, at first and at last, with what the card draws: at its power limit it lowers its clocks, which milliseconds do not
show.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.kernels import timing
from bench.measurement import Run, measurement, option
from halfbyte import formats
from halfbyte.formats import MXTensor, tile16
from halfbyte.kernels.cuda.batch import layer as batch_layer
from halfbyte.kernels.cuda.batch.builds import RowShape
from halfbyte.kernels.cuda.batch.layer import BatchBuffers, LayerKernels
from halfbyte.kernels.cuda.batch.products import BatchMatrix
from halfbyte.kernels.cuda.device.host import Workspace, gpu
from halfbyte.lab import receipts
from halfbyte.lab.levels.verdict import Verdict, choice_gap
from halfbyte.lab.measure.device_timing import device_us
from halfbyte.lab.measure.power import PowerMeter
from halfbyte.lab.result import Cell, Result, figure
from halfbyte.model.config import NAMED
from halfbyte.ops.moe import swiglu
from halfbyte.ops.norm import rms_norm

# docs/numerics.md; the choice of experts is a near tie within this part of the logits' deviation.
BOUNDS = {"qkv": 2e-3, "mid": 1e-4, "experts": 3e-3, "choice": 1e-3}
PARTS = ("qkv", "o, router", "experts", "choose", "sums")
MARKS = ("start", "x wanted", "all asked for", "end")


class RandomLayer:
    """One layer of a model with random weights."""

    def __init__(self, model: str, shared: dict[str, Tensor]) -> None:
        c = self.config = NAMED[model]
        width = (c.heads + 2 * c.kv_heads) * c.head_dim
        self.w = {
            "qkv": timing.random_mxfp4(width, c.hidden), "o": timing.random_mxfp4(c.hidden, c.heads * c.head_dim),
            "gate_up": timing.random_mxfp4(c.experts, 2 * c.intermediate, c.hidden),
            "down": timing.random_mxfp4(c.experts, c.hidden, c.intermediate),
        }  # fmt: skip
        self.v = {f"{n}_bias": self.vector(*w.shape[:-1]) for n, w in self.w.items()}
        self.v |= {"attn_norm": self.vector(c.hidden), "mlp_norm": self.vector(c.hidden)}
        self.v |= {
            "router": self.vector(c.experts, c.hidden) / c.hidden**0.5,
            "router_bias": self.vector(c.experts) / 8,
        }
        more = {"gate_up": {"swiglu": True}, "o": {"router": c.experts}}
        matrices = {n: BatchMatrix(w, self.v[f"{n}_bias"], n, **more.get(n, {})) for n, w in self.w.items()}
        workspace = Workspace(gpu(), shared, torch.device("cuda"))
        buffers = BatchBuffers(workspace, RowShape(c.hidden, c.experts, c.top_k), c.intermediate)
        vectors = {n: self.v[n] for n in ("attn_norm", "mlp_norm", "router", "router_bias")}
        self.layer = LayerKernels(
            buffers, **matrices, **vectors, eps=c.norm_eps, limit=c.swiglu_limit, alpha=c.swiglu_alpha
        )

    @staticmethod
    def vector(*size: int) -> Tensor:
        return torch.randn(size, device="cuda").bfloat16()

    def check(self, rows: int) -> Verdict:
        """A layer's steps against float32, with the layer's own experts; a second run gives the same bits."""
        c, v, layer = self.config, self.v, self.layer
        x, attn = torch.randn((rows, c.hidden), device="cuda"), self.vector(rows, c.heads * c.head_dim)
        runs = []
        for _ in range(2):
            y, qkv = x.clone(), torch.full((rows, self.w["qkv"].shape[0]), float("nan"), device="cuda")
            layer.enter(y, qkv, pending=False)
            layer.leave(y, attn)
            mid = y.clone()
            layer.finish(y)
            runs.append((qkv, mid, y, layer.buffers.ids[:rows].clone()))
        verdict = Verdict(f"a layer of {rows} rows")
        verdict.require("repeats to the last bit", all(torch.equal(a, b) for a, b in zip(*runs)))
        qkv, mid, y, ids = runs[0]
        h = rms_norm(x, v["attn_norm"], c.norm_eps).bfloat16().float()
        verdict.compare("qkv", qkv, h @ dense(self.w["qkv"]).T + v["qkv_bias"].float(), BOUNDS["qkv"])
        expected = x + attn.float() @ dense(self.w["o"]).T + v["o_bias"].float()
        verdict.compare("mid", mid, expected, BOUNDS["mid"])
        h = rms_norm(mid, v["mlp_norm"], c.norm_eps)
        logits = h @ v["router"].float().T + v["router_bias"].float()
        gap = max(choice_gap(logits, ids), 0.0) / float(logits.std())
        verdict.add("choice of experts beyond a tie", gap, BOUNDS["choice"])
        shares = torch.softmax(logits.gather(1, ids.long()), -1)
        parts = torch.zeros((rows, c.top_k, c.hidden), device="cuda")
        for e in ids.unique().tolist():
            row, slot = (ids == e).nonzero(as_tuple=True)
            z = h[row].bfloat16().float() @ dense(self.w["gate_up"].select(e)).T + v["gate_up_bias"][e].float()
            z = swiglu(z, c.swiglu_limit, c.swiglu_alpha).bfloat16().float()
            z = z @ dense(self.w["down"].select(e)).T + v["down_bias"][e].float()
            parts[row, slot] = z * shares[row, slot, None]
        verdict.compare("experts", y - mid, parts.sum(1), BOUNDS["experts"])
        return verdict


def dense(w: MXTensor) -> Tensor:
    return formats.dequantize(tile16.unpack(w), torch.float32)


class Timing:
    """All layers one after the other, part by part."""

    def __init__(self, cases: list[RandomLayer], rows: int) -> None:
        c = cases[0].config
        self.cases, self.rows = cases, rows
        self.xs = [torch.randn((rows, c.hidden), device="cuda") for _ in cases]
        self.attn = RandomLayer.vector(rows, c.heads * c.head_dim)
        self.qkv = torch.empty((rows, cases[0].w["qkv"].shape[0]), device="cuda")
        self.choices: list[Tensor] = []
        for case, x in zip(cases, self.xs):
            case.layer.leave(x, self.attn)
            self.choices.append(case.layer.buffers.ids[:rows].clone())
        self.buffers, self.machine = cases[0].layer.buffers, cases[0].layer.machine
        self.used = torch.zeros((len(cases), 2 + self.buffers.done.numel()), dtype=torch.int32, device="cuda")
        self.copies = []  # one for each layer, so that nothing is cleared between them
        for mine, ids in zip(self.used, self.choices):
            own = copy.copy(self.buffers)
            own.tickets, own.done, own.ids = mine[:2], mine[2:], ids
            self.copies.append(own)

    @property
    def experts(self) -> float:
        """Distinct, of a layer: those that the timed products read."""
        return statistics.fmean(ids.unique().numel() for ids in self.choices)

    @property
    def bytes_of(self) -> dict[str, float]:
        """What a part must read of weights in one layer."""
        sizes = {n: w.data[0].nbytes if w.data.ndim == 4 else w.data.nbytes for n, w in self.cases[0].w.items()}
        experts = self.experts * (sizes["gate_up"] + sizes["down"])
        return {"qkv": sizes["qkv"], "o, router": sizes["o"], "experts": experts}

    def run(self, part: str, trace: Tensor | None = None) -> None:
        self.used.zero_()
        for i, (case, x) in enumerate(zip(self.cases, self.xs)):
            layer = case.layer
            if part == "experts":
                layer.experts.run(self.machine, self.copies[i], self.rows, trace=trace)
            elif part == "qkv":
                layer.qkv.run(self.machine, self.buffers.h, self.qkv, self.rows, trace=trace)
            elif part == "o, router":
                layer.o.run(self.machine, self.attn, x, self.rows, router=layer.router, trace=trace)
            elif part == "choose":
                layer.choose(x)
            else:
                layer.sum_up(x, layer.attn_norm, pending=True)

    def layers(self) -> None:
        """Whole layers but for attention."""
        for i, (case, x) in enumerate(zip(self.cases, self.xs)):
            case.layer.enter(x, self.qkv, pending=i > 0)
            case.layer.leave(x, self.attn)
        self.cases[-1].layer.finish(self.xs[-1])

    def marks(self, part: str) -> dict[str, list[float]]:
        """Least, mean and latest clock of a block at each mark of the last layer, in microseconds."""
        trace = torch.zeros((self.machine.blocks, len(MARKS)), dtype=torch.int64, device="cuda")
        self.run(part, trace)
        torch.cuda.synchronize()
        us = (trace - trace[:, 0].min()).double() / 1e3
        return {
            mark: [round(float(f(us[:, i])), 2) for f in (torch.min, torch.mean, torch.max)]
            for i, mark in enumerate(MARKS)
        }


def sustained(work: Callable[[], object], seconds: float, layers: int) -> dict[str, Any]:
    """Microseconds of a layer in graphs of `work`: the first twenty, and the second half of so many seconds."""
    graph, samples = timing.captured(work), []
    with PowerMeter() as meter:
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            samples.append(device_us(graph.replay, 20) / layers)
    return {"first_us": samples[0], "late_us": statistics.fmean(samples[len(samples) // 2 :])} | meter.summary()


def measure(cell: Cell, cases: list[RandomLayer], rows: int, part: str, repeats: int, seconds: float) -> Result:
    products, count = Timing(cases, rows), len(cases)
    if part == "layer without attention":
        samples = timing.graph_us(products.layers, repeats, count)
        floor = sum(products.bytes_of.values()) / timing.roof().read * 1e6
        return Result(cell, (figure("time", "us", samples),), detail={"floor_us": floor})
    samples = timing.graph_us(partial(products.run, part), repeats, count)
    figures = [figure("time", "us", samples)]
    detail: dict[str, Any] = {}
    if part in products.bytes_of:
        rates = [products.bytes_of[part] / us / 1e6 for us in samples]
        figures.append(figure("read", "TB/s", rates, timing.read_ceiling()))
        figures.append(figure("experts of a layer", "experts", products.experts))
        detail["trace"] = products.marks(part)
    if part == "experts" and seconds:
        detail["sustained"] = sustained(partial(products.run, part), seconds, count)
    return Result(cell, tuple(figures), detail=detail)


def checked(cell: Cell, verdict: Verdict, work: Callable[[], Result]) -> Result:
    """The cell's figures behind their comparison."""
    check = verdict.as_check()
    if not check.ok:
        return Result(cell, checks=(check,))
    result = work()
    return Result(cell, result.figures, (check,), detail=result.detail)


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = ("120b",)
    rows: tuple[int, ...] = (8, 32, 64)
    layers: int = option(4, "with weights of their own, one after the other")
    seconds: float = option(0.0, "the experts' product for so long, with watts and MHz")
    repeats: int = 7


@measurement("batch-kernels", needs=("gpu",), seconds=60)
def batch_kernels(run: Run, options: Options) -> None:
    timing.begin()
    run.sources |= receipts.hashes(receipts.sources_of([Path(batch_layer.__file__)]))
    for model in options.models:
        shared: dict[str, Tensor] = {}
        cases = [RandomLayer(model, shared) for _ in range(options.layers)]
        for rows in options.rows:
            verdict = cases[0].check(rows)
            for part in (*PARTS, "layer without attention"):
                cell = Cell("kernel", model, path=f"batch: {part}", shape={"rows": rows})
                work = partial(measure, cell, cases, rows, part, options.repeats, options.seconds)
                run.measure(cell, partial(checked, cell, verdict, work))
        del cases
        torch.cuda.empty_cache()
