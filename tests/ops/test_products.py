"""A product's bits depend on its operands alone: a row is the same alone, among others, in any order of summing."""

from __future__ import annotations

import pytest
import torch

from halfbyte.formats import dequantize, quantize
from halfbyte.ops.linear import ACTIVATIONS, linear
from halfbyte.ops.moe import moe
from halfbyte.ops.norm import rms_norm
from halfbyte.ops.products import FixedPoint, matmul
from halfbyte.ops.router import route

pytestmark = pytest.mark.exact
SHAPES = [(96, 40), (256, 384), (2880, 128), (100, 7)]


@pytest.mark.parametrize(("k", "n"), SHAPES)
@pytest.mark.parametrize("rows", [1, 7, 31, 32, 33, 64, 100])
def test_matmul(k: int, n: int, rows: int) -> None:
    g = torch.Generator().manual_seed(rows)
    w, x = torch.randn(n, k, generator=g), torch.randn(rows, k, generator=g)
    together = matmul(x, w)
    assert together.shape == (rows, n)
    for i in {0, rows // 2, rows - 1}:
        assert torch.equal(together[i], matmul(x[i : i + 1], w)[0])
    exact = x.double() @ w.double().T
    assert (together - exact).norm() / exact.norm() < 1e-6


def test_no_rows() -> None:
    assert matmul(torch.empty(0, 32), torch.ones(5, 32)).shape == (0, 5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear_with_quantised_activations(activation: str) -> None:
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(45, 96, generator=g), quantize(torch.randn(24, 96, generator=g), "mxfp4")
    together = linear(x, w, torch.ones(24), activation=activation)
    assert linear(x[:0], w, torch.ones(24), activation=activation).shape == (0, 24)  # a step that samples nothing
    assert torch.equal(together[13], linear(x[13:14], w, torch.ones(24), activation=activation)[0])


def test_norm_router_and_moe() -> None:
    g = torch.Generator().manual_seed(1)
    x, weight = torch.randn(50, 64, generator=g) * 3, torch.rand(64, generator=g)
    router, bias = torch.randn(8, 64, generator=g), torch.randn(8, generator=g)
    up, down = torch.randn(8, 96, 64, generator=g), torch.randn(8, 64, 48, generator=g)

    def run(rows: torch.Tensor) -> torch.Tensor:
        h = rms_norm(rows, weight, 1e-5)
        ids, weights = route(h, router, bias, 4)
        return moe(h, ids, weights, lambda e, r: matmul(r, up[e]), lambda e, r: matmul(r, down[e]), 7.0, 1.702)

    together = run(x)
    for i in range(50):
        assert torch.equal(together[i], run(x[i : i + 1])[0])


def test_the_other_order_is_another_order(sum_order: str) -> None:
    """Without it every test here would pass for the wrong reason."""
    g = torch.Generator().manual_seed(2)
    x, w = torch.randn(40, 300, generator=g), torch.randn(50, 300, generator=g)
    alike = torch.mm(x, w.T)[7:8]
    assert torch.allclose(alike, torch.mm(x[7:8], w.T), rtol=1e-4, atol=1e-4)
    if sum_order == "shuffled":
        assert not torch.equal(alike, torch.mm(x[7:8], w.T))


def test_one_large_weight_costs_the_others_nothing() -> None:
    """The large one meets a zero: what is left is as exact as if it were not there."""
    g = torch.Generator().manual_seed(3)
    x, w = torch.randn(4, 2880, generator=g), torch.randn(3, 2880, generator=g)
    x[:, 17], w[1, 17] = 0.0, 1e6
    exact = x.double() @ w.double().T
    rest = w.clone()
    rest[1, 17] = 0.0
    size = x.norm(dim=1)[:, None] * rest.norm(dim=1)  # of the product without cancellation
    assert ((matmul(x, w) - exact).abs() / size).max() < 1e-8  # 24 bits below 1e6 alone would leave 3e-4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_a_number_stays_visible(value: float) -> None:
    g = torch.Generator().manual_seed(4)
    x, w = torch.randn(3, 64, generator=g), torch.randn(5, 64, generator=g)
    x[1, 3] = value
    assert matmul(x, w).isfinite().all(1).tolist() == [True, False, True]
    x[1, 3], w[2, 1] = 0.5, value
    assert matmul(x, w).isfinite().all(0).tolist() == [True, True, False, True, True]


def spread(shape: tuple[int, ...], octaves: int, seed: int) -> torch.Tensor:
    """Powers of two from 2^-octaves to 2^octaves."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-octaves, octaves + 1, shape, generator=g).float().exp2()


@pytest.mark.parametrize("octaves", [3, 8, 12, 40])
def test_a_power_of_two_moved_between_norm_and_matrix_changes_no_bit(octaves: int) -> None:
    g = torch.Generator().manual_seed(octaves)
    x, norm, w = (
        torch.randn(5, 2880, generator=g),
        torch.rand(2880, generator=g) + 0.5,
        torch.randn(48, 2880, generator=g),
    )
    w = w.bfloat16().float()
    moved = spread((2880,), octaves, octaves)
    plain = matmul(rms_norm(x, norm, 1e-5), w)
    assert torch.equal(matmul(rms_norm(x, norm * moved, 1e-5), w / moved), plain)


@pytest.mark.parametrize("octaves", [8, 12, 60])
def test_a_row_whose_scales_spread_loses_nothing(octaves: int) -> None:
    """Each output hangs on every group of its row, however small its scale: the activations make up for it."""
    g = torch.Generator().manual_seed(octaves)
    w = quantize(torch.randn(6, 2880, generator=g), "mxfp4")
    scales = spread((6, 90), octaves, octaves).repeat_interleave(32, 1)
    wide = dequantize(w, torch.float32) * scales
    for i in range(6):
        x = torch.randn(2880, generator=g) / scales[i]
        exact = (x.double() * wide[i].double()).sum()
        size = (x.double() * wide[i].double()).abs().sum()
        assert abs(matmul(x[None], wide)[0, i] - exact) / size < 2.0**-24


def test_a_stack_of_matrices_has_the_products_of_its_members() -> None:
    g = torch.Generator().manual_seed(5)
    stack, x = torch.randn(4, 12, 96, generator=g), torch.randn(3, 96, generator=g)
    stack[2] = stack[2].bfloat16().float()  # fewer bits: other rows have a second slice
    fixed = FixedPoint.of_weights(stack)
    for i in range(4):
        assert torch.equal(matmul(x, fixed[i]), matmul(x, stack[i]))
