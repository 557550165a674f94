"""llama.cpp runs the GGUF files we write, and computes what our reference computes.

Each model is written twice: as llama.cpp users have it, and with the same numbers spelt out in float32. From the second
llama.cpp gives our reference's logits. From the first it also rounds activations to 8 bits, so the difference between
its two answers is the noise of that rounding; wherever a margin is beyond the noise the top token must be ours.

llama.cpp rounds the yarn ramp outwards where gpt-oss does not, so random models are made with `truncate`; the embedded
model is what it is, and is judged by its top tokens.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from halfbyte import formats
from halfbyte.evals.tasks import TASKS, problem
from halfbyte.formats.tensor import MXTensor
from halfbyte.harmony.render import render_prompt, render_training_example
from halfbyte.model import checkpoint, synthetic
from halfbyte.model.config import NAMED, Yarn
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.single_sequence import SingleSequence
from halfbyte.model.tokenizer import Tokenizer
from halfbyte.model.weights import Weights

llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python: pip install halfbyte[peers]")
pytestmark = pytest.mark.peers

TINY = Path(__file__).parents[2] / "models" / "tiny"
CONFIG = NAMED["small"].with_(layers=2, layer_kinds=(), yarn=Yarn(8.0, 256, truncate=True))
TOKENS = torch.randint(0, CONFIG.vocab, (512,), generator=torch.Generator().manual_seed(1)).tolist()
F32 = 0  # ggml's type number: keep the KV cache unrounded


@pytest.fixture(scope="module")
def small_model() -> Weights:
    return synthetic.make(CONFIG, 0)


def theirs(path: Path, tokens: list[int] = TOKENS) -> Tensor:
    llama = llama_cpp.Llama(
        str(path), n_ctx=len(tokens), n_batch=len(tokens), n_ubatch=len(tokens), n_threads=2, logits_all=True,
        flash_attn=False, type_k=F32, type_v=F32, verbose=False,
    )  # fmt: skip
    try:
        llama.eval(tokens)
        return torch.from_numpy(np.array(llama.scores[: len(tokens)], dtype=np.float32))
    finally:
        llama.close()


def ours(weights: Weights, tokens: list[int] = TOKENS) -> Tensor:
    return SingleSequence(GptOss(weights), len(tokens)).feed(tokens, all_logits=True)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("dense", ["bf16", "q8"])
def test_top_tokens_beyond_the_noise_of_8_bit_activations(small_model: Weights, tmp_path: Path, dense: str) -> None:
    packed, plain = tmp_path / "packed.gguf", tmp_path / "plain.gguf"
    checkpoint.save_gguf(small_model, packed, dense=dense)  # type: ignore[arg-type]
    weights = checkpoint.load(packed)
    embed = next(t for t in gguf.GGUFReader(packed).tensors if t.name == "token_embd.weight")
    weights.embed = torch.tensor(gguf.quants.dequantize(embed.data, embed.tensor_type))  # we would keep it in bf16
    checkpoint.save_gguf(spelt_out(weights), plain, dense="f32")
    expected, unrounded, rounded = ours(weights), theirs(plain), theirs(packed)

    print(f"dense {dense}: float32 against our reference {relative(unrounded, expected):.1e}")
    assert relative(unrounded, expected) < 1e-4

    # A margin is a difference of two logits: its noise is sqrt(2) that of one, and three deviations are beyond chance.
    noise = 3 * 2**0.5 * (rounded - unrounded).std(-1)
    top = expected.topk(2).values
    beyond = top[:, 0] - top[:, 1] > noise
    agree = rounded.argmax(-1) == expected.argmax(-1)
    print(
        f"8-bit activations move logits by {relative(rounded, unrounded):.1e}; {beyond.float().mean():.1%} of margins "
        f"are beyond that noise; top tokens agree at {agree.float().mean():.1%} of all positions"
    )
    assert beyond.float().mean() > 0.8
    assert bool(agree[beyond].all())


def test_the_embedded_model_on_real_text(tmp_path: Path) -> None:
    """A trained network has margins: with 8-bit activations and yarn's ramp rounded outwards, replies stay the same."""
    path = tmp_path / "tiny.gguf"
    weights, tok = checkpoint.load(TINY), Tokenizer.for_model(TINY)
    checkpoint.save_gguf(weights, path, tokenizer=TINY / "tokenizer.json")
    agree, moved = [], []
    for task in TASKS:
        if task == "needle":  # thousands of tokens
            continue
        p = problem(task, 6000, 0)
        whole, _ = render_training_example(tok, p.worked())
        reply = slice(len(render_prompt(tok, p.prompt())) - 1, len(whole) - 1)
        expected, got = ours(weights, whole[:-1])[reply], theirs(path, whole[:-1])[reply]
        agree.append(expected.argmax(-1) == got.argmax(-1))
        moved.append(relative(got, expected))
    share = torch.cat(agree).float().mean()
    print(f"{len(torch.cat(agree))} reply tokens of {len(agree)} tasks: top tokens agree at {share:.1%}, ", end="")
    print(f"logits differ by {max(moved):.1e} at most")
    assert share >= 0.99


def spelt_out(weights: Weights) -> Weights:
    """The same numbers in float32."""

    def dense(m: Tensor | MXTensor) -> Tensor:
        return formats.dequantize(m) if isinstance(m, MXTensor) else m

    layers = [
        dataclasses.replace(
            layer, qkv=dense(layer.qkv), o=dense(layer.o), gate_up=dense(layer.gate_up), down=dense(layer.down)
        )
        for layer in weights.layers
    ]
    return dataclasses.replace(weights, layers=layers, lm_head=dense(weights.lm_head))


def test_a_real_vocabulary_tokenises_alike(small_model: Weights, tmp_path: Path) -> None:
    tokenizer = TINY / "tokenizer.json"
    path = tmp_path / "m.gguf"
    synthetic.write_gguf(CONFIG.with_(vocab=2048), 0, path, tokenizer=tokenizer)
    text = "The 3 quick foxes' dens, 2024-11-15:\n\n  naïve café, \u4f60\u597d!  we'll  see\tthen."
    llama = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    try:
        got = llama.tokenize(text.encode(), add_bos=False, special=False)
    finally:
        llama.close()
    assert got == Tokenizer.from_file(tokenizer).encode(text)
