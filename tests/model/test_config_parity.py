"""Configurations as transformers reads them: the same folder gives the same logits there and here, or is refused here.

Every value that the network once ignored is here by name; then seeded mutations, several at a time. A configuration
that transformers itself cannot run has no truth to compare with, so it only must not be served: it is refused, or not
even looked at by transformers.
"""

from __future__ import annotations

import copy
import json
import logging
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import GptOssConfig, GptOssForCausalLM

from halfbyte.errors import CheckpointError
from halfbyte.model import config_json
from halfbyte.model.config import ModelConfig, Yarn
from halfbyte.model.config_json import HARMLESS, REFUSED, ROPE_HARMLESS, ROPE_REFUSED, ROPE_USED, USED, to_config_json
from halfbyte.model.load import load_model, resolve_model
from halfbyte.model.single_sequence import SingleSequence
from tests.reference import REFERENCE

CONFIG = ModelConfig(
    layers=2, hidden=48, intermediate=32, experts=6, top_k=2, heads=4, kv_heads=2, head_dim=16, vocab=64, window=12,
    max_context=256, yarn=Yarn(8.0, 32, 32.0, 1.0, False), eos_tokens=(1,), pad_token=0,
)  # fmt: skip
TOKENS = torch.randint(0, CONFIG.vocab, (40,), generator=torch.Generator().manual_seed(1))
GONE = "gone"  # the key is taken away
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small dense model as transformers saves it, with a config.json as OpenAI writes them."""
    raw = to_config_json(CONFIG)
    raw.pop("quantization_config")
    torch.manual_seed(3)
    model = GptOssForCausalLM(GptOssConfig(**copy.deepcopy(raw))).float()  # which writes into what it is given
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.uniform_(0.5, 1.5) if "norm" in name else p.normal_(0, 0.6)
    folder = tmp_path_factory.mktemp("parity") / "model"
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(raw | {"torch_dtype": "float32"}))
    return folder


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.utils.logging, "get_verbosity", lambda: logging.CRITICAL)
    transformers.utils.logging.set_verbosity(logging.CRITICAL)


def theirs(folder: Path) -> torch.Tensor | str:
    """Logits, or why there are none."""
    try:
        model = GptOssForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            logits: torch.Tensor = model(TOKENS[None]).logits[0]
        return logits
    except Exception as e:
        return f"{type(e).__name__}: {e}"


def ours(folder: Path) -> torch.Tensor | CheckpointError:
    try:
        model = load_model(resolve_model(str(folder)), REFERENCE, page_size=16)
    except CheckpointError as e:
        return e
    return SingleSequence(model, len(TOKENS)).feed(TOKENS.tolist(), all_logits=True)


def mutate(original: Path, folder: Path, changes: dict[str, Any]) -> None:
    """Keys as rope_scaling.factor reach into an object, which is made if it is not there."""
    if not folder.exists():
        shutil.copytree(original, folder)
    raw = json.loads((original / "config.json").read_text())
    for path, value in changes.items():
        *outer, key = path.split(".")
        at = raw
        for name in outer:
            at = at.setdefault(name, {}) if isinstance(at.get(name, {}), dict) else {}
        if value == GONE:
            at.pop(key, None)
        else:
            at[key] = value
    (folder / "config.json").write_text(json.dumps(raw))


def compare(original: Path, folder: Path, changes: dict[str, Any]) -> str:
    """What came of it: equal, or refused."""
    mutate(original, folder, changes)
    got = ours(folder)
    if isinstance(got, CheckpointError):
        assert "\n" not in str(got)
        return "refused"
    expected = theirs(folder)
    assert not isinstance(expected, str), f"{changes}: halfbyte serves what transformers cannot run: {expected}"
    error = float((got - expected).norm() / expected.norm())
    assert error <= TOLERANCE, f"{changes}: relative error {error:.2g}"
    return "equal"


YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "original_max_position_embeddings": 64}
NAMED: dict[str, tuple[dict[str, Any], str]] = {
    "unchanged": ({}, "equal"),
    "swiglu_alpha": ({"swiglu_alpha": 1.1}, "equal"),
    "swiglu_alpha below zero": ({"swiglu_alpha": -0.5}, "equal"),
    "swiglu_limit 0": ({"swiglu_limit": 0.0}, "equal"),
    "swiglu_limit 2.5": ({"swiglu_limit": 2.5}, "equal"),
    "swiglu_limit below zero": ({"swiglu_limit": -1.0}, "refused"),
    "swiglu_limit null": ({"swiglu_limit": None}, "refused"),
    "attention_factor": ({"rope_scaling.attention_factor": 1.9}, "equal"),
    "attention_factor alone": ({"rope_scaling.attention_factor": 1.9, "rope_scaling.factor": 1.0}, "equal"),
    "attention_factor below zero": ({"rope_scaling.attention_factor": -1.0}, "refused"),
    "mscale": ({"rope_scaling.mscale": 2.0, "rope_scaling.mscale_all_dim": 0.5}, "equal"),
    "mscale alone": ({"rope_scaling.mscale": 2.0}, "equal"),
    "mscale and attention_factor": (
        {"rope_scaling.mscale": 2.0, "rope_scaling.mscale_all_dim": 0.5, "rope_scaling.attention_factor": 1.2},
        "equal",
    ),
    "rope missing": ({"rope_scaling": GONE}, "equal"),
    "rope null": ({"rope_scaling": None}, "equal"),
    "rope empty": ({"rope_scaling": {}}, "equal"),
    "rope_parameters empty": ({"rope_scaling": GONE, "rope_parameters": {}}, "equal"),
    "rope_parameters alone": ({"rope_scaling": GONE, "rope_parameters": YARN}, "equal"),
    "rope default": ({"rope_scaling": {"rope_type": "default"}}, "equal"),
    "rope default with a factor": ({"rope_scaling": {"rope_type": "default", "factor": 4.0}}, "equal"),
    "rope without a type": ({"rope_scaling": {"factor": 4.0}}, "equal"),
    "rope type by its old name": ({"rope_scaling.rope_type": GONE, "rope_scaling.type": "yarn"}, "equal"),
    "rope linear": ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "refused"),
    "rope dynamic": ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "refused"),
    "rope by kind of layer": ({"rope_scaling": {"full_attention": YARN, "sliding_attention": YARN}}, "refused"),
    "rope of a part": ({"rope_scaling.partial_rotary_factor": 0.5}, "refused"),
    "rope of a part, outside": ({"partial_rotary_factor": 0.5}, "refused"),
    "factor missing": ({"rope_scaling.factor": GONE}, "refused"),
    "factor below one": ({"rope_scaling.factor": 0.5}, "equal"),
    "truncate missing": ({"rope_scaling.truncate": GONE}, "equal"),
    "truncate": ({"rope_scaling.truncate": True}, "equal"),
    "betas": ({"rope_scaling.beta_fast": 8.0, "rope_scaling.beta_slow": 2.0}, "equal"),
    "betas null": ({"rope_scaling.beta_fast": None, "rope_scaling.beta_slow": None}, "equal"),
    "original context missing": (
        {"rope_scaling.original_max_position_embeddings": GONE, "initial_context_length": GONE},
        "equal",
    ),
    "original context missing beside initial_context_length": (
        {"rope_scaling.original_max_position_embeddings": GONE},
        "refused",
    ),
    "original context outside": (
        {"rope_scaling.original_max_position_embeddings": GONE, "original_max_position_embeddings": 96},
        "equal",
    ),
    "original context twice": ({"original_max_position_embeddings": 96}, "refused"),
    "rope_theta": ({"rope_theta": 500.0}, "equal"),
    "rope_theta missing": ({"rope_theta": GONE}, "equal"),
    "rope_theta null": ({"rope_theta": None}, "refused"),
    "rope_theta contradicts rope_parameters": (
        {"rope_scaling": GONE, "rope_parameters": YARN, "rope_theta": 9.0},
        "refused",
    ),
    "rope_scaling contradicts rope_parameters": ({"rope_parameters": YARN}, "refused"),
    "top-k missing": ({"num_experts_per_tok": GONE, "experts_per_token": GONE}, "equal"),
    "top-k contradicts itself": ({"experts_per_token": 3}, "refused"),
    "top-k below zero": ({"num_experts_per_tok": -2, "experts_per_token": GONE}, "refused"),
    "experts contradict themselves": ({"num_experts": 3}, "refused"),
    "window": ({"sliding_window": 5}, "equal"),
    "window null": ({"sliding_window": None}, "refused"),
    "window missing": ({"sliding_window": GONE}, "equal"),
    "layer types missing": ({"layer_types": GONE}, "equal"),
    "layer types turned": ({"layer_types": ["full_attention", "sliding_attention"]}, "equal"),
    "layer types one kind": ({"layer_types": ["full_attention"] * 2}, "equal"),
    "rms_norm_eps": ({"rms_norm_eps": 0.3}, "equal"),
    "rms_norm_eps missing": ({"rms_norm_eps": GONE}, "equal"),
    "fewer layers": ({"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}, "refused"),
    "more layers": ({"num_hidden_layers": 3, "layer_types": GONE}, "refused"),
    "kv heads missing": ({"num_key_value_heads": GONE}, "refused"),
    "kv heads null": ({"num_key_value_heads": None}, "refused"),
    "another activation": ({"hidden_act": "gelu"}, "refused"),
    "tied embeddings": ({"tie_word_embeddings": True}, "refused"),
    "no biases": ({"attention_bias": False}, "refused"),
    "code of its own": ({"auto_map": {"AutoModel": "x.Y"}}, "refused"),
    "no method of quantising": ({"quantization_config": {}}, "refused"),
    "gptq": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "refused"),
    "bitsandbytes": ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "refused"),
    "mxfp4-pack-quantized": (
        {"quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}},
        "refused",
    ),
    "quark": ({"quantization_config": {"quant_method": "quark"}}, "refused"),
    "an end token past the vocabulary": ({"eos_token_id": 64}, "refused"),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_value_is_honoured_or_refused(original: Path, tmp_path: Path, name: str) -> None:
    changes, outcome = NAMED[name]
    assert compare(original, tmp_path / "model", changes) == outcome


VALUES: dict[str, list[Any]] = {
    "swiglu_alpha": [0.0, 0.7, 1.702, 3.0, "1", None],
    "swiglu_limit": [0.0, 1.5, 7.0, 1e30, None, "7"],
    "rms_norm_eps": [0.0, 1e-12, 1e-6, 0.5, -1.0, None],
    "rope_theta": [10000.0, 150000.0, 1e6, 1, 0, None, GONE],
    "rope_scaling": [None, {}, {"rope_type": "default"}, {"type": "yarn", "factor": 2.0}, [], "yarn", GONE],
    "rope_parameters": [None, {}, YARN, {"rope_type": "default", "rope_theta": 77.0}, GONE],
    "rope_scaling.factor": [0.25, 1.0, 2, 32.0, 0, -4.0, None, GONE],
    "rope_scaling.rope_type": ["yarn", "default", "llama3", "", None, GONE],
    "rope_scaling.original_max_position_embeddings": [1, 16, 256, 0, -1, 1.5, None, GONE],
    "rope_scaling.beta_fast": [1, 4.0, 64.0, 0, -1.0, None, GONE],
    "rope_scaling.beta_slow": [0.5, 2, 40.0, 0, None, GONE],
    "rope_scaling.truncate": [True, False, None, 1, "no", GONE],
    "rope_scaling.attention_factor": [0.5, 1, 2.0, 0.0, None, "x", GONE],
    "rope_scaling.mscale": [0.0, 0.707, 3.0, None, GONE],
    "rope_scaling.mscale_all_dim": [0.0, 1.0, -1.0, None, GONE],
    "rope_scaling.rope_theta": [5000.0, 150000.0, None, GONE],
    "rope_scaling.finetuned": [True],
    "original_max_position_embeddings": [32, 64, None, GONE],
    "initial_context_length": [32, 256, None, GONE],
    "max_position_embeddings": [64, 256, 8192, 0, None, GONE],
    "num_experts_per_tok": [1, 2, 6, 7, 0, None, GONE],
    "experts_per_token": [2, None, GONE],
    "sliding_window": [1, 3, 12, 1000, 0, -1, None, GONE],
    "layer_types": [["full_attention"] * 2, ["sliding_attention"] * 2, ["full_attention"], ["x", "y"], None, GONE],
    "head_dim": [16, 8, None, GONE],
    "num_attention_heads": [4, 8, 2, GONE],
    "num_key_value_heads": [2, 4, 1, None, GONE],
    "attention_dropout": [0.5],
    "output_router_logits": [True],
    "router_aux_loss_coef": [3.0],
    "bos_token_id": [7],
    "torch_dtype": ["bfloat16", "float16"],
    "hidden_act": ["silu", "relu", None],
    "partial_rotary_factor": [1.0, 0.5, None],
    "quantization_config": [None, {}, {"quant_method": "awq"}],
}


def property_cases(original: Path, tmp_path: Path, count: int, seed: int) -> dict[str, int]:
    draw = random.Random(seed)
    outcomes = {"equal": 0, "refused": 0}
    for _ in range(count):
        keys = draw.sample(sorted(VALUES), draw.choice([1, 1, 2, 2, 3]))
        changes = {key: draw.choice(VALUES[key]) for key in sorted(keys)}
        outcomes[compare(original, tmp_path / "model", changes)] += 1
    return outcomes


def test_mutated_configurations(original: Path, tmp_path: Path) -> None:
    outcomes = property_cases(original, tmp_path, 40, seed=20)
    assert min(outcomes.values()) >= 10, outcomes


@pytest.mark.slow
def test_many_mutated_configurations(original: Path, tmp_path: Path) -> None:
    outcomes = property_cases(original, tmp_path, 3000, seed=21)
    assert min(outcomes.values()) >= 500, outcomes


# ---- the three lists -----------------------------------------------------------------------------------------------


def test_a_key_is_in_one_list() -> None:
    assert not USED & HARMLESS
    assert not USED & REFUSED.keys()
    assert not HARMLESS & REFUSED.keys()
    assert not ROPE_USED & (ROPE_HARMLESS | ROPE_REFUSED.keys())


def test_every_key_that_transformers_writes_is_known(original: Path, tmp_path: Path) -> None:
    GptOssConfig.from_pretrained(original).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert not raw.keys() - USED - HARMLESS - REFUSED.keys()
    assert not raw["rope_parameters"].keys() - ROPE_USED - ROPE_HARMLESS - ROPE_REFUSED.keys()


def test_an_unknown_key_is_a_warning_and_said_once(
    original: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {"swiglu_gamma": 3.0, "rope_scaling.flavour": "mild"}
    with caplog.at_level(logging.WARNING, logger="halfbyte"):
        mutate(original, tmp_path / "model", changes)
        for _ in range(2):
            config_json.read_config_json(tmp_path / "model")
    assert caplog.text.count("'swiglu_gamma'") == 1
    assert caplog.text.count("'flavour'") == 1


def test_a_whole_number_is_a_number_too() -> None:
    """transformers refuses 0 where it wants 0.0."""
    raw = to_config_json(CONFIG)
    for key in ("swiglu_limit", "swiglu_alpha", "rms_norm_eps"):
        assert config_json.parse_config(raw | {key: 0}) == config_json.parse_config(raw | {key: 0.0})


def test_what_is_written_is_read_again() -> None:
    for config in (
        CONFIG,
        CONFIG.with_(yarn=Yarn(factor=1.0)),
        CONFIG.with_(yarn=Yarn(4.0, 64, attention_factor=0.8), swiglu_alpha=1.5, swiglu_limit=0.0, eos_tokens=()),
    ):
        assert config_json.parse_config(to_config_json(config)).config == config
