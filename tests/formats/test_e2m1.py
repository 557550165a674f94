"""E2M1 against rounding cases written by hand and against ml_dtypes, bit for bit."""

import ml_dtypes
import numpy as np
import pytest
import torch

from halfbyte.errors import FormatError
from halfbyte.formats import e2m1

# value, code: every representable value, every tie, and the neighbours of every tie
GOLDEN = [
    (0.0, 0), (0.5, 1), (1.0, 2), (1.5, 3), (2.0, 4), (3.0, 5), (4.0, 6), (6.0, 7),
    (0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6),  # ties to the even code
    (0.2499, 0), (0.2501, 1), (0.7499, 1), (0.7501, 2), (1.2499, 2), (1.2501, 3), (1.7499, 3), (1.7501, 4),
    (2.4999, 4), (2.5001, 5), (3.4999, 5), (3.5001, 6), (4.9999, 6), (5.0001, 7),
    (6.0001, 7), (6.9999, 7), (7.0, 7), (7.0001, 7), (8.0, 7), (1e30, 7), (float("inf"), 7),  # saturation
    (1e-30, 0), (1e-45, 0),
]  # fmt: skip


@pytest.mark.parametrize(("value", "code"), GOLDEN)
def test_golden_rounding(value, code):
    assert e2m1.encode(torch.tensor([value, -value])).tolist() == [code, code | 8]


def test_the_neighbours_of_ties_in_float32_go_to_their_own_side():
    for tie, below, above in [
        (0.25, 0, 1),
        (0.75, 1, 2),
        (1.25, 2, 3),
        (1.75, 3, 4),
        (2.5, 4, 5),
        (3.5, 5, 6),
        (5, 6, 7),
    ]:
        t = torch.tensor(float(tie))
        down, up = torch.nextafter(t, torch.tensor(0.0)), torch.nextafter(t, torch.tensor(9.0))
        assert e2m1.encode(torch.stack((down, up))).tolist() == [below, above]


def test_nan_saturates_with_its_sign():
    nan = torch.tensor([0x7FC00000, -0x00400000, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert torch.isnan(nan).all()
    assert e2m1.encode(nan).tolist() == [7, 15, 7]


def test_signs_of_zeros_survive():
    assert e2m1.encode(torch.tensor([0.0, -0.0, -0.1])).tolist() == [0, 8, 8]
    assert torch.signbit(e2m1.decode(torch.tensor([0, 8], dtype=torch.uint8))).tolist() == [False, True]


def test_decode_agrees_with_ml_dtypes_on_every_code():
    codes = np.arange(16, dtype=np.uint8)
    theirs = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    ours = e2m1.decode(torch.from_numpy(codes)).numpy()
    assert ours.tobytes() == theirs.tobytes()
    assert np.array(e2m1.VALUES, np.float32).tobytes() == theirs.tobytes()


def test_encode_agrees_with_ml_dtypes_on_every_bfloat16():
    every = (torch.arange(1 << 16, dtype=torch.int32) << 16).view(torch.float32)
    every = every[~torch.isnan(every)]
    theirs = every.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert e2m1.encode(every).numpy().tobytes() == theirs.tobytes()


def test_encode_agrees_with_ml_dtypes_on_random_float32():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1 << 16, generator=generator) * torch.exp2(torch.randint(-6, 6, (1 << 16,), generator=generator))
    theirs = x.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert e2m1.encode(x).numpy().tobytes() == theirs.tobytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_encode_takes_any_floating_type_and_any_stride(dtype):
    x = torch.tensor([[0.25, 6.5], [-0.75, 2.5]], dtype=dtype).T
    assert e2m1.encode(x).tolist() == [[0, 10], [7, 4]]


def test_the_low_nibble_comes_first():
    codes = torch.tensor([[1, 2, 3, 15]], dtype=torch.uint8)
    packed = e2m1.pack(codes)
    assert packed.tolist() == [[0x21, 0xF3]]
    assert torch.equal(e2m1.unpack(packed), codes)


def test_every_byte_unpacks_and_decodes():
    every = torch.arange(256, dtype=torch.uint8).view(4, 64)
    assert torch.equal(e2m1.pack(e2m1.unpack(every)), every)
    assert torch.equal(e2m1.decode_packed(every), e2m1.decode(e2m1.unpack(every)))


def test_an_odd_row_cannot_be_packed():
    with pytest.raises(FormatError, match="even number"):
        e2m1.pack(torch.zeros(2, 3, dtype=torch.uint8))


def test_empty():
    empty = torch.empty(3, 0)
    assert e2m1.encode(empty).shape == (3, 0)
    assert e2m1.decode(e2m1.encode(empty)).shape == (3, 0)
    assert e2m1.decode_packed(e2m1.pack(e2m1.encode(empty))).shape == (3, 0)
