"""Products and sums whose bits depend on their operands alone: not on the library, the machine or a batch's other rows.

A matrix product's rounding depends on the order in which its terms are added, and that order is the library's affair:
another shape, another instruction set, even another row of the same call takes another one. So the reference leaves it
nothing to round. Both operands become whole numbers in float64, in units of a power of two of their own row, small
enough that every sum of theirs stays below 2^53 and is exact in any order:

    weights   one slice of WEIGHT_BITS bits below the row's largest value, a second where that would lose something
    rows      two slices below their largest value: 34 bits where float32 has 24, for sums of up to TERMS

What is lost is smaller than what a float32 product loses. A row with NaN or infinity in it comes out as NaN.
Sums are trees of our own. Exponentials go through float64, because vector units and their scalar tails may differ in
the last float32 bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

EXACT_BITS = 53  # of a float64
WEIGHT_BITS = 24
TERMS = 4096  # of a sum; longer ones have fewer bits. Not the real number: zeros beside a row must change nothing
OUTLIER = 16.0  # a row of a matrix whose largest value is that many times its root mean square has a second slice


@dataclass(frozen=True)
class FixedPoint:
    """A matrix [..., N, K] as whole numbers: a value is the sum of slices[i] * unit * 2^(-i * WEIGHT_BITS)."""

    slices: tuple[Tensor, ...]  # float64 [..., N, K]
    unit: Tensor  # float64 [..., N]: a power of two for every row

    @classmethod
    def of(cls, matrix: Tensor) -> FixedPoint:
        matrix = matrix.float()
        unit = _unit(matrix, WEIGHT_BITS)
        exact = matrix.double() / unit[..., None]
        first = exact.round()
        if matrix.shape[-1] <= OUTLIER**2:  # no row can have one
            return cls((first,), unit)
        outlier = (matrix.abs().amax(-1) ** 2).double() > OUTLIER**2 / matrix.shape[-1] * sum_rows(matrix * matrix)
        if not bool(outlier.any()):
            return cls((first,), unit)
        rest = torch.where(outlier[..., None], ((exact - first) * 2.0**WEIGHT_BITS).round_(), 0.0)
        return cls((first, rest), unit)

    def columns(self) -> tuple[FixedPoint, Tensor]:
        """The matrix transposed, without the units of what are columns now, and those units."""
        ones = self.unit.new_ones(self.slices[0].shape[:-2] + self.slices[0].shape[-1:])
        return FixedPoint(tuple(s.transpose(-1, -2) for s in self.slices), ones), self.unit

    def __getitem__(self, index: int) -> FixedPoint:
        """One matrix of a stack."""
        return FixedPoint(tuple(s[index] for s in self.slices), self.unit[index])

    @staticmethod
    def bytes_for(count: int) -> int:
        """Of one slice of `count` values: what a matrix takes unless it has outliers."""
        return 8 * count


def matmul(x: Tensor, matrix: Tensor | FixedPoint, *, terms: int = TERMS, fine: bool = True) -> Tensor:
    """x [..., R, K] times matrix [..., N, K] transposed, in float32. Not `fine`: rows have one slice."""
    if isinstance(matrix, Tensor):
        matrix = FixedPoint.of(matrix)
    bits = EXACT_BITS - WEIGHT_BITS - (max(x.shape[-1], terms) - 1).bit_length()
    unit = _unit(x, bits)
    exact = x.double() / unit[..., None]
    rows = exact.round()
    if fine:
        rows = torch.cat((rows, exact.sub_(rows).mul_(2.0**bits).round_()), -2)
    total: Tensor | None = None
    for i, part in enumerate(matrix.slices):
        term = torch.matmul(rows, part.transpose(-1, -2))
        if fine:
            high, low = term.chunk(2, -2)
            term = high.add_(low, alpha=2.0**-bits)
        total = term if total is None else total.add_(term, alpha=2.0 ** (-i * WEIGHT_BITS))
    assert total is not None
    return total.mul_(unit[..., :, None]).mul_(matrix.unit[..., None, :]).float()


def sum_rows(x: Tensor) -> Tensor:
    """The sum over the last dimension, in float64: halves added to each other until one value is left."""
    x = x.double()
    width = x.shape[-1]
    size = 1 << max(width - 1, 0).bit_length()
    x = F.pad(x, (0, size - width))
    while size > 1:
        size //= 2
        x = x[..., :size] + x[..., size:]
    return x[..., 0]


def exp(x: Tensor) -> Tensor:
    return torch.exp(x.double()).float()


def sigmoid(x: Tensor) -> Tensor:
    return torch.sigmoid(x.double()).float()


def _unit(x: Tensor, bits: int) -> Tensor:
    """Of each row, the power of two in which its values are below 2^bits; of a row of zeros any."""
    largest: Tensor = x.abs().amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])
    exponent = torch.frexp(largest).exponent.long() - bits
    return ((exponent + 1023) << 52).view(torch.float64)  # the bits of 2^exponent: pow need not be exact
