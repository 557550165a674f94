"""vLLM's Marlin as phases of our own engine, where vLLM is installed beside us: the expert MLP, and dense layers.

W4A16: MXFP4 weights, bf16 activations. Marlin wants widths in multiples of its tiles, so weights are padded with zeros
and repacked once, when they are bound; that is a second copy of them. Taken only where `--moe-kernel marlin` or
`--linear-kernel marlin` asks for it. Written for vLLM 0.26 and 0.32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from halfbyte.formats import MXTensor
from halfbyte.gates import Gates
from halfbyte.kernels.borrowed.package import VLLM
from halfbyte.plan.activations import Activations
from halfbyte.plan.launches import KernelImage, launched
from halfbyte.plan.phase import ROLES, Arch, Binding, Launch, Phase, Spec
from halfbyte.plan.record import Declared
from halfbyte.plan.step import Step

HIDDEN, INNER = 256, 128  # multiples that the experts' tiles need
MOE, LINEAR = "vllm: fused_marlin_moe", "vllm: marlin_gemm"


def refuse_marlin(phase: Phase, spec: Spec, arch: Arch, selected: bool, flag: str) -> str | None:
    """What both kernels refuse."""
    if not selected:
        return f"is taken where {flag} asks for it"
    if not arch.is_gpu:
        return "runs on a GPU"
    for role in ROLES[phase.covers[0]]:
        if spec.formats[role] != "mxfp4":
            return f"multiplies mxfp4 weights, and {role} is {spec.formats[role]}"
    if spec.activation != "bf16":
        return f"multiplies bf16 activations, not {spec.activation}"
    return VLLM.refuse(arch)


class MarlinMoe(Phase):
    name, covers, category = "borrowed.marlin_moe", ("moe",), "moe"
    backends = {"moe": "marlin"}
    knows = frozenset({"bias", "clamped_swiglu", "interleaved_gate_up"})

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        reason = refuse_marlin(self, spec, arch, "marlin" in gates.moe_kernel, "--moe-kernel")
        if reason is not None:
            return reason
        if spec.tile != "auto":
            return f"chooses its tiles itself, not as --tile {spec.tile} says"
        if (spec.swiglu_limit, round(spec.swiglu_alpha, 3)) != (7.0, 1.702):
            return "has gpt-oss's swiglu built in: limit 7 and alpha 1.702"
        return None

    def declares(self, spec: Spec, arch: Arch) -> Iterable[Declared]:
        return (Declared(MOE, frozenset({VLLM.version() or ""})),)

    def bind(self, b: Binding) -> Launch:
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
        from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import prepare_moe_mxfp4_layer_for_marlin
        from vllm.scalar_type import scalar_types

        s, w = b.spec, b.weights
        hidden, inner = up_to(s.hidden, HIDDEN), up_to(s.intermediate, INNER)
        w13, s13, bias13 = padded(w.gate_up, w.gate_up_bias, 2 * inner, hidden)
        w2, s2, bias2 = padded(w.down, w.down_bias, hidden, inner)
        layer: Any = SimpleNamespace(params_dtype=torch.bfloat16)
        w13, w2, s13, s2, bias13, bias2 = prepare_moe_mxfp4_layer_for_marlin(layer, w13, w2, s13, s2, bias13, bias2)
        image = KernelImage(MOE, VLLM.version() or "", loaded=False)

        def launch(step: Step, acts: Activations) -> None:
            launched(image)
            y = fused_marlin_moe(
                pad(acts.h.to(torch.bfloat16), (0, hidden - s.hidden)),
                w13,
                w2,
                bias13,
                bias2,
                s13,
                s2,
                acts.topk_weights.float(),
                acts.topk_ids.int(),
                quant_type_id=scalar_types.float4_e2m1f.id,
                global_num_experts=s.experts,
                activation=MoEActivation.SWIGLUOAI,
            )
            acts.x = acts.x + y[:, : s.hidden].float()

        return launch


class _MarlinLinear(Phase):
    category = "linear"
    backends = {"linear": "marlin"}
    knows = frozenset({"bias"})

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        return refuse_marlin(self, spec, arch, "marlin" in gates.linear_kernel, "--linear-kernel")

    def declares(self, spec: Spec, arch: Arch) -> Iterable[Declared]:
        return (Declared(LINEAR, frozenset({VLLM.version() or ""})),)


class MarlinQkv(_MarlinLinear):
    name, covers = "borrowed.marlin_qkv", ("qkv",)

    def bind(self, b: Binding) -> Launch:
        s = b.spec
        run, heads = marlin_product(b.weights.qkv, b.weights.qkv_bias), [s.heads, s.kv_heads, s.kv_heads]

        def launch(step: Step, acts: Activations) -> None:
            y = run(acts.h).view(-1, sum(heads), s.head_dim)
            acts.q, acts.k, acts.v = torch.split(y, heads, dim=1)

        return launch


class MarlinOut(_MarlinLinear):
    name, covers = "borrowed.marlin_o", ("o",)

    def bind(self, b: Binding) -> Launch:
        run = marlin_product(b.weights.o, b.weights.o_bias)

        def launch(step: Step, acts: Activations) -> None:
            acts.x = acts.x + run(acts.attn)

        return launch


class MarlinHead(_MarlinLinear):
    name, covers = "borrowed.marlin_lm_head", ("lm_head",)

    def bind(self, b: Binding) -> Launch:
        run = marlin_product(b.weights.lm_head, None)

        def launch(step: Step, acts: Activations) -> None:
            acts.logits = run(acts.h)

        return launch


def marlin_product(matrix: MXTensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """A function x [rows, K] -> float32 [rows, N]; vLLM pads what its tiles need."""
    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import (
        apply_fp4_marlin_linear,
        prepare_fp4_layer_for_marlin,
    )

    n, k = matrix.shape
    layer: Any = SimpleNamespace(
        output_size_per_partition=n,
        input_size_per_partition=k,
        params_dtype=torch.bfloat16,
        weight=matrix.data,
        weight_scale=matrix.scales,
        bias=None if bias is None else bias.to(torch.bfloat16),
    )
    prepare_fp4_layer_for_marlin(layer)
    image = KernelImage(LINEAR, VLLM.version() or "", loaded=False)

    def run(x: Tensor) -> Tensor:
        launched(image)
        y: Tensor = apply_fp4_marlin_linear(
            x.to(torch.bfloat16),
            layer.weight,
            layer.weight_scale,
            None,
            getattr(layer, "workspace", None),
            n,
            k,
            layer.bias,
        )
        return y.float()

    return run


def up_to(width: int, multiple: int) -> int:
    return -(-width // multiple) * multiple


def padded(m: MXTensor, bias: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """(data, scales, bias) with zeros up to so many rows and columns: a zero times any scale adds nothing."""
    more = rows - m.shape[-2]
    data = pad(m.data, (0, (columns - m.shape[-1]) // 2, 0, more))
    scales = pad(m.scales, (0, (columns - m.shape[-1]) // 32, 0, more))
    return data.contiguous(), scales.contiguous(), pad(bias, (0, more)).contiguous()


PHASES: tuple[Phase, ...] = (MarlinMoe(), MarlinQkv(), MarlinOut(), MarlinHead())
