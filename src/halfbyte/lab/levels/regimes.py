"""The same positions through every regime of a plan, whose kernels share no product: each is checked by the others.

Two layers of the model and its head: in 36 random layers one rounding that falls the other way chooses other experts,
and the logits of two right kernels differ by a third. Even in two a near tie of the router may fall either way, so a
regime is right if three quarters of its rows are within the bound. Prompts are checked in every size that is timed,
because each size takes another build of the products. Times nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from halfbyte.lab.measure.device_timing import Cache, fill, prefill_step, random_tokens
from halfbyte.lab.result import Check
from halfbyte.model.gpt_oss import GptOss

# Relative, between two regimes; where activations are rounded further than to these, ROUNDED.
BOUNDS = {"bf16": 0.05, "f32": 1e-4}
ROUNDED = 0.2
SHARE = 0.75  # of the rows
ROWS = 32  # whose logits are compared
PROMPTS = (161, 2048, 8192)


def check_regimes(model: GptOss, prompts: Sequence[int] = PROMPTS) -> tuple[Check, ...]:
    """One comparison per regime and size of prompt. Replaces the model's KV pool and leaves none."""
    two = first_layers(model, 2)
    limits = two.plan.limits
    used = {two.spec.activation, *two.spec.activations.values()}
    bound = max(BOUNDS.get(a, ROUNDED) for a in used)
    checks = []
    for n in prompts:
        ids = random_tokens(two, n, n)
        whole = _logits(two, ids, [n])
        for name, size in (("batch", limits.batch), ("decode", 1), ("verify", limits.decode)):
            if n > min(prompts) and name != "batch":
                continue  # decode over thousands of rows would take as many steps
            other = _logits(two, ids, _chunks(n, size, limits.batch))
            checks.append(compare_rows(f"{name} beside a prompt of {n}, two layers", other, whole, bound))
    two.release_kv()
    model.release_kv()
    return tuple(checks)


def first_layers(model: GptOss, count: int) -> GptOss:
    w = model.weights
    config = w.config.with_(layers=count, layer_kinds=w.config.layer_kinds[:count])
    return GptOss(replace(w, config=config, layers=w.layers[:count]), model.gates)


def _chunks(n: int, size: int, batch: int) -> list[int]:
    """Rows of the steps that feed n tokens: the last ROWS in steps of `size`, what comes before in batches."""
    before = n - ROWS
    return [*_cut(before, batch), *_cut(ROWS, size)]


def _cut(n: int, size: int) -> list[int]:
    return [min(size, n - at) for at in range(0, n, size)]


def _logits(model: GptOss, ids: Tensor, chunks: Sequence[int]) -> Tensor:
    """Logits of the last ROWS rows."""
    n = len(ids)
    cache: Cache = fill(model, 1, n)
    at, rows = 0, []
    for size in chunks:
        step = prefill_step(model, cache, ids[at : at + size], at)
        wanted = range(max(0, n - ROWS - at), size)
        if wanted:
            step = replace(step, logit_rows=torch.tensor(list(wanted), dtype=torch.int32, device=model.device))
        logits = model.forward(step)
        if wanted:
            rows.append(logits.float().clone())
        at += size
    return torch.cat(rows)


def compare_rows(what: str, actual: Tensor, expected: Tensor, bound: float) -> Check:
    errors = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    if not bool(torch.isfinite(errors).all()):
        return Check(what, False, note="not a number")
    within = float((errors < bound).float().mean())
    return Check(what, within >= SHARE, float(errors.median()), bound, f"{within:.0%} of {len(errors)} rows within it")
