"""Builds of the kernels of a batch of 2 to 128 rows, product.cu and rows.cu: arguments, sizes, options.

What is computed with them is in products.py and layer.py. The sizes here mirror shape.cuh, and tests compare them.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, replace
from pathlib import Path

from halfbyte.formats.tile16 import CHUNK_BYTES
from halfbyte.kernels.cuda.device.host import FLOAT, FORMATS, INT, POINTER, fields, options
from halfbyte.kernels.cuda.phase import BULK_COPY, CHOICE, EXPERTS, MMA_SYNC, OUT_AND_ROUTER, WGMMA
from halfbyte.kernels.launch import Build, Program
from halfbyte.plan.launches import PACKING

FOLDER = Path(__file__).parent
COLUMNS, ROWS_MAX, COLUMNS_MAX, EXPERTS_MAX, TOP_MAX = 8, 128, 512, 512, 8
RING, QUEUE = 190_000, 4
MEDIUM_BLOCK = 150_000  # bytes of shared memory: SM80 has more, SM86 and SM12x have less
ROW_THREADS = {"batch_finish": 256, "batch_choose": 512}
ROW_SHARED = {"batch_finish": 32, "batch_choose": 64 + 4 * EXPERTS_MAX + 16 * 512}  # at most


class StageArgs(ctypes.Structure):
    _fields_ = [
        *fields(POINTER, "weights", "bias", "x", "out"),
        *fields(INT, "tiles", "share", "bias_float", "unused"),
    ]


class BatchProductArgs(ctypes.Structure):
    _fields_ = [
        ("stage", StageArgs * 2),
        *fields(POINTER, "residual", "ids", "tickets", "done", "router", "norm", "logits", "trace", "failure"),
        *fields(INT, "columns", "experts", "early", "norm_float"),
        *fields(FLOAT, "limit", "alpha"),
    ]


class BatchRowsArgs(ctypes.Structure):
    _fields_ = [
        *fields(POINTER, "x", "parts", "weights", "ids", "norm", "h", "router_bias", "logits"),
        *fields(POINTER, "select", "tickets", "done"),
        *fields(INT, "rows", "norm_float", "bias_float"),
        ("eps", FLOAT),
    ]


@dataclass(frozen=True)
class ProductShape:
    """Everything one product is compiled for, with the sizes that shape.cuh derives from it."""

    format: str
    k: int
    swiglu: bool = False
    ids: bool = False  # a stack of matrices, and columns that choose among them
    both: bool = False  # gate_up and down in one launch
    router: int = 0  # experts of the router that multiplies the result
    ring: int = RING
    fewer: bool = False  # warps that sum, to leave shared memory to the ring

    def within(self, shared: int) -> ProductShape:
        """This one for blocks of so much shared memory: a ring of two tiles if fewer summing warps allow it, of up to
        four in a block of SM80."""
        if self.shared_bytes <= shared:
            return self
        parts, slot = self.slots
        most = (4, 3, 2, 1) if shared > MEDIUM_BLOCK else (2, 1)
        tries = [replace(self, ring=tiles * parts * slot, fewer=f) for tiles in most for f in (False, True)]
        return next((shape for shape in tries if shape.shared_bytes <= shared), tries[-1])

    @property
    def workers(self) -> tuple[int, int]:
        """(warps that multiply, chunks of a tile for each at most)."""
        chunks = self.k // 64
        workers = min(chunks, 16 if chunks > 48 else 8 if self.ids else 12)
        return workers, -(-chunks // workers)

    @property
    def threads(self) -> int:
        return 32 * (self.workers[0] + 1 + self.summers)

    @property
    def summers(self) -> int:
        return 2 if self.fewer else 3

    @property
    def slots(self) -> tuple[int, int]:
        """(slots of a tile in the ring, bytes of one)."""
        workers, chunks = self.workers
        parts = (workers + 4) // 5
        return parts, -(-workers // parts) * chunks * CHUNK_BYTES[self.format]

    @property
    def shared_bytes(self) -> int:
        workers, _ = self.workers
        parts, slot = self.slots
        slots = self.ring // slot // parts * parts
        bars = 8 * (2 * slots + 2 * self.summers + 2 * QUEUE)
        tables = 16 * QUEUE + 4 + 8 * EXPERTS_MAX + 8 * COLUMNS_MAX + 4
        return -(-(slots * slot + self.summers * workers * 512 + bars + tables) // 8) * 8

    @property
    def entry(self) -> str:
        return "batch_experts" if self.both else "batch_product"

    def program(self) -> Program:
        values = {"FORMAT": FORMATS[self.format], "K": self.k, "SWIGLU": int(self.swiglu), "RING": self.ring}
        values |= {"IDS": int(self.ids), "STAGES": 1 + self.both, "ROUTER": self.router}
        values |= {"SUMMERS": self.summers} if self.fewer else {}
        return Program(FOLDER / "product.cu", self.entry, options(values))


@dataclass(frozen=True)
class RowShape:
    """Everything the kernels between the products are compiled for."""

    hidden: int
    experts: int
    top_k: int

    @property
    def parts(self) -> int:
        """Parts of the router's products: one for each tile of o."""
        return self.hidden // 16

    def program(self, entry: str) -> Program:
        values = {"HIDDEN": self.hidden, "EXPERTS": self.experts, "TOP_K": self.top_k}
        return Program(FOLDER / "rows.cu", entry, options(values))


@functools.cache
def product_build(shape: ProductShape) -> Build:
    kind = " swiglu" if shape.swiglu else " router" if shape.router else ""
    name = f"{shape.entry} {shape.format} k={shape.k}{kind}"
    need = (MMA_SYNC, BULK_COPY)
    part = OUT_AND_ROUTER if shape.router else EXPERTS if shape.ids else None
    return Build(
        name,
        shape.program(),
        shape.threads,
        shape.shared_bytes,
        resident=shape.both,
        need=need,
        ban=WGMMA,
        part=part,
        spills_on_sm80=48 if shape.router else 0,  # of the summing warps
    )


@functools.cache
def rows_build(shape: RowShape, entry: str) -> Build:
    part = CHOICE if entry == "batch_choose" else PACKING
    return Build(entry, shape.program(entry), ROW_THREADS[entry], ROW_SHARED[entry], part=part)
