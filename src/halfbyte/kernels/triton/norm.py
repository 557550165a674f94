"""RMS norms in Triton: attn_norm, and final_norm of the rows whose logits are wanted."""

from __future__ import annotations

import torch

from halfbyte.gates import Gates
from halfbyte.kernels.triton.call import TritonCall, multiple, power_of_two, type_of
from halfbyte.kernels.triton.phase import TritonPhase
from halfbyte.kernels.triton.tiles import refuse_gpu
from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import Arch, Binding, Launch, Spec
from halfbyte.plan.step import Step


def stored(spec: Spec, role: str) -> torch.dtype:
    """bf16 where the projection `role` rounds its input there anyway, so that nothing is rounded twice."""
    quantised = spec.formats[role] in ("mxfp4", "q8")
    rounds = spec.activation == "bf16" if quantised else spec.dtype == "bf16"
    return torch.bfloat16 if rounds else torch.float32


def norm_call(x: torch.dtype, weight: torch.dtype, h: torch.dtype, hidden: int, rows: bool) -> TritonCall:
    types = {
        "x": type_of(x),
        "weight": type_of(weight),
        "h": type_of(h),
        "rows": "*i32" if rows else None,
        "H": multiple(hidden),
        "eps": "fp32",
    }
    return TritonCall("rows", "norm_kernel", types, {"BH": power_of_two(hidden)}, warps=8)


class TritonNorm(TritonPhase):
    category, rank = "norm", 10
    role: str  # of the weight
    reader: str  # the projection that reads the result
    some_rows = False

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        return refuse_gpu(arch)

    def bind(self, b: Binding) -> Launch:
        weight, hidden, eps = getattr(b.weights, self.role), b.spec.hidden, b.spec.norm_eps
        dtype = stored(b.spec, self.reader)

        def launch(step: Step, acts: Activations) -> None:
            x = acts.x
            rows = step.logit_rows if self.some_rows else None
            count = step.rows if rows is None else rows.shape[0]
            h = torch.empty((count, hidden), dtype=dtype, device=x.device)
            call = norm_call(x.dtype, weight.dtype, dtype, hidden, self.some_rows)
            call.launch((count,), x.device, x=x, weight=weight, h=h, rows=rows, H=hidden, eps=eps)
            acts.h = h

        return launch

    def proofs(self, spec: Spec, arch: Arch) -> list[TritonCall]:
        return [norm_call(torch.float32, torch.bfloat16, stored(spec, self.reader), spec.hidden, self.some_rows)]


class TritonAttnNorm(TritonNorm):
    name, covers, role, reader = "triton.attn_norm", ("attn_norm",), "attn_norm", "qkv"


class TritonFinalNorm(TritonNorm):
    name, covers, role, reader = "triton.final_norm", ("final_norm",), "final_norm", "lm_head"
    some_rows = True
