"""FlashInfer's kernels as phases of ours: refused with their reasons where they cannot run, called as FlashInfer says.

Without a GPU a stand-in computes what FlashInfer's documentation promises of the same arguments, so that tables, pages,
windows, the order of gate and up and every layout are held against the reference; on a GPU FlashInfer itself does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte import formats
from halfbyte.formats import MXTensor
from halfbyte.gates import Gates
from halfbyte.kernels.borrowed import flashinfer_moe
from halfbyte.kernels.borrowed.flashinfer_attention import FlashInferAttention
from halfbyte.kernels.borrowed.flashinfer_moe import CutlassMoe
from halfbyte.kernels.prove import default_spec
from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import ARCHES, Binding, Spec
from halfbyte.plan.reference import PHASES as REFERENCE
from halfbyte.plan.step import Step

PAGE, DIM, HEADS, KV_HEADS = 16, 64, 16, 2
SPEC = replace(default_spec(), heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, page_size=PAGE, window=20)
ASKED = Gates(attention="flashinfer", graphs="off")
LENGTHS = ((37, 1), (0, 19), (90, 3), (15, 1))


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_attention_refuses() -> None:
    phase, sm90 = FlashInferAttention(), ARCHES["sm90"]
    assert phase.refuse(SPEC, sm90, ASKED) is None
    assert phase.refuse(SPEC, ARCHES["sm121"], ASKED) is None
    assert phase.refuse(SPEC, sm90, Gates()) == "is taken where --attention asks for it"
    assert phase.refuse(SPEC, ARCHES["cpu"], ASKED) == "runs on a GPU"
    assert "add --enforce-eager" in str(phase.refuse(SPEC, sm90, Gates(attention="flashinfer")))
    assert "not fp8" in str(phase.refuse(replace(SPEC, kv_dtype="fp8"), sm90, ASKED))
    assert "not 80" in str(phase.refuse(replace(SPEC, head_dim=80), sm90, ASKED))


def test_experts_refuse() -> None:
    phase, spec, sm90, sm121 = CutlassMoe(), default_spec(), ARCHES["sm90"], ARCHES["sm121"]
    asked = Gates(moe_kernel="cutlass")  # type: ignore[arg-type]
    eight = replace(spec, activation="mxfp8")
    assert phase.refuse(spec, sm90, asked) is None
    assert phase.refuse(eight, sm121, asked) is None
    assert phase.refuse(spec, sm90, Gates()) == "is taken where --moe-kernel asks for it"
    assert phase.refuse(spec, ARCHES["cpu"], asked) == "runs on a GPU"
    assert "written for sm90, not sm121" in str(phase.refuse(spec, sm121, asked))
    assert "which sm90 has not" in str(phase.refuse(eight, sm90, asked))
    assert "not mxfp4" in str(phase.refuse(replace(spec, activation="mxfp4"), sm121, asked))
    assert "--tile 64x128" in str(phase.refuse(replace(spec, tile="64x128"), sm90, asked))
    other = replace(spec, formats={**spec.formats, "down": "q8"})
    assert "down is q8" in str(phase.refuse(other, sm90, asked))


# ---- attention -------------------------------------------------------------------------------------------------------


class Wrapper:
    """What FlashInfer says of its wrapper: pages of HND keys and values, a table in rows, a window without the row."""

    made: list[dict[str, Any]] = []
    plans = 0

    def __init__(self, workspace: Tensor, **how: Any) -> None:
        Wrapper.made.append(how)

    def plan(self, starts: Tensor, pages_at: Tensor, pages: Tensor, last: Tensor, *sizes: int, **how: Any) -> None:
        Wrapper.plans += 1
        assert sizes == (HEADS, KV_HEADS, DIM, PAGE)
        assert how["causal"]
        assert {t.dtype for t in (starts, pages_at, pages, last)} == {torch.int32}  # read as such, unasked
        self.table, self.window = (
            (starts.tolist(), pages_at.tolist(), pages.tolist(), last.tolist()),
            how["window_left"],
        )

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], sinks: Tensor, scale: float) -> Tensor:
        assert (q.dtype, sinks.dtype, type(scale)) == (torch.bfloat16, torch.float32, float)  # read as such, unasked
        assert all(part.dtype == torch.bfloat16 and part.stride(-1) == 1 for part in kv)
        starts, pages_at, pages, last = self.table
        out = torch.empty_like(q)
        for s in range(len(last)):
            mine = pages[pages_at[s] : pages_at[s + 1]]
            length = (len(mine) - 1) * PAGE + last[s]
            k, v = (torch.cat([part[p].transpose(0, 1) for p in mine])[:length].float() for part in kv)
            rows = range(starts[s], starts[s + 1])
            for i in rows:
                at = length - len(rows) + i - starts[s]
                first = 0 if self.window < 0 else max(0, at - self.window)
                for head in range(HEADS):
                    group = head * KV_HEADS // HEADS
                    scores = k[first : at + 1, group] @ q[i, head].float() * scale
                    weights = torch.softmax(torch.cat([scores, sinks[head : head + 1]]), 0)[:-1]
                    out[i, head] = (weights @ v[first : at + 1, group]).to(out.dtype)
        return out


def attention_case(lengths: Sequence[tuple[int, int]], device: str = "cpu") -> tuple[Step, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    rows, blocks = sum(n for _, n in lengths), max(-(-(c + n) // PAGE) for c, n in lengths)
    pages = torch.randperm(len(lengths) * blocks, generator=g).view(len(lengths), blocks).to(torch.int32) + 1
    pool = torch.randn((len(lengths) * blocks + 1, 3, 2, KV_HEADS, PAGE, DIM), generator=g).bfloat16()
    starts = torch.tensor([0, *torch.tensor([n for _, n in lengths]).cumsum(0)], dtype=torch.int32)
    step = Step(
        tokens=torch.zeros(rows, dtype=torch.int32, device=device),
        positions=torch.cat([torch.arange(c, c + n, dtype=torch.int32) for c, n in lengths]).to(device),
        query_start=starts.to(device), kv_lens=torch.tensor([c + n for c, n in lengths], dtype=torch.int32).to(device),
        row_sequence=torch.cat([torch.full((n,), i, dtype=torch.int32) for i, (_, n) in enumerate(lengths)]).to(device),
        block_tables={"full": pages.to(device), "sliding": pages.to(device)}, logit_rows=(starts[1:] - 1).to(device),
        max_kv_len=max(c + n for c, n in lengths),
    )  # fmt: skip
    q = (torch.randn((rows, HEADS, DIM), generator=g) * 2).bfloat16()
    return step, pool.to(device), q.to(device), torch.randn(HEADS, generator=g).bfloat16().to(device)


def attend(kind: str, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """(FlashInfer's, the reference's) for two layers of a kind, whose pages lie beside each other."""
    step, pool, q, sinks = attention_case(LENGTHS, device)
    buffers: dict[str, Tensor] = {}
    ours, wanted = Activations(q=q), Activations(q=q.float())
    reference = next(p for p in REFERENCE if p.covers == ("attention",))
    found = []
    for layer in (0, 2):
        weights = SimpleNamespace(sinks=sinks)
        binding = Binding(SPEC, weights, kind, layer, (torch.zeros(0), 1.0), lambda: pool, buffers)
        FlashInferAttention().bind(binding)(step, ours)
        reference.bind(binding)(step, wanted)
        found.append((ours.attn.float(), wanted.attn.float()))
    return torch.cat([a for a, _ in found]), torch.cat([b for _, b in found])


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_attention_is_called_as_flashinfer_says(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("flashinfer")
    module.BatchAttentionWithAttentionSinkWrapper = Wrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(Wrapper, "made", [])
    monkeypatch.setattr(Wrapper, "plans", 0)
    ours, wanted = attend(kind)
    assert (ours - wanted).norm() <= 1e-2 * wanted.norm()
    assert Wrapper.plans == 1  # of both layers of the step
    (made,) = Wrapper.made
    assert (made["kv_layout"], made["backend"], made["head_dim_qk"]) == ("HND", "fa2", DIM)
    assert made["window_left"] == (SPEC.window - 1 if kind == "sliding" else -1)


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_attention_on_a_gpu(kind: str) -> None:
    pytest.importorskip("flashinfer")
    ours, wanted = attend(kind, "cuda")
    assert torch.isfinite(ours).all()
    assert (ours - wanted).norm() <= 1e-2 * wanted.norm()


# ---- experts ---------------------------------------------------------------------------------------------------------


def experts_case(device: str, hidden: int, inner: int, experts: int = 8) -> tuple[Spec, Any, Activations]:
    spec = replace(default_spec(), experts=experts, hidden=hidden, intermediate=inner)
    g = torch.Generator(device).manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=device, dtype=torch.bfloat16)

    weights = SimpleNamespace(
        gate_up=formats.quantize(numbers(experts, 2 * inner, hidden).float() * 0.05, "mxfp4"),
        gate_up_bias=numbers(experts, 2 * inner), down_bias=numbers(experts, hidden),
        down=formats.quantize(numbers(experts, hidden, inner).float() * 0.05, "mxfp4"),
    )  # fmt: skip
    acts = Activations(h=numbers(5, hidden), x=torch.zeros((5, hidden), device=device))
    acts.topk_ids = torch.stack([torch.randperm(experts, generator=g, device=device)[:4] for _ in range(5)]).int()
    acts.topk_weights = torch.full((5, 4), 0.25, device=device)
    return spec, weights, acts


def multiply(device: str, hidden: int, inner: int) -> tuple[Tensor, Tensor]:
    spec, weights, acts = experts_case(device, hidden, inner)
    binding = Binding(spec, weights, None, 0, (torch.zeros(0), 1.0), lambda: torch.zeros(0))
    step: Any = SimpleNamespace(rows=5)
    ours, wanted = acts.copy(), acts.copy()
    CutlassMoe().bind(binding)(step, ours)
    next(p for p in REFERENCE if p.covers == ("moe",)).bind(binding)(step, wanted)
    return ours.x, wanted.x.float()


def cutlass_fused_moe(x: Tensor, ids: Tensor, scales: Tensor, **given: Any) -> None:
    """What FlashInfer says of it: up before gate, (up + beta) * gate * sigmoid(alpha * gate), both clamped."""
    rows = given["fc1_expert_weights"].shape[1]
    first, second = (
        formats.dequantize(MXTensor(w, s, (*w.shape[:2], w.shape[2] * 2), "mxfp4"))
        for w, s in zip((given["fc1_expert_weights"], given["fc2_expert_weights"]), given["quant_scales"], strict=True)
    )
    assert given["use_w4_group_scaling"]
    assert (x.dtype, ids.dtype, scales.dtype) == (torch.bfloat16, torch.int32, torch.float32)
    assert {given[f"fc{n}_expert_biases"].dtype for n in (1, 2)} == {torch.bfloat16} == {given["output_dtype"]}
    assert {given[f"swiglu_{name}"].dtype for name in ("alpha", "beta", "limit")} == {torch.float32}
    assert rows == 4 * given["fc2_expert_weights"].shape[2]
    assert given["output"].shape == x.shape
    for row in range(x.shape[0]):
        total = torch.zeros(x.shape[1])
        for e, scale in zip(ids[row].tolist(), scales[row].tolist(), strict=True):
            up, gate = (first[e] @ x[row].float() + given["fc1_expert_biases"][e].float()).split(rows // 2)
            limit = given["swiglu_limit"][e]
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            inner = gate * torch.sigmoid(given["swiglu_alpha"][e] * gate) * (up + given["swiglu_beta"][e])
            total += scale * (second[e] @ inner + given["fc2_expert_biases"][e].float())
        given["output"][row] = total.to(torch.bfloat16)


def interleave_weights(w: Tensor, kind: str) -> Tensor:
    """What FlashInfer's kernel asks of them; its order of bytes stands aside."""
    assert (kind, w.dtype, w.dim()) == ("fp4", torch.uint8, 3)
    assert w.shape[1] % 16 == 0
    assert w.shape[2] % 32 == 0
    return w


def interleave_scales(s: Tensor) -> Tensor:
    assert (s.dtype, s.dim()) == (torch.uint8, 3)
    assert s.shape[1] % 64 == 0
    assert s.shape[2] % 4 == 0
    return s


def test_experts_are_called_as_flashinfer_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Widths that must be padded."""
    parent, module = ModuleType("flashinfer"), ModuleType("flashinfer.fused_moe")
    vars(module).update(
        cutlass_fused_moe=cutlass_fused_moe,
        interleave_moe_weights_for_sm90_mixed_gemm=interleave_weights,
        interleave_moe_scales_for_sm90_mixed_gemm=interleave_scales,
    )
    monkeypatch.setitem(sys.modules, "flashinfer", parent)
    monkeypatch.setitem(sys.modules, "flashinfer.fused_moe", module)
    ours, wanted = multiply("cpu", 160, 96)
    assert (ours - wanted).norm() <= 1e-2 * wanted.norm()


def test_up_stands_before_gate() -> None:
    m = formats.quantize(torch.randn((2, 6, 64), generator=torch.Generator().manual_seed(0)), "mxfp4")
    bias = torch.arange(12.0).view(2, 6)
    parted, parted_bias = flashinfer_moe.up_before_gate(m, bias, 4)
    whole = formats.dequantize(m)
    found = formats.dequantize(parted)
    assert torch.equal(found[:, :3], whole[:, 1::2])
    assert torch.equal(found[:, 4:7], whole[:, ::2])
    assert not found[:, 3].any()
    assert parted_bias[0].tolist() == [1.0, 3.0, 5.0, 0.0, 0.0, 2.0, 4.0, 0.0]


@pytest.mark.gpu
@pytest.mark.vllm
@pytest.mark.slow
def test_experts_on_a_gpu() -> None:
    """FlashInfer compiles this kernel for ten minutes and more, the first time."""
    pytest.importorskip("flashinfer")
    ours, wanted = multiply("cuda", 2880, 2880)
    assert (ours - wanted).norm() <= 2e-2 * wanted.norm()
