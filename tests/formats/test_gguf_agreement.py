"""MXFP4 and q8 against the `gguf` package: the same bytes where the rules are the same, and exactly how they differ.

gguf's MXFP4 quantiser is not OCP's: the tests at the end name each difference. Its Q8_0 is the definition of our q8.
"""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from halfbyte.formats import dequantize, layouts, mxfp4, q8


def theirs(x: torch.Tensor, kind: Kind) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.quantize(x.numpy(), kind).copy())


def read(data: torch.Tensor, kind: Kind) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(data.numpy(), kind).copy())


def spread(rows: int, k: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    octaves = torch.randint(-60, 60, (rows, k // 32, 1), generator=generator)
    return (torch.randn(rows, k // 32, 32, generator=generator) * torch.exp2(octaves)).view(rows, k)


def unsigned_zeros(packed: torch.Tensor) -> torch.Tensor:
    """Packed codes with -0 written as 0."""
    low, high = packed & 15, packed >> 4
    return low.masked_fill(low == 8, 0) | (high.masked_fill(high == 8, 0) << 4)


# MXFP4 -------------------------------------------------------------------------------------------------------------


def test_mxfp4_blocks_read_the_same_at_every_scale():
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (255, 4, 17), generator=generator, dtype=torch.uint8)
    raw[..., 0] = torch.arange(255, dtype=torch.uint8)[:, None]
    raw = raw.view(255, 68)
    t = layouts.from_gguf(raw, "mxfp4")
    assert t.shape == (255, 128)
    with np.errstate(over="ignore"):
        expected = read(raw, Kind.MXFP4)
    ours = dequantize(t)
    assert torch.equal(ours, expected)  # == holds between 0 and -0, the one bit gguf drops
    nonzero = expected != 0
    assert torch.equal(ours[nonzero].view(torch.int32), expected[nonzero].view(torch.int32))


def test_mxfp4_quantises_the_same_away_from_ties():
    x = spread(64, 2880, seed=1)
    ours = layouts.convert(mxfp4.quantize(x), "gguf").data.view(-1, 17)
    expected = theirs(x, Kind.MXFP4).view(-1, 17)
    assert torch.equal(ours[:, 0], expected[:, 0])
    assert torch.equal(unsigned_zeros(ours[:, 1:]), expected[:, 1:])


def test_mxfp4_zero_groups_agree():
    x = torch.zeros(1, 32)
    assert torch.equal(layouts.convert(mxfp4.quantize(x), "gguf").data, theirs(x, Kind.MXFP4))


def one_group(*values: float) -> torch.Tensor:
    return torch.tensor([[*values] + [0.0] * (32 - len(values))])


def first_codes(t_or_data: torch.Tensor, count: int) -> list[int]:
    """Elements 0..count-1 of one gguf block: low nibbles."""
    return (t_or_data[0, 1 : 1 + count] & 15).tolist()


def test_difference_ties_go_towards_zero_in_gguf_and_to_even_here():
    x = one_group(4.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.75, -3.5)
    x[0, 0] = 6.0
    ours = layouts.convert(mxfp4.quantize(x), "gguf").data
    assert first_codes(ours, 10) == [7, 0, 2, 2, 4, 4, 6, 6, 10, 14]
    assert first_codes(theirs(x, Kind.MXFP4), 10) == [7, 0, 1, 2, 3, 4, 5, 6, 9, 13]


def test_difference_gguf_drops_the_sign_of_zero():
    x = one_group(6.0, -0.1)
    assert first_codes(layouts.convert(mxfp4.quantize(x), "gguf").data, 2) == [7, 8]
    assert first_codes(theirs(x, Kind.MXFP4), 2) == [7, 0]


def test_difference_gguf_rounds_the_logarithm():
    x = one_group(float(np.nextafter(np.float32(2048), np.float32(0))))
    assert mxfp4.quantize(x).scales.item() == 127 + 10 - 2  # floor(log2) is 10: the number lies under 2^11
    assert theirs(x, Kind.MXFP4)[0, 0].item() == 127 + 11 - 2


def test_difference_scale_255_is_nan_here_and_a_number_in_gguf():
    raw = torch.zeros(1, 17, dtype=torch.uint8)
    raw[0, 0], raw[0, 1] = 255, 1
    assert torch.isnan(dequantize(layouts.from_gguf(raw, "mxfp4"))).all()
    assert read(raw, Kind.MXFP4)[0, 0].item() == 2.0**127


# Q8_0 --------------------------------------------------------------------------------------------------------------


def halves(rows: int, k: int, seed: int) -> torch.Tensor:
    """Data full of ties: bfloat16 numbers with a largest magnitude of 127 in each group, so that the scale is 1."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-253, 254, (rows, k), generator=generator) / 2
    x[:, ::32] = 127
    return x


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("make", [lambda s: spread(32, 2880, s) * 2.0**-44, lambda s: spread(32, 320, s), halves])
def test_q8_is_gguf_bit_for_bit(make, seed):
    x = make(32, 320, seed) if make is halves else make(seed)
    x = x[(x.view(x.shape[0], -1).abs() / 127 < 65504).all(-1)]  # past that ggml's own scale is infinite
    x = torch.cat((x, torch.zeros(1, x.shape[1])))
    ours = layouts.convert(q8.quantize(x), "gguf").data
    expected = theirs(x, Kind.Q8_0)
    assert torch.equal(ours, expected)
    assert torch.equal(dequantize(layouts.from_gguf(expected, "q8")), read(expected, Kind.Q8_0))


def test_q8_rounds_half_away_from_zero():
    x = one_group(127.0, 0.5, -0.5, 1.5, 2.5, -2.5, 0.49999997)
    assert q8.quantize(x).data[0, :7].tolist() == [127, 1, -1, 2, 3, -3, 0]


def test_q8_divides_before_the_scale_is_rounded():
    """The order shows: with the float16 scale some of these elements would fall to the other side."""
    x = spread(64, 960, seed=9) * 2.0**-55
    t = q8.quantize(x)
    rounded = t.scales.float().repeat_interleave(32, -1)
    other = torch.round(x / rounded)
    assert (other != t.data.float())[rounded > 0].any()
    assert torch.equal(layouts.convert(t, "gguf").data, theirs(x, Kind.Q8_0))


def test_q8_past_the_reach_of_float16_is_nan():
    x = one_group(127 * 65504.0)
    assert q8.dequantize(q8.quantize(x))[0, 0].item() == 127 * 65504.0
    assert torch.isnan(q8.dequantize(q8.quantize(x * 1.01))).all()


def test_q8_of_numbers_too_small_to_invert_is_zero():
    t = q8.quantize(one_group(2.0**-140))
    assert not t.data.any()
    assert t.scales.item() == 0
