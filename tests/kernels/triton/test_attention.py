"""Attention over pages against the reference: window and page boundaries, extreme sinks, ragged batches, fp8.

Queries, keys and probabilities are bf16 in the kernel and float32 in the reference: the bound is bf16's, 4e-3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from halfbyte.kernels.triton.attention import DecodeAttention, PrefillAttention, parts_bound
from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import Phase
from tests.kernels.triton.triton_cases import bind_all, close, make_pool, make_spec, make_step, make_weights, run_both

BOUND = 4e-3
EXACT = 1e-5  # when what the kernel rounds is given to the reference already rounded


def queries(rows: int, heads: int = 8, dim: int = 32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(rows, heads, dim, generator=torch.Generator().manual_seed(rows)) * scale).bfloat16()


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("phase", "lengths"),
    [
        (DecodeAttention(), [(0, 1)]),  # the first token of all
        (DecodeAttention(), [(63, 1), (64, 1), (127, 1), (128, 1), (191, 1)]),  # page and window boundaries
        (DecodeAttention(), [(62, 4), (200, 3)]),  # drafts being verified, over a page boundary
        (PrefillAttention(), [(0, 70)]),
        (PrefillAttention(), [(0, 1), (126, 5), (40, 30), (250, 3)]),  # ragged, chunks, single rows
    ],
)
@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_attention(phase: Phase, lengths: Sequence[tuple[int, int]], kind: str, kv: str) -> None:
    if kv == "fp8" and len(lengths) == 1:
        pytest.skip("one fp8 case of each phase is enough")
    spec = make_spec(kv_dtype=kv)
    step = make_step(spec, lengths)
    mine, theirs, _, _ = run_both(
        phase, spec, make_weights(spec), step, {"q": queries(step.rows)}, pool=make_pool(spec, step), kind=kind
    )
    close(mine.attn, theirs.attn, BOUND)


@pytest.mark.parametrize("phase", [DecodeAttention(), PrefillAttention()])
@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_extreme_sinks(phase: Phase, kind: str) -> None:
    """A huge sink takes everything, a tiny one nothing; neither makes a NaN. Each is one head's."""
    spec = make_spec()
    step = make_step(spec, [(70, 2)])
    weights = make_weights(spec)
    sinks = (-1e4, -60.0, 60.0, 1e4, float("-inf"))
    weights.sinks[: len(sinks)] = torch.tensor(sinks)
    mine, theirs, _, _ = run_both(phase, spec, weights, step, {"q": queries(2)}, pool=make_pool(spec, step), kind=kind)
    got, expected = mine.attn.view(2, spec.heads, -1), theirs.attn.view(2, spec.heads, -1)
    for head, sink in enumerate((*sinks, *[0.0] * (spec.heads - len(sinks)))):
        if sink > 0:
            assert float(got[:, head].abs().max()) < 1e-6
        else:
            close(got[:, head], expected[:, head], BOUND)


@pytest.mark.parametrize("phase", [DecodeAttention(), PrefillAttention()])
def test_dropping_the_sinks_is_noticed(phase: Phase) -> None:
    spec = make_spec()
    step = make_step(spec, [(70, 1)])
    weights, pool, q = make_weights(spec), make_pool(spec, step), queries(1)
    _, theirs, _, _ = run_both(phase, spec, weights, step, {"q": q}, pool=pool)
    without = make_spec(features=spec.features | {"attention": frozenset({"window", "gqa"})})
    mine, _, _, _ = run_both(phase, without, weights, step, {"q": q}, pool=pool)
    with pytest.raises(AssertionError):
        close(mine.attn, theirs.attn, 10 * BOUND)
    _, theirs, _, _ = run_both(phase, without, weights, step, {"q": q}, pool=pool)
    close(mine.attn, theirs.attn, BOUND)


@pytest.mark.parametrize("phase", [DecodeAttention(), PrefillAttention()])
@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_garbage_in_slots_that_were_never_written_stays_there(phase: Phase, kind: str) -> None:
    spec = make_spec()
    step = make_step(spec, [(70, 2), (5, 1)])
    pool = make_pool(spec, step)
    clean, _, _, _ = run_both(phase, spec, make_weights(spec), step, {"q": queries(3)}, pool=pool, kind=kind)
    dirty = pool.clone()
    table = step.block_tables[kind]
    for s, newest in ((0, 71), (1, 5)):
        dirty[int(table[s, newest // 64]), :, :, :, newest % 64 + 1 :] = float("nan")
    bound = bind_all([phase], spec, make_weights(spec), dirty, kind, 1)[0]
    acts = Activations(q=queries(3))
    bound(step, acts)
    assert acts.attn.equal(clean.attn)


def test_parts_of_the_cache_are_cut_by_position_alone() -> None:
    """A row in a long batch gives the bits it gives alone, and a draft's rows the bits decoding them would."""
    spec = make_spec(heads=2, kv_heads=1)
    lengths = [(126, 3), (300, 1), (0, 1)]
    step = make_step(spec, lengths)
    pool, weights, q = make_pool(spec, step), make_weights(spec), queries(5, 2)
    together, _, _, _ = run_both(DecodeAttention(), spec, weights, step, {"q": q}, pool=pool)
    for row in range(5):
        alone = make_step(spec, [(int(step.positions[row]), 1)])
        s = int(step.row_sequence[row])
        alone.block_tables = {k: t[s : s + 1].contiguous() for k, t in step.block_tables.items()}
        mine, _, _, _ = run_both(
            DecodeAttention(), spec, weights, alone, {"q": q[row : row + 1].contiguous()}, pool=pool
        )
        assert mine.attn[0].equal(together.attn[row]), row


def test_merging_many_parts() -> None:
    """Past 8192 tokens parts are longer; 64 always suffice."""
    spec = make_spec(kv_heads=1, heads=2)
    step = make_step(spec, [(8250, 1)])
    mine, theirs, _, _ = run_both(
        DecodeAttention(), spec, make_weights(spec), step, {"q": queries(1, 2)}, pool=make_pool(spec, step, layers=2)
    )
    close(mine.attn, theirs.attn, BOUND)


@pytest.mark.parametrize(
    ("tokens", "parts"), [(1, 1), (128, 1), (129, 2), (8192, 64), (8193, 64), (32768, 64), (131072, 64), (262144, 128)]
)
def test_parts_bound(tokens: int, parts: int) -> None:
    assert parts_bound(tokens, 64) == parts
    worst = 0
    for length in {tokens, min(tokens, 8192), min(tokens, 32768)}:
        pages = 2 if length <= 8192 else 8 if length <= 32768 else 32
        worst = max(worst, math.ceil(math.ceil(length / 64) / pages))
    assert worst == parts
