"""What moves from a norm into the matrix behind it, and what stays."""

from __future__ import annotations

import pytest
import torch

from halfbyte.ops.folding import MOST, column_maxima, fold_norm


def matrix(rows: int = 40, columns: int = 96) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(3))


def norm(columns: int = 96) -> torch.Tensor:
    return (0.5 + torch.rand(columns, generator=torch.Generator().manual_seed(4))).bfloat16()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_largest_of_each_column(dtype: torch.dtype) -> None:
    m = matrix().to(dtype)
    m[:, 5] = 0
    assert column_maxima(m).equal(m.float().abs().amax(0))


def test_the_norm_is_one_behind_even_columns() -> None:
    columns, rest = fold_norm(norm(), column_maxima(matrix()))
    assert columns.equal(norm().float())
    assert rest.equal(torch.ones_like(norm()))


@pytest.mark.parametrize("octaves", [3, 9, 30])
def test_a_small_column_is_raised_and_the_norm_holds_the_inverse(octaves: int) -> None:
    m, weight = matrix(), norm()
    weight[40] *= 2.0**-octaves
    columns, rest = fold_norm(weight, column_maxima(m))
    assert (columns * rest.float()).equal(weight.float())
    assert (rest != 1).nonzero().flatten().tolist() == [40]
    level = (m * columns).abs().amax(0)
    if octaves < MOST:
        assert level[40] >= 0.25 * level[32:64].median()
    assert level[40] <= 2 * level[32:64].median()


@pytest.mark.parametrize("columns", [96, 80])
def test_only_the_product_of_norm_and_matrix_counts(columns: int) -> None:
    m, weight = matrix(columns=columns), norm(columns)
    weight[40] *= 2.0**-7
    expected, rest = fold_norm(weight, column_maxima(m))
    moved = torch.randint(-6, 7, (columns,), generator=torch.Generator().manual_seed(5)).float().exp2()
    other, other_rest = fold_norm(weight * moved.bfloat16(), column_maxima(m / moved))
    assert (m / moved * other).equal(m * expected)
    assert other_rest.equal(rest)


def test_columns_of_zeros_and_norms_of_zero_change_nothing() -> None:
    m, weight = matrix(), norm()
    m[:, 3], weight[40] = 0, 0
    columns, rest = fold_norm(weight, column_maxima(m))
    assert columns.equal(weight.float())
    assert rest.equal(torch.ones_like(weight))
