"""The policy of exchanges, by simulated routing: reads of host memory beside those of a fixed placement."""

from __future__ import annotations

import numpy as np
import pytest

from bench.experiments.residency import COST, SHARE, Residency

LAYERS, EXPERTS, TOP_K, HOST_LAYERS = 36, 128, 4, 26  # 120b on a card of 24 GB
SEQUENCES, TOKENS = 8, 400


def routed(exponent: float, drift: float, seed: int) -> tuple[Residency, Residency]:
    """(adaptive, static) after sequences one behind the other. Experts are chosen by Zipf's law over ranks that differ
    by layer; `drift` is the share of a layer's experts that change ranks among one another with each sequence."""
    rng = np.random.default_rng(seed)
    adaptive, static = (Residency.by_layers(LAYERS, EXPERTS, HOST_LAYERS) for _ in range(2))
    ranks = np.stack([rng.permutation(EXPERTS) for _ in range(LAYERS)])
    for sequence in range(SEQUENCES):
        for layer in range(LAYERS if sequence else 0):
            some = rng.choice(EXPERTS, int(drift * EXPERTS), replace=False)
            ranks[layer, some] = ranks[layer, rng.permutation(some)]
        weights = -exponent * np.log(1 + ranks)
        for _ in range(TOKENS):
            order = np.argpartition(-weights - rng.gumbel(size=weights.shape), TOP_K, axis=1)
            uses = np.zeros(weights.shape, np.int64)
            np.put_along_axis(uses, order[:, :TOP_K], 1, axis=1)
            static.count(uses, 1)
            adaptive.count(uses, 1)
            for exchange in adaptive.exchanges_due():
                adaptive.settle(exchange)
    return adaptive, static


@pytest.mark.parametrize(
    ("exponent", "drift", "least"),
    [(0.6, 0.5, 1.2), (0.0, 0.0, 0.98), pytest.param(0.6, 0.25, 1.2, marks=pytest.mark.slow)],
)
def test_reads_of_host_memory(exponent: float, drift: float, least: float) -> None:
    """Seeds that the constants were not chosen with."""
    adaptive, static = routed(exponent, drift, seed=1000 + int(100 * drift))
    assert static.host_reads == SEQUENCES * TOKENS * HOST_LAYERS * TOP_K
    assert static.host_reads / adaptive.host_reads >= least
    assert adaptive.resident.sum() == static.resident.sum(), "the same bytes on the GPU"
    assert COST * adaptive.exchanges <= SHARE * adaptive.host_reads * 1.001
    assert (adaptive.hits + adaptive.misses).tolist() == [SEQUENCES * TOKENS * TOP_K] * LAYERS


def test_an_exchange_needs_more_than_chance() -> None:
    policy = Residency.by_layers(2, 4, 1)
    uses = np.array([[3, 0, 0, 1], [1, 1, 1, 1]])
    policy.count(uses, 4)
    assert policy.exchanges_due() == [], "three uses beside one may be chance"
    for _ in range(60):
        policy.count(uses, 4)
    due = policy.exchanges_due()
    assert due[0].promoted == (0, 0)
    assert due[0].demoted[0] == 1
    policy.settle(due[0])
    assert policy.resident.sum() == 4
    with pytest.raises(AssertionError):
        policy.settle(due[0])


def test_a_policy_without_a_choice_exchanges_nothing() -> None:
    for host_layers in (0, 2):
        policy = Residency.by_layers(2, 4, host_layers)
        for _ in range(100):
            policy.count(np.array([[9, 0, 0, 0], [0, 0, 0, 0]]), 9)
        assert policy.exchanges_due() == []


def test_old_uses_fade() -> None:
    policy = Residency(np.array([[True, False]]))
    for _ in range(200):
        policy.count(np.array([[4, 0]]), 4)
    for _ in range(400):
        policy.count(np.array([[0, 4]]), 4)
        for exchange in policy.exchanges_due():
            policy.settle(exchange)
    assert policy.resident.tolist() == [[False, True]]
    assert policy.exchanges == 1
