"""llama.cpp runs the GGUF files we write, and computes what our reference computes.

Three steps, each of which would hide a mistake in the next: in float32 throughout the two engines agree closely; with
MXFP4 experts llama.cpp rounds activations to 8 bits, and agrees with our reference at that same quantisation point;
and the top token agrees with the unrounded reference wherever the margin is beyond the noise of those 8 bits.

llama.cpp rounds the yarn ramp outwards where gpt-oss does not, so the models here are made with `truncate`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from halfbyte import formats
from halfbyte.formats.tensor import MXTensor
from halfbyte.gates import Gates
from halfbyte.model import checkpoint, synthetic
from halfbyte.model.config import NAMED, Yarn
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.solo import Solo
from halfbyte.model.weights import Weights

llama_cpp = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python: pip install halfbyte[peers]")
pytestmark = pytest.mark.peers

CONFIG = NAMED["small"].with_(yarn=Yarn(8.0, 256, truncate=True))
TOKENS = torch.randint(0, CONFIG.vocab, (512,), generator=torch.Generator().manual_seed(1)).tolist()
F32 = 0  # ggml's type number: keep the KV cache unrounded


@pytest.fixture(scope="module")
def made() -> Weights:
    return synthetic.make(CONFIG, 0)


def theirs(path: Path) -> Tensor:
    llama = llama_cpp.Llama(
        str(path), n_ctx=len(TOKENS), n_batch=len(TOKENS), n_ubatch=len(TOKENS), n_threads=2, logits_all=True,
        flash_attn=False, type_k=F32, type_v=F32, verbose=False,
    )  # fmt: skip
    try:
        llama.eval(TOKENS)
        return torch.from_numpy(np.array(llama.scores[: len(TOKENS)], dtype=np.float32))
    finally:
        llama.close()


def ours(weights: Weights, activation: str = "f32") -> Tensor:
    return Solo(GptOss(weights, Gates(activation=activation)), len(TOKENS)).feed(TOKENS, all_logits=True)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def margins(logits: Tensor) -> Tensor:
    top = logits.topk(2).values
    return top[:, 0] - top[:, 1]


def test_float32_throughout(made: Weights, tmp_path: Path) -> None:
    layers = [
        dataclasses.replace(layer, gate_up=_dense(layer.gate_up), down=_dense(layer.down)) for layer in made.layers
    ]
    checkpoint.save_gguf(dataclasses.replace(made, layers=layers), tmp_path / "f32.gguf", dense="f32")
    got, expected = theirs(tmp_path / "f32.gguf"), ours(made)
    print(f"float32: relative difference {relative(got, expected):.1e}")
    assert relative(got, expected) < 1e-3
    clear = margins(expected) > 0.01
    assert clear.float().mean() > 0.95
    assert got.argmax(-1)[clear].equal(expected.argmax(-1)[clear])


@pytest.mark.parametrize("dense", ["f32", "q8"])
def test_top_tokens_beyond_the_noise_of_8_bit_activations(made: Weights, tmp_path: Path, dense: str) -> None:
    path = tmp_path / "mxfp4.gguf"
    checkpoint.save_gguf(made, path, dense=dense)  # type: ignore[arg-type]
    weights = checkpoint.load(path)
    got, exact, rounded = theirs(path), ours(weights), ours(weights, "int8")
    print(
        f"dense {dense}: llama.cpp against the same 8-bit activations {relative(got, rounded):.1e}, "
        f"against none {relative(got, exact):.1e}; those activations cost {relative(rounded, exact):.1e}"
    )
    assert relative(got, rounded) < 0.5 * relative(rounded, exact)
    # A margin is a difference of two logits: its noise is sqrt(2) that of one, and three deviations are beyond chance.
    noise = 3 * 2**0.5 * (rounded - exact).std(-1)
    beyond = margins(exact) > noise
    agree = got.argmax(-1) == exact.argmax(-1)
    print(f"{beyond.float().mean():.1%} of positions are beyond the noise; {agree.float().mean():.1%} agree over all")
    assert beyond.float().mean() > 0.8
    assert bool(agree[beyond].all())


def _dense(m: Tensor | MXTensor) -> Tensor:
    return formats.dequantize(m) if isinstance(m, MXTensor) else m
