"""The whole decode step as one phase: every operation of every layer in one persistent launch (step.cu).

Serves 1 to 8 rows, of one sequence or of several. Its products are exact in the weights and take 16 bits of the
activations; what passes between blocks keeps 14 (docs/numerics.md). So it answers to bf16 activations and never rounds
more than they would. An fp8 cache is served when it is asked for by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from halfbyte.architectures import GPUS
from halfbyte.errors import PlanError
from halfbyte.formats import DenseTiles, MXTensor
from halfbyte.gates import Gates
from halfbyte.kernels.cuda.decode.shape import (
    KV_DTYPES,
    PAGE,
    ROW_SIZES,
    SPLITS,
    OtherFormat,
    StepShape,
    build_of,
)
from halfbyte.kernels.cuda.decode.step import DecodeStep, StepLayer, StepWeights, tile_router
from halfbyte.kernels.cuda.device.host import FORMATS, gpu
from halfbyte.kernels.cuda.phase import CudaPhase
from halfbyte.kernels.launch import Build, current_arch
from halfbyte.ops.rope import rope_table
from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import OPERATIONS, Arch, Binding, Launch, Phase, Spec
from halfbyte.plan.step import Step

LONGEST = 1 << 20  # context: the rope table has 256 bytes for each position
MATRICES = ("qkv", "o", "gate_up", "down", "lm_head")
StepFor = Callable[[int], DecodeStep]


def usual_and_other(spec: Spec, role: str) -> tuple[str, OtherFormat | None]:
    """The format of most layers' matrix, and of the others; the phase has refused three formats."""
    usual, *others = spec.matrices.kinds(role)
    if not others:
        return usual, None
    return usual, OtherFormat(
        others[0], frozenset(i for i, form in enumerate(spec.matrices.per_layer(role)) if form == others[0])
    )


def most_parts(arch: Arch, kv_heads: int) -> int:
    """Parts that a long context is cut into at most: two rounds of the blocks of a kv head where these are few. By the
    architecture's largest GPU, so that the bits do not depend on the card."""
    blocks = max((g.multiprocessors // kv_heads for g in GPUS.values() if g.arch == arch.name), default=0)
    return min(SPLITS, 2 * blocks) or SPLITS


def shape_of(spec: Spec, arch: Arch, rows: int) -> StepShape:
    (qkv, other_qkv), (o, other_o) = usual_and_other(spec, "qkv"), usual_and_other(spec, "o")
    return StepShape(
        hidden=spec.hidden,
        intermediate=spec.intermediate,
        layers=spec.layers,
        experts=spec.experts,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        vocab=spec.vocab,
        window=spec.window,
        rows=rows,
        qkv=qkv,
        o=o,
        lm_head=spec.formats["lm_head"],
        other_qkv=other_qkv,
        other_o=other_o,
        kv=spec.kv_dtype,
        shared=arch.shared_memory,
        units="bulk_copies" not in arch.features,
        splits=most_parts(arch, spec.kv_heads),
        acquire=arch.family != "sm90",
        keep_shared=arch.family != "sm90",  # on SM90 it lost (docs/LOG.md)
    )


class WholeStep(CudaPhase):
    name = "cuda.decode_step"
    covers = OPERATIONS
    backends: Mapping[str, str | tuple[str, ...]] = {
        "moe": ("gemv", "cuda"),
        "linear": ("gemv", "cuda"),
        "attention": "cuda",
    }
    regimes = frozenset({"decode"})
    knows = frozenset({"bias", "yarn", "sinks", "window", "gqa", "clamped_swiglu", "interleaved_gate_up"})
    rank = 100
    category = "moe"
    mixes = True
    dense: tuple[str, ...] = ("qkv", "o", "lm_head")  # matrices that may have several formats

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        if reason := self.refuse_family(arch):
            return reason
        if gates.speculate.startswith("eagle3") != self.taps:
            if self.taps:
                return "leaves hidden states between layers, which only EAGLE-3 reads"
            return "leaves no hidden states between layers, which EAGLE-3 reads; cuda.tapped_decode_step does"
        if spec.head_dim != 64 or spec.top_k != 4:
            return f"needs head_dim 64 and top-4, not {spec.head_dim} and top-{spec.top_k}"
        if spec.page_size != PAGE or spec.kv_dtype not in KV_DTYPES:
            return f"needs KV pages of {PAGE} tokens in bf16 or fp8, not {spec.page_size} in {spec.kv_dtype}"
        if spec.kv_dtype == "fp8" and gates.moe_kernel.decode == "auto":
            return (
                "has been run with an fp8 cache in the emulator only; --moe-kernel decode=gemv asks for it all the same"
            )
        if spec.max_context > LONGEST:
            return f"keeps a rope table of up to {LONGEST} positions, not of {spec.max_context}"
        if spec.activation != "bf16":
            return f"multiplies 16-bit activations, not {spec.activation}"
        if "sinks" not in spec.features_of(("attention",)):
            return "always counts the sinks"
        for role in ("gate_up", "down"):
            if spec.matrices.kinds(role) != ("mxfp4",):
                return f"reads experts in mxfp4, not in {spec.matrices.text(role)}"
        for role in self.dense:
            if not FORMATS.keys() >= set(spec.matrices.kinds(role)):
                return f"{role} is {spec.matrices.text(role)}, and the layout tile16 holds {', '.join(FORMATS)}"
            if len(spec.matrices.kinds(role)) > 2:
                return f"reads {role} in two formats at most, not in {spec.matrices.text(role)}"
        if spec.wide or spec.formats["embed"] != "bf16":
            names = sorted(spec.wide) or ["embed"]
            return f"reads vectors, router and embedding in bf16, and {', '.join(names)} hold more bits"
        return self.shape(spec, arch, next(r for r in ROW_SIZES if r >= arch.limits.decode)).refuse()

    def shape(self, spec: Spec, arch: Arch, rows: int) -> StepShape:
        return replace(shape_of(spec, arch, rows), taps=self.taps)

    def layouts(self, spec: Spec) -> dict[str, str]:
        return {"embed": "plain"} | dict.fromkeys((*self.dense, "gate_up", "down"), "tile16")

    def builds(self, spec: Spec, arch: Arch) -> list[Build]:
        fewer = (0, *ROW_SIZES)  # a build serves what the one before it cannot
        sizes = [rows for last, rows in zip(fewer, ROW_SIZES) if last < arch.limits.decode]
        return [build_of(self.shape(spec, arch, rows)) for rows in sizes]

    def bind(self, b: Binding) -> Launch:
        step_for = self.steps(b, step_weights(b), lambda: [b.kv_pool()])

        def launch(step: Step, acts: Activations) -> None:
            kernel, taps = run_step(step_for, step)
            rows = step.rows
            if step.taps:
                acts.taps = taps
            logit_count = step.logit_rows.shape[0]
            acts.logits = kernel.logits[:rows] if logit_count == rows else kernel.logits[step.logit_rows.long()]

        return launch

    def steps(self, b: Binding, weights: StepWeights, pools: Callable[[], Sequence[Tensor]]) -> StepFor:
        """The step for so many rows, over the pages as they are now."""
        spec, arch = b.spec, current_arch()
        rope = torch.cat(rope_table(*b.rope, torch.arange(spec.max_context)), -1).contiguous().to(weights.embed.device)
        none = torch.zeros((1, 1), dtype=torch.int32, device=rope.device)  # of tables: every launch names its own
        steps: dict[tuple[int, ...], DecodeStep] = {}

        def step_for(rows: int) -> DecodeStep:
            pages = pools()
            key = (rows, *(p.data_ptr() for p in pages))
            if key not in steps:
                steps[key] = DecodeStep(
                    self.shape(spec, arch, rows),
                    weights,
                    gpu(),
                    pool=pages,
                    tables=(none, none),
                    rope=rope,
                    norm_eps=spec.norm_eps,
                    swiglu_limit=spec.swiglu_limit,
                    swiglu_alpha=spec.swiglu_alpha,
                )
            return steps[key]

        return step_for


def run_step(step_for: StepFor, step: Step) -> tuple[DecodeStep, Tensor]:
    """The kernel that ran, and what it left at the step's taps."""
    kernel = step_for(next(r for r in ROW_SIZES if r >= step.rows))
    tables = step.block_tables["sliding"].contiguous(), step.block_tables["full"].contiguous()
    kernel.read(step.tokens.contiguous(), step.positions.contiguous(), step.row_sequence.contiguous(), tables)
    return kernel, kernel.run(step.rows, step.taps)


def step_weights(b: Binding, *, head: bool = True) -> StepWeights:
    """The weights of a model as the kernel reads them; every vector must be bf16 without loss."""
    w = b.weights
    layers = []
    for layer in w.layers:
        vectors = {
            name: _bf16(name, getattr(layer, name))
            for name in (
                "qkv_bias",
                "o_bias",
                "gate_up_bias",
                "down_bias",
                "attn_norm",
                "mlp_norm",
                "router_bias",
                "sinks",
            )
        }
        matrices = {name: _bytes(getattr(layer, name)) for name in MATRICES[:4]}
        layers.append(StepLayer(**matrices, **vectors, router=tile_router(_bf16("router", layer.router))))
    lm_head = _bytes(w.lm_head) if head else None
    return StepWeights(layers, _bf16("embed", w.embed), _bf16("final_norm", w.final_norm), lm_head)


def _bytes(matrix: MXTensor | DenseTiles) -> Tensor:
    assert matrix.layout == "tile16", matrix.layout
    return matrix.data


def _bf16(name: str, t: Tensor) -> Tensor:
    """The tensor in bf16, which must lose nothing."""
    out = t.to(torch.bfloat16).contiguous()
    if t.dtype != torch.bfloat16 and not torch.equal(out.to(t.dtype), t):
        raise PlanError(f"the CUDA decode step was planned for {name} in bf16, but it holds more bits.")
    return out


class TappedStep(WholeStep):
    """The whole step, which also writes EAGLE-3's hidden states. It is a build of its own: plans without a draft head
    do no more work for it."""

    name = "cuda.tapped_decode_step"
    taps = True


PHASES: tuple[Phase, ...] = (WholeStep(), TappedStep())
