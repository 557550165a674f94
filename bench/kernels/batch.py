"""The batch products on a real GPU (SM90): checked against torch float32, then timed at true shapes.

    python -m bench.kernels.batch --rows 2,8,16,32,64 --save bench/results/batch-gpu-DATE.json

Layers with distinct random weights in turn, so nothing sits in the L2 cache; routing is what the router chooses, the
distinct experts are printed. A size whose output is wrong is not timed. Figures stand beside what the memory (4.5 TB/s)
could do; times are of graphs that run every layer's product once. `experts` is gate_up and down. `--seconds`: the
experts for so long, at first and at last, with what the card draws: at its power limit it lowers its clocks, which
milliseconds do not show. The last line is JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfbyte import formats
from halfbyte.formats import MXTensor, tile16
from halfbyte.kernels.cuda.batch import layer as batch_layer
from halfbyte.kernels.cuda.batch.builds import RowShape
from halfbyte.kernels.cuda.batch.layer import BatchBuffers, Layer
from halfbyte.kernels.cuda.batch.products import Matrix
from halfbyte.kernels.cuda.device.host import Workspace, gpu
from halfbyte.lab import environment, receipts
from halfbyte.lab.measure.device_timing import device_us
from halfbyte.lab.measure.power import PowerMeter
from halfbyte.model.config import NAMED
from halfbyte.ops.moe import swiglu
from halfbyte.ops.norm import rms_norm
from halfbyte.ops.router import route

BANDWIDTH = 4.5e12
BOUNDS = {"qkv": 2e-3, "mid": 1e-4, "experts": 3e-3}


def random_mxfp4(*size: int) -> MXTensor:
    """About normal with variance 1/K, straight in tile16."""
    *lead, n, k = size
    data = torch.empty((*lead, *tile16.tile_shape(n, k, "mxfp4")), dtype=torch.uint8, device="cuda")
    data.view(-1).view(torch.int64).random_(-(2**63), None)
    data[..., 512:] = torch.randint(119, 121, data[..., 512:].shape, dtype=torch.uint8, device="cuda")
    return MXTensor(data, torch.empty(0, dtype=torch.uint8, device="cuda"), size, "mxfp4", "tile16")


def dense(w: MXTensor) -> Tensor:
    return formats.dequantize(tile16.unpack(w), torch.float32)


class Case:
    """One layer of a model with random weights."""

    def __init__(self, model: str, held: dict[str, Tensor]) -> None:
        c = self.config = NAMED[model]
        width = (c.heads + 2 * c.kv_heads) * c.head_dim
        self.w = {
            "qkv": random_mxfp4(width, c.hidden), "o": random_mxfp4(c.hidden, c.heads * c.head_dim),
            "gate_up": random_mxfp4(c.experts, 2 * c.intermediate, c.hidden),
            "down": random_mxfp4(c.experts, c.hidden, c.intermediate),
        }  # fmt: skip
        self.v = {f"{n}_bias": self.vector(*w.shape[:-1]) for n, w in self.w.items()}
        self.v |= {"attn_norm": self.vector(c.hidden), "mlp_norm": self.vector(c.hidden)}
        self.v |= {
            "router": self.vector(c.experts, c.hidden) / c.hidden**0.5,
            "router_bias": self.vector(c.experts) / 8,
        }
        more = {"gate_up": {"swiglu": True}, "o": {"router": c.experts}}
        matrices = {n: Matrix(w, self.v[f"{n}_bias"], n, **more.get(n, {})) for n, w in self.w.items()}
        workspace = Workspace(gpu(), held, torch.device("cuda"))
        buffers = BatchBuffers(workspace, RowShape(c.hidden, c.experts, c.top_k), c.intermediate)
        vectors = {n: self.v[n] for n in ("attn_norm", "mlp_norm", "router", "router_bias")}
        self.layer = Layer(buffers, **matrices, **vectors, eps=c.norm_eps, limit=c.swiglu_limit, alpha=c.swiglu_alpha)

    @staticmethod
    def vector(*size: int) -> Tensor:
        return torch.randn(size, device="cuda").bfloat16()

    def check(self, rows: int) -> dict[str, Any]:
        """Errors of a layer's steps against float32, and whether a second run gives the same bits."""
        c, v, layer = self.config, self.v, self.layer
        x, attn = torch.randn((rows, c.hidden), device="cuda"), self.vector(rows, c.heads * c.head_dim)
        found = []
        for _ in range(2):
            y, qkv = x.clone(), torch.full((rows, self.w["qkv"].shape[0]), float("nan"), device="cuda")
            layer.enter(y, qkv, pending=False)
            layer.leave(y, attn)
            mid = y.clone()
            layer.finish(y)
            found.append((qkv, mid, y, layer.buffers.ids[:rows].clone()))
        same = all(torch.equal(a, b) for a, b in zip(*found))
        qkv, mid, y, ids = found[0]
        h = rms_norm(x, v["attn_norm"], c.norm_eps).bfloat16().float()
        errors = {"qkv": error(qkv, h @ dense(self.w["qkv"]).T + v["qkv_bias"].float())}
        want = x + attn.float() @ dense(self.w["o"]).T + v["o_bias"].float()
        errors["mid"] = error(mid, want)
        h = rms_norm(mid, v["mlp_norm"], c.norm_eps)
        theirs, shares = route(h, v["router"].float(), v["router_bias"], c.top_k)
        agree = float((theirs == ids).float().mean())
        parts = torch.zeros((rows, c.top_k, c.hidden), device="cuda")
        shares = layer.buffers.weights[:rows]
        for e in ids.unique().tolist():
            row, slot = (ids == e).nonzero(as_tuple=True)
            z = h[row].bfloat16().float() @ dense(self.w["gate_up"].select(e)).T + v["gate_up_bias"][e].float()
            z = swiglu(z, c.swiglu_limit, c.swiglu_alpha).bfloat16().float()
            z = z @ dense(self.w["down"].select(e)).T + v["down_bias"][e].float()
            parts[row, slot] = z * shares[row, slot, None]
        errors["experts"] = error(y - mid, parts.sum(1))
        right = same and agree > 0.99 and all(e < BOUNDS[n] for n, e in errors.items())
        return {"errors": errors, "routing": agree, "repeats": same, "right": right, "experts": ids.unique().numel()}


def error(got: Tensor, want: Tensor) -> float:
    if not torch.isfinite(got).all():
        return float("inf")
    return float((got.double() - want.double()).norm() / want.double().norm())


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    return graph


def sustained(work: Callable[[], object], seconds: float, layers: int) -> dict[str, Any]:
    """µs of a layer in graphs of `work`: the first twenty, and those of the second half of so many seconds."""
    graph, found = captured(work), []
    with PowerMeter() as meter:
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            found.append(device_us(graph.replay, 20) / layers)
    return {"first_us": found[0], "late_us": statistics.fmean(found[len(found) // 2 :])} | meter.summary()


def graph_us(work: Callable[[], object], times: int = 7) -> float:
    """Median µs of a graph of `work`."""
    graph, found = captured(work), []
    for _ in range(times):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) * 1e3)
    return statistics.median(found)


def time_rows(cases: list[Case], rows: int, seconds: float) -> dict[str, Any]:
    c = cases[0].config
    xs = [torch.randn((rows, c.hidden), device="cuda") for _ in cases]
    attn = Case.vector(rows, c.heads * c.head_dim)
    qkv = torch.empty((rows, cases[0].w["qkv"].shape[0]), device="cuda")
    choices: list[Tensor] = []
    for case, x in zip(cases, xs):
        case.layer.leave(x, attn)
        choices.append(case.layer.buffers.ids[:rows].clone())
    experts = statistics.fmean(ids.unique().numel() for ids in choices)
    each = {n: w.data[0].nbytes if w.data.ndim == 4 else w.data.nbytes for n, w in cases[0].w.items()}
    buffers, machine = cases[0].layer.buffers, cases[0].layer.machine
    used = torch.zeros((len(cases), 2 + buffers.done.numel()), dtype=torch.int32, device="cuda")
    copies = []  # one for each layer, so that nothing is cleared between them
    for mine, ids in zip(used, choices):
        copies.append(copy.copy(buffers))
        copies[-1].tickets, copies[-1].done, copies[-1].ids = mine[:2], mine[2:], ids
    trace = torch.zeros((132, 4), dtype=torch.int64, device="cuda")

    def work(name: str, traced: Tensor | None = None) -> Callable[[], None]:
        def run() -> None:
            used.zero_()
            for i, (case, x) in enumerate(zip(cases, xs)):
                layer = case.layer
                if name == "experts":
                    layer.experts.run(machine, copies[i], rows, trace=traced)
                elif name == "qkv":
                    layer.qkv.run(machine, buffers.h, qkv, rows, trace=traced)
                elif name == "o, router":
                    layer.o.run(machine, attn, x, rows, router=layer.router, trace=traced)
                elif name == "choose":
                    layer.choose(x)
                else:
                    layer.sum_up(x, layer.attn_norm, pending=True)

        return run

    found: dict[str, Any] = {"rows": rows, "experts": experts, "us": {}, "tb_per_s": {}, "trace": {}}
    sizes = {"qkv": each["qkv"], "o, router": each["o"], "experts": experts * (each["gate_up"] + each["down"])}
    for name in (*sizes, "choose", "sums"):
        us = found["us"][name] = graph_us(work(name)) / len(cases)
        if name not in sizes:
            continue
        found["tb_per_s"][name] = sizes[name] / us / 1e6
        work(name, trace)()
        torch.cuda.synchronize()
        t = (trace - trace[:, 0].min()).double() / 1e3
        found["trace"][name] = {
            what: [round(float(f(t[:, i])), 2) for f in (torch.min, torch.mean, torch.max)]
            for i, what in enumerate(("start", "x wanted", "all asked for", "end"))
        }

    def layers() -> None:
        for i, (case, x) in enumerate(zip(cases, xs)):
            case.layer.enter(x, qkv, pending=i > 0)
            case.layer.leave(x, attn)
        cases[-1].layer.finish(xs[-1])

    if seconds:
        found["sustained"] = sustained(work("experts"), seconds, len(cases))
    found["us"]["layer without attention"] = graph_us(layers) / len(cases)
    found["floor_us"] = sum(sizes.values()) / BANDWIDTH * 1e6
    return found


def main() -> None:
    def numbers(text: str) -> list[int]:
        return [int(n) for n in text.split(",") if n]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="120b")
    parser.add_argument("--rows", type=numbers, default=[2, 8, 16, 32, 64])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--seconds", type=float, default=0.0, help="the experts' product for so long, with watts and MHz"
    )
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    environment.need_gpu()
    torch.set_grad_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    result: dict[str, Any] = {
        "bench": "batch_gpu", "model": args.model, "device": torch.cuda.get_device_name(), "checks": [], "rows": [],
        "argv": sys.argv[1:], "measured": receipts.hashes(receipts.sources_of([Path(batch_layer.__file__)])),
    }  # fmt: skip
    if args.rows:
        held: dict[str, Tensor] = {}
        cases = [Case(args.model, held) for _ in range(args.layers)]
        for rows in args.rows:
            check = cases[0].check(rows)
            print(f"{rows} rows: {check}", flush=True)
            result["checks"].append({"rows": rows} | check)
            if not check["right"]:
                continue
            timed = time_rows(cases, rows, args.seconds)
            result["rows"].append(timed)
            for name, us in timed["us"].items():
                rate = timed["tb_per_s"].get(name)
                print(f"  {name:26s} {us:8.1f} us" + (f"  {rate:.2f} TB/s" if rate else ""), flush=True)
            print(f"  {timed['experts']:.1f} experts, floor of a layer {timed['floor_us']:.1f} us", flush=True)
            if "sustained" in timed:
                print(f"  experts for {args.seconds} s: {timed['sustained']}", flush=True)
            for name, t in timed["trace"].items():
                print(f"  {name:26s} {t}", flush=True)
        del cases, held
        torch.cuda.empty_cache()
    text = json.dumps(result)
    if args.save:
        args.save.write_text(text, encoding="utf-8")
    print(text)
    sys.exit(not all(c["right"] for c in result["checks"]))


if __name__ == "__main__":
    main()
