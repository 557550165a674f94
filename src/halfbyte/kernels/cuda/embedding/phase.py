"""Token embedding in CUDA C++ (embed.cu): a row of the bf16 table as float32, exactly.

Preferred to Triton's for prompts and batches, whose other kernels on SM80 to SM90 and SM12x are CUDA C++ too: from SM90
on the first layer's norm may then start while it ends. Refuses tables in another format; converts nothing.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from halfbyte.errors import PlanError
from halfbyte.gates import Gates
from halfbyte.kernels.cuda.device.host import INT, POINTER, KernelMachine, fields, gpu, pointer
from halfbyte.kernels.cuda.phase import CudaPhase
from halfbyte.kernels.launch import Build, Program
from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import Arch, Binding, Launch, Phase, Spec
from halfbyte.plan.step import Step

THREADS = 192


class EmbedArgs(ctypes.Structure):
    _fields_ = [*fields(POINTER, "tokens", "table", "x"), ("hidden", INT)]


@functools.cache
def embed_build() -> Build:
    return Build("embed", Program(Path(__file__).parent / "embed.cu", "embed"), THREADS, shared=0, early=False)


def gather_rows(machine: KernelMachine, tokens: Tensor, table: Tensor) -> Tensor:
    """float32 [rows, hidden] of int32 tokens [rows]."""
    assert tokens.dtype == torch.int32, "tokens are int32"
    assert tokens.is_contiguous(), "tokens lie together"
    rows, hidden = tokens.shape[0], table.shape[1]
    x = torch.empty((rows, hidden), dtype=torch.float32, device=table.device)
    if rows:
        args = EmbedArgs(tokens=pointer(tokens), table=pointer(table), x=pointer(x), hidden=hidden)
        machine.run(embed_build(), rows, args)
    return x


class CudaEmbed(CudaPhase):
    name, covers, category, rank = "cuda.embed", ("embed",), "other", 15
    backends = {"linear": "cuda"}

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        if reason := self.refuse_family(arch):
            return reason
        if spec.formats["embed"] != "bf16":
            return f"reads a table in bf16, not in {spec.formats['embed']}"
        if spec.hidden % 8:
            return f"reads eight values at a time, and rows have {spec.hidden}"
        return None

    def builds(self, spec: Spec, arch: Arch) -> list[Build]:
        return [embed_build()]

    def bind(self, b: Binding) -> Launch:
        table, machine = b.weights.embed, gpu()
        if table.dtype != torch.bfloat16 or not table.is_contiguous():
            raise PlanError(f"cuda.embed reads a contiguous table in bf16, not {table.dtype}.")

        def launch(step: Step, acts: Activations) -> None:
            acts.x = gather_rows(machine, step.tokens, table)

        return launch


PHASES: tuple[Phase, ...] = (CudaEmbed(),)
