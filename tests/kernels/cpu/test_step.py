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
from halfbyte.plan.activations import Activations
from halfbyte.plan.step import Step
from tests.kernels.cpu.native import Native, random_weights, reference_model
from tests.kernels.cpu.step_cases import QUANTISED, RAGGED, SHAPES, SMALL, steps

A_LAYER = 1e-6


def errors(got: Tensor, want: Tensor) -> Tensor:
    """Of each row, beside its size."""
    assert got.isfinite().all()
    assert want.isfinite().all()
    return (got - want).norm(dim=-1) / want.norm(dim=-1)


def run_both(
    libraries: list[ctypes.CDLL], model: GptOss, made: list[Step], pages: int, *, threads: int = 2, most_rows: int = 64
) -> list[tuple[Tensor, Tensor]]:
    """Logits of every step and instruction set, with the reference's."""
    empty = model.allocate_kv(pages).clone()
    wanted = [model.forward(step) for step in made]
    out = []
    for library in libraries:
        pool = empty.clone()
        int8 = model.spec.activation == "int8"
        with Native(library, model, threads=threads, most_rows=most_rows, int8=int8) as native:
            for step, want in zip(made, wanted):
                result = native.run(step, pool)
                for row, best in enumerate(result.best):
                    assert result.logits[row, best] == result.logits[row].max() == result.best_logit[row]
                    assert not (result.logits[row, :best] >= result.logits[row, best]).any()
                out.append((result.logits, want))
    return out


def exact_model(config: ModelConfig, kinds: dict[str, str], **options: str) -> GptOss:
    return reference_model(random_weights(config, kinds, 1), activation="auto", kv_dtype="auto", **options)


BLOCKS, FLOATS = {**QUANTISED, "embed": "f16"}, {"qkv": "f32", "o": "f16", "embed": "f32"}


@pytest.mark.parametrize(("name", "kinds"), [*((n, BLOCKS) for n in SHAPES), ("plain", {}), ("odd sizes", FLOATS)])
def test_exact_form(step_libraries: list[ctypes.CDLL], name: str, kinds: dict[str, str]) -> None:
    config = SHAPES[name]
    made, pages = steps(config, RAGGED)
    for got, want in run_both(step_libraries, exact_model(config, kinds), made, pages):
        assert errors(got, want).max() < A_LAYER * (config.layers + 1)


@pytest.mark.parametrize("page_size", [1, 16, 48, 256])
def test_pages_of_other_sizes(step_libraries: list[ctypes.CDLL], page_size: int) -> None:
    made, pages = steps(SMALL, RAGGED, page_size)
    weights = random_weights(SMALL, {}, 1)
    model = reference_model(weights, activation="auto", kv_dtype="auto", page_size=page_size)
    for got, want in run_both(step_libraries, model, made, pages):
        assert errors(got, want).max() < A_LAYER * 3


def test_without_sinks(step_libraries: list[ctypes.CDLL]) -> None:
    made, pages = steps(SMALL, RAGGED)
    for got, want in run_both(step_libraries, exact_model(SMALL, {}, sinks="off"), made, pages):
        assert errors(got, want).max() < A_LAYER * 3


def test_long_context(step_libraries: list[ctypes.CDLL]) -> None:
    """Prompt and decode over several segments of keys, in one go and split over threads."""
    config = SMALL.with_(layers=2, layer_kinds=("full", "sliding"), window=300)
    made, pages = steps(config, [(700, 290), (1, 1), (3, 1)])
    for got, want in run_both(step_libraries, exact_model(config, {}), made, pages, threads=8, most_rows=128):
        assert errors(got, want).max() < A_LAYER * 3


@pytest.mark.parametrize("favourite", [0, 5])
def test_all_tokens_on_the_same_experts(step_libraries: list[ctypes.CDLL], favourite: int) -> None:
    """Other experts are empty; the favourite has more rows than one product takes."""
    config = SMALL.with_(layers=1, layer_kinds=("full",), top_k=1)
    bias = torch.zeros(config.experts)
    bias[favourite] = 50.0
    made, pages = steps(config, [(300,)])
    weights = random_weights(config, QUANTISED, 1, router_bias=bias)
    model = reference_model(weights, activation="auto", kv_dtype="auto")
    for got, want in run_both(step_libraries, model, made, pages, most_rows=300):
        assert errors(got, want).max() < A_LAYER * 2


def test_equal_router_logits_go_to_the_lower_expert(step_libraries: list[ctypes.CDLL]) -> None:
    config = SMALL.with_(layers=1, layer_kinds=("full",))
    weights = random_weights(config, {}, 1, router_bias=torch.tensor([0.0, 3.0, 3.0, 3.0, 3.0, 3.0]))
    weights.layers[0].router.zero_()
    made, pages = steps(config, [(5,)])
    model = reference_model(weights, activation="auto", kv_dtype="auto")
    for got, want in run_both(step_libraries, model, made, pages):
        assert errors(got, want).max() < A_LAYER * 2


REAL = {"gate_up": "mxfp4", "down": "mxfp4", "qkv": "q8", "o": "q8", "lm_head": "q8"}


@pytest.mark.parametrize(("hidden", "intermediate"), [(2880, 32), (32, 2880)])
def test_rows_of_2880(step_libraries: list[ctypes.CDLL], hidden: int, intermediate: int) -> None:
    config = ModelConfig(
        layers=1,
        hidden=hidden,
        intermediate=intermediate,
        experts=3,
        top_k=2,
        heads=8,
        kv_heads=1,
        head_dim=64,
        vocab=64,
    )
    made, pages = steps(config, [(3,), (1,)])
    for got, want in run_both(step_libraries, exact_model(config, REAL), made, pages):
        assert errors(got, want).max() < A_LAYER * 2


@pytest.mark.slow
def test_the_sizes_of_a_real_model(step_libraries: list[ctypes.CDLL]) -> None:
    """One layer of gpt-oss-20b with few experts."""
    config = ModelConfig(
        layers=1, hidden=2880, intermediate=2880, experts=3, top_k=2, heads=64, kv_heads=8, head_dim=64, vocab=64
    )
    made, pages = steps(config, [(3,), (1,)])
    for got, want in run_both(step_libraries, exact_model(config, REAL), made, pages):
        assert errors(got, want).max() < A_LAYER * 2


@pytest.mark.parametrize("kv_dtype", ["auto", "bf16", "fp8"])
@pytest.mark.parametrize("name", ["plain", "head 64, one kv head", "odd sizes"])
def test_int8_in_one_layer(step_libraries: list[ctypes.CDLL], name: str, kv_dtype: str) -> None:
    config = SHAPES[name].with_(layers=1, layer_kinds=("sliding",))
    made, pages = steps(config, RAGGED)
    weights = random_weights(config, QUANTISED, 2)
    model = reference_model(weights, kv_dtype=kv_dtype)
    noise = torch.cat(_noise(weights, made, pages))
    error = torch.cat([errors(got, want) for got, want in run_both(step_libraries, model, made, pages)])
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
def test_int8_in_many_layers(step_libraries: list[ctypes.CDLL], kinds: dict[str, str]) -> None:
    config = SMALL.with_(layers=6, layer_kinds=())
    made, pages = steps(config, RAGGED)
    weights = random_weights(config, kinds, 3)
    noise = torch.cat(_noise(weights, made, pages))
    both = run_both(step_libraries, reference_model(weights), made, pages)
    error = torch.cat([errors(got, want) for got, want in both])
    assert error.mean() < noise.mean()
    assert error.max() < 2 * noise.max()


def test_what_enters_the_layers_can_be_seen(step_libraries: list[ctypes.CDLL]) -> None:
    made, pages = steps(SMALL, [(70, 3)])
    model = exact_model(SMALL, {})
    mine = model.allocate_kv(pages).clone()
    kept = []
    acts = Activations()
    for bound in model.plan.walk(made[0], acts):
        if bound.phase.covers[-1] in ("embed", "moe"):
            kept.append(acts.complete_x())
    for library in step_libraries:
        with Native(library, model, most_rows=16, int8=False) as native:
            taps = native.run(made[0], mine, taps=(2, 0, 1)).taps
        for tap, layer in zip(taps, (2, 0, 1)):
            assert errors(tap, kept[layer]).max() < A_LAYER * layer + 1e-9
