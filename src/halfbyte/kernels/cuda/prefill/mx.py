"""Grouped products with block-scaled activations on SM120 and SM121: MXFP8 (W4A8) or MXFP4 (W4A4), and their phases.

Weights stay MXFP4 in tile16 and are multiplied natively (`mma.sync ... kind::mxf8f6f4` or `kind::mxf4`, with both
scales), at four or eight times the rate of bf16. Activations are quantised as `formats.mxfp8` and `formats.mxfp4`
define it; the middle of the MLP passes through bf16 on its way there. Only `--activation` asks for them. Emulated,
compiled and proved; run on no SM12x machine yet. Refuses other weights and other machines.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from halfbyte.errors import PlanError
from halfbyte.gates import Gates
from halfbyte.kernels.cuda.device.host import Workspace, pointer
from halfbyte.kernels.cuda.prefill.builds import PAD, ROW_THREADS, GroupedRowsArgs, rows_build
from halfbyte.kernels.cuda.prefill.phases import GroupedHead, GroupedMoe, GroupedOut, GroupedQkv
from halfbyte.kernels.cuda.prefill.products import ProductInputs, Scaling
from halfbyte.kernels.cuda.prefill.sync import COLUMNS, SyncDense, SyncExperts, SyncPhase, SyncProducts
from halfbyte.plan.phase import Arch, Phase, Spec

KINDS = {"mxfp8": 3, "mxfp4": 4}  # of RowsArgs
BYTES = {"mxfp8": 128, "mxfp4": 64}  # of 128 values


def padded(slots: int) -> int:
    """Slots rounded up so that a row of scales is a multiple of sixteen bytes."""
    return -(-slots // 8) * 8


class MxProducts(SyncProducts):
    """Products of MXFP4 weights with activations in MXFP8 or MXFP4."""

    workspace: Workspace
    format: str

    def find_scaling(self, data: Tensor, form: str, role: str) -> Scaling:
        return Scaling()  # scales go into the product as they are, and any of them does

    def packed(self, name: str, k: int, rows: int, slots: Callable[[int], int]) -> ProductInputs:
        """Buffers for k values in each of slots(rows) slots, and for their scales."""
        if self.format != "mxfp4":
            raise PlanError(f"block-scaled products are for MXFP4 weights, not {self.format}; use --activation bf16.")
        line_bytes, n, get = BYTES[self.mx], -(-k // 128), self.workspace.growing
        packed = get(f"grouped.{self.mx}.{name}", rows, lambda r: slots(r) * n * line_bytes, torch.uint8)
        scales = get(f"grouped.{self.mx}.{name}.scales", rows, lambda r: slots(r) * n, torch.int32)
        return ProductInputs(packed, slots(rows), KINDS[self.mx], scales)


class MxDense(MxProducts, SyncDense):
    """y = W x + bias, or residual + that, with x in MXFP8 or MXFP4."""

    def inputs(self, rows: int) -> ProductInputs:
        return self.packed(str(self.k), self.k, rows, lambda r: padded(r + PAD))


class MxExperts(MxProducts, SyncExperts):
    """x + the weighted sum of the chosen experts' MLPs of h, with h and the middle in MXFP8 or MXFP4."""

    entries = (*SyncExperts.entries, "mx_requantize")

    def _slots(self, rows: int, top_k: int) -> int:
        return padded(super()._slots(rows, top_k))

    def _inputs(self, rows: int, top_k: int) -> ProductInputs:
        return self.packed("slots", self.hidden, rows, lambda r: self._slots(r, top_k))

    def _middle(self, hidden: Tensor, rows: int, top_k: int, x: ProductInputs) -> ProductInputs:
        middle = self.packed("middle", self.inner // 2, rows, lambda r: self._slots(r, top_k))
        args = GroupedRowsArgs(
            hidden=pointer(hidden),
            packed=pointer(middle.packed),
            scales=pointer(middle.scales),
            width=self.inner // 2,
            slots=x.slots,
            kind=middle.kind,
        )
        self.workspace.machine.run(rows_build("mx_requantize"), -(-x.slots // (ROW_THREADS // 32)), args)
        return middle


class Mxfp8Dense(MxDense):
    mx = "mxfp8"


class Mxfp4Dense(MxDense):
    mx = "mxfp4"


class Mxfp8Experts(MxExperts):
    mx = "mxfp8"


class Mxfp4Experts(MxExperts):
    mx = "mxfp4"


# ---- phases ---------------------------------------------------------------------------------------------------------


class MxPhase(SyncPhase):
    """What the bf16 phases ask, for block-scaled activations and MXFP4 weights."""

    kinds = ("mxfp4",)
    activation = ""
    families, instruction = ("sm12x",), "block-scaled mma.sync"

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        if spec.activation != self.activation:
            return f"multiplies {self.activation} activations, not {spec.activation}"
        return super().refuse(dataclasses.replace(spec, activation="bf16"), arch, gates)


class Mxfp8Phase(MxPhase):
    activation, dense, experts = "mxfp8", Mxfp8Dense, Mxfp8Experts


class Mxfp4Phase(MxPhase):
    activation, dense, experts = "mxfp4", Mxfp4Dense, Mxfp4Experts


class Mxfp8Moe(Mxfp8Phase, GroupedMoe):
    name, tiles = "cuda.grouped_mxfp8_moe", ("auto", *COLUMNS)


class Mxfp8Qkv(Mxfp8Phase, GroupedQkv):
    name = "cuda.grouped_mxfp8_norm_qkv"


class Mxfp8Out(Mxfp8Phase, GroupedOut):
    name = "cuda.grouped_mxfp8_o"


class Mxfp8Head(Mxfp8Phase, GroupedHead):
    name = "cuda.grouped_mxfp8_norm_lm_head"


class Mxfp4Moe(Mxfp4Phase, GroupedMoe):
    name, tiles = "cuda.grouped_mxfp4_moe", ("auto", *COLUMNS)


class Mxfp4Qkv(Mxfp4Phase, GroupedQkv):
    name = "cuda.grouped_mxfp4_norm_qkv"


class Mxfp4Out(Mxfp4Phase, GroupedOut):
    name = "cuda.grouped_mxfp4_o"


class Mxfp4Head(Mxfp4Phase, GroupedHead):
    name = "cuda.grouped_mxfp4_norm_lm_head"


PHASES: tuple[Phase, ...] = (
    Mxfp8Qkv(),
    Mxfp8Out(),
    Mxfp8Moe(),
    Mxfp8Head(),
    Mxfp4Qkv(),
    Mxfp4Out(),
    Mxfp4Moe(),
    Mxfp4Head(),
)
