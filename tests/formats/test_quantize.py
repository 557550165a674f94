"""The four formats as a caller sees them: shapes, padding, special values, error, chunks, and no mixing."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from halfbyte import formats
from halfbyte.errors import FormatError
from halfbyte.formats import FORMATS, blocks, bytes_for, dequantize, layouts, mxfp4, mxfp8, q8, quantize

ALL = [(name, rule) for name, spec in FORMATS.items() for rule in spec.rules]
# the largest error of one element, as a share of the largest magnitude of its group (see docs/numerics.md)
WORST = {"mxfp4": 1 / 4, "mxfp8": 1 / 8, "q8": 0.0045}


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, NaN included."""
    return torch.equal(torch.isnan(a), torch.isnan(b)) and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


def test_the_exports_are_these():
    assert set(formats.__all__) == {
        "FORMATS", "LAYOUTS", "DenseTiles", "FormatName", "FormatSpec", "MXTensor", "bytes_for", "convert",
        "dequantize", "format_spec", "quantize", "quantize_weight",
    }  # fmt: skip
    assert all(hasattr(formats, name) for name in formats.__all__)


def test_the_registry_has_the_sizes_of_the_formats():
    assert {name: (s.group, s.bits_per_weight) for name, s in FORMATS.items()} == {
        "mxfp4": (32, 4.25),
        "mxfp8": (32, 8.25),
        "q8": (32, 8.5),
    }
    for name, spec in FORMATS.items():
        assert bytes_for((3, 5, 2880), name) == 3 * 5 * 2880 * spec.bits_per_weight / 8


@pytest.mark.parametrize(("name", "rule"), ALL)
@pytest.mark.parametrize("shape", [(64,), (4, 96), (2, 3, 64), (5, 1), (3, 33), (2, 2, 40), (1, 31), (7, 17)])
def test_shapes_padding_and_sizes(name, rule, shape):
    x = randn(*shape)
    t = quantize(x, name, rule)
    group = FORMATS[name].group
    padded = -(-shape[-1] // group) * group
    assert t.shape == shape
    assert t.layout == "plain"
    assert t.scales.shape == (*shape[:-1], padded // group)
    assert t.nbytes == bytes_for(shape, name)
    assert dequantize(t).shape == shape
    # padding is zeros, nothing else
    whole = quantize(torch.nn.functional.pad(x, (0, padded - shape[-1])), name, rule)
    assert torch.equal(t.data, whole.data)
    assert torch.equal(t.scales, whole.scales)
    assert torch.equal(dequantize(t), dequantize(whole)[..., : shape[-1]])


@pytest.mark.parametrize(("name", "rule"), ALL)
def test_no_element_is_further_off_than_the_format_allows(name, rule):
    x = randn(64, 256)
    t = quantize(x, name, rule)
    y = dequantize(t)
    group = FORMATS[name].group
    amax = x.view(64, -1, group).abs().amax(-1, keepdim=True)
    worst = ((x - y).view(64, -1, group).abs() / amax).max().item()
    bound = WORST[name] if rule == "ocp" else 2 * WORST[name]  # mse may sacrifice one element for the rest
    assert worst <= bound


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_mse_is_never_worse_than_ocp_in_any_group(name):
    x = randn(64, 256) * torch.exp(randn(64, 1, seed=3))
    group = FORMATS[name].group

    def error(rule):
        return (dequantize(quantize(x, name, rule)) - x).view(-1, group).square().sum(-1)

    ocp, mse = error("ocp"), error("mse")
    assert (mse <= ocp * (1 + 1e-5) + 1e-12).all()
    assert mse.sum() < ocp.sum()


@pytest.mark.parametrize(("name", "rule"), ALL)
def test_quantising_again_changes_nothing(name, rule):
    """A format keeps the numbers that it can hold."""
    y = dequantize(quantize(randn(16, 128), name))
    again = dequantize(quantize(y, name, rule))
    if name == "q8":
        torch.testing.assert_close(again, y, rtol=2e-3, atol=1e-4)
    else:
        assert torch.equal(again, y)


@pytest.mark.parametrize(("name", "rule"), ALL)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_spoils_its_group_and_no_other(name, rule, bad):
    x = randn(2, 96)
    group = FORMATS[name].group
    hit = x.clone()
    hit[0, group + 3] = bad
    hit[0, group + 4 : 2 * group] *= 0
    amax = x.abs().amax()
    hit[1, 5] = x[1, 5] = amax * 2
    clean = dequantize(quantize(x, name, rule))
    t = quantize(hit, name, rule)
    y = dequantize(t)
    assert torch.isnan(y[0, group : 2 * group]).all()
    assert not t.data.view(2, -1, t.data.shape[-1] * group // 96)[0, 1].any()
    rest = torch.ones_like(y, dtype=torch.bool)
    rest[0, group : 2 * group] = False
    assert torch.equal(y[rest], clean[rest])


@pytest.mark.parametrize(("name", "rule"), ALL)
def test_zeros(name, rule):
    x = torch.zeros(2, 64)
    t = quantize(x, name, rule)
    assert not t.data.any()
    assert not t.scales.any()
    assert torch.equal(dequantize(t), x)
    x[1, 40] = 3.0  # one group that is not zero, the others still are
    y = dequantize(quantize(x, name, rule))
    assert torch.equal(y[0], x[0])
    assert y[1, 40].item() == pytest.approx(3.0, rel=1e-3)


@pytest.mark.parametrize(("name", "rule"), ALL)
def test_subnormals_stay_finite(name, rule):
    x = torch.full((1, 32), 2.0**-149)
    x[0, 1] = -(2.0**-140)
    y = dequantize(quantize(x, name, rule))
    assert torch.isfinite(y).all()
    assert (y - x).abs().max() <= 2.0**-126


def test_mxfp4_keeps_what_lies_on_its_smallest_scale():
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([6.0, -0.5, 3.0, 1.5]) * 2.0**-127
    t = mxfp4.quantize(x)
    assert t.scales.item() == 0
    assert torch.equal(mxfp4.dequantize(t), x)


@pytest.mark.parametrize(("name", "rule"), [pair for pair in ALL if pair[0] != "q8"])
def test_the_largest_float32_stays_finite(name, rule):
    """`mse` too: the scale that fits best would read back as 2^128."""
    x = torch.full((1, 32), torch.finfo(torch.float32).max)
    y = dequantize(quantize(x, name, rule))
    assert torch.isfinite(y).all()
    assert ((x - y) / x).max() <= 0.25


@pytest.mark.parametrize(("name", "rule"), ALL)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 64), (0, 3, 33), (2, 0, 32)])
def test_empty(name, rule, shape):
    t = quantize(torch.empty(shape), name, rule)
    assert t.shape == shape
    assert dequantize(t).shape == shape
    assert t.nbytes == bytes_for(shape, name)


@pytest.mark.parametrize(("name", "rule"), ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_floating_type_goes_in_and_out(name, rule, dtype):
    x = randn(4, 80).to(dtype)
    t = quantize(x, name, rule)
    u = quantize(x.float(), name, rule)
    assert torch.equal(t.data, u.data)
    y = dequantize(t, dtype)
    assert y.dtype == dtype
    assert torch.equal(y, dequantize(t).to(dtype))


@pytest.mark.parametrize(("name", "rule"), ALL)
def test_strides_do_not_matter(name, rule):
    x = randn(96, 10).T
    assert not x.is_contiguous()
    assert torch.equal(quantize(x, name, rule).data, quantize(x.contiguous(), name, rule).data)


@pytest.mark.parametrize(("name", "rule"), ALL)
@pytest.mark.parametrize("k", [96, 40])
def test_the_size_of_a_chunk_does_not_show(name, rule, k, monkeypatch):
    x = randn(13, k)
    whole = quantize(x, name, rule)
    expected = dequantize(whole)
    monkeypatch.setattr(blocks, "chunk_elements", lambda device: 64)
    parts = quantize(x, name, rule)
    assert torch.equal(parts.data, whole.data)
    assert torch.equal(parts.scales, whole.scales)
    assert torch.equal(dequantize(parts), expected)


class LargestTensor(TorchDispatchMode):
    """Remembers the size of every new tensor, largest first."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.sizes.append(out.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("name", list(FORMATS))
def test_temporaries_stay_small_beside_the_tensor(name):
    x = torch.zeros(2048, 4096, dtype=torch.bfloat16)  # 16 MiB
    with LargestTensor() as seen:
        t = quantize(x, name)
        packed = layouts.convert(t, "tile16" if name == "mxfp4" else "plain")
    results = {t.data.nbytes, packed.data.nbytes}
    assert seen.sizes
    assert max(size for size in seen.sizes if size not in results) <= 4 << 20


# Never mixed -------------------------------------------------------------------------------------------------------


def test_each_format_reads_its_own_alone():
    tensors = {name: quantize(randn(4, 64), name) for name in FORMATS}
    modules = {"mxfp4": mxfp4, "mxfp8": mxfp8, "q8": q8}
    for mine, module in modules.items():
        for theirs, t in tensors.items():
            if mine != theirs:
                with pytest.raises(FormatError, match="never mixed"):
                    module.dequantize(t)


def test_relabelling_is_impossible():
    tensors = {name: quantize(randn(4, 64), name) for name in FORMATS}
    for mine, t in tensors.items():
        for theirs in FORMATS:
            if mine != theirs:
                with pytest.raises(FormatError):
                    replace(t, format=theirs)


def test_mxfp8_has_no_place_in_an_mxfp4_layout():
    t = quantize(randn(16, 64), "mxfp8")
    for layout, spec in layouts.LAYOUTS.items():
        if "mxfp8" not in spec.formats:
            with pytest.raises(FormatError, match="not mxfp8"):
                layouts.convert(t, layout)
    with pytest.raises(FormatError, match="not mxfp8"):
        layouts.to_checkpoint(t)
    with pytest.raises(FormatError, match="agree in format"):
        layouts.interleave(t, quantize(randn(16, 64), "mxfp4"))


# Refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(FORMATS))
def test_wrong_inputs_are_refused_in_one_sentence(name):
    for bad in (torch.ones(2, 32, dtype=torch.int32), torch.tensor(1.0)):
        with pytest.raises(FormatError, match="floating-point"):
            quantize(bad, name)
    with pytest.raises(FormatError, match="rule"):
        quantize(randn(2, 32), name, "best")


def test_unknown_formats_are_refused():
    for call in (lambda: quantize(randn(2, 32), "mxfp6"), lambda: bytes_for((2, 32), "int4")):
        with pytest.raises(FormatError, match="use one of mxfp4, mxfp8, q8"):
            call()
    with pytest.raises(FormatError, match="dimension"):
        bytes_for((), "mxfp4")


def test_q8_has_no_search_for_the_scale():
    with pytest.raises(FormatError, match="'mse'"):
        quantize(randn(2, 32), "q8", "mse")


@pytest.mark.parametrize(
    ("amax", "bound"), [(1.0, 0.006), (5e-4, 0.006), (1e-4, 0.006), (3e-5, 0.007), (1e-5, 0.01), (2e-6, 0.03)]
)
def test_q8_codes_make_up_for_a_scale_that_float16_rounds(amax, bound):
    """Scales below 6e-5 are subnormal: by `ocp` the error of the last three is 7 %, 24 % and everything."""
    x = randn(256, 32)
    x = x / x.abs().amax(-1, keepdim=True) * amax * (1 + 0.5 * randn(256, 1, seed=2).tanh())
    t = quantize(x, "q8", "rounded")
    assert (dequantize(t) - x).norm() / x.norm() < bound
    assert t.data.abs().max() <= 127


def test_q8_takes_a_larger_scale_where_the_largest_element_would_have_no_code():
    x = torch.zeros(1, 32)
    x[0, 0] = 127 * 1.4 * 2.0**-24  # float16 rounds a scale of 1.4 of its smallest numbers to one, and 178 is no code
    t = quantize(x, "q8", "rounded")
    assert t.scales.item() == 2.0**-23
    assert t.data[0, 0].item() == 89


def test_a_tensor_whose_parts_do_not_fit_is_refused():
    t = quantize(randn(4, 64), "mxfp4")
    for change in ({"data": t.data[:, :-1]}, {"scales": t.scales[:3]}, {"shape": (4, 96)}, {"shape": ()}):
        with pytest.raises(FormatError):
            replace(t, **change)
    with pytest.raises(FormatError, match="unknown number format"):
        replace(t, format="fp3")


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "rule"), ALL)
@pytest.mark.parametrize("k", [2880, 40])
def test_a_gpu_gives_the_same_bytes(name, rule, k):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    x = randn(64, k) * torch.exp(randn(64, 1, seed=5) * 8)
    x[3, 5], x[4, 6] = float("nan"), 2.0**-140
    here, there = quantize(x, name, rule), quantize(x.cuda(), name, rule)
    assert there.device.type == "cuda"
    assert torch.equal(there.data.cpu(), here.data)
    assert same(there.scales.cpu().float(), here.scales.float())
    assert same(dequantize(there).cpu(), dequantize(here))
    for layout, spec in layouts.LAYOUTS.items():
        if name in spec.formats:
            assert torch.equal(layouts.convert(there, layout).data.cpu(), layouts.convert(here, layout).data)
            assert same(dequantize(layouts.convert(there, layout)).cpu(), dequantize(here))
