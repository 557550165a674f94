"""What SM12x would run, on a GPU that is here: compared at the true shapes of gpt-oss, timed for information only.

    python -m bench.kernels.sm12x

The grouped products with mma.sync (grouped_sync.cu; experts, and qkv and o in three formats), and the batch layer, its
lm_head and the decode step with the rings that fit in 101,376 bytes of shared memory: each against float32 torch. On an
H200 their times say nothing about SM12x, whose tensor cores and memory are others; that results are right does. On an
SM12x machine the block-scaled products are compared as well.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.kernels import batch, prefill_products, runner
from halfbyte import formats
from halfbyte.formats import layouts, tile16
from halfbyte.kernels.cuda.batch.builds import ROW_THREADS, ProductShape, RowShape
from halfbyte.kernels.cuda.batch.layer import BatchBuffers, Head
from halfbyte.kernels.cuda.batch.products import Matrix
from halfbyte.kernels.cuda.decode.shape import StepShape
from halfbyte.kernels.cuda.device.host import Workspace, gpu
from halfbyte.kernels.cuda.prefill.builds import rows_build
from halfbyte.kernels.cuda.prefill.mx import Mxfp4Dense, Mxfp8Dense
from halfbyte.kernels.cuda.prefill.sync import COLUMNS, SyncDense, SyncExperts, SyncShape
from halfbyte.kernels.launch import Program
from halfbyte.lab import receipts
from halfbyte.lab.levels import decode_case
from halfbyte.lab.levels.decode_check import DEPTH, at_depth, check_decode
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
    yield from (SyncShape("mxfp4", tile, swiglu).program() for tile in COLUMNS for swiglu in (False, True))
    yield from (SyncShape(form, tile, False).program() for form in ("q8", "bf16") for tile in COLUMNS)
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
        runner.poison(buffers.values())
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
    case = batch.Case("120b", {})
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
        head = Head(buffers, Matrix(layouts.convert(quantized, "tile16"), None, "lm_head", shared=SMALL), norm, 1e-5)
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
    return Result(cell, (figure("time", "us", runner.event_us(work, repeats)),), (check,))


def main() -> int:
    parser = runner.arguments(__doc__)
    parser.add_argument("--tokens", type=runner.numbers, default=[9, 65, 512, 2048], help="rows of the experts")
    parts: dict[str, Callable[[], Iterator[Case]]] = {
        "decode": decode_cases, "head": head_cases, "batch": batch_cases, "dense": dense_cases,
        "experts": lambda: experts_cases(args.tokens),
    }  # fmt: skip
    parser.add_argument("--parts", type=runner.words, default=list(parts), help="some of them, in this order")
    args = runner.begin(parser)
    runner.compile_all(programs())
    receipt = runner.Receipt("bench/kernels/sm12x.py", args.out, receipts.measured(PHASES))
    for part in args.parts:
        for case in parts[part]():
            cell = Cell("kernel", "120b", path="what SM12x runs", shape={"case": case[0]})
            receipt.measure(cell, partial(measure, cell, case, args.repeats))
        torch.cuda.empty_cache()
    return receipt.end()


if __name__ == "__main__":
    sys.exit(main())
