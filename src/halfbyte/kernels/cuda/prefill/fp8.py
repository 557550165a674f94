"""Grouped products with fp8 activations on SM90, and their phases: twice the tensor cores' rate, half the bytes of x.

Weights stay MXFP4 in tile16 and are widened to E5M2 relative to the largest scale of their row, exactly (see
grouped_fp8.cuh); activations are E4M3 with one float32 scale a row, as `ops.linear` defines fp8. The middle of the MLP
passes through bf16 on its way to E4M3, and each expert's result is bf16. Refuses rows whose scales span more than 16
octaves: E5M2 would lose bits. Groups of zeros do not count: they are given a scale near the others of their row.

They serve prefill: --activation prefill=fp8 takes them beside the decode step and the batch kernels, which read the
same weights with bf16 activations. With --activation fp8 all regimes go to Triton.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from halfbyte.errors import PlanError
from halfbyte.formats import tile16
from halfbyte.formats.tile16 import CHUNK_BYTES
from halfbyte.gates import Gates
from halfbyte.kernels.cuda.device.host import pointer
from halfbyte.kernels.cuda.prefill.builds import (
    FP8_TILE,
    PACKED,
    PAD,
    TILE,
    TILES,
    GroupedShape,
    RowsArgs,
    rows_build,
)
from halfbyte.kernels.cuda.prefill.experts import Experts
from halfbyte.kernels.cuda.prefill.phases import GroupedHead, GroupedMoe, GroupedOut, GroupedPhase, GroupedQkv
from halfbyte.kernels.cuda.prefill.products import Dense, GroupedProducts, Inputs, columns_cap
from halfbyte.plan.phase import Arch, Phase, Spec

SPREAD = 16  # octaves between the scales of a row that E5M2 can hold
TILES_AT_ONCE = 4096  # of 16 rows, whose zeros are looked for: some 100 MB
WIDENING = 112  # columns whose product takes as long as widening the weights for it


def row_max_scale(data: Tensor, form: str, role: str) -> Tensor:
    """The largest scale of every row, uint8 [..., rows], of MXFP4 weights in tile16."""
    if form != "mxfp4":
        raise PlanError(f"fp8 products are for MXFP4 weights, and {role} is {form}; use --activation bf16.")
    *lead, tiles, chunks, _ = data.shape
    if data.device.type == "meta":
        return torch.empty((*lead, tiles * 16), dtype=torch.uint8, device="meta")
    scales = tile16.scales_of(data.view(-1, chunks, CHUNK_BYTES["mxfp4"]))  # [tile, chunk, g, group, r]: rows g + 8 r
    spread = scales.amax((1, 3)) - scales.amin((1, 3))
    far = (spread > SPREAD).flatten(1).any(1).nonzero()[:, 0]  # few or none: a dead head, an idle expert
    for places in torch.split(far, TILES_AT_ONCE):
        scales[places] = _without_zeros(data.view(-1, chunks, CHUNK_BYTES["mxfp4"])[places])
    high, low = scales.amax((1, 3)), scales.amin((1, 3))  # [tile, g, r]
    widest = int((high - low).max()) if data.numel() else 0
    if widest > SPREAD:
        raise PlanError(
            f"{role} has a row whose MXFP4 scales span {widest} octaves, and fp8 products hold {SPREAD}; "
            "use --activation bf16."
        )
    return high.transpose(1, 2).reshape(*lead, tiles * 16).contiguous()


def _without_zeros(data: Tensor) -> Tensor:
    """Scales of some tiles: a group of zeros, which means the same with any scale, gets its row's largest.

    It is stored that way, too: far below the row's largest its scale would widen to no number, and zero times that is
    none. Weights keep their values to the bit, for every kernel that reads them."""
    scales, zeros = tile16.scales_of(data), tile16.groups_of_zeros(data)
    most = scales.masked_fill(zeros, 0).amax((1, 3), keepdim=True)
    return torch.where(zeros, most, scales)


def padded(k: int) -> int:
    """Bytes of a row of k values: whole lines of 128."""
    return -(-k // 128) * 128


class Fp8Products(GroupedProducts):
    tiles: tuple[str, ...] = (FP8_TILE,)

    def find_row_max_scale(self, data: Tensor, form: str, role: str) -> Tensor:
        return row_max_scale(data, form, role)


class Fp8Dense(Fp8Products, Dense):
    """y = W x + bias, or residual + that, with x in E4M3."""

    def inputs(self, rows: int) -> Inputs:
        get = self.workspace.growing
        packed = get(f"grouped.fp8.{self.k}", rows, lambda r: (r + 2 * PAD) * padded(self.k), torch.uint8)
        scales = get("grouped.fp8.scales", rows, lambda r: r + 2 * PAD, torch.float32)
        return Inputs(packed, rows + 2 * PAD, PACKED["e4m3"], scales)

    def _product(self, rows: int) -> tuple[GroupedShape, int]:
        cap = columns_cap(rows, self.n // TILE, self.workspace.machine.blocks, TILES[FP8_TILE], WIDENING)
        return self.product(self.format, FP8_TILE, False), cap


class Fp8Experts(Fp8Products, Experts):
    """x + the weighted sum of the chosen experts' MLPs of h, with h and the middle in E4M3."""

    entries = (*Experts.entries, "requantize")
    pad, prefix = 2 * PAD, "fp8."
    results = torch.bfloat16

    def _inputs(self, rows: int, top_k: int) -> Inputs:
        get = self.workspace.growing
        packed = get("grouped.fp8.slots", rows, lambda r: self._slots(r, top_k) * padded(self.hidden), torch.uint8)
        scales = get("grouped.fp8.slot_scales", rows, lambda r: self._slots(r, top_k), torch.float32)
        return Inputs(packed, self._slots(rows, top_k), PACKED["e4m3"], scales)

    def _middle(self, hidden: Tensor, rows: int, top_k: int, x: Inputs) -> Inputs:
        half = self.inner // 2
        packed = self.workspace.growing(
            "grouped.fp8.middle", rows, lambda r: self._slots(r, top_k) * padded(half), torch.uint8
        )
        args = RowsArgs(
            hidden=pointer(hidden), packed=pointer(packed), scales=pointer(x.scales), width=half, slots=x.slots
        )
        self.workspace.machine.run(rows_build("requantize"), -(-x.slots // 8), args)
        return x._replace(packed=packed)

    def _tile(self, rows_each: float) -> str:
        return FP8_TILE


# ---- phases ---------------------------------------------------------------------------------------------------------


class Fp8Phase(GroupedPhase):
    """What the bf16 phases ask, for fp8 activations and MXFP4 weights."""

    kinds = ("mxfp4",)
    regimes = frozenset({"prefill"})
    dense, experts = Fp8Dense, Fp8Experts

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        if spec.activation != "fp8":
            return f"multiplies fp8 activations, not {spec.activation}"
        return super().refuse(dataclasses.replace(spec, activation="bf16"), arch, gates)


class Fp8Moe(Fp8Phase, GroupedMoe):
    name = "cuda.grouped_fp8_moe"


class Fp8Qkv(Fp8Phase, GroupedQkv):
    name = "cuda.grouped_fp8_norm_qkv"


class Fp8Out(Fp8Phase, GroupedOut):
    name = "cuda.grouped_fp8_o"


class Fp8Head(Fp8Phase, GroupedHead):
    name = "cuda.grouped_fp8_norm_lm_head"


PHASES: tuple[Phase, ...] = (Fp8Qkv(), Fp8Out(), Fp8Moe(), Fp8Head())
