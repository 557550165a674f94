"""Marlin as a phase of ours: refused with its reasons where it cannot run; on a GPU with vLLM, the reference's sums."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from halfbyte import formats
from halfbyte.gates import Gates
from halfbyte.kernels.borrowed import vllm as borrowed
from halfbyte.kernels.borrowed.vllm import MarlinMoe, padded
from halfbyte.kernels.prove import default_spec
from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import ARCHES, Binding
from halfbyte.plan.reference import PHASES as REFERENCE

ASKED = Gates(moe_kernel="marlin")  # type: ignore[arg-type]


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    phase, spec, sm90 = MarlinMoe(), default_spec(), ARCHES["sm90"]
    monkeypatch.setattr(borrowed, "installed_version", lambda: "0.26.0")
    assert phase.refuse(spec, sm90, ASKED) is None
    assert phase.refuse(spec, ARCHES["sm121"], ASKED) is None
    assert phase.refuse(spec, sm90, Gates()) == "is taken where --moe-kernel asks for it"
    assert phase.refuse(spec, ARCHES["cpu"], ASKED) == "runs on a GPU"
    assert "not mxfp8" in str(phase.refuse(replace(spec, activation="mxfp8"), sm90, ASKED))
    assert "--tile 64x128" in str(phase.refuse(replace(spec, tile="64x128"), sm90, ASKED))
    assert "limit 7" in str(phase.refuse(replace(spec, swiglu_limit=5.0), sm90, ASKED))
    other = replace(spec, formats={**spec.formats, "down": "q8"})
    assert "down is q8" in str(phase.refuse(other, sm90, ASKED))
    monkeypatch.setattr(borrowed, "installed_version", lambda: None)
    assert "pip install vllm" in str(phase.refuse(spec, sm90, ASKED))


def test_padding_changes_no_number() -> None:
    m = formats.quantize(torch.randn((2, 6, 64), generator=torch.Generator().manual_seed(0)), "mxfp4")
    data, scales, bias = padded(m, torch.ones((2, 6)), 8, 128)
    assert (data.shape, scales.shape, bias.shape) == ((2, 8, 64), (2, 8, 4), (2, 8))
    wide = formats.dequantize(formats.MXTensor(data, scales, (2, 8, 128), "mxfp4"))
    assert torch.equal(wide[:, :6, :64], formats.dequantize(m))
    assert not wide[:, 6:].any()
    assert not wide[:, :, 64:].any()
    assert bias[:, 6:].eq(0).all()


@pytest.mark.gpu
@pytest.mark.vllm
def test_on_a_gpu() -> None:
    pytest.importorskip("vllm")
    spec, g = replace(default_spec(), experts=8), torch.Generator("cuda").manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, device="cuda", dtype=torch.bfloat16)

    weights: Any = SimpleNamespace(
        gate_up=formats.quantize(numbers(8, 5760, 2880).float() * 0.02, "mxfp4"), gate_up_bias=numbers(8, 5760),
        down=formats.quantize(numbers(8, 2880, 2880).float() * 0.02, "mxfp4"), down_bias=numbers(8, 2880),
    )  # fmt: skip
    acts = Activations(h=numbers(5, 2880), x=torch.zeros((5, 2880), device="cuda"))
    acts.topk_ids = torch.stack([torch.randperm(8, generator=g, device="cuda")[:4] for _ in range(5)]).int()
    acts.topk_weights = torch.full((5, 4), 0.25, device="cuda")
    binding = Binding(spec, weights, None, 0, (torch.zeros(0), 1.0), lambda: torch.zeros(0))
    step: Any = SimpleNamespace(rows=5)
    ours, wanted = acts.copy(), acts.copy()
    MarlinMoe().bind(binding)(step, ours)
    next(p for p in REFERENCE if p.covers == ("moe",)).bind(binding)(step, wanted)
    assert (ours.x - wanted.x).norm() <= 1e-2 * wanted.x.norm()
