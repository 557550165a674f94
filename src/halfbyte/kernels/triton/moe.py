"""The expert MLP in Triton for every regime: slots grouped by expert, gate_up with swiglu, down, sum in order.

Five launches (three more where more than 1024 slots are grouped, one more per quantisation pass), none of which waits
for the host: the number of row tiles is bounded by rows and experts, and tiles that turn out empty end at once. What
a row gets does not depend on the other rows: each has its own accumulator, and its experts are added in its order.
Experts are MXFP4, or bf16 or q8 as fine-tunes have them: for those memory sets a slower pace.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from halfbyte.gates import Gates
from halfbyte.kernels.triton.call import TritonCall, arch_of, multiple, power_of_two, type_of
from halfbyte.kernels.triton.linear import (
    WEIGHT_TYPES,
    Operands,
    Rounded,
    quantize_call,
    round_activations,
    scale_stride,
    width_for,
)
from halfbyte.kernels.triton.phase import TritonPhase
from halfbyte.kernels.triton.tiles import OPERAND, needed_instruction, refuse_product, tile_for
from halfbyte.plan.activations import Activations
from halfbyte.plan.launches import PACKING
from halfbyte.plan.phase import Arch, Binding, Launch, Spec
from halfbyte.plan.step import Step

ONE_PROGRAM = 1024  # slots that one program groups
CHUNKS = 64  # programs that share the work beyond that
COMBINE = 1024
OWN_PASS = ("fp8", "int8")  # quantised between the products by a pass of its own: whole rows, or scales of another type
MANY = 1 << 20  # columns, to a tile chooser that would narrow tiles for few


def tiles_bound(slots: int, experts: int, bm: int) -> int:
    """Row tiles that any routing of this many slots can need."""
    used = min(experts, slots)
    return min(slots, (slots + used * (bm - 1)) // bm)


# Grouping -----------------------------------------------------------------------------------------------------------


def group_calls(ids: torch.dtype, slots: int, experts: int, tiles: int, bm: int) -> list[TritonCall]:
    be = power_of_two(experts)
    lists = {"tile_expert": "*i32", "tile_begin": "*i32", "tile_count": "*i32", "tiles": multiple(tiles)}
    common = {"ids": type_of(ids), "slots": multiple(slots)}
    if slots <= ONE_PROGRAM:
        types = common | lists | {"order": "*i32"}
        return [TritonCall("group", "group_kernel", types, {"BM": bm, "BE": be}, warps=8, part=PACKING)]
    chunks, chunk = chunks_of(slots)
    counted = common | {"counts": "*i32", "chunk": multiple(chunk)}
    listed = lists | {"counts": "*i32", "chunks": multiple(chunks)}
    return [
        TritonCall("group", "count_kernel", counted, {"BE": be}, part=PACKING),
        TritonCall("group", "tiles_kernel", listed, {"BM": bm, "BE": be}, part=PACKING),
        TritonCall("group", "scatter_kernel", counted | {"order": "*i32"}, {"BE": be}, part=PACKING),
    ]


def chunks_of(slots: int) -> tuple[int, int]:
    """(chunks, slots in each), whole sub-blocks of 64."""
    chunk = math.ceil(slots / CHUNKS / 64) * 64
    return math.ceil(slots / chunk), chunk


def group(ids: Tensor, experts: int, bm: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """order [slots] and the tile list (expert, begin, count), on the device."""
    slots, device = ids.numel(), ids.device
    tiles = tiles_bound(slots, experts, bm)
    order = torch.empty(slots, dtype=torch.int32, device=device)
    expert, begin, count = torch.empty((3, tiles), dtype=torch.int32, device=device)
    lists: dict[str, Any] = {"tile_expert": expert, "tile_begin": begin, "tile_count": count, "tiles": tiles}
    calls = group_calls(ids.dtype, slots, experts, tiles, bm)
    if len(calls) == 1:
        calls[0].launch((1,), device, ids=ids, order=order, slots=slots, **lists)
    else:
        chunks, chunk = chunks_of(slots)
        counts = torch.empty((chunks, power_of_two(experts)), dtype=torch.int32, device=device)
        calls[0].launch((chunks,), device, ids=ids, counts=counts, slots=slots, chunk=chunk)
        calls[1].launch((1,), device, counts=counts, chunks=chunks, **lists)
        calls[2].launch((chunks,), device, ids=ids, counts=counts, order=order, slots=slots, chunk=chunk)
    return order, expert, begin, count


# The two products ---------------------------------------------------------------------------------------------------


@functools.cache
def expert_call(
    function: str,
    arch: Arch,
    rows: int,
    n: int,
    k: int,
    wf: str,
    activation: str,
    gate: str,
    *,
    x: str,
    bias: str,
    strides: tuple[int, int, int, int],
    experts: tuple[int, int],
    top_k: int = 0,
    out: str = "",
) -> TritonCall:
    """gate_up_kernel or down_kernel; `rows` is what one expert can expect."""
    xf = OPERAND[activation]
    tile = tile_for(arch, rows, MANY, wf, xf, gate)  # several experts at once fill the chip
    grouped = activation in ("mxfp8", "mxfp4")
    types: dict[str, str | None] = {
        "x": x,
        "xs": "*i32" if grouped else "*fp32" if activation == "int8" else None,
        "row_scale": "*fp32" if activation == "fp8" else None,
        "w": WEIGHT_TYPES[wf],
        "ws": None if wf == "dense" else "*i32",
        "bias": bias,
        "order": "*i32",
        "tile_expert": "*i32",
        "tile_begin": "*i32",
        "tile_count": "*i32",
        "N": multiple(n),
        "K": multiple(k),
        **dict(zip(("x_stride", "xs_stride", "w_stride", "ws_stride"), map(multiple, strides))),
        **dict(zip(("w_expert", "ws_expert"), map(multiple, experts))),
    }
    constants: dict[str, Any] = {
        "XF": xf,
        "WF": wf,
        "SWAP": tile.swap,
        "BM": tile.bm,
        "BN": tile.bn,
        "BK": tile.bk,
        "EVEN": k % tile.bk == 0,
    }
    if function == "gate_up_kernel":
        types |= {
            "out": out,
            "out_scales": "*u8" if grouped else None,
            "limit": "fp32",
            "alpha": "fp32",
            "WIDTH": multiple(middle_width(n // 2, activation)),
        }
        constants |= {"TOP": top_k, "OUT": activation if grouped else "plain"}
    else:
        types |= {"weights": "*fp32", "parts": "*fp32"}
    need, ban = needed_instruction(arch, wf, xf, tile)
    return TritonCall("gemm", function, types, constants, tile.warps, tile.stages, need, ban, tile.options)


def combine_call(x: torch.dtype, hidden: int, top_k: int) -> TritonCall:
    types = {"x": type_of(x), "parts": "*fp32", "out": "*fp32", "H": multiple(hidden)}
    return TritonCall("rows", "combine_kernel", types, {"TOP": top_k, "BH": COMBINE})


def middle_width(inner: int, activation: str) -> int:
    """Elements in a row between the two products, where those of OWN_PASS are not padded yet."""
    return inner if activation in OWN_PASS else width_for(inner, activation)


def between(activation: str) -> tuple[torch.dtype, int]:
    """How gate_up leaves its result for down: (type, elements per stored element)."""
    return {
        "bf16": (torch.bfloat16, 1),
        "int8": (torch.float32, 1),
        "fp8": (torch.float32, 1),
        "mxfp8": (torch.uint8, 1),
        "mxfp4": (torch.uint8, 2),
    }[activation]


def weight_form(spec: Spec) -> str:
    kind = spec.formats["gate_up"]
    return "dense" if kind == "bf16" else kind


def activation_of(spec: Spec) -> str:
    """Dense weights are multiplied in bf16 whatever quantised ones are."""
    return "bf16" if weight_form(spec) == "dense" else spec.activation


class TritonMoe(TritonPhase):
    name, covers, category, rank = "triton.moe", ("moe",), "moe", 10
    backends = {"moe": "triton"}
    knows = frozenset({"bias", "clamped_swiglu", "interleaved_gate_up"})
    split = False
    tiles = ("auto", "128x128", "64x128")

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        kinds = {spec.formats[role] for role in ("gate_up", "down")}
        if len(kinds) > 1:
            return f"walks one list of tiles for experts of one format, not {' and '.join(sorted(kinds))}"
        if spec.formats["down"] == "q8" and spec.intermediate % 64:
            return f"reads q8 scales in pairs, and rows of {spec.intermediate} are no whole pairs of groups"
        if spec.activation == "int8" and spec.tile != "auto":
            return f"cuts int8 tiles 64 columns wide, not as --tile {spec.tile} says"
        if spec.experts > 256:
            return f"groups by 256 experts at most, not {spec.experts}"
        return refuse_product(spec, arch, ("gate_up", "down"), self.split)

    def layouts(self, spec: Spec) -> dict[str, str]:
        layout = "w4a8_split" if self.split else "plain"
        return {"gate_up": layout, "down": layout}

    def bind(self, b: Binding) -> Launch:
        spec, w = b.spec, b.weights
        gate_up, down = Operands.of(w.gate_up), Operands.of(w.down)
        device = w.gate_up.device
        arch = arch_of(device)
        hidden, inner, top_k, activation = spec.hidden, spec.intermediate, spec.top_k, activation_of(spec)

        def launch(step: Step, acts: Activations) -> None:
            ids, weights = acts.topk_ids, acts.topk_weights
            slots = step.rows * top_k
            per_expert = math.ceil((step.tile_rows or step.rows) * top_k / spec.experts)
            rounded = round_activations(acts.h, activation, width_for(hidden, activation))
            assert slots * max(hidden, inner) < 2**31, "32-bit offsets"

            def product(
                function: str, operands: Operands, bias: Tensor, r: Rounded, n: int, k: int, **more: Any
            ) -> TritonCall:
                return expert_call(
                    function,
                    arch,
                    per_expert,
                    n,
                    k,
                    operands.wf,
                    activation,
                    spec.tile,
                    x=type_of(r.x.dtype),
                    bias=type_of(bias.dtype),
                    strides=_strides(r, operands),
                    experts=_experts(operands),
                    **more,
                )

            dtype, pack = between(activation)
            up = product(
                "gate_up_kernel",
                gate_up,
                w.gate_up_bias,
                rounded,
                2 * inner,
                hidden,
                top_k=top_k,
                out=type_of(dtype),
            )
            bm, bn = up.constants["BM"], up.constants["BN"]
            order, expert, begin, count = group(ids, spec.experts, bm)
            lists = {"order": order, "tile_expert": expert, "tile_begin": begin, "tile_count": count}
            tiles = expert.shape[0]

            wide = middle_width(inner, activation)
            middle = torch.empty((slots, wide // pack), dtype=dtype, device=device)
            scales = None
            if activation in ("mxfp8", "mxfp4"):
                scales = torch.empty((slots, wide // 32), dtype=torch.uint8, device=device)
            up.launch(
                (math.ceil(2 * wide / bn), tiles),
                device,
                bias=w.gate_up_bias,
                out=middle,
                out_scales=scales,
                limit=spec.swiglu_limit,
                alpha=spec.swiglu_alpha,
                WIDTH=wide,
                N=2 * inner,
                K=hidden,
                **_operands(rounded, gate_up),
                **lists,
            )
            if activation in OWN_PASS:
                second = round_activations(middle, activation, width_for(inner, activation))
            else:
                second = Rounded(OPERAND[activation], middle, scales)
            drop = product("down_kernel", down, w.down_bias, second, hidden, inner)
            assert drop.constants["BM"] == bm, "both products walk the same tiles"
            parts = torch.empty((slots, hidden), dtype=torch.float32, device=device)
            drop.launch(
                (math.ceil(hidden / drop.constants["BN"]), tiles),
                device,
                bias=w.down_bias,
                weights=weights,
                parts=parts,
                N=hidden,
                K=inner,
                **_operands(second, down),
                **lists,
            )
            x = acts.x
            out = torch.empty((step.rows, hidden), dtype=torch.float32, device=device)
            combine_call(x.dtype, hidden, top_k).launch(
                (step.rows, math.ceil(hidden / COMBINE)), device, x=x, parts=parts, out=out, H=hidden
            )
            acts.x = out

        return launch

    def proofs(self, spec: Spec, arch: Arch) -> list[TritonCall]:
        wf = "split" if self.split else weight_form(spec)
        activation = activation_of(spec)
        xf = OPERAND[activation]
        x = {"bf16": "*bf16", "int8": "*i8"}.get(xf, "*u8")
        per_word = {"int8": 32, "mxfp8": 128, "mxfp4": 128}.get(activation, 0)
        calls = [combine_call(torch.float32, spec.hidden, spec.top_k)]
        if activation != "bf16":
            calls.append(quantize_call(torch.float32, spec.hidden, width_for(spec.hidden, activation), activation))
        for slots in (spec.top_k, 2048 * spec.top_k):
            bm = tile_for(arch, slots // spec.experts, MANY, wf, xf, spec.tile).bm
            tiles = tiles_bound(slots, spec.experts, bm)
            calls += group_calls(torch.int32, slots, spec.experts, tiles, bm)
        for per_expert in (1, 24, 64, 256):
            for function, n, k in (
                ("gate_up_kernel", 2 * spec.intermediate, spec.hidden),
                ("down_kernel", spec.hidden, spec.intermediate),
            ):
                width = width_for(k, activation)
                stored_k = width if self.split else k
                stride = scale_stride(wf, stored_k // 32)
                row = stored_k if wf in ("dense", "q8") else stored_k // 2
                words_of_matrix = {"dense": 0, "q8": n * stored_k // 64}.get(wf, n * stored_k // 128)
                more = {"top_k": spec.top_k, "out": type_of(between(activation)[0])} if n != spec.hidden else {}
                calls.append(
                    expert_call(
                        function,
                        arch,
                        per_expert,
                        n,
                        k,
                        wf,
                        activation,
                        spec.tile,
                        x=x,
                        bias="*bf16",
                        strides=(
                            width // 2 if xf == "e2m1" else width,
                            width // per_word if per_word else 0,
                            row,
                            stride,
                        ),
                        experts=(n * row, words_of_matrix),
                        **more,
                    )
                )
        return calls


def _strides(r: Rounded, weights: Operands) -> tuple[int, int, int, int]:
    xs = r.scale_words
    return r.x.stride(0), 0 if xs is None else xs.stride(0), weights.w_stride, weights.ws_stride


def _experts(weights: Operands) -> tuple[int, int]:
    experts = weights.w.shape[0]
    return weights.w.stride(0), 0 if weights.ws is None else weights.ws.numel() // experts


def _operands(r: Rounded, weights: Operands) -> dict[str, Any]:
    names = ("x_stride", "xs_stride", "w_stride", "ws_stride")
    return {
        "x": r.x,
        "xs": r.scale_words,
        "row_scale": r.row_scale,
        "w": weights.w,
        "ws": weights.ws,
        "w_expert": _experts(weights)[0],
        "ws_expert": _experts(weights)[1],
        **dict(zip(names, _strides(r, weights))),
    }


class TritonMoeSplit(TritonMoe):
    """FP8 activations on SM12x: weights in the layout w4a8_split, widened to E4M3 in registers."""

    name, split, rank = "triton.moe_split", True, 11
