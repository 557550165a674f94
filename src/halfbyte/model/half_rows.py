"""Products of float16 with q8 matrices, as the kernels of prompts compute them: brought into float16's range at load.

Those kernels hold rows and weights in float16, which ends at 65,504; rows lose bits below 2^-14. In front of qkv and
lm_head a row is a norm's output, at most sqrt(hidden) times the norm's weight; in front of o it is an average of
values. Where rows or weights would leave that range, a power of two moves: between a norm and the scales of the q8
groups behind it, for each group of 32 columns, or between a kv head's values and its columns of o. The function stays
the same to the bit, and kernels stay as they are. A scale that could not hold its factor exactly gets a nearer one.
Weights of a usual size, which is every sane file, are handed out untouched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from halfbyte.formats.q8 import GROUP
from halfbyte.formats.tensor import MXTensor
from halfbyte.model.head_scales import (
    TARGET,
    HeadScaledSource,
    HeadShifts,
    exact_shift,
    head_columns,
    moved,
    octaves_to,
    with_exponents,
)
from halfbyte.model.weights import NORM_OF, Matrix, Source

HALF_ROW_ROLES = ("attn_norm", "qkv", "qkv_bias", "o", "final_norm", "lm_head")
MATRIX_OF = {norm: matrix for matrix, norm in NORM_OF.items()}
LARGEST_CODE = 128.0  # of an int8; our own quantisers end at 127
# A norm's weight, and the rms of a head's largest row of values: times sqrt(hidden), which is at most 68, the largest
# is still a float16; the smallest has 15 bits above float16's last.
LARGEST, SMALLEST = 2.0**9, 2.0**-10
LARGEST_WEIGHT = 2.0**15


class HalfRowSource(HeadScaledSource):
    """A source whose norms, values and q8 weights float16 holds."""

    def __init__(self, inner: Source) -> None:
        super().__init__(inner)
        self.unmoved_norm: Tensor | None = (
            None  # final_norm as the inner source has it, where lm_head took a part of it
        )
        self._octaves: dict[tuple[int | None, str], list[int]] = {}

    def parts(self, layer: int | None, role: str) -> Sequence[Matrix]:
        parts = super().parts(layer, role)
        matrix = MATRIX_OF.get(role, role)
        if matrix not in NORM_OF or not self._is_q8(layer, matrix):
            return parts
        octaves = self._group_octaves(layer, matrix, parts if role == matrix else None)
        if not any(octaves):
            return parts
        if role == matrix:
            return [_groups_moved(part, octaves) for part in parts]
        (norm,) = parts
        assert isinstance(norm, Tensor)
        if layer is None:
            self.unmoved_norm = norm
        return [torch.cat([moved(group, n) for group, n in zip(torch.split(norm, GROUP), octaves)])]

    def target_shifts(self, layer: int, parts: Sequence[Matrix], bias: Sequence[Matrix], norm: Tensor) -> HeadShifts:
        """None of keys; of values where their rows, or the columns of o that they meet, would leave float16's range."""
        none = [0] * self.config.kv_heads
        if not self._is_q8(layer, "o"):
            return HeadShifts(none, none)
        columns = [[head_columns(m, i, self.config) for m in self.peek(layer, "o")] for i in range(len(none))]
        sizes = self.sizes(parts[2], bias[2], norm)
        return HeadShifts(none, [_octaves(TARGET, s, largest_weight(c)) for s, c in zip(sizes, columns)])

    def _is_q8(self, layer: int | None, role: str) -> bool:
        return set(self.inner.formats(layer, role)) == {"q8"}

    def _group_octaves(self, layer: int | None, role: str, parts: Sequence[Matrix] | None) -> list[int]:
        """Octaves by which the norm is multiplied, and the matrix behind it divided, for each group of columns."""
        if (layer, role) not in self._octaves:
            if parts is None:
                parts = self.shifted(layer, role, self.peek(layer, role))
            norms = torch.split(self.norm_in_front(layer, role), GROUP)
            scales = [part.scales for part in parts if isinstance(part, MXTensor)]
            weights = (torch.stack([s.abs().amax(0) for s in scales]).amax(0).float() * LARGEST_CODE).tolist()
            octaves = [_octaves(0, float(norm.float().abs().max()), w) for norm, w in zip(norms, weights)]
            self._octaves[layer, role] = [
                exact_shift(n, [norms[i]], [s[..., i] for s in scales]) if n else 0 for i, n in enumerate(octaves)
            ]
        return self._octaves[layer, role]


def largest_weight(scales: Sequence[Tensor]) -> float:
    """A bound of the weights under these scales."""
    return max(float(s.abs().max()) for s in scales) * LARGEST_CODE


def _octaves(target: int, size: float, weight: float) -> int:
    """Octaves by which what a matrix multiplies grows, and the matrix shrinks; none where both are of a usual size."""
    octaves = octaves_to(target, size) if size > LARGEST or 0 < size < SMALLEST else 0
    if 0 < size < math.inf and LARGEST_WEIGHT * 2.0**octaves < weight < math.inf:
        octaves = math.ceil(math.log2(weight / LARGEST_WEIGHT))
        octaves = min(octaves, math.floor(math.log2(LARGEST / size)))  # rows first: of two evils they are the likelier
    return octaves


def _groups_moved(m: Matrix, octaves: Sequence[int]) -> Matrix:
    assert isinstance(m, MXTensor)
    return with_exponents(m, torch.stack([moved(m.scales[..., i], -n) for i, n in enumerate(octaves)], -1))
