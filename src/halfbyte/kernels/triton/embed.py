"""Token embedding in Triton: a row of the table as float32."""

from __future__ import annotations

import math

import torch

from halfbyte.gates import Gates
from halfbyte.kernels.triton.call import TritonCall, multiple, type_of
from halfbyte.kernels.triton.phase import TritonPhase
from halfbyte.kernels.triton.tiles import refuse_gpu
from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import Arch, Binding, Launch, Spec
from halfbyte.plan.step import Step

BLOCK = 1024


def embed_call(table: torch.dtype, hidden: int) -> TritonCall:
    types = {"tokens": "*i32", "table": type_of(table), "x": "*fp32", "H": multiple(hidden)}
    return TritonCall("rows", "embed_kernel", types, {"BH": BLOCK})


class TritonEmbed(TritonPhase):
    name, covers, category, rank = "triton.embed", ("embed",), "other", 10

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        return refuse_gpu(arch)

    def bind(self, b: Binding) -> Launch:
        table = b.weights.embed
        hidden = b.spec.hidden
        call = embed_call(table.dtype, hidden)

        def launch(step: Step, acts: Activations) -> None:
            x = torch.empty((step.rows, hidden), dtype=torch.float32, device=table.device)
            grid = (step.rows, math.ceil(hidden / BLOCK))
            call.launch(grid, table.device, tokens=step.tokens, table=table, x=x, H=hidden)
            acts.x = x

        return launch

    def proofs(self, spec: Spec, arch: Arch) -> list[TritonCall]:
        return [embed_call(torch.bfloat16, spec.hidden)]
