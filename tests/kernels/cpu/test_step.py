"""A step of the CPU kernels against the reference with the same quantisation points, through the C interface.

Bounds. Exact form (float32 activations and cache): both sides round sums of float32, in different orders; measured
2e-7 to 4e-7 a layer, bound 1e-6 a layer and for the head. With int8 activations a difference in the last bit of an
activation may move it to the next code (and a key or value to the next bfloat16), which changes a product by a
hundredth of one term: in a single layer few rows have that, and those without agree as the exact form does. Over layers
such rows spread, until both are two roundings of the same noise: either is away from the exact form by what rounding
costs, which is measured beside it, so they are apart by twice that at most. (The worst rows are those where the
router had two experts of almost the same logit.)
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from halfbyte.model.config import ModelConfig
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.weights import Weights
from halfbyte.plan.step import Step
from tests.kernels.cpu.native import Native, available, build, make_step, random_weights, reference_model

A_LAYER = 1e-6
QUANTISED = {"qkv": "q8", "o": "mxfp4", "gate_up": "mxfp4", "down": "mxfp4", "lm_head": "q8"}
SMALL = ModelConfig(
    layers=2, hidden=96, intermediate=64, experts=6, top_k=3, heads=8, kv_heads=2, head_dim=32, vocab=200, window=20
)


@pytest.fixture(scope="module", params=available())
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("step") / f"{request.param}.so", request.param)


def tables(sequences: int, blocks: int) -> dict[str, Tensor]:
    """Pages in no order, none shared; page 0 is scratch."""
    order = torch.randperm(2 * sequences * blocks, generator=torch.Generator().manual_seed(5)).int() + 1
    both = order.view(2, sequences, blocks)
    return {"sliding": both[0].contiguous(), "full": both[1].contiguous()}


def prompts(config: ModelConfig, lengths: list[int], seed: int = 0) -> list[list[int]]:
    gen = torch.Generator().manual_seed(seed)
    return [torch.randint(0, config.vocab, (n,), generator=gen).tolist() for n in lengths]


def steps(
    config: ModelConfig, rounds: list[tuple[int, ...]], page_size: int = 64, seed: int = 0
) -> tuple[list[Step], int]:
    """Steps that feed sequences by so many tokens each, and how many pages they need."""
    totals = [sum(r[i] for r in rounds) for i in range(len(rounds[0]))]
    tokens = prompts(config, totals, seed)
    pages = tables(len(totals), -(-max(totals) // page_size))
    at, made = [0] * len(totals), []
    for lengths in rounds:
        used = [i for i, n in enumerate(lengths) if n]
        parts = [(tokens[i][at[i] : at[i] + lengths[i]], at[i]) for i in used]
        made.append(make_step(parts, {k: t[used] for k, t in pages.items()}))
        at = [a + n for a, n in zip(at, lengths)]
    return made, 1 + 2 * pages["full"].numel()


def errors(got: Tensor, want: Tensor) -> Tensor:
    """Of each row, beside its size."""
    assert got.isfinite().all()
    assert want.isfinite().all()
    return (got - want).norm(dim=-1) / want.norm(dim=-1)


def run_both(
    library: ctypes.CDLL, model: GptOss, made: list[Step], pages: int, *, threads: int = 2, most_rows: int = 64
) -> list[tuple[Tensor, Tensor]]:
    pool = model.allocate_kv(pages)
    mine = pool.clone()
    out = []
    with Native(library, model, threads=threads, most_rows=most_rows, int8=model.spec.activation == "int8") as native:
        for step in made:
            result, want = native.run(step, mine), model.forward(step)
            for row, best in enumerate(result.best):
                assert result.logits[row, best] == result.logits[row].max() == result.best_logit[row]
                assert not (result.logits[row, :best] >= result.logits[row, best]).any()
            out.append((result.logits, want))
    return out


SHAPES = {
    "plain": SMALL,
    "head 64, one kv head": SMALL.with_(hidden=64, heads=3, kv_heads=1, head_dim=64),
    "every head its own": SMALL.with_(heads=4, kv_heads=4, head_dim=16),
    "odd sizes": SMALL.with_(
        hidden=90, intermediate=37, heads=10, kv_heads=2, head_dim=6, vocab=211, experts=5, top_k=5
    ),
    "head 80": SMALL.with_(hidden=40, heads=2, kv_heads=1, head_dim=80, window=1),
    "one expert": SMALL.with_(experts=1, top_k=1),
    "all full": SMALL.with_(layer_kinds=("full", "full")),
    "all sliding": SMALL.with_(layer_kinds=("sliding", "sliding"), window=7),
}  # fmt: skip
RAGGED = [(70, 3, 1), (1, 1, 0), (1, 130, 1), (2, 1, 40)]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kinds", [{}, {**QUANTISED, "embed": "f16"}, {"qkv": "f32", "o": "f16", "embed": "f32"}])
def test_exact_form(library: ctypes.CDLL, name: str, kinds: dict[str, str]) -> None:
    config = SHAPES[name]
    made, pages = steps(config, RAGGED)
    model = reference_model(random_weights(config, kinds, 1), activation="auto", kv_dtype="auto")
    for got, want in run_both(library, model, made, pages):
        assert errors(got, want).max() < A_LAYER * (config.layers + 1)


@pytest.mark.parametrize("kv_dtype", ["auto", "bf16", "fp8"])
@pytest.mark.parametrize("name", ["plain", "head 64, one kv head", "odd sizes"])
def test_int8_in_one_layer(library: ctypes.CDLL, name: str, kv_dtype: str) -> None:
    config = SHAPES[name].with_(layers=1, layer_kinds=("sliding",))
    made, pages = steps(config, RAGGED)
    weights = random_weights(config, QUANTISED, 2)
    model = reference_model(weights, kv_dtype=kv_dtype)
    noise = torch.cat(_noise(weights, made, pages))
    error = torch.cat([errors(got, want) for got, want in run_both(library, model, made, pages)])
    assert (error < 2 * A_LAYER).float().mean() > 0.9, "few rows have a code that moved"
    assert error.mean() < noise.mean() / 10
    assert error.max() < 2 * noise.max()


def _noise(weights: Weights, made: list[Step], pages: int) -> list[Tensor]:
    """What rounding activations and cache costs the reference: its rows with and without, beside each other."""
    out = []
    for gates in ({}, {"activation": "auto", "kv_dtype": "auto"}):
        model = reference_model(weights, **gates)
        model.allocate_kv(pages)
        out.append([model.forward(step) for step in made])
    return [errors(a, b) for a, b in zip(*out)]


@pytest.mark.parametrize("kinds", [QUANTISED, {"gate_up": "mxfp4", "down": "mxfp4"}])
def test_int8_in_many_layers(library: ctypes.CDLL, kinds: dict[str, str]) -> None:
    config = SMALL.with_(layers=6, layer_kinds=())
    made, pages = steps(config, RAGGED)
    weights = random_weights(config, kinds, 3)
    noise = torch.cat(_noise(weights, made, pages))
    both = run_both(library, reference_model(weights), made, pages)
    error = torch.cat([errors(got, want) for got, want in both])
    assert error.mean() < noise.mean()
    assert error.max() < 2 * noise.max()
