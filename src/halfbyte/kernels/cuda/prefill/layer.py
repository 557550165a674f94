"""A whole layer for a prompt on SM90: grouped products, flash attention, and little between them.

Covers a layer from norm to experts, so that what one operation leaves another need not read in a form of its own: the
product of qkv rotates its rows and writes keys and values into their pages, attention writes its rows packed for the
product of o, and experts' results are added where the next layer begins, in one pass with its norm and packing. The
norm and choice of the router are Triton's. Activations are bf16, or E4M3 with a layer of their own (`Fp8PrefillLayer`).
Refuses what its parts refuse; converts nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from halfbyte.gates import Gates
from halfbyte.kernels.cuda.attention.flash import FlashAttention
from halfbyte.kernels.cuda.mixed_phase import MixedPhase
from halfbyte.kernels.cuda.phase import EXPERTS, OUT, QKV_AND_ROPE, ROUTER
from halfbyte.kernels.cuda.prefill.builds import SUM_WIDTH, build_of, rows_build
from halfbyte.kernels.cuda.prefill.fp8 import Fp8Moe, Fp8Out, Fp8Qkv, Fp8Weights
from halfbyte.kernels.cuda.prefill.phases import GroupedMoe, GroupedOut, GroupedPhase, GroupedQkv
from halfbyte.kernels.cuda.prefill.products import Dense, PendingGroupedExperts, ProductInputs, Rotation
from halfbyte.kernels.launch import Build
from halfbyte.kernels.triton.call import TritonCall
from halfbyte.kernels.triton.rope import RopeAndWrite, angles_call
from halfbyte.kernels.triton.router import NormAndRouter
from halfbyte.plan.activations import Activations
from halfbyte.plan.launches import begin
from halfbyte.plan.phase import LAYER, Arch, Binding, Launch, Phase, Spec
from halfbyte.plan.step import Step

Qkv = Callable[
    [Step, Activations, ProductInputs], None
]  # leaves rotated queries in acts.q, keys and values in the cache
Attend = Callable[[Step, Activations], ProductInputs]  # acts.q -> the input of o


def kv_cells(step: Step, acts: Activations, kind: str, pool: Tensor) -> Tensor:
    """Where each row's first key goes, counted from a layer's first: once a step for each kind of layer."""
    if kind not in acts.kv_cells:
        size, table = pool.shape[4], step.block_tables[kind]
        page = table[step.row_sequence.long(), (step.positions // size).long()].long()
        acts.kv_cells[kind] = page * pool.stride(0) + (step.positions % size).long() * pool.stride(4)
    return acts.kv_cells[kind]


class PrefillLayer(GroupedPhase, MixedPhase):
    name, covers, category = "cuda.prefill_layer", LAYER, "moe"
    backends = {"moe": "cuda", "linear": "cuda", "attention": "cuda"}
    regimes = frozenset({"prefill"})
    rank = 30
    parts: tuple[GroupedPhase, ...] = (GroupedQkv(), GroupedOut(), GroupedMoe())
    knows = frozenset({"yarn"}).union(FlashAttention.knows, NormAndRouter.knows, *(p.knows for p in parts))

    def shapes(self, spec: Spec) -> dict[str, tuple[int, int]]:
        return {role: size for part in self.parts for role, size in part.shapes(spec).items()}

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        for phase in (*self.parts, FlashAttention(), NormAndRouter(), RopeAndWrite()):
            if reason := phase.refuse(spec, arch, gates):
                return reason
        if spec.hidden > SUM_WIDTH:
            return f"sums rows of up to {SUM_WIDTH} values, not {spec.hidden}"
        return None

    def builds(self, spec: Spec, arch: Arch) -> list[Build]:
        builds = [b for part in (*self.parts, FlashAttention()) for b in part.builds(spec, arch)]
        rotating = replace(self.dense.product(spec.formats["qkv"], self.dense.tiles[-1], False), rope=True)
        return list({b.program: b for b in (*builds, rows_build("sum_pack_rows"), build_of(rotating))}.values())

    def calls(self, spec: Spec, arch: Arch) -> list[TritonCall]:
        return [angles_call(spec.head_dim // 2), *NormAndRouter().proofs(self.router_spec(spec), arch)]

    def router_spec(self, spec: Spec) -> Spec:
        """What the router's norm is asked with: its rows are bf16."""
        return spec

    def bind(self, b: Binding) -> Launch:
        w, s = b.weights, b.spec
        dense, experts = {role: self.bind_dense(b, role) for role in ("qkv", "o")}, self.bind_experts(b)
        qkv, attend, route = self.bind_qkv(b, dense["qkv"]), self.bind_attention(b, dense["o"]), self.bind_router(b)
        last = b.layer == s.layers - 1

        def launch(step: Step, acts: Activations) -> None:
            pending = acts.take(PendingGroupedExperts)
            begin(QKV_AND_ROPE)
            if pending is None:
                x, packed = acts.x, dense["qkv"].pack(acts.x, norm=w.attn_norm, eps=s.norm_eps)
            else:
                x, packed = dense["qkv"].sum_and_pack(pending, norm=w.attn_norm, eps=s.norm_eps)
            qkv(step, acts, packed)
            attended = attend(step, acts)
            begin(OUT)
            acts.x = dense["o"].multiply(attended, step.rows, x)
            begin(ROUTER)
            route(step, acts)
            begin(EXPERTS)
            pending = experts.leave(acts.h, acts.topk_ids, acts.topk_weights, acts.x)
            if last:
                acts.x = pending.complete()
            else:
                acts.leave(pending)

        return launch

    def bind_router(self, b: Binding) -> Launch:
        return NormAndRouter().bind(replace(b, spec=self.router_spec(b.spec)))

    def bind_qkv(self, b: Binding, dense: Dense) -> Qkv:
        assert b.kind is not None
        s, kind, index, (inverse, temperature) = b.spec, b.kind, b.kind_index, b.rope
        device, half = b.weights.qkv_bias.device, s.head_dim // 2
        if "rope_inverse" not in b.buffers:
            b.buffers["rope_inverse"] = inverse.to(device)
        inverse = b.buffers["rope_inverse"]

        def qkv(step: Step, acts: Activations, x: ProductInputs) -> None:
            if not acts.has("rope_pairs"):  # once a step, for every layer
                cos, sin = torch.empty((2, step.rows, half), dtype=torch.float32, device=device)
                angles_call(half).launch(
                    (step.rows,),
                    device,
                    positions=step.positions,
                    inverse=inverse,
                    cos=cos,
                    sin=sin,
                    temperature=temperature,
                )
                acts.rope_pairs = torch.stack((cos, sin), -1)
            pool = b.kv_pool()
            acts.q = dense.rotate(
                x,
                step.rows,
                Rotation(
                    acts.rope_pairs,
                    kv_cells(step, acts, kind, pool),
                    pool.data_ptr() + index * pool.stride(1) * pool.element_size(),
                    pool.stride(2),
                    s.heads,
                    s.kv_heads,
                ),
            )

        return qkv

    def bind_attention(self, b: Binding, o: Dense) -> Attend:
        attention = FlashAttention().bind_into(b)

        def attend(step: Step, acts: Activations) -> ProductInputs:
            x = o.inputs(step.rows)
            attention(step, acts, x)
            return x

        return attend


class Fp8PrefillLayer(Fp8Weights, PrefillLayer):
    """E4M3 needs the largest value of a whole row first, so rows come as bf16 and are packed on their own."""

    name = "cuda.prefill_layer_fp8"
    parts, plain = (Fp8Qkv(), Fp8Out(), Fp8Moe()), PrefillLayer()

    def router_spec(self, spec: Spec) -> Spec:
        return replace(spec, activation="bf16")

    def bind_attention(self, b: Binding, o: Dense) -> Attend:
        attention = FlashAttention().bind_into(b)

        def attend(step: Step, acts: Activations) -> ProductInputs:
            return o.pack(attention(step, acts, None))

        return attend


PHASES: tuple[Phase, ...] = (PrefillLayer(), Fp8PrefillLayer())
