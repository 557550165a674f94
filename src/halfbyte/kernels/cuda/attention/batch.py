"""Rope, KV write and attention of a batch in one launch (batch_attention.cu), over pages of 64 tokens in bf16.

Refuses nothing itself: the phase that binds it asks `refuse`. Allocates nothing in a step.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from halfbyte.kernels.cuda.batch.products import ROWS_MAX, is_float, pointer
from halfbyte.kernels.launch import Kernel, Program, compile_program
from halfbyte.plan.phase import Spec
from halfbyte.plan.step import Step

FOLDER = Path(__file__).parent
PAGE, DIM, HELD, THREADS, SHARED = 64, 64, 68, 256, 20996  # as batch_attention.cu has them
PARTS_MAX = 16
_P, _I, _F, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_float, ctypes.c_longlong


class AttentionArgs(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("qkv", "pool", "table", "positions", "sequence_of", "query_start", "cosines")),
        *((name, _P) for name in ("sines", "sinks", "out", "sums", "arrivals")),
        ("page_stride", _L),
        ("value_offset", _L),
        *((name, _I) for name in ("rows", "table_stride", "parts", "window", "sinks_float")),
        ("scale", _F),
    ]


@dataclass(frozen=True)
class AttentionShape:
    """One build."""

    group: int
    kv_heads: int

    def program(self) -> Program:
        options = (f"-DHB_GROUP={self.group}", f"-DHB_KV_HEADS={self.kv_heads}")
        return Program(FOLDER / "batch.cu", "batch_attention", options)


class Machine(Protocol):
    def attention(self, shape: AttentionShape, grid: int, args: AttentionArgs) -> None: ...


class Gpu:
    def __init__(self) -> None:
        major, minor = torch.cuda.get_device_capability()
        self.arch = f"sm_{major}{minor}a"
        self._kernels: dict[AttentionShape, Kernel] = {}

    def attention(self, shape: AttentionShape, grid: int, args: AttentionArgs) -> None:
        kernel = self._kernels.get(shape)
        if kernel is None:
            cubin = compile_program(shape.program(), self.arch)
            kernel = self._kernels[shape] = Kernel(cubin, "batch_attention", SHARED)
        kernel.launch(grid, THREADS, args, early=True)


def refuse(spec: Spec) -> str | None:
    if spec.head_dim != DIM or spec.page_size != PAGE or spec.kv_dtype != "bf16":
        given = f"{spec.head_dim}, {spec.page_size} and {spec.kv_dtype}"
        return f"needs heads of {DIM} and pages of {PAGE} tokens in bf16, not {given}"
    if spec.heads // spec.kv_heads > 8:
        return f"packs up to 8 query heads of a kv head, not {spec.heads // spec.kv_heads}"
    return None


def parts_bound(max_kv_len: int, window: int) -> int:
    """Parts that a row of at most this many tokens can have: see `pages_in_part` in the device code."""
    pages = -(-max(1, max_kv_len) // PAGE)
    if window:
        pages = min(pages, (window - 1) // PAGE + 2)
    most = -(-min(pages, 64) // 8)
    if pages > 64:
        most = max(most, -(-min(pages, 512) // 32))
    if pages > 512:
        most = max(most, -(-pages // 128))
    return most


class BatchAttention:
    """One layer's attention. `held`: buffers by name that all layers share, made once and never replaced."""

    def __init__(
        self,
        machine: Machine,
        shape: AttentionShape,
        held: dict[str, Tensor],
        *,
        window: int,
        sinks: Tensor | None,
        scale: float,
        device: torch.device,
    ) -> None:
        self.machine, self.shape, self.window, self.sinks, self.scale = machine, shape, window, sinks, scale
        heads = shape.group * shape.kv_heads
        sizes = {
            "attn": ((ROWS_MAX, heads * DIM), torch.bfloat16),
            "sums": ((ROWS_MAX, PARTS_MAX, heads, HELD), torch.float32),
            "arrivals": ((ROWS_MAX, shape.kv_heads), torch.int32),
        }
        for name, (size, dtype) in sizes.items():
            if f"batch.{name}" not in held:
                held[f"batch.{name}"] = torch.zeros(size, dtype=dtype, device=device)
            assert held[f"batch.{name}"].shape == size, f"batch.{name} was made for another model"
        self.out, self.sums, self.arrivals = (held[f"batch.{name}"] for name in sizes)
        is_float(sinks)

    def run(self, step: Step, kind: str, qkv: Tensor, pool: Tensor, layer: int, cos: Tensor, sin: Tensor) -> Tensor:
        """bf16 [rows, heads * 64]; `pool` as Step has it, `layer` its place in a page, cos and sin [rows, 32]."""
        rows, table = step.rows, step.block_tables[kind]
        parts = parts_bound(step.max_kv_len, self.window)
        assert rows <= ROWS_MAX, "too many rows"
        assert parts <= PARTS_MAX, "contexts of up to 131072 tokens"
        assert (qkv.dtype, pool.dtype) == (torch.float32, torch.bfloat16), "qkv in float32, the cache in bf16"
        assert pool[0, layer].is_contiguous(), "a layer's keys and values lie together"
        args = AttentionArgs(
            qkv=pointer(qkv), pool=pool.data_ptr() + 2 * layer * pool.stride(1), table=pointer(table),
            positions=pointer(step.positions), sequence_of=pointer(step.row_sequence),
            query_start=pointer(step.query_start), cosines=pointer(cos), sines=pointer(sin), sinks=pointer(self.sinks),
            out=pointer(self.out), sums=pointer(self.sums), arrivals=pointer(self.arrivals),
            page_stride=pool.stride(0), value_offset=pool.stride(2), rows=rows, table_stride=table.stride(0),
            parts=parts, window=self.window, sinks_float=is_float(self.sinks), scale=self.scale,
        )  # fmt: skip
        self.machine.attention(self.shape, rows * self.shape.kv_heads * parts, args)
        return self.out
