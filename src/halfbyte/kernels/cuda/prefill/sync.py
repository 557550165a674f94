"""Grouped products with mma.sync (grouped_sync.cu) on SM80 to SM89, SM120 and SM121: experts and dense projections, and
their phases.

The same layout "tile16", rows, buffers and meaning as the grouped products of SM90, within 101,376 bytes of shared
memory: exact W4A16, q8 or bf16 weights with bf16 activations, in tiles of 128 rows of weights by 64 or 128 columns (as
`--tile` says, or by the rows that come). Compiled and proved for these architectures, run on an H200 as SM12x has them,
on no such machine yet. Refuses SM90, which has wgmma for this, and SM100.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from halfbyte.architectures import Family
from halfbyte.formats.tile16 import CHUNK_BYTES
from halfbyte.kernels.cuda.device.host import FORMATS, options
from halfbyte.kernels.cuda.phase import BULK_COPY, MMA_SYNC, MXFP4_SYNC, MXFP8_SYNC, TENSOR_COPY, WGMMA
from halfbyte.kernels.cuda.prefill.builds import EXPERTS_MAX, FOLDER, TILE, GroupedShape
from halfbyte.kernels.cuda.prefill.experts import GroupedExperts
from halfbyte.kernels.cuda.prefill.phases import GroupedHead, GroupedMoe, GroupedOut, GroupedPhase, GroupedQkv
from halfbyte.kernels.cuda.prefill.products import Dense, GroupedProducts
from halfbyte.kernels.launch import Build, Program
from halfbyte.plan.phase import Phase

COLUMNS = {"64x128": 64, "128x128": 128}  # of an item, at most; the other 128 are rows of weights
MX = {"": 0, "mxfp8": 1, "mxfp4": 2}
STAGES_BYTES = 98_304  # of all stages together
SHARED = 101_376
# What a product shows, by the format of its activations; the others betray a fallback.
INSTRUCTION = {"": MMA_SYNC, "mxfp8": MXFP8_SYNC, "mxfp4": MXFP4_SYNC}


@dataclass(frozen=True)
class SyncProductShape(GroupedShape):
    """A build of grouped_sync.cu; `mx`: activations with scales of their own (mx.py)."""

    mx: str = ""

    @property
    def pair(self) -> int:
        return 1

    @property
    def columns(self) -> int:
        return COLUMNS[self.tile]

    @property
    def chunks(self) -> int:
        return 2 if self.mx else 1

    @property
    def stage(self) -> tuple[int, int]:
        column = {"": 128, "mxfp8": 128 + 4, "mxfp4": 64 + 4}[self.mx]
        size: int = -(-(self.columns * column + 8 * self.chunks * CHUNK_BYTES[self.format]) // 128) * 128
        return size, STAGES_BYTES // size

    @property
    def shared_bytes(self) -> int:
        size, stages = self.stage
        return stages * (size + 16) + 32 + 2 * 28 + 8 + 4 * EXPERTS_MAX + 48

    @property
    def threads(self) -> int:
        return 288

    def program(self) -> Program:
        values = {
            "FORMAT": FORMATS[self.format],
            "SHAPE": 4 + (self.columns == 128),
            "SWIGLU": int(self.swiglu),
            "MX": MX[self.mx],
        }
        return Program(FOLDER / "grouped_sync.cu", "grouped", options(values))

    def describe(self) -> Build:
        name = f"grouped_sync {self.format} {self.mx or 'bf16'} {self.tile}{' swiglu' if self.swiglu else ''}"
        ban = "|".join(pattern for mx, pattern in INSTRUCTION.items() if mx != self.mx) + f"|{WGMMA}"
        # 100 bytes; on an H200 it takes no longer than bf16's product, which spills none (sync-gpu-20261115-3)
        known_spills = "grouped" if (self.format, self.tile) == ("q8", "128x128") else ""
        need = (INSTRUCTION[self.mx], BULK_COPY, TENSOR_COPY)
        return Build(
            name,
            self.program(),
            self.threads,
            self.shared_bytes,
            need=need,
            ban=ban,
            known_spills=known_spills,
            spill_limit=100,
            # between items, and of the widest products one word a stage
            spills_on_sm80=200 if (self.format, self.tile, self.swiglu) == ("mxfp4", "128x128", True) else 0,
        )


def tile_for(rows: int, m_tiles: int, blocks: int) -> tuple[str, int]:
    """(tile, columns per item) of one dense product that leave the least to the busiest block.

    By arithmetic, not by measurement: a product of few columns costs as if it had eight more, for its weights."""
    items = math.ceil(m_tiles / 2)

    def cost(cap: int) -> int:
        parts = math.ceil(rows / cap)
        width = math.ceil(rows / parts / 16) * 16
        return math.ceil(parts * items / blocks) * (width + 8)

    cap = min((32, 48, 64, 80, 96, 112, 128), key=lambda cap: (cost(cap), -cap))
    return "64x128" if min(cap, rows) <= 64 else "128x128", cap


class SyncProducts(GroupedProducts):
    tiles: tuple[str, ...] = tuple(COLUMNS)
    mx = ""

    @classmethod
    def product(cls, form: str, tile: str, swiglu: bool) -> GroupedShape:
        return SyncProductShape(form, tile, swiglu, cls.mx)


class SyncDense(SyncProducts, Dense):
    def _product(self, rows: int) -> tuple[GroupedShape, int]:
        tile, cap = tile_for(rows, self.n // TILE, self.workspace.machine.blocks)
        if self.tile:
            tile, cap = self.tile, COLUMNS[self.tile]
        return self.product(self.format, tile, False), min(cap, COLUMNS[tile])


class SyncExperts(SyncProducts, GroupedExperts):
    def _tile(self, rows_each: float) -> str:
        return self.tile or ("64x128" if rows_each <= 32 else "128x128")  # measured on an H200 (docs/LOG.md)


# ---- phases ---------------------------------------------------------------------------------------------------------


class SyncPhase(GroupedPhase):
    families: tuple[Family, ...] = ("sm8x", "sm12x")
    instruction = "mma.sync within 99 KB"
    dense: type[SyncDense] = SyncDense
    experts: type[SyncExperts] = SyncExperts


class SyncMoe(SyncPhase, GroupedMoe):
    name = "cuda.grouped_sync_moe"
    tiles = ("auto", *COLUMNS)


class SyncQkv(SyncPhase, GroupedQkv):
    name = "cuda.grouped_sync_norm_qkv"


class SyncOut(SyncPhase, GroupedOut):
    name = "cuda.grouped_sync_o"


class SyncHead(SyncPhase, GroupedHead):
    name = "cuda.grouped_sync_norm_lm_head"


PHASES: tuple[Phase, ...] = (SyncQkv(), SyncOut(), SyncMoe(), SyncHead())
