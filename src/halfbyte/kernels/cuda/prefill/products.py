"""Grouped products on Hopper: experts and dense projections for batches and prefill, around grouped.cu.

`Experts` and `Dense` hold one layer's weights in the layout "tile16" and run them over any number of rows; a `Room`
holds the buffers they share and grows when more rows come than ever before. Nothing here synchronises with the host or
looks at device data, so a launch can be captured. Weights are never converted: a wrong layout or shape is a PlanError.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.errors import PlanError
from halfbyte.formats import DenseTiles, MXTensor
from halfbyte.formats.tile16 import CHUNK_BYTES, tile_shape
from halfbyte.kernels.cuda.prefill.builds import (
    CHUNK,
    EXPERTS_MAX,
    FORMATS,
    PACKED,
    PAD,
    SHAPES,
    SUM_WIDTH,
    TILE,
    Machine,
    ProductArgs,
    Room,
    RowsArgs,
    Shape,
    Variant,
)
from halfbyte.kernels.launch import Map

LARGEST_SCALE = 128  # UE8M0: 2^(e - 1) must be a bf16 number


def _ptr(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def _float(t: Tensor | None) -> int:
    """Whether values are float32 (else bf16)."""
    if t is None:
        return 0
    if t.dtype not in (torch.float32, torch.bfloat16):
        raise PlanError(f"the grouped products read float32 and bf16, not {t.dtype}.")
    return int(t.dtype == torch.float32)


def _weights(w: Tensor | MXTensor | DenseTiles, role: str) -> tuple[str, Tensor, int, int]:
    """(format, data, rows, k) of a matrix or a stack of them in tile16."""
    if isinstance(w, DenseTiles):
        w = w.data
    if isinstance(w, MXTensor):
        form, data, (n, k) = str(w.format), w.data, w.shape[-2:]
        ok = w.layout == "tile16" and form in FORMATS
    else:  # dense tiles carry their shape: uint8 [..., tiles, chunks, 2048]
        form, data, n, k = "bf16", w, w.shape[-3] * 16, w.shape[-2] * 64
        ok = w.dtype == torch.uint8 and w.shape[-1] == CHUNK_BYTES["bf16"]
    if not ok or tuple(data.shape[-3:]) != tile_shape(n, k, form) or not data.is_contiguous():
        raise PlanError(f"the grouped products need {role} contiguous in the layout tile16, as mxfp4, q8 or bf16.")
    if n % TILE or k % CHUNK:
        raise PlanError(f"the grouped products need {role} in multiples of {TILE} x {CHUNK}, not {n} x {k}.")
    if form == "mxfp4":
        largest = int(data.view(-1, CHUNK_BYTES["mxfp4"])[:, 512:].amax()) if data.device.type != "meta" else 0
        if largest > LARGEST_SCALE:
            raise PlanError(
                f"{role} has MXFP4 scales past 2^{LARGEST_SCALE - 127}, which the grouped products cannot hold."
            )
    return form, data, n, k


def _map(machine: Machine, data: Tensor, variant: Variant) -> Map:
    """The weights as the copy engine fetches them: a stage's part of 64 rows at once (meta tensors have none)."""
    if data.device.type == "meta":
        return (ctypes.c_uint64 * 16)()
    chunk, chunks = CHUNK_BYTES[variant.format], data.shape[-2]
    return machine.map(data, chunks * chunk, (4, variant.chunks * chunk))


WIDTHS = (64, 72, 80, 88, 96, 112, 128, 144, 176, 208, 240, 256)  # of columns, from 64 on; fp8 has no 88
HALF_ITEM = 0.6  # of an item's time, for one that occupies half of the warpgroups
ITEM = 24  # columns that could be multiplied while an item starts and ends


@functools.cache
def columns_cap(rows: int, m_tiles: int, blocks: int, shape: Shape, least: int = 64) -> int:
    """Columns per item of one dense product that leave the least to the busiest block.

    `least`: columns below which an item takes no less time, because weights have to be widened all the same."""
    if shape.number == 0 or rows <= 64 or shape.columns < WIDTHS[0]:  # blocks share out tiles of 64 rows
        return shape.columns
    item, workers = shape.warpgroups * shape.tiles * shape.pair, blocks // shape.pair
    whole, left = divmod(m_tiles, item)

    def cost(cap: int) -> float:
        parts = math.ceil(rows / cap)
        n = max(least, math.ceil(rows / parts))
        full, rest = parts * whole, parts if left else 0
        loads = [float(full // workers + (w < full % workers)) for w in range(workers)]
        part = HALF_ITEM if 2 * left <= item else 1.0
        for i in range(rest):
            loads[(full + i) % workers] += part
        return max(loads) * (ITEM + min(w for w in WIDTHS if w >= n))

    return min((w for w in WIDTHS if w <= shape.columns), key=lambda cap: (cost(cap), -cap))


def shape_for(per_expert: float) -> str:
    """Which build serves this many rows per expert best (measured; past 24 and 72, too many have over 48 and 88)."""
    return next((name for name, most in (("narrow", 4), ("lean", 24), ("broad", 72)) if per_expert <= most), "wide")


class Inputs(NamedTuple):
    """Activations as the products read them."""

    packed: Tensor
    slots: int  # those that may be read past the last one included
    kind: int  # of PACKED
    scales: Tensor | None = None  # of every slot


class PendingExperts(NamedTuple):
    """The residual stream and the experts' results that nobody has added to it yet (a `PendingResidual`).

    The results lie in buffers that the next layer's experts write again."""

    machine: Machine
    args: RowsArgs
    x: Tensor  # to which they are added
    read: tuple[Tensor, ...]  # what `args` points to, kept alive

    def complete(self) -> Tensor:
        out = torch.empty_like(self.x)
        args = RowsArgs.from_buffer_copy(self.args)
        args.out = _ptr(out)
        self.machine.rows("sum_rows", args.rows, args)
        return out


class Rotation(NamedTuple):
    """Where queries, keys and values go, and how far they turn."""

    angles: Tensor  # float32 [rows, 32, 2]: cos and sin
    cells: Tensor  # int64 [rows]: where in the layer's pages the first head's key goes
    pool: int  # address of this layer's first key
    value_offset: int  # from a key to its value
    heads: int
    kv_heads: int


class Dense:
    """y = W x + bias, or residual + that, for one matrix."""

    def __init__(
        self,
        room: Room,
        weights: Tensor | MXTensor | DenseTiles,
        bias: Tensor | None,
        role: str,
        shape: str | None = None,
    ) -> None:
        self.room, self.bias, self.shape = room, bias, shape
        self.format, self.data, self.n, self.k = _weights(weights, role)
        self.map = _map(room.machine, self.data, self._product(1)[0])
        self.tops = self._tops(self.data, role)
        _float(bias)

    def _tops(self, data: Tensor, role: str) -> Tensor | None:
        """Of the rows' scales, where a product widens relative to them."""
        return None

    def inputs(self, rows: int) -> Inputs:
        packed = self.room.get(f"packed.{self.k}", rows, lambda r: (r + PAD) * self.k, torch.bfloat16)
        return Inputs(packed, rows + PAD, PACKED["f16" if self.format == "q8" else "bf16"])

    def _product(self, rows: int) -> tuple[Variant, int]:
        """The build, and the most columns of an item."""
        shape = self.shape or ("narrow" if rows <= 64 else "wide")
        cap = columns_cap(rows, self.n // TILE, self.room.machine.blocks, SHAPES[shape])
        return Variant(self.format, shape, False), cap

    def pack(
        self,
        source: Tensor,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        select: Tensor | None = None,
    ) -> Inputs:
        """Rows of `source`, or those that `select` names, behind an RMS norm with the weight `norm`."""
        assert source.stride(-1) == 1, "rows are whole"
        assert source.stride(0) % 8 == 0, "rows are read sixteen bytes at a time"
        rows = source.shape[0] if select is None else select.shape[0]
        x = self.inputs(rows)
        args = RowsArgs(source=_ptr(source), select=_ptr(select), stride=source.stride(0), source_float=_float(source))
        self._pack("pack_rows", rows, x, args, norm, eps)
        return x

    def sum_and_pack(self, pending: PendingExperts, *, norm: Tensor, eps: float) -> tuple[Tensor, Inputs]:
        """What the experts left, added up: as rows, and behind a norm as this matrix reads them."""
        assert pending.x.shape[1] <= SUM_WIDTH, "a row fits the threads that sum it"
        rows, out, x = pending.x.shape[0], torch.empty_like(pending.x), self.inputs(pending.x.shape[0])
        args = RowsArgs.from_buffer_copy(pending.args)
        args.out = _ptr(out)
        self._pack("sum_pack_rows", rows, x, args, norm, eps)
        return out, x

    def _pack(self, entry: str, rows: int, x: Inputs, args: RowsArgs, norm: Tensor | None, eps: float) -> None:
        args.packed, args.scales, args.slots, args.kind = _ptr(x.packed), _ptr(x.scales), x.slots, x.kind
        args.norm, args.norm_float, args.eps = _ptr(norm), _float(norm), eps
        args.rows, args.width = rows, self.k
        self.room.machine.rows(entry, rows, args)

    def _args(self, x: Inputs, rows: int) -> tuple[Variant, ProductArgs]:
        variant, cap = self._product(rows)
        return variant, ProductArgs(
            map=self.map, bias=_ptr(self.bias), bias_float=_float(self.bias), x=_ptr(x.packed), experts=1,
            m_tiles=self.n // TILE, chunks=self.k // CHUNK, columns=rows, x_slots=x.slots, n_cap=cap,
            tops=_ptr(self.tops), x_scale=_ptr(x.scales),
        )  # fmt: skip

    def multiply(self, x: Inputs, rows: int, residual: Tensor | None = None) -> Tensor:
        """float32 [rows, n] of what was packed."""
        out = torch.empty((rows, self.n), dtype=torch.float32, device=x.packed.device)
        variant, args = self._args(x, rows)
        args.out, args.residual, args.out_stride = _ptr(out), _ptr(residual), self.n
        self.room.machine.product(variant, args)
        return out

    def rotate(self, x: Inputs, rows: int, to: Rotation) -> Tensor:
        """Of qkv: rotated queries, bf16 [rows, heads, 64]; keys and values go to their pages."""
        variant, args = self._args(x, rows)
        q = torch.empty((rows, to.heads, TILE), dtype=torch.bfloat16, device=x.packed.device)
        args.q, args.angles, args.cells, args.pool = _ptr(q), _ptr(to.angles), _ptr(to.cells), to.pool
        args.value_offset, args.heads, args.kv_heads = to.value_offset, to.heads, to.kv_heads
        self.room.machine.product(replace(variant, rope=True), args)
        return q

    def run(
        self,
        source: Tensor,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        select: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """float32 [rows, n]: `pack` and `multiply`."""
        rows = source.shape[0] if select is None else select.shape[0]
        if rows == 0:
            return torch.empty((0, self.n), dtype=torch.float32, device=source.device)
        return self.multiply(self.pack(source, norm=norm, eps=eps, select=select), rows, residual)


class Experts:
    """x + the weighted sum of the chosen experts' MLPs of h."""

    pad, prefix = PAD, ""  # slots past the last one; of the names of buffers whose size depends on it
    results = torch.float32  # of each expert, before they are summed

    def __init__(
        self,
        room: Room,
        gate_up: Tensor | MXTensor | DenseTiles,
        gate_up_bias: Tensor,
        down: Tensor | MXTensor | DenseTiles,
        down_bias: Tensor,
        *,
        limit: float,
        alpha: float,
        shape: str | None = None,
    ) -> None:
        self.room, self.limit, self.alpha, self.shape = room, limit, alpha, shape
        self.gate_up_bias, self.down_bias = gate_up_bias, down_bias
        self.format, self.gate_up, self.inner, self.hidden = _weights(gate_up, "gate_up")
        form, self.down, n, k = _weights(down, "down")
        variant = self._variant(self._shape(1.0), False)
        self.maps = [_map(room.machine, data, variant) for data in (self.gate_up, self.down)]
        self.experts = self.gate_up.shape[0]
        self.tops = self._tops(self.gate_up, "gate_up"), self._tops(self.down, "down")
        if form != self.format or (n, 2 * k) != (self.hidden, self.inner) or self.experts > EXPERTS_MAX:
            raise PlanError(
                "the grouped products need gate_up and down of one format, of one shape, of 512 experts at most."
            )

    def _tops(self, data: Tensor, role: str) -> Tensor | None:
        """Of the rows' scales, where a product widens relative to them."""
        return None

    def _slots(self, rows: int, top_k: int) -> int:
        return rows * top_k + 7 * min(self.experts, rows * top_k) + self.pad

    def _inputs(self, rows: int, top_k: int) -> Inputs:
        packed = self.room.get("slots", rows, lambda r: self._slots(r, top_k) * self.hidden, torch.bfloat16)
        return Inputs(packed, self._slots(rows, top_k), PACKED["bf16"])

    def _middle(self, hidden: Tensor, rows: int, top_k: int, x: Inputs) -> Inputs:
        """What gate_up left, as down reads it."""
        return Inputs(hidden, x.slots, x.kind)

    def _shape(self, per_expert: float) -> str:
        return self.shape or shape_for(per_expert)

    def _variant(self, shape: str, swiglu: bool) -> Variant:
        return Variant(self.format, shape, swiglu)

    def run(self, h: Tensor, ids: Tensor, weights: Tensor, x: Tensor) -> Tensor:
        """h [rows, hidden] bf16 or float32, ids and weights [rows, top_k] as the router left them, x float32."""
        return self.leave(h, ids, weights, x).complete() if len(ids) else torch.empty_like(x)

    def leave(self, h: Tensor, ids: Tensor, weights: Tensor, x: Tensor) -> PendingExperts:
        """Both products; nothing is summed yet."""
        room = self.room
        rows, top_k = ids.shape
        assert x.dtype == torch.float32, "the residual is float32"
        assert rows * top_k < 1 << 20, "tiles of columns are counted in sixteen bits"
        assert h.stride(-1) == 1, "rows are whole"
        assert h.stride(0) % 8 == 0, "rows are read sixteen bytes at a time"
        assert all(t.is_contiguous() for t in (x, ids, weights)), "the router's results and the residual are whole"
        half, given = self.inner // 2, self._inputs(rows, top_k)
        slots, scales = given.slots, _ptr(given.scales)
        hidden = room.get(f"{self.prefix}hidden", rows, lambda r: self._slots(r, top_k) * half, torch.bfloat16)
        parts = room.get(f"{self.prefix}parts", rows, lambda r: self._slots(r, top_k) * self.hidden, self.results)
        place = room.get("place", rows, lambda r: r * top_k, torch.int32)
        table = room.get("table", rows, lambda r: 3 * self.experts, torch.int32)
        starts, counts, order = (table.data_ptr() + 4 * self.experts * i for i in range(3))
        shape = self._shape(rows * top_k / self.experts)
        common = RowsArgs(
            source=_ptr(h), packed=_ptr(given.packed), ids=_ptr(ids), weights=_ptr(weights), starts=starts,
            counts=counts, place=_ptr(place), parts=_ptr(parts), residual=_ptr(x), stride=h.stride(0), rows=rows,
            width=self.hidden, slots=slots, experts=self.experts, top_k=top_k, source_float=_float(h),
            ids_wide=int(ids.dtype == torch.int64), kind=given.kind, scales=scales, parts_float=_float(parts),
            order=order,
        )  # fmt: skip
        room.machine.rows("group_rows", self.experts, common)
        room.machine.rows("pack_rows", rows, common)
        up, down = self._variant(shape, True), self._variant(shape, False)
        first = ProductArgs(
            map=self.maps[0], bias=_ptr(self.gate_up_bias), bias_float=_float(self.gate_up_bias),
            x=_ptr(given.packed), starts=starts, counts=counts, order=order, packed=_ptr(hidden), experts=self.experts,
            m_tiles=self.inner // TILE, chunks=self.hidden // CHUNK, x_slots=slots, packed_slots=slots,
            n_cap=up.columns, limit=self.limit, alpha=self.alpha, tops=_ptr(self.tops[0]), x_scale=scales,
        )  # fmt: skip
        room.machine.product(up, first)
        middle = self._middle(hidden, rows, top_k, given)
        second = ProductArgs(
            map=self.maps[1], bias=_ptr(self.down_bias), bias_float=_float(self.down_bias), x=_ptr(middle.packed),
            starts=starts, counts=counts, order=order, out=_ptr(parts), out_stride=self.hidden, experts=self.experts,
            m_tiles=self.hidden // TILE, chunks=half // CHUNK, x_slots=slots, n_cap=up.columns,
            tops=_ptr(self.tops[1]), x_scale=_ptr(middle.scales), out_bf16=1 - _float(parts),
        )  # fmt: skip
        room.machine.product(down, second)
        return PendingExperts(room.machine, common, x, (ids, weights, x))
