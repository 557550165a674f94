"""Rows of float16 in front of q8: the same function, with norms and values that float16 holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from halfbyte import formats
from halfbyte.formats import layouts
from halfbyte.formats.tensor import MXTensor
from halfbyte.gates import Gates
from halfbyte.kernels.cuda.device.host import Workspace
from halfbyte.kernels.cuda.prefill.products import Dense
from halfbyte.model import checkpoint, load, synthetic
from halfbyte.model.config import NAMED
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.half_rows import LARGEST, SMALLEST, HalfRowSource
from halfbyte.model.single_sequence import SingleSequence
from halfbyte.model.weights import Weights, split_parts
from halfbyte.plan.phase import ARCHES
from tests.kernels.cuda.emulator import Emulator, emulator_available
from tests.model.test_head_scales import with_octaves
from tests.reference import REFERENCE

SMALL = NAMED["small"]
Q8 = {"qkv": "q8", "o": "q8", "lm_head": "q8"}
TOKENS = torch.randint(0, SMALL.vocab, (40,), generator=torch.Generator().manual_seed(3)).tolist()
GATES = replace(REFERENCE, kv_dtype="f32")


def logits(weights: Weights) -> torch.Tensor:
    return SingleSequence(GptOss(weights, GATES), 64).feed(TOKENS, all_logits=True)


def sized(weights: Weights, layer_formats: dict[str, str] | None = None, half_rows: bool = True) -> Weights:
    return checkpoint.assemble(checkpoint.MemorySource(weights), layer_formats=layer_formats, half_rows=half_rows)


def file_with_norms(octaves: torch.Tensor) -> Weights:
    """As a file that is q8 already, whose norms are larger by one power of two for each group of 32 columns."""
    weights = sized(synthetic.make(SMALL, 0), Q8, half_rows=False)
    factor = octaves.float().exp2().repeat_interleave(32)

    def divided(m: Any) -> MXTensor:
        return replace(m, scales=(m.scales.float() / octaves.float().exp2()).half())

    layers = [replace(w, attn_norm=w.attn_norm * factor, qkv=divided(w.qkv)) for w in weights.layers]
    return replace(
        weights, layers=layers, final_norm=weights.final_norm * factor, lm_head=divided(weights.lm_head),
        folded_norm=None,
    )  # fmt: skip


@pytest.mark.exact
@pytest.mark.parametrize(("octaves", "qkv"), [(-14, "checkpoint"), (14, "q8"), (14, "mxfp4")])
def test_values_of_any_size_are_rows_of_float16_in_front_of_o(octaves: int, qkv: str) -> None:
    weights = with_octaves(synthetic.make(SMALL, 0), 0, octaves)
    form = {"qkv": qkv, "o": "q8"}
    before, after = (sized(weights, form, half_rows=half) for half in (False, True))
    sizes = []
    for model in (before, after):
        source = HalfRowSource(checkpoint.MemorySource(model))
        sizes.append([size for i in range(SMALL.layers) for size in value_sizes(source, i)])
    assert min(sizes[0]) > LARGEST or max(sizes[0]) < SMALLEST
    assert SMALLEST <= min(sizes[1]) <= max(sizes[1]) <= LARGEST
    assert torch.equal(logits(after), logits(before))


def value_sizes(source: HalfRowSource, layer: int) -> list[float]:
    parts, bias = (split_parts(SMALL, role, source.inner.parts(layer, role)) for role in ("qkv", "qkv_bias"))
    return source.sizes(parts[2], bias[2], source.norm_in_front(layer, "qkv"))


@pytest.mark.exact
def test_norms_of_any_size_are_rows_of_float16_in_front_of_qkv_and_lm_head() -> None:
    octaves = torch.arange(SMALL.hidden // 32) % 3 * 12 - 12  # of neighbouring groups: 2^-12, 1, 2^12
    weights = file_with_norms(octaves)
    after = sized(weights)
    for model, inside in ((weights, False), (after, True)):
        norms = (
            torch.stack([*(w.attn_norm for w in model.layers), model.final_norm]).float().abs().unflatten(1, (-1, 32))
        )
        assert (float(norms.amax()) <= LARGEST and float(norms.amax(-1).min()) >= SMALLEST) == inside
    assert torch.equal(logits(after), logits(weights))
    assert torch.equal(after.output_norm, weights.final_norm)
    assert torch.equal(after.output_head(), weights.output_head())  # what a draft head borrows


@pytest.mark.exact
def test_weights_past_float16_move_to_values_and_norms() -> None:
    """As where the residual stream is 2^20 times as large: o is, and the products of prompts would hold infinities."""
    weights = sized(synthetic.make(SMALL, 0), Q8, half_rows=False)

    def larger(m: Any) -> MXTensor:
        return replace(m, scales=(m.scales.float() * 2.0**21).half())

    weights.layers = [replace(layer, o=larger(layer.o)) for layer in weights.layers]
    weights.lm_head, weights.final_norm = larger(weights.lm_head), weights.final_norm * 2.0**-9
    after = sized(weights)
    for model, inside in ((weights, False), (after, True)):
        for matrix in (*(layer.o for layer in model.layers), model.lm_head):
            assert isinstance(matrix, MXTensor)
            assert (float(formats.dequantize(matrix, torch.float32).abs().max()) <= 2.0**15) == inside
    assert torch.equal(logits(after), logits(weights))
    assert torch.equal(after.output_head(), weights.output_head())


def test_sane_weights_are_handed_out_untouched() -> None:
    weights = sized(synthetic.make(SMALL, 0), Q8, half_rows=False)
    inner = checkpoint.MemorySource(weights)
    source = HalfRowSource(inner)
    for role in ("attn_norm", "qkv", "qkv_bias", "o"):
        (mine,), (theirs,) = source.parts(1, role), inner.parts(1, role)
        same = mine.scales is theirs.scales if isinstance(mine, MXTensor) else mine is theirs  # type: ignore[union-attr]
        assert same, role
    assert source.parts(None, "lm_head")[0].scales is weights.lm_head.scales  # type: ignore[union-attr]


@pytest.mark.exact
def test_a_scale_that_cannot_hold_its_factor_gets_a_nearer_one() -> None:
    """Values of 2^14 times their size need columns of o that are 2^10 larger; scales of 2^10 have 5 octaves left."""
    weights = sized(with_octaves(synthetic.make(SMALL, 0), 0, 14), {"o": "q8"}, half_rows=False)
    for layer in weights.layers:
        assert isinstance(layer.o, MXTensor)
        scales = layer.o.scales.float()
        layer.o = replace(layer.o, scales=(scales * 2.0 ** (10 - scales.max().log2().floor())).half())
    source = HalfRowSource(checkpoint.MemorySource(weights))
    assert set(source.shifts(0).values) == {-5}
    assert torch.equal(logits(sized(weights)), logits(weights))


@pytest.mark.skipif(emulator_available() is not None, reason="the emulator needs g++")
def test_the_products_of_prompts_hold_such_values() -> None:
    """o of a layer, in the emulator: attention's output of 2^17 is infinite in float16; after the move it is not."""
    g = torch.Generator().manual_seed(2)
    o = formats.quantize(torch.randn((64, 64), generator=g), "q8")
    attended = torch.randn((9, 64), generator=g).bfloat16()
    want = attended.float() @ formats.dequantize(o, torch.float32).T
    results = []
    for octaves, shift in ((17, 0), (17, -13)):  # as `shifts` moves them
        moved = replace(o, scales=(o.scales.float() * 2.0 ** (-octaves - shift)).half())
        layer = Dense(Workspace(Emulator(2), {}, torch.device("cpu")), layouts.convert(moved, "tile16"), None, "o")
        results.append(layer.run(attended * 2.0 ** (octaves + shift)))
    assert not torch.isfinite(results[0]).all()
    assert float((results[1] - want).norm() / want.norm()) < 1e-3


@pytest.mark.parametrize(("layers", "expected"), [("qkv=q8,o=q8,lm_head=q8", True), ("checkpoint", False)])
def test_a_gpu_loads_q8_so(monkeypatch: pytest.MonkeyPatch, layers: str, expected: bool) -> None:
    class Arguments(Exception):
        pass

    def read(*_: object, half_rows: bool, **__: object) -> None:
        raise Arguments(half_rows)

    monkeypatch.setattr(load, "arch_of", lambda _: ARCHES["sm121"])
    monkeypatch.setattr(load.tests, "ensure", lambda *_: None)
    monkeypatch.setattr(load, "Compilation", lambda *_: None)
    monkeypatch.setattr(load.checkpoint, "load", read)
    with pytest.raises(Arguments) as caught:
        load.load_model(load.resolve_model(None), Gates(layers=layers))  # type: ignore[arg-type]
    assert caught.value.args == (expected,)
