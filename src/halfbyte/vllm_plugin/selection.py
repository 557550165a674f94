"""Chooses the kernel of each operation inside vLLM: vLLM's own or one of ours.

vLLM's operations are phases, like ours, so that choices, refusals and reasons come from `plan.select` alone. auto
selects ours for the experts and for dense layers that --layers quantises; dense layers in the checkpoint's format stay
with vLLM, which is as fast there. The reference runs only if it is selected. This module does not import vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from halfbyte.errors import PlanError
from halfbyte.gates import Gates
from halfbyte.kernels.cpu.library import cpu_flags
from halfbyte.kernels.lent import OPERATIONS as LENT_OPERATIONS
from halfbyte.kernels.lent import PHASES as LENT
from halfbyte.plan.phase import GROUP, OPERATIONS, ROLES, Arch, Binding, Launch, Phase, Spec
from halfbyte.plan.record import Selection
from halfbyte.plan.reference import PHASES as REFERENCE
from halfbyte.plan.select import Chosen, select, values_of

LAYOUT = "vllm"  # a weight that stays as vLLM holds it
DENSE = ("bf16", "f16", "f32")
CPU_ATTENTION = "vLLM has one attention for CPUs, and takes it whatever was asked for; leave --attention at auto"


@dataclass(frozen=True)
class Shapes:
    """The shapes of a gpt-oss model in one vLLM process: its share of the heads, expert widths and vocabulary."""

    layers: int
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    window: int
    dense: str = "bf16"  # format of dense weights as vLLM loads them
    max_context: int = 131072

    @classmethod
    def of(cls, config: Any, ranks: int = 1, dense: str = "bf16") -> Shapes:
        """From a Hugging Face config of gpt-oss."""
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            intermediate=-(-(config.intermediate_size // 32) // ranks) * 32,
            experts=config.num_local_experts,
            top_k=config.num_experts_per_tok,
            heads=config.num_attention_heads // ranks,
            kv_heads=max(1, config.num_key_value_heads // ranks),
            head_dim=config.head_dim,
            vocab=-(-config.vocab_size // (64 * ranks)) * 64,
            window=config.sliding_window,
            dense=dense,
            max_context=getattr(config, "max_position_embeddings", 131072),
        )

    @classmethod
    def of_model(cls, config: Any) -> Shapes:
        """From a model as halfbyte reads it, on one rank."""
        c = config
        return cls(
            c.layers, c.hidden, c.intermediate, c.experts, c.top_k, c.heads, c.kv_heads, c.head_dim, c.vocab, c.window
        )


def spec_of(shapes: Shapes, gates: Gates, arch: Arch) -> Spec:
    s, values, targets = shapes, values_of(gates, arch, reference=wants_reference(gates)), gates.layer_formats
    if gates.layers.exceptions:
        same = gates.layers._replace(exceptions=())
        raise PlanError(f"inside vLLM all layers of a group have one format; use --layers {same}.")
    stored = {"qkv": s.dense, "o": s.dense, "lm_head": s.dense, "gate_up": "mxfp4", "down": "mxfp4"}
    formats = {r: f if targets[GROUP[r]] == "checkpoint" else targets[GROUP[r]] for r, f in stored.items()}
    bias = frozenset({"bias"})
    return Spec(
        layers=s.layers,
        hidden=s.hidden,
        intermediate=s.intermediate,
        experts=s.experts,
        top_k=s.top_k,
        heads=s.heads,
        kv_heads=s.kv_heads,
        head_dim=s.head_dim,
        vocab=s.vocab,
        window=s.window,
        norm_eps=1e-5,
        swiglu_limit=7.0,
        swiglu_alpha=1.702,
        formats=formats | {"embed": s.dense},
        features={
            "qkv": bias,
            "o": bias,
            "rope": frozenset({"yarn"}),
            "router": bias,
            "attention": frozenset({"window", "gqa", "sinks"}),
            "moe": frozenset({"bias", "clamped_swiglu", "interleaved_gate_up"}),
        },
        dtype=values.dtype,
        activation=values.activation,
        activations=values.activations,
        kv_dtype=values.kv_dtype,
        page_size=16,
        tile=gates.tile,
    )


def wants_reference(gates: Gates) -> bool:
    return "reference" in (*gates.moe_kernel, *gates.linear_kernel)


def choose(shapes: Shapes, gates: Gates, arch: Arch) -> tuple[Spec, Chosen, Selection]:
    """The phases of every regime, vLLM's and ours, with the reasons for each refusal."""
    spec = spec_of(shapes, gates, arch)
    chosen, selection = select(spec, arch, gates, PHASES)
    return spec, chosen, selection


def is_ours(phase: Phase) -> bool:
    return not isinstance(phase, VllmOperation)


class VllmOperation(Phase):
    """An operation that vLLM runs itself. It is never bound."""

    knows = frozenset(
        {"bias", "yarn", "sinks", "window", "gqa", "clamped_swiglu", "interleaved_gate_up", "uneven_layers"}
    )
    tiles = ("auto", "128x128", "64x128")  # says nothing about tiles

    def __init__(self, operation: str) -> None:
        self.name, self.covers = f"vllm.{operation}", (operation,)
        self.category = "attention" if operation in ("rope", "kv_write", "attention") else "other"

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        return None

    def layouts(self, spec: Spec) -> dict[str, str]:
        return dict.fromkeys(ROLES.get(self.covers[0], ()), LAYOUT)

    def bind(self, b: Binding) -> Launch:
        raise AssertionError(f"{self.name} is vLLM's to run")


class VllmAttention(VllmOperation):
    backends = {"attention": ("triton", "flashinfer", "flash_attn")}

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        if not arch.is_gpu and gates.attention != "auto":
            return CPU_ATTENTION
        return None


class VllmLinear(VllmOperation):
    """A dense layer in the checkpoint's format."""

    backends = {"linear": "vllm"}
    rank = 200

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        role = self.covers[0]
        if spec.formats[role] not in DENSE:
            return f"{role} is {spec.formats[role]}, and vLLM's own dense layers are not quantised"
        return None


class VllmExperts(VllmOperation):
    backends = {"moe": "vllm"}

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        if not arch.is_gpu and "amx_tile" not in cpu_flags():
            return "vLLM has MXFP4 experts for CPUs with AMX only, and this one has none"
        if spec.tile != "auto":
            return f"chooses its tiles itself, not as --tile {spec.tile} says"
        if spec.activation not in ("bf16", "mxfp8") and arch.is_gpu:
            return f"multiplies bf16 or mxfp8 activations, not {spec.activation}"
        return None


class VllmMarlin(VllmExperts):
    backends = {"moe": "marlin"}

    def __init__(self) -> None:
        super().__init__("moe")
        self.name = "vllm.moe_marlin"

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        if set(gates.moe_kernel) != {"marlin"}:
            return "is taken where --moe-kernel asks for it alone"
        if not arch.is_gpu:
            return "runs on a GPU"
        if spec.activation != "bf16":
            return f"multiplies bf16 activations, not {spec.activation}"
        return super().refuse(spec, arch, gates)


class VllmCutlass(VllmExperts):
    """FlashInfer's grouped GEMM, as vLLM calls it."""

    backends = {"moe": "cutlass"}

    def __init__(self) -> None:
        super().__init__("moe")
        self.name = "vllm.moe_cutlass"

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        if set(gates.moe_kernel) != {"cutlass"}:
            return "is taken where --moe-kernel asks for it alone"
        if not arch.is_gpu:
            return "runs on a GPU"
        if spec.activation == "bf16" and "wgmma" not in arch.features:
            return f"its product with bf16 activations is written for sm90, not {arch.name}; use --activation mxfp8"
        if spec.activation == "mxfp8" and "block_scaled" not in arch.features:
            return (
                f"its product with mxfp8 activations is block-scaled, which {arch.name} has not; use --activation bf16"
            )
        return super().refuse(spec, arch, gates)


def _vllm_operation(operation: str) -> VllmOperation:
    kinds = {"attention": VllmAttention, "moe": VllmExperts}
    kind = VllmLinear if operation in ("qkv", "o", "lm_head") else kinds.get(operation, VllmOperation)
    return kind(operation)


PHASES: tuple[Phase, ...] = (
    *(_vllm_operation(operation) for operation in OPERATIONS),
    VllmMarlin(),
    VllmCutlass(),
    *LENT,
    *(p for p in REFERENCE if p.covers[0] in LENT_OPERATIONS),
)
