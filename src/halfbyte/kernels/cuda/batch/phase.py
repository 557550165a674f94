"""A whole layer for a batch on SM80 to SM90 and SM12x: products at the speed of the memory (product.cu), and little
between them.

Covers a layer from norm to experts, so that what one operation leaves another need not read in a form of its own: norms
are made where rows are summed, experts' results are added where the next layer begins, and every launch starts while
the one before ends. Rope, the KV write and attention are Triton's. Experts are MXFP4, projections MXFP4, q8 or bf16,
all in the layout "tile16"; activations are bf16. Refuses other machines, formats and shapes; converts nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.gates import Gates
from halfbyte.kernels.cuda.batch.builds import (
    COLUMNS,
    EXPERTS_MAX,
    ROW_THREADS,
    TOP_MAX,
    ProductShape,
    RowShape,
    product_build,
    rows_build,
)
from halfbyte.kernels.cuda.batch.layer import BatchBuffers, Head, LayerKernels
from halfbyte.kernels.cuda.batch.products import BatchMatrix
from halfbyte.kernels.cuda.device.host import Workspace, gpu
from halfbyte.kernels.cuda.mixed_phase import MixedPhase
from halfbyte.kernels.cuda.phase import ATTENTION, QKV, ROPE
from halfbyte.kernels.cuda.prefill.phases import GroupedHead
from halfbyte.kernels.cuda.prefill.sync import SyncHead
from halfbyte.kernels.launch import Build, current_arch
from halfbyte.kernels.triton.attention import DecodeAttention
from halfbyte.kernels.triton.call import TritonCall
from halfbyte.kernels.triton.rope import RopeAndWrite
from halfbyte.plan.activations import Activations
from halfbyte.plan.launches import begin
from halfbyte.plan.phase import LAYER, Arch, Binding, Launch, Phase, Spec
from halfbyte.plan.step import Step

MATRICES = ("qkv", "o", "gate_up", "down")
Attend = Callable[[Step, Activations, Tensor], Tensor]  # qkv float32 [rows, heads * head_dim] -> bf16


def product_shapes(spec: Spec, arch: Arch) -> dict[str, ProductShape]:
    """What each matrix' product is compiled for; gate_up and down share a launch where they are as deep."""
    forms, same = spec.formats, spec.hidden == spec.intermediate
    shapes = {
        "qkv": ProductShape(forms["qkv"], spec.hidden),
        "o": ProductShape(forms["o"], spec.heads * spec.head_dim, router=spec.experts),
        "gate_up": ProductShape(forms["gate_up"], spec.hidden, True, ids=True, both=same),
    }
    shapes |= {} if same else {"down": ProductShape(forms["down"], spec.intermediate, ids=True)}
    return {role: shape.within(arch.shared_memory) for role, shape in shapes.items()}


def head_shape(spec: Spec, arch: Arch) -> ProductShape:
    return ProductShape(spec.formats["lm_head"], spec.hidden).within(arch.shared_memory)


def row_shape(spec: Spec) -> RowShape:
    return RowShape(spec.hidden, spec.experts, spec.top_k)


def buffers_of(b: Binding, device: torch.device) -> BatchBuffers:
    return BatchBuffers(Workspace(gpu(), b.buffers, device), row_shape(b.spec), b.spec.intermediate)


def too_large(role: str, spec: Spec, arch: Arch, need: int) -> str:
    kind, has = spec.formats[role], arch.shared_memory
    return f"holds a tile of {role} in {kind} in {need} bytes of shared memory, {arch.name} has {has}"


def refuse_shape(spec: Spec) -> str | None:
    if spec.experts > EXPERTS_MAX or spec.experts % 16 or spec.top_k > min(TOP_MAX, spec.experts):
        return f"chooses up to {TOP_MAX} of 16 to {EXPERTS_MAX} experts, not {spec.top_k} of {spec.experts}"
    if spec.hidden % 64 or spec.intermediate % 64 or spec.hidden > 4096 or spec.intermediate > 4096:
        return f"needs widths in multiples of 64 up to 4096, not {spec.hidden} and {spec.intermediate}"
    return None


class BatchLayer(MixedPhase):
    name, covers, category = "cuda.batch_layer", LAYER, "moe"
    backends = {"moe": "cuda", "linear": "cuda", "attention": "triton"}
    regimes = frozenset({"decode", "batch"})
    knows = frozenset(
        {"bias", "yarn", "sinks", "window", "gqa", "uneven_layers", "clamped_swiglu", "interleaved_gate_up"}
    )
    rank = 30

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        if reason := self.refuse_family(arch):
            return reason
        if spec.activation != "bf16" or spec.dtype != "bf16":
            return f"multiplies bf16 activations, not {spec.activation} beside {spec.dtype}"
        if reason := refuse_shape(spec):
            return reason
        if arch.limits.batch * spec.top_k > 512:
            return f"groups 512 choices, not {spec.top_k} of each of {arch.limits.batch} rows"
        if spec.tile != "auto":
            return f"has one tile, not {spec.tile}"
        if "router" in spec.wide:
            return "reads the router in bf16, and this one holds more bits"
        for role in MATRICES:
            kinds = ("mxfp4", "q8", "bf16") if role in ("qkv", "o") else ("mxfp4",)
            if spec.formats[role] not in kinds:
                return f"multiplies {' or '.join(kinds)} weights, and {role} is {spec.formats[role]}"
        for role, shape in product_shapes(spec, arch).items():
            if shape.shared_bytes > arch.shared_memory:
                return too_large(role, spec, arch, shape.shared_bytes)
        return self.refuse_attention(spec, arch, gates)

    def refuse_attention(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        return RopeAndWrite().refuse(spec, arch, gates) or DecodeAttention().refuse(spec, arch, gates)

    def layouts(self, spec: Spec) -> dict[str, str]:
        return dict.fromkeys(MATRICES, "tile16")

    def builds(self, spec: Spec, arch: Arch) -> list[Build]:
        rows = [rows_build(row_shape(spec), entry) for entry in ROW_THREADS]
        return [*rows, *map(product_build, product_shapes(spec, arch).values())]

    def calls(self, spec: Spec, arch: Arch) -> list[TritonCall]:
        return [*RopeAndWrite().proofs(spec, arch), *DecodeAttention().proofs(spec, arch)]

    def bind(self, b: Binding) -> Launch:
        w, s = b.weights, b.spec
        device = w.qkv_bias.device
        buffers = buffers_of(b, device)
        shared = current_arch().shared_memory
        layer = LayerKernels(
            buffers,
            qkv=BatchMatrix(w.qkv, w.qkv_bias, "qkv", shared=shared),
            o=BatchMatrix(w.o, w.o_bias, "o", router=s.experts, shared=shared),
            gate_up=BatchMatrix(w.gate_up, w.gate_up_bias, "gate_up", swiglu=True, shared=shared),
            down=BatchMatrix(w.down, w.down_bias, "down", shared=shared),
            attn_norm=w.attn_norm,
            mlp_norm=w.mlp_norm,
            router=w.router,
            router_bias=w.router_bias,
            eps=s.norm_eps,
            limit=s.swiglu_limit,
            alpha=s.swiglu_alpha,
        )
        attend = self.bind_attention(b)
        width = (s.heads + 2 * s.kv_heads) * s.head_dim
        last = b.layer == s.layers - 1

        def launch(step: Step, acts: Activations) -> None:
            pending, rows = acts.take(PendingBatchExperts), step.rows
            x = acts.x if pending is None else pending.x
            qkv = torch.empty((rows, width), dtype=torch.float32, device=device)
            begin(QKV)
            layer.enter(x, qkv, pending=pending is not None)
            layer.leave(x, attend(step, acts, qkv))
            acts.topk_ids, acts.topk_weights = buffers.ids[:rows], buffers.weights[:rows]
            if last:
                layer.finish(x)
                acts.x = x
            else:
                acts.leave(PendingBatchExperts(x, buffers.weights[:rows], buffers.parts))

        return launch

    def bind_attention(self, b: Binding) -> Attend:
        s = b.spec
        rope, attention = RopeAndWrite().bind(b), DecodeAttention().bind(b)
        heads = [s.heads, s.kv_heads, s.kv_heads]

        def attend(step: Step, acts: Activations, qkv: Tensor) -> Tensor:
            acts.q, acts.k, acts.v = torch.split(qkv.view(step.rows, sum(heads), s.head_dim), heads, dim=1)
            begin(ROPE)
            rope(step, acts)
            begin(ATTENTION)
            attention(step, acts)
            return acts.attn

        return attend


class PendingBatchExperts(NamedTuple):
    """The residual stream and the experts' results that the next layer adds to it (a `PendingResidual`)."""

    x: Tensor
    weights: Tensor  # [rows, top_k]
    parts: Tensor  # of every choice of every row, in buffers that the next layer's experts write again

    def complete(self) -> Tensor:
        rows, choices = self.weights.shape
        results = self.parts[: rows * choices].view(rows, choices, -1)
        return self.x + (self.weights[:, :, None] * results).sum(1)


class BatchHead(GroupedHead):
    """lm_head of up to eight rows as a stream; more rows through the grouped product, which reads it once."""

    name = "cuda.batch_norm_lm_head"
    regimes = frozenset({"decode", "batch"})
    rank = 30

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        reason = super().refuse(spec, arch, gates) or refuse_shape(spec)
        need = 0 if reason else head_shape(spec, arch).shared_bytes
        if need > arch.shared_memory:
            reason = too_large("lm_head", spec, arch, need)
        return reason

    def builds(self, spec: Spec, arch: Arch) -> list[Build]:
        stream = rows_build(row_shape(spec), "batch_finish"), product_build(head_shape(spec, arch))
        return [*super().builds(spec, arch), *stream]

    def bind(self, b: Binding) -> Launch:
        w, s = b.weights, b.spec
        buffers = buffers_of(b, w.final_norm.device)
        lm_head = BatchMatrix(w.lm_head, None, "lm_head", shared=current_arch().shared_memory)
        few, many = Head(buffers, lm_head, w.final_norm, s.norm_eps), super().bind(b)

        def launch(step: Step, acts: Activations) -> None:
            if step.regime is not None or step.logit_rows.shape[0] > COLUMNS:  # a fixed regime has one kernel
                many(step, acts)
            else:
                acts.logits = few.run(acts.x, step.logit_rows)

        return launch


class SyncBatchHead(BatchHead, SyncHead):
    """`BatchHead` where a block has less and the grouped product uses mma.sync: SM80 to SM89 and SM12x."""

    name = "cuda.batch_sync_norm_lm_head"


PHASES: tuple[Phase, ...] = (BatchLayer(), BatchHead(), SyncBatchHead())
