"""Projections against the reference with the same quantisation point: only the order of additions differs."""

from __future__ import annotations

import pytest
import torch

from halfbyte.gates import Gates
from halfbyte.kernels.triton import linear
from halfbyte.kernels.triton.linear import TritonHead, TritonOut, TritonOutSplit, TritonQkv, TritonQkvSplit
from halfbyte.plan.phase import ARCHES, Phase
from tests.kernels.triton.triton_cases import close, make_spec, make_step, make_weights, run_both

BOUND = 2e-6


def inputs(rows: int, k: int) -> torch.Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(k + rows))


PAIRS = [
    ("bf16", "bf16"), ("q8", "bf16"), ("mxfp4", "bf16"), ("mxfp4", "fp8"), ("mxfp4", "mxfp8"), ("mxfp4", "mxfp4"),
    ("mxfp4", "int8"), ("q8", "int8"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "activation", "rows"),
    [(*pair, 1) for pair in PAIRS] + [(*pair, 33) for pair in PAIRS[:3]]
    + [pytest.param(*pair, 100, marks=pytest.mark.slow) for pair in PAIRS],
)  # fmt: skip
def test_qkv(kind: str, activation: str, rows: int) -> None:
    hidden = 192 if kind == "q8" else 160  # q8 is read two groups at a time
    spec = make_spec(activation=activation, hidden=hidden, formats=make_spec().formats | {"qkv": kind})
    assert TritonQkv().refuse(spec, ARCHES["sm90"], Gates()) is None
    step = make_step(spec, [(0, rows)])
    mine, theirs, _, _ = run_both(TritonQkv(), spec, make_weights(spec), step, {"h": inputs(rows, spec.hidden)})
    for name in ("q", "k", "v"):
        close(getattr(mine, name), getattr(theirs, name), BOUND)


@pytest.mark.parametrize("phase", [TritonOut(), TritonOutSplit()])
@pytest.mark.parametrize("activation", ["fp8", "mxfp8"])
def test_o_adds_to_the_stream(phase: Phase, activation: str) -> None:
    spec = make_spec(activation=activation, head_dim=64, formats=make_spec().formats | {"o": "mxfp4"})
    step = make_step(spec, [(0, 3)])
    layout = phase.layouts(spec)["o"]
    acts = {"x": inputs(3, spec.hidden), "attn": inputs(3, spec.heads * spec.head_dim)}
    mine, theirs, _, _ = run_both(phase, spec, make_weights(spec, layout=layout), step, acts)
    close(mine.x, theirs.x, BOUND)


@pytest.mark.parametrize("activation", ["fp8", "mxfp8"])
@pytest.mark.parametrize("rows", [2, 40])
def test_split_layout_with_k_that_is_no_whole_tile(activation: str, rows: int) -> None:
    """hidden is 160: the second K tile of 128 is padding for the most part."""
    spec = make_spec(activation=activation, formats=make_spec().formats | {"qkv": "mxfp4"})
    step = make_step(spec, [(0, rows)])
    weights = make_weights(spec, layout="w4a8_split")
    mine, theirs, _, _ = run_both(TritonQkvSplit(), spec, weights, step, {"h": inputs(rows, spec.hidden)})
    close(mine.q, theirs.q, BOUND)


def test_a_broken_weight_group_stays_broken_when_widened() -> None:
    """Scale 255 is NaN; adding 6 to it must not make a number of it."""
    spec = make_spec(activation="mxfp8", formats=make_spec().formats | {"qkv": "mxfp4"})
    weights = make_weights(spec, layout="w4a8_split")
    weights.qkv.scales[3, 1] = 255
    mine, _, _, _ = run_both(TritonQkvSplit(), spec, weights, make_step(spec, [(0, 2)]), {"h": inputs(2, spec.hidden)})
    column = mine.q.flatten(1)[:, :8]
    assert column[:, 3].isnan().all()
    assert column[:, [0, 1, 2, 4, 5, 6, 7]].isfinite().all()


def test_bf16_rows_need_no_second_rounding() -> None:
    spec = make_spec()
    step = make_step(spec, [(0, 5)])
    h = inputs(5, spec.hidden)
    weights = make_weights(spec)
    wide, _, _, _ = run_both(TritonQkv(), spec, weights, step, {"h": h})
    narrow, _, _, _ = run_both(TritonQkv(), spec, weights, step, {"h": h.bfloat16()})
    assert wide.q.equal(narrow.q)


def test_weights_as_the_m_operand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "arch_of", lambda device: ARCHES["sm100"])
    spec = make_spec()
    step = make_step(spec, [(0, 3)])
    mine, theirs, _, _ = run_both(TritonQkv(), spec, make_weights(spec), step, {"h": inputs(3, spec.hidden)})
    close(mine.q, theirs.q, BOUND)


def test_lm_head() -> None:
    spec = make_spec()
    step = make_step(spec, [(0, 3)], logit_rows=[0, 2])
    mine, theirs, _, _ = run_both(TritonHead(), spec, make_weights(spec), step, {"h": inputs(2, spec.hidden)})
    close(mine.logits, theirs.logits, BOUND)


def test_a_row_does_not_depend_on_the_others() -> None:
    spec = make_spec(formats=make_spec().formats | {"qkv": "mxfp4"})
    weights = make_weights(spec)
    h = inputs(9, spec.hidden)
    many, _, _, _ = run_both(TritonQkv(), spec, weights, make_step(spec, [(0, 9)]), {"h": h})
    one, _, _, _ = run_both(TritonQkv(), spec, weights, make_step(spec, [(0, 1)]), {"h": h[4:5].contiguous()})
    close(one.q, many.q[4:5], 1e-6)


REFUSALS = [
    (TritonQkv(), "cpu", {}, "needs an NVIDIA GPU"),
    (TritonQkv(), "sm120", {"formats": {"qkv": "f32"}}, "qkv is f32"),
    (TritonQkv(), "sm120", {"formats": {"qkv": "q8"}, "activation": "mxfp8"}, "takes bf16 or int8 activations"),
    (TritonQkv(), "sm120", {"formats": {"qkv": "mxfp4"}, "activation": "int4"}, "has no int4"),
    (TritonQkv(), "sm121", {"formats": {"qkv": "mxfp4"}, "activation": "mxfp8"}, "w4a8_split"),
    (TritonQkvSplit(), "sm90", {"formats": {"qkv": "mxfp4"}, "activation": "mxfp8"}, "is for SM12x"),
    (TritonQkvSplit(), "sm120", {"formats": {"qkv": "mxfp4"}}, "not for bf16"),
    (TritonQkvSplit(), "sm120", {}, "holds mxfp4"),
    (TritonQkv(), "sm90", {"hidden": 100}, "multiple of 32"),
    (TritonQkv(), "sm90", {"formats": {"qkv": "q8"}}, "in pairs"),
    (TritonHead(), "sm90", {"formats": {"lm_head": "mxfp4"}, "vocab": 97}, "no whole number"),
]


@pytest.mark.parametrize(("phase", "arch", "changes", "reason"), REFUSALS)
def test_refusals(phase: Phase, arch: str, changes: dict[str, object], reason: str) -> None:
    found = phase.refuse(make_spec(**changes), ARCHES[arch], Gates())
    assert found is not None
    assert reason in found
