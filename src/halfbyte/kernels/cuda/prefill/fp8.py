"""Grouped products with fp8 activations on SM90, and their phases: twice the tensor cores' rate, half the bytes of x.

Weights stay MXFP4 in tile16 and are widened to E5M2 relative to the largest scale of their row, exactly (see
fp8.cuh); activations are E4M3 with one float32 scale a row, as `ops.linear` defines fp8. The middle of the MLP passes
through bf16 on its way to E4M3, and each expert's result is bf16. Where the scales of a row span more than 16 octaves,
E5M2 would lose bits: the phases then multiply that matrix, or that layer's experts, with bf16 activations, and say so.

They serve prefill: --activation prefill=fp8 takes them beside the decode step and the batch kernels, which read the
same weights with bf16 activations. With --activation fp8 all regimes go to Triton.
"""

from __future__ import annotations

import dataclasses
import logging

import torch
from torch import Tensor

from halfbyte.errors import PlanError
from halfbyte.formats import e8m0, tile16
from halfbyte.formats.tile16 import CHUNK_BYTES
from halfbyte.gates import Gates
from halfbyte.kernels.cuda.device.host import pointer
from halfbyte.kernels.cuda.prefill.builds import (
    FP8_TILE,
    PACKED,
    PAD,
    TILE,
    TILES,
    GroupedRowsArgs,
    GroupedShape,
    rows_build,
)
from halfbyte.kernels.cuda.prefill.experts import GroupedExperts
from halfbyte.kernels.cuda.prefill.phases import (
    GroupedHead,
    GroupedMoe,
    GroupedOut,
    GroupedPhase,
    GroupedQkv,
    layer_name,
)
from halfbyte.kernels.cuda.prefill.products import Dense, GroupedProducts, ProductInputs, Scaling, columns_cap
from halfbyte.kernels.launch import Build
from halfbyte.plan.phase import Arch, Binding, Phase, Spec

log = logging.getLogger("halfbyte")

SPREAD = 16  # octaves between the scales of a row that E5M2 can hold
TILES_AT_ONCE = 4096  # of 16 rows, whose zeros are looked for: some 100 MB
WIDENING = 112  # columns whose product takes as long as widening the weights for it


def widest_row(data: Tensor) -> int:
    """The most octaves between two scales of one row of MXFP4 weights in tile16.

    Groups of zeros, which mean the same with any scale, do not count. Where one is far from the others of its row, it
    is stored with the row's largest scale: far below that, its own would widen to no number, nor would zero times that.
    Weights keep their values to the bit, for every kernel that reads them."""
    chunks = data.shape[-2]
    tiles = data.view(-1, chunks, CHUNK_BYTES["mxfp4"])
    scales = tile16.scales_of(tiles)  # [tile, chunk, g, group, r]: rows g + 8 r
    spread = scales.amax((1, 3)) - scales.amin((1, 3))
    far = (spread > SPREAD).flatten(1).any(1).nonzero()[:, 0]  # few or none: a dead head, an idle expert
    for places in torch.split(far, TILES_AT_ONCE):
        some = scales[places]
        zeros = tile16.groups_of_zeros(tiles[places]) & (some != e8m0.NAN)
        most = some.masked_fill(zeros, 0).amax((1, 3), keepdim=True)
        scales[places] = some = torch.where(zeros, most, some)
        spread[places] = some.amax((1, 3)) - some.amin((1, 3))
    return int(spread.max()) if data.numel() else 0


def row_max_scale(data: Tensor) -> Tensor:
    """The largest scale of every row, uint8 [..., rows], of MXFP4 weights in tile16."""
    *lead, tiles, chunks, size = data.shape
    if data.device.type == "meta":
        return torch.empty((*lead, tiles * 16), dtype=torch.uint8, device="meta")
    high = tile16.scales_of(data.view(-1, chunks, size)).amax((1, 3))  # [tile, g, r]
    return high.transpose(1, 2).reshape(*lead, tiles * 16).contiguous()


def padded(k: int) -> int:
    """Bytes of a row of k values: whole lines of 128."""
    return -(-k // 128) * 128


class Fp8Products(GroupedProducts):
    tiles: tuple[str, ...] = (FP8_TILE,)

    def find_scaling(self, data: Tensor, form: str, role: str) -> Scaling:
        if form != "mxfp4":
            raise PlanError(f"fp8 products are for MXFP4 weights, and {role} is {form}; use --activation bf16.")
        if data.device.type != "meta" and (widest := widest_row(data)) > SPREAD:
            raise PlanError(
                f"{role} has a row whose MXFP4 scales span {widest} octaves, and fp8 products hold {SPREAD}; "
                "use --activation bf16."
            )
        return Scaling(row_max_scale=row_max_scale(data))


class Fp8Dense(Fp8Products, Dense):
    """y = W x + bias, or residual + that, with x in E4M3."""

    def inputs(self, rows: int) -> ProductInputs:
        get = self.workspace.growing
        packed = get(f"grouped.fp8.{self.k}", rows, lambda r: (r + 2 * PAD) * padded(self.k), torch.uint8)
        scales = get("grouped.fp8.scales", rows, lambda r: r + 2 * PAD, torch.float32)
        return ProductInputs(packed, rows + 2 * PAD, PACKED["e4m3"], scales)

    def _product(self, rows: int) -> tuple[GroupedShape, int]:
        cap = columns_cap(rows, self.n // TILE, self.workspace.machine.blocks, TILES[FP8_TILE], WIDENING)
        return self.product(self.format, FP8_TILE, False), cap


class Fp8Experts(Fp8Products, GroupedExperts):
    """x + the weighted sum of the chosen experts' MLPs of h, with h and the middle in E4M3."""

    entries = (*GroupedExperts.entries, "requantize")
    pad, prefix = 2 * PAD, "fp8."
    results = torch.bfloat16

    def _inputs(self, rows: int, top_k: int) -> ProductInputs:
        get = self.workspace.growing
        packed = get("grouped.fp8.slots", rows, lambda r: self._slots(r, top_k) * padded(self.hidden), torch.uint8)
        scales = get("grouped.fp8.slot_scales", rows, lambda r: self._slots(r, top_k), torch.float32)
        return ProductInputs(packed, self._slots(rows, top_k), PACKED["e4m3"], scales)

    def _middle(self, hidden: Tensor, rows: int, top_k: int, x: ProductInputs) -> ProductInputs:
        half = self.inner // 2
        packed = self.workspace.growing(
            "grouped.fp8.middle", rows, lambda r: self._slots(r, top_k) * padded(half), torch.uint8
        )
        args = GroupedRowsArgs(
            hidden=pointer(hidden), packed=pointer(packed), scales=pointer(x.scales), width=half, slots=x.slots
        )
        self.workspace.machine.run(rows_build("requantize"), -(-x.slots // 8), args)
        return x._replace(packed=packed)

    def _tile(self, rows_each: float) -> str:
        return FP8_TILE


# ---- phases ---------------------------------------------------------------------------------------------------------


class Fp8Weights(GroupedPhase):
    """Matrices as fp8 products hold them; for the others `plain`, the phase with bf16 activations, lends its own."""

    kinds = ("mxfp4",)
    regimes = frozenset({"prefill"})
    dense, experts = Fp8Dense, Fp8Experts
    row_octaves = SPREAD
    plain: GroupedPhase

    def builds(self, spec: Spec, arch: Arch) -> list[Build]:
        both = (*super().builds(spec, arch), *self.plain.builds(spec, arch))
        return list({build.program: build for build in both}.values())

    def bind_dense(self, b: Binding, role: str) -> Dense:
        return self.dense_with(self.dense if self._holds(b, role) else self.plain.dense, b, role)

    def bind_experts(self, b: Binding) -> GroupedExperts:
        return self.experts_with(self.experts if self._holds(b, "gate_up", "down") else self.plain.experts, b)

    def _holds(self, b: Binding, *roles: str) -> bool:
        spans = {role: widest_row(getattr(b.weights, role).data) for role in roles}
        for role, widest in spans.items():
            if widest > SPREAD:
                log.warning(
                    "%s%s has a row whose MXFP4 scales span %d octaves, and fp8 products hold %d: %s multiplied with "
                    "bf16 activations.",
                    layer_name(b),
                    role,
                    widest,
                    SPREAD,
                    "this layer's experts are" if len(roles) > 1 else "it is",
                )
        return max(spans.values()) <= SPREAD


class Fp8Phase(Fp8Weights):
    """What the bf16 phases ask, for fp8 activations and MXFP4 weights."""

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        if spec.activation != "fp8":
            return f"multiplies fp8 activations, not {spec.activation}"
        return super().refuse(dataclasses.replace(spec, activation="bf16"), arch, gates)


class Fp8Moe(Fp8Phase, GroupedMoe):
    name, plain = "cuda.grouped_fp8_moe", GroupedMoe()


class Fp8Qkv(Fp8Phase, GroupedQkv):
    name, plain = "cuda.grouped_fp8_norm_qkv", GroupedQkv()


class Fp8Out(Fp8Phase, GroupedOut):
    name, plain = "cuda.grouped_fp8_o", GroupedOut()


class Fp8Head(Fp8Phase, GroupedHead):
    name, plain = "cuda.grouped_fp8_norm_lm_head", GroupedHead()


PHASES: tuple[Phase, ...] = (Fp8Qkv(), Fp8Out(), Fp8Moe(), Fp8Head())
