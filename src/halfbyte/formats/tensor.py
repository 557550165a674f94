"""MXTensor: a block-scaled tensor as data + scales + logical shape + format + layout tag.

The format says what the numbers are; the layout says where the bytes lie. Only `layouts.py` changes the layout, and
nothing changes the format after quantisation. An operation that is handed the wrong format raises FormatError; it
never converts in silence.

A plain tensor is checked against its format when it is made, so relabelling one format as another is an error
immediately. The geometry of every other layout is checked by `layouts.py` when it is unpacked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import torch

from halfbyte.errors import FormatError

FormatName = Literal["mxfp4", "mxfp8", "q8"]


class Geometry(NamedTuple):
    """The shape of one group of a format in the layout "plain"."""

    group: int
    element_bits: int
    data_dtype: torch.dtype
    scale_dtype: torch.dtype

    @property
    def group_bytes(self) -> int:
        """Bytes of one group's elements, without its scale."""
        return self.group * self.element_bits // 8

    def padded(self, k: int) -> int:
        """K rounded up to whole groups."""
        return -(-k // self.group) * self.group


GEOMETRY: dict[str, Geometry] = {
    "mxfp4": Geometry(32, 4, torch.uint8, torch.uint8),
    "mxfp8": Geometry(32, 8, torch.uint8, torch.uint8),
    "q8": Geometry(32, 8, torch.int8, torch.float16),
}
assert set(GEOMETRY) == set(get_args(FormatName))


@dataclass(frozen=True)
class MXTensor:
    """`shape` is the logical shape; the last dimension is K, the one that is grouped.

    In the layout "plain": `data` is uint8 [..., K/2] for 4-bit formats (low nibble first) or one byte per element
    (uint8 E4M3 bits for mxfp8, int8 for q8), and `scales` is [..., K/group] (uint8 UE8M0 for mxfp4 and mxfp8,
    float16 for q8). Where K is not a multiple of the group both are as long as K rounded up to whole groups, and the
    extra elements are zero.
    """

    data: torch.Tensor
    scales: torch.Tensor
    shape: tuple[int, ...]
    format: FormatName
    layout: str = "plain"

    def __post_init__(self) -> None:
        if self.format not in GEOMETRY:
            raise FormatError(f"unknown number format {self.format!r}: use one of {', '.join(GEOMETRY)}")
        if not self.shape:
            raise FormatError(f"a {self.format} tensor needs at least one dimension to group along")
        if self.layout == "plain":
            self._check_plain()

    def _check_plain(self) -> None:
        geometry = GEOMETRY[self.format]
        *lead, k = self.shape
        padded = geometry.padded(k)
        data_shape = (*lead, padded * geometry.element_bits // 8)
        scale_shape = (*lead, padded // geometry.group)
        for part, tensor, shape, dtype in (
            ("data", self.data, data_shape, geometry.data_dtype),
            ("scales", self.scales, scale_shape, geometry.scale_dtype),
        ):
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise FormatError(
                    f"the {part} of a plain {self.format} tensor of shape {tuple(self.shape)} must be {dtype} of shape "
                    f"{shape}, not {tensor.dtype} of shape {tuple(tensor.shape)}"
                )

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def group(self) -> int:
        return GEOMETRY[self.format].group

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MXTensor:
        return replace(
            self,
            data=self.data.to(device, non_blocking=non_blocking),
            scales=self.scales.to(device, non_blocking=non_blocking),
        )

    def select(self, index: int) -> MXTensor:
        """One entry of the first dimension (one expert of a stack), as a view, in any layout."""
        if len(self.shape) < 3:
            raise FormatError(f"select needs a stack of matrices, not a tensor of shape {tuple(self.shape)}")
        return replace(
            self,
            data=self.data[index],
            scales=self.scales[index] if self.scales.ndim > 1 else self.scales,
            shape=self.shape[1:],
        )
