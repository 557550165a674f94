"""A power of two for each kv head and side: the same function, with keys and values that FP8 holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from halfbyte.gates import Gates
from halfbyte.model import checkpoint, load, synthetic
from halfbyte.model.config import NAMED
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.head_scales import TARGET, HeadScaledSource
from halfbyte.model.single_sequence import SingleSequence
from halfbyte.model.weights import Weights
from tests.reference import REFERENCE

pytestmark = pytest.mark.exact  # powers of two, and the reference's own order of sums

SMALL = NAMED["small"]
TOKENS = torch.randint(0, SMALL.vocab, (40,), generator=torch.Generator().manual_seed(3)).tolist()


def plain_model() -> Weights:
    return synthetic.make(SMALL, 0)


def with_octaves(weights: Weights, keys: int, values: int) -> Weights:
    """The same function with keys and values of another size."""
    q, kv = SMALL.q_dim, SMALL.kv_dim
    layers = []
    for layer in weights.layers:
        factors = torch.ones(SMALL.qkv_dim)
        factors[:q], factors[q : q + kv], factors[q + kv :] = 2.0**-keys, 2.0**keys, 2.0**values
        assert isinstance(layer.qkv, torch.Tensor)
        assert isinstance(layer.o, torch.Tensor)
        layers.append(
            replace(
                layer,
                qkv=(layer.qkv.float() * factors[:, None]).bfloat16(),
                qkv_bias=(layer.qkv_bias.float() * factors).bfloat16(),
                o=(layer.o.float() * 2.0**-values).bfloat16(),
            )
        )
    return replace(weights, layers=layers)


def logits(weights: Weights, gates: Gates) -> torch.Tensor:
    return SingleSequence(GptOss(weights, gates), 64).feed(TOKENS, all_logits=True)


def scaled(weights: Weights, layer_formats: dict[str, str] | None = None) -> Weights:
    return checkpoint.assemble(checkpoint.MemorySource(weights), layer_formats=layer_formats, scale_heads=True)


@pytest.mark.parametrize("layer_formats", [{}, {"qkv": "q8", "o": "q8"}, {"qkv": "mxfp4", "o": "mxfp4"}])
def test_the_function_stays_the_same_to_the_bit(layer_formats: dict[str, str]) -> None:
    weights = plain_model()
    before = checkpoint.assemble(checkpoint.MemorySource(weights), layer_formats=layer_formats)
    gates = replace(REFERENCE, kv_dtype="f32")
    assert torch.equal(logits(scaled(weights, layer_formats), gates), logits(before, gates))


@pytest.mark.parametrize(("keys", "values"), [(8, -12), (-10, 12)])
def test_an_fp8_cache_does_not_depend_on_the_size_of_keys_and_values(keys: int, values: int) -> None:
    weights = plain_model()
    gates = replace(REFERENCE, kv_dtype="fp8")
    want = logits(weights, replace(REFERENCE, kv_dtype="f32"))
    moved = with_octaves(weights, keys, values)
    plain, ours = ((logits(w, gates) - want).norm() / want.norm() for w in (moved, scaled(moved)))
    assert torch.equal(logits(scaled(moved), gates), logits(scaled(weights), gates))
    assert float(ours) < 0.5 * float(plain)


def test_every_head_has_the_size_that_fp8_holds() -> None:
    source = HeadScaledSource(checkpoint.MemorySource(with_octaves(plain_model(), 9, -7)))
    again = HeadScaledSource(checkpoint.MemorySource(scaled(with_octaves(plain_model(), 9, -7))))
    for layer in range(SMALL.layers):
        assert any(source.shifts(layer).keys + source.shifts(layer).values)
        assert not any(again.shifts(layer).keys + again.shifts(layer).values)
    assert TARGET == 4


def test_denormal_scales_limit_the_shift_instead_of_losing_bits() -> None:
    weights = checkpoint.assemble(
        checkpoint.MemorySource(with_octaves(plain_model(), 0, -12)), layer_formats={"qkv": "q8", "o": "q8"}
    )
    gates = replace(REFERENCE, kv_dtype="f32")
    assert torch.equal(logits(scaled(weights), gates), logits(weights, gates))


def test_a_model_with_an_fp8_cache_is_loaded_so() -> None:
    name = load.resolve_model("random:small")
    plain, fp8 = (load.load_model(name, replace(REFERENCE, kv_dtype=kv)).weights for kv in ("bf16", "fp8"))
    assert not torch.equal(plain.layers[0].qkv_bias, fp8.layers[0].qkv_bias)
    ratio = fp8.layers[0].qkv_bias.float() / plain.layers[0].qkv_bias.float()
    assert set(torch.log2(ratio[plain.layers[0].qkv_bias != 0]).frac().tolist()) == {0.0}
