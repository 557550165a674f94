"""The grouped products as phases: experts, qkv with its norm, o with the residual, lm_head with its norm, on SM90.

They serve every regime and share the layout "tile16" with the decode step, which is preferred where it can run. Experts
are MXFP4, projections MXFP4, q8 or bf16; activations are bf16. Weights are exact, but q8 times its scale keeps f16's 11
bits. Refuses other machines, formats and shapes; converts nothing.
"""

from __future__ import annotations

import torch

from halfbyte.architectures import Family
from halfbyte.gates import Gates
from halfbyte.kernels.cuda.device.host import Workspace, gpu
from halfbyte.kernels.cuda.phase import CudaPhase
from halfbyte.kernels.cuda.prefill.builds import (
    CHUNK,
    EXPERTS_MAX,
    TILE,
    TOP_MAX,
    GroupedShape,
    build_of,
    rows_build,
)
from halfbyte.kernels.cuda.prefill.experts import GroupedExperts
from halfbyte.kernels.cuda.prefill.products import Dense
from halfbyte.kernels.launch import Build
from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import Arch, Binding, Launch, Phase, Spec
from halfbyte.plan.step import Step


def refuse_weights(spec: Spec, shapes: dict[str, tuple[int, int]], kinds: tuple[str, ...]) -> str | None:
    """`shapes`: role -> (rows, k); `kinds`: formats of weights it can read."""
    for role, (n, k) in shapes.items():
        if spec.activation != "bf16" and spec.formats[role] != "bf16":  # a dense matrix takes its input as it is
            return f"multiplies bf16 activations, not {spec.activation}"
        if spec.formats[role] not in kinds:
            return f"multiplies {' or '.join(kinds)} weights, and {role} is {spec.formats[role]}"
        if n % TILE or k % CHUNK:
            return f"needs {role} in multiples of {TILE} x {CHUNK}, not {n} x {k}"
    return None


def workspace_of(b: Binding) -> Workspace:
    return Workspace(gpu(), b.buffers, torch.device("cuda", torch.cuda.current_device()))


def layer_name(b: Binding) -> str:
    """Stands in front of the name of a matrix in messages."""
    return "" if b.layer is None else f"layer {b.layer} "


class GroupedPhase(CudaPhase):
    """What all phases of grouped products share. A phase for other activations or another instruction names its own
    `dense` and `experts`."""

    rank = 20
    families: tuple[Family, ...] = ("sm90",)
    instruction = "wgmma"
    kinds: tuple[str, ...] = ("mxfp4", "q8", "bf16")
    dense: type[Dense] = Dense
    experts: type[GroupedExperts] = GroupedExperts

    def layouts(self, spec: Spec) -> dict[str, str]:
        return dict.fromkeys(self.shapes(spec), "tile16")

    def shapes(self, spec: Spec) -> dict[str, tuple[int, int]]:
        raise NotImplementedError

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        return self.refuse_family(arch) or refuse_weights(spec, self.shapes(spec), self.kinds)

    def builds(self, spec: Spec, arch: Arch) -> list[Build]:
        kind = self.experts if "moe" in self.covers else self.dense
        return [*map(rows_build, kind.entries), *map(build_of, self.products(spec))]

    def bind_dense(self, b: Binding, role: str) -> Dense:
        """A matrix of the bound weights."""
        return self.dense_with(self.dense, b, role)

    def bind_experts(self, b: Binding) -> GroupedExperts:
        return self.experts_with(self.experts, b)

    def dense_with(self, kind: type[Dense], b: Binding, role: str) -> Dense:
        w = b.weights
        return kind(workspace_of(b), getattr(w, role), getattr(w, f"{role}_bias", None), layer_name(b) + role)

    def experts_with(self, kind: type[GroupedExperts], b: Binding) -> GroupedExperts:
        w, s = b.weights, b.spec
        return kind(
            workspace_of(b),
            w.gate_up,
            w.gate_up_bias,
            w.down,
            w.down_bias,
            limit=s.swiglu_limit,
            alpha=s.swiglu_alpha,
            tile=None if s.tile == "auto" else s.tile,
            layer=layer_name(b),
        )

    def products(self, spec: Spec) -> list[GroupedShape]:
        """Every product it may multiply with."""
        form = spec.formats[next(iter(self.shapes(spec)))]
        if "moe" not in self.covers:
            return [self.dense.product(form, tile, False) for tile in self.dense.tiles]
        tiles = [tile for tile in self.experts.tiles if spec.tile in ("auto", tile)]
        return [self.experts.product(form, tile, swiglu) for tile in tiles for swiglu in (True, False)]


class GroupedMoe(GroupedPhase):
    name, covers, category = "cuda.grouped_moe", ("moe",), "moe"
    backends = {"moe": "cuda"}
    kinds = ("mxfp4",)
    knows = frozenset({"bias", "clamped_swiglu", "interleaved_gate_up"})

    def shapes(self, spec: Spec) -> dict[str, tuple[int, int]]:
        return {"gate_up": (2 * spec.intermediate, spec.hidden), "down": (spec.hidden, spec.intermediate)}

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        if spec.experts > EXPERTS_MAX or spec.top_k > TOP_MAX:
            return f"chooses up to {TOP_MAX} of up to {EXPERTS_MAX} experts, not {spec.top_k} of {spec.experts}"
        if spec.tile not in self.tiles:
            return f"cuts its tiles by the rows of each expert, not as --tile {spec.tile} says"
        return super().refuse(spec, arch, gates)

    def bind(self, b: Binding) -> Launch:
        experts = self.bind_experts(b)

        def launch(step: Step, acts: Activations) -> None:
            acts.x = experts.run(acts.h, acts.topk_ids, acts.topk_weights, acts.x)

        return launch


class GroupedQkv(GroupedPhase):
    name, covers, category = "cuda.grouped_norm_qkv", ("attn_norm", "qkv"), "linear"
    backends = {"linear": "cuda"}
    knows = frozenset({"bias"})

    def shapes(self, spec: Spec) -> dict[str, tuple[int, int]]:
        return {"qkv": ((spec.heads + 2 * spec.kv_heads) * spec.head_dim, spec.hidden)}

    def bind(self, b: Binding) -> Launch:
        w, s = b.weights, b.spec
        dense = self.bind_dense(b, "qkv")
        heads = [s.heads, s.kv_heads, s.kv_heads]

        def launch(step: Step, acts: Activations) -> None:
            y = dense.run(acts.x, norm=w.attn_norm, eps=s.norm_eps).view(step.rows, sum(heads), s.head_dim)
            acts.q, acts.k, acts.v = torch.split(y, heads, dim=1)

        return launch


class GroupedOut(GroupedPhase):
    name, covers, category = "cuda.grouped_o", ("o",), "linear"
    backends = {"linear": "cuda"}
    knows = frozenset({"bias"})

    def shapes(self, spec: Spec) -> dict[str, tuple[int, int]]:
        return {"o": (spec.hidden, spec.heads * spec.head_dim)}

    def bind(self, b: Binding) -> Launch:
        dense = self.bind_dense(b, "o")

        def launch(step: Step, acts: Activations) -> None:
            acts.x = dense.run(acts.attn, residual=acts.x)

        return launch


class GroupedHead(GroupedPhase):
    name, covers, category = "cuda.grouped_norm_lm_head", ("final_norm", "lm_head"), "linear"
    backends = {"linear": "cuda"}

    def shapes(self, spec: Spec) -> dict[str, tuple[int, int]]:
        return {"lm_head": (spec.vocab, spec.hidden)}

    def bind(self, b: Binding) -> Launch:
        w, eps = b.weights, b.spec.norm_eps
        dense = self.bind_dense(b, "lm_head")

        def launch(step: Step, acts: Activations) -> None:
            acts.logits = dense.run(acts.x, norm=w.final_norm, eps=eps, select=step.logit_rows)

        return launch


PHASES: tuple[Phase, ...] = (GroupedQkv(), GroupedOut(), GroupedMoe(), GroupedHead())
