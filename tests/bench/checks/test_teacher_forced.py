"""Logits of a text against another model's: the same model holds, one that is off does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.checks.teacher_forced import compare_logits
from halfbyte.lab.plan_comparison import trace
from halfbyte.model import synthetic
from halfbyte.model.config import ModelConfig
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.single_sequence import SingleSequence
from tests.reference import REFERENCE

CONFIG = ModelConfig(
    layers=2, hidden=128, intermediate=128, experts=16, top_k=4, heads=8, kv_heads=2, head_dim=32, vocab=512,
    window=32, eos_tokens=(1,), pad_token=0,
)  # fmt: skip
TOKENS = [(37 * i) % 512 for i in range(80)]


@pytest.fixture(scope="module")
def model() -> GptOss:
    return GptOss(synthetic.make(CONFIG, 0), REFERENCE)


@pytest.mark.parametrize("chunks", [[80], [70, 8, 1, 1], [1] * 6])
def test_the_same_model_holds(model: GptOss, chunks: list[int]) -> None:
    verdict = compare_logits("test", model, GptOss(model.weights, REFERENCE), TOKENS, chunks)
    assert verdict.ok, verdict.wrong
    assert verdict.facts == {"clear": 1.0, "same": 1.0}


def test_one_that_is_off_does_not(model: GptOss) -> None:
    layers = list(model.weights.layers)
    layers[1] = replace(layers[1], mlp_norm=layers[1].mlp_norm * 1.5)
    wrong = GptOss(replace(model.weights, layers=layers), REFERENCE)
    assert not compare_logits("test", wrong, model, TOKENS, [80]).ok


def test_one_logit_of_many_is_found(model: GptOss) -> None:
    head = model.weights.lm_head.clone()
    head[300] *= 3
    wrong = GptOss(replace(model.weights, lm_head=head), REFERENCE)
    verdict = compare_logits("test", wrong, model, TOKENS, [80])
    assert any("worst logit" in w for w in verdict.wrong)


def test_a_tie_may_fall_either_way_and_a_wrong_expert_may_not(model: GptOss) -> None:
    def with_router(change: float, roll: int = 0) -> GptOss:
        layers = list(model.weights.layers)
        bias = layers[0].router_bias.float() + change * torch.tensor([1.0, -1.0]).repeat(CONFIG.experts // 2)
        layers[0] = replace(layers[0], router=layers[0].router.roll(roll, 0), router_bias=bias)
        return GptOss(replace(model.weights, layers=layers), REFERENCE)

    moved = with_router(1e-2)
    chosen = [
        trace(m, SingleSequence(m, len(TOKENS)).step(TOKENS, all_logits=True)).experts[0].sort(-1).values
        for m in (model, moved)
    ]
    assert 0 < int((chosen[0] != chosen[1]).any(-1).sum()) < len(TOKENS) // 2, "some rows, at ties"
    verdict = compare_logits("test", moved, model, TOKENS, [80])
    assert verdict.ok, verdict.wrong
    verdict = compare_logits("test", with_router(0.0, roll=1), model, TOKENS, [80])
    assert any("choice of experts" in w for w in verdict.wrong)
