"""E4M3 against cases written by hand, ml_dtypes and torch, bit for bit inside the range; saturation outside it."""

import ml_dtypes
import numpy as np
import pytest
import torch

from halfbyte.formats import e4m3

GOLDEN = [
    (0.0, 0x00), (1.0, 0x38), (1.125, 0x39), (448.0, 0x7E), (2.0**-6, 0x08), (2.0**-9, 0x01),
    (1.0625, 0x38), (1.1875, 0x3A),  # ties to even
    (2.0**-10, 0x00), (1.5 * 2.0**-9, 0x02), (1.01 * 2.0**-10, 0x01),  # ties and rounding among subnormals
    (463.9, 0x7E), (464.0, 0x7E), (464.1, 0x7E), (480.0, 0x7E), (1e30, 0x7E), (float("inf"), 0x7E),  # saturation
]  # fmt: skip


@pytest.mark.parametrize(("value", "code"), GOLDEN)
def test_golden_rounding(value, code):
    assert e4m3.encode(torch.tensor([value, -value])).tolist() == [code, code | 0x80]


def test_nan_stays_nan():
    assert e4m3.encode(torch.tensor([float("nan")])).item() & 0x7F == e4m3.NAN
    assert torch.isnan(e4m3.decode(torch.tensor([0x7F, 0xFF], dtype=torch.uint8))).all()


def test_decode_agrees_with_ml_dtypes_and_torch_on_every_code():
    codes = torch.arange(256, dtype=torch.uint8)
    ours = e4m3.decode(codes)
    theirs = codes.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    number = ~np.isnan(theirs)
    assert ours.numpy()[number].tobytes() == theirs[number].tobytes()
    assert torch.isnan(ours).numpy().tolist() == (~number).tolist()
    assert torch.equal(torch.nan_to_num(ours), torch.nan_to_num(codes.view(torch.float8_e4m3fn).float()))


@pytest.mark.parametrize("source", ["bfloat16", "float16", "random"])
def test_encode_agrees_with_ml_dtypes_and_torch_inside_the_range(source):
    bits = torch.arange(1 << 16, dtype=torch.int32)
    if source == "bfloat16":
        x = (bits << 16).view(torch.float32)
    elif source == "float16":
        x = bits.to(torch.int16).view(torch.float16).float()
    else:
        x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(1)) * 30
    inside = x[x.abs() <= 464]  # past the last rounding boundary ml_dtypes has NaN, where we saturate
    assert len(inside) > 30000
    ours = e4m3.encode(inside)
    assert ours.numpy().tobytes() == inside.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8).tobytes()
    assert torch.equal(ours, inside.to(torch.float8_e4m3fn).view(torch.uint8))
    outside = x[x.abs() > 464]
    assert torch.equal(e4m3.decode(e4m3.encode(outside)), torch.sign(outside) * 448)


def test_every_number_survives_a_round_trip():
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    assert torch.equal(e4m3.encode(e4m3.decode(codes)), codes)


def test_empty_and_strided():
    assert e4m3.encode(torch.empty(0, 4)).shape == (0, 4)
    codes = torch.arange(8, dtype=torch.uint8).view(2, 4).T
    assert torch.equal(e4m3.encode(e4m3.decode(codes)), codes)
