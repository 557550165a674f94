"""Copies of the embedded model that compute the same function give its tokens, whatever their numbers are.

Every CPU plan takes part: the reference, the CPU kernels with float activations, and those with int8 activations.
Copies that compute another function are compared with Hugging Face in float32.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM

from bench.variants import ATTENTION_NORM, CHANGED, SAME, Checkpoint, add_loud_channels, write_variant
from halfbyte.gates import Gates
from halfbyte.model.load import EMBEDDED, load_model, resolve_model
from halfbyte.model.single_sequence import SingleSequence
from halfbyte.model.tokenizer import Tokenizer
from tests.reference import EXACT_FORM, REFERENCE

TEXT = (
    "<|start|>user<|message|>What is 17 + 25? Ada has 3 red apples and 12 green ones; Bob has none. "
    "How many apples are there? Then sort these words: pear, fig, apple, plum.<|end|><|start|>assistant"
)
# Relative error of all logits against the plain model's through the same plan. Moves by powers of two change no bit of
# a product. Permutations and a larger router change float32 sums, after which a value may round to another int8 code.
BOUND, REORDERED_INT8 = 1e-5, 0.05
PLANS = {"reference": replace(REFERENCE, kv_dtype="f32", activation="f32"), "cpu": EXACT_FORM, "cpu-int8": Gates()}


@functools.cache
def prompt() -> list[int]:
    return Tokenizer.for_model(EMBEDDED).encode(TEXT, allow_special=True)


def logits_of(folder: Path, plan: str, tokens: list[int], layers: str = "checkpoint") -> torch.Tensor:
    model = load_model(resolve_model(str(folder)), replace(PLANS[plan], layers=Gates(layers=layers).layers))  # type: ignore[arg-type]
    return SingleSequence(model, len(tokens)).feed(tokens, all_logits=True)


@functools.cache
def plain_logits(plan: str, layers: str = "checkpoint") -> torch.Tensor:
    return logits_of(EMBEDDED, plan, prompt(), layers)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", SAME)
def test_the_same_function_has_the_same_tokens(tmp_path: Path, name: str, plan: str) -> None:
    variant = write_variant(name, EMBEDDED, tmp_path)
    tokens = prompt()
    if variant.tokens is not None:
        place = torch.empty_like(variant.tokens).scatter_(0, variant.tokens, torch.arange(variant.tokens.numel()))
        tokens = place[torch.tensor(tokens)].tolist()
    logits = logits_of(tmp_path, plan, tokens)
    if variant.tokens is not None:
        logits = logits[:, place]
    expected = plain_logits(plan)
    bound = REORDERED_INT8 if plan == "cpu-int8" and name.endswith(("permuted", "float32")) else BOUND
    assert (logits - expected).norm() / expected.norm() <= bound
    assert logits.argmax(-1).tolist() == expected.argmax(-1).tolist()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("layers", ["qkv=q8,o=q8,lm_head=q8", "all"])
@pytest.mark.parametrize("name", ["attention spread by 3", "attention spread by 12", "head spread by 3"])
def test_quantised_matrices_do_not_depend_on_how_a_norm_and_its_matrix_share_a_factor(
    tmp_path: Path, name: str, layers: str, plan: str
) -> None:
    """A norm moves into the columns before they are quantised, so that every such variant has the same matrices."""
    write_variant(name, EMBEDDED, tmp_path)
    assert logits_of(tmp_path, plan, prompt(), layers).equal(plain_logits(plan, layers))


def test_a_loud_channel_that_its_norms_damp_costs_quantised_matrices_nothing(tmp_path: Path) -> None:
    """Folding such a norm alone would leave a column that its group's scale drowns, in front of the loudest channel."""
    model = Checkpoint.read(EMBEDDED)
    add_loud_channels(model, 1000.0)
    norms = [layer[ATTENTION_NORM] for i, layer in enumerate(model.layers()) if i > 1]
    for norm in (*norms, model.tensors["model.norm.weight"]):
        norm[[17, 101]] *= 2.0**-8
    model.write(tmp_path, EMBEDDED)
    exact = logits_of(tmp_path, "cpu", prompt())
    for plan in ("cpu", "cpu-int8"):
        got = logits_of(tmp_path, plan, prompt(), "qkv=q8,o=q8,lm_head=q8")
        error = ((got - exact).norm(dim=1) / exact.norm(dim=1)).median()
        assert error < 0.01, plan  # 0.003 and 0.005; with norms of 1 throughout it is 0.015 and 0.046


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.parametrize("plan", ["reference", "cpu"])
def test_another_function_is_that_of_hugging_face(tmp_path: Path, name: str, plan: str) -> None:
    variant = write_variant(name, EMBEDDED, tmp_path)
    got = logits_of(tmp_path, plan, prompt())
    expected = hugging_face_logits(variant, prompt())
    assert got.isfinite().all()
    assert (got - expected).norm() / expected.norm() <= 1e-4


def hugging_face_logits(model: Checkpoint, tokens: list[int]) -> torch.Tensor:
    config = GptOssConfig(**{k: v for k, v in model.config.items() if k != "quantization_config"})
    network = GptOssForCausalLM(config).float().eval()
    network.load_state_dict(dequantised(model))
    with torch.no_grad():
        return network(torch.tensor([tokens])).logits[0]


def dequantised(model: Checkpoint) -> dict[str, torch.Tensor]:
    """Float32 tensors with the names and orientation of transformers' modules."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    state = {name: t.float() for name, t in model.tensors.items() if not name.endswith(("_blocks", "_scales"))}
    for name, blocks in model.tensors.items():
        if name.endswith("_blocks"):
            base = name.removesuffix("_blocks")
            elements = torch.stack((values[(blocks & 15).long()], values[(blocks >> 4).long()]), -1).flatten(-2)
            scaled = torch.ldexp(elements, model.tensors[f"{base}_scales"].int()[..., None] - 127)
            state[base] = scaled.flatten(-2).transpose(1, 2)
    return state
