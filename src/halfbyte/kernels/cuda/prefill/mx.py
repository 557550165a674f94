"""Grouped products with block-scaled activations on SM120 and SM121: MXFP8 (W4A8) or MXFP4 (W4A4), and their phases.

Weights stay MXFP4 in tile16 and are multiplied natively (`mma.sync ... kind::mxf8f6f4` or `kind::mxf4`, with both
scales), at four or eight times the rate of bf16. Activations are quantised as `formats.mxfp8` and `formats.mxfp4`
define it; the middle of the MLP passes through bf16 on its way there. Only `--activation` asks for them. Emulated,
compiled and proved; run on no SM12x machine yet. Refuses other weights and other machines.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from halfbyte.errors import PlanError
from halfbyte.gates import Gates
from halfbyte.kernels.cuda.prefill.builds import PAD, ROW_THREADS, RowsArgs
from halfbyte.kernels.cuda.prefill.phases import GroupedHead, GroupedMoe, GroupedOut, GroupedQkv
from halfbyte.kernels.cuda.prefill.products import Inputs, _ptr
from halfbyte.kernels.cuda.prefill.sync import COLUMNS, SyncDense, SyncExperts, _Sync
from halfbyte.plan.phase import Arch, Phase, Spec

KINDS = {"mxfp8": 3, "mxfp4": 4}  # of RowsArgs
BYTES = {"mxfp8": 128, "mxfp4": 64}  # of 128 values


def parts(k: int) -> int:
    return -(-k // 128)


def whole(slots: int) -> int:
    """So many that a row of scales is a multiple of sixteen bytes."""
    return -(-slots // 8) * 8


class MxDense(SyncDense):
    """y = W x + bias, or residual + that, with x in MXFP8 or MXFP4."""

    def inputs(self, rows: int) -> Inputs:
        if self.format != "mxfp4":
            raise PlanError(f"block-scaled products are for MXFP4 weights, not {self.format}; use --activation bf16.")
        n = parts(self.k)
        packed = self.room.get(
            f"{self.mx}.{self.k}", rows, lambda r: whole(r + PAD) * n * BYTES[self.mx], torch.uint8
        )  # fmt: skip
        scales = self.room.get(f"{self.mx}.scales.{n}", rows, lambda r: whole(r + PAD) * n, torch.int32)
        return Inputs(packed, whole(rows + PAD), KINDS[self.mx], scales)


class MxExperts(SyncExperts):
    """x + the weighted sum of the chosen experts' MLPs of h, with h and the middle in MXFP8 or MXFP4."""

    def _slots(self, rows: int, top_k: int) -> int:
        return whole(super()._slots(rows, top_k))

    def _packed(self, name: str, k: int, rows: int, top_k: int) -> Inputs:
        if self.format != "mxfp4":
            raise PlanError(f"block-scaled products are for MXFP4 weights, not {self.format}; use --activation bf16.")
        each, n = BYTES[self.mx], parts(k)
        packed = self.room.get(f"{self.mx}.{name}", rows, lambda r: self._slots(r, top_k) * n * each, torch.uint8)
        scales = self.room.get(f"{self.mx}.{name}.scales", rows, lambda r: self._slots(r, top_k) * n, torch.int32)
        return Inputs(packed, self._slots(rows, top_k), KINDS[self.mx], scales)

    def _inputs(self, rows: int, top_k: int) -> Inputs:
        return self._packed("slots", self.hidden, rows, top_k)

    def _middle(self, hidden: Tensor, rows: int, top_k: int, x: Inputs) -> Inputs:
        made = self._packed("middle", self.inner // 2, rows, top_k)
        args = RowsArgs(
            hidden=_ptr(hidden), packed=_ptr(made.packed), scales=_ptr(made.scales), width=self.inner // 2,
            slots=x.slots, kind=made.kind,
        )  # fmt: skip
        self.room.machine.rows("mx_requantize", -(-x.slots // (ROW_THREADS // 32)), args)
        return made


class Mxfp8Dense(MxDense):
    mx = "mxfp8"


class Mxfp4Dense(MxDense):
    mx = "mxfp4"


class Mxfp8Experts(MxExperts):
    mx = "mxfp8"


class Mxfp4Experts(MxExperts):
    mx = "mxfp4"


# ---- phases ---------------------------------------------------------------------------------------------------------


class _Mx(_Sync):
    """What the bf16 phases ask, for block-scaled activations and MXFP4 weights."""

    kinds = ("mxfp4",)
    activation = ""
    instruction = "block-scaled mma.sync"

    def refuse(self, spec: Spec, arch: Arch, gates: Gates) -> str | None:
        if spec.activation != self.activation:
            return f"multiplies {self.activation} activations, not {spec.activation}"
        return super().refuse(dataclasses.replace(spec, activation="bf16"), arch, gates)


class _Mxfp8(_Mx):
    activation, dense, experts = "mxfp8", Mxfp8Dense, Mxfp8Experts


class _Mxfp4(_Mx):
    activation, dense, experts = "mxfp4", Mxfp4Dense, Mxfp4Experts


class Mxfp8Moe(_Mxfp8, GroupedMoe):
    name, tiles = "cuda.grouped_mxfp8_moe", ("auto", *COLUMNS)


class Mxfp8Qkv(_Mxfp8, GroupedQkv):
    name = "cuda.grouped_mxfp8_norm_qkv"


class Mxfp8Out(_Mxfp8, GroupedOut):
    name = "cuda.grouped_mxfp8_o"


class Mxfp8Head(_Mxfp8, GroupedHead):
    name = "cuda.grouped_mxfp8_norm_lm_head"


class Mxfp4Moe(_Mxfp4, GroupedMoe):
    name, tiles = "cuda.grouped_mxfp4_moe", ("auto", *COLUMNS)


class Mxfp4Qkv(_Mxfp4, GroupedQkv):
    name = "cuda.grouped_mxfp4_norm_qkv"


class Mxfp4Out(_Mxfp4, GroupedOut):
    name = "cuda.grouped_mxfp4_o"


class Mxfp4Head(_Mxfp4, GroupedHead):
    name = "cuda.grouped_mxfp4_norm_lm_head"


PHASES: tuple[Phase, ...] = (
    Mxfp8Qkv(), Mxfp8Out(), Mxfp8Moe(), Mxfp8Head(), Mxfp4Qkv(), Mxfp4Out(), Mxfp4Moe(), Mxfp4Head(),
)  # fmt: skip
