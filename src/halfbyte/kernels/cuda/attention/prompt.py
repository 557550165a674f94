"""Attention of whole prompts (prompt.cuh): the host's side of every kernel that does it, and what their phases share.

The pool must be bf16, contiguous, in pages of 64 tokens with heads of 64; eight query heads to a kv head. Anything else
is refused, and converts nothing. Which instruction multiplies is the phase's (flash.py, flash_sync.py).
"""

from __future__ import annotations

import ctypes
import functools
import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from halfbyte.gates import Gates
from halfbyte.kernels.cuda.device.host import FLOAT, INT, POINTER, KernelMachine, fields, gpu, is_float, pointer
from halfbyte.kernels.cuda.phase import CudaPhase
from halfbyte.kernels.cuda.prefill.builds import PACKED
from halfbyte.kernels.cuda.prefill.products import ProductInputs
from halfbyte.kernels.launch import Build, Map, Program
from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import Arch, Binding, Launch, Spec
from halfbyte.plan.step import Step

FOLDER = Path(__file__).parent
PAGE, HEAD_DIM, GROUP = 64, 64, 8


class FlashArgs(ctypes.Structure):
    """Mirrors `Flash` in prompt.cuh."""

    _fields_ = [
        ("pages", ctypes.c_uint64 * 16),
        *fields(POINTER, "q", "out", "sinks", "table", "positions", "query_start"),
        *fields(INT, "sequences", "kv_heads", "table_stride", "tiles", "page_rows", "first_row", "window"),
        ("sinks_float", INT),
        ("scale", FLOAT),
        *fields(INT, "slots", "half", "first_tile"),
        ("pool", POINTER),
        ("wide", INT),
        ("unused", INT * 5),  # to a multiple of 64 bytes, as the map in front is aligned
    ]


@dataclass(frozen=True)
class PromptShape:
    """One build of a kernel: how many tokens of one sequence a block takes, and with how many threads."""

    @property
    @abstractmethod
    def tokens(self) -> int: ...

    @property
    @abstractmethod
    def threads(self) -> int: ...

    @property
    @abstractmethod
    def shared_bytes(self) -> int: ...

    @property
    def for_single_rows(self) -> PromptShape | None:
        """The shape for sequences with a single row, which would leave most of a block idle. Its bits are equal."""
        return None

    @abstractmethod
    def program(self) -> Program: ...

    @abstractmethod
    def describe(self) -> Build:
        """The build, which `build_of` caches."""

    def pages(self, machine: KernelMachine, pool: Tensor) -> Map | None:
        """The copy engine's map of the pool, if the kernel reads through one."""
        return None


@functools.cache
def build_of(shape: PromptShape) -> Build:
    return shape.describe()


def attend(
    machine: KernelMachine,
    shape: PromptShape,
    q: Tensor,
    pool: Tensor,
    layer: int,
    step: Step,
    kind: str,
    sinks: Tensor | None,
    window: int,
    *,
    pages: Map | None,
    packed: ProductInputs | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """[rows, heads * 64] from rotated queries [rows, heads, 64]; `pages`: shape.pages(machine, pool); `dtype`: bf16, or
    float32 from a kernel that can.

    `packed`: the input of a grouped product, to be filled instead: bf16 values as bf16 or f16. Sequences in front that
    have a single row go by themselves where the shape says so."""
    rows, heads, dim = q.shape
    kv_heads, table = pool.shape[3], step.block_tables[kind]
    if packed is None:
        out, slots = torch.empty((rows, heads * dim), dtype=dtype, device=q.device), 0
    else:
        assert packed.kind in (PACKED["bf16"], PACKED["f16"]), "E4M3 needs the whole row first"
        out, slots = packed.packed, packed.slots
    common = FlashArgs(
        q=pointer(q),
        out=pointer(out),
        sinks=pointer(sinks),
        positions=pointer(step.positions),
        kv_heads=kv_heads,
        table_stride=table.stride(0),
        page_rows=pool.stride(0) // HEAD_DIM,
        first_row=layer * pool.stride(1) // HEAD_DIM,
        window=window,
        sinks_float=is_float(sinks),
        scale=dim**-0.5 * math.log2(math.e),
        slots=slots,
        half=int(packed is not None and packed.kind == PACKED["f16"]),
        pool=pointer(pool),
        wide=int(dtype == torch.float32),
    )
    if pages is not None:
        common.pages = pages
    single = shape.for_single_rows
    singles = 0 if single is None else step.singles
    for build, first, last, begin, end in (
        (single or shape, 0, singles, 0, singles),
        (shape, singles, step.sequences, singles, rows),
    ):
        if begin == end:
            continue
        args = FlashArgs.from_buffer_copy(common)
        args.query_start = step.query_start.data_ptr() + 4 * first
        args.table = table.data_ptr() + 4 * first * table.stride(0)
        args.sequences, args.first_tile = last - first, begin // build.tokens
        args.tiles = end // build.tokens - args.first_tile + last - first
        machine.run(build_of(build), args.tiles * kv_heads, args)
    return out


class PromptAttention(CudaPhase):
    covers, category = ("attention",), "attention"
    backends = {"attention": "cuda"}
    regimes = frozenset({"prefill"})
    knows = frozenset({"sinks", "window", "gqa", "uneven_layers"})
    full: PromptShape
    sliding: PromptShape

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        if spec.head_dim != HEAD_DIM or spec.heads != GROUP * spec.kv_heads:
            return f"needs {GROUP} query heads of {HEAD_DIM} to a kv head, not {spec.heads} to {spec.kv_heads}"
        if spec.page_size != PAGE or spec.kv_dtype != "bf16":
            return f"needs KV pages of {PAGE} tokens in bf16, not {spec.page_size} in {spec.kv_dtype}"
        return None

    def builds(self, spec: Spec, arch: Arch) -> list[Build]:
        shapes = [shape for one in (self.full, self.sliding) for shape in (one, one.for_single_rows) if shape]
        return list(dict.fromkeys(map(build_of, shapes)))

    def result(self, spec: Spec) -> torch.dtype:
        """The type of the result that o reads."""
        return torch.bfloat16

    def bind(self, b: Binding) -> Launch:
        run = self.bind_into(b)

        def launch(step: Step, acts: Activations) -> None:
            acts.attn = run(step, acts, None)

        return launch

    def bind_into(self, b: Binding) -> Callable[[Step, Activations, ProductInputs | None], Tensor]:
        """acts.q and where packed rows go, if they are wanted (see `attend`) -> the result."""
        spec, kind, index, dtype = b.spec, b.kind or "full", b.kind_index, self.result(b.spec)
        window = spec.window if kind == "sliding" else 0
        sinks = b.weights.sinks if "sinks" in spec.features_of(("attention",)) else None
        machine, shape = gpu(), self.sliding if window else self.full
        maps: dict[tuple[int, int], Map | None] = {}  # a pool may be replaced, and another size lie where it lay

        def run(step: Step, acts: Activations, packed: ProductInputs | None) -> Tensor:
            pool = b.kv_pool()
            key = pool.data_ptr(), pool.shape[0]
            if key not in maps:
                maps.clear()
                maps[key] = shape.pages(machine, pool)
            return attend(
                machine,
                shape,
                acts.q,
                pool,
                index,
                step,
                kind,
                sinks,
                window,
                pages=maps[key],
                packed=packed,
                dtype=dtype,
            )

        return run
