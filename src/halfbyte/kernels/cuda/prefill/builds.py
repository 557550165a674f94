"""Builds of the grouped products (grouped.cu, grouped_rows.cu) and what runs them: arguments, shapes, machine, buffers.

A `Machine` runs the kernels: `Gpu` on the current device, or the emulator of the tests on a CPU. What is computed with
them is in grouped.py.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from halfbyte.formats.tile16 import CHUNK_BYTES
from halfbyte.kernels.launch import Kernel, Map, Program, byte_map, compile_program
from halfbyte.plan.phase import ARCHES

FOLDER = Path(__file__).parent
FORMATS = {"mxfp4": 0, "q8": 1, "bf16": 2}
PACKED = {"bf16": 0, "f16": 1, "e4m3": 2}  # how activations are packed
TILE, CHUNK, PAD = 64, 64, 128  # rows of a tile, k of a chunk, slots that may be read past the last one
EXPERTS_MAX, TOP_MAX = 512, 8
BIASES = 128  # bytes of shared memory for a warp's biases
# Steps of up to so many rows may be captured: their buffers are made once and never replaced.
GRAPH_ROWS = max(arch.limits.batch for arch in ARCHES.values())
GROUP_THREADS, ROW_THREADS = 1024, 192
SUM_WIDTH = 8 * 3 * ROW_THREADS  # of a row that is summed and packed in one pass
_P, _I, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_float


class ProductArgs(ctypes.Structure):
    _fields_ = [
        ("map", ctypes.c_uint64 * 16),
        *((name, _P) for name in ("bias", "x", "starts", "counts", "packed", "out", "residual", "tops", "x_scale")),
        ("out_stride", ctypes.c_longlong),
        *((name, _I) for name in ("experts", "m_tiles", "chunks", "columns", "x_slots", "packed_slots", "n_cap")),
        ("bias_float", _I),
        ("limit", _F),
        ("alpha", _F),
        *((name, _P) for name in ("angles", "cells", "q", "pool")),
        ("value_offset", ctypes.c_longlong),
        ("heads", _I),
        ("kv_heads", _I),
        ("out_bf16", _I),
        ("order", _P),
        ("unused", _I * 2),  # to a multiple of 64 bytes, as the map in front is aligned
    ]


class RowsArgs(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("source", "norm", "select", "packed", "ids", "weights", "starts")),
        *((name, _P) for name in ("counts", "place", "parts", "residual", "out")),
        ("stride", ctypes.c_longlong),
        *((name, _I) for name in ("rows", "width", "slots", "experts", "top_k", "source_float", "norm_float")),
        ("ids_wide", _I),
        ("kind", _I),
        ("eps", _F),
        ("scales", _P),
        ("hidden", _P),
        ("parts_float", _I),
        ("order", _P),
    ]


class Shape(NamedTuple):
    """A build of grouped.cu, as grouped.cuh has it."""

    number: int
    warpgroups: int
    tiles: int  # of 64 rows, for each warpgroup
    columns: int  # of an item, at most
    pair: int = 1  # blocks that share an item's columns


SHAPES = {
    "narrow": Shape(0, 4, 1, 64),
    "wide": Shape(1, 2, 2, 128),
    "broad": Shape(2, 3, 2, 88),
    "vast": Shape(3, 2, 1, 256, pair=2),
    "lean": Shape(2, 3, 2, 48),  # broad for few columns
}


@dataclass(frozen=True)
class Variant:
    """One build: `narrow` for memory-bound batches, the others for prefill."""

    format: str
    shape: str
    swiglu: bool
    rope: bool = field(default=False, kw_only=True)  # rotated queries out, keys and values into their pages

    @property
    def fp8(self) -> bool:
        """Activations are E4M3."""
        return self.shape == "vast"

    @property
    def pair(self) -> int:
        return SHAPES[self.shape].pair

    @property
    def columns(self) -> int:
        """Of an item, at most."""
        return SHAPES[self.shape].columns

    @property
    def chunks(self) -> int:
        """Of 64 k, in a stage."""
        return 2 if self.format == "mxfp4" else 1

    @property
    def stage(self) -> tuple[int, int]:
        """(bytes, stages), as grouped.cuh has them."""
        shape, chunk = SHAPES[self.shape], CHUNK_BYTES[self.format]
        column = 128 if self.fp8 else self.chunks * 128
        weights = shape.warpgroups * shape.tiles * 4 * self.chunks * chunk
        size: int = -(-(shape.columns * column + weights) // 1024) * 1024
        return size, (228096 - shape.warpgroups * self.staging) // size

    @property
    def staging(self) -> int:
        """Bytes in which a warpgroup puts its results in order."""
        return 8704 if self.fp8 else 9216 if SHAPES[self.shape].tiles == 2 else 5120

    @property
    def shared_bytes(self) -> int:
        (size, stages), shape = self.stage, SHAPES[self.shape]
        tables = 32 + 2 * 28 + 8 + (2 if self.fp8 else 4) * EXPERTS_MAX
        tables += shape.warpgroups * shape.columns * 4 if self.fp8 else 16 + shape.warpgroups * 4 * BIASES
        return stages * (size + 16) + tables + shape.warpgroups * self.staging + 1024

    @property
    def threads(self) -> int:
        return SHAPES[self.shape].warpgroups * 128 + 128

    def program(self) -> Program:
        values = {"FORMAT": FORMATS[self.format], "SHAPE": SHAPES[self.shape].number, "SWIGLU": int(self.swiglu)}
        values |= {"PAIR": self.pair, "ROPE": int(self.rope), "COLUMNS": self.columns}
        return Program(FOLDER / "grouped.cu", "grouped", tuple(f"-DHB_{k}={v}" for k, v in values.items()))


ROWS_PROGRAM = FOLDER / "rows.cu"


class Machine(Protocol):
    blocks: int

    def map(self, data: Tensor, row_bytes: int, box: tuple[int, int]) -> Map: ...

    def product(self, variant: Variant, args: ProductArgs) -> None: ...

    def rows(self, entry: str, grid: int, args: RowsArgs) -> None: ...


class Gpu:
    """The kernels on the current CUDA device: a persistent block per multiprocessor, launches that overlap."""

    def __init__(self) -> None:
        major, minor = torch.cuda.get_device_capability()
        self.arch = f"sm_{major}{minor}a"
        self.blocks = torch.cuda.get_device_properties().multi_processor_count
        self._products: dict[Variant, Kernel] = {}
        self._rows: dict[str, Kernel] = {}

    def map(self, data: Tensor, row_bytes: int, box: tuple[int, int]) -> Map:
        return byte_map(data, row_bytes, box)

    def load(self, variant: Variant) -> None:
        if variant not in self._products:
            cubin = compile_program(variant.program(), self.arch)
            self._products[variant] = Kernel(cubin, "grouped", variant.shared_bytes)

    def product(self, variant: Variant, args: ProductArgs) -> None:
        self.load(variant)
        grid = self.blocks - self.blocks % variant.pair
        self._products[variant].launch(grid, variant.threads, args, early=True)

    def rows(self, entry: str, grid: int, args: RowsArgs) -> None:
        if entry not in self._rows:
            self._rows[entry] = Kernel(compile_program(Program(ROWS_PROGRAM, entry), self.arch), entry, 4096)
        self._rows[entry].launch(grid, GROUP_THREADS if entry == "group_rows" else ROW_THREADS, args, early=True)


@functools.cache
def gpu() -> Gpu:
    return Gpu()


class Room:
    """Buffers by name, shared by all layers of a model: one layer is done with them before the next begins."""

    def __init__(self, machine: Machine, buffers: dict[str, Tensor], device: torch.device) -> None:
        self.machine, self._buffers, self.device = machine, buffers, device

    def get(self, name: str, rows: int, size: Callable[[int], int], dtype: torch.dtype) -> Tensor:
        """A buffer of at least size(rows) elements. One that a captured graph may hold is never replaced."""
        small = rows <= GRAPH_ROWS
        key = f"grouped.{name}{'.small' if small else ''}"
        count = size(GRAPH_ROWS if small else rows)
        held = self._buffers.get(key)
        if held is None or held.numel() < count:
            assert held is None or not small, f"{key} was made for another model"
            held = self._buffers[key] = torch.zeros(count, dtype=dtype, device=self.device)
        return held
