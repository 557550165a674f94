"""DenseTiles: a matrix of numbers (or a stack of them) in a kernel's layout, as MXTensor is for those with scales.

The layouts are those of `layouts.py` that also hold numbers without scales. Lossless: `plain` gives back every bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.errors import FormatError
from halfbyte.formats import rows16, tile16


class DenseLayout(NamedTuple):
    dtypes: tuple[torch.dtype, ...]
    pack: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor, tuple[int, ...], torch.dtype], Tensor]


DENSE_LAYOUTS: dict[str, DenseLayout] = {
    "tile16": DenseLayout(
        (torch.bfloat16,), tile16.pack_dense, lambda data, shape, _: tile16.unpack_dense(data, *shape[-2:])
    ),
    "rows16": DenseLayout(rows16.DENSE, rows16.pack_dense, rows16.unpack_dense),
}


@dataclass(frozen=True)
class DenseTiles:
    data: Tensor  # uint8, as the layout's `pack` makes it
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str

    @classmethod
    def of(cls, w: Tensor, layout: str) -> DenseTiles:
        """`w` in that layout, which must be able to hold it (`holds`)."""
        if not cls.holds(w, layout):
            raise FormatError(f"no layout {layout!r} holds {w.dtype} of shape {tuple(w.shape)} without scales")
        return cls(DENSE_LAYOUTS[layout].pack(w), tuple(w.shape), w.dtype, layout)

    @staticmethod
    def holds(w: Tensor, layout: str) -> bool:
        return layout in DENSE_LAYOUTS and w.dtype in DENSE_LAYOUTS[layout].dtypes and w.ndim >= 2

    def plain(self) -> Tensor:
        return DENSE_LAYOUTS[self.layout].unpack(self.data, self.shape, self.dtype)

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        return self.data.nbytes
