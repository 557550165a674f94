"""The reference plan: each operation of `ops/` wrapped in a phase of its own, so there is one execution path.

Also the oracle of every other phase: it honours the gates' quantisation points (activation, KV format, sinks).
Weights stay as they are; a second copy as whole numbers is kept only while all copies together stay small.
"""

from __future__ import annotations

import math
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from halfbyte.formats import MXTensor
from halfbyte.gates import Gates
from halfbyte.ops.attention import attend, gather_kv, write_kv
from halfbyte.ops.embedding import embed
from halfbyte.ops.linear import Matrix, dense, round_activation
from halfbyte.ops.moe import moe
from halfbyte.ops.norm import rms_norm
from halfbyte.ops.products import FixedPoint, matmul
from halfbyte.ops.rope import rope, rope_table
from halfbyte.ops.router import route
from halfbyte.plan.activations import Activations
from halfbyte.plan.launches import KernelImage, launched
from halfbyte.plan.phase import Arch, Binding, Launch, Phase, Spec
from halfbyte.plan.record import Declared
from halfbyte.plan.step import Step

COPY_BYTES = 1 << 31  # of matrices as whole numbers, at most, in a process
_copy_bytes = 0


class _FixedMatrix:
    """A matrix (or a stack of expert matrices) as whole numbers: kept while the budget lasts, else made when needed."""

    def __init__(self, matrix: Matrix) -> None:
        global _copy_bytes
        self.matrix = matrix
        self._copy: FixedPoint | None = None
        if _copy_bytes + FixedPoint.bytes_for(math.prod(matrix.shape)) <= COPY_BYTES:
            self._copy = FixedPoint.of_weights(dense(matrix))
            _copy_bytes += self._copy.nbytes
            weakref.finalize(self, _give_back, self._copy.nbytes)

    @property
    def quantised(self) -> bool:
        return isinstance(self.matrix, MXTensor)

    def all_rows(self) -> FixedPoint:
        return self._copy or FixedPoint.of_weights(dense(self.matrix))

    def expert(self, index: int) -> FixedPoint:
        if self._copy is not None:
            return self._copy[index]
        m = self.matrix
        if isinstance(m, MXTensor):
            return FixedPoint.of_weights(dense(m.select(index)))
        return FixedPoint.of_weights(m[index])


def _give_back(size: int) -> None:
    global _copy_bytes
    _copy_bytes -= size


class _Reference(Phase):
    """Records its operation as if it were a kernel, so that there is one record for every plan."""

    reference = True
    row_invariant = True

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        return None

    def declares(self, spec: Spec, arch: Arch) -> Iterable[Declared]:
        return (Declared(f"torch: {self.name}", frozenset({torch.__version__})),)

    def bind(self, b: Binding) -> Launch:
        run, image = self.operation(b), KernelImage(f"torch: {self.name}", torch.__version__, loaded=False)

        def launch(step: Step, acts: Activations) -> None:
            launched(image)
            run(step, acts)

        return launch

    @abstractmethod
    def operation(self, b: Binding) -> Launch: ...


def _project(matrix: Matrix, bias: Tensor, spec: Spec) -> Callable[[Tensor], Tensor]:
    fixed = _FixedMatrix(matrix)
    offset = bias.float()

    def run(x: Tensor) -> Tensor:
        if fixed.quantised:
            x = round_activation(x, spec.activation)
        elif spec.dtype == "bf16":
            x = round_activation(x, "bf16")
        return matmul(x, fixed.all_rows()) + offset

    return run


class Embed(_Reference):
    name, covers, category = "reference.embed", ("embed",), "other"

    def operation(self, b: Binding) -> Launch:
        table = b.weights.embed

        def launch(step: Step, acts: Activations) -> None:
            acts.x = embed(step.tokens, table)

        return launch


class _Norm(_Reference):
    role: str
    category = "norm"

    def operation(self, b: Binding) -> Launch:
        weight, eps = getattr(b.weights, self.role), b.spec.norm_eps

        def launch(step: Step, acts: Activations) -> None:
            acts.h = rms_norm(acts.x, weight, eps)

        return launch


class AttnNorm(_Norm):
    name, covers, role = "reference.attn_norm", ("attn_norm",), "attn_norm"


class MlpNorm(_Norm):
    name, covers, role = "reference.mlp_norm", ("mlp_norm",), "mlp_norm"


class FinalNorm(_Reference):
    name, covers, category = "reference.final_norm", ("final_norm",), "norm"

    def operation(self, b: Binding) -> Launch:
        weight, eps = b.weights.final_norm, b.spec.norm_eps

        def launch(step: Step, acts: Activations) -> None:
            acts.h = rms_norm(acts.x[step.logit_rows.long()], weight, eps)

        return launch


class Qkv(_Reference):
    name, covers, category = "reference.qkv", ("qkv",), "linear"
    backends = {"linear": "reference"}
    knows = frozenset({"bias"})

    def operation(self, b: Binding) -> Launch:
        project = _project(b.weights.qkv, b.weights.qkv_bias, b.spec)
        s = b.spec
        heads = [s.heads, s.kv_heads, s.kv_heads]

        def launch(step: Step, acts: Activations) -> None:
            y = project(acts.h).view(step.rows, sum(heads), s.head_dim)
            acts.q, acts.k, acts.v = torch.split(y, heads, dim=1)

        return launch


class Rope(_Reference):
    name, covers, category = "reference.rope", ("rope",), "attention"
    knows = frozenset({"yarn"})

    def operation(self, b: Binding) -> Launch:
        inverse, temperature = b.rope

        def launch(step: Step, acts: Activations) -> None:
            cos, sin = rope_table(inverse, temperature, step.positions)
            acts.q, acts.k = rope(acts.q, cos, sin), rope(acts.k, cos, sin)

        return launch


class KvWrite(_Reference):
    name, covers, category = "reference.kv_write", ("kv_write",), "attention"

    def operation(self, b: Binding) -> Launch:
        assert b.kind is not None
        kind, index, pool = b.kind, b.kind_index, b.kv_pool

        def launch(step: Step, acts: Activations) -> None:
            table = step.block_tables[kind][step.row_sequence.long()]
            write_kv(pool(), index, acts.k, acts.v, step.positions, table)

        return launch


class Attention(_Reference):
    name, covers, category = "reference.attention", ("attention",), "attention"
    backends = {"attention": "reference"}
    knows = frozenset({"sinks", "window", "gqa", "uneven_layers"})

    def operation(self, b: Binding) -> Launch:
        assert b.kind is not None
        spec, kind, index, pool = b.spec, b.kind, b.kind_index, b.kv_pool
        window = spec.window if kind == "sliding" else None
        sinks = b.weights.sinks if "sinks" in spec.features_of(("attention",)) else None
        scale = spec.head_dim**-0.5

        def launch(step: Step, acts: Activations) -> None:
            starts, lens = step.query_start.tolist(), step.kv_lens.tolist()
            out = torch.empty_like(acts.q)
            for s, length in enumerate(lens):
                rows = slice(starts[s], starts[s + 1])
                if starts[s] == starts[s + 1]:
                    continue
                k, v = gather_kv(pool(), index, step.block_tables[kind][s], length)
                out[rows] = attend(acts.q[rows], k, v, step.positions[rows], sinks, window, scale)
            acts.attn = out.flatten(1)

        return launch


class OutProjection(_Reference):
    name, covers, category = "reference.o", ("o",), "linear"
    backends = {"linear": "reference"}
    knows = frozenset({"bias"})

    def operation(self, b: Binding) -> Launch:
        project = _project(b.weights.o, b.weights.o_bias, b.spec)

        def launch(step: Step, acts: Activations) -> None:
            acts.x = acts.x + project(acts.attn)

        return launch


class Router(_Reference):
    name, covers, category = "reference.router", ("router",), "router"
    knows = frozenset({"bias"})

    def operation(self, b: Binding) -> Launch:
        weight, bias, top_k = _FixedMatrix(b.weights.router), b.weights.router_bias, b.spec.top_k

        def launch(step: Step, acts: Activations) -> None:
            acts.topk_ids, acts.topk_weights = route(acts.h, weight.all_rows(), bias, top_k)

        return launch


class Moe(_Reference):
    name, covers, category = "reference.moe", ("moe",), "moe"
    backends = {"moe": "reference"}
    knows = frozenset({"bias", "clamped_swiglu", "interleaved_gate_up"})

    def operation(self, b: Binding) -> Launch:
        spec = b.spec
        gate_up = self._experts(b.weights.gate_up, b.weights.gate_up_bias, spec)
        down = self._experts(b.weights.down, b.weights.down_bias, spec)

        def launch(step: Step, acts: Activations) -> None:
            y = moe(
                acts.h, acts.topk_ids.long(), acts.topk_weights,
                gate_up, down, spec.swiglu_limit, spec.swiglu_alpha,
            )  # fmt: skip
            acts.x = acts.x + y

        return launch

    @staticmethod
    def _experts(matrix: Matrix, bias: Tensor, spec: Spec) -> Callable[[int, Tensor], Tensor]:
        fixed = _FixedMatrix(matrix)

        def project(expert: int, x: Tensor) -> Tensor:
            if fixed.quantised:
                x = round_activation(x, spec.activation)
            elif spec.dtype == "bf16":
                x = round_activation(x, "bf16")
            return matmul(x, fixed.expert(expert)) + bias[expert].float()

        return project


class LmHead(_Reference):
    name, covers, category = "reference.lm_head", ("lm_head",), "linear"
    backends = {"linear": "reference"}

    def operation(self, b: Binding) -> Launch:
        matrix: Matrix = b.weights.lm_head
        project = _project(matrix, torch.zeros(()), b.spec)

        def launch(step: Step, acts: Activations) -> None:
            acts.logits = project(acts.h)

        return launch


PHASES: tuple[Phase, ...] = (
    Embed(), AttnNorm(), Qkv(), Rope(), KvWrite(), Attention(), OutProjection(), MlpNorm(), Router(), Moe(),
    FinalNorm(), LmHead(),
)  # fmt: skip
