"""vLLM's Marlin as a phase of our own engine: the expert MLP, where vLLM is installed beside us with its CUDA kernels.

W4A16: MXFP4 weights, bf16 activations. Marlin wants widths in multiples of 256 and 128, so weights are padded with
zeros and repacked once, when it is bound; that is a second copy of the experts. Taken only where `--moe-kernel marlin`
asks for it. Written for vLLM 0.26 and 0.32; this project has not run it on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from halfbyte.formats import MXTensor
from halfbyte.gates import Gates
from halfbyte.plan.activations import Activations
from halfbyte.plan.launches import KernelImage, launched
from halfbyte.plan.phase import Arch, Binding, Launch, Phase, Spec
from halfbyte.plan.record import Declared
from halfbyte.plan.step import Step

HIDDEN, INNER = 256, 128  # multiples that Marlin's tiles need
KERNEL = "vllm: fused_marlin_moe"


def installed_version() -> str | None:
    """vLLM's for GPUs, if it is there: the one for CPUs has another name. Importing it would take seconds."""
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return None


class MarlinMoe(Phase):
    name, covers, category = "borrowed.marlin_moe", ("moe",), "moe"
    backends = {"moe": "marlin"}
    knows = frozenset({"bias", "clamped_swiglu", "interleaved_gate_up"})

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        if "marlin" not in gates.moe_kernel:
            return "is taken where --moe-kernel asks for it"
        if not arch.is_gpu:
            return "runs on a GPU"
        for role in ("gate_up", "down"):
            if spec.formats[role] != "mxfp4":
                return f"multiplies mxfp4 weights, and {role} is {spec.formats[role]}"
        if spec.activation != "bf16":
            return f"multiplies bf16 activations, not {spec.activation}"
        if spec.tile != "auto":
            return f"chooses its tiles itself, not as --tile {spec.tile} says"
        if (spec.swiglu_limit, round(spec.swiglu_alpha, 3)) != (7.0, 1.702):
            return "has gpt-oss's swiglu built in: limit 7 and alpha 1.702"
        if installed_version() is None:
            return "needs vLLM with its CUDA kernels, which is not installed here (pip install vllm)"
        return None

    def declares(self, spec: Spec, arch: Arch) -> Iterable[Declared]:
        return (Declared(KERNEL, frozenset({installed_version() or ""})),)

    def bind(self, b: Binding) -> Launch:
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
        from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import prepare_moe_mxfp4_layer_for_marlin
        from vllm.scalar_type import scalar_types

        s, w = b.spec, b.weights
        hidden, inner = -(-s.hidden // HIDDEN) * HIDDEN, -(-s.intermediate // INNER) * INNER
        w13, s13, bias13 = padded(w.gate_up, w.gate_up_bias, 2 * inner, hidden)
        w2, s2, bias2 = padded(w.down, w.down_bias, hidden, inner)
        layer: Any = SimpleNamespace(params_dtype=torch.bfloat16)
        w13, w2, s13, s2, bias13, bias2 = prepare_moe_mxfp4_layer_for_marlin(layer, w13, w2, s13, s2, bias13, bias2)
        image = KernelImage(KERNEL, installed_version() or "", loaded=False)

        def launch(step: Step, acts: Activations) -> None:
            launched(image)
            y = fused_marlin_moe(
                pad(acts.h.to(torch.bfloat16), (0, hidden - s.hidden)), w13, w2, bias13, bias2, s13, s2,
                acts.topk_weights.float(), acts.topk_ids.int(), quant_type_id=scalar_types.float4_e2m1f.id,
                global_num_experts=s.experts, activation=MoEActivation.SWIGLUOAI,
            )  # fmt: skip
            acts.x = acts.x + y[:, : s.hidden].float()

        return launch


def padded(m: MXTensor, bias: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """(data, scales, bias) with zeros up to so many rows and columns: a zero times any scale adds nothing."""
    more = rows - m.shape[-2]
    data = pad(m.data, (0, (columns - m.shape[-1]) // 2, 0, more))
    scales = pad(m.scales, (0, (columns - m.shape[-1]) // 32, 0, more))
    return data.contiguous(), scales.contiguous(), pad(bias, (0, more)).contiguous()


PHASES: tuple[Phase, ...] = (MarlinMoe(),)
