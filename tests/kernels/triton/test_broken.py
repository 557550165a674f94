"""A value that is no number stays visible: NaN or infinity in a weight, in the cache or in an activation never comes
out of a Triton phase as a finite result of the row it concerns, and other rows do not notice. The interpreter's minimum
and maximum drop a NaN as the GPU's do. It takes a second for each launch, so most cases are slow ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte.kernels.triton.attention import DecodeAttention, PrefillAttention
from halfbyte.kernels.triton.linear import TritonHead, TritonOut, TritonQkv
from halfbyte.kernels.triton.moe import TritonMoe, TritonMoeSplit
from halfbyte.kernels.triton.norm import TritonAttnNorm
from halfbyte.kernels.triton.rope import RopeAndWrite
from halfbyte.kernels.triton.router import NormAndRouter
from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import Phase
from tests.kernels.triton.test_attention import queries
from tests.kernels.triton.test_moe import activations
from tests.kernels.triton.test_rows import stream
from tests.kernels.triton.triton_cases import bind_all, make_pool, make_spec, make_step, make_weights

NAN, INF = float("nan"), float("inf")
VALUES = [NAN, INF, -INF]
SOME = [NAN, *(pytest.param(v, marks=pytest.mark.slow) for v in (INF, -INF))]


def finite_rows(t: Tensor) -> list[bool]:
    return [bool(v) for v in torch.isfinite(t.float().flatten(1)).all(1)]


@pytest.mark.parametrize("value", [*SOME, 1e30])
def test_norms(value: float) -> None:
    """The squares of the last are infinite, and the root of that would be nothing."""
    spec = make_spec()
    x = stream(3, spec.hidden)
    x[1, 5] = value
    step, weights = make_step(spec, [(0, 3)]), make_weights(spec)
    for phase in (TritonAttnNorm(), NormAndRouter()):
        acts = Activations(x=x.clone())
        for launch in bind_all([phase], spec, weights, None, "full", 1):
            launch(step, acts)
        assert finite_rows(acts.h) == [True, False, True]
        if isinstance(phase, NormAndRouter):
            assert finite_rows(acts.topk_weights) == [True, False, True]


@pytest.mark.parametrize("value", SOME)
@pytest.mark.parametrize(
    "role", ["router_bias", *(pytest.param(r, marks=pytest.mark.slow) for r in ("router", "mlp_norm"))]
)
def test_the_router(role: str, value: float) -> None:
    """Whether the expert would have been chosen or not."""
    spec = make_spec()
    step = make_step(spec, [(0, 3)])
    for expert in (0, 7):
        weights = make_weights(spec)
        getattr(weights, role)[expert] = value
        acts = Activations(x=stream(3, spec.hidden))
        for launch in bind_all([NormAndRouter()], spec, weights, None, "full", 1):
            launch(step, acts)
        broken = ~torch.isfinite(acts.topk_weights).all(1) | ~torch.isfinite(acts.h.float()).all(1)
        assert broken.all(), expert
        assert int(acts.topk_ids.min()) >= 0
        assert int(acts.topk_ids.max()) < spec.experts


MOES = [*((TritonMoe(), a) for a in ("bf16", "int8", "fp8", "mxfp8", "mxfp4")), (TritonMoeSplit(), "mxfp8")]


def test_clamps() -> None:
    check_experts(TritonMoe(), "bf16", all_plants=False)


@pytest.mark.slow
@pytest.mark.parametrize(("phase", "activation"), MOES)
def test_experts(phase: Phase, activation: str) -> None:
    check_experts(phase, activation, all_plants=True)


def check_experts(phase: Phase, activation: str, *, all_plants: bool) -> None:
    """A row for each expert: the first three get something that is no number, the last nothing."""
    spec = make_spec(activation=activation, experts=4, top_k=1, hidden=96, intermediate=64)
    step = make_step(spec, [(0, 4)])
    acts = activations(4, spec.hidden, 4, 1)
    acts["topk_ids"] = torch.arange(4, dtype=torch.int32)[:, None]

    def run(change: Callable[[Any, dict[str, Tensor]], None]) -> list[bool]:
        weights = make_weights(spec, layout=phase.layouts(spec)["gate_up"])
        given = {name: value.clone() for name, value in acts.items()}
        change(weights, given)
        mine = Activations(**given)
        for launch in bind_all([phase], spec, weights, None, "full", 1):
            launch(step, mine)
        return finite_rows(mine.x)

    def plant(t: Tensor, column: int) -> None:
        t[:3, column] = torch.tensor(VALUES).to(t.dtype)

    wrong = [False, False, False, True]
    assert run(lambda w, a: plant(w.gate_up_bias, 6)) == wrong, "a gate, which is clamped"
    if not all_plants:
        return
    assert run(lambda w, a: plant(w.gate_up_bias, 7)) == wrong, "an up, which is clamped"
    assert run(lambda w, a: plant(w.down_bias, 3)) == wrong
    assert run(lambda w, a: plant(a["h"], 9)) == wrong
    assert run(lambda w, a: plant(a["topk_weights"], 0)) == wrong
    assert run(lambda w, a: w.gate_up.scales[:3].fill_(255)) == wrong
    assert run(lambda w, a: w.down.scales[:3].fill_(255)) == wrong


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("phase", "lengths"), [(DecodeAttention(), [(90, 1), (70, 1)]), (PrefillAttention(), [(62, 4), (70, 3)])]
)
@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_keys_values_and_sinks(phase: Phase, lengths: list[tuple[int, int]], kind: str, kv: str) -> None:
    """In a page that all rows of the first sequence see whole."""
    spec = make_spec(kv_dtype=kv)
    step = make_step(spec, lengths)
    rows = [bool(s) for s in step.row_sequence.tolist()]  # rows of the other sequence

    def run(change: Callable[[Tensor, Tensor], None]) -> list[bool]:
        weights, pool = make_weights(spec), make_pool(spec, step)
        change(pool, weights.sinks)
        mine = Activations(q=queries(step.rows))
        for launch in bind_all([phase], spec, weights, pool, kind, 1):
            launch(step, mine)
        return finite_rows(mine.attn)

    assert run(lambda pool, sinks: None) == [True] * step.rows
    page = int(step.block_tables[kind][0, 0])
    for value in (NAN,) if kv == "fp8" else VALUES:  # E4M3 has no infinity
        for which in (0, 1):
            assert run(lambda p, s, v=value, w=which: p[page, 1, w, 1, 30].__setitem__(7, v)) == rows, (value, which)
        if kv == "bf16":  # a key that points away from every query of a head: it must not just be left out
            assert run(lambda p, s, v=value: p[page, 1, 0, 1, 30].fill_(v)) == rows, value
    for value in (NAN, INF):
        assert run(lambda p, s, v=value: s.__setitem__(3, v)) == [False] * step.rows


@pytest.mark.parametrize("value", [INF, *(pytest.param(v, marks=pytest.mark.slow) for v in (NAN, -INF))])
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_what_is_cached(kv: str, value: float) -> None:
    """An infinite key or value is not stored as the largest number of the cache's format."""
    spec = make_spec(kv_dtype=kv)
    step = make_step(spec, [(5, 2)])
    q, k, v = torch.split(torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(1)), [8, 2, 2], dim=1)
    k, v = k.clone(), v.clone()
    k[1, 0, 3], v[1, 1, 4] = value, value
    pool = make_pool(spec, step)
    for launch in bind_all([RopeAndWrite()], spec, make_weights(spec), pool, "full", 1):
        launch(step, Activations(q=q, k=k, v=v))
    page = int(step.block_tables["full"][0, 0])
    cell = pool[page, 1, :, :, 6].float()
    assert not torch.isfinite(cell[0, 0]).all()
    assert not torch.isfinite(cell[1, 1]).all()
    assert torch.isfinite(pool[page, 1, :, :, 5].float()).all()


def test_a_key_of_minus_infinity_is_not_left_out() -> None:
    spec = make_spec()
    step, weights = make_step(spec, [(70, 1), (70, 1)]), make_weights(spec)
    pool = make_pool(spec, step)
    q = queries(2).abs()
    pool[int(step.block_tables["full"][0, 0]), 1, 0, :, 30, 7] = -INF  # against every query
    acts = Activations(q=q)
    for launch in bind_all([DecodeAttention()], spec, weights, pool, "full", 1):
        launch(step, acts)
    assert finite_rows(acts.attn) == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize("dense", ["bf16", "q8", "mxfp4"])
@pytest.mark.parametrize("activation", ["bf16", "int8"])
def test_projections(dense: str, activation: str) -> None:
    roles = make_spec().formats | {"qkv": dense, "o": dense, "lm_head": dense}
    spec = make_spec(activation=activation, formats=roles, hidden=192)
    step = make_step(spec, [(0, 3)], logit_rows=[0, 1, 2])
    for phase, role, width in ((TritonQkv(), "qkv", spec.hidden), (TritonOut(), "o", spec.heads * spec.head_dim),
                               (TritonHead(), "lm_head", spec.hidden)):  # fmt: skip
        for value in VALUES:
            for planted in ("input", "bias", "weight"):
                weights = make_weights(spec)
                x = stream(3, width).bfloat16().float() if activation != "bf16" else stream(3, width).bfloat16()
                if planted == "input":
                    x[1, 7] = value
                elif planted == "bias":
                    if role == "lm_head":
                        continue
                    getattr(weights, f"{role}_bias")[5] = value
                else:
                    matrix = getattr(weights, role)
                    if isinstance(matrix, Tensor):
                        matrix[5, 9] = value
                    else:
                        matrix.scales[5, 0] = 255 if dense == "mxfp4" else value
                given = {"o": {"attn": x, "x": stream(3, spec.hidden)}}.get(role, {"h": x})
                acts = Activations(**given)
                for launch in bind_all([phase], spec, weights, None, "full", 1):
                    launch(step, acts)
                out = torch.cat([t.flatten(1) for t in (acts.q, acts.k, acts.v)], 1) if role == "qkv" else (
                    acts.x if role == "o" else acts.logits)  # fmt: skip
                want = [True, False, True] if planted == "input" else [False] * 3
                assert finite_rows(out) == want, (role, value, planted)
