"""Sampling by hand-made distributions."""

from __future__ import annotations

import math

import pytest
import torch

from halfbyte.ops.sampling import distribution, greedy, penalise, sample

LOGITS = torch.tensor([0.4, 0.1, 0.3, 0.2]).log()


def names(p: torch.Tensor, ids: torch.Tensor) -> dict[int, float]:
    return {int(i): round(float(x), 6) for i, x in zip(ids, p)}


def test_greedy_breaks_ties_to_the_lower_id() -> None:
    assert greedy(torch.tensor([[0.0, 2.0, 2.0], [3.0, -1.0, 3.0]])).tolist() == [1, 0]


def test_untouched() -> None:
    assert names(*distribution(LOGITS, 1.0, 0, 1.0, 0.0)) == {0: 0.4, 2: 0.3, 3: 0.2, 1: 0.1}


def test_temperature() -> None:
    hot = distribution(LOGITS, 2.0, 0, 1.0, 0.0)[0]
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
    p, ids = distribution(LOGITS, 1.0, top_k, top_p, min_p)
    assert set(ids.tolist()) == kept
    assert math.isclose(float(p.sum()), 1.0)


def test_draw_follows_the_uniform_number() -> None:
    p, ids = distribution(LOGITS, 1.0, 0, 1.0, 0.0)
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
    p, ids = distribution(torch.tensor([math.nan, 1.0]), 1.0, 0, 1.0, 0.0)
    with pytest.raises(ValueError, match="not numbers"):
        sample(p, ids, 0.5)
