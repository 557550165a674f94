"""MXTensor: a block-scaled tensor as data + scales + logical shape + format + layout tag.

The format says what the numbers are; the layout says where the bytes lie. Only `layouts.py` changes the layout, and
nothing changes the format after quantisation. An operation that is handed the wrong format raises FormatError; it
never converts in silence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

FormatName = Literal["mxfp4", "mxfp8", "nvfp4", "q8"]


@dataclass(frozen=True)
class MXTensor:
    """`shape` is the logical shape; the last dimension is K, the one that is grouped.

    In the layout "plain": `data` is uint8 [..., K/2] for 4-bit formats (low nibble first) or one byte per element,
    and `scales` is [..., K/group] (uint8 UE8M0 for mxfp4 and mxfp8, uint8 E4M3 bits for nvfp4, float16 for q8).
    `tensor_scale` (float32 scalar) is nvfp4's alone.
    """

    data: torch.Tensor
    scales: torch.Tensor
    shape: tuple[int, ...]
    format: FormatName
    layout: str = "plain"
    tensor_scale: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        extra = self.tensor_scale.nbytes if self.tensor_scale is not None else 0
        return self.data.nbytes + self.scales.nbytes + extra

    @property
    def device(self) -> torch.device:
        return self.data.device

    def to(self, device: torch.device | str) -> MXTensor:
        return replace(
            self,
            data=self.data.to(device),
            scales=self.scales.to(device),
            tensor_scale=self.tensor_scale.to(device) if self.tensor_scale is not None else None,
        )
