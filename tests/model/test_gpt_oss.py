"""The network against Hugging Face, and its independence from how a sequence is fed."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from halfbyte.gates import Gates
from halfbyte.model.config import ModelConfig, Yarn
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.single_sequence import SingleSequence, generate
from tests.reference import EXACT_FORM, REFERENCE, reference

_spec = importlib.util.spec_from_file_location("hf_oracle", Path(__file__).with_name("hf.py"))
hf = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hf)

PLANS = pytest.mark.parametrize("plan", [REFERENCE, EXACT_FORM], ids=["reference", "cpu"])
CONFIGS = {
    "wide": ModelConfig(
        layers=4, hidden=128, intermediate=96, experts=8, top_k=4, heads=8, kv_heads=2, head_dim=32, vocab=512,
        window=32, yarn=Yarn(8.0, 64, 32.0, 1.0, False), max_context=1024, eos_tokens=(1,), pad_token=0,
    ),
    "true-window": ModelConfig(
        layers=2, hidden=64, intermediate=160, experts=5, top_k=2, heads=4, kv_heads=4, head_dim=64, vocab=300,
        window=128, yarn=Yarn(32.0, 128, 32.0, 1.0, False), max_context=4096, eos_tokens=(1,), pad_token=0,
    ),
    "truncated-yarn": ModelConfig(
        layers=3, hidden=96, intermediate=64, experts=16, top_k=4, heads=6, kv_heads=3, head_dim=16, vocab=1000,
        window=16, rope_theta=10000.0, yarn=Yarn(4.0, 96, 16.0, 2.0, True), max_context=400,
        swiglu_limit=3.0, eos_tokens=(1,), pad_token=0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("mxfp4_experts", [False, True], ids=["float", "mxfp4"])
@pytest.mark.parametrize("name", CONFIGS)
@PLANS
def test_logits_equal_hugging_face(name: str, mxfp4_experts: bool, plan: Gates) -> None:
    config = CONFIGS[name]
    theirs = hf.hf_model(config, seed=1)
    model = GptOss(hf.our_weights(config, theirs, mxfp4_experts=mxfp4_experts), plan, page_size=16)
    length = min(3 * config.yarn.original_context, config.max_context - 1)
    assert length > 2 * config.window
    assert length > config.yarn.original_context
    tokens = torch.randint(0, config.vocab, (length,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
    got = SingleSequence(model, length).feed(tokens.tolist(), all_logits=True)
    error = (got - expected).norm() / expected.norm()
    print(f"{name} {length} tokens: relative error {error:.1e}")
    assert error <= 1e-5


@pytest.mark.parametrize("name", CONFIGS)
@PLANS
def test_greedy_tokens_equal_hugging_face(name: str, plan: Gates) -> None:
    config = CONFIGS[name]
    theirs = hf.hf_model(config, seed=3)
    model = GptOss(hf.our_weights(config, theirs), plan, page_size=16)
    prompt = torch.randint(2, config.vocab, (40,), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        expected = theirs.generate(
            prompt[None], max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0,
            attention_mask=torch.ones(1, 40, dtype=torch.long),
        )[0, 40:].tolist()  # fmt: skip
    assert len(set(expected)) > 8, "a constant output would prove nothing"
    assert list(generate(model, prompt.tolist(), 64, stop=())) == expected


@pytest.mark.exact
@pytest.mark.parametrize("plan", [REFERENCE, EXACT_FORM, Gates()], ids=["reference", "cpu", "cpu-int8"])
def test_logits_do_not_depend_on_chunking_or_page_size(plan: Gates) -> None:
    config = CONFIGS["wide"]
    weights = hf.our_weights(config, hf.hf_model(config, seed=5), mxfp4_experts=True)
    tokens = torch.randint(0, config.vocab, (150,), generator=torch.Generator().manual_seed(6)).tolist()
    results = []
    for page_size, chunks in ((16, [150]), (64, [1] * 150), (32, [7, 100, 33, 10]), (16, [64, 64, 22])):
        solo, out, at = SingleSequence(GptOss(weights, plan, page_size=page_size), 150), [], 0
        for n in chunks:
            out.append(solo.feed(tokens[at : at + n], all_logits=True))
            at += n
        results.append(torch.cat(out))
    for other in results[1:]:
        assert torch.equal(results[0], other), "bitwise, whatever the chunking"


@pytest.mark.exact
def test_sinks_off_changes_the_output_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    config = CONFIGS["wide"]
    weights = hf.our_weights(config, hf.hf_model(config, seed=7))
    tokens = list(range(50))
    quiet = SingleSequence(GptOss(weights, Gates(), page_size=16), 64).feed(tokens)
    assert not caplog.records
    off = SingleSequence(GptOss(weights, Gates(sinks="off"), page_size=16), 64).feed(tokens)
    assert "SINKS ARE OFF" in caplog.text
    assert (quiet - off).norm() / quiet.norm() > 0.01
    on = SingleSequence(GptOss(weights, Gates(sinks="on"), page_size=16), 64).feed(tokens)
    assert torch.equal(quiet, on)


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
@PLANS
def test_kv_formats_stay_close(kv_dtype: str, plan: Gates) -> None:
    config = CONFIGS["wide"]
    weights = hf.our_weights(config, hf.hf_model(config, seed=8))
    tokens = list(range(100))
    exact = SingleSequence(GptOss(weights, plan, page_size=16), 128).feed(tokens, all_logits=True)
    model = GptOss(weights, replace(plan, kv_dtype=kv_dtype), page_size=16)
    rounded = SingleSequence(model, 128).feed(tokens, all_logits=True)
    error = (exact - rounded).norm() / exact.norm()
    assert 0 < error < {"bf16": 0.02, "fp8": 0.2}[kv_dtype]


@pytest.mark.parametrize("activation", ["bf16", "int8", "fp8", "mxfp8", "mxfp4"])
def test_activation_formats_are_quantisation_points(activation: str) -> None:
    config = CONFIGS["wide"]
    weights = hf.our_weights(config, hf.hf_model(config, seed=9), mxfp4_experts=True)
    tokens = list(range(100))
    exact = SingleSequence(GptOss(weights, REFERENCE, page_size=16), 128).feed(tokens, all_logits=True)
    model = GptOss(weights, reference(activation=activation), page_size=16)
    rounded = SingleSequence(model, 128).feed(tokens, all_logits=True)
    error = (exact - rounded).norm() / exact.norm()
    print(f"{activation}: {error:.1e}")
    assert 0 < error < {"bf16": 0.02, "int8": 0.05, "fp8": 0.15, "mxfp8": 0.15, "mxfp4": 0.6}[activation]
