"""Attention in Triton over the paged cache: split over the cache for few rows, flash attention for many.

Both fold the sink in once, at the end; both cut the work by positions and never by what else is in the batch. Up to 64
rows go one by one (`decode_kernel`, `merge_kernel`), so verifying drafts gives what decoding them would have given.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from halfbyte.gates import Gates
from halfbyte.kernels.triton.call import TritonCall, arch_of, multiple, type_of
from halfbyte.kernels.triton.norm import stored
from halfbyte.kernels.triton.phase import TritonPhase
from halfbyte.kernels.triton.rope import KV_TYPES, as_stored, cache_format, refuse_cache
from halfbyte.kernels.triton.tiles import refuse_gpu
from halfbyte.plan.activations import Activations
from halfbyte.plan.phase import Arch, Binding, Launch, Spec
from halfbyte.plan.step import Step

MERGE = 16  # parts joined at a time


def parts_bound(max_kv_len: int, page: int) -> int:
    """Parts that a row of at most this many tokens can have: see `part_of` in the device code."""
    tokens = max(1, max_kv_len)
    most = 0
    for pages, limit in ((2, 128 * page), (8, 512 * page), (32, None)):
        counted = tokens if limit is None else min(tokens, limit)
        most = max(most, math.ceil(math.ceil(counted / page) / pages))
    return most


def _types(spec: Spec, sinks: torch.dtype | None, out: torch.dtype, table_stride: int) -> dict[str, str | None]:
    return {
        "q": "*bf16",
        "out": type_of(out),
        "keys": type_of(KV_TYPES[spec.kv_dtype]),
        "table": "*i32",
        "sinks": None if sinks is None else type_of(sinks),
        "positions": "*i32",
        "heads": multiple(spec.heads),
        "table_stride": multiple(table_stride),
        "page_stride": "i32:16",
        "value_offset": "i32:16",
        "scale": "fp32",
    }


def decode_call(
    spec: Spec,
    arch: Arch,
    window: int,
    sinks: torch.dtype | None,
    out: torch.dtype,
    table_stride: int,
    splits: int,
) -> TritonCall:
    split = window == 0
    types = _types(spec, sinks, out, table_stride) | {
        "sequence_of": "*i32",
        "splits": multiple(splits),
        "sums": "*fp32" if split else None,
        "stats": "*fp32" if split else None,
    }
    constants = {
        "KV": cache_format(spec, arch),
        "WINDOW": window,
        "SPLIT": split,
        "GROUP": spec.heads // spec.kv_heads,
        "D": spec.head_dim,
        "PAGE": spec.page_size,
        "BM": 16,
    }
    return TritonCall("attention", "decode_kernel", types, constants, warps=4, stages=3, need=r"\bHMMA")


def merge_call(spec: Spec, sinks: torch.dtype | None, out: torch.dtype, splits: int) -> TritonCall:
    types = {
        "sums": "*fp32",
        "stats": "*fp32",
        "sinks": None if sinks is None else type_of(sinks),
        "positions": "*i32",
        "out": type_of(out),
        "heads": multiple(spec.heads),
        "splits": multiple(splits),
    }
    return TritonCall(
        "attention", "merge_kernel", types, {"CHUNK": MERGE, "D": spec.head_dim, "PAGE": spec.page_size}, warps=1
    )


def prefill_call(
    spec: Spec,
    arch: Arch,
    window: int,
    sinks: torch.dtype | None,
    out: torch.dtype,
    table_stride: int,
    sequences: int,
) -> TritonCall:
    types = _types(spec, sinks, out, table_stride) | {"query_start": "*i32", "sequences": multiple(sequences)}
    constants = {
        "KV": cache_format(spec, arch),
        "WINDOW": window,
        "GROUP": spec.heads // spec.kv_heads,
        "D": spec.head_dim,
        "PAGE": spec.page_size,
        "BM": prefill_rows(arch),
    }
    need = {"sm90": r"\bHGMMA", "sm10x": r"\bUTCHMMA"}.get(arch.family, r"\bHMMA")
    return TritonCall(
        "attention", "prefill_kernel", types, constants, warps=prefill_rows(arch) // 16, stages=3, need=need
    )


def prefill_rows(arch: Arch) -> int:
    """Query rows in a tile. SM90: 64 ran at 338 TFLOP/s where 128 ran at 234; SM100's MMA wants 128."""
    return 64 if "wgmma" in arch.features else 128


class _Attention(TritonPhase):
    category, rank = "attention", 10
    covers = ("attention",)
    backends = {"attention": "triton"}
    knows = frozenset({"sinks", "window", "gqa", "uneven_layers"})

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        return refuse_gpu(arch) or refuse_cache(spec)

    @staticmethod
    def _facts(b: Binding) -> tuple[int, Tensor | None, torch.dtype]:
        """(window or 0, sinks or None, type of the result)."""
        assert b.kind is not None
        window = b.spec.window if b.kind == "sliding" else 0
        sinks = b.weights.sinks if "sinks" in b.spec.features_of(("attention",)) else None
        return window, sinks, stored(b.spec, "o")


class DecodeAttention(_Attention):
    name = "triton.attention_split"
    regimes = frozenset({"decode", "batch"})

    def bind(self, b: Binding) -> Launch:
        spec, kind, index = b.spec, b.kind or "full", b.kind_index
        window, sinks, dtype = self._facts(b)
        scale = spec.head_dim**-0.5

        def launch(step: Step, acts: Activations) -> None:
            q, rows, table = acts.q, step.rows, step.block_tables[kind]
            device = q.device
            pool = as_stored(b.kv_pool())
            out = torch.empty((rows, spec.heads * spec.head_dim), dtype=dtype, device=device)
            splits = 1 if window else parts_bound(step.max_kv_len, spec.page_size)
            sums = stats = None
            if not window:
                sums = torch.empty((rows, spec.heads, splits, spec.head_dim), dtype=torch.float32, device=device)
                stats = torch.empty((rows, spec.heads, splits, 2), dtype=torch.float32, device=device)
            sink_type = None if sinks is None else sinks.dtype
            call = decode_call(spec, arch_of(device), window, sink_type, dtype, table.stride(0), splits)
            call.launch(
                (rows, spec.kv_heads, splits),
                device,
                q=q,
                out=out,
                sums=sums,
                stats=stats,
                keys=pool[0, index],
                table=table,
                sinks=sinks,
                positions=step.positions,
                sequence_of=step.row_sequence,
                heads=spec.heads,
                splits=splits,
                table_stride=table.stride(0),
                page_stride=pool.stride(0),
                value_offset=pool.stride(2),
                scale=scale,
            )
            if not window:
                merge_call(spec, sink_type, dtype, splits).launch(
                    (rows, spec.heads),
                    device,
                    sums=sums,
                    stats=stats,
                    sinks=sinks,
                    positions=step.positions,
                    out=out,
                    heads=spec.heads,
                    splits=splits,
                )
            acts.attn = out

        return launch

    def proofs(self, spec: Spec, arch: Arch) -> list[TritonCall]:
        out = stored(spec, "o")
        sinks = torch.bfloat16
        return [
            decode_call(spec, arch, 0, sinks, out, 16, 16),
            decode_call(spec, arch, spec.window, sinks, out, 16, 1),
            merge_call(spec, sinks, out, 16),
        ]


class PrefillAttention(_Attention):
    name = "triton.attention_flash"
    regimes = frozenset({"prefill"})

    def bind(self, b: Binding) -> Launch:
        spec, kind, index = b.spec, b.kind or "full", b.kind_index
        window, sinks, dtype = self._facts(b)
        scale = spec.head_dim**-0.5
        arch = arch_of(b.weights.sinks.device)
        tokens = prefill_rows(arch) // (spec.heads // spec.kv_heads)

        def launch(step: Step, acts: Activations) -> None:
            q, rows, table = acts.q, step.rows, step.block_tables[kind]
            device = q.device
            pool = as_stored(b.kv_pool())
            out = torch.empty((rows, spec.heads * spec.head_dim), dtype=dtype, device=device)
            call = prefill_call(
                spec,
                arch,
                window,
                None if sinks is None else sinks.dtype,
                dtype,
                table.stride(0),
                step.sequences,
            )
            call.launch(
                (rows // tokens + step.sequences, spec.kv_heads),
                device,
                q=q,
                out=out,
                keys=pool[0, index],
                table=table,
                sinks=sinks,
                positions=step.positions,
                query_start=step.query_start,
                sequences=step.sequences,
                heads=spec.heads,
                table_stride=table.stride(0),
                page_stride=pool.stride(0),
                value_offset=pool.stride(2),
                scale=scale,
            )
            acts.attn = out

        return launch

    def proofs(self, spec: Spec, arch: Arch) -> list[TritonCall]:
        out = stored(spec, "o")
        return [prefill_call(spec, arch, window, torch.bfloat16, out, 16, 1) for window in (0, spec.window)]
