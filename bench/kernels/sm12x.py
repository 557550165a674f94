"""What SM12x would run, on a GPU that is here: compared at the true shapes of gpt-oss, timed for information only.

    python -m bench run sm12x

The grouped products with mma.sync (grouped_sync.cu; experts, and qkv and o in three formats), and the batch layer, its
lm_head and the decode step with the rings that fit in 101,376 bytes of shared memory: each against float32 torch. On an
H200 their times say nothing about SM12x, whose tensor cores and memory are others; that results are right does. On an
SM12x machine the block-scaled products are compared as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.checks import decode_case
from bench.checks.decode_check import DEPTH, at_depth, check_decode
from bench.kernels import batch, prefill_products, timing
from bench.measurement import Run, measurement, option
from halfbyte import formats
from halfbyte.formats import layouts, tile16
from halfbyte.kernels.cuda.batch.builds import ROW_THREADS, ProductShape, RowShape
from halfbyte.kernels.cuda.batch.layer import BatchBuffers, Head
from halfbyte.kernels.cuda.batch.products import BatchMatrix
from halfbyte.kernels.cuda.decode.shape import StepShape
from halfbyte.kernels.cuda.device.host import Workspace, gpu
from halfbyte.kernels.cuda.prefill.builds import rows_build
from halfbyte.kernels.cuda.prefill.mx import Mxfp4Dense, Mxfp8Dense
from halfbyte.kernels.cuda.prefill.sync import COLUMNS, SyncDense, SyncExperts, SyncProductShape
from halfbyte.kernels.launch import Program
from halfbyte.lab import receipts
from halfbyte.lab.levels.verdict import Verdict
from halfbyte.lab.result import Cell, Result, figure
from halfbyte.model.config import NAMED
from halfbyte.ops.linear import round_activation
from halfbyte.plan.phase import ARCHES

SMALL = ARCHES["sm121"].shared_memory
CONFIG = NAMED["120b"]
PHASES = ("cuda.grouped_sync_moe", "cuda.batch_sync_norm_lm_head", "cuda.decode_step")
ROW_KERNELS = ("pack_rows", "group_rows", "sum_rows")
DENSE = {"bf16": SyncDense, "mxfp8": Mxfp8Dense, "mxfp4": Mxfp4Dense}  # the last two on SM12x only
DENSE_BOUNDS, HEAD_BOUND = {"mxfp4": 1e-5, "q8": 3e-4, "bf16": 1e-5}, 3e-4  # docs/numerics.md
NATIVE_BOUND = 1e-3  # how many bits block-scaled products keep while they add is to be measured
STEPS = (("mxfp4", 1), ("mxfp4", 4), ("checkpoint", 1))  # formats and rows of the decode step

Case = tuple[str, Callable[[], tuple[Verdict, Callable[[], object] | None]]]  # name; the verdict and what to time


def steps() -> list[StepShape]:
    return [decode_case.shape_of("120b", label, rows, layers=DEPTH, shared=SMALL) for label, rows in STEPS]


def programs() -> Iterator[Program]:
    c = CONFIG
    yield from (SyncProductShape("mxfp4", tile, swiglu).program() for tile in COLUMNS for swiglu in (False, True))
    yield from (SyncProductShape(form, tile, False).program() for form in ("q8", "bf16") for tile in COLUMNS)
    yield from (rows_build(entry).program for entry in ROW_KERNELS)
    yield from (RowShape(c.hidden, c.experts, c.top_k).program(entry) for entry in ROW_THREADS)
    shapes = (
        ProductShape("mxfp4", c.hidden), ProductShape("mxfp4", c.heads * c.head_dim, router=c.experts),
        ProductShape("mxfp4", c.hidden, True, ids=True, both=True), ProductShape("q8", c.hidden),
    )  # fmt: skip
    yield from (shape.within(SMALL).program() for shape in shapes)
    yield from (at_depth(shape, depth).program() for shape in steps() for depth in range(1, DEPTH + 1))


def twice(verdict: Verdict, run: Callable[[], Tensor]) -> Tensor:
    first, second = run().clone(), run().clone()
    verdict.require("repeats to the last bit", torch.equal(first, second))
    return first


def experts_cases(sizes: list[int]) -> Iterator[Case]:
    buffers: dict[str, Tensor] = {}
    workspace = Workspace(gpu(), buffers, torch.device("cuda"))
    layer = prefill_products.Layer(workspace, "120b", False)
    dense = (prefill_products.dequantized(layer.gate_up), prefill_products.dequantized(layer.down))
    c = CONFIG

    def compare(rows: int, tile: str | None) -> tuple[Verdict, Callable[[], object]]:
        ids, weights = prefill_products.routing(rows, c.experts, c.top_k)
        h, x = torch.randn(rows, c.hidden, device="cuda").bfloat16(), torch.randn(rows, c.hidden, device="cuda")
        experts = SyncExperts(
            workspace, layer.gate_up, layer.gate_up_bias, layer.down, layer.down_bias, limit=c.swiglu_limit,
            alpha=c.swiglu_alpha, tile=tile,
        )  # fmt: skip
        timing.poison(buffers.values())
        run = partial(experts.run, h, ids, weights, x)
        verdict = Verdict("against float32")
        expected = layer.reference(dense, h, ids, weights, x) - x
        verdict.compare("what experts add", twice(verdict, run) - x, expected, prefill_products.BOUND)
        return verdict, run

    for rows, tile in itertools.product(sizes, (None, *COLUMNS)):
        yield f"experts, {rows} rows, {tile or 'the tile of its size'}", partial(compare, rows, tile)


def dense_cases() -> Iterator[Case]:
    workspace = Workspace(gpu(), {}, torch.device("cuda"))

    def compare(
        role: str, n: int, k: int, form: str, rows: int, activation: str
    ) -> tuple[Verdict, Callable[[], object]]:
        w = torch.randn((n, k), device="cuda") / k**0.5
        if form == "bf16":
            weights: Any = tile16.pack_dense(w.bfloat16())
            plain = w.bfloat16().float()
        else:
            quantized = formats.quantize(w, "mxfp4" if form == "mxfp4" else "q8")
            weights, plain = layouts.convert(quantized, "tile16"), formats.dequantize(quantized, torch.float32)
        x, residual = torch.randn((rows, k), device="cuda").bfloat16(), torch.randn((rows, n), device="cuda")
        bias = torch.randn(n, device="cuda")
        matrix = DENSE[activation](workspace, weights, bias, role)
        verdict = Verdict("against float32")
        out = twice(verdict, lambda: matrix.run(x, residual=residual))
        bound = DENSE_BOUNDS[form] if activation == "bf16" else NATIVE_BOUND
        verdict.compare("product", out - residual, round_activation(x, activation) @ plain.T + bias, bound)
        return verdict, lambda: matrix.run(x)

    c, native = CONFIG, torch.cuda.get_device_capability()[0] == 12
    sizes = {"qkv": ((c.heads + 2 * c.kv_heads) * c.head_dim, c.hidden), "o": (c.hidden, c.heads * c.head_dim)}
    for (role, (n, k)), form in itertools.product(sizes.items(), DENSE_BOUNDS):
        activations = DENSE if form == "mxfp4" and native else ("bf16",)
        for rows, activation in itertools.product((7, 150, 2048), activations):
            yield f"{role}, {form}, {activation}, {rows} rows", partial(compare, role, n, k, form, rows, activation)


def batch_cases() -> Iterator[Case]:
    case = batch.RandomLayer("120b", {})
    layer = case.layer
    for matrix in (layer.qkv, layer.o):
        matrix.shape = matrix.shape.within(SMALL)
    assert layer.experts.both is not None
    layer.experts.both = layer.experts.both.within(SMALL)
    for rows in (2, 8, 33):
        yield f"batch layer, {rows} rows", lambda rows=rows: (case.check(rows), None)


def head_cases() -> Iterator[Case]:
    """lm_head of few rows, as a stream."""
    c = CONFIG
    buffers = BatchBuffers(
        Workspace(gpu(), {}, torch.device("cuda")), RowShape(c.hidden, c.experts, c.top_k), c.intermediate
    )
    w = torch.randn((c.vocab, c.hidden), device="cuda") / c.hidden**0.5
    norm = torch.randn(c.hidden, device="cuda").bfloat16()

    def compare(form: str, rows: int) -> tuple[Verdict, Callable[[], object]]:
        quantized = formats.quantize(w, "mxfp4" if form == "mxfp4" else "q8")
        head = Head(
            buffers, BatchMatrix(layouts.convert(quantized, "tile16"), None, "lm_head", shared=SMALL), norm, 1e-5
        )
        x, select = torch.randn((11, c.hidden), device="cuda"), torch.randperm(11, device="cuda")[:rows].int()
        verdict = Verdict("against float32")
        h = x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-5) * norm.float()
        expected = h[select.long()].bfloat16().float() @ formats.dequantize(quantized, torch.float32).T
        verdict.compare("logits", twice(verdict, lambda: head.run(x, select)), expected, HEAD_BOUND)
        return verdict, lambda: head.run(x, select)

    for form, rows in itertools.product(("mxfp4", "q8"), (1, 4, 8)):
        yield f"batch lm_head, {form}, {rows} rows", partial(compare, form, rows)


def decode_cases() -> Iterator[Case]:
    def compare(shape: StepShape) -> tuple[Verdict, None]:
        case = decode_case.DecodeCase.make(shape, decode_case.random_weights(shape), 2048, shape.rows)
        return check_decode(shape, case, 2000), None

    for shape in steps():
        yield f"decode step, {shape.qkv}, {shape.rows} rows, {shape.slots} slots", partial(compare, shape)


def measure(cell: Cell, case: Case, repeats: int) -> Result:
    verdict, work = case[1]()
    check = verdict.as_check()
    if not check.ok or work is None:
        return Result(cell, checks=(check,))
    return Result(cell, (figure("time", "us", timing.event_us(work, repeats)),), (check,))


CASES: dict[str, Callable[[Sequence[int]], Iterator[Case]]] = {
    "decode": lambda _: decode_cases(), "head": lambda _: head_cases(), "batch": lambda _: batch_cases(),
    "dense": lambda _: dense_cases(), "experts": lambda tokens: experts_cases(list(tokens)),
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    tokens: tuple[int, ...] = option((9, 65, 512, 2048), "rows of the experts")
    parts: tuple[str, ...] = option(tuple(CASES), "some of them, in this order")
    repeats: int = timing.REPEATS


@measurement("sm12x", needs=("gpu",), seconds=60)
def sm12x(run: Run, options: Options) -> None:
    timing.begin()
    timing.compile_all(programs())
    run.sources |= receipts.measured(PHASES)
    for part in options.parts:
        for case in CASES[part](options.tokens):
            cell = Cell("kernel", "120b", path="what SM12x runs", shape={"case": case[0]})
            run.measure(cell, partial(measure, cell, case, options.repeats))
        torch.cuda.empty_cache()
