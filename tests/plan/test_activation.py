"""Activations by regime: parsed once, chosen and bound for each regime, recorded as they ran."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from halfbyte.errors import GateError
from halfbyte.gates import Gates, Layers, PerRegime, parse
from halfbyte.model import synthetic
from halfbyte.model.config import NAMED, ModelConfig
from halfbyte.model.gpt_oss import CHECKPOINT_FORMATS, GptOss, choose, spec_of
from halfbyte.model.single_sequence import SingleSequence
from halfbyte.plan.phase import ARCHES
from tests.reference import reference

SMALL = ModelConfig(
    layers=2, hidden=128, intermediate=96, experts=8, top_k=4, heads=8, kv_heads=2, head_dim=32, vocab=512
)
MXFP4 = Layers("mxfp4", "mxfp4", "mxfp4", "mxfp4")


def test_parsing() -> None:
    gates = parse({"activation": "Prefill=FP8, decode=auto"}, env={})
    assert gates.activation == "prefill=fp8"
    assert [gates.activation_in(r) for r in ("decode", "batch", "prefill")] == ["auto", "auto", "fp8"]
    assert parse({"activation": "batch=auto"}, env={}).activation == "auto"
    assert parse({}, env={"VLLM_MXFP4_ACTIVATION": "prefill=mxfp8,batch=int8"}).activation == "batch=int8,prefill=mxfp8"
    assert Gates(activation="int8").activation_in("batch") == "int8"
    long = parse({"activation": "long=fp8"}, env={})
    assert [long.activation_in(r) for r in ("decode", "batch", "prefill", "long")] == ["auto", "auto", "auto", "fp8"]
    assert gates.activation_in("long") == "fp8"  # unless it is named
    other = parse({"activation": "prefill=fp8,long=auto"}, env={})
    assert (other.activation, other.activation_in("long")) == ("prefill=fp8,long=auto", "auto")
    assert parse({"activation": "long=fp8,prefill=fp8"}, env={}) == gates
    for wrong in ("prefill=fp9", "train=fp8", "prefill"):
        with pytest.raises(GateError):
            parse({"activation": wrong}, env={})


def test_a_spec_says_what_holds_where() -> None:
    spec = spec_of(NAMED["120b"], Gates(activation="prefill=fp8"), ARCHES["sm90"], CHECKPOINT_FORMATS)
    assert [spec.at(r).activation for r in ("decode", "batch", "prefill")] == ["bf16", "bf16", "fp8"]
    plain = spec_of(NAMED["120b"], Gates(activation="fp8"), ARCHES["sm90"], CHECKPOINT_FORMATS)
    assert plain.at("decode") is plain
    assert spec.at("prefill") == plain


def test_one_copy_of_the_weights_serves_both() -> None:
    """fp8 prefill beside the decode step, which takes bf16: both read tile16."""
    kernels = PerRegime(prefill="cuda")
    gates = Gates(layers=MXFP4, activation="prefill=fp8", moe_kernel=kernels, linear_kernel=kernels)
    found = choose(NAMED["120b"], gates, ARCHES["sm90"]).selection
    assert "cuda.prefill_layer_fp8" in found.chosen["prefill"]
    assert (
        found.chosen["decode"] == choose(NAMED["120b"], Gates(layers=MXFP4), ARCHES["sm90"]).selection.chosen["decode"]
    )


def test_long_prompts_take_fp8_and_shorter_ones_bf16() -> None:
    gates = Gates(layers=MXFP4, activation="long=fp8")
    choice = choose(NAMED["120b"], gates, ARCHES["sm90"])
    spec, found = choice.spec, choice.selection
    plain = choose(NAMED["120b"], Gates(layers=MXFP4), ARCHES["sm90"]).selection
    for regime in ("decode", "batch", "prefill"):
        assert found.chosen[regime] == plain.chosen[regime]
    assert plain.chosen["long"] == plain.chosen["prefill"]
    assert "cuda.prefill_layer_fp8" in found.chosen["long"]
    assert found.layouts == plain.layouts
    assert {spec.at(r).activation for r in ("decode", "batch", "prefill")} == {"bf16"}


@pytest.mark.exact
def test_the_rows_of_a_step_say_which() -> None:
    """Through the reference, with long prompts that begin at 100 rows."""
    weights = synthetic.make(SMALL, 3)
    tokens = torch.randint(0, weights.config.vocab, (120,), generator=torch.Generator().manual_seed(1)).tolist()

    def logits(activation: str, count: int) -> torch.Tensor:
        model = GptOss(weights, reference(activation=activation), page_size=16)
        model.plan.limits = replace(model.plan.limits, long=100)
        return SingleSequence(model, 128).feed(tokens[:count])

    assert torch.equal(logits("long=fp8", 120), logits("fp8", 120))
    assert torch.equal(logits("long=fp8", 99), logits("auto", 99))
    assert not torch.equal(logits("long=fp8", 100), logits("auto", 100))


@pytest.mark.exact
def test_steps_round_as_their_regime_says() -> None:
    """The same 70 tokens at once (prefill) and in steps of 8 (decode), through the reference."""
    weights = synthetic.make(SMALL, 3)
    tokens = torch.randint(0, weights.config.vocab, (70,), generator=torch.Generator().manual_seed(1)).tolist()

    def logits(activation: str, size: int) -> torch.Tensor:
        solo = SingleSequence(GptOss(weights, reference(activation=activation), page_size=16), 128)
        return torch.cat([solo.feed(tokens[i : i + size], all_logits=True) for i in range(0, 70, size)])

    assert torch.equal(logits("prefill=int8", 70), logits("int8", 70))
    assert torch.equal(logits("prefill=int8", 8), logits("auto", 8))
    assert not torch.equal(logits("prefill=int8", 70), logits("auto", 70))


def test_the_record_says_which() -> None:
    weights = synthetic.make(SMALL, 3)
    model = GptOss(weights, reference(activation="prefill=int8"), page_size=16)
    solo = SingleSequence(model, 128)
    solo.feed(list(range(70)))
    solo.feed([5])
    assert {r.activation for r in model.plan.record.runs("prefill")} == {"int8"}
    assert {r.activation for r in model.plan.record.runs("decode")} == {"f32"}
