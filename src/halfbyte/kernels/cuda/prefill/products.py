"""Grouped products on Hopper: experts and dense projections for batches and prefill, around grouped.cu.

`Dense` and `Experts` (experts.py) hold one layer's weights in the layout "tile16" and run them over any number of rows,
in buffers that a `Workspace` holds. Nothing here synchronises with the host or looks at device data, so a launch can be
captured. Weights are never converted: a wrong layout or shape is a PlanError.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte.errors import PlanError
from halfbyte.formats import DenseTiles, MXTensor, e8m0, tile16
from halfbyte.formats.e8m0 import BIAS
from halfbyte.formats.tile16 import CHUNK_BYTES, tile_shape
from halfbyte.kernels.cuda.device.host import FORMATS, KernelMachine, Workspace, is_float, pointer
from halfbyte.kernels.cuda.prefill.builds import (
    CHUNK,
    PACKED,
    PAD,
    SUM_WIDTH,
    TILE,
    TILES,
    GroupedProductArgs,
    GroupedRowsArgs,
    GroupedShape,
    GroupedTile,
    build_of,
    rows_build,
)
from halfbyte.kernels.launch import Map

log = logging.getLogger("halfbyte")

LARGEST_SCALE = 128  # code of a scale up to which a weight is held as it is, which is any weight below 16
BELOW = 132  # octaves below a matrix's base down to which every weight is a bf16 number, subnormal ones included
CHUNKS_AT_ONCE = 1 << 16  # whose codes are looked at: some 100 MB


class Scaling(NamedTuple):
    """How a product holds the scales of a matrix: relative to one power of two, or to one of each row."""

    base: int = BIAS  # code of the scale that is held as one
    row_max_scale: Tensor | None = None  # code of the largest scale of every row, uint8 [..., rows]

    @property
    def arguments(self) -> dict[str, Any]:
        """The fields of `GroupedProductArgs`."""
        return {
            "scale_offset": (253 - self.base) * 0x00800080,
            "sum_scale": 2.0 ** (self.base - BIAS),
            "row_max_scale": pointer(self.row_max_scale),
        }


def find_base(data: Tensor, role: str) -> int:
    """The code of the scale that MXFP4 weights in tile16 are held relative to, as one for all experts.

    It is 2^0, or half of the largest scale where that is above 2. Groups of zeros do not count; one with a larger scale
    is stored with another, which means the same to every kernel: the product would make no number of it. What lies more
    than BELOW octaves under the base is rounded to what bf16 has there, mostly to zero, and is counted."""
    chunks = data.view(-1, CHUNK_BYTES["mxfp4"])
    scales, largest = tile16.scales_of(chunks), LARGEST_SCALE
    for places in _chunks_with(scales > LARGEST_SCALE):
        some, zeros = scales[places], tile16.groups_of_zeros(chunks[places])
        if (some == e8m0.NAN).any():
            raise PlanError(
                f"{role} has MXFP4 scales that are no numbers, which the grouped products cannot show; "
                "use --moe-kernel triton --linear-kernel triton."
            )
        some = some.masked_fill(zeros & (some > LARGEST_SCALE), LARGEST_SCALE)
        scales[places] = some
        largest = max(largest, int(some.amax()))
    base = largest - 1
    lost = 0
    for places in _chunks_with(scales < base - BELOW) if base > BELOW else ():
        lost += int(((scales[places] < base - BELOW) & ~tile16.groups_of_zeros(chunks[places])).sum())
    if lost:
        log.warning(
            "%s: %d groups of 32 weights have scales more than %d octaves below the largest, 2^%d; prompts and large "
            "batches read them as zero or nearly so.",
            role,
            lost,
            BELOW + 1,
            largest - BIAS,
        )
    return base


def _chunks_with(mask: Tensor) -> Iterable[Tensor]:
    """The chunks with a group of this kind, some at a time."""
    places = mask.flatten(1).any(1).nonzero()[:, 0]
    return torch.split(places, CHUNKS_AT_ONCE) if len(places) else ()


def weights_of(w: Tensor | MXTensor | DenseTiles, role: str) -> tuple[str, Tensor, int, int]:
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
    return form, data, n, k


def map_of(machine: KernelMachine, data: Tensor, shape: GroupedShape) -> Map:
    """The weights as the copy engine fetches them: a stage's part of 64 rows at once (meta tensors have none)."""
    if data.device.type == "meta":
        return (ctypes.c_uint64 * 16)()
    chunk, chunks = CHUNK_BYTES[shape.format], data.shape[-2]
    return machine.byte_map(data, chunks * chunk, (4, shape.chunks * chunk))


def multiply(machine: KernelMachine, shape: GroupedShape, args: GroupedProductArgs) -> None:
    machine.run(build_of(shape), machine.blocks - machine.blocks % shape.pair, args)


WIDTHS = (64, 72, 80, 88, 96, 112, 128, 144, 176, 208, 240, 256)  # of columns, from 64 on; fp8 has no 88
HALF_ITEM = 0.6  # of an item's time, for one that occupies half of the warpgroups
ITEM = 24  # columns that could be multiplied while an item starts and ends


@functools.cache
def columns_cap(rows: int, m_tiles: int, blocks: int, tile: GroupedTile, least: int = 64) -> int:
    """Columns per item of one dense product that leave the least to the busiest block.

    `least`: columns below which an item takes no less time, because weights have to be widened all the same."""
    if tile.number == 0 or rows <= 64 or tile.columns < WIDTHS[0]:  # blocks share out tiles of 64 rows
        return tile.columns
    item, workers = tile.warpgroups * tile.tiles * tile.pair, blocks // tile.pair
    full_items, left = divmod(m_tiles, item)

    def cost(cap: int) -> float:
        parts = math.ceil(rows / cap)
        n = max(least, math.ceil(rows / parts))
        full, rest = parts * full_items, parts if left else 0
        loads = [float(full // workers + (w < full % workers)) for w in range(workers)]
        part = HALF_ITEM if 2 * left <= item else 1.0
        for i in range(rest):
            loads[(full + i) % workers] += part
        return max(loads) * (ITEM + min(w for w in WIDTHS if w >= n))

    return min((w for w in WIDTHS if w <= tile.columns), key=lambda cap: (cost(cap), -cap))


class ProductInputs(NamedTuple):
    """Activations as the products read them."""

    packed: Tensor
    slots: int  # those that may be read past the last one included
    kind: int  # of PACKED
    scales: Tensor | None = None  # of every slot


class PendingGroupedExperts(NamedTuple):
    """The residual stream and the experts' results that are not yet added to it (a `PendingResidual`).

    The results lie in buffers that the next layer's experts write again."""

    machine: KernelMachine
    args: GroupedRowsArgs
    x: Tensor  # to which they are added
    tensors: tuple[Tensor, ...]  # which `args` points into: kept alive

    def complete(self) -> Tensor:
        out = torch.empty_like(self.x)
        args = GroupedRowsArgs.from_buffer_copy(self.args)
        args.out = pointer(out)
        self.machine.run(rows_build("sum_rows"), args.rows, args)
        return out


class Rotation(NamedTuple):
    """Where queries, keys and values go, and how far they turn."""

    angles: Tensor  # float32 [rows, 32, 2]: cos and sin
    cells: Tensor  # int64 [rows]: where in the layer's pages the first head's key goes
    pool: int  # address of this layer's first key
    value_offset: int  # from a key to its value
    heads: int
    kv_heads: int


class GroupedProducts:
    """What `Dense` and `Experts` share. For other activations or another instruction a subclass names its own."""

    tiles: tuple[str, ...]  # of the products it may multiply with
    entries: tuple[str, ...]  # of rows.cu, which it launches around them

    @classmethod
    def product(cls, form: str, tile: str, swiglu: bool) -> GroupedShape:
        return GroupedShape(form, tile, swiglu)

    def find_scaling(self, data: Tensor, form: str, role: str) -> Scaling:
        """What the weights are held relative to."""
        return Scaling(find_base(data, role)) if form == "mxfp4" and data.device.type != "meta" else Scaling()


class Dense(GroupedProducts):
    """y = W x + bias, or residual + that, for one matrix. `tile` overrides the product's tile, for comparisons."""

    tiles: tuple[str, ...] = ("m256n64", "m256n128")
    entries = ("pack_rows",)

    def __init__(
        self,
        workspace: Workspace,
        weights: Tensor | MXTensor | DenseTiles,
        bias: Tensor | None,
        role: str,
        tile: str | None = None,
    ) -> None:
        self.workspace, self.bias, self.tile = workspace, bias, tile
        self.format, self.data, self.n, self.k = weights_of(weights, role)
        self.map = map_of(workspace.machine, self.data, self._product(1)[0])
        self.scaling = self.find_scaling(self.data, self.format, role)
        is_float(bias)

    def inputs(self, rows: int) -> ProductInputs:
        packed = self.workspace.growing(f"grouped.packed.{self.k}", rows, lambda r: (r + PAD) * self.k, torch.bfloat16)
        return ProductInputs(packed, rows + PAD, PACKED["f16" if self.format == "q8" else "bf16"])

    def _product(self, rows: int) -> tuple[GroupedShape, int]:
        """The build, and the most columns of an item."""
        tile = self.tile or ("m256n64" if rows <= 64 else "m256n128")
        cap = columns_cap(rows, self.n // TILE, self.workspace.machine.blocks, TILES[tile])
        return self.product(self.format, tile, False), cap

    def pack(
        self,
        source: Tensor,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        select: Tensor | None = None,
    ) -> ProductInputs:
        """Rows of `source`, or those that `select` names, behind an RMS norm with the weight `norm`."""
        assert source.stride(-1) == 1, "rows are whole"
        assert source.stride(0) % 8 == 0, "rows are read sixteen bytes at a time"
        rows = source.shape[0] if select is None else select.shape[0]
        x = self.inputs(rows)
        args = GroupedRowsArgs(
            source=pointer(source), select=pointer(select), stride=source.stride(0), source_float=is_float(source)
        )
        self._pack("pack_rows", rows, x, args, norm, eps)
        return x

    def sum_and_pack(self, pending: PendingGroupedExperts, *, norm: Tensor, eps: float) -> tuple[Tensor, ProductInputs]:
        """What the experts left, added up: as rows, and behind a norm as this matrix reads them."""
        assert pending.x.shape[1] <= SUM_WIDTH, "a row fits the threads that sum it"
        rows, out, x = pending.x.shape[0], torch.empty_like(pending.x), self.inputs(pending.x.shape[0])
        args = GroupedRowsArgs.from_buffer_copy(pending.args)
        args.out = pointer(out)
        self._pack("sum_pack_rows", rows, x, args, norm, eps)
        return out, x

    def _pack(
        self, entry: str, rows: int, x: ProductInputs, args: GroupedRowsArgs, norm: Tensor | None, eps: float
    ) -> None:
        args.packed, args.scales, args.slots, args.kind = pointer(x.packed), pointer(x.scales), x.slots, x.kind
        args.norm, args.norm_float, args.eps = pointer(norm), is_float(norm), eps
        args.rows, args.width = rows, self.k
        self.workspace.machine.run(rows_build(entry), rows, args)

    def _args(self, x: ProductInputs, rows: int) -> tuple[GroupedShape, GroupedProductArgs]:
        shape, cap = self._product(rows)
        return shape, GroupedProductArgs(
            map=self.map,
            bias=pointer(self.bias),
            bias_float=is_float(self.bias),
            x=pointer(x.packed),
            experts=1,
            m_tiles=self.n // TILE,
            chunks=self.k // CHUNK,
            columns=rows,
            x_slots=x.slots,
            n_cap=cap,
            x_scale=pointer(x.scales),
            **self.scaling.arguments,
        )

    def multiply(self, x: ProductInputs, rows: int, residual: Tensor | None = None) -> Tensor:
        """float32 [rows, n] of what was packed."""
        out = torch.empty((rows, self.n), dtype=torch.float32, device=x.packed.device)
        shape, args = self._args(x, rows)
        args.out, args.residual, args.out_stride = pointer(out), pointer(residual), self.n
        multiply(self.workspace.machine, shape, args)
        return out

    def rotate(self, x: ProductInputs, rows: int, to: Rotation) -> Tensor:
        """The qkv projection: rotated queries, bf16 [rows, heads, 64]; keys and values go to their pages."""
        _, args = self._args(x, rows)
        shape = self.product(self.format, self.tiles[-1], False)  # smaller tiles hold one half of what turns together
        q = torch.empty((rows, to.heads, TILE), dtype=torch.bfloat16, device=x.packed.device)
        args.q, args.angles, args.cells, args.pool = pointer(q), pointer(to.angles), pointer(to.cells), to.pool
        args.value_offset, args.heads, args.kv_heads = to.value_offset, to.heads, to.kv_heads
        multiply(self.workspace.machine, replace(shape, rope=True), args)
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
