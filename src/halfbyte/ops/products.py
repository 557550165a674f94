"""Products and sums whose bits depend on their operands alone: not on the library, the machine or a batch's other rows.

A matrix product's rounding depends on the order in which its terms are added, and that order is the library's affair:
another shape, another instruction set, even another row of the same call takes another one. So the reference leaves it
nothing to round. Both operands become whole numbers in float64, in units of a power of two of their own row, small
enough that every sum of theirs stays below 2^53 and is exact in any order:

    weights   slices of WEIGHT_BITS bits below the row's largest value
    rows      slices of 17 bits below their largest value, for sums of up to TERMS

A product with weights takes as many slices of both as hold every bit, whatever the spread of a row's values: a small
weight that meets a large activation counts as much as a large one that meets a small one. Before that, each column of
the matrix gives its power of two to the rows that it multiplies, so that a factor of two moved between a norm's weight
and the matrix behind it changes no bit. Attention takes one slice of each key and value and two of each query.
What is lost is smaller than what a float32 product loses. A row with NaN or infinity in it comes out as NaN.
Sums are trees of our own. Exponentials go through float64, because vector units and their scalar tails may differ in
the last float32 bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

EXACT_BITS = 53  # of a float64
WEIGHT_BITS = 24
TERMS = 4096  # of a sum; longer ones have fewer bits. Not the real number: zeros beside a row must change nothing


class LowerSlice(NamedTuple):
    """The next WEIGHT_BITS bits of those rows of a matrix that have any."""

    rows: Tensor  # int64 [M]: which of the rows, counted through a whole stack of matrices
    values: Tensor  # float64 [M, K]


@dataclass(frozen=True)
class FixedPoint:
    """A matrix [..., N, K] as whole numbers: values * unit * column_unit, and what `lower` adds to some rows."""

    values: Tensor  # float64 [..., N, K]
    unit: Tensor  # float64 [..., N]: a power of two for every row
    column_unit: Tensor | None = None  # float64 [..., K]: a power of two for every column
    lower: tuple[LowerSlice, ...] = ()

    @classmethod
    def of(cls, matrix: Tensor) -> FixedPoint:
        """One slice, each row on its own: for keys and values, whose neighbours a query may not see."""
        matrix = matrix.float()
        unit = _unit(matrix, WEIGHT_BITS)
        return cls((matrix.double() / unit[..., None]).round_(), unit)

    @classmethod
    def of_weights(cls, matrix: Tensor) -> FixedPoint:
        """All bits of every weight."""
        matrix = matrix.double()
        column_unit = _unit(matrix.nan_to_num(0.0, 0.0, 0.0).transpose(-1, -2), 0)
        exact = matrix / column_unit[..., None, :]
        unit = _unit(exact, WEIGHT_BITS)
        exact /= unit[..., None]
        values = exact.round()
        rest = exact.sub_(values).flatten(0, -2)
        rows = torch.arange(rest.shape[0], device=rest.device)
        lower = []
        while bool((lossy := (rest.abs() > 0).any(-1)).any()):  # NaN is not lossy
            rest, rows = rest[lossy] * 2.0**WEIGHT_BITS, rows[lossy]
            lower.append(LowerSlice(rows, rest.round()))
            rest = rest - lower[-1].values
        return cls(values, unit, column_unit, tuple(lower))

    def columns(self) -> tuple[FixedPoint, Tensor]:
        """The matrix transposed, without the units of what are columns now, and those units."""
        assert self.column_unit is None, "only a matrix without column units has rows that can become columns"
        ones = self.unit.new_ones(self.values.shape[:-2] + self.values.shape[-1:])
        return FixedPoint(self.values.transpose(-1, -2), ones), self.unit

    def __getitem__(self, index: int) -> FixedPoint:
        """One matrix of a stack."""
        count = self.values.shape[-2]
        lower = []
        for rows, values in self.lower:
            here = rows // count == index
            if bool(here.any()):
                lower.append(LowerSlice(rows[here] % count, values[here]))
        column_unit = None if self.column_unit is None else self.column_unit[index]
        return FixedPoint(self.values[index], self.unit[index], column_unit, tuple(lower))

    def times(self, rows: Tensor) -> Tensor:
        """rows [..., R, K] of whole numbers times the matrix transposed, without its units; exact in each slice."""
        total = torch.matmul(rows, self.values.transpose(-1, -2))
        for i, lower in enumerate(self.lower, 1):
            total[:, lower.rows] += torch.matmul(rows, lower.values.T) * 2.0 ** (-i * WEIGHT_BITS)
        return total

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + sum(part.values.nbytes for part in self.lower)

    @staticmethod
    def bytes_for(count: int) -> int:
        """Bytes of the first slice of `count` values; most weights have no more."""
        return 8 * count


def matmul(x: Tensor, matrix: Tensor | FixedPoint, *, terms: int = TERMS, fine: bool = True) -> Tensor:
    """x [..., R, K] times matrix [..., N, K] transposed, in float32. Not `fine`: rows have one slice.

    With weights, x and the matrix have two dimensions."""
    if isinstance(matrix, Tensor):
        matrix = FixedPoint.of_weights(matrix)
    bits = EXACT_BITS - WEIGHT_BITS - (max(x.shape[-1], terms) - 1).bit_length()
    rest = x.double()
    if matrix.column_unit is not None:
        rest = rest * matrix.column_unit
    unit = _unit(rest, bits)
    rest = rest / unit[..., None]
    rows = rest.round()
    if not fine:
        total = matrix.times(rows)
    else:
        rest.sub_(rows).mul_(2.0**bits)
        low = rest.round()
        rest.sub_(low)
        total, term = matrix.times(torch.cat((rows, low), -2)).chunk(2, -2)
        total.add_(term, alpha=2.0**-bits)
        if matrix.column_unit is not None:
            _add_lower_bits(total, rest, matrix, bits)
    return total.mul_(unit[..., :, None]).mul_(matrix.unit[..., None, :]).float()


def _add_lower_bits(total: Tensor, rest: Tensor, matrix: FixedPoint, bits: int) -> None:
    """Add what two slices of `bits` bits left over of each row, to the last bit."""
    at, scale = torch.arange(rest.shape[0], device=rest.device), 2.0**-bits
    while bool((lossy := (rest.abs() > 0).any(-1)).any()):  # NaN is not lossy
        rest, at, scale = rest[lossy] * 2.0**bits, at[lossy], scale * 2.0**-bits
        rows = rest.round()
        total[at] += matrix.times(rows) * scale
        rest = rest - rows


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
    """The power of two in which each row's values are below 2^bits; any for a row of zeros."""
    largest: Tensor = x.abs().amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])
    exponent = torch.frexp(largest).exponent.long() - bits
    return ((exponent + 1023) << 52).view(torch.float64)  # the bits of 2^exponent: pow need not be exact
