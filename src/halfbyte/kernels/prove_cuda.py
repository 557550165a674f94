"""Proof of the CUDA phases without the hardware: NVRTC builds what a phase would launch, ptxas reports, SASS is read.

What each phase can launch is said here, beside the instruction it stands for; a phase that is not listed has nothing to
compile. Needs cuda-bindings, NVRTC and the PyPI package `nvidia-cuda-nvdisasm`, no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.kernels.cuda.attention import batch as batch_attention
from halfbyte.kernels.cuda.attention import flash
from halfbyte.kernels.cuda.batch import fused_phase as batch_fused
from halfbyte.kernels.cuda.batch import phase as batch_phase
from halfbyte.kernels.cuda.batch import products as batch
from halfbyte.kernels.cuda.decode import phase as decode
from halfbyte.kernels.cuda.decode.step import ROW_SIZES
from halfbyte.kernels.cuda.prefill import builds as grouped_build
from halfbyte.kernels.cuda.prefill import fp8 as grouped_fp8
from halfbyte.kernels.cuda.prefill import layer as prefill_layer
from halfbyte.kernels.cuda.prefill import phases as grouped_phases
from halfbyte.kernels.cuda.prefill import sync as grouped_sync
from halfbyte.kernels.launch import Program
from halfbyte.plan.phase import Arch, Phase, Spec

TENSOR_COPY = r"\bUTMALDG"  # through a map of the weights
BULK = r"\bUBLKCP"  # weights come by bulk copies, not through registers


@dataclass(frozen=True)
class Build:
    """One kernel: its program, the shared memory of its launch, and what its machine code must and must not show."""

    name: str
    program: Program
    shared: int
    need: tuple[str, ...] = ()
    ban: str = ""
    known: str = ""  # functions, with | between, whose spills are known and said, not held against it,
    room: int = 0  # up to so many bytes together


def builds(phase: Phase, spec: Spec, arch: Arch) -> list[Build]:
    """Every kernel that `phase` can launch for `spec`."""
    if isinstance(phase, decode.WholeStep):
        fewer = (0, *ROW_SIZES)  # a build serves what the one before it cannot
        return [_step(spec, arch, rows) for last, rows in zip(fewer, ROW_SIZES) if last < arch.limits.decode]
    if isinstance(phase, prefill_layer.PrefillLayer):
        found = [b for part in (*phase.parts, flash.FlashAttention()) for b in builds(part, spec, arch)]
        if not isinstance(phase, prefill_layer.Fp8PrefillLayer):
            found.append(_grouped(spec.formats["qkv"], "wide", False, rope=True))
        return list({b.program: b for b in found}.values())
    if isinstance(phase, grouped_fp8._Fp8):
        return [_fp8(spec.formats[next(iter(phase.shapes(spec)))], swiglu) for swiglu in _swiglu(phase)]
    if isinstance(phase, grouped_sync._Sync):
        return _sync(phase, spec) + _stream(phase, spec, arch)
    if isinstance(phase, grouped_phases._Grouped):
        form = spec.formats[next(iter(phase.shapes(spec)))]
        shapes = ("narrow", "lean", "broad", "wide") if "moe" in phase.covers else ("narrow", "wide")
        found = [_grouped(form, shape, swiglu) for shape in shapes for swiglu in _swiglu(phase)]
        return found + _stream(phase, spec, arch)
    if isinstance(phase, batch_phase.BatchLayer):
        return _batch(spec, arch) + (_batch_attention(spec) if isinstance(phase, batch_fused.FusedBatchLayer) else [])
    if isinstance(phase, flash.FlashAttention):
        return [
            Build(f"flash {name}", b.program(), b.shared_bytes, (r"\bHGMMA",), r"\bHMMA")
            for name, b in (("full", flash.FULL), ("sliding", flash.SLIDING))
        ]
    return []


def _swiglu(phase: Phase) -> tuple[bool, ...]:
    return (True, False) if "moe" in phase.covers else (False,)


def _step(spec: Spec, arch: Arch, rows: int) -> Build:
    shape = decode.shape_of(spec, arch, rows)
    need = (r"\bHMMA\.16816", BULK)
    # Not in the loops of qkv, experts and lm_head.
    known = "decode_step|phase_attention" if arch.name == "sm90" else ""
    return Build(f"decode_step rows={rows}", shape.program(), shape.shared_bytes, need, r"\bHGMMA", known, 192)


def _grouped(form: str, shape: str, swiglu: bool, *, rope: bool = False) -> Build:
    v = grouped_build.Variant(form, shape, swiglu, rope=rope)
    name = f"grouped {form} {shape}{' swiglu' if swiglu else ' rope' if rope else ''}"
    return Build(name, v.program(), v.shared_bytes, (r"\bHGMMA",), r"\bHMMA")


def _fp8(form: str, swiglu: bool) -> Build:
    v = grouped_build.Variant(form, "vast", swiglu)
    return Build(f"grouped fp8{' swiglu' if swiglu else ''}", v.program(), v.shared_bytes, (r"\bQGMMA",), r"\bHG?MMA")


# What a product of grouped_sync.cu shows, by the format of its activations; the others betray a fallback.
SYNC = {"": r"\bHMMA\.16816", "mxfp8": r"\bQMMA\.SF\.16832\.F32\.E2M1\.E4M3", "mxfp4": r"\bOMMA\.SF\.16864"}


def _sync(phase: grouped_sync._Sync, spec: Spec) -> list[Build]:
    form, mx = spec.formats[next(iter(phase.shapes(spec)))], phase.dense.mx
    tiles = [t for t in grouped_sync.COLUMNS if spec.tile in ("auto", t) or "moe" not in phase.covers]
    ban = "|".join(p for kind, p in SYNC.items() if kind != mx) + r"|\bHGMMA"
    found = [Build("grouped rows", Program(grouped_build.ROWS_PROGRAM, "pack_rows"), 4096)]
    for tile in tiles:
        for swiglu in _swiglu(phase):
            v = grouped_sync.SyncVariant(form, tile, swiglu, mx)
            name = f"grouped_sync {form} {mx or 'bf16'} {tile}{' swiglu' if swiglu else ''}"
            # 100 bytes; on an H200 it takes no longer than bf16's product, which spills none (sync-gpu-20261115-3)
            known = "grouped" if (form, tile) == ("q8", "128x128") else ""
            found.append(Build(name, v.program(), v.shared_bytes, (SYNC[mx], BULK, TENSOR_COPY), ban, known, 100))
    return found


def _batch(spec: Spec, arch: Arch) -> list[Build]:
    rows = batch.RowShape(spec.hidden, spec.experts, spec.top_k)
    found = [Build(entry, rows.program(entry), shared) for entry, shared in batch.ROW_SHARED.items()]
    return found + [_product(role, v) for role, v in batch_phase.variants(spec, arch).items()]


def _stream(phase: Phase, spec: Spec, arch: Arch) -> list[Build]:
    """What few rows of lm_head take."""
    if not isinstance(phase, batch_phase.BatchHead):
        return []
    rows = batch.RowShape(spec.hidden, spec.experts, spec.top_k)
    finish = Build("batch_finish", rows.program("batch_finish"), batch.ROW_SHARED["batch_finish"])
    return [finish, _product("lm_head", batch_phase.head_variant(spec, arch))]


def _product(role: str, v: batch.Variant) -> Build:
    return Build(f"batch {role}", v.program(), v.shared_bytes, (r"\bHMMA\.16816", BULK), r"\bHGMMA")


def _batch_attention(spec: Spec) -> list[Build]:
    shape = batch_attention.AttentionShape(spec.heads // spec.kv_heads, spec.kv_heads)
    return [Build("batch attention", shape.program(), batch_attention.SHARED, (r"\bHMMA\.16816",))]
