"""Small models and ragged steps that the tests of the CPU step share."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.model.config import ModelConfig
from halfbyte.plan.step import Step
from tests.kernels.cpu.native import make_step

QUANTISED = {"qkv": "q8", "o": "mxfp4", "gate_up": "mxfp4", "down": "mxfp4", "lm_head": "q8"}
SMALL = ModelConfig(
    layers=2, hidden=96, intermediate=64, experts=6, top_k=3, heads=8, kv_heads=2, head_dim=32, vocab=200, window=20
)
SHAPES = {
    "plain": SMALL,
    "head 64, one kv head": SMALL.with_(hidden=64, heads=3, kv_heads=1, head_dim=64),
    "every head its own": SMALL.with_(heads=4, kv_heads=4, head_dim=16),
    "odd sizes": SMALL.with_(
        hidden=90, intermediate=37, heads=10, kv_heads=2, head_dim=6, vocab=211, experts=5, top_k=5
    ),
    "head 80": SMALL.with_(hidden=40, heads=2, kv_heads=1, head_dim=80, window=1),
    "one expert": SMALL.with_(experts=1, top_k=1),
    "all full": SMALL.with_(layer_kinds=("full", "full")),
    "all sliding": SMALL.with_(layer_kinds=("sliding", "sliding"), window=7),
}
# Tokens that each sequence is fed by in one step after the other.
RAGGED = [(70, 3, 1), (1, 1, 0), (1, 130, 1), (2, 1, 40)]


def tables(sequences: int, blocks: int) -> dict[str, Tensor]:
    """Pages in no order, none shared; page 0 is scratch."""
    order = torch.randperm(2 * sequences * blocks, generator=torch.Generator().manual_seed(5)).int() + 1
    both = order.view(2, sequences, blocks)
    return {"sliding": both[0].contiguous(), "full": both[1].contiguous()}


def prompts(config: ModelConfig, lengths: list[int], seed: int = 0) -> list[list[int]]:
    gen = torch.Generator().manual_seed(seed)
    return [torch.randint(0, config.vocab, (n,), generator=gen).tolist() for n in lengths]


def steps(
    config: ModelConfig, rounds: list[tuple[int, ...]], page_size: int = 64, seed: int = 0
) -> tuple[list[Step], int]:
    """Steps that feed sequences by so many tokens each, and how many pages they need."""
    totals = [sum(r[i] for r in rounds) for i in range(len(rounds[0]))]
    tokens = prompts(config, totals, seed)
    pages = tables(len(totals), -(-max(totals) // page_size))
    at, made = [0] * len(totals), []
    for lengths in rounds:
        used = [i for i, n in enumerate(lengths) if n]
        parts = [(tokens[i][at[i] : at[i] + lengths[i]], at[i]) for i in used]
        made.append(make_step(parts, {k: t[used] for k, t in pages.items()}))
        at = [a + n for a, n in zip(at, lengths)]
    return made, 1 + 2 * pages["full"].numel()
