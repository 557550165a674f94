"""The grouped products of prompts (kernels/cuda/prefill) on a GPU: compared with float32 torch, then timed.

    python -m bench run prefill-kernels --set tokens=16,32,64,512,2048,8192
    python -m bench run prefill-kernels --set compare=m256n128,m384n88,m256n128+pair --set tokens=2048,8192
    python -m bench run prefill-kernels --set options=-DHB_PIN=1         # another build (also HB_ALONE)
    python -m bench run prefill-kernels-fp8                              # fp8 activations

Experts of a few layers with distinct random weights in turn, so nothing sits in the L2 cache; routing is random, and
distinct experts are counted. Every cell is compared in its own size and build before it is timed, on poisoned buffers;
one that is wrong is not timed. Figures stand beside what the memory and the tensor cores could do.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Self

import torch
from torch import Tensor

from bench.kernels import timing
from bench.measurement import Run, measurement, option
from halfbyte import formats
from halfbyte.formats import MXTensor, tile16
from halfbyte.kernels.cuda.device.host import CudaMachine, Workspace
from halfbyte.kernels.cuda.prefill.builds import FP8_TILE, TILES, GroupedProductArgs, GroupedShape, build_of, rows_build
from halfbyte.kernels.cuda.prefill.experts import GroupedExperts
from halfbyte.kernels.cuda.prefill.fp8 import Fp8Dense, Fp8Experts, Fp8Moe
from halfbyte.kernels.cuda.prefill.phases import GroupedMoe
from halfbyte.kernels.cuda.prefill.products import Dense
from halfbyte.kernels.launch import Build, Kernel, Map, Program
from halfbyte.lab import receipts
from halfbyte.lab.levels.verdict import Verdict
from halfbyte.lab.result import Cell, Check, Figure, Result, figure
from halfbyte.model.config import NAMED
from halfbyte.ops.linear import round_activation
from halfbyte.ops.moe import swiglu

BOUND, DENSE_BOUND, FP8_BOUND = 3e-3, 1e-4, 2e-2  # docs/numerics.md
ROW_KERNELS = ("pack_rows", "group_rows", "requantize", "sum_rows")
PARTS = ("group_rows", "pack_rows", "gate_up", "requantize", "down", "sum_rows")
SHAPES = [GroupedShape("mxfp4", tile, swiglu) for tile in TILES if tile != FP8_TILE for swiglu in (False, True)]
SUSTAINED = 150_000  # µs that a kernel is timed for, so that the clock falls as it does in a long prompt
ODD_SIZES = (9, 65, 200)  # that are compared and not timed
STACK = 12  # matrices of qkv and o, in turn


def dequantized(w: MXTensor) -> Tensor:
    if len(w.shape) == 2:
        return formats.dequantize(tile16.unpack(w), torch.float32)
    return torch.stack([formats.dequantize(tile16.unpack(w.select(e)), torch.float32) for e in range(w.shape[0])])


class OtherOptions(CudaMachine):
    """The products with more options than they are shipped with."""

    def __init__(self, options: tuple[str, ...]) -> None:
        super().__init__()
        self.options = options

    def program(self, build: Build) -> Program:
        more = self.options if build.program.entry == "grouped" else ()
        return replace(build.program, options=build.program.options + more)


class Layer:
    def __init__(self, workspace: Workspace, model: str, fp8: bool) -> None:
        c = NAMED[model]
        self.config, self.activation = c, "fp8" if fp8 else "bf16"
        self.gate_up = timing.random_mxfp4(c.experts, 2 * c.intermediate, c.hidden)
        self.down = timing.random_mxfp4(c.experts, c.hidden, c.intermediate)
        self.gate_up_bias = torch.randn(c.experts, 2 * c.intermediate, device="cuda").bfloat16()
        self.down_bias = torch.randn(c.experts, c.hidden, device="cuda").bfloat16()
        kind = Fp8Experts if fp8 else GroupedExperts
        self.experts = kind(
            workspace, self.gate_up, self.gate_up_bias, self.down, self.down_bias, limit=c.swiglu_limit,
            alpha=c.swiglu_alpha,
        )  # fmt: skip

    def reference(self, dense: tuple[Tensor, Tensor], h: Tensor, ids: Tensor, weights: Tensor, x: Tensor) -> Tensor:
        parts = torch.zeros((*ids.shape, x.shape[1]), device="cuda")
        for e in ids.unique().tolist():
            row, slot = (ids == e).nonzero(as_tuple=True)
            y = round_activation(h[row], self.activation) @ dense[0][e].T + self.gate_up_bias[e].float()
            y = swiglu(y, self.config.swiglu_limit, self.config.swiglu_alpha).bfloat16()
            y = round_activation(y, self.activation)
            y = y @ dense[1][e].T + self.down_bias[e].float()
            y = y.bfloat16().float() if self.activation == "fp8" else y
            parts[row, slot] = y * weights[row, slot, None]
        return x + parts.sum(1)


def routing(rows: int, experts: int, top_k: int, even: bool = False) -> tuple[Tensor, Tensor]:
    if even:  # every expert the same number of rows
        ids = (torch.arange(rows * top_k, device="cuda").view(rows, top_k)) % experts
    else:
        ids = torch.rand((rows, experts), device="cuda").topk(top_k).indices
    return ids.int().contiguous(), torch.rand((rows, top_k), device="cuda").softmax(-1).contiguous()


def sustained_us(run: Callable[[int], object], repeats: int, sustained: float = SUSTAINED) -> list[float]:
    """Samples of run(i), launched eagerly as prompts are: `repeats`, or as many as fill `sustained` µs."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for i in range(3):
        run(i)
    end.record()
    torch.cuda.synchronize()
    count = max(repeats, int(sustained / (begin.elapsed_time(end) * 1000 / 3)))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for i in range(count):
        run(i)
        events[i + 1].record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1000 for a, b in itertools.pairwise(events)]


class Compared(NamedTuple):
    """A build to compare: tile[+alone|+pair][:options for the compiler]."""

    name: str
    tile: str
    pair: int
    options: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Self:
        name, _, options = text.partition(":")
        tile, *how = name.split("+")
        return cls(text, tile, {"alone": 1, "pair": 2}[how[0]] if how else TILES[tile].pair, tuple(options.split()))


@contextlib.contextmanager
def built(gpu: OtherOptions, as_: Compared) -> Iterator[None]:
    """The tile as it is to be compared, and nothing left of it afterwards: new builds are new kernels."""
    tile, options = TILES[as_.tile], gpu.options
    TILES[as_.tile], gpu.options = tile._replace(pair=as_.pair), options + as_.options
    build_of.cache_clear()
    yield
    TILES[as_.tile], gpu.options = tile, options
    build_of.cache_clear()


def load_kernels(gpu: OtherOptions, fp8: bool, compared: list[Compared]) -> None:
    """Compile in parallel; loading then finds them in the cache."""
    shapes = [GroupedShape("mxfp4", FP8_TILE, s) for s in (False, True)] if fp8 else SHAPES
    programs = [gpu.program(b) for b in (*map(build_of, shapes), *map(rows_build, ROW_KERNELS))]
    for c in compared:
        with built(gpu, c):
            programs += [gpu.program(build_of(GroupedShape("mxfp4", c.tile, s))) for s in (False, True)]
    timing.compile_all(programs, gpu.arch)


class Spy:
    """A machine that runs everything and remembers the last arguments, so that one kernel can be timed alone."""

    def __init__(self, gpu: CudaMachine) -> None:
        self.gpu, self.blocks, self.failure = gpu, gpu.blocks, gpu.failure
        self.launches: dict[str, tuple[Build, int, ctypes.Structure]] = {}

    def load(self, build: Build) -> Kernel:
        return self.gpu.load(build)

    def byte_map(self, data: Tensor, row_bytes: int, box: tuple[int, int]) -> Map:
        return self.gpu.byte_map(data, row_bytes, box)

    def row_map(self, rows: Tensor, box: tuple[int, int]) -> Map:
        return self.gpu.row_map(rows, box)

    def run(self, build: Build, grid: int, args: ctypes.Structure) -> None:
        name = build.program.entry
        if isinstance(args, GroupedProductArgs):  # the first of both writes its results packed
            name = "gate_up" if args.packed else "down"
        self.launches[name] = (build, grid, args)
        self.gpu.run(build, grid, args)


class Bench:
    """A few layers of experts over one workspace."""

    def __init__(self, model: str, count: int, fp8: bool, gpu: OtherOptions) -> None:
        self.spy, self.fp8, self.buffers = Spy(gpu), fp8, dict[str, Tensor]()
        self.workspace = Workspace(self.spy, self.buffers, torch.device("cuda"))
        self.layers = [Layer(self.workspace, model, fp8) for _ in range(count)]
        self.dense = (dequantized(self.layers[0].gate_up), dequantized(self.layers[0].down))
        self.config = NAMED[model]

    def inputs(self, rows: int, even: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Fresh rows, their experts and shares, and a residual."""
        c = self.config
        ids, weights = routing(rows, c.experts, c.top_k, even)
        h = torch.randn(rows, c.hidden, device="cuda").bfloat16()
        return h, ids, weights, torch.randn(rows, c.hidden, device="cuda")

    def check(self, rows: int, tile: str | None) -> Check:
        verdict = Verdict(f"experts of {rows} rows, {tile or 'the tile of its size'}")
        layer = self.layers[0]
        layer.experts.tile = tile
        h, ids, weights, x = self.inputs(rows)
        runs = []
        for _ in range(2):
            timing.poison(self.buffers.values())
            runs.append(layer.experts.run(h, ids, weights, x).clone())
        expected = layer.reference(self.dense, h, ids, weights, x) - x
        verdict.compare("what experts add", runs[0] - x, expected, FP8_BOUND if self.fp8 else BOUND)
        verdict.require("repeats to the last bit", torch.equal(*runs))
        return verdict.as_check()

    def measure(self, cell: Cell, rows: int, even: bool, tile: str | None, repeats: int, ablation: bool) -> Result:
        check = self.check(rows, tile)
        if not check.ok and not ablation:
            return Result(cell, checks=(check,))
        for layer in self.layers:
            layer.experts.tile = tile
        h, ids, weights, x = self.inputs(rows, even)
        launches = []
        for layer in self.layers:
            layer.experts.run(h, ids, weights, x)
            launches.append(dict(self.spy.launches))
        experts = ids.unique().numel()
        figures = [figure("experts of a layer", "experts", experts)]
        for part in (p for p in PARTS if p in launches[0]):
            samples = sustained_us(lambda i, p=part: self.spy.gpu.run(*launches[i % len(launches)][p]), repeats)
            figures.append(figure(part, "us", samples))
            figures += self.rate(part, rows, experts, samples)

        def all_experts(i: int) -> Tensor:
            return self.layers[i % len(self.layers)].experts.run(h, ids, weights, x)

        figures.append(figure("all experts", "us", sustained_us(all_experts, repeats)))
        detail = {"build": launches[0]["down"][0].name} | ({"ablation": check.note} if ablation else {})
        return Result(cell, tuple(figures), () if ablation else (check,), detail=detail)

    def rate(self, part: str, rows: int, experts: int, samples: list[float]) -> list[Figure]:
        """Beside the ceiling that binds: memory for few rows, arithmetic for many."""
        c = self.config
        sizes = {"gate_up": (2 * c.intermediate, c.hidden), "down": (c.hidden, c.intermediate)}
        if part not in sizes:
            return []
        n, k = sizes[part]
        read, operations = experts * n * k * 17 / 32, 2.0 * rows * c.top_k * n * k
        memory, arithmetic = timing.read_ceiling(), timing.flop_ceiling(self.fp8)
        if read / memory.value > operations / arithmetic.value:
            return [figure(f"{part} read", "TB/s", [read / us / 1e6 for us in samples], memory)]
        return [figure(f"{part} rate", "TFLOP/s", [operations / us / 1e6 for us in samples], arithmetic)]

    def measure_dense(self, cell: Cell, role: str, rows: int, tile: str | None, repeats: int) -> Result:
        c = self.config
        n, k = (
            ((c.heads + 2 * c.kv_heads) * c.head_dim, c.hidden) if role == "qkv" else (c.hidden, c.heads * c.head_dim)
        )
        stack = [timing.random_mxfp4(n, k) for _ in range(STACK)]
        x = torch.randn(rows, k, device="cuda").bfloat16()
        matrices = [
            Fp8Dense(self.workspace, w, None, role) if self.fp8 else Dense(self.workspace, w, None, role, tile)
            for w in stack
        ]
        verdict = Verdict(f"{role} of {rows} rows")
        expected = round_activation(x, "fp8" if self.fp8 else "bf16") @ dequantized(stack[0]).T
        verdict.compare("product", matrices[0].run(x).float(), expected, FP8_BOUND if self.fp8 else DENSE_BOUND)
        check = verdict.as_check()
        if not check.ok:
            return Result(cell, checks=(check,))
        samples = sustained_us(lambda i: matrices[i % STACK].run(x), repeats, 0.0)
        rates = [2.0 * rows * n * k / us / 1e6 for us in samples]
        figures = (figure("time", "us", samples), figure("rate", "TFLOP/s", rates, timing.flop_ceiling(self.fp8)))
        return Result(cell, figures, (check,))


def measure_model(
    run: Run, bench: Bench, model: str, options: Options, compared: list[Compared], gpu: OtherOptions
) -> None:
    activation = "fp8" if options.fp8 else "bf16"

    def cell(kernel: str, rows: int, **more: str) -> Cell:
        return Cell("kernel", model, path=f"grouped {kernel}", shape={"rows": rows, "activation": activation} | more)

    def experts(rows: int, tile: str | None, even: bool = False, **more: str) -> None:
        where = cell(
            "experts", rows, **({"tile": tile} if tile else {}), **({"routing": "even"} if even else {}), **more
        )
        run.measure(where, partial(bench.measure, where, rows, even, tile, options.repeats, options.ablation))

    for rows in () if options.brief else ODD_SIZES:
        run.add(Result(cell("experts", rows), checks=(bench.check(rows, None),)))
    for rows in options.tokens:
        experts(rows, None)
    for other in compared:
        with built(gpu, other):
            for rows in options.tokens:
                experts(rows, other.tile, build=other.name)
    if options.tiles and not options.fp8:
        for rows, tile in (
            (128, "m256n64"),
            (256, "m256n64"),
            *itertools.product(options.tokens, ("m256n128", "m384n88")),
        ):
            experts(rows, tile)
        for tile in ("m256n128", "m384n88"):
            experts(2048, tile, even=True)
    others = ("m256n128", "m384n88") if (options.tiles or compared) and not options.fp8 else ()
    for role, rows, tile in (
        () if options.brief else itertools.product(("qkv", "o"), (128, 512, 2048, 8192), (None, *others))
    ):
        where = cell(role, rows, **({"tile": tile} if tile else {}))
        run.measure(where, partial(bench.measure_dense, where, role, rows, tile, options.repeats))


@dataclass(frozen=True)
class Options:
    models: tuple[str, ...] = ("120b",)
    tokens: tuple[int, ...] = (512, 2048, 8192)
    layers: int = option(3, "with weights of their own, in turn")
    options: str = option("", "for the compiler, separated by blanks")
    fp8: bool = option(False, "fp8 activations")
    compare: tuple[str, ...] = option((), "to time at every size: tile[+alone|+pair][:options]")
    tiles: bool = option(False, "time the tiles that a size does not take by itself, too")
    ablation: bool = option(False, "builds that leave work out: timed though wrong")
    brief: bool = option(False, "experts of `tokens` only, without qkv, o and odd sizes")
    repeats: int = 12


@measurement("prefill-kernels-fp8", needs=("gpu",), seconds=60, fp8=True, tokens=(2048, 4096, 8192))
@measurement("prefill-kernels", needs=("gpu",), seconds=60)
def prefill_kernels(run: Run, options: Options) -> None:
    timing.begin()
    gpu = OtherOptions(tuple(options.options.split()))
    compared = [Compared.parse(name) for name in options.compare]
    load_kernels(gpu, options.fp8, compared)
    run.sources |= receipts.measured([Fp8Moe()] if options.fp8 else [GroupedMoe()])
    for model in options.models:
        measure_model(run, Bench(model, options.layers, options.fp8, gpu), model, options, compared, gpu)
        torch.cuda.empty_cache()
