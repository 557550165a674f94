"""Embedding, norms, rope with the KV write, the router: against their references."""

from __future__ import annotations

import pytest
import torch

from halfbyte.kernels.triton.embed import TritonEmbed
from halfbyte.kernels.triton.norm import TritonAttnNorm, TritonFinalNorm
from halfbyte.kernels.triton.rope import RopeAndWrite
from halfbyte.kernels.triton.router import NormAndRouter
from tests.kernels.triton.triton_cases import close, make_pool, make_spec, make_step, make_weights, run_both


def stream(rows: int, hidden: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(rows, hidden, generator=torch.Generator().manual_seed(rows)) * scale


def test_embed_is_exact() -> None:
    spec = make_spec()
    step = make_step(spec, [(0, 5)])
    mine, theirs, _, _ = run_both(TritonEmbed(), spec, make_weights(spec), step, {})
    assert mine.x.equal(theirs.x)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("activation", ["bf16", "mxfp8"])
def test_attn_norm(scale: float, activation: str) -> None:
    """float32 where the next step quantises further, bf16 where it rounds to bf16 anyway."""
    spec = make_spec(activation=activation, formats=make_spec().formats | {"qkv": "mxfp4"})
    step = make_step(spec, [(3, 4)])
    mine, theirs, _, _ = run_both(
        TritonAttnNorm(), spec, make_weights(spec), step, {"x": stream(4, spec.hidden, scale)}
    )
    if activation == "bf16":
        assert mine.h.dtype == torch.bfloat16
        close(mine.h, theirs.h, 3e-3)
        close(mine.h, theirs.h.bfloat16(), 2e-4)  # all but a few elements are the same bf16
    else:
        close(mine.h, theirs.h, 1e-6)


def test_final_norm_takes_the_rows_that_were_asked_for() -> None:
    spec = make_spec()
    step = make_step(spec, [(0, 6)], logit_rows=[5, 0, 2])
    mine, theirs, _, _ = run_both(TritonFinalNorm(), spec, make_weights(spec), step, {"x": stream(6, spec.hidden)})
    close(mine.h, theirs.h, 3e-3)


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_rope_and_kv_write(kv: str, kind: str) -> None:
    """Positions at page boundaries, far out, and two sequences; nothing else in the cache may change."""
    spec = make_spec(kv_dtype=kv)
    step = make_step(spec, [(62, 3), (131, 1)])
    step.positions[3] = 131
    pool = make_pool(spec, step)
    g = torch.Generator().manual_seed(1)
    q, k, v = torch.split(torch.randn(4, 12, 32, generator=g) * 2, [8, 2, 2], dim=1)
    mine, theirs, a, b = run_both(
        RopeAndWrite(), spec, make_weights(spec), step, {"q": q, "k": k, "v": v}, pool=pool, kind=kind
    )
    assert a is not None
    assert b is not None
    close(mine.q, theirs.q, 3e-3)
    close(mine.q, theirs.q.bfloat16(), 1e-4)
    changed = (b.float() != pool.float()).nonzero()
    assert len(changed) > 0
    same = a.float() == b.float()
    assert int((~same).sum()) <= 2, "more than a rounding tie or two differs"  # cos differs in its last bit
    untouched = torch.ones_like(same)
    for row in range(4):
        p = int(step.positions[row])
        page = int(step.block_tables[kind][int(step.row_sequence[row]), p // 64])
        untouched[page, 1, :, :, p % 64] = False
    assert a.float()[untouched].equal(pool.float()[untouched])


def test_rope_far_out() -> None:
    """At 131,000 the angle has lost its low bits in float32: the kernel must lose the same ones."""
    spec = make_spec()
    step = make_step(spec, [(0, 2)])
    step.positions = torch.tensor([131000, 131071], dtype=torch.int32)
    step.block_tables["full"] = torch.ones((1, 2048), dtype=torch.int32)  # type: ignore[index]
    q, k, v = torch.split(torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(2)), [8, 2, 2], dim=1)
    mine, theirs, _, _ = run_both(
        RopeAndWrite(), spec, make_weights(spec), step, {"q": q, "k": k, "v": v}, pool=make_pool(spec, step)
    )
    close(mine.q, theirs.q.bfloat16(), 1e-4)


@pytest.mark.parametrize("rows", [1, 17, pytest.param(1030, marks=pytest.mark.slow)])
def test_router(rows: int) -> None:
    spec = make_spec()
    step = make_step(spec, [(0, rows)])
    mine, theirs, _, _ = run_both(NormAndRouter(), spec, make_weights(spec), step, {"x": stream(rows, spec.hidden)})
    assert mine.topk_ids.long().equal(theirs.topk_ids)
    close(mine.topk_weights, theirs.topk_weights, 1e-4)
    close(mine.h, theirs.h, 3e-3)


@pytest.mark.parametrize("rows", [1, 17])
def test_a_float32_router_keeps_its_bits(rows: int) -> None:
    """As fine-tunes have it, with a bias of another type than the norm's. Rounded to bf16 the weights miss by 1e-3."""
    spec = make_spec(wide=frozenset({"router", "router_bias"}))
    weights, g = make_weights(spec), torch.Generator().manual_seed(5)
    weights.router = weights.router.float() + torch.randn(weights.router.shape, generator=g) * 1e-3
    weights.router_bias = torch.randn(weights.router_bias.shape, generator=g) * 0.05
    step = make_step(spec, [(0, rows)])
    mine, theirs, _, _ = run_both(NormAndRouter(), spec, weights, step, {"x": stream(rows, spec.hidden)})
    assert mine.topk_ids.long().equal(theirs.topk_ids)
    close(mine.topk_weights, theirs.topk_weights, 2e-5)
    close(mine.h, theirs.h, 3e-3)


def test_router_ties_go_to_the_lower_expert() -> None:
    spec = make_spec(experts=12)
    weights = make_weights(spec)
    weights.router[:] = weights.router[0]
    weights.router_bias[:] = 0
    weights.router_bias[7] = 1.0
    step = make_step(spec, [(0, 2)])
    mine, theirs, _, _ = run_both(NormAndRouter(), spec, weights, step, {"x": stream(2, spec.hidden)})
    assert theirs.topk_ids.tolist() == [[7, 0, 1, 2]] * 2
    assert mine.topk_ids.tolist() == [[7, 0, 1, 2]] * 2


def test_a_broken_row_still_names_real_experts() -> None:
    """A padding row may hold anything; what it routes to must exist, and other rows must not notice."""
    spec = make_spec(experts=6)
    step = make_step(spec, [(0, 3)])
    x = stream(3, spec.hidden)
    weights = make_weights(spec)
    _, theirs, _, _ = run_both(NormAndRouter(), spec, weights, step, {"x": x})
    x = x.clone()
    x[1] = float("nan")
    mine, _, _, _ = run_both(NormAndRouter(), spec, weights, step, {"x": x})
    assert int(mine.topk_ids.min()) >= 0
    assert int(mine.topk_ids.max()) < 6
    assert mine.topk_ids[[0, 2]].long().equal(theirs.topk_ids[[0, 2]])
