"""Attention of whole prompts on SM90 (flash.cu): pages through the copy engine, products of a warpgroup.

Refuses other machines, and a product of o that takes anything but bf16.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from halfbyte.gates import Gates
from halfbyte.kernels.cuda.attention.prompt import FOLDER, HEAD_DIM, PAGE, PromptAttention, PromptShape
from halfbyte.kernels.cuda.device.host import KernelMachine, options
from halfbyte.kernels.cuda.phase import ATTENTION, WGMMA
from halfbyte.kernels.launch import Build, Map, Program
from halfbyte.plan.phase import Arch, Phase, Spec


@dataclass(frozen=True)
class FlashShape(PromptShape):
    """`groups` warpgroups that multiply, each 8 tokens; `stages` pages of K and of V in flight; `blocks` to an SM."""

    groups: int
    stages: int
    blocks: int

    @property
    def tokens(self) -> int:
        return 8 * self.groups

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def shared_bytes(self) -> int:
        return self.stages * (2 * PAGE * HEAD_DIM * 2 + 4 * 8) + 1024

    @property
    def for_single_rows(self) -> FlashShape | None:
        return None if self.groups == SLIDING.groups else SLIDING

    def program(self) -> Program:
        values = {"GROUPS": self.groups, "STAGES": self.stages, "BLOCKS": self.blocks}
        return Program(FOLDER / "flash.cu", "flash", options(values))

    def describe(self) -> Build:
        name = {FULL: "flash full", SLIDING: "flash sliding"}.get(self, f"flash {self}")
        return Build(
            name, self.program(), self.threads, self.shared_bytes, need=(WGMMA,), ban=r"\bHMMA", part=ATTENTION
        )

    def pages(self, machine: KernelMachine, pool: Tensor) -> Map:
        """Rows of one head's 64 values, fetched a page of one head at a time, swizzled as wgmma reads it."""
        return machine.row_map(pool.view(-1, HEAD_DIM), (PAGE, HEAD_DIM))


# Long rows: three warpgroups keep the tensor core busy and share a page's reading. A window is four pages at most, so
# that starting and ending cost more than the middle: two small blocks to a multiprocessor.
FULL, SLIDING = FlashShape(3, 6, 1), FlashShape(1, 4, 2)


class FlashAttention(PromptAttention):
    name, rank = "cuda.attention_flash", 20
    full, sliding = FULL, SLIDING
    families, instruction = ("sm90",), "wgmma"

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        if reason := self.refuse_family(arch):
            return reason
        quantised = spec.formats["o"] in ("mxfp4", "q8")
        if (spec.activation if quantised else spec.dtype) not in ("bf16", "fp8"):  # fp8 is rounded from bf16
            return "gives bf16, and o takes its input in another format"
        return super().refuse(spec, arch, gates)


PHASES: tuple[Phase, ...] = (FlashAttention(),)
