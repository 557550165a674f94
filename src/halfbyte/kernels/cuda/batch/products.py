"""The kernels of a batch of 2 to 128 rows, batch.cu and batch_rows.cu: builds, arguments, launches.

A `Matrix` is weights in the layout "tile16" with the build that multiplies them. Nothing here synchronises with the
host, allocates in a step or looks at device data, so a step can be captured. Weights are never converted: a wrong
layout or shape is a PlanError.

A `Machine` runs the kernels: `Gpu` on the current device, or the emulator of the tests on a CPU.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from halfbyte.errors import PlanError
from halfbyte.formats import DenseTiles, MXTensor
from halfbyte.formats.tile16 import CHUNK_BYTES, tile_shape
from halfbyte.kernels.launch import Kernel, Program, compile_program

FOLDER = Path(__file__).parent
ROWS_SOURCE = FOLDER / "rows.cu"
FORMATS = {"mxfp4": 0, "q8": 1, "bf16": 2}
COLUMNS, ROWS_MAX, COLUMNS_MAX, EXPERTS_MAX, TOP_MAX = 8, 128, 512, 512, 8
RING, QUEUE = 190_000, 4
ROW_THREADS = {"batch_finish": 256, "batch_choose": 512}
ROW_SHARED = {"batch_finish": 32, "batch_choose": 64 + 4 * EXPERTS_MAX + 16 * 512}  # at most
_P, _I, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_float


class StageArgs(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("weights", "bias", "x", "out")),
        *((name, _I) for name in ("tiles", "share", "bias_float", "unused")),
    ]


class ProductArgs(ctypes.Structure):
    _fields_ = [
        ("stage", StageArgs * 2),
        *((name, _P) for name in ("residual", "ids", "tickets", "done", "router", "norm", "logits", "trace")),
        *((name, _I) for name in ("columns", "experts", "early", "norm_float")),
        ("limit", _F),
        ("alpha", _F),
    ]


class RowsArgs(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("x", "parts", "weights", "ids", "norm", "h", "router_bias", "logits")),
        *((name, _P) for name in ("select", "tickets", "done")),
        *((name, _I) for name in ("rows", "norm_float", "bias_float")),
        ("eps", _F),
    ]


@dataclass(frozen=True)
class Variant:
    """One build of batch.cu, with the sizes that batch.cuh derives from it."""

    format: str
    k: int
    swiglu: bool = False
    ids: bool = False  # a stack of matrices, and columns that choose among them
    both: bool = False  # gate_up and down in one launch
    router: int = 0  # experts of the router that multiplies the result
    ring: int = RING
    fewer: bool = False  # warps that sum, to leave shared memory to the ring

    def within(self, shared: int) -> Variant:
        """This one for blocks of so much shared memory: a ring of two tiles if fewer summing warps allow it."""
        if self.shared_bytes <= shared:
            return self
        parts, slot = self.slots
        tries = [replace(self, ring=tiles * parts * slot, fewer=f) for tiles in (2, 1) for f in (False, True)]
        return next((v for v in tries if v.shared_bytes <= shared), tries[-1])

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
        workers, each = self.workers
        parts = (workers + 4) // 5
        return parts, -(-workers // parts) * each * CHUNK_BYTES[self.format]

    @property
    def shared_bytes(self) -> int:
        workers, _ = self.workers
        parts, slot = self.slots
        slots = self.ring // slot // parts * parts
        bars = 8 * (2 * slots + 2 * self.summers + 2 * QUEUE)
        tables = 16 * QUEUE + 4 + 8 * EXPERTS_MAX + 8 * COLUMNS_MAX
        return -(-(slots * slot + self.summers * workers * 512 + bars + tables) // 8) * 8

    @property
    def entry(self) -> str:
        return "batch_experts" if self.both else "batch_product"

    def program(self) -> Program:
        values = {"FORMAT": FORMATS[self.format], "K": self.k, "SWIGLU": int(self.swiglu), "RING": self.ring}
        values |= {"IDS": int(self.ids), "STAGES": 1 + self.both, "ROUTER": self.router}
        values |= {"SUMMERS": self.summers} if self.fewer else {}
        return Program(FOLDER / "product.cu", self.entry, tuple(f"-DHB_{k}={v}" for k, v in values.items()))


@dataclass(frozen=True)
class RowShape:
    """One build of batch_rows.cu."""

    hidden: int
    experts: int
    top_k: int

    @property
    def parts(self) -> int:
        """Of the router's products: one for each tile of o."""
        return self.hidden // 16

    def program(self, entry: str) -> Program:
        values = {"HIDDEN": self.hidden, "EXPERTS": self.experts, "TOP_K": self.top_k}
        return Program(ROWS_SOURCE, entry, tuple(f"-DHB_{k}={v}" for k, v in values.items()))


class Machine(Protocol):
    def product(self, variant: Variant, args: ProductArgs) -> None: ...

    def rows(self, shape: RowShape, entry: str, args: RowsArgs) -> None: ...


class Gpu:
    """The kernels on the current CUDA device: one block per multiprocessor, launches that overlap."""

    def __init__(self) -> None:
        major, minor = torch.cuda.get_device_capability()
        self.arch = f"sm_{major}{minor}a"
        self.blocks = torch.cuda.get_device_properties().multi_processor_count
        self._kernels: dict[object, Kernel] = {}

    def product(self, variant: Variant, args: ProductArgs) -> None:
        kernel = self._kernels.get(variant)
        if kernel is None:
            cubin = compile_program(variant.program(), self.arch)
            kernel = self._kernels[variant] = Kernel(cubin, variant.entry, variant.shared_bytes)
        kernel.launch(self.blocks, variant.threads, args, early=True)

    def rows(self, shape: RowShape, entry: str, args: RowsArgs) -> None:
        kernel = self._kernels.get((shape, entry))
        if kernel is None:
            cubin = compile_program(shape.program(entry), self.arch)
            kernel = self._kernels[(shape, entry)] = Kernel(cubin, entry, ROW_SHARED[entry])
        kernel.launch(args.rows, ROW_THREADS[entry], args, early=True)


@functools.cache
def gpu() -> Gpu:
    return Gpu()


def pointer(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def is_float(t: Tensor | None) -> int:
    """Whether a vector is float32 (else bf16)."""
    if t is None:
        return 0
    if t.dtype not in (torch.float32, torch.bfloat16) or not t.is_contiguous():
        raise PlanError(f"the batch products read whole vectors of float32 or bf16, not {t.dtype}.")
    return int(t.dtype == torch.float32)


@dataclass(frozen=True)
class Router:
    """What o's product leaves of the router: parts of its products with norm weight times the new residual."""

    weight: Tensor  # as `tile_router` makes it
    norm: Tensor
    logits: Tensor


def tile_router(w: Tensor) -> Tensor:
    """bf16 [experts, hidden] as a warp reads it: [16 k][16 experts][lane (g, t)][expert g or g + 8][k 4 t ..]."""
    if w.dtype != torch.bfloat16:
        raise PlanError("the batch products read the router in bf16.")
    experts, hidden = w.shape
    return w.view(experts // 16, 2, 8, hidden // 16, 4, 4).permute(3, 0, 2, 4, 1, 5).contiguous()


class Matrix:
    """One matrix, or a stack of experts', with its bias."""

    def __init__(
        self,
        w: MXTensor | DenseTiles,
        bias: Tensor | None,
        role: str,
        *,
        swiglu: bool = False,
        router: int = 0,
        shared: int = 232_448,
    ) -> None:
        form = "bf16" if isinstance(w, DenseTiles) else str(getattr(w, "format", "plain"))
        if getattr(w, "layout", "plain") != "tile16" or form not in FORMATS:
            raise PlanError(f"the batch products need {role} in the layout tile16, as mxfp4, q8 or bf16.")
        self.n, self.k = w.shape[-2:]
        if self.n % 16 or self.k % 64:
            raise PlanError(f"the batch products need {role} in multiples of 16 x 64, not {self.n} x {self.k}.")
        assert tuple(w.data.shape[-3:]) == tile_shape(self.n, self.k, form), f"{role} is not what its shape says"
        assert w.data.is_contiguous(), f"{role} is not whole"
        self.data, self.bias = w.data, bias
        wanted = Variant(form, self.k, swiglu, ids=w.data.ndim == 4, router=router)
        self.variant = wanted.within(shared)
        if self.variant.shared_bytes > shared:
            raise PlanError(f"a tile of {role} in {form} does not fit in {shared} bytes of shared memory.")
        self.experts = w.data.shape[0] if w.data.ndim == 4 else 1
        self._bias_float = is_float(bias)

    def stage(self, x: Tensor, out: Tensor, share: int) -> StageArgs:
        assert x.dtype == torch.bfloat16, "activations are bf16"
        assert x.is_contiguous(), "rows of x are whole"
        return StageArgs(
            weights=pointer(self.data), bias=pointer(self.bias), x=pointer(x), out=pointer(out), tiles=self.n // 16,
            share=share, bias_float=self._bias_float,
        )  # fmt: skip

    def run(
        self,
        machine: Machine,
        x: Tensor,
        out: Tensor,
        columns: int,
        *,
        residual: Tensor | None = None,
        ids: Tensor | None = None,
        tickets: int | None = None,
        share: int = 1,
        router: Router | None = None,
        early: bool = True,
        limit: float = 0.0,
        alpha: float = 0.0,
        trace: Tensor | None = None,
    ) -> None:
        """out[c] = W x[c / share] + bias (+ residual[c]), W that of expert ids[c]."""
        assert columns <= COLUMNS_MAX, "too many columns"
        assert (ids is not None) == self.variant.ids, "columns choose among a stack of matrices"
        args = ProductArgs(
            stage=(StageArgs * 2)(self.stage(x, out, share)), residual=pointer(residual), ids=pointer(ids),
            tickets=tickets, trace=pointer(trace), columns=columns, experts=self.experts, early=int(early), limit=limit,
            alpha=alpha,
        )  # fmt: skip
        assert (router.weight.shape[1] * 16 if router else 0) == self.variant.router, "the router it was made for"
        if router:
            args.router, args.norm, args.logits = map(pointer, (router.weight, router.norm, router.logits))
            args.norm_float = is_float(router.norm)
        machine.product(self.variant, args)
