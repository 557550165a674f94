"""Marlin as a phase of ours: refused with its reasons where it cannot run; on a GPU with vLLM, the reference's sums."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from halfbyte import formats
from halfbyte.gates import Gates
from halfbyte.kernels.borrowed.vllm import MarlinHead, MarlinMoe, MarlinOut, MarlinQkv, padded
from halfbyte.kernels.prove import default_spec
from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import ARCHES, Binding
from halfbyte.plan.reference import PHASES as REFERENCE

ASKED = Gates(moe_kernel="marlin")  # type: ignore[arg-type]


def test_refusals() -> None:
    phase, spec, sm90 = MarlinMoe(), default_spec(), ARCHES["sm90"]
    assert phase.refuse(spec, sm90, ASKED) is None
    assert phase.refuse(spec, ARCHES["sm121"], ASKED) is None
    assert phase.refuse(spec, sm90, Gates()) == "is taken where --moe-kernel asks for it"
    assert phase.refuse(spec, ARCHES["cpu"], ASKED) == "runs on a GPU"
    assert "not mxfp8" in str(phase.refuse(replace(spec, activation="mxfp8"), sm90, ASKED))
    assert "--tile 64x128" in str(phase.refuse(replace(spec, tile="64x128"), sm90, ASKED))
    assert "limit 7" in str(phase.refuse(replace(spec, swiglu_limit=5.0), sm90, ASKED))
    other = replace(spec, formats={**spec.formats, "down": "q8"})
    assert "down is q8" in str(phase.refuse(other, sm90, ASKED))


def test_dense_layers_are_taken_in_mxfp4_alone() -> None:
    spec, sm90 = default_spec(), ARCHES["sm90"]
    asked = Gates(linear_kernel="marlin", layers="all")  # type: ignore[arg-type]
    packed = replace(spec, formats={**spec.formats, "qkv": "mxfp4", "o": "mxfp4", "lm_head": "mxfp4"})
    plain = replace(spec, formats={**spec.formats, "qkv": "bf16", "o": "bf16", "lm_head": "bf16"})
    for phase in (MarlinQkv(), MarlinOut(), MarlinHead()):
        assert phase.refuse(packed, sm90, asked) is None
        assert phase.refuse(packed, sm90, Gates()) == "is taken where --linear-kernel asks for it"
        assert "is bf16" in str(phase.refuse(plain, sm90, asked))
        assert "not int8" in str(phase.refuse(replace(packed, activation="int8"), sm90, asked))


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
def test_experts_on_a_gpu() -> None:
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


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.parametrize("rows", [1, 5, 100])
def test_dense_layers_on_a_gpu(rows: int) -> None:
    pytest.importorskip("vllm")
    spec, g = replace(default_spec(), vocab=4096), torch.Generator("cuda").manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, device="cuda", dtype=torch.bfloat16)

    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    weights: Any = SimpleNamespace(
        qkv=formats.quantize(numbers(q + 2 * kv, spec.hidden).float() * 0.02, "mxfp4"), qkv_bias=numbers(q + 2 * kv),
        o=formats.quantize(numbers(spec.hidden, q).float() * 0.02, "mxfp4"), o_bias=numbers(spec.hidden),
        lm_head=formats.quantize(numbers(spec.vocab, spec.hidden).float() * 0.02, "mxfp4"),
    )  # fmt: skip
    acts = Activations(h=numbers(rows, spec.hidden), attn=numbers(rows, q), x=numbers(rows, spec.hidden).float())
    binding = Binding(spec, weights, None, 0, (torch.zeros(0), 1.0), lambda: torch.zeros(0))
    step: Any = SimpleNamespace(rows=rows)
    for phase, fields in ((MarlinQkv(), ("q", "k", "v")), (MarlinOut(), ("x",)), (MarlinHead(), ("logits",))):
        ours, wanted = acts.copy(), acts.copy()
        phase.bind(binding)(step, ours)
        next(p for p in REFERENCE if p.covers == phase.covers).bind(binding)(step, wanted)
        for name in fields:
            mine, theirs = getattr(ours, name).float(), getattr(wanted, name).float()
            assert (mine - theirs).norm() <= 1e-2 * theirs.norm(), (phase.name, name)
