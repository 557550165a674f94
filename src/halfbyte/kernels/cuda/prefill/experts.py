"""The experts' MLPs as grouped products: rows are grouped by expert, packed, multiplied twice, and summed.

`Experts` holds one layer's experts in the layout "tile16". `leave` ends in front of the sum, which the next layer makes
in one pass with its norm; nothing synchronises with the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.errors import PlanError
from halfbyte.formats import DenseTiles, MXTensor
from halfbyte.kernels.cuda.device.host import Workspace, is_float, pointer
from halfbyte.kernels.cuda.prefill.builds import (
    CHUNK,
    EXPERTS_MAX,
    PACKED,
    PAD,
    TILE,
    GroupedProductArgs,
    GroupedRowsArgs,
    rows_build,
)
from halfbyte.kernels.cuda.prefill.products import (
    GroupedProducts,
    PendingGroupedExperts,
    ProductInputs,
    map_of,
    multiply,
    weights_of,
)


def tile_for(rows_each: float) -> str:
    """The tile that serves so many rows to an expert best (measured; past 40 and 72, too many have over 48 and 88)."""
    limits = (("m256n64", 4), ("m384n48", 40), ("m384n88", 72))
    return next((tile for tile, most in limits if rows_each <= most), "m256n128")


class GroupedExperts(GroupedProducts):
    """x + the weighted sum of the chosen experts' MLPs of h."""

    tiles: tuple[str, ...] = ("m256n64", "m384n48", "m384n88", "m256n128")
    entries: tuple[str, ...] = ("group_rows", "pack_rows", "sum_rows")
    pad, prefix = PAD, ""  # slots past the last one; of the names of buffers whose size depends on it
    results = torch.float32  # of each expert, before they are summed

    def __init__(
        self,
        workspace: Workspace,
        gate_up: Tensor | MXTensor | DenseTiles,
        gate_up_bias: Tensor,
        down: Tensor | MXTensor | DenseTiles,
        down_bias: Tensor,
        *,
        limit: float,
        alpha: float,
        tile: str | None = None,
        layer: str = "",
    ) -> None:
        """`layer`: stands in front of the names of the matrices in messages."""
        self.workspace, self.limit, self.alpha, self.tile = workspace, limit, alpha, tile
        self.gate_up_bias, self.down_bias = gate_up_bias, down_bias
        self.format, self.gate_up, self.inner, self.hidden = weights_of(gate_up, f"{layer}gate_up")
        form, self.down, n, k = weights_of(down, f"{layer}down")
        shape = self.product(self.format, self._tile(1.0), False)
        self.maps = [map_of(workspace.machine, data, shape) for data in (self.gate_up, self.down)]
        self.experts = self.gate_up.shape[0]
        self.scalings = (
            self.find_scaling(self.gate_up, self.format, f"{layer}gate_up"),
            self.find_scaling(self.down, form, f"{layer}down"),
        )
        if form != self.format or (n, 2 * k) != (self.hidden, self.inner) or self.experts > EXPERTS_MAX:
            raise PlanError(
                "the grouped products need gate_up and down of one format, of one shape, of 512 experts at most."
            )

    def _slots(self, rows: int, top_k: int) -> int:
        return rows * top_k + 7 * min(self.experts, rows * top_k) + self.pad

    def _inputs(self, rows: int, top_k: int) -> ProductInputs:
        packed = self.workspace.growing(
            "grouped.slots", rows, lambda r: self._slots(r, top_k) * self.hidden, torch.bfloat16
        )
        return ProductInputs(packed, self._slots(rows, top_k), PACKED["bf16"])

    def _middle(self, hidden: Tensor, rows: int, top_k: int, x: ProductInputs) -> ProductInputs:
        """What gate_up left, as down reads it."""
        return ProductInputs(hidden, x.slots, x.kind)

    def _tile(self, rows_each: float) -> str:
        return self.tile or tile_for(rows_each)

    def run(self, h: Tensor, ids: Tensor, weights: Tensor, x: Tensor) -> Tensor:
        """h [rows, hidden] bf16 or float32, ids and weights [rows, top_k] as the router left them, x float32."""
        return self.leave(h, ids, weights, x).complete() if len(ids) else torch.empty_like(x)

    def leave(self, h: Tensor, ids: Tensor, weights: Tensor, x: Tensor) -> PendingGroupedExperts:
        """Both products; nothing is summed yet."""
        workspace, machine = self.workspace, self.workspace.machine
        rows, top_k = ids.shape
        assert x.dtype == torch.float32, "the residual is float32"
        assert rows * top_k < 1 << 20, "tiles of columns are counted in sixteen bits"
        assert h.stride(-1) == 1, "rows are whole"
        assert h.stride(0) % 8 == 0, "rows are read sixteen bytes at a time"
        assert all(t.is_contiguous() for t in (x, ids, weights)), "the router's results and the residual are whole"
        half, inputs = self.inner // 2, self._inputs(rows, top_k)
        slots, scales = inputs.slots, pointer(inputs.scales)
        get, prefix = workspace.growing, f"grouped.{self.prefix}"
        hidden = get(f"{prefix}hidden", rows, lambda r: self._slots(r, top_k) * half, torch.bfloat16)
        parts = get(f"{prefix}parts", rows, lambda r: self._slots(r, top_k) * self.hidden, self.results)
        positions = get("grouped.place", rows, lambda r: r * top_k, torch.int32)
        table = get("grouped.table", rows, lambda r: 3 * self.experts, torch.int32)
        starts, counts, order = (table.data_ptr() + 4 * self.experts * i for i in range(3))
        tile = self._tile(rows * top_k / self.experts)
        common = GroupedRowsArgs(
            source=pointer(h),
            packed=pointer(inputs.packed),
            ids=pointer(ids),
            weights=pointer(weights),
            starts=starts,
            counts=counts,
            place=pointer(positions),
            parts=pointer(parts),
            residual=pointer(x),
            stride=h.stride(0),
            rows=rows,
            width=self.hidden,
            slots=slots,
            experts=self.experts,
            top_k=top_k,
            source_float=is_float(h),
            ids_wide=int(ids.dtype == torch.int64),
            kind=inputs.kind,
            scales=scales,
            parts_float=is_float(parts),
            order=order,
        )
        machine.run(rows_build("group_rows"), self.experts, common)
        machine.run(rows_build("pack_rows"), rows, common)
        up, down = (self.product(self.format, tile, swiglu) for swiglu in (True, False))
        first = GroupedProductArgs(
            map=self.maps[0],
            bias=pointer(self.gate_up_bias),
            bias_float=is_float(self.gate_up_bias),
            x=pointer(inputs.packed),
            starts=starts,
            counts=counts,
            order=order,
            packed=pointer(hidden),
            experts=self.experts,
            m_tiles=self.inner // TILE,
            chunks=self.hidden // CHUNK,
            x_slots=slots,
            packed_slots=slots,
            n_cap=up.columns,
            limit=self.limit,
            alpha=self.alpha,
            x_scale=scales,
            **self.scalings[0].arguments,
        )
        multiply(machine, up, first)
        middle = self._middle(hidden, rows, top_k, inputs)
        second = GroupedProductArgs(
            map=self.maps[1],
            bias=pointer(self.down_bias),
            bias_float=is_float(self.down_bias),
            x=pointer(middle.packed),
            starts=starts,
            counts=counts,
            order=order,
            out=pointer(parts),
            out_stride=self.hidden,
            experts=self.experts,
            m_tiles=self.hidden // TILE,
            chunks=half // CHUNK,
            x_slots=slots,
            n_cap=up.columns,
            x_scale=pointer(middle.scales),
            out_bf16=1 - is_float(parts),
            **self.scalings[1].arguments,
        )
        multiply(machine, down, second)
        return PendingGroupedExperts(machine, common, x, (ids, weights, x))
