"""Grouped products with fp8 activations on SM90, and their phases: twice the tensor cores' rate, half the bytes of x.

Weights stay MXFP4 in tile16 and are widened to E5M2 relative to the largest scale of their row, exactly (see
grouped_fp8.cuh); activations are E4M3 with one float32 scale a row, as `ops.linear` defines fp8. The middle of the MLP
passes through bf16 on its way to E4M3. Refuses rows whose scales span more than 16 octaves: E5M2 would lose bits.

Emulated and compiled, not yet run on a GPU: `auto` never takes these phases. Ask for them with
--activation prefill=fp8 --moe-kernel prefill=cuda --linear-kernel prefill=cuda.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfbyte.errors import PlanError
from halfbyte.formats import MXTensor
from halfbyte.formats.tile16 import CHUNK_BYTES
from halfbyte.gates import Gates
from halfbyte.kernels.cuda.grouped import (
    CHUNK,
    PACKED,
    PAD,
    ROW_THREADS,
    SHAPES,
    TILE,
    Dense,
    Experts,
    ProductArgs,
    Room,
    RowsArgs,
    Variant,
    _float,
    _ptr,
)
from halfbyte.kernels.cuda.grouped_phases import (
    GroupedHead,
    GroupedMoe,
    GroupedOut,
    GroupedQkv,
    _Grouped,
    room_of,
)
from halfbyte.kernels.launch import Program
from halfbyte.plan.phase import Arch, Binding, Launch, Phase, Spec
from halfbyte.plan.step import REGIMES, Step

SPREAD = 16  # octaves between the scales of a row that E5M2 can hold
WIDTHS = (64, 72, 80, 96, 112, 128, 144, 176, 208, 240, 256)  # columns for which the product exists, from 64 on


@dataclass(frozen=True)
class Fp8Variant(Variant):
    """Two blocks share an item's columns: at this rate L2 could not deliver them twice."""

    @property
    def pair(self) -> int:
        return 2

    def program(self) -> Program:
        plain = super().program()
        return dataclasses.replace(plain, options=(*plain.options, "-DHB_PAIR=2"))


def tops_of(data: Tensor, role: str) -> Tensor:
    """The largest scale of every row, uint8 [..., rows], of MXFP4 weights in tile16."""
    *lead, tiles, chunks, _ = data.shape
    if data.device.type == "meta":
        return torch.empty((*lead, tiles * 16), dtype=torch.uint8, device="meta")
    # bytes [g][group][r] of a chunk: rows g + 8 r
    scales = data[..., CHUNK_BYTES["mxfp4"] - 32 :].reshape(-1, chunks, 8, 2, 2)
    high, low = scales.amax((1, 3)), scales.amin((1, 3))  # [tile, g, r]
    widest = int((high - low).max()) if data.numel() else 0
    if widest > SPREAD:
        raise PlanError(
            f"{role} has a row whose MXFP4 scales span {widest} octaves, and fp8 products hold {SPREAD}; "
            "use --activation bf16."
        )
    return high.transpose(1, 2).reshape(*lead, tiles * 16).contiguous()


def columns_of(rows: int, m_tiles: int, blocks: int) -> int:
    """Columns per item of one dense product that leave the least to the busiest pair of blocks."""
    items = math.ceil(m_tiles / (2 * SHAPES["vast"].warpgroups))

    def cost(cap: int) -> int:
        n = math.ceil(rows / math.ceil(rows / cap))
        width = next((w for w in WIDTHS if w >= n), WIDTHS[-1])
        return math.ceil(math.ceil(rows / cap) * items / max(1, blocks // 2)) * max(
            width, 112
        )  # fewer wait for widening

    return min(WIDTHS, key=lambda cap: (cost(cap), -cap))


def _only_mxfp4(form: str, role: str) -> None:
    if form != "mxfp4":
        raise PlanError(f"fp8 products are for MXFP4 weights, and {role} is {form}; use --activation bf16.")


class Fp8Dense(Dense):
    """y = W x + bias, or residual + that, with x in E4M3."""

    def __init__(self, room: Room, weights: MXTensor, bias: Tensor | None, role: str) -> None:
        super().__init__(room, weights, bias, role, "vast")
        _only_mxfp4(self.format, role)
        self.tops = tops_of(self.data, role)

    def run(
        self,
        source: Tensor,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        select: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        assert source.stride(-1) == 1, "rows are whole"
        assert source.stride(0) % 8 == 0, "rows are read sixteen bytes at a time"
        room, rows = self.room, source.shape[0] if select is None else select.shape[0]
        out = torch.empty((rows, self.n), dtype=torch.float32, device=source.device)
        if rows == 0:
            return out
        slots, wide = rows + 2 * PAD, -(-self.k // 128) * 128
        packed = room.get(f"fp8.{self.k}", rows, lambda r: (r + 2 * PAD) * wide, torch.uint8)
        scales = room.get("fp8.scales", rows, lambda r: r + 2 * PAD, torch.float32)
        room.machine.rows(
            "pack_rows", rows,
            RowsArgs(
                source=_ptr(source), norm=_ptr(norm), select=_ptr(select), packed=_ptr(packed), scales=_ptr(scales),
                stride=source.stride(0), rows=rows, width=self.k, slots=slots, source_float=_float(source),
                norm_float=_float(norm), kind=PACKED["e4m3"], eps=eps,
            ),
        )  # fmt: skip
        args = ProductArgs(
            map=self.map, bias=_ptr(self.bias), bias_float=_float(self.bias), x=_ptr(packed), out=_ptr(out),
            residual=_ptr(residual), out_stride=self.n, experts=1, m_tiles=self.n // TILE, chunks=self.k // CHUNK,
            columns=rows, x_slots=slots, n_cap=columns_of(rows, self.n // TILE, room.machine.blocks),
            tops=_ptr(self.tops), x_scale=_ptr(scales),
        )  # fmt: skip
        room.machine.product(Fp8Variant(self.format, "vast", False), args)
        return out


class Fp8Experts(Experts):
    """x + the weighted sum of the chosen experts' MLPs of h, with h and the middle in E4M3."""

    def __init__(
        self,
        room: Room,
        gate_up: MXTensor,
        gate_up_bias: Tensor,
        down: MXTensor,
        down_bias: Tensor,
        *,
        limit: float,
        alpha: float,
    ) -> None:
        super().__init__(room, gate_up, gate_up_bias, down, down_bias, limit=limit, alpha=alpha, shape="vast")
        _only_mxfp4(self.format, "gate_up")
        self.tops = (tops_of(self.gate_up, "gate_up"), tops_of(self.down, "down"))

    def run(self, h: Tensor, ids: Tensor, weights: Tensor, x: Tensor) -> Tensor:
        room = self.room
        rows, top_k = ids.shape
        assert x.dtype == torch.float32, "the residual is float32"
        assert h.stride(-1) == 1, "rows are whole"
        assert h.stride(0) % 8 == 0, "rows are read sixteen bytes at a time"
        assert all(t.is_contiguous() for t in (x, ids, weights)), "the router's results and the residual are whole"
        out = torch.empty_like(x)
        if rows == 0:
            return out
        half = self.inner // 2

        def slots_of(r: int) -> int:
            return r * top_k + 7 * min(self.experts, r * top_k) + 2 * PAD

        def wide(k: int) -> int:
            return -(-k // 128) * 128

        slots = slots_of(rows)
        packed = room.get("fp8.slots", rows, lambda r: slots_of(r) * wide(self.hidden), torch.uint8)
        hidden = room.get("fp8.hidden", rows, lambda r: slots_of(r) * half, torch.bfloat16)
        small = room.get("fp8.middle", rows, lambda r: slots_of(r) * wide(half), torch.uint8)
        parts = room.get("fp8.parts", rows, lambda r: slots_of(r) * self.hidden, torch.float32)
        place = room.get("fp8.place", rows, lambda r: r * top_k, torch.int32)
        table = room.get("fp8.table", rows, lambda r: 2 * self.experts, torch.int32)
        scales = room.get("fp8.slot_scales", rows, slots_of, torch.float32)
        starts, counts = table.data_ptr(), table.data_ptr() + 4 * self.experts
        common = RowsArgs(
            source=_ptr(h), packed=_ptr(packed), ids=_ptr(ids), weights=_ptr(weights), starts=starts, counts=counts,
            place=_ptr(place), parts=_ptr(parts), residual=_ptr(x), out=_ptr(out), stride=h.stride(0), rows=rows,
            width=self.hidden, slots=slots, experts=self.experts, top_k=top_k, source_float=_float(h),
            ids_wide=int(ids.dtype == torch.int64), kind=PACKED["e4m3"], scales=_ptr(scales),
        )  # fmt: skip
        room.machine.rows("group_rows", self.experts, common)
        room.machine.rows("pack_rows", rows, common)
        first = ProductArgs(
            map=self.maps[0], bias=_ptr(self.gate_up_bias), bias_float=_float(self.gate_up_bias), x=_ptr(packed),
            starts=starts, counts=counts, packed=_ptr(hidden), experts=self.experts, m_tiles=self.inner // TILE,
            chunks=self.hidden // CHUNK, x_slots=slots, packed_slots=slots, n_cap=SHAPES["vast"].columns,
            limit=self.limit, alpha=self.alpha, tops=_ptr(self.tops[0]), x_scale=_ptr(scales),
        )  # fmt: skip
        room.machine.product(Fp8Variant(self.format, "vast", True), first)
        middle = RowsArgs(hidden=_ptr(hidden), packed=_ptr(small), scales=_ptr(scales), width=half, slots=slots)
        room.machine.rows("requantize", -(-slots // (ROW_THREADS // 32)), middle)
        second = ProductArgs(
            map=self.maps[1], bias=_ptr(self.down_bias), bias_float=_float(self.down_bias), x=_ptr(small),
            starts=starts, counts=counts, out=_ptr(parts), out_stride=self.hidden, experts=self.experts,
            m_tiles=self.hidden // TILE, chunks=half // CHUNK, x_slots=slots, n_cap=SHAPES["vast"].columns,
            tops=_ptr(self.tops[1]), x_scale=_ptr(scales),
        )  # fmt: skip
        room.machine.product(Fp8Variant(self.format, "vast", False), second)
        room.machine.rows("sum_rows", rows, common)
        return out


# ---- phases ---------------------------------------------------------------------------------------------------------


class _Fp8(_Grouped):
    """What the bf16 phases ask, for fp8 activations and MXFP4 weights."""

    kinds = ("mxfp4",)

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        if spec.activation != "fp8":
            return f"multiplies fp8 activations, not {spec.activation}"
        if "cuda" not in {gates.backend(axis, regime) for axis in self.backends for regime in REGIMES}:
            return f"has not been run on a GPU yet, so only --{next(iter(self.backends))}-kernel cuda takes it"
        return super().refuse(dataclasses.replace(spec, activation="bf16"), arch, gates)


class Fp8Moe(_Fp8, GroupedMoe):
    name = "cuda.grouped_fp8_moe"

    def bind(self, b: Binding) -> Launch:
        w, s = b.weights, b.spec
        experts = Fp8Experts(
            room_of(b), w.gate_up, w.gate_up_bias, w.down, w.down_bias, limit=s.swiglu_limit, alpha=s.swiglu_alpha
        )

        def launch(step: Step, acts: dict[str, Any]) -> None:
            acts["x"] = experts.run(acts["h"], acts["topk_ids"], acts["topk_weights"], acts["x"])

        return launch


class Fp8Qkv(_Fp8, GroupedQkv):
    name = "cuda.grouped_fp8_norm_qkv"

    def bind(self, b: Binding) -> Launch:
        w, s = b.weights, b.spec
        dense = Fp8Dense(room_of(b), w.qkv, w.qkv_bias, "qkv")
        heads = [s.heads, s.kv_heads, s.kv_heads]

        def launch(step: Step, acts: dict[str, Any]) -> None:
            y = dense.run(acts["x"], norm=w.attn_norm, eps=s.norm_eps).view(step.rows, sum(heads), s.head_dim)
            acts["q"], acts["k"], acts["v"] = torch.split(y, heads, dim=1)

        return launch


class Fp8Out(_Fp8, GroupedOut):
    name = "cuda.grouped_fp8_o"

    def bind(self, b: Binding) -> Launch:
        dense = Fp8Dense(room_of(b), b.weights.o, b.weights.o_bias, "o")

        def launch(step: Step, acts: dict[str, Any]) -> None:
            acts["x"] = dense.run(acts["attn"], residual=acts["x"])

        return launch


class Fp8Head(_Fp8, GroupedHead):
    name = "cuda.grouped_fp8_norm_lm_head"

    def bind(self, b: Binding) -> Launch:
        w, eps = b.weights, b.spec.norm_eps
        dense = Fp8Dense(room_of(b), w.lm_head, None, "lm_head")

        def launch(step: Step, acts: dict[str, Any]) -> None:
            acts["logits"] = dense.run(acts["x"], norm=w.final_norm, eps=eps, select=step.logit_rows)

        return launch


PHASES: tuple[Phase, ...] = (Fp8Qkv(), Fp8Out(), Fp8Moe(), Fp8Head())
