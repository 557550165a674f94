"""The expert MLP against the reference with the same quantisation points."""

from __future__ import annotations

import pytest
import torch

from halfbyte.gates import Gates
from halfbyte.kernels.triton import moe
from halfbyte.kernels.triton.moe import TritonMoe, TritonMoeSplit
from halfbyte.plan.phase import ARCHES, Phase
from tests.kernels.triton.triton_cases import close, make_spec, make_step, make_weights, run_both

# bf16, mxfp8 and mxfp4 round again between the two products: a last-bit difference in swiglu may move a value to the
# neighbouring code, which is a whole step of that format for that value.
SOME_EMPTY = 6  # a seed that leaves an expert without a row
BOUNDS = {"bf16": 1e-4, "int8": 2e-4, "fp8": 2e-4, "mxfp8": 1e-3, "mxfp4": 4e-3}


def activations(rows: int, hidden: int, experts: int, top_k: int, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(experts, generator=g)[:top_k] for _ in range(rows)])
    return {
        "x": torch.randn(rows, hidden, generator=g), "h": torch.randn(rows, hidden, generator=g) * 2,
        "topk_ids": ids.int(), "topk_weights": torch.softmax(torch.randn(rows, top_k, generator=g), 1),
    }  # fmt: skip


def check(
    phase: Phase, activation: str, rows: int, acts: dict[str, torch.Tensor] | None = None, **changes: object
) -> None:
    spec = make_spec(activation=activation, **changes)
    step = make_step(spec, [(0, rows)])
    acts = acts or activations(rows, spec.hidden, spec.experts, spec.top_k)
    weights = make_weights(spec, layout=phase.layouts(spec)["gate_up"])
    mine, theirs, _, _ = run_both(phase, spec, weights, step, acts)
    close(mine.x - acts["x"], theirs.x - acts["x"], BOUNDS[activation])


@pytest.mark.parametrize(
    ("phase", "activation"),
    [
        (TritonMoe(), "bf16"),
        (TritonMoe(), "int8"),
        (TritonMoe(), "fp8"),
        (TritonMoe(), "mxfp8"),
        (TritonMoe(), "mxfp4"),
        (TritonMoeSplit(), "fp8"),
        (TritonMoeSplit(), "mxfp8"),
    ],
)
@pytest.mark.parametrize("rows", [1, 5])
def test_moe(phase: Phase, activation: str, rows: int) -> None:
    """One row on four of eight experts, five on two of five each: some empty, some shared; K = 160 and 96 are no whole
    tiles."""
    if rows == 1:
        check(phase, activation, 1)
        return
    acts = activations(5, 160, 5, 2, seed=SOME_EMPTY)
    counts = acts["topk_ids"].flatten().bincount(minlength=5)
    assert counts.min() == 0
    assert counts.max() > 1
    check(phase, activation, 5, acts, experts=5, top_k=2)


@pytest.mark.parametrize(("kind", "activation"), [("bf16", "bf16"), ("bf16", "mxfp8"), ("q8", "bf16"), ("q8", "int8")])
@pytest.mark.parametrize("rows", [1, 5])
def test_experts_as_fine_tunes_have_them(kind: str, activation: str, rows: int) -> None:
    held = make_spec().formats | {"gate_up": kind, "down": kind}
    check(TritonMoe(), activation, rows, formats=held, hidden=192, intermediate=128)


def test_refused_experts() -> None:
    formats, sm90 = make_spec().formats, ARCHES["sm90"]
    mixed = make_spec(formats=formats | {"down": "q8"})
    assert "mxfp4 and q8" in (TritonMoe().refuse(mixed, sm90, Gates()) or "")
    narrow = make_spec(formats=formats | {"gate_up": "q8", "down": "q8"}, hidden=192, intermediate=96)
    assert "96" in (TritonMoe().refuse(narrow, sm90, Gates()) or "")
    half = make_spec(formats=formats | {"gate_up": "f16", "down": "f16"})
    assert "f16" in (TritonMoe().refuse(half, sm90, Gates()) or "")


@pytest.mark.parametrize("activation", ["bf16", "mxfp4"])
def test_all_tokens_on_one_expert(activation: str) -> None:
    acts = activations(20, 160, 8, 4)
    acts["topk_ids"][:] = torch.tensor([5, 5, 5, 5])  # a router cannot say this; a broken row may
    check(TritonMoe(), activation, 20, acts)


@pytest.mark.parametrize("tile", [pytest.param("64x128", marks=pytest.mark.slow), "128x128"])
@pytest.mark.parametrize(
    ("phase", "activation"), [(TritonMoe(), "bf16"), (TritonMoeSplit(), "mxfp8"), (TritonMoe(), "mxfp4")]
)
def test_tiles(phase: Phase, activation: str, tile: str) -> None:
    check(phase, activation, 6, tile=tile, experts=4)


@pytest.mark.parametrize("activation", ["bf16", "mxfp8", "mxfp4"])
def test_weights_as_the_m_operand(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on SM100, whose MMA wants 128 rows there."""
    monkeypatch.setattr(moe, "arch_of", lambda device: ARCHES["sm100"])
    check(TritonMoe(), activation, 3)


@pytest.mark.parametrize(("activation", "rows"), [("bf16", 3), ("mxfp8", 3), ("bf16", 40)])
def test_scales_by_bytes(activation: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on SM90."""
    monkeypatch.setattr(moe, "arch_of", lambda device: ARCHES["sm90"])
    check(TritonMoe(), activation, rows, experts=4)


def test_large_values_meet_the_clamp() -> None:
    acts = activations(5, 160, 8, 4)
    acts["h"] *= 30
    check(TritonMoe(), "bf16", 5, acts)


def test_a_row_of_nan_harms_itself_only() -> None:
    spec = make_spec()
    step = make_step(spec, [(0, 6)])
    acts = activations(6, spec.hidden, spec.experts, spec.top_k)
    weights = make_weights(spec)
    clean, _, _, _ = run_both(TritonMoe(), spec, weights, step, acts)
    broken = dict(acts) | {"h": acts["h"].clone()}
    broken["h"][2] = float("nan")
    mine, _, _, _ = run_both(TritonMoe(), spec, weights, step, broken)
    others = [0, 1, 3, 4, 5]
    assert mine.x[others].equal(clean.x[others])
