"""FlashInfer's CUTLASS experts as a phase of our own engine: `cutlass_fused_moe` over MXFP4 weights.

bf16 activations on SM90, where weights and scales are interleaved for its mixed product; mxfp8 activations on SM12x,
block-scaled. Weights are padded and laid out once, when they are bound: a second copy of the experts. FlashInfer
compiles the kernel when it is first asked for it, which takes many minutes, unless flashinfer-jit-cache brings it.
Taken only where `--moe-kernel cutlass` asks for it. Right on an H200 (bf16); mxfp8 has run nowhere yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from halfbyte.formats import MXTensor
from halfbyte.gates import Gates
from halfbyte.kernels.borrowed.package import FLASHINFER
from halfbyte.kernels.borrowed.vllm import padded, up_to
from halfbyte.plan.activations import Activations
from halfbyte.plan.launches import KernelImage, launched
from halfbyte.plan.phase import Arch, Binding, Launch, Phase, Spec
from halfbyte.plan.record import Declared
from halfbyte.plan.step import Step

WIDTH = 128  # a multiple that its tiles need, of hidden and of the experts' width
KERNEL = "flashinfer: cutlass_fused_moe"


class CutlassMoe(Phase):
    name, covers, category = "borrowed.cutlass_moe", ("moe",), "moe"
    backends = {"moe": "cutlass"}
    knows = frozenset({"bias", "clamped_swiglu", "interleaved_gate_up"})

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        if "cutlass" not in gates.moe_kernel:
            return "is taken where --moe-kernel asks for it"
        if not arch.is_gpu:
            return "runs on a GPU"
        for role in ("gate_up", "down"):
            if spec.formats[role] != "mxfp4":
                return f"multiplies mxfp4 weights, and {role} is {spec.formats[role]}"
        if spec.activation not in ("bf16", "mxfp8"):
            return f"multiplies bf16 or mxfp8 activations, not {spec.activation}"
        if spec.activation == "bf16" and "wgmma" not in arch.features:
            return f"its product with bf16 activations is written for sm90, not {arch.name}; use --activation mxfp8"
        if spec.activation == "mxfp8" and "block_scaled" not in arch.features:
            return (
                f"its product with mxfp8 activations is block-scaled, which {arch.name} has not; use --activation bf16"
            )
        if spec.tile != "auto":
            return f"chooses its tiles itself, not as --tile {spec.tile} says"
        return FLASHINFER.refuse(arch)

    def declares(self, spec: Spec, arch: Arch) -> Iterable[Declared]:
        return (Declared(KERNEL, frozenset({FLASHINFER.version() or ""})),)

    def bind(self, b: Binding) -> Launch:
        from flashinfer.fused_moe import cutlass_fused_moe

        s, w = b.spec, b.weights
        hidden, inner = up_to(s.hidden, WIDTH), up_to(s.intermediate, WIDTH)
        gate_up = padded(*up_before_gate(w.gate_up, w.gate_up_bias, inner), 2 * inner, hidden)
        down = padded(w.down, w.down_bias, hidden, inner)
        device = gate_up[0].device

        def per_expert(value: float) -> Tensor:
            return torch.full((s.experts,), value, dtype=torch.float32, device=device)

        common: dict[str, Any] = {
            "fc1_expert_biases": gate_up[2].to(torch.bfloat16),
            "fc2_expert_biases": down[2].to(torch.bfloat16),
            "swiglu_alpha": per_expert(s.swiglu_alpha),
            "swiglu_beta": per_expert(1.0),
            "swiglu_limit": per_expert(s.swiglu_limit),
        }
        mixed = s.activation == "bf16"
        common |= mixed_weights(gate_up, down) if mixed else block_scaled_weights(gate_up, down, per_expert(1.0))
        image = KernelImage(KERNEL, FLASHINFER.version() or "", loaded=False)

        def launch(step: Step, acts: Activations) -> None:
            launched(image)
            x = pad(acts.h.to(torch.bfloat16), (0, hidden - s.hidden))
            out = torch.empty_like(x)
            scales = None
            if not mixed:
                from flashinfer import mxfp8_quantize

                x, scales = mxfp8_quantize(x, True, 32)
            cutlass_fused_moe(
                x,
                acts.topk_ids.int(),
                acts.topk_weights.float(),
                output_dtype=torch.bfloat16,
                input_sf=scales,
                output=out,
                **common,
            )
            acts.x = acts.x + out[:, : s.hidden].float()

        return launch


def up_before_gate(m: MXTensor, bias: Tensor, inner: int) -> tuple[MXTensor, Tensor]:
    """Rows gate 0, up 0, gate 1, up 1, … as all of up and then all of gate, each with zeros up to `inner` rows."""

    def parted(t: Tensor) -> Tensor:
        halves = (t[:, 1::2], t[:, ::2])
        more = inner - halves[0].shape[1]
        return torch.cat([pad(half, (0, 0, 0, more) if t.dim() == 3 else (0, more)) for half in halves], 1)

    experts, _, columns = m.shape
    return MXTensor(parted(m.data), parted(m.scales), (experts, 2 * inner, columns), m.format), parted(bias)


def mixed_weights(gate_up: tuple[Tensor, ...], down: tuple[Tensor, ...]) -> dict[str, Any]:
    """For bf16 activations on SM90."""
    from flashinfer.fused_moe import (
        interleave_moe_scales_for_sm90_mixed_gemm,
        interleave_moe_weights_for_sm90_mixed_gemm,
    )

    w1, w2 = (interleave_moe_weights_for_sm90_mixed_gemm(part[0], "fp4") for part in (gate_up, down))
    scales = [interleave_moe_scales_for_sm90_mixed_gemm(part[1]) for part in (gate_up, down)]
    return {"fc1_expert_weights": w1, "fc2_expert_weights": w2, "quant_scales": scales, "use_w4_group_scaling": True}


def block_scaled_weights(gate_up: tuple[Tensor, ...], down: tuple[Tensor, ...], ones: Tensor) -> dict[str, Any]:
    """For mxfp8 activations on SM12x."""
    from flashinfer import block_scale_interleave

    s1, s2 = (block_scale_interleave(part[1]).reshape(part[1].shape).view(torch.int32) for part in (gate_up, down))
    return {
        "fc1_expert_weights": gate_up[0].view(torch.long),
        "fc2_expert_weights": down[0].view(torch.long),
        "quant_scales": [s1, ones, s2, ones],
        "use_mxfp8_act_scaling": True,
    }


PHASES: tuple[Phase, ...] = (CutlassMoe(),)
