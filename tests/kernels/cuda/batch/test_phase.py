"""The batch layer as a phase: what it refuses and why, and when a plan takes it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from halfbyte.gates import Gates, Layers
from halfbyte.kernels.cuda.attention.batch import LONGEST, PARTS_MAX, parts_bound
from halfbyte.kernels.cuda.batch.fused_phase import PHASES as FUSED_PHASES
from halfbyte.kernels.cuda.batch.phase import PHASES, PendingBatchExperts
from halfbyte.model.config import NAMED
from halfbyte.model.gpt_oss import CHECKPOINT_FORMATS, choose, formats_after, spec_of
from halfbyte.plan.phase import ARCHES, Spec

ALL = Gates(layers=Layers("mxfp4", "mxfp4", "mxfp4", "mxfp4"))
(PHASE, HEAD, _), FUSED = PHASES, FUSED_PHASES[0]


def spec(gates: Gates = ALL, **changes: object) -> Spec:
    base = spec_of(NAMED["120b"], gates, ARCHES["sm90"], formats_after(NAMED["120b"], gates, CHECKPOINT_FORMATS))
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["20b", "120b"])
@pytest.mark.parametrize("dense", ["mxfp4", "q8", "checkpoint"])
def test_a_plan_takes_it_for_batches(model: str, dense: str) -> None:
    gates = Gates(layers=Layers("mxfp4", dense, dense, dense))
    selection = choose(NAMED[model], gates, ARCHES["sm90"]).selection
    assert selection.chosen["batch"] == ("cuda.embed", "cuda.batch_layer_fused", "cuda.batch_norm_lm_head")
    assert selection.chosen["decode"] == ("cuda.decode_step",)
    assert not [name for name in selection.chosen["prefill"] if "batch" in name]


def test_knows_every_feature() -> None:
    assert not spec().features_of(PHASE.covers) - PHASE.knows


@pytest.mark.parametrize(
    ("arch", "changes", "reason"),
    [
        ("sm100", {}, "is written for sm8x, sm90 and sm12x"),
        ("sm90", {"activation": "mxfp8"}, "bf16 activations"),
        ("sm90", {"intermediate": 2912}, "multiples of 64"),
        ("sm90", {"hidden": 4160}, "up to 4096"),
        ("sm90", {"top_k": 9}, "up to 8"),
        ("sm90", {"experts": 120}, "16 to 512"),
        ("sm90", {"tile": "128x128"}, "one tile"),
        ("sm90", {"formats": CHECKPOINT_FORMATS | {"qkv": "f16"}}, "qkv is f16"),
        ("sm90", {"head_dim": 48}, "head_dim"),
    ],
)
def test_refusals(arch: str, changes: dict[str, object], reason: str) -> None:
    refusal = PHASE.refuse(spec(**changes), ARCHES[arch], ALL)
    assert refusal is not None
    assert reason in refusal


def test_the_attention_of_a_batch_follows_its_gates() -> None:
    for gates, phase in (
        (replace(ALL, attention="cuda"), "cuda.batch_layer_fused"),
        (replace(ALL, attention="triton"), "cuda.batch_layer"),
        (replace(ALL, kv_dtype="fp8"), "cuda.batch_layer"),
    ):
        selection = choose(NAMED["120b"], gates, ARCHES["sm90"]).selection
        assert phase in selection.chosen["batch"]


def test_the_head_refuses_what_its_rows_cannot_be() -> None:
    assert HEAD.refuse(spec(), ARCHES["sm90"], ALL) is None
    assert "up to 4096" in str(HEAD.refuse(spec(hidden=4160), ARCHES["sm90"], ALL))
    assert "sm90" in str(HEAD.refuse(spec(), ARCHES["sm120"], ALL))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_dim": 128}, "heads of 64"),
        ({"page_size": 16}, "pages of 64"),
        ({"kv_heads": 4}, "8 query heads"),
        ({"max_context": 131073}, "131073"),
    ],
)
def test_refusals_of_the_fused_attention(changes: dict[str, object], reason: str) -> None:
    refusal = FUSED.refuse(spec(**changes), ARCHES["sm90"], replace(ALL, attention="cuda"))
    assert refusal is not None
    assert reason in refusal


def test_contexts_that_are_not_refused_fit_the_parts() -> None:
    assert FUSED.refuse(spec(max_context=LONGEST), ARCHES["sm90"], replace(ALL, attention="cuda")) is None
    assert all(parts_bound(length, window) <= PARTS_MAX for length in (1, 4096, 32769, LONGEST) for window in (0, 128))
    assert parts_bound(LONGEST + 1, 0) > PARTS_MAX


def test_the_whole_of_x_has_the_experts_of_its_row() -> None:
    x, weights, parts = torch.randn(3, 8), torch.rand(3, 4), torch.randn(64 * 4, 8)
    expected = torch.stack([x[r] + sum(weights[r, k] * parts[4 * r + k] for k in range(4)) for r in range(3)])
    assert torch.allclose(PendingBatchExperts(x, weights, parts).complete(), expected)


def test_eagle3_decodes_with_the_step_that_writes_its_taps() -> None:
    selection = choose(NAMED["120b"], replace(ALL, speculate="eagle3"), ARCHES["sm90"]).selection
    assert selection.chosen["decode"] == ("cuda.tapped_decode_step",)
    (refusal,) = (r for r in selection.refusals if r.phase == "cuda.decode_step" and r.regime == "decode")
    assert "EAGLE-3" in refusal.reason
    assert "cuda.tapped_decode_step" in refusal.reason
    plain = choose(NAMED["120b"], ALL, ARCHES["sm90"]).selection
    (refusal,) = (r for r in plain.refusals if r.phase == "cuda.tapped_decode_step" and r.regime == "decode")
    assert "EAGLE-3" in refusal.reason
