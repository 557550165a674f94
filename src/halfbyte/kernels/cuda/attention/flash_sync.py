"""Attention of whole prompts with mma.sync and cp.async (flash_sync.cu), within 99 KB of shared memory: for SM80 to
SM89 and SM12x.

Every GPU from SM80 on has its instructions, so it runs elsewhere, too, but only where `--attention cuda` asks for CUDA
and no kernel of that machine's own can: `auto` takes Triton's there. Compiled and proved for these architectures, on
none of them yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halfbyte.gates import Gates
from halfbyte.kernels.cuda.attention.prompt import FOLDER, HEAD_DIM, PAGE, PromptAttention, PromptShape
from halfbyte.kernels.cuda.device.host import options
from halfbyte.kernels.cuda.phase import ATTENTION, MMA_SYNC, UNIT_COPY, WGMMA
from halfbyte.kernels.launch import Build, Program
from halfbyte.kernels.triton.norm import stored
from halfbyte.plan.phase import Arch, Phase, Spec

LOAD_MATRIX = r"\bLDSM\.16\.M88\.4"


@dataclass(frozen=True)
class SyncAttentionShape(PromptShape):
    """`warps` of a block, each with `tiles` times two tokens; `stages` pages of K and V in flight, `blocks` an SM."""

    tiles: int
    warps: int
    stages: int
    blocks: int

    @property
    def tokens(self) -> int:
        return 2 * self.tiles * self.warps

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        return self.stages * 2 * PAGE * HEAD_DIM * 2

    @property
    def for_single_rows(self) -> SyncAttentionShape | None:
        return None if self.tokens == SINGLE.tokens else SINGLE

    def program(self) -> Program:
        values = {"TILES": self.tiles, "WARPS": self.warps, "STAGES": self.stages, "BLOCKS": self.blocks}
        return Program(FOLDER / "flash_sync.cu", "flash_sync", options(values))

    def describe(self) -> Build:
        name = f"flash_sync {self.tokens} tokens"
        need = (MMA_SYNC, UNIT_COPY, LOAD_MATRIX)
        return Build(name, self.program(), self.threads, self.shared_bytes, need=need, ban=WGMMA, part=ATTENTION)


# Two tiles to a warp halve what it reads from shared memory for a product; three stages of two blocks fill the 100 KB
# that a multiprocessor of SM12x has. A sequence with a single row has a warp of its own.
TILED, SINGLE = SyncAttentionShape(2, 4, 3, 2), SyncAttentionShape(1, 1, 2, 3)


class SyncAttention(PromptAttention):
    name, rank = "cuda.attention_flash_sync", 15
    full = sliding = TILED
    families, instruction = ("sm8x", "sm12x"), "mma.sync within 99 KB"

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        if not arch.is_gpu:
            return "needs a GPU"
        reason = self.refuse_family(arch)
        if reason and gates.attention != "cuda":
            return f"{reason}; --attention cuda takes it there all the same"
        return super().refuse(spec, arch, gates)

    def result(self, spec: Spec) -> torch.dtype:
        return stored(spec, "o")


PHASES: tuple[Phase, ...] = (SyncAttention(),)
