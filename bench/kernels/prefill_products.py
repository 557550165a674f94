"""The grouped products on a real GPU (SM90): checked against torch float32, then timed at true shapes.

    python -m bench.kernels.prefill_products --tokens 16,32,64,512,2048,8192
    python -m bench.kernels.prefill_products --compare m256n128,m384n88,m256n128+pair --tokens 2048,8192
    python -m bench.kernels.prefill_products --options=-DHB_PIN=1                # another build (also HB_ALONE)
    python -m bench.kernels.prefill_products --fp8 --tokens 512,2048,8192        # fp8 activations

Experts of a few layers with distinct random weights in turn, so nothing sits in the L2 cache; routing is random, the
distinct experts are printed. A size whose output is wrong is not timed. Figures stand beside what the memory (4.5 TB/s)
and the tensor cores (790 TFLOP/s, bf16) could do. The last line is JSON; the same goes to bench/results/ with --save.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from halfbyte import formats
from halfbyte.formats import MXTensor, tile16
from halfbyte.kernels.cuda.device.host import Gpu, Workspace
from halfbyte.kernels.cuda.prefill.builds import FP8_TILE, TILES, GroupedShape, ProductArgs, build_of, rows_build
from halfbyte.kernels.cuda.prefill.experts import Experts
from halfbyte.kernels.cuda.prefill.fp8 import Fp8Dense, Fp8Experts
from halfbyte.kernels.cuda.prefill.products import Dense
from halfbyte.kernels.launch import Build, Kernel, Map, Program, compile_program
from halfbyte.lab import environment
from halfbyte.model.config import NAMED
from halfbyte.ops.linear import round_activation
from halfbyte.ops.moe import swiglu

BANDWIDTH, FLOPS, BOUND = 4.5e12, 790e12, 3e-3
FP8_BOUND = 2e-2  # what the fp8 tensor cores' sums lose is to be measured
ROW_KERNELS = ("pack_rows", "group_rows", "requantize", "sum_rows")
SHAPES = [GroupedShape("mxfp4", tile, swiglu) for tile in TILES if tile != FP8_TILE for swiglu in (False, True)]
SUSTAINED = 150_000  # µs that a kernel is timed for, so that the clock falls as it does in a long prompt


def random_mxfp4(*size: int) -> MXTensor:
    """About normal with variance 1/K, straight in tile16."""
    *lead, n, k = size
    data = torch.empty((*lead, *tile16.tile_shape(n, k, "mxfp4")), dtype=torch.uint8, device="cuda")
    data.view(-1).view(torch.int64).random_(-(2**63), None)
    data[..., 512:] = torch.randint(119, 121, data[..., 512:].shape, dtype=torch.uint8, device="cuda")
    none = torch.empty(0, dtype=torch.uint8, device="cuda")
    return MXTensor(data, none, size, "mxfp4", "tile16")


def dequantized(w: MXTensor) -> Tensor:
    if len(w.shape) == 2:
        return formats.dequantize(tile16.unpack(w), torch.float32)
    return torch.stack([formats.dequantize(tile16.unpack(w.select(e)), torch.float32) for e in range(w.shape[0])])


class OtherOptions(Gpu):
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
        self.gate_up = random_mxfp4(c.experts, 2 * c.intermediate, c.hidden)
        self.down = random_mxfp4(c.experts, c.hidden, c.intermediate)
        self.gate_up_bias = torch.randn(c.experts, 2 * c.intermediate, device="cuda").bfloat16()
        self.down_bias = torch.randn(c.experts, c.hidden, device="cuda").bfloat16()
        kind = Fp8Experts if fp8 else Experts
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


def error(got: Tensor, want: Tensor) -> float:
    if not torch.isfinite(got).all():
        return float("inf")
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def timed(run: Callable[[int], object], sustained: float = 0.0) -> float:
    """Median µs of run(i): of twelve, or of as many as fill `sustained` µs."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for i in range(3):
        run(i)
    end.record()
    torch.cuda.synchronize()
    times = max(12, int(sustained / (begin.elapsed_time(end) * 1000 / 3)))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    events[0].record()
    for i in range(times):
        run(i)
        events[i + 1].record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) * 1000 for a, b in itertools.pairwise(events))


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
    with ThreadPoolExecutor(len(programs)) as pool:
        list(pool.map(lambda p: compile_program(p, gpu.arch), programs))


class Spy:
    """A machine that runs everything and remembers the last arguments, so that one kernel can be timed alone."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.blocks, self.launches = gpu, gpu.blocks, {}

    def load(self, build: Build) -> Kernel:
        return self.gpu.load(build)

    def byte_map(self, data: Tensor, row_bytes: int, box: tuple[int, int]) -> Map:
        return self.gpu.byte_map(data, row_bytes, box)

    def row_map(self, rows: Tensor, box: tuple[int, int]) -> Map:
        return self.gpu.row_map(rows, box)

    def run(self, build: Build, grid: int, args: ctypes.Structure) -> None:
        name = build.program.entry
        if isinstance(args, ProductArgs):  # the first of both writes its results packed
            name = "gate_up" if args.packed else "down"
        self.launches[name] = (build, grid, args)
        self.gpu.run(build, grid, args)


def measure(
    layers: list[Layer], spy: Spy, rows: int, even: bool, tile: str | None, brief: bool = False
) -> dict[str, Any]:
    c = layers[0].config
    for layer in layers:
        layer.experts.tile = tile
    ids, weights = routing(rows, c.experts, c.top_k, even)
    h, x = torch.randn(rows, c.hidden, device="cuda").bfloat16(), torch.randn(rows, c.hidden, device="cuda")
    used = ids.unique().numel()
    kept = []
    for layer in layers:
        layer.experts.run(h, ids, weights, x)
        kept.append(dict(spy.launches))

    def one(name: str) -> Callable[[int], None]:
        def run(i: int) -> None:
            spy.gpu.run(*kept[i % len(kept)][name])

        return run

    names = [n for n in ("group_rows", "pack_rows", "gate_up", "requantize", "down", "sum_rows") if n in kept[0]]
    if brief:
        names = ["gate_up", "down"]
    us = {name: timed(one(name), SUSTAINED) for name in names}
    us["moe"] = timed(lambda i: layers[i % len(layers)].experts.run(h, ids, weights, x), SUSTAINED)
    slots = rows * c.top_k
    out: dict[str, Any] = {"tokens": rows, "even": even, "build": kept[0]["down"][0].name, "experts": used, "us": us}
    for name, n, k in (("gate_up", 2 * c.intermediate, c.hidden), ("down", c.hidden, c.intermediate)):
        size = used * n * k * 17 / 32
        flop = 2.0 * slots * n * k
        out[name] = {
            "tb_s": size / us[name] / 1e6, "tflop_s": flop / us[name] / 1e6,
            "of_ceiling": max(size / BANDWIDTH, flop / FLOPS) * 1e6 / us[name],
        }  # fmt: skip
    return out


def shares(r: dict[str, float]) -> str:
    return f"({r['tb_s']:.2f} TB/s, {r['tflop_s']:.0f} TFLOP/s, {100 * r['of_ceiling']:.0f} %)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="120b")
    parser.add_argument("--tokens", default="16,32,64,512,2048,8192")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--options", default="", help="for the compiler, separated by blanks")
    parser.add_argument("--fp8", action="store_true", help="fp8 activations")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--compare", default="", help="to time at every size: tile[+alone|+pair][:options]")
    parser.add_argument("--shapes", action="store_true", help="time the builds that auto does not choose, too")
    parser.add_argument(
        "--ablation", action="store_true", help="a build that leaves work out: timed though it is wrong"
    )
    parser.add_argument("--brief", action="store_true", help="check the sizes that are timed only, skip qkv and o")
    args = parser.parse_args()
    environment.need_gpu()
    torch.backends.cuda.matmul.allow_tf32 = False
    began = time.time()
    gpu = OtherOptions(tuple(args.options.split()))
    compared = [Compared.parse(name) for name in filter(None, args.compare.split(","))]
    load_kernels(gpu, args.fp8, compared)
    bound = FP8_BOUND if args.fp8 else BOUND
    print(f"kernels ready after {time.time() - began:.1f} s", flush=True)
    spy = Spy(gpu)
    buffers: dict[str, Tensor] = {}
    workspace = Workspace(spy, buffers, torch.device("cuda"))
    c = NAMED[args.model]
    layers = [Layer(workspace, args.model, args.fp8) for _ in range(args.layers)]
    dense = (dequantized(layers[0].gate_up), dequantized(layers[0].down))
    torch.cuda.synchronize()
    print(f"weights ready after {time.time() - began:.1f} s", flush=True)
    sizes = [int(t) for t in args.tokens.split(",")]
    bad = 0
    results: list[dict[str, Any]] = []
    for rows in sorted(sizes if args.brief else {*sizes, 9, 65, 200}):
        ids, weights = routing(rows, c.experts, c.top_k)
        h, x = torch.randn(rows, c.hidden, device="cuda").bfloat16(), torch.randn(rows, c.hidden, device="cuda")
        for buffer in buffers.values():  # nothing may survive from another run
            if buffer.dtype in (torch.float32, torch.bfloat16):
                buffer.fill_(float("nan"))
        got = layers[0].experts.run(h, ids, weights, x)
        again = layers[0].experts.run(h, ids, weights, x)
        torch.cuda.synchronize()
        e = error(got - x, layers[0].reference(dense, h, ids, weights, x) - x)
        fine = e <= bound and torch.equal(got, again)
        bad += not fine
        print(
            f"experts, {rows} tokens: error {e:.1e}, repeats {torch.equal(got, again)}{'' if fine else '  WRONG'}",
            flush=True,
        )
    linear = {}
    for role, n, k in (
        ("qkv", (c.heads + 2 * c.kv_heads) * c.head_dim, c.hidden),
        ("o", c.hidden, c.heads * c.head_dim),
    ):
        if args.brief:
            continue
        stack = [random_mxfp4(n, k) for _ in range(12)]
        plain = dequantized(stack[0])
        others = ("m256n128", "m384n88") if (args.shapes or args.compare) and not args.fp8 else ()
        asked = itertools.product((128, 512, 2048, 8192), (None, *others))
        for rows, tile in asked:
            x = torch.randn(rows, k, device="cuda").bfloat16()
            matrices = [
                Fp8Dense(workspace, w, None, role) if args.fp8 else Dense(workspace, w, None, role, tile) for w in stack
            ]
            e = error(matrices[0].run(x), round_activation(x, layers[0].activation) @ plain.T)
            bad += e > (bound if args.fp8 else 1e-4)
            us = timed(lambda i, m=matrices, x=x: m[i % 12].run(x))
            linear[f"{role} {rows}{f' {tile}' if tile else ''}"] = us
            print(
                f"{role}, {rows} rows, {tile}: error {e:.1e}, {us:.1f} µs, "
                f"{2.0 * rows * n * k / us / 1e6:.0f} TFLOP/s, "
                f"{n * k * 17 / 32 / us / 1e6:.2f} TB/s", flush=True,
            )  # fmt: skip
    if bad and not args.ablation:
        print(f"{bad} checks failed; nothing is timed")
        return 1
    cases: list[tuple[int, bool, str | None]] = [(r, False, None) for r in sizes]
    for c_ in compared:
        with built(gpu, c_):
            for rows in sizes:
                ids, weights = routing(rows, c.experts, c.top_k)
                h, x = torch.randn(rows, c.hidden, device="cuda").bfloat16(), torch.randn(rows, c.hidden, device="cuda")
                layers[0].experts.tile = c_.tile
                got = layers[0].experts.run(h, ids, weights, x)
                e = error(got - x, layers[0].reference(dense, h, ids, weights, x) - x)
                r = measure(layers, spy, rows, False, c_.tile, True) if e <= bound else {}
                shown = {k: round(v) for k, v in r.get("us", {}).items()}
                print(c_.name, rows, f"error {e:.1e}", shown, flush=True)
                if r:
                    results.append(r | {"build": c_.name})
    for layer in layers:
        layer.experts.tile = None
    if args.shapes and not args.fp8:
        cases += [(rows, False, "m256n64") for rows in (128, 256)]
        cases += [(r, False, tile) for r in (128, 256, 512, 1024, 2048, 4096, 8192) for tile in ("m256n128", "m384n88")]
        cases += [(2048, True, tile) for tile in ("m256n128", "m384n88")]
    for rows, even, tile in cases:
        r = measure(layers, spy, rows, even, tile)
        results.append(r)
        us = r["us"]
        print(
            f"{rows:5d}{' even' if even else ''} tokens, {r['build']}, {r['experts']:3d} experts: "
            f"group {us['group_rows']:.1f} "
            f"pack {us['pack_rows']:.1f} requantize {us.get('requantize', 0.0):.1f} "
            + " ".join(f"{n} {us[n]:.1f} µs {shares(r[n])}" for n in ("gate_up", "down"))
            + f" sum {us['sum_rows']:.1f}, layer {us['moe']:.1f} µs",
            flush=True,
        )
    report = {
        "bench": "prefill_gpu", "model": args.model, "device": torch.cuda.get_device_name(), "results": results,
        "linear_us": linear, "options": args.options, "fp8": args.fp8,
        "sources": SHAPES[0].program().hash(), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    for rows in (2048, 8192):
        moe = [r["us"]["moe"] for r in results if r["tokens"] == rows and not r["even"]]
        if moe and linear:
            us = c.layers * (moe[0] + linear[f"qkv {rows}"] + linear[f"o {rows}"])
            report[f"pp{rows}_products_only"] = rows / us * 1e6
            print(f"pp{rows}: experts, qkv and o alone take {us / 1000:.1f} ms, {rows / us * 1e6:.0f} tokens/s")
    if args.save:
        args.save.write_text(json.dumps(report, indent=1) + "\n")
    if not args.brief:
        print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
