"""What SM12x would run, on a GPU that is here: checked at the true shapes of gpt-oss, timed for information only.

    python -m bench.kernels.sm12x --save bench/results/sync-gpu.json

The grouped products with mma.sync (grouped_sync.cu; experts, and qkv and o in three formats), and the batch layer, its
lm_head and the decode step with the rings that fit in 101,376 bytes of shared memory: each against float32 torch. On an
H200 their times say nothing about SM12x, whose tensor cores and memory are others; that results are right does. The
last line is JSON; a part that is wrong makes the exit status 1. On an SM12x machine the block-scaled products are
checked as well.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bench.kernels import batch, prefill_products
from halfbyte import formats
from halfbyte.formats import layouts, tile16
from halfbyte.kernels.cuda.batch import layer, products
from halfbyte.kernels.cuda.batch.builds import ROW_THREADS, ProductShape, RowShape
from halfbyte.kernels.cuda.device.host import Workspace, gpu
from halfbyte.kernels.cuda.prefill.builds import rows_build
from halfbyte.kernels.cuda.prefill.mx import Mxfp4Dense, Mxfp8Dense
from halfbyte.kernels.cuda.prefill.sync import COLUMNS, SyncDense, SyncExperts, SyncShape
from halfbyte.kernels.launch import compile_program
from halfbyte.lab import environment
from halfbyte.lab.levels import decode_case
from halfbyte.lab.levels.decode_check import check_decode
from halfbyte.lab.receipts import measured
from halfbyte.model.config import NAMED
from halfbyte.ops.linear import round_activation
from halfbyte.plan.phase import ARCHES

SMALL = ARCHES["sm121"].shared_memory
ROW_KERNELS = ("pack_rows", "group_rows", "sum_rows")
DENSE = {"bf16": SyncDense, "mxfp8": Mxfp8Dense, "mxfp4": Mxfp4Dense}  # the last two on SM12x only
NATIVE_BOUND = 1e-3  # how many bits block-scaled products keep while they add is to be measured


def say(text: str) -> None:
    print(text, flush=True)


def programs(arch: str, steps: list[Any]) -> None:
    """All of them at once, into the cache."""
    c = NAMED["120b"]
    found = [SyncShape("mxfp4", t, s).program() for t in COLUMNS for s in (False, True)]
    found += [SyncShape(f, t, False).program() for f in ("q8", "bf16") for t in COLUMNS]
    found += [rows_build(e).program for e in ROW_KERNELS]
    found += [RowShape(c.hidden, c.experts, c.top_k).program(e) for e in ROW_THREADS]
    found += [v.within(SMALL).program() for v in (
        ProductShape("mxfp4", c.hidden), ProductShape("mxfp4", c.heads * c.head_dim, router=c.experts),
        ProductShape("mxfp4", c.hidden, True, ids=True, both=True), ProductShape("q8", c.hidden),
    )]  # fmt: skip
    found += [s.program() for s in steps]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda p: compile_program(p, arch), found))


def experts(workspace: Workspace, buffers: dict[str, torch.Tensor], sizes: list[int]) -> list[dict[str, Any]]:
    layer = prefill_products.Layer(workspace, "120b", False)
    c = layer.config
    dense = (prefill_products.dequantized(layer.gate_up), prefill_products.dequantized(layer.down))
    found = []
    for rows in sizes:
        ids, weights = prefill_products.routing(rows, c.experts, c.top_k)
        h, x = torch.randn(rows, c.hidden, device="cuda").bfloat16(), torch.randn(rows, c.hidden, device="cuda")
        want = layer.reference(dense, h, ids, weights, x) - x
        for tile in (None, *COLUMNS):
            made = SyncExperts(
                workspace, layer.gate_up, layer.gate_up_bias, layer.down, layer.down_bias, limit=c.swiglu_limit,
                alpha=c.swiglu_alpha, tile=tile,
            )  # fmt: skip
            for buffer in buffers.values():  # nothing may survive from another run
                if buffer.dtype in (torch.float32, torch.bfloat16):
                    buffer.fill_(float("nan"))
            got = [made.run(h, ids, weights, x) for _ in range(2)]
            e = prefill_products.error(got[0] - x, want)
            us = prefill_products.timed(lambda i, m=made, a=(h, ids, weights, x): m.run(*a), 5)
            ok = e <= prefill_products.BOUND and torch.equal(*got)
            found.append({"case": f"experts {rows} tokens {tile or 'auto'}", "us": us, "error": e, "ok": ok})
            say(f"{found[-1]}")
    return found


def linear(workspace: Workspace) -> list[dict[str, Any]]:
    found = []
    for role, n, k in (("qkv", 5120, 2880), ("o", 2880, 4096)):
        w = torch.randn((n, k), device="cuda") / k**0.5
        for form in ("mxfp4", "q8", "bf16"):
            if form == "bf16":
                held, dense = tile16.pack_dense(w.bfloat16()), w.bfloat16().float()
            else:
                plain = formats.quantize(w, "mxfp4" if form == "mxfp4" else "q8")
                held, dense = layouts.convert(plain, "tile16"), formats.dequantize(plain, torch.float32)
            kinds = DENSE if form == "mxfp4" and torch.cuda.get_device_capability()[0] == 12 else {"bf16": SyncDense}
            for rows, (activation, kind) in itertools.product((7, 150, 2048), kinds.items()):
                x, residual = torch.randn((rows, k), device="cuda").bfloat16(), torch.randn((rows, n), device="cuda")
                bias = torch.randn(n, device="cuda")
                made = kind(workspace, held, bias, role)
                got = [made.run(x, residual=residual) for _ in range(2)]
                want = round_activation(x, activation) @ dense.T + bias
                e = prefill_products.error(got[0] - residual, want)
                us = prefill_products.timed(lambda i, m=made, x=x: m.run(x), 5)
                bound = 3e-4 if form == "q8" else 1e-5 if activation == "bf16" else NATIVE_BOUND
                ok = e <= bound and torch.equal(*got)
                found.append({"case": f"{role} {form} {activation} {rows} rows", "us": us, "error": e, "ok": ok})
                say(f"{found[-1]}")
    return found


def batches() -> list[dict[str, Any]]:
    case = batch.Case("120b", {})
    layer = case.layer
    for m in (layer.qkv, layer.o):
        m.shape = m.shape.within(SMALL)
    assert layer.experts.both is not None
    layer.experts.both = layer.experts.both.within(SMALL)
    return [
        {"case": f"batch layer {rows} rows", **(got := case.check(rows)), "ok": got["right"]} for rows in (2, 8, 33)
    ]


def head() -> list[dict[str, Any]]:
    """lm_head of few rows, as a stream."""
    c, found = NAMED["120b"], []
    workspace = Workspace(gpu(), {}, torch.device("cuda"))
    buffers = layer.BatchBuffers(workspace, RowShape(c.hidden, c.experts, c.top_k), c.intermediate)
    w = torch.randn((c.vocab, c.hidden), device="cuda") / c.hidden**0.5
    norm = torch.randn(c.hidden, device="cuda").bfloat16()
    for form in ("mxfp4", "q8"):
        plain = formats.quantize(w, "mxfp4" if form == "mxfp4" else "q8")
        matrix = products.Matrix(layouts.convert(plain, "tile16"), None, "lm_head", shared=SMALL)
        made = layer.Head(buffers, matrix, norm, 1e-5)
        dense = formats.dequantize(plain, torch.float32)
        for rows in (1, 4, 8):
            x = torch.randn((11, c.hidden), device="cuda")
            select = torch.randperm(11, device="cuda")[:rows].int()
            got = [made.run(x, select) for _ in range(2)]
            h = x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-5) * norm.float()
            e = prefill_products.error(got[0], h[select.long()].bfloat16().float() @ dense.T)
            us = prefill_products.timed(lambda i, m=made, a=(x, select): m.run(*a), 5)
            ok = e <= 3e-4 and torch.equal(*got)
            found.append({"case": f"batch lm_head {form} {rows} rows", "us": us, "error": e, "ok": ok})
    return found


def decode_steps(steps: list[Any]) -> list[dict[str, Any]]:
    found = []
    for s in steps:
        case = decode_case.DecodeCase.make(s, decode_case.random_weights(s), 2048, s.rows)
        verdict = check_decode(s, case, 2000)
        found.append(
            {"case": f"decode step {s.qkv} {s.rows} rows, {s.slots} slots", "ok": verdict.ok, "note": str(verdict)}
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="9,65,512,2048")
    parser.add_argument("--parts", default="decode,head,batch,linear,experts", help="some of them, in this order")
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    environment.need_gpu()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    began = time.time()
    steps = [
        decode_case.shape_of("120b", f, r, layers=4, shared=SMALL)
        for f, r in (("mxfp4", 1), ("mxfp4", 4), ("checkpoint", 1))
    ]
    programs(gpu().arch, steps)
    say(f"kernels ready after {time.time() - began:.1f} s")
    buffers: dict[str, torch.Tensor] = {}
    workspace = Workspace(gpu(), buffers, torch.device("cuda"))
    parts: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "linear": lambda: linear(workspace),
        "experts": lambda: experts(workspace, buffers, [int(t) for t in args.tokens.split(",")]),
        "batch": batches,
        "head": head,
        "decode": lambda: decode_steps(steps),
    }
    report: dict[str, Any] = {
        "bench": "sync_gpu", "device": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d"), "rows": [],
        "measured": measured(["cuda.grouped_sync_moe", "cuda.batch_sync_norm_lm_head", "cuda.decode_step"]),
        "note": "results of what SM12x runs; times are this GPU's, for information",
    }  # fmt: skip
    for name in args.parts.split(","):
        found = parts[name]()
        for row in found:
            say(f"{'ok ' if row['ok'] else 'WRONG'} {row}")
        report["rows"] += found
        say(f"{name} done after {time.time() - began:.1f} s")
        if args.save:
            args.save.write_text(json.dumps(report, indent=1) + "\n")
    bad = [row["case"] for row in report["rows"] if not row["ok"]]
    print(json.dumps({"cases": len(report["rows"]), "wrong": bad}))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
