"""Copies of a model that compute the same function, through Triton's plan: the plain model's tokens and logits.

A small random model, because the interpreter is slow; `tests/kernels/cuda/test_variants.py` has the trained one.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from bench.variants import SAME, Checkpoint
from halfbyte import gates
from halfbyte.model import checkpoint, synthetic
from halfbyte.model.gpt_oss import GptOss, choose
from halfbyte.plan.phase import ARCHES
from tests.kernels.triton.test_plan import ALL_TRITON, TINY, logits

CONFIG = TINY.with_(hidden=128, kv_heads=2)
TOKENS = torch.randint(0, CONFIG.vocab, (10,), generator=torch.Generator().manual_seed(0)).tolist()
CHUNKS = [9, 1]  # a batch, and the decode step behind it
PRESETS = ("exact", "balanced", "fast")
QUICK = ("residual x 2^20", "exact")
# Of the logits. A power of two changes no bit, and an order of sums hardly one. Where a matrix is quantised, values and
# keys of another size are rounded otherwise: q8 has float16 scales, and which columns folding raises depends on them.
BOUND, ROUNDED = 1e-6, 1e-2
RESIZED = ("values", "keys", "residual x 2^-4")


@functools.cache
def plain(root: Path) -> Path:
    synthetic.write_safetensors(CONFIG, 3, root / "plain")
    return root / "plain"


@functools.cache
def logits_of(folder: Path, preset: str, tokens: tuple[int, ...]) -> torch.Tensor:
    g = gates.parse(ALL_TRITON, env={}, preset=preset)
    source = checkpoint.open_model(folder)
    try:
        choice = choose(source.config, g, ARCHES["sm100"])
        weights = checkpoint.assemble(source, layer_formats=g.layer_formats, layouts=choice.selection.layouts)
    finally:
        source.close()
    return logits(GptOss(weights, g, choice=choice), tokens, CHUNKS)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


CASES = [(name, preset) for name in SAME for preset in PRESETS]


@pytest.mark.parametrize(
    ("name", "preset"), [case if case == QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
)
def test_the_same_function_has_the_same_tokens(root: Path, tmp_path: Path, name: str, preset: str) -> None:
    variant = Checkpoint.read(plain(root))
    SAME[name](variant)
    variant.write(tmp_path, plain(root))
    place = torch.arange(CONFIG.vocab)
    if variant.tokens is not None:
        place = torch.empty_like(place).scatter_(0, variant.tokens, place)
    got = logits_of(tmp_path, preset, tuple(place[torch.tensor(TOKENS)].tolist()))[:, place]
    want = logits_of(plain(root), preset, tuple(TOKENS))
    bound = ROUNDED if preset != "exact" and name.startswith(RESIZED) else BOUND
    assert float((got - want).norm() / want.norm()) <= bound
    assert got.argmax(-1).tolist() == want.argmax(-1).tolist()
