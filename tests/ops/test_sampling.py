"""Sampling by hand-made distributions."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from halfbyte.ops.sampling import distribution, greedy, penalise, sample
from halfbyte.ops.sampling_settings import SamplingSettings

LOGITS = torch.tensor([0.4, 0.1, 0.3, 0.2]).log()


def names(p: torch.Tensor, ids: torch.Tensor) -> dict[int, float]:
    return {int(i): round(float(x), 6) for i, x in zip(ids, p)}


def test_greedy_breaks_ties_to_the_lower_id() -> None:
    assert greedy(torch.tensor([[0.0, 2.0, 2.0], [3.0, -1.0, 3.0]])).tolist() == [1, 0]


def test_untouched() -> None:
    assert names(*distribution(LOGITS, SamplingSettings())) == {0: 0.4, 2: 0.3, 3: 0.2, 1: 0.1}


def test_temperature() -> None:
    hot = distribution(LOGITS, SamplingSettings(temperature=2.0))[0]
    root = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).sqrt()
    assert torch.allclose(hot, root / root.sum(), atol=1e-6)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p", "kept"),
    [
        (2, 1.0, 0.0, {0, 2}),
        (0, 0.4, 0.0, {0}),
        (0, 0.41, 0.0, {0, 2}),
        (0, 0.69, 0.0, {0, 2}),
        (0, 0.0, 0.0, {0}),
        (0, 1.0, 0.49, {0, 2, 3}),
        (0, 1.0, 1.0, {0}),
        (3, 0.8, 0.6, {0, 2}),
        (99, 1.0, 0.0, {0, 1, 2, 3}),
    ],
)
def test_filters(top_k: int, top_p: float, min_p: float, kept: set[int]) -> None:
    p, ids = distribution(LOGITS, SamplingSettings(1.0, top_k, top_p, min_p))
    assert set(ids.tolist()) == kept
    assert math.isclose(float(p.sum()), 1.0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("sigmas", [0.5, 1.0, 2.5])
def test_top_n_sigma_by_an_independent_formula(sigmas: float, temperature: float) -> None:
    """Statistics of Python's own, of the logits before temperature, which cannot change what is kept."""
    logits = torch.randn(200, generator=torch.Generator().manual_seed(1)) * 3
    numbers = logits.tolist()
    least = max(numbers) - sigmas * statistics.pstdev(numbers)
    kept = {i for i, v in enumerate(numbers) if v >= least}
    assert 1 < len(kept) < 200
    p, ids = distribution(logits, SamplingSettings(temperature, top_n_sigma=sigmas))
    assert set(ids.tolist()) == kept
    alone = torch.softmax(logits.double()[sorted(kept)] / temperature, -1)
    assert torch.allclose(p[ids.argsort()], alone)
    barred = torch.cat((logits, torch.full((300,), -math.inf)))
    assert set(distribution(barred, SamplingSettings(temperature, top_n_sigma=sigmas))[1].tolist()) == kept


def test_top_n_sigma_comes_before_the_other_filters() -> None:
    """Of ten equals and one above, top-p counts the mass of what is left."""
    logits = torch.tensor([1.0, *[0.0] * 10])
    assert distribution(logits, SamplingSettings(top_p=0.5))[1].shape[0] > 1
    assert distribution(logits, SamplingSettings(top_p=0.5, top_n_sigma=1.0))[1].tolist() == [0]
    assert distribution(torch.full((5,), 2.0), SamplingSettings(top_n_sigma=0.1))[1].shape[0] == 5


def test_draw_follows_the_uniform_number() -> None:
    p, ids = distribution(LOGITS, SamplingSettings())
    assert [sample(p, ids, u) for u in (0.0, 0.399, 0.401, 0.699, 0.71, 0.89, 0.91, 0.9999999999)] == [
        0,
        0,
        2,
        2,
        3,
        3,
        1,
        1,
    ]


def test_penalties() -> None:
    logits = torch.tensor([1.0, -1.0, 2.0])
    counts, seen = torch.tensor([0.0, 2.0, 1.0]), torch.tensor([True, True, False])
    assert penalise(logits, counts, seen, 2.0, 0.0, 0.0).tolist() == [0.5, -2.0, 2.0]
    assert penalise(logits, counts, seen, 1.0, 0.5, 0.25).tolist() == [1.0, -2.0, 1.25]


def test_not_a_number_is_refused() -> None:
    p, ids = distribution(torch.tensor([math.nan, 1.0]), SamplingSettings())
    with pytest.raises(ValueError, match="not numbers"):
        sample(p, ids, 0.5)
