"""Keys and values of a size that FP8 holds: a power of two for each kv head and side, found at load from the weights.

E4M3 saturates at 448 and has no numbers below 2^-9, and gpt-oss has no norm on its keys. A factor on a head's keys with
its reciprocal on the queries that read them changes no score, because rope is linear; one on a head's values with its
reciprocal on the columns of `o` changes no output. Powers of two change no bit of a weight's mantissa, so plans,
kernels and formats stay as they are, and only what the cache holds is larger or smaller. The factors depend on weights
alone: a prefix has the same bytes whichever prompt came first. Refuses nothing: where a weight could not hold its
factor exactly, the factor is nearer to one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.model.config import ModelConfig
from halfbyte.model.weights import NORM_OF, Matrix, Source, WeightFormat, join_rows, split_parts
from halfbyte.ops.linear import dense

SCALED_ROLES = ("qkv", "qkv_bias", "o")
TARGET = 4  # octaves: the rms of a head's largest row, 28 times below what E4M3 holds and 2^10 above its normal numbers


class HeadShifts(NamedTuple):
    """Octaves by which the keys and the values of each kv head are multiplied."""

    keys: list[int]
    values: list[int]


class HeadScaledSource:
    """A source whose keys and values have the size that FP8 holds best, and queries and `o` the reciprocals. Whatever
    requantises weights lies inside it, so that it sees the numbers that steps will read."""

    def __init__(self, inner: Source) -> None:
        self.inner = inner
        self._shifts: dict[int, HeadShifts] = {}
        self._norm: tuple[tuple[int | None, str], Sequence[Matrix]] | None = None  # the last that was read
        self._ahead: dict[tuple[int | None, str], Sequence[Matrix]] = {}  # what was read before its turn

    @property
    def config(self) -> ModelConfig:
        return self.inner.config

    def formats(self, layer: int | None, role: str) -> tuple[WeightFormat, ...]:
        return self.inner.formats(layer, role)

    def nbytes(self, layer: int | None, role: str) -> int:
        return self.inner.nbytes(layer, role)

    def parts(self, layer: int | None, role: str) -> Sequence[Matrix]:
        parts = self._ahead.pop((layer, role), None)
        parts = self.inner.parts(layer, role) if parts is None else parts
        if role in NORM_OF.values():
            self._norm = (layer, role), parts
        return self.shifted(layer, role, parts)

    def shifted(self, layer: int | None, role: str, parts: Sequence[Matrix]) -> Sequence[Matrix]:
        """Parts as the inner source has them, with the octaves of their heads."""
        if layer is None or role not in SCALED_ROLES:
            return parts
        shifts = self.shifts(layer, parts if role == "qkv" else None)
        if not any(shifts.keys + shifts.values):
            return parts
        if role == "o":
            return [_columns(part, shifts.values, self.config) for part in parts]
        query, key, value = split_parts(self.config, role, parts)
        group = self.config.heads // self.config.kv_heads
        of_queries = [-shift for shift in shifts.keys for _ in range(group)]
        return [_rows(query, of_queries), _rows(key, shifts.keys), _rows(value, shifts.values)]

    def peek(self, layer: int | None, role: str) -> Sequence[Matrix]:
        """Parts of the inner source before their turn; they are kept until it comes."""
        if (layer, role) not in self._ahead:
            self._ahead[layer, role] = self.inner.parts(layer, role)
        return self._ahead[layer, role]

    def shifts(self, layer: int, qkv: Sequence[Matrix] | None = None) -> HeadShifts:
        if layer not in self._shifts:
            parts = split_parts(self.config, "qkv", self.peek(layer, "qkv") if qkv is None else qkv)
            bias = split_parts(self.config, "qkv_bias", self.inner.parts(layer, "qkv_bias"))
            target = self.target_shifts(layer, parts, bias, self.norm_in_front(layer, "qkv"))
            query, out = parts[0], self.peek(layer, "o") if any(target.values) else []
            group, dim = self.config.heads // self.config.kv_heads, self.config.head_dim
            of_keys, of_values = [], []
            for i, (keys, values) in enumerate(zip(*target)):
                queries = [_head(query, i * group + j, dim) for j in range(group)]
                columns = [head_columns(m, i, self.config) for m in out]
                of_keys.append(exact_shift(keys, [_head(parts[1], i, dim)], queries))
                of_values.append(exact_shift(values, [_head(parts[2], i, dim)], columns))
            self._shifts[layer] = HeadShifts(of_keys, of_values)
        return self._shifts[layer]

    def norm_in_front(self, layer: int | None, role: str) -> Tensor:
        """The norm of this matrix, as the inner source has it."""
        key, last = (layer, NORM_OF[role]), self._norm
        norm = join_rows(last[1] if last is not None and last[0] == key else self.inner.parts(*key))
        assert isinstance(norm, Tensor)
        return norm

    def target_shifts(self, layer: int, parts: Sequence[Matrix], bias: Sequence[Matrix], norm: Tensor) -> HeadShifts:
        """Octaves that bring the rms of each head's largest row to 2^TARGET."""
        return HeadShifts(*([octaves_to(TARGET, s) for s in self.sizes(parts[i], bias[i], norm)] for i in (1, 2)))

    def sizes(self, part: Matrix, bias: Matrix, norm: Tensor) -> list[float]:
        """The rms of each head's largest row, behind a norm."""
        assert isinstance(bias, Tensor)
        rows = dense(part).double() * norm.double().to(part.device)
        squares = rows.square().sum(-1) + bias.double().square()
        sizes: list[float] = squares.view(self.config.kv_heads, -1).amax(1).sqrt().tolist()
        return sizes


def octaves_to(target: int, size: float) -> int:
    """Octaves that bring a size near 2^target; none for what is zero or no number."""
    return target - round(math.log2(size)) if 0 < size < math.inf else 0


def _exponents(m: Matrix) -> Tensor:
    """What a power of two multiplies: the numbers of a dense matrix, the scales of a block-scaled one."""
    return m if isinstance(m, Tensor) else m.scales


def _head(m: Matrix, head: int, head_dim: int) -> Tensor:
    return _exponents(m)[head * head_dim : (head + 1) * head_dim]


def head_columns(m: Matrix, head: int, config: ModelConfig) -> Tensor:
    """The numbers of all query heads that read a kv head."""
    numbers = _exponents(m)
    width = numbers.shape[-1] // config.kv_heads
    return numbers[..., head * width : (head + 1) * width]


def moved(numbers: Tensor, shift: int) -> Tensor:
    """Times 2^shift. E8M0 codes move by addition; code 0 is what groups of zeros have, and stays."""
    if numbers.dtype == torch.uint8:
        codes = numbers.to(torch.int16) + shift
        return torch.where(numbers == 0, 0, codes.clamp(1, 254)).to(torch.uint8)
    return (numbers.float() * 2.0**shift).to(numbers.dtype)


def exact_shift(shift: int, factors: Sequence[Tensor], reciprocals: Sequence[Tensor]) -> int:
    """The octaves nearest to these by which `factors` are multiplied, and `reciprocals` divided, without a rounding."""
    step = 1 if shift > 0 else -1
    pairs = [*((numbers, 1) for numbers in factors), *((numbers, -1) for numbers in reciprocals)]
    while shift and not all(torch.equal(moved(moved(n, sign * shift), -sign * shift), n) for n, sign in pairs):
        shift -= step
    return shift


def _rows(m: Matrix, shifts: Sequence[int]) -> Matrix:
    numbers = _exponents(m)
    count = numbers.shape[0] // len(shifts)
    return with_exponents(
        m, torch.cat([moved(numbers[i * count : (i + 1) * count], shift) for i, shift in enumerate(shifts)])
    )


def _columns(m: Matrix, shifts: Sequence[int], config: ModelConfig) -> Matrix:
    return with_exponents(m, torch.cat([moved(head_columns(m, i, config), -s) for i, s in enumerate(shifts)], -1))


def with_exponents(m: Matrix, numbers: Tensor) -> Matrix:
    """The matrix with other numbers, or scales."""
    return numbers if isinstance(m, Tensor) else replace(m, scales=numbers)
