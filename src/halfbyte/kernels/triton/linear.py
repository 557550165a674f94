"""Projections in Triton: qkv, o (with the residual) and lm_head, from bf16, q8 or MXFP4 weights.

Activations go in as the gate says: bf16 everywhere, int8 in front of q8 and MXFP4 weights, fp8, mxfp8 and mxfp4 in
front of MXFP4 weights. The `_split` phases
hold E2M1 weights in the layout w4a8_split and widen them to E4M3 in registers, which is the native way on SM12x.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.formats import MXTensor
from halfbyte.gates import Gates
from halfbyte.kernels.triton.call import TritonCall, arch_of, multiple, power_of_two, type_of
from halfbyte.kernels.triton.phase import TritonPhase
from halfbyte.kernels.triton.tiles import OPERAND, needed_instruction, refuse_product, tile_for
from halfbyte.plan.activations import Activations
from halfbyte.plan.launches import PACKING
from halfbyte.plan.phase import Arch, Binding, Launch, Spec
from halfbyte.plan.step import Step

PROVED_ROWS = (1, 64, 2048)
WEIGHT_TYPES = {"dense": "*bf16", "q8": "*i8", "mxfp4": "*u8", "split": "*u8"}


@dataclass(frozen=True)
class Operands:
    """Weights as a kernel takes them: pointers, strides and the name of the format. Scales are read as 32-bit words."""

    wf: str  # dense, q8, mxfp4, split
    w: Tensor
    ws: Tensor | None
    w_stride: int
    ws_stride: int

    @classmethod
    def of(cls, matrix: Tensor | MXTensor) -> Operands:
        if isinstance(matrix, Tensor):
            return cls("dense", matrix, None, matrix.stride(-2), 0)
        wf = {"plain": matrix.format, "w4a8_split": "split"}[matrix.layout]
        scales = matrix.scales.reshape(-1).view(torch.int32)
        return cls(wf, matrix.data, scales, matrix.data.stride(-2), scale_stride(wf, matrix.scales.shape[-1]))


@dataclass(frozen=True)
class Rounded:
    """Activations at their quantisation point."""

    xf: str  # bf16 (held as bf16 or float32), int8, e4m3, e2m1
    x: Tensor
    xs: Tensor | None = None  # per 32: UE8M0, or float32 of int8
    row_scale: Tensor | None = None  # float32 per row

    @property
    def scale_words(self) -> Tensor | None:
        return self.xs if self.xs is None or self.xf == "int8" else self.xs.view(torch.int32)


def round_activations(x: Tensor, activation: str, width: int | None = None) -> Rounded:
    """Rows [R, K] quantised on the device, held `width` wide; bf16 is left to the product, which rounds as it reads."""
    if activation == "bf16":
        return Rounded("bf16", x)
    rows, k = x.shape
    width = width or k
    code = torch.int8 if activation == "int8" else torch.uint8
    codes = torch.empty((rows, width // 2 if activation == "mxfp4" else width), dtype=code, device=x.device)
    if activation == "fp8":
        scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    else:
        wide = torch.float32 if activation == "int8" else torch.uint8
        scales = torch.empty((rows, width // 32), dtype=wide, device=x.device)
    call = quantize_call(x.dtype, k, width, activation)
    call.launch((rows,), x.device, x=x, codes=codes, scales=scales, K=k, WIDTH=width)
    if activation == "fp8":
        return Rounded("e4m3", codes, row_scale=scales)
    return Rounded(OPERAND[activation], codes, scales)


@functools.cache
def quantize_call(dtype: torch.dtype, k: int, width: int, activation: str) -> TritonCall:
    scales = "*fp32" if activation in ("fp8", "int8") else "*u8"
    codes = "*i8" if activation == "int8" else "*u8"
    types = {"x": type_of(dtype), "codes": codes, "scales": scales, "K": multiple(k), "WIDTH": multiple(width)}
    return TritonCall(
        "quantize", "quantize_kernel", types, {"FORMAT": activation, "BK": power_of_two(width)}, part=PACKING
    )


def scale_stride(wf: str, groups: int) -> int:
    """From row to row of weight scales: in bytes where rows of them begin anywhere, else in words."""
    return {"mxfp4": groups, "split": groups // 4, "q8": groups // 2, "dense": 0}[wf]


def width_for(k: int, activation: str) -> int:
    """Elements in a stored row of activations: whole steps of 128 once they are quantised."""
    return k if activation == "bf16" else -(-k // 128) * 128


@functools.cache
def linear_call(
    arch: Arch,
    rows: int,
    k: int,
    wf: str,
    xf: str,
    *,
    x: str,
    scale: bool,
    row_scale: bool,
    bias: str | None,
    residual: str | None,
    strides: tuple[int, int, int, int],
    n: int,
    gate: str = "auto",
    tile_rows: int | None = None,
) -> TritonCall:
    tile = tile_for(arch, tile_rows or rows, n, wf, xf, gate)
    types = {
        "x": x, "xs": None if not scale else "*fp32" if xf == "int8" else "*i32",
        "row_scale": "*fp32" if row_scale else None, "w": WEIGHT_TYPES[wf], "ws": None if wf == "dense" else "*i32",
        "bias": bias, "residual": residual, "out": "*fp32", "M": multiple(rows), "N": multiple(n),
        "K": multiple(k), **dict(zip(("x_stride", "xs_stride", "w_stride", "ws_stride"), map(multiple, strides))),
    }  # fmt: skip
    constants = {
        "XF": xf,
        "WF": wf,
        "SWAP": tile.swap,
        "BM": tile.bm,
        "BN": tile.bn,
        "BK": tile.bk,
        "EVEN": k % tile.bk == 0,
    }
    need, ban = needed_instruction(arch, wf, xf, tile)
    return TritonCall("gemm", "linear_kernel", types, constants, tile.warps, tile.stages, need, ban, tile.options)


def project(matrix: Tensor | MXTensor, bias: Tensor | None, spec: Spec) -> Callable[..., Tensor]:
    """A function (x [R, K], residual, rows that the tile is chosen by) -> float32 [R, N]."""
    operands = Operands.of(matrix)
    n, k = matrix.shape
    arch = arch_of(matrix.device)
    activation = "bf16" if operands.wf == "dense" else spec.activation
    width = width_for(k, activation)

    def run(x: Tensor, residual: Tensor | None = None, tile_rows: int | None = None) -> Tensor:
        rounded = round_activations(x, activation, width)
        rows = x.shape[0]
        assert rows * max(n, width) < 2**31, "32-bit offsets"
        out = torch.empty((rows, n), dtype=torch.float32, device=x.device)
        codes, xs = rounded.x, rounded.scale_words
        strides = (codes.stride(0), 0 if xs is None else xs.stride(0), operands.w_stride, operands.ws_stride)
        call = linear_call(
            arch,
            rows,
            k,
            operands.wf,
            rounded.xf,
            x=type_of(codes.dtype),
            scale=xs is not None,
            row_scale=rounded.row_scale is not None,
            bias=None if bias is None else type_of(bias.dtype),
            residual=None if residual is None else type_of(residual.dtype),
            strides=strides,
            n=n,
            gate="auto",
            tile_rows=tile_rows,
        )
        bm, bn = call.constants["BM"], call.constants["BN"]
        call.launch(
            (math.ceil(rows / bm) * math.ceil(n / bn),),
            x.device,
            x=codes,
            xs=xs,
            row_scale=rounded.row_scale,
            w=operands.w,
            ws=operands.ws,
            bias=bias,
            residual=residual,
            out=out,
            M=rows,
            N=n,
            K=k,
            x_stride=strides[0],
            xs_stride=strides[1],
            w_stride=strides[2],
            ws_stride=strides[3],
        )
        return out

    return run


class TritonLinear(TritonPhase):
    category = "linear"
    backends = {"linear": "triton"}
    rank = 10
    role: str
    split = False

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        return refuse_product(spec, arch, (self.role,), self.split)

    def layouts(self, spec: Spec) -> dict[str, str]:
        return {self.role: "w4a8_split" if self.split else "plain"}

    def proofs(self, spec: Spec, arch: Arch) -> list[TritonCall]:
        """The kernels of every regime, as `project` launches them."""
        q = spec.heads * spec.head_dim
        n, k = {
            "qkv": (q + 2 * spec.kv_heads * spec.head_dim, spec.hidden),
            "o": (spec.hidden, q),
            "lm_head": (spec.vocab, spec.hidden),
        }[self.role]
        kind = spec.formats[self.role]
        wf = "split" if self.split else "dense" if kind == "bf16" else kind
        activation = "bf16" if wf == "dense" else spec.activation
        xf = OPERAND[activation]
        x = {"bf16": "*bf16", "int8": "*i8"}.get(xf, "*u8")
        width = width_for(k, activation)
        bytes_in_row = {"dense": k, "q8": k, "mxfp4": k // 2, "split": width // 2}[wf]
        strides = (bytes_in_row, scale_stride(wf, (width if wf == "split" else k) // 32))
        grouped = activation in ("int8", "mxfp8", "mxfp4")
        per_word = 32 if activation == "int8" else 128
        calls: list[TritonCall] = [] if activation == "bf16" else [quantize_call(torch.float32, k, width, activation)]
        rows = PROVED_ROWS[:2] if self.role == "lm_head" else PROVED_ROWS
        return calls + [
            linear_call(
                arch,
                r,
                k,
                wf,
                xf,
                x=x,
                scale=grouped,
                row_scale=activation == "fp8",
                bias=None if self.role == "lm_head" else "*bf16",
                residual="*fp32" if self.role == "o" else None,
                n=n,
                strides=(width // 2 if xf == "e2m1" else width, width // per_word if grouped else 0, *strides),
            )
            for r in rows
        ]


class TritonQkv(TritonLinear):
    name, covers, role = "triton.qkv", ("qkv",), "qkv"
    knows = frozenset({"bias"})

    def bind(self, b: Binding) -> Launch:
        run = project(b.weights.qkv, b.weights.qkv_bias, b.spec)
        s = b.spec
        heads = [s.heads, s.kv_heads, s.kv_heads]

        def launch(step: Step, acts: Activations) -> None:
            y = run(acts.h, tile_rows=step.tile_rows).view(step.rows, sum(heads), s.head_dim)
            acts.q, acts.k, acts.v = torch.split(y, heads, dim=1)

        return launch


class TritonOut(TritonLinear):
    name, covers, role = "triton.o", ("o",), "o"
    knows = frozenset({"bias"})

    def bind(self, b: Binding) -> Launch:
        run = project(b.weights.o, b.weights.o_bias, b.spec)

        def launch(step: Step, acts: Activations) -> None:
            acts.x = run(acts.attn, acts.x, step.tile_rows)

        return launch


class TritonHead(TritonLinear):
    name, covers, role = "triton.lm_head", ("lm_head",), "lm_head"

    def bind(self, b: Binding) -> Launch:
        run = project(b.weights.lm_head, None, b.spec)

        def launch(step: Step, acts: Activations) -> None:
            acts.logits = run(acts.h, tile_rows=step.tile_rows)

        return launch


class TritonQkvSplit(TritonQkv):
    name, split, rank = "triton.qkv_split", True, 11


class TritonOutSplit(TritonOut):
    name, split, rank = "triton.o_split", True, 11


class TritonHeadSplit(TritonHead):
    name, split, rank = "triton.lm_head_split", True, 11
