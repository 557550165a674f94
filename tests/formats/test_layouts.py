"""Every layout is lossless from and to every other, and lies where its kernel or file expects it."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.errors import FormatError
from halfbyte.formats import (
    FORMATS,
    LAYOUTS,
    DenseTiles,
    MXTensor,
    blocks,
    convert,
    dequantize,
    e2m1,
    layouts,
    quantize,
)
from halfbyte.formats.tensor import GEOMETRY

PAIRS = [(layout, name) for layout, spec in LAYOUTS.items() for name in spec.formats]


def random_tensor(name: str, shape: tuple[int, ...], seed: int = 0) -> MXTensor:
    """Every byte pattern, in the padding too: a layout must not care what the numbers are."""
    generator = torch.Generator().manual_seed(seed)
    geometry = GEOMETRY[name]
    groups = geometry.padded(shape[-1]) // geometry.group
    data = torch.randint(0, 256, (*shape[:-1], groups * geometry.group_bytes), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 256, (*shape[:-1], groups), generator=generator, dtype=torch.uint8)
    if geometry.scale_dtype == torch.float16:
        scales = (scales.float() / 7).half()
    return MXTensor(data.view(geometry.data_dtype), scales, shape, name)


def assert_same(a: MXTensor, b: MXTensor) -> None:
    assert (a.shape, a.format, a.layout) == (b.shape, b.format, b.layout)
    assert a.data.dtype == b.data.dtype
    assert torch.equal(a.data, b.data)
    assert a.scales.dtype == b.scales.dtype
    assert torch.equal(a.scales, b.scales)


@st.composite
def shapes(draw):
    lead = draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
    return (*lead, draw(st.integers(1, 40)), draw(st.integers(1, 300)))


@pytest.mark.parametrize(("layout", "name"), PAIRS)
@given(shape=shapes(), seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=25)
def test_round_trip(layout, name, shape, seed):
    t = random_tensor(name, shape, seed)
    there = convert(t, layout)
    assert there.layout == layout
    assert there.data.shape[: len(shape) - 2] == shape[:-2]  # leading dimensions stay
    assert_same(convert(there, "plain"), t)


@pytest.mark.parametrize("name", list(FORMATS))
def test_any_layout_to_any_other(name):
    t = random_tensor(name, (2, 17, 160))
    mine = [layout for layout, spec in LAYOUTS.items() if name in spec.formats]
    for a, b in itertools.product(mine, mine):
        assert_same(convert(convert(t, a), b), convert(t, b))


@pytest.mark.parametrize(("layout", "name"), PAIRS)
def test_dequantising_needs_no_conversion_by_the_caller(layout, name):
    t = quantize(torch.randn(3, 18, 100, generator=torch.Generator().manual_seed(0)), name)
    assert torch.equal(dequantize(convert(t, layout)), dequantize(t))
    assert torch.equal(dequantize(convert(t, layout).select(1)), dequantize(t)[1])


@pytest.mark.parametrize(("layout", "name"), PAIRS)
@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (2, 0, 32), (0, 4, 33)])
def test_empty(layout, name, shape):
    t = quantize(torch.empty(shape), name)
    assert_same(convert(convert(t, layout), "plain"), t)


@pytest.mark.parametrize(("layout", "name"), PAIRS)
def test_the_size_of_a_chunk_does_not_show(layout, name, monkeypatch):
    t = random_tensor(name, (2, 37, 200))
    whole = convert(t, layout)
    monkeypatch.setattr(blocks, "chunk_elements", lambda device: 1)
    assert_same(convert(t, layout), whole)
    assert_same(convert(whole, "plain"), t)


@pytest.mark.parametrize(("layout", "name"), [p for p in PAIRS if p[0] != "plain"])
def test_bytes_that_begin_at_an_odd_address(layout, name):
    """A memory-mapped file does not align tensors for us."""
    t = convert(random_tensor(name, (20, 96)), layout)
    storage = torch.empty(t.data.numel() + 1, dtype=torch.uint8)
    storage[1:] = t.data.reshape(-1)
    odd = replace(t, data=storage[1:].view(t.data.shape))
    assert_same(convert(odd, "plain"), convert(t, "plain"))


def test_refusals_are_one_sentence():
    t = quantize(torch.ones(4, 64), "q8")
    with pytest.raises(FormatError, match="unknown weight layout 'marlin': use one of plain, gguf"):
        convert(t, "marlin")
    with pytest.raises(FormatError, match="'w4a8_split' holds mxfp4, not q8"):
        convert(t, "w4a8_split")
    with pytest.raises(FormatError, match="'gguf' holds mxfp4 or q8, not mxfp8"):
        convert(quantize(torch.ones(4, 64), "mxfp8"), "gguf")
    with pytest.raises(FormatError, match="matrices"):
        convert(quantize(torch.ones(64), "mxfp4"), "tile16")
    with pytest.raises(FormatError, match="'rows16' holds matrices"):
        convert(quantize(torch.ones(64), "mxfp4"), "rows16")
    with pytest.raises(FormatError, match="no layout 'tile16' holds"):
        DenseTiles.of(torch.ones(4, 64, dtype=torch.float16), "tile16")


@pytest.mark.parametrize("layout", ["gguf", "tile16", "rows16", "w4a8_split"])
def test_damaged_data_is_refused(layout):
    t = convert(quantize(torch.ones(16, 128), "mxfp4"), layout)
    with pytest.raises(FormatError, match="must be uint8 of shape"):
        convert(replace(t, data=t.data[..., :-1]), "plain")
    with pytest.raises(FormatError, match="unknown weight layout"):
        convert(replace(t, layout="mystery"), "plain")


# Where the bytes lie ----------------------------------------------------------------------------------------------


def test_the_checkpoint_is_a_view():
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 255, (2, 6, 3), generator=generator, dtype=torch.uint8)
    t = layouts.from_checkpoint(blocks, scales)
    assert t.shape == (2, 6, 96)
    assert t.data.data_ptr() == blocks.data_ptr()
    # element 37 of a row: group 1, byte 2, high nibble
    value = e2m1.VALUES[blocks[1, 4, 1, 2].item() >> 4] * 2.0 ** (scales[1, 4, 1].item() - 127)
    assert dequantize(t)[1, 4, 37].item() == value
    back = layouts.to_checkpoint(t)
    assert torch.equal(back[0], blocks)
    assert torch.equal(back[1], scales)
    assert back[0].data_ptr() == blocks.data_ptr()
    assert torch.equal(layouts.to_checkpoint(convert(t, "tile16"))[0], blocks)


def test_checkpoint_shapes_are_checked():
    with pytest.raises(FormatError, match="K/32, 16"):
        layouts.from_checkpoint(torch.zeros(4, 2, 8, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8))
    with pytest.raises(FormatError, match="K/32, 16"):
        layouts.from_checkpoint(torch.zeros(4, 2, 16, dtype=torch.uint8), torch.zeros(4, 3, dtype=torch.uint8))
    with pytest.raises(FormatError, match=r"must be torch\.uint8"):
        layouts.from_checkpoint(torch.zeros(4, 2, 16, dtype=torch.int8), torch.zeros(4, 2, dtype=torch.uint8))
    with pytest.raises(FormatError, match="whole groups"):
        layouts.to_checkpoint(quantize(torch.ones(2, 40), "mxfp4"))


def test_gguf_mxfp4_by_hand():
    codes = torch.arange(32, dtype=torch.uint8)[None] % 16
    t = MXTensor(e2m1.pack(codes), torch.tensor([[123]], dtype=torch.uint8), (1, 32), "mxfp4")
    block = convert(t, "gguf").data
    assert block.tolist() == [[123] + [j | (j << 4) for j in range(16)]]
    assert convert(t, "gguf").scales.numel() == 0


def test_gguf_q8_by_hand():
    data = torch.arange(-16, 16, dtype=torch.int8)[None]
    t = MXTensor(data, torch.tensor([[1.5]], dtype=torch.float16), (1, 32), "q8")
    assert convert(t, "gguf").data.tolist() == [[0x00, 0x3E] + [v % 256 for v in range(-16, 16)]]


def test_from_gguf_checks_its_bytes():
    with pytest.raises(FormatError, match="whole blocks of 17 bytes"):
        layouts.from_gguf(torch.zeros(2, 18, dtype=torch.uint8), "mxfp4")
    with pytest.raises(FormatError, match="'gguf' holds"):
        layouts.from_gguf(torch.zeros(2, 34, dtype=torch.uint8), "mxfp8")


def test_w4a8_split_by_hand():
    t = random_tensor("mxfp4", (5, 256))
    there = convert(t, "w4a8_split")
    codes = e2m1.unpack(t.data)
    for tile, j in itertools.product(range(2), range(64)):
        byte = there.data[:, tile * 64 + j]
        assert torch.equal(byte & 15, codes[:, tile * 128 + j])
        assert torch.equal(byte >> 4, codes[:, tile * 128 + 64 + j])
    assert torch.equal(there.scales, t.scales)


def test_w4a8_split_pads_to_whole_tiles():
    t = random_tensor("mxfp4", (4, 2880))
    there = convert(t, "w4a8_split")
    assert there.data.shape == (4, 2944 // 2)
    assert there.scales.shape == (4, 2944 // 32)
    assert not there.scales[:, 90:].any()
    assert not (there.data[:, -64:] >> 4).any()  # k 2880..2943 are high nibbles of the last tile


@pytest.mark.parametrize(("name", "words", "scale"), [("mxfp4", 4, 1), ("q8", 8, 2)])
def test_rows16_by_hand(name, words, scale):
    """A word of a row lies beside the same word of the tile's other rows; scales follow, on a line of their own."""
    t = random_tensor(name, (2, 21, 70))  # 3 groups, a tile of five rows
    there = convert(t, "rows16")
    codes = 3 * words * 64
    assert there.data.shape == (2, 2, codes + 128 // (3 - scale))
    assert there.data.data_ptr() % 64 == 0
    plain = t.data.view(torch.uint8)
    for expert, row, group, word in itertools.product(range(2), (0, 7, 15, 16, 20), range(3), range(words)):
        tile, at = there.data[expert, row // 16], 4 * (16 * (group * words + word) + row % 16)
        assert torch.equal(tile[at : at + 4], plain[expert, row, 4 * (group * words + word) :][:4])
        at = codes + scale * (16 * group + row % 16)
        assert torch.equal(tile[at : at + scale], t.scales[expert, row, group : group + 1].view(torch.uint8))
    last = there.data[:, 1]
    assert not last[:, :codes].view(2, -1, 16, 4)[:, :, 5:].any()
    assert not last[:, codes + 3 * 16 * scale :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 33), (16, 64), (2, 37, 70), (0, 64), (3, 0), (2, 0, 32)])
def test_rows16_of_numbers_without_scales(dtype, shape):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    there = DenseTiles.of(w, "rows16")
    *_, n, k = shape
    assert there.data.shape[-2:] == (-(-n // 16), -(-k // 32) * 32 * 16 * dtype.itemsize)
    assert torch.equal(there.plain(), w)
    assert there.plain().dtype == dtype
    if w.numel():
        tiles = there.data.view(dtype).view(-1, -(-n // 16), -(-k // 32) * 32, 16)
        assert torch.equal(tiles[-1, (n - 1) // 16, k - 1, (n - 1) % 16], w.view(-1, n, k)[-1, n - 1, k - 1])
        assert not tiles[:, :, k:].any()


# Gate and up -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(FORMATS))
def test_gate_and_up_come_apart_and_together(name):
    t = quantize(torch.randn(3, 10, 64, generator=torch.Generator().manual_seed(0)), name)
    gate, up = layouts.deinterleave(t)
    assert gate.shape == up.shape == (3, 5, 64)
    assert torch.equal(dequantize(gate), dequantize(t)[:, 0::2])
    assert torch.equal(dequantize(up), dequantize(t)[:, 1::2])
    assert_same(layouts.interleave(gate, up), t)


def test_gate_and_up_refusals():
    t = quantize(torch.ones(6, 64), "mxfp4")
    with pytest.raises(FormatError, match="convert first"):
        layouts.deinterleave(convert(t, "gguf"))
    with pytest.raises(FormatError, match="pairs"):
        layouts.deinterleave(quantize(torch.ones(5, 64), "mxfp4"))
    with pytest.raises(FormatError, match="matrix"):
        layouts.deinterleave(quantize(torch.ones(64), "mxfp4"))
    with pytest.raises(FormatError, match="agree"):
        layouts.interleave(t, quantize(torch.ones(4, 64), "mxfp4"))


def test_select_needs_a_stack():
    with pytest.raises(FormatError, match="stack"):
        quantize(torch.ones(4, 64), "mxfp4").select(0)
