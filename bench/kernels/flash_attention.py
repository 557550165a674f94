"""Attention of whole prompts: both CUDA kernels checked against float32, then timed beside the Triton phase.

    python -m bench run flash-attention --set variants=yes

gpt-oss-120b's heads (64 queries, 8 keys, 64 dims), sinks, pages in random order, random keys and values; full and
sliding layers. flash.cu runs on SM90, flash_sync.cu (SM12x's) on any GPU. A case that is out of its bound has no time.
Rates count the products of visible pairs only and stand beside the chip's measured bf16 rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from bench.kernels import timing
from bench.measurement import Run, measurement, option
from halfbyte.kernels.cuda.attention.flash import FULL, SLIDING, FlashAttention, FlashShape
from halfbyte.kernels.cuda.attention.flash_sync import TILED, SyncAttention, SyncAttentionShape
from halfbyte.kernels.cuda.attention.prompt import PromptShape, attend
from halfbyte.kernels.cuda.device.host import gpu
from halfbyte.kernels.prove import default_spec
from halfbyte.kernels.triton.attention import PrefillAttention
from halfbyte.lab import receipts
from halfbyte.lab.levels.verdict import Verdict
from halfbyte.lab.result import Cell, Result, figure
from halfbyte.ops.attention import attend as attend_reference
from halfbyte.ops.attention import gather_kv
from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import Binding
from halfbyte.plan.step import Step

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


def expected_rows(step: Step, pool: Tensor, q: Tensor, sinks: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """256 rows from all over the prompt, and their attention in float32."""
    rows = torch.linspace(0, q.shape[0] - 1, 256, device="cuda").long()
    k, v = gather_kv(pool, 1, step.block_tables["full"][0], int(step.kv_lens[0]))
    out = attend_reference(q[rows].float(), k, v, step.positions[rows], sinks.float(), window or None, DIM**-0.5)
    return rows, out.flatten(1)


def kernels(
    step: Step, pool: Tensor, q: Tensor, sinks: Tensor, kind: str, shapes: dict[str, PromptShape]
) -> dict[str, Callable[[], Tensor]]:
    window = WINDOW if kind == "sliding" else 0
    binding = Binding(default_spec(dense="mxfp4"), SimpleNamespace(sinks=sinks), kind, 1, (sinks, 1.0), lambda: pool)
    launch = PrefillAttention().bind(replace(binding, spec=replace(binding.spec, features=FEATURES)))

    def triton() -> Tensor:
        acts = Activations(q=q)
        launch(step, acts)
        return acts.attn

    def cuda(b: PromptShape) -> Callable[[], Tensor]:
        pages = b.pages(gpu(), pool)
        return lambda: attend(gpu(), b, q, pool, 1, step, kind, sinks, window, pages=pages)

    return {"triton": triton} | {name: cuda(b) for name, b in shapes.items()}


def shapes_of(wgmma: bool, variants: bool) -> dict[str, dict[str, PromptShape]]:
    """Kind of layer -> name -> what is timed."""
    flash: dict[str, list[PromptShape]] = (
        {"full": [FULL], "sliding": [SLIDING]} if wgmma else {"full": [], "sliding": []}
    )
    sync: list[PromptShape] = [TILED]
    if variants:
        if wgmma:
            flash["full"] += [FlashShape(2, 6, 1), FlashShape(3, 3, 1), FlashShape(1, 4, 2)]
            flash["sliding"] += [FlashShape(2, 4, 1), FlashShape(3, 4, 1)]
        sync += [
            SyncAttentionShape(2, 4, 2, 2),
            SyncAttentionShape(1, 4, 3, 3),
            SyncAttentionShape(1, 4, 2, 3),
            SyncAttentionShape(1, 2, 2, 4),
        ]
    return {kind: {name_of(b): b for b in flash[kind] + sync} for kind in flash}


def name_of(b: PromptShape) -> str:
    if isinstance(b, FlashShape):
        return f"flash {b.groups}x{b.stages}x{b.blocks}"
    assert isinstance(b, SyncAttentionShape)
    return f"flash_sync {b.tiles}x{b.warps}x{b.stages}x{b.blocks}"


def measure(
    cell: Cell, work: Callable[[], Tensor], step: Step, expected: tuple[Tensor, Tensor], window: int, repeats: int
) -> Result:
    verdict, (rows, want) = Verdict("against float32, 256 rows"), expected
    first, second = work().clone(), work()
    verdict.compare("attention", first[rows].float(), want, BOUND)
    verdict.require("repeats to the last bit", torch.equal(first, second))
    check = verdict.as_check()
    if not check.ok:
        return Result(cell, checks=(check,))
    visible = step.positions.long() + 1
    pairs = float((visible.clamp(max=window) if window else visible).sum()) * HEADS
    samples = timing.event_us(work, repeats, calls=4)  # a prompt's attention is launched eagerly
    rates = [pairs * 4 * DIM / us / 1e6 for us in samples]
    figures = (figure("time", "us", samples), figure("rate", "TFLOP/s", rates, timing.flop_ceiling()))
    return Result(cell, figures, (check,))


@dataclass(frozen=True)
class Options:
    variants: bool = option(False, "other builds, too")
    repeats: int = 12


@measurement("flash-attention", needs=("gpu",), seconds=60)
def flash_attention(run: Run, options: Options) -> None:
    timing.begin()
    chosen = shapes_of(torch.cuda.get_device_capability() == (9, 0), options.variants)
    run.sources |= receipts.measured([FlashAttention(), SyncAttention(), PrefillAttention()])
    for new, past in CASES:
        step, pool, q, sinks = make(new, past)
        for kind, window in (("full", 0), ("sliding", WINDOW)):
            expected = expected_rows(step, pool, q, sinks, window)
            for name, work in kernels(step, pool, q, sinks, kind, chosen[kind]).items():
                cell = Cell("kernel", path=name, shape={"layer": kind, "rows": new, "past": past})
                run.measure(cell, partial(measure, cell, work, step, expected, window, options.repeats))
