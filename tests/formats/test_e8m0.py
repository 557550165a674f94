"""UE8M0: exact at both ends, bit for bit like ml_dtypes, and the scale rules against slow exact arithmetic."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import FormatError
from halfbyte.formats import e2m1, e8m0, mxfp4, mxfp8


def test_decode_agrees_with_ml_dtypes_on_every_byte():
    every = np.arange(256, dtype=np.uint8)
    theirs = every.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    ours = e8m0.decode(torch.from_numpy(every)).numpy()
    assert ours[:255].tobytes() == theirs[:255].tobytes()
    assert np.isnan(ours[255])
    assert np.isnan(theirs[255])


def test_the_ends_are_exact():
    values = e8m0.decode(torch.tensor([0, 1, 127, 254], dtype=torch.uint8)).tolist()
    assert values == [2.0**-127, 2.0**-126, 1.0, 2.0**127]


def test_encode_is_the_inverse_and_saturates():
    exponents = torch.arange(-127, 128)
    assert torch.equal(e8m0.encode(exponents), torch.arange(255, dtype=torch.uint8))
    theirs = np.exp2(exponents.numpy().astype(np.float64)).astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    assert np.array_equal(e8m0.encode(exponents).numpy(), theirs)
    assert e8m0.encode(torch.tensor([-1000, 1000])).tolist() == [0, 254]


def test_wrong_types_are_refused():
    with pytest.raises(FormatError, match="integer exponents"):
        e8m0.encode(torch.tensor([1.0]))
    with pytest.raises(FormatError, match="uint8"):
        e8m0.decode(torch.tensor([1], dtype=torch.int32))


def group_of(*values: float) -> torch.Tensor:
    return torch.tensor([*values] + [0.0] * (32 - len(values)))


@pytest.mark.parametrize(
    ("amax", "scale"),
    [
        (0.0, 0),
        (4.0, 127), (6.0, 127), (7.999, 127), (8.0, 128), (3.999, 126), (1.0, 125),
        (2.0**-125, 0), (2.0**-124, 1), (2.0**-126, 0), (2.0**-149, 0),  # clamped: 2^-127 is the smallest scale
        (3.4028234663852886e38, 252),
        (float("inf"), 255), (float("nan"), 255),
    ],
)  # fmt: skip
@pytest.mark.parametrize("sign", [1, -1])
def test_ocp_scale_of_mxfp4_by_hand(amax, scale, sign):
    assert e8m0.scale_ocp(group_of(0.0, sign * amax)[None], mxfp4.ELEMENT).item() == scale


def test_ocp_scale_of_mxfp8_by_hand():
    groups = torch.stack([group_of(256.0), group_of(448.0), group_of(511.9), group_of(512.0), group_of(1.0)])
    assert e8m0.scale_ocp(groups, mxfp8.ELEMENT).tolist() == [127, 127, 127, 128, 119]


def test_mse_moves_up_where_ocp_saturates():
    groups = torch.full((1, 32), 7.9)
    assert e8m0.scale_ocp(groups, mxfp4.ELEMENT).item() == 127  # 7.9 reads back as 6
    assert e8m0.scale_mse(groups, mxfp4.ELEMENT).item() == 128  # 7.9 reads back as 8


def test_mse_moves_down_where_one_outlier_costs_less_than_the_rest():
    groups = torch.tensor([[4.0] + [0.25] * 31])
    assert e8m0.scale_ocp(groups, mxfp4.ELEMENT).item() == 127  # every 0.25 reads back as 0: error 31/16
    assert e8m0.scale_mse(groups, mxfp4.ELEMENT).item() == 126  # 4 reads back as 3: error 1


def test_a_draw_keeps_the_ocp_scale():
    groups = torch.stack([group_of(4.0, 2.0, 1.0), group_of(0.0)])
    assert e8m0.scale_mse(groups, mxfp4.ELEMENT).tolist() == [127, 0]


def test_mse_leaves_special_groups_alone():
    groups = torch.stack([group_of(float("nan")), group_of(float("-inf"), 1.0), group_of(), group_of(2.0**-149)])
    assert e8m0.scale_mse(groups, mxfp4.ELEMENT).tolist() == [255, 255, 0, 0]
    codes, scales = e8m0.quantize_groups(groups[:2], mxfp4.ELEMENT, "mse")
    assert scales.tolist() == [255, 255]
    assert not codes.any()


def test_mse_does_not_go_below_the_smallest_scale():
    groups = torch.tensor([[4.0] + [0.25] * 31]) * 2.0**-127  # one scale down would fit better, and does not exist
    assert e8m0.scale_mse(groups, mxfp4.ELEMENT).item() == 0
    assert e8m0.scale_mse(groups * 2, mxfp4.ELEMENT).item() == 0


def test_an_unknown_rule_is_refused():
    with pytest.raises(FormatError, match="use one of ocp, mse"):
        e8m0.quantize_groups(torch.zeros(1, 32), mxfp4.ELEMENT, "floor")


def nearest_e2m1(value: float) -> int:
    """Slow and exact: double holds every float32 divided by every scale of interest."""
    magnitude = abs(value)
    code = min(range(8), key=lambda c: (abs(e2m1.VALUES[c] - magnitude), c % 2))
    return code | (8 if math.copysign(1, value) < 0 else 0)


def exact_ocp(values: list[float]) -> tuple[list[int], int]:
    amax = max(abs(v) for v in values)
    exponent = max(-127, math.frexp(amax)[1] - 1 - 2) if amax else -127
    return [nearest_e2m1(math.ldexp(v, -exponent)) for v in values], exponent + 127


def exact_error(values: list[float], exponent: int) -> float:
    codes = [nearest_e2m1(math.ldexp(v, -exponent)) for v in values]
    return math.fsum((v - math.ldexp(e2m1.VALUES[c], exponent)) ** 2 for v, c in zip(values, codes))


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
moderate = st.floats(min_value=-1000, max_value=1000, width=32, allow_subnormal=False)


@given(st.lists(finite, min_size=32, max_size=32))
@settings(deadline=None)
def test_ocp_quantisation_equals_exact_arithmetic(values):
    codes, scales = e8m0.quantize_groups(torch.tensor([values]), mxfp4.ELEMENT, "ocp")
    assert (codes[0].tolist(), scales.item()) == exact_ocp(values)


@given(st.lists(moderate, min_size=32, max_size=32))
@settings(deadline=None)
def test_mse_is_the_best_of_its_three_candidates(values):
    base = exact_ocp(values)[1] - 127
    chosen = e8m0.scale_mse(torch.tensor([values]), mxfp4.ELEMENT).item() - 127
    assert chosen in (base - 1, base, base + 1)
    best = min(exact_error(values, e) for e in (base - 1, base, base + 1) if e >= -127)
    assert exact_error(values, chosen) <= best * (1 + 1e-5)
