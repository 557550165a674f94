"""The expert MLP against the reference with the same quantisation points."""

from __future__ import annotations

import pytest
import torch

from halfbyte.kernels.triton import moe
from halfbyte.kernels.triton.moe import Moe, MoeSplit
from halfbyte.plan.phase import Phase
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
        (Moe(), "bf16"),
        (Moe(), "int8"),
        (Moe(), "fp8"),
        (Moe(), "mxfp8"),
        (Moe(), "mxfp4"),
        (MoeSplit(), "fp8"),
        (MoeSplit(), "mxfp8"),
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


@pytest.mark.parametrize("activation", ["bf16", "mxfp4"])
def test_all_tokens_on_one_expert(activation: str) -> None:
    acts = activations(20, 160, 8, 4)
    acts["topk_ids"][:] = torch.tensor([5, 5, 5, 5])  # a router cannot say this; a broken row may
    check(Moe(), activation, 20, acts)


@pytest.mark.parametrize("tile", [pytest.param("64x128", marks=pytest.mark.slow), "128x128"])
@pytest.mark.parametrize(("phase", "activation"), [(Moe(), "bf16"), (MoeSplit(), "mxfp8"), (Moe(), "mxfp4")])
def test_tiles(phase: Phase, activation: str, tile: str) -> None:
    check(phase, activation, 6, tile=tile, experts=4)


@pytest.mark.parametrize("activation", ["bf16", "mxfp8", "mxfp4"])
def test_weights_as_the_m_operand(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on SM100, whose MMA wants 128 rows there."""
    monkeypatch.setattr(moe, "capability_of", lambda device: (10, 0))
    check(Moe(), activation, 3)


@pytest.mark.parametrize(("activation", "rows"), [("bf16", 3), ("mxfp8", 3), ("bf16", 40)])
def test_scales_by_bytes(activation: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on SM90."""
    monkeypatch.setattr(moe, "capability_of", lambda device: (9, 0))
    check(Moe(), activation, rows, experts=4)


def test_large_values_meet_the_clamp() -> None:
    acts = activations(5, 160, 8, 4)
    acts["h"] *= 30
    check(Moe(), "bf16", 5, acts)


def test_a_row_of_nan_harms_itself_only() -> None:
    spec = make_spec()
    step = make_step(spec, [(0, 6)])
    acts = activations(6, spec.hidden, spec.experts, spec.top_k)
    weights = make_weights(spec)
    clean, _, _, _ = run_both(Moe(), spec, weights, step, acts)
    broken = dict(acts) | {"h": acts["h"].clone()}
    broken["h"][2] = float("nan")
    mine, _, _, _ = run_both(Moe(), spec, weights, step, broken)
    others = [0, 1, 3, 4, 5]
    assert mine.x[others].equal(clean.x[others])
