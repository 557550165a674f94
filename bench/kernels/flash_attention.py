"""Attention of whole prompts on an SM90 GPU: flash.cu checked against float32, then timed beside the Triton phase.

    python -m bench.kernels.flash_attention [--json FILE] [--variants]

gpt-oss-120b's heads (64 queries, 8 keys, 64 dims), sinks, pages in random order, random keys and values; full and
sliding layers. A case that is out of its bound has no time. Rates count the products of visible pairs only and stand
beside the chip's measured bf16 rate. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from halfbyte.kernels.cuda.attention.flash import FULL, SLIDING, FlashShape, attend, map_pages
from halfbyte.kernels.cuda.device.host import gpu
from halfbyte.kernels.prove import default_spec
from halfbyte.kernels.triton.attention import PrefillAttention
from halfbyte.lab import environment
from halfbyte.ops.attention import attend as attend_reference
from halfbyte.ops.attention import gather_kv
from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import Binding
from halfbyte.plan.step import Step

BF16 = 790e12  # operations a second that this kind of GPU reaches on large products
BOUND = 6e-3
FEATURES = {"attention": frozenset({"sinks", "window", "gqa"})}
HEADS, KV_HEADS, DIM, PAGE, WINDOW = 64, 8, 64, 64, 128
CASES = [(512, 0), (2048, 0), (8192, 0), (2048, 8192), (2048, 30720)]  # new tokens, tokens in the cache


def make(rows: int, past: int) -> tuple[Step, Tensor, Tensor, Tensor]:
    g = torch.Generator(device="cuda").manual_seed(rows + past)
    blocks = -(-(rows + past) // PAGE)
    pool = torch.randn((blocks + 1, 2, 2, KV_HEADS, PAGE, DIM), generator=g, device="cuda").bfloat16()
    table = (torch.randperm(blocks, generator=g, device="cuda") + 1).to(torch.int32)[None]

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    step = Step(
        tokens=torch.zeros(rows, dtype=torch.int32, device="cuda"),
        positions=torch.arange(past, past + rows, dtype=torch.int32, device="cuda"),
        query_start=ints(0, rows), kv_lens=ints(past + rows), block_tables={"full": table, "sliding": table},
        row_sequence=torch.zeros(rows, dtype=torch.int32, device="cuda"),
        logit_rows=ints(rows - 1), max_kv_len=past + rows,
    )  # fmt: skip
    q = (torch.randn((rows, HEADS, DIM), generator=g, device="cuda") * 1.5).bfloat16()
    return step, pool, q, torch.randn(HEADS, generator=g, device="cuda").bfloat16()


def error(got: Tensor, step: Step, pool: Tensor, q: Tensor, sinks: Tensor, window: int) -> float:
    """Relative, over 256 rows from all over the prompt."""
    rows = torch.linspace(0, q.shape[0] - 1, 256, device="cuda").long()
    k, v = gather_kv(pool, 1, step.block_tables["full"][0], int(step.kv_lens[0]))
    want = attend_reference(q[rows].float(), k, v, step.positions[rows], sinks.float(), window or None, DIM**-0.5)
    return float((got[rows].float() - want.flatten(1)).norm() / want.norm())


def timed(f: Any) -> tuple[float, float]:
    """Median and spread in microseconds."""
    f()
    torch.cuda.synchronize()
    times = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(4):
            f()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 250)
    return statistics.median(times), max(times) - min(times)


def kernels(
    step: Step, pool: Tensor, q: Tensor, sinks: Tensor, kind: str, builds: list[FlashShape]
) -> dict[str, Callable[[], Tensor]]:
    window = WINDOW if kind == "sliding" else 0
    binding = Binding(default_spec(dense="mxfp4"), SimpleNamespace(sinks=sinks), kind, 1, (sinks, 1.0), lambda: pool)
    launch = PrefillAttention().bind(replace(binding, spec=replace(binding.spec, features=FEATURES)))
    pages = map_pages(gpu(), pool)

    def triton() -> Tensor:
        acts = Activations(q=q)
        launch(step, acts)
        found: Tensor = acts.attn
        return found

    def flash(b: FlashShape) -> Callable[[], Tensor]:
        return lambda: attend(gpu(), b, q, pool, 1, step, kind, sinks, window, pages=pages)

    return {"triton": triton} | {f"flash {b.groups}x{b.stages}x{b.blocks}": flash(b) for b in builds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", action="store_true", help="other builds too")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    environment.need_gpu()
    torch.set_grad_enabled(False)
    rows: list[dict[str, Any]] = []
    builds = {"full": [FULL], "sliding": [SLIDING]}
    if args.variants:
        builds["full"] += [FlashShape(2, 6, 1), FlashShape(3, 3, 1), FlashShape(1, 4, 2)]
        builds["sliding"] += [FlashShape(2, 4, 1), FlashShape(3, 4, 1)]
    for new, past in CASES:
        step, pool, q, sinks = make(new, past)
        for kind, window in (("full", 0), ("sliding", WINDOW)):
            seen = step.positions.long() + 1
            pairs = float((seen.clamp(max=window) if window else seen).sum()) * HEADS
            for name, f in kernels(step, pool, q, sinks, kind, builds[kind]).items():
                wrong, same = error(f(), step, pool, q, sinks, window), torch.equal(f(), f())
                row: dict[str, Any] = {"kernel": name, "kind": kind, "rows": new, "past": past}
                row |= {"error": wrong, "repeats": same}
                if wrong < BOUND and same:
                    us, spread = timed(f)
                    rate = pairs * 4 * DIM / us * 1e6
                    row |= {"us": us, "spread_us": spread, "tflop_s": rate / 1e12, "share": rate / BF16}
                print(row, flush=True)
                rows.append(row)
    result = {
        "bench": "flash_gpu", "gpu": torch.cuda.get_device_name(), "sources": FULL.program().hash(),
        "date": time.strftime("%Y-%m-%d"), "rows": rows,
    }  # fmt: skip
    text = json.dumps(result)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
