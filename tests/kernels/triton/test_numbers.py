"""Roundings on the device against `halfbyte.formats`, bit for bit."""

from __future__ import annotations

import pytest
import torch

from halfbyte import formats
from halfbyte.formats import e2m1, e4m3
from halfbyte.kernels.triton.linear import round_activations
from halfbyte.ops.linear import round_activation

EDGES = torch.tensor(
    [0.0, -0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.9, 7.0, 447.0, 448.0, 464.0, 1e9, 2**-9, 2**-10, 2**-6, 1e-40]
)


def samples(rows: int, k: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(rows * k)
    x = torch.randn(rows, k, generator=g) * torch.exp2(torch.randint(-20, 20, (rows, k // 32), generator=g).float()
        ).repeat_interleave(32, 1)  # fmt: skip
    x[0, : len(EDGES)] = EDGES
    x[0, 32 : 32 + len(EDGES)] = -EDGES
    x[1, :64] = 0.0
    return x


@pytest.mark.parametrize("activation", ["mxfp8", "mxfp4"])
def test_mx_codes_and_scales_are_those_of_formats(activation: str) -> None:
    x = samples(3, 160)
    got = round_activations(x, activation)
    expected = formats.quantize(x, activation)
    assert got.xs is not None
    assert got.xs.equal(expected.scales)
    assert got.x.equal(expected.data)


@pytest.mark.parametrize("activation", ["mxfp8", "mxfp4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_broken_group_says_so_in_its_scale(activation: str, bad: float) -> None:
    x = samples(2, 96)
    x[0, 40] = bad
    got = round_activations(x, activation)
    expected = formats.quantize(x, activation)
    assert got.xs is not None
    assert int(got.xs[0, 1]) == 255
    assert got.xs.equal(expected.scales)
    assert got.x.equal(expected.data)


def test_fp8_rows() -> None:
    x = samples(4, 160)
    x[2] = 0.0
    x[3] = torch.randn(160)
    got = round_activations(x, "fp8")
    assert got.row_scale is not None
    values = e4m3.decode(got.x) * got.row_scale[:, None]
    assert values.equal(round_activation(x, "fp8"))


def test_int8_groups() -> None:
    """Bit for bit, ties included: amax 127 makes the scale 1, and halves are halfway."""
    x = samples(5, 160)
    x[2, :32] = torch.arange(32) - 15.5
    x[2, 0] = 127.0
    got = round_activations(x, "int8", 256)
    assert got.xs is not None
    values = (got.x.view(5, 8, 32).float() * got.xs[:, :, None]).view(5, 256)
    assert values[:, :160].equal(round_activation(x, "int8"))
    assert not values[:, 160:].any()
    for bad in (float("nan"), float("inf"), float("-inf")):
        x[4, 40] = bad
        got = round_activations(x, "int8")
        assert got.xs is not None
        values = (got.x.view(5, 5, 32).float() * got.xs[:, :, None]).view(5, 160)
        assert values[4, 32:64].isnan().all()
        assert values[4, :32].isfinite().all()


def test_every_e2m1_boundary() -> None:
    """Around each midpoint of the code, one float32 step to either side."""
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    x = torch.cat([middle, middle.nextafter(torch.tensor(9.0)), middle.nextafter(torch.tensor(0.0)), torch.zeros(10)])
    x = torch.cat([x, torch.tensor([4.0])]).view(1, 32)  # amax 4..6 keeps the scale at 1
    got = round_activations(x, "mxfp4")
    assert got.xs is not None
    assert int(got.xs[0, 0]) == 127
    assert got.x.equal(e2m1.pack(e2m1.encode(x)))
