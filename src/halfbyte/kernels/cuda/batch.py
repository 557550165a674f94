"""Products and rows of a batch of 2 to 128 rows, around batch.cu and batch_rows.cu.

`Layer` holds one layer's matrices in the layout "tile16" and runs them, with the norms, the router and the sums between
them, over buffers that all layers share. Nothing here synchronises with the host, allocates in a step or looks at
device data, so a step can be captured. Weights are never converted: a wrong layout or shape is a PlanError.

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
ROWS_SOURCE = FOLDER / "batch_rows.cu"
FORMATS = {"mxfp4": 0, "q8": 1, "bf16": 2}
ROWS_MAX, COLUMNS_MAX, EXPERTS_MAX, TOP_MAX = 128, 512, 512, 8
RING, QUEUE, ROW_THREADS, ROUTER_CHUNKS = 190_000, 4, 256, 3
_P, _I, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_float


class ProductArgs(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("weights", "bias", "x", "out", "residual", "ids", "tickets", "trace")),
        *((name, _I) for name in ("columns", "experts", "tiles", "share", "early", "bias_float")),
        ("limit", _F),
        ("alpha", _F),
    ]


class RowsArgs(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("x", "parts", "weights", "ids", "norm", "h", "router", "router_bias", "logits")),
        ("tickets", _P),
        *((name, _I) for name in ("rows", "norm_float", "bias_float")),
        ("eps", _F),
    ]


@dataclass(frozen=True)
class Variant:
    """One build of batch.cu, with the sizes that batch.cuh derives from it."""

    format: str
    k: int
    swiglu: bool = False
    ring: int = RING
    fewer: bool = False  # warps that sum, to leave shared memory to the ring

    @classmethod
    def within(cls, shared: int, format: str, k: int, swiglu: bool = False) -> Variant:
        """The build for blocks of so much shared memory: a ring of two tiles if fewer summing warps allow it."""
        plain = cls(format, k, swiglu)
        if plain.shared_bytes <= shared:
            return plain
        parts, slot = plain.slots
        tries = [replace(plain, ring=tiles * parts * slot, fewer=f) for tiles in (2, 1) for f in (False, True)]
        return next((v for v in tries if v.shared_bytes <= shared), tries[-1])

    @property
    def workers(self) -> tuple[int, int]:
        """(warps that multiply, chunks of a tile for each)."""
        chunks = self.k // 64
        each = -(-chunks // 16)
        return -(-chunks // each), each

    @property
    def threads(self) -> int:
        return 32 * (self.workers[0] + 1 + self.summers)

    @property
    def summers(self) -> int:
        return 2 if self.fewer else 3 if self.workers[0] == 16 else 4

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
        tables = 12 * QUEUE + 4 + 8 * EXPERTS_MAX + 8 * COLUMNS_MAX
        return -(-(slots * slot + self.summers * workers * 512 + bars + tables) // 8) * 8

    def program(self) -> Program:
        values = {"FORMAT": FORMATS[self.format], "K": self.k, "SWIGLU": int(self.swiglu), "RING": self.ring}
        values |= {"SUMMERS": self.summers} if self.fewer else {}
        return Program(FOLDER / "batch.cu", "batch_product", tuple(f"-DHB_{k}={v}" for k, v in values.items()))


@dataclass(frozen=True)
class RowShape:
    """One build of batch_rows.cu."""

    hidden: int
    experts: int
    top_k: int

    @property
    def parts(self) -> int:
        return -(-(self.hidden // 64) // ROUTER_CHUNKS)

    def grid(self, entry: str, rows: int) -> tuple[int, int]:
        """(blocks, threads) of a kernel."""
        if entry == "batch_router":
            return self.parts * -(-rows // 8), self.experts * 2
        return rows, ROW_THREADS

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
            kernel = self._kernels[variant] = Kernel(cubin, "batch_product", variant.shared_bytes)
        kernel.launch(self.blocks, variant.threads, args, early=True)

    def rows(self, shape: RowShape, entry: str, args: RowsArgs) -> None:
        kernel = self._kernels.get((shape, entry))
        if kernel is None:
            cubin = compile_program(shape.program(entry), self.arch)
            kernel = self._kernels[(shape, entry)] = Kernel(cubin, entry, 4096)
        kernel.launch(*shape.grid(entry, args.rows), args, early=True)


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


class Matrix:
    """One matrix, or a stack of experts', with its bias."""

    def __init__(
        self,
        w: MXTensor | DenseTiles,
        bias: Tensor | None,
        role: str,
        *,
        swiglu: bool = False,
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
        self.data, self.bias, self.variant = w.data, bias, Variant.within(shared, form, self.k, swiglu)
        if self.variant.shared_bytes > shared:
            raise PlanError(f"a tile of {role} in {form} does not fit in {shared} bytes of shared memory.")
        self.experts = w.data.shape[0] if w.data.ndim == 4 else 1
        self._bias_float = is_float(bias)

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
        early: bool = True,
        limit: float = 0.0,
        alpha: float = 0.0,
        trace: Tensor | None = None,
    ) -> None:
        """out[c] = W x[c / share] + bias (+ residual[c]), W that of expert ids[c]."""
        assert x.dtype == torch.bfloat16, "activations are bf16"
        assert x.is_contiguous(), "rows of x are whole"
        assert columns <= COLUMNS_MAX, "too many columns"
        args = ProductArgs(
            weights=pointer(self.data), bias=pointer(self.bias), x=pointer(x), out=pointer(out),
            residual=pointer(residual), ids=pointer(ids), tickets=tickets, trace=pointer(trace), columns=columns,
            experts=self.experts, tiles=self.n // 16, share=share, early=int(early), bias_float=self._bias_float,
            limit=limit, alpha=alpha,
        )  # fmt: skip
        machine.product(self.variant, args)


class Room:
    """What one step needs besides weights, shared by all layers: one layer is done with it before the next begins.

    Buffers are made once in `held`, by name, and never replaced: a captured graph may hold them."""

    def __init__(self, shape: RowShape, inner: int, held: dict[str, Tensor], device: torch.device) -> None:
        self.shape = shape
        choices = ROWS_MAX * shape.top_k

        def get(name: str, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            key = f"batch.{name}"
            if key not in held:
                held[key] = torch.zeros(size, dtype=dtype, device=device)
            assert held[key].shape == size, f"{key} was made for another model"
            return held[key]

        self.h = get("h", ROWS_MAX, shape.hidden, dtype=torch.bfloat16)
        self.hidden = get("hidden", choices, inner, dtype=torch.bfloat16)
        self.parts = get("parts", choices, shape.hidden)
        self.logits = get("logits", shape.parts * ROWS_MAX, shape.experts)
        self.weights = get("weights", ROWS_MAX, shape.top_k)
        self.ids = get("ids", ROWS_MAX, shape.top_k, dtype=torch.int32)
        self.tickets = get("tickets", 2, dtype=torch.int32)


class Layer:
    """One layer but for attention: `enter` gives q, k and v of all rows, `leave` takes what attention made of them."""

    def __init__(
        self,
        machine: Machine,
        room: Room,
        *,
        qkv: Matrix,
        o: Matrix,
        gate_up: Matrix,
        down: Matrix,
        attn_norm: Tensor,
        mlp_norm: Tensor,
        router: Tensor,
        router_bias: Tensor,
        eps: float,
        limit: float,
        alpha: float,
    ) -> None:
        if router.dtype != torch.bfloat16 or not router.is_contiguous():
            raise PlanError("the batch products read the router in bf16.")
        self.machine, self.room = machine, room
        self.qkv, self.o, self.gate_up, self.down = qkv, o, gate_up, down
        self.attn_norm, self.mlp_norm, self.router, self.router_bias = attn_norm, mlp_norm, router, router_bias
        self.eps, self.limit, self.alpha = eps, limit, alpha
        is_float(attn_norm), is_float(mlp_norm), is_float(router_bias)

    def _rows(self, x: Tensor, norm: Tensor | None, *, summed: bool) -> RowsArgs:
        r = self.room
        assert x.dtype == torch.float32, "the residual is float32"
        assert x.is_contiguous(), "rows of the residual are whole"
        return RowsArgs(
            x=pointer(x), parts=pointer(r.parts) if summed else None, weights=pointer(r.weights), ids=pointer(r.ids),
            norm=pointer(norm), h=pointer(r.h), router=pointer(self.router), router_bias=pointer(self.router_bias),
            logits=pointer(r.logits), tickets=pointer(r.tickets), rows=x.shape[0], norm_float=is_float(norm),
            bias_float=is_float(self.router_bias), eps=self.eps,
        )  # fmt: skip

    def enter(self, x: Tensor, out: Tensor, *, pending: bool) -> None:
        """`pending`: the layer before has left its experts' results to be added to x."""
        self.machine.rows(self.room.shape, "batch_finish", self._rows(x, self.attn_norm, summed=pending))
        self.qkv.run(self.machine, self.room.h, out, x.shape[0])

    def leave(self, x: Tensor, attn: Tensor) -> None:
        """x + o(attn) in place, and the experts' results of that, which the next layer or `finish` adds."""
        r, rows = self.room, x.shape[0]
        top_k = r.shape.top_k
        self.o.run(self.machine, attn, x, rows, residual=x)
        args = self._rows(x, self.mlp_norm, summed=False)
        self.machine.rows(r.shape, "batch_router", args)
        self.machine.rows(r.shape, "batch_choose", args)
        tickets = r.tickets.data_ptr()
        self.gate_up.run(
            self.machine, r.h, r.hidden, rows * top_k, ids=r.ids, tickets=tickets, share=top_k, early=False,
            limit=self.limit, alpha=self.alpha,
        )  # fmt: skip
        self.down.run(self.machine, r.hidden, r.parts, rows * top_k, ids=r.ids, tickets=tickets + 4)

    def finish(self, x: Tensor) -> None:
        """After the last layer: its experts' results, in place."""
        self.machine.rows(self.room.shape, "batch_finish", self._rows(x, None, summed=True))
