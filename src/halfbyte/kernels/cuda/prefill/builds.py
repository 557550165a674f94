"""Builds of the grouped products (grouped.cu) and of the kernels around them (rows.cu): arguments, tiles, options.

What is computed with them is in products.py. The sizes here mirror grouped.cuh, and tests compare them.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from halfbyte.formats.tile16 import CHUNK_BYTES
from halfbyte.kernels.cuda.device.host import FLOAT, FORMATS, INT, LONG, POINTER, fields, options
from halfbyte.kernels.cuda.phase import WGMMA, WGMMA_FP8
from halfbyte.kernels.launch import Build, Program
from halfbyte.plan.launches import PACKING

FOLDER = Path(__file__).parent
PACKED = {"bf16": 0, "f16": 1, "e4m3": 2}  # how activations are packed
TILE, CHUNK, PAD = 64, 64, 128  # rows of a tile, k of a chunk, slots that may be read past the last one
EXPERTS_MAX, TOP_MAX = 512, 8
BIASES = 128  # bytes of shared memory for a warp's biases
GROUP_THREADS, ROW_THREADS, ROW_SHARED = 1024, 192, 4096
ROW_ENTRIES = ("pack_rows", "sum_pack_rows", "group_rows", "requantize", "mx_requantize", "sum_rows")  # of rows.cu
SUM_WIDTH = 8 * 3 * ROW_THREADS  # of a row that is summed and packed in one pass


class GroupedProductArgs(ctypes.Structure):
    _fields_ = [
        ("map", ctypes.c_uint64 * 16),
        *fields(POINTER, "bias", "x", "starts", "counts", "packed", "out", "residual", "row_max_scale", "x_scale"),
        ("out_stride", LONG),
        *fields(INT, "experts", "m_tiles", "chunks", "columns", "x_slots", "packed_slots", "n_cap", "bias_float"),
        *fields(FLOAT, "limit", "alpha"),
        *fields(POINTER, "angles", "cells", "q", "pool"),
        ("value_offset", LONG),
        *fields(INT, "heads", "kv_heads", "out_bf16"),
        ("order", POINTER),
        ("scale_offset", ctypes.c_uint),
        ("sum_scale", FLOAT),  # in all a multiple of 64 bytes, as the map in front is aligned
    ]


class GroupedRowsArgs(ctypes.Structure):
    _fields_ = [
        *fields(POINTER, "source", "norm", "select", "packed", "ids", "weights", "starts"),
        *fields(POINTER, "counts", "place", "parts", "residual", "out"),
        ("stride", LONG),
        *fields(INT, "rows", "width", "slots", "experts", "top_k", "source_float", "norm_float", "ids_wide", "kind"),
        ("eps", FLOAT),
        *fields(POINTER, "scales", "hidden"),
        ("parts_float", INT),
        ("order", POINTER),
    ]


class GroupedTile(NamedTuple):
    """What a block of grouped.cu multiplies at once, as grouped.cuh has it."""

    number: int  # HB_SHAPE
    warpgroups: int
    tiles: int  # of 64 rows of weights, for each warpgroup
    columns: int  # of an item, at most
    pair: int = 1  # blocks that share an item's columns
    fp8: bool = False  # activations are E4M3


# By rows of weights and columns of activations. m256n64 is for batches that memory bounds, the others for prompts.
TILES = {
    "m256n64": GroupedTile(0, 4, 1, 64),
    "m256n128": GroupedTile(1, 2, 2, 128),
    "m384n88": GroupedTile(2, 3, 2, 88),
    "m128n256x2": GroupedTile(3, 2, 1, 256, pair=2, fp8=True),
    "m384n48": GroupedTile(2, 3, 2, 48),  # m384n88's code, for fewer columns
}
FP8_TILE = "m128n256x2"


@dataclass(frozen=True)
class GroupedShape:
    """Everything one grouped product is compiled for."""

    format: str
    tile: str  # of TILES
    swiglu: bool
    rope: bool = field(default=False, kw_only=True)  # rotated queries out, keys and values into their pages

    @property
    def fp8(self) -> bool:
        """Activations are E4M3."""
        return TILES[self.tile].fp8

    @property
    def pair(self) -> int:
        return TILES[self.tile].pair

    @property
    def columns(self) -> int:
        """The most columns of an item."""
        return TILES[self.tile].columns

    @property
    def chunks(self) -> int:
        """Chunks of 64 k in a stage."""
        return 2 if self.format == "mxfp4" else 1

    @property
    def stage(self) -> tuple[int, int]:
        """(bytes, stages), as grouped.cuh has them."""
        tile, chunk = TILES[self.tile], CHUNK_BYTES[self.format]
        column = 128 if self.fp8 else self.chunks * 128
        weights = tile.warpgroups * tile.tiles * 4 * self.chunks * chunk
        size: int = -(-(tile.columns * column + weights) // 1024) * 1024
        return size, (228096 - tile.warpgroups * self.staging) // size

    @property
    def staging(self) -> int:
        """Bytes in which a warpgroup puts its results in order."""
        return 8704 if self.fp8 else 9216 if TILES[self.tile].tiles == 2 else 5120

    @property
    def shared_bytes(self) -> int:
        (size, stages), tile = self.stage, TILES[self.tile]
        tables = 32 + 2 * 28 + 8 + (2 if self.fp8 else 4) * EXPERTS_MAX
        tables += tile.warpgroups * tile.columns * 4 if self.fp8 else 16 + tile.warpgroups * 4 * BIASES
        return stages * (size + 16) + tables + tile.warpgroups * self.staging + 1024

    @property
    def threads(self) -> int:
        return TILES[self.tile].warpgroups * 128 + 128

    def program(self) -> Program:
        values = {"FORMAT": FORMATS[self.format], "SHAPE": TILES[self.tile].number, "SWIGLU": int(self.swiglu)}
        values |= {"PAIR": self.pair, "ROPE": int(self.rope), "COLUMNS": self.columns}
        return Program(FOLDER / "grouped.cu", "grouped", options(values))

    def describe(self) -> Build:
        """The build, which `build_of` caches."""
        kind = "fp8" if self.fp8 else f"{self.format} {self.tile}"
        name = f"grouped {kind}{' swiglu' if self.swiglu else ' rope' if self.rope else ''}"
        need, ban = (WGMMA_FP8, r"\bHG?MMA") if self.fp8 else (WGMMA, r"\bHMMA")
        return Build(name, self.program(), self.threads, self.shared_bytes, need=(need,), ban=ban)


@functools.cache
def build_of(shape: GroupedShape) -> Build:
    return shape.describe()


@functools.cache
def rows_build(entry: str) -> Build:
    """The build of a kernel around the products."""
    assert entry in ROW_ENTRIES
    threads = GROUP_THREADS if entry == "group_rows" else ROW_THREADS
    return Build(f"grouped {entry}", Program(FOLDER / "rows.cu", entry), threads, ROW_SHARED, part=PACKING)
