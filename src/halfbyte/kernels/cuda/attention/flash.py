"""Attention of whole prompts on SM90 (flash.cu): the host's side, and the phase.

Reads the pool through the copy engine, so the pool must be bf16, contiguous, in pages of 64 tokens with heads of 64;
eight query heads to a kv head. Anything else is refused, and converts nothing.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from halfbyte.gates import Gates
from halfbyte.kernels.cuda.device.host import FLOAT, INT, POINTER, Machine, fields, gpu, is_float, options, pointer
from halfbyte.kernels.cuda.phase import ATTENTION, WGMMA, CudaPhase
from halfbyte.kernels.cuda.prefill.builds import PACKED
from halfbyte.kernels.cuda.prefill.products import Inputs
from halfbyte.kernels.launch import Build, Map, Program
from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import Arch, Binding, Launch, Phase, Spec
from halfbyte.plan.step import Step

SOURCE = Path(__file__).parent / "flash.cu"
PAGE, HEAD_DIM, GROUP = 64, 64, 8


class FlashArgs(ctypes.Structure):
    """Mirrors `Flash` in flash.cu."""

    _fields_ = [
        ("pages", ctypes.c_uint64 * 16),
        *fields(POINTER, "q", "out", "sinks", "table", "positions", "query_start"),
        *fields(INT, "sequences", "kv_heads", "table_stride", "tiles", "page_rows", "first_row", "window"),
        ("sinks_float", INT),
        ("scale", FLOAT),
        *fields(INT, "slots", "half", "first_tile"),
        ("unused", INT * 8),  # to a multiple of 64 bytes, as the map in front is aligned
    ]


@dataclass(frozen=True)
class FlashShape:
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

    def program(self) -> Program:
        values = {"GROUPS": self.groups, "STAGES": self.stages, "BLOCKS": self.blocks}
        return Program(SOURCE, "flash", options(values))


# Long rows: three warpgroups keep the tensor core busy and share a page's reading. A window is four pages at most, so
# that starting and ending cost more than the middle: two small blocks to a multiprocessor.
FULL, SLIDING = FlashShape(3, 6, 1), FlashShape(1, 4, 2)


@functools.cache
def build_of(shape: FlashShape) -> Build:
    name = {FULL: "flash full", SLIDING: "flash sliding"}.get(shape, f"flash {shape}")
    return Build(name, shape.program(), shape.threads, shape.shared_bytes, need=(WGMMA,), ban=r"\bHMMA", part=ATTENTION)


def map_pages(machine: Machine, pool: Tensor) -> Map:
    """The pool as rows of one head's 64 values, fetched a page of one head at a time, swizzled as wgmma reads it."""
    return machine.row_map(pool.view(-1, HEAD_DIM), (PAGE, HEAD_DIM))


def attend(
    machine: Machine,
    shape: FlashShape,
    q: Tensor,
    pool: Tensor,
    layer: int,
    step: Step,
    kind: str,
    sinks: Tensor | None,
    window: int,
    *,
    pages: Map,
    packed: Inputs | None = None,
) -> Tensor:
    """bf16 [rows, heads * 64] from rotated queries [rows, heads, 64]; `pages`: map_pages(machine, pool).

    `packed`: the input of a grouped product, to be filled instead: bf16 values as bf16 or f16. Where a block of `shape`
    takes many tokens, a sequence with a single row would leave most of it idle: those in front go by themselves, in
    blocks of a few, and get the same bits there."""
    rows, heads, dim = q.shape
    kv_heads, table = pool.shape[3], step.block_tables[kind]
    if packed is None:
        out, slots = torch.empty((rows, heads * dim), dtype=torch.bfloat16, device=q.device), 0
    else:
        assert packed.kind in (PACKED["bf16"], PACKED["f16"]), "E4M3 needs the whole row first"
        out, slots = packed.packed, packed.slots
    common = FlashArgs(
        pages=pages, q=pointer(q), out=pointer(out), sinks=pointer(sinks), positions=pointer(step.positions),
        kv_heads=kv_heads, table_stride=table.stride(0), page_rows=pool.stride(0) // HEAD_DIM,
        first_row=layer * pool.stride(1) // HEAD_DIM, window=window,
        sinks_float=is_float(sinks), scale=dim**-0.5 * math.log2(math.e),
        slots=slots, half=int(packed is not None and packed.kind == PACKED["f16"]),
    )  # fmt: skip
    singles = 0 if shape.groups == SLIDING.groups else step.singles
    for build, first, last, begin, end in (
        (SLIDING, 0, singles, 0, singles), (shape, singles, step.sequences, singles, rows)
    ):  # fmt: skip
        if begin == end:
            continue
        args = FlashArgs.from_buffer_copy(common)
        args.query_start = step.query_start.data_ptr() + 4 * first
        args.table = table.data_ptr() + 4 * first * table.stride(0)
        args.sequences, args.first_tile = last - first, begin // build.tokens
        args.tiles = end // build.tokens - args.first_tile + last - first
        machine.run(build_of(build), args.tiles * kv_heads, args)
    return out


class FlashAttention(CudaPhase):
    name, covers, category, rank = "cuda.attention_flash", ("attention",), "attention", 20
    backends = {"attention": "cuda"}
    regimes = frozenset({"prefill"})
    knows = frozenset({"sinks", "window", "gqa", "uneven_layers"})

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        if arch.name != "sm90":
            return f"is written for sm90 (wgmma), not {arch.name}"
        if spec.head_dim != HEAD_DIM or spec.heads != GROUP * spec.kv_heads:
            return f"needs {GROUP} query heads of {HEAD_DIM} to a kv head, not {spec.heads} to {spec.kv_heads}"
        if spec.page_size != PAGE or spec.kv_dtype != "bf16":
            return f"needs KV pages of {PAGE} tokens in bf16, not {spec.page_size} in {spec.kv_dtype}"
        quantised = spec.formats["o"] in ("mxfp4", "q8")
        if (spec.activation if quantised else spec.dtype) not in ("bf16", "fp8"):  # fp8 is rounded from bf16
            return "gives bf16, and o takes its input in another format"
        return None

    def builds(self, spec: Spec, arch: Arch) -> list[Build]:
        return [build_of(FULL), build_of(SLIDING)]

    def bind(self, b: Binding) -> Launch:
        run = self.bind_into(b)

        def launch(step: Step, acts: Activations) -> None:
            acts.attn = run(step, acts, None)

        return launch

    def bind_into(self, b: Binding) -> Callable[[Step, Activations, Inputs | None], Tensor]:
        """acts.q and where packed rows go, if they are wanted (see `attend`) -> the result."""
        spec, kind, index = b.spec, b.kind or "full", b.kind_index
        window = spec.window if kind == "sliding" else 0
        sinks = b.weights.sinks if "sinks" in spec.features_of(("attention",)) else None
        machine, shape = gpu(), SLIDING if window else FULL
        maps: dict[tuple[int, int], Map] = {}  # a pool may be replaced, and another size lie where it lay

        def run(step: Step, acts: Activations, packed: Inputs | None) -> Tensor:
            pool = b.kv_pool()
            key = pool.data_ptr(), pool.shape[0]
            if key not in maps:
                maps.clear()
                maps[key] = map_pages(machine, pool)
            pages = maps[key]
            return attend(machine, shape, acts.q, pool, index, step, kind, sinks, window, pages=pages, packed=packed)

        return run


PHASES: tuple[Phase, ...] = (FlashAttention(),)
