"""Rope, KV write and attention of a batch in one launch (attention/batch.cu), over pages of 64 tokens in bf16.

Refuses nothing itself: the phase that binds it asks `refuse`. Allocates nothing in a step.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from halfbyte.kernels.cuda.batch.builds import ROWS_MAX
from halfbyte.kernels.cuda.device.host import (
    FLOAT,
    INT,
    LONG,
    POINTER,
    Workspace,
    fields,
    is_float_vector,
    options,
    pointer,
)
from halfbyte.kernels.cuda.phase import MMA_SYNC, ROPE_AND_ATTENTION
from halfbyte.kernels.launch import Build, Program
from halfbyte.plan.phase import Spec
from halfbyte.plan.step import Step

FOLDER = Path(__file__).parent
PAGE, DIM, PART_WIDTH, THREADS, SHARED = 64, 64, 68, 256, 20996  # as batch.cu has them
PARTS_MAX = 16
LONGEST = PARTS_MAX * 128 * PAGE  # tokens of a context: parts have up to 128 pages


class AttentionArgs(ctypes.Structure):
    _fields_ = [
        *fields(POINTER, "qkv", "pool", "table", "positions", "sequence_of", "query_start", "cosines", "sines"),
        *fields(POINTER, "sinks", "out", "sums", "arrivals"),
        *fields(LONG, "page_stride", "value_offset"),
        *fields(INT, "rows", "table_stride", "parts", "window", "sinks_float"),
        ("scale", FLOAT),
    ]


@dataclass(frozen=True)
class AttentionShape:
    """One build."""

    group: int
    kv_heads: int

    def program(self) -> Program:
        return Program(
            FOLDER / "batch.cu", "batch_attention", options({"GROUP": self.group, "KV_HEADS": self.kv_heads})
        )


@functools.cache
def build_of(shape: AttentionShape) -> Build:
    return Build("batch attention", shape.program(), THREADS, SHARED, need=(MMA_SYNC,), part=ROPE_AND_ATTENTION)


def refuse(spec: Spec) -> str | None:
    if spec.head_dim != DIM or spec.page_size != PAGE or spec.kv_dtype != "bf16":
        sizes = f"{spec.head_dim}, {spec.page_size} and {spec.kv_dtype}"
        return f"needs heads of {DIM} and pages of {PAGE} tokens in bf16, not {sizes}"
    if spec.heads // spec.kv_heads > 8:
        return f"packs up to 8 query heads of a kv head, not {spec.heads // spec.kv_heads}"
    if spec.max_context > LONGEST:
        return f"attends to up to {LONGEST} tokens, and the context may have {spec.max_context}"
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
    """One layer's attention, in buffers that all layers share."""

    def __init__(
        self,
        workspace: Workspace,
        shape: AttentionShape,
        *,
        window: int,
        sinks: Tensor | None,
        scale: float,
    ) -> None:
        self.machine, self.shape, self.window, self.sinks, self.scale = workspace.machine, shape, window, sinks, scale
        get, heads = workspace.fixed, shape.group * shape.kv_heads
        self.out = get("batch.attn", ROWS_MAX, heads * DIM, dtype=torch.bfloat16)
        self.sums = get("batch.sums", ROWS_MAX, PARTS_MAX, heads, PART_WIDTH, dtype=torch.float32)
        self.arrivals = get("batch.arrivals", ROWS_MAX, shape.kv_heads, dtype=torch.int32)
        is_float_vector(sinks)

    def run(self, step: Step, kind: str, qkv: Tensor, pool: Tensor, layer: int, cos: Tensor, sin: Tensor) -> Tensor:
        """bf16 [rows, heads * 64]; `pool` as Step has it, `layer` its place in a page, cos and sin [rows, 32]."""
        rows, table = step.rows, step.block_tables[kind]
        parts = parts_bound(step.max_kv_len, self.window)
        assert rows <= ROWS_MAX, "too many rows"
        assert parts <= PARTS_MAX, "the phase refuses longer contexts"
        assert (qkv.dtype, pool.dtype) == (torch.float32, torch.bfloat16), "qkv in float32, the cache in bf16"
        assert pool[0, layer].is_contiguous(), "a layer's keys and values lie together"
        args = AttentionArgs(
            qkv=pointer(qkv),
            pool=pool.data_ptr() + 2 * layer * pool.stride(1),
            table=pointer(table),
            positions=pointer(step.positions),
            sequence_of=pointer(step.row_sequence),
            query_start=pointer(step.query_start),
            cosines=pointer(cos),
            sines=pointer(sin),
            sinks=pointer(self.sinks),
            out=pointer(self.out),
            sums=pointer(self.sums),
            arrivals=pointer(self.arrivals),
            page_stride=pool.stride(0),
            value_offset=pool.stride(2),
            rows=rows,
            table_stride=table.stride(0),
            parts=parts,
            window=self.window,
            sinks_float=is_float_vector(self.sinks),
            scale=self.scale,
        )
        self.machine.run(build_of(self.shape), rows * self.shape.kv_heads * parts, args)
        return self.out
