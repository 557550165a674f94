"""Where the rows of a matrix lie in open files, for packers that lay it out while they read it.

The readers of headers, which make a `Stored`, check its offsets and sizes; nothing here reads, and nothing here
keeps a file open.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from halfbyte.formats.dense import DenseTiles
from halfbyte.formats.tensor import MXTensor


@dataclass(frozen=True)
class StoredRows:
    """Rows that lie one after the other: row i of them is the matrix's row `first` + i * `step`. In a stack those of
    the next matrix follow at once. Scales lie apart (in `scale_file`), but in GGUF's blocks."""

    file: int  # descriptor
    offset: int
    rows: int
    first: int = 0
    step: int = 1
    scale_file: int = -1
    scale_offset: int = 0


@dataclass(frozen=True)
class Stored:
    """A matrix or a stack of them: every row is in one of the parts."""

    format: str  # mxfp4, q8, bf16, f16, f32
    shape: tuple[int, ...]
    parts: tuple[StoredRows, ...]
    gguf: bool = False  # in GGUF's blocks of scale and codes


class Packer(NamedTuple):
    """Ways from files into place, without a copy in between. Each also says whether the weights are sound:
    every number and scale is finite, and no part is all zeros. An OSError says that a file cannot be read, an EOFError
    that it ends early."""

    layout: str  # that `pack` makes
    pack: Callable[[Stored], tuple[MXTensor | DenseTiles, bool]]
    widen: Callable[[Stored], tuple[Tensor, bool]]  # GGUF's blocks as float32, row by row
    look: Callable[[Stored], bool]  # keeps nothing
