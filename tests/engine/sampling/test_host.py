"""Sampling: every parameter against a plain computation, randomness fixed by seed and position, rejection sampling."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from engine_fakes import one_row

from halfbyte.engine.batch import Batch
from halfbyte.engine.request import SamplingParams
from halfbyte.engine.runner import StepResult
from halfbyte.engine.sampling.host import sample_on_host, sample_token
from halfbyte.engine.sampling.logprobs import logprob_of
from halfbyte.engine.sampling.row import RowSampler
from halfbyte.ops.sampling import distribution, sample

V = 50


def sampler(index: int = 0, seed: int = 1, stops: frozenset[int] = frozenset(), prompt: int = 0, **kw) -> RowSampler:
    return RowSampler(SamplingParams(**kw), index, prompt, seed, stops)


def run(
    logits: torch.Tensor, pick: RowSampler, position: int = 3, history: list[int] | None = None, mask=None
) -> StepResult:
    batch = one_row(pick, position, history or [])
    if mask is not None:
        bits = np.zeros(64, np.uint8)
        bits[mask] = 1
        batch.masks[0] = np.packbits(bits, bitorder="little").view(np.int32)
    return sample_on_host(logits[None], batch)


def noise(seed: int = 0) -> torch.Tensor:
    return torch.randn(V, generator=torch.Generator().manual_seed(seed)) * 2


def histogram(logits: torch.Tensor, count: int = 4000, **kw) -> np.ndarray:
    pick = sampler(**kw)
    seen = np.zeros(V)
    for position in range(count):
        seen[run(logits, pick, position).tokens[0]] += 1
    return seen / count


def test_greedy_takes_the_highest_and_the_lower_id_of_two() -> None:
    logits = noise()
    assert run(logits, sampler(temperature=0)).tokens == [int(logits.argmax())]
    logits[7] = logits[3] = 50.0
    assert run(logits, sampler(temperature=0)).tokens == [3]


def test_temperature_draws_from_the_softmax() -> None:
    logits = noise()
    for t in (0.5, 1.0, 2.0):
        expected = torch.softmax(logits.double() / t, -1).numpy()
        assert np.abs(histogram(logits, temperature=t) - expected).max() < 0.03


def test_filters_remove_exactly_what_they_say() -> None:
    logits = noise(3)
    p = torch.softmax(logits.double(), -1).numpy()
    order = np.argsort(-p, kind="stable")
    top3 = set(order[:3].tolist())
    assert set(np.nonzero(histogram(logits, 600, top_k=3))[0]) <= top3
    cumulative = np.cumsum(p[order])
    nucleus = set(order[: int(np.searchsorted(cumulative, 0.7)) + 1].tolist())
    assert set(np.nonzero(histogram(logits, 1500, top_p=0.7))[0]) <= nucleus
    likely = {i for i in range(V) if p[i] >= 0.2 * p.max()}
    assert set(np.nonzero(histogram(logits, 1500, min_p=0.2))[0]) <= likely
    within = {i for i, v in enumerate(logits.tolist()) if v >= logits.max() - 0.8 * float(np.std(logits.numpy()))}
    assert set(np.nonzero(histogram(logits, 1500, top_n_sigma=0.8))[0]) <= within


def test_the_same_seed_and_place_give_the_same_token_whatever_is_beside_it() -> None:
    rows = torch.stack([noise(i) for i in range(7)])
    samplers = [sampler(index=i, temperature=1.0) for i in range(7)]
    base = one_row(samplers[0], 0, [])
    batch = Batch(**{f: getattr(base, f) for f in Batch.__slots__})
    batch.samplers, batch.sample_positions = samplers, list(range(10, 17))
    together = sample_on_host(rows, batch).tokens
    alone = [run(rows[i], samplers[i], 10 + i).tokens[0] for i in range(7)]
    assert together == alone


def test_seeds_choices_and_places_are_independent_streams() -> None:
    values = [sampler(index=i, seed=s).uniform(p) for i in range(4) for s in range(4) for p in range(64)]
    assert len(set(values)) == len(values)
    assert abs(np.mean(values) - 0.5) < 0.03
    assert all(0.0 <= v < 1.0 for v in values)


def test_penalties() -> None:
    logits = torch.zeros(V)
    logits[4], logits[5], logits[6] = 3.0, 2.9, 2.8
    history = [4, 9, 5, 5]  # prompt [4, 9], generated [5, 5]
    pick = sampler(temperature=0, prompt=2, repetition_penalty=2.0)
    assert run(logits, pick, history=history).tokens == [6]  # 4 is in the prompt, 5 was generated
    pick = sampler(temperature=0, prompt=2, presence_penalty=1.0)
    assert run(logits, pick, history=history).tokens == [4]  # presence looks at generated tokens only
    logits[5] = 4.5
    assert run(logits, sampler(temperature=0, prompt=2, presence_penalty=1.0), history=history).tokens == [5]
    assert run(logits, sampler(temperature=0, prompt=2, frequency_penalty=1.0), history=history).tokens == [4]


def test_bias_mask_and_minimum_length() -> None:
    logits = noise()
    assert run(logits, sampler(temperature=0, logit_bias={9: 100.0})).tokens == [9]
    assert run(logits, sampler(temperature=0), mask=[11]).tokens == [11]
    stops = frozenset({8})
    pick = sampler(temperature=0, stops=stops, prompt=3, min_tokens=4, logit_bias={8: 100.0})
    assert run(logits, pick, position=6).tokens != [8]
    assert run(logits, pick, position=7).tokens == [8]


def test_a_row_that_allows_nothing_is_an_error_of_that_row() -> None:
    result = run(noise(), sampler(temperature=0, logit_bias={11: -math.inf}), mask=[11])
    assert "allow no token" in result.errors[0]
    assert "not numbers" in run(noise() * math.nan, sampler(temperature=0.7)).errors[0]
    assert "not numbers" in run(noise() * math.nan, sampler(temperature=0)).errors[0]


def test_logprobs_are_the_models_own() -> None:
    logits = noise()
    result = run(logits, sampler(temperature=0, logit_bias={9: 100.0}, logprobs=3))
    lp = torch.log_softmax(logits.double(), -1)
    assert result.logprobs[0].token == 9
    assert result.logprobs[0].logprob == pytest.approx(float(lp[9]))
    assert [t for t, _ in result.logprobs[0].top] == lp.argsort(descending=True)[:3].tolist()
    assert logprob_of(logits.numpy(), 4, 0).top == ()


@pytest.mark.parametrize("vocab", [50, 3000])
def test_drawing_without_a_full_sort_is_the_specification(vocab: int) -> None:
    """Against halfbyte.ops.sampling, over shapes flat and peaked, with ties, and filters that reach far or not."""
    rng = np.random.default_rng(0)
    for case in range(400):
        logits = (rng.standard_normal(vocab) * rng.choice([0.01, 1.0, 5.0])).astype(np.float32)
        if case % 3 == 0:
            logits = np.round(logits)  # many ties
        if case % 7 == 0:
            logits[rng.random(vocab) < 0.5] = -np.inf
        logits[0] = 0.5
        params = SamplingParams(
            temperature=float(rng.choice([0.3, 1.0, 3.0])), top_k=int(rng.choice([0, 1, 5, 70, 600])),
            top_p=float(rng.choice([1.0, 0.99, 0.5, 0.05])), min_p=float(rng.choice([0.0, 0.001, 0.5])),
            top_n_sigma=float(rng.choice([0.0, 0.7, 2.0])),
        )  # fmt: skip
        row = torch.from_numpy(logits)
        expected = distribution(row, params)
        for uniform in (0.0, 0.3, 0.77, 0.999999, float(rng.random())):
            assert sample_token(logits, params, uniform) == sample(*expected, uniform)


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (0.7, 8)])
def test_rejection_sampling_keeps_the_distribution(temperature: float, top_k: int) -> None:
    """Drafts from another distribution q: what comes out is distributed as p; sum(min(p, q)) of them are kept."""
    logits, other = noise(1), noise(2)
    probabilities, ids = distribution(logits, SamplingParams(temperature, top_k))
    p = np.zeros(V)
    p[ids.numpy()] = probabilities.numpy()
    q = torch.softmax(other.double(), -1).numpy()
    count, kept = 8_000, 0
    seen = np.zeros(V)
    pick = sampler(temperature=temperature, top_k=top_k)
    drafts = np.random.default_rng(0).choice(V, size=count, p=q)
    for position, draft in enumerate(drafts.tolist()):
        batch = one_row(pick, position, [])
        batch.proposals[0] = (draft, q)
        token = sample_on_host(logits[None], batch).tokens[0]
        seen[token] += 1
        kept += token == draft
    possible = p * count >= 5
    chi2 = float((((seen - p * count) ** 2) / np.where(p > 0, p * count, 1))[possible].sum())
    freedom = int(possible.sum()) - 1
    assert chi2 < freedom + 4.5 * math.sqrt(2 * freedom), f"chi2 {chi2:.1f} with {freedom} degrees of freedom"
    assert seen[p == 0].sum() == 0
    assert kept / count == pytest.approx(np.minimum(p, q).sum(), abs=0.02)
