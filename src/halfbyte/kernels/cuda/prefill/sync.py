"""Grouped products on SM120 and SM121 (grouped_sync.cu): experts and dense projections with mma.sync, and their phases.

The same layout "tile16", rows, buffers and meaning as the grouped products of SM90, within 101,376 bytes of shared
memory: exact W4A16, q8 or bf16 weights with bf16 activations, in tiles of 128 rows of weights by 64 or 128 columns (as
`--tile` says, or by the rows that come). Compiled and proved for SM12x, run on an H200, on no SM12x machine yet.
Refuses SM90, which has wgmma for this, and SM100.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from halfbyte.formats.tile16 import CHUNK_BYTES
from halfbyte.kernels.cuda.prefill.builds import EXPERTS_MAX, FOLDER, FORMATS, TILE, Variant
from halfbyte.kernels.cuda.prefill.phases import GroupedHead, GroupedMoe, GroupedOut, GroupedQkv, _Grouped
from halfbyte.kernels.cuda.prefill.products import Dense, Experts
from halfbyte.kernels.launch import Program
from halfbyte.plan.phase import Phase

COLUMNS = {"64x128": 64, "128x128": 128}  # of an item, at most; the other 128 are rows of weights
MX = {"": 0, "mxfp8": 1, "mxfp4": 2}
ROOM = 98_304  # bytes of stages
SHARED = 101_376


@dataclass(frozen=True)
class SyncVariant(Variant):
    """A build of grouped_sync.cu; `mx`: activations with scales of their own (grouped_mx.py)."""

    mx: str = ""

    @property
    def pair(self) -> int:
        return 1

    @property
    def columns(self) -> int:
        return COLUMNS[self.shape]

    @property
    def chunks(self) -> int:
        return 2 if self.mx else 1

    @property
    def stage(self) -> tuple[int, int]:
        column = {"": 128, "mxfp8": 128 + 4, "mxfp4": 64 + 4}[self.mx]
        size: int = -(-(self.columns * column + 8 * self.chunks * CHUNK_BYTES[self.format]) // 128) * 128
        return size, ROOM // size

    @property
    def shared_bytes(self) -> int:
        size, stages = self.stage
        return stages * (size + 16) + 32 + 2 * 28 + 8 + 4 * EXPERTS_MAX + 48

    @property
    def threads(self) -> int:
        return 288

    def program(self) -> Program:
        values = {
            "FORMAT": FORMATS[self.format], "SHAPE": 4 + (self.columns == 128), "SWIGLU": int(self.swiglu),
            "MX": MX[self.mx],
        }  # fmt: skip
        return Program(FOLDER / "grouped_sync.cu", "grouped", tuple(f"-DHB_{k}={v}" for k, v in values.items()))


def tile_for(rows: int, m_tiles: int, blocks: int) -> tuple[str, int]:
    """(build, columns per item) of one dense product that leave the least to the busiest block.

    By arithmetic, not by measurement: a product of few columns costs as if it had eight more, for its weights."""
    items = math.ceil(m_tiles / 2)

    def cost(cap: int) -> int:
        parts = math.ceil(rows / cap)
        width = math.ceil(rows / parts / 16) * 16
        return math.ceil(parts * items / blocks) * (width + 8)

    cap = min((32, 48, 64, 80, 96, 112, 128), key=lambda cap: (cost(cap), -cap))
    return "64x128" if min(cap, rows) <= 64 else "128x128", cap


class SyncDense(Dense):
    mx = ""

    def _product(self, rows: int) -> tuple[Variant, int]:
        shape, cap = tile_for(rows, self.n // TILE, self.room.machine.blocks)
        if self.shape:
            shape, cap = self.shape, COLUMNS[self.shape]
        return SyncVariant(self.format, shape, False, self.mx), min(cap, COLUMNS[shape])


class SyncExperts(Experts):
    mx = ""

    def _shape(self, per_expert: float) -> str:
        return self.shape or ("64x128" if per_expert <= 32 else "128x128")  # measured on an H200 (docs/LOG.md)

    def _variant(self, shape: str, swiglu: bool) -> Variant:
        return SyncVariant(self.format, shape, swiglu, self.mx)


# ---- phases ---------------------------------------------------------------------------------------------------------


class _Sync(_Grouped):
    arches, instruction = ("sm120", "sm121"), "mma.sync within 99 KB"
    dense: type[SyncDense] = SyncDense
    experts: type[SyncExperts] = SyncExperts


class SyncMoe(_Sync, GroupedMoe):
    name = "cuda.grouped_sync_moe"
    tiles = ("auto", *COLUMNS)


class SyncQkv(_Sync, GroupedQkv):
    name = "cuda.grouped_sync_norm_qkv"


class SyncOut(_Sync, GroupedOut):
    name = "cuda.grouped_sync_o"


class SyncHead(_Sync, GroupedHead):
    name = "cuda.grouped_sync_norm_lm_head"


PHASES: tuple[Phase, ...] = (SyncQkv(), SyncOut(), SyncMoe(), SyncHead())
