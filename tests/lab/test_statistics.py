"""Intervals hold the truth as often as they say, a planted slowdown is found, noise is not, a warm-up is left out."""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte.errors import UsageError
from halfbyte.lab import statistics as st


def runs(seed: int, count: int, level: float, noise: float = 0.02) -> list[float]:
    return (level * (1 + noise * np.random.default_rng(seed).standard_normal(count))).tolist()


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    held = sum(not st.interval(runs(seed, 15, 100.0)).excludes(100.0) for seed in range(80))
    assert 72 <= held <= 80


def test_the_same_samples_give_the_same_interval() -> None:
    assert st.interval(runs(3, 9, 50.0)) == st.interval(runs(3, 9, 50.0))


def test_one_sample_has_no_width_and_says_that_it_is_one() -> None:
    found = st.interval([7.0])
    assert (found.value, found.low, found.high, found.samples) == (7.0, 7.0, 7.0, 1)


def test_a_planted_slowdown_is_found_and_a_small_one_is_not() -> None:
    found = missed = 0
    for seed in range(40):
        before = runs(1000 + seed, 12, 100.0, noise=0.01)
        found += st.compare(before, runs(2000 + seed, 12, 94.0, noise=0.01)).change == "regression"
        missed += st.compare(before, runs(3000 + seed, 12, 99.0, noise=0.01)).change == "regression"
    assert found >= 38
    assert missed == 0


def test_what_grows_may_be_better_or_worse() -> None:
    before, after = runs(0, 12, 100.0), runs(1, 12, 115.0)
    assert st.compare(before, after).change == "improvement"
    verdict = st.compare(before, after, less_is_better=True)
    assert verdict.change == "regression"
    assert verdict.worse == pytest.approx(0.15, abs=0.03)
    assert "+" in verdict.sentence


def test_a_large_difference_within_wide_noise_is_not_decided() -> None:
    before, after = [50.0, 150.0, 60.0, 140.0, 100.0, 99.0, 101.0], [55.0, 140.0, 90.0, 50.0, 145.0, 93.0, 94.0]
    verdict = st.compare(before, after)
    assert verdict.change == "inconclusive"


def test_identical_runs_are_equal() -> None:
    """In at least 95 of 100 pairs, one after the other and in turn."""
    for paired in (False, True):
        pairs = [(runs(2 * seed, 8, 100.0, 0.015), runs(2 * seed + 1, 8, 100.0, 0.015)) for seed in range(200)]
        equal = sum(st.compare(a, b, paired=paired).change == "no difference" for a, b in pairs)
        assert equal >= 190


def test_no_sentence_contradicts_its_interval() -> None:
    for seed in range(60):
        for level, noise in ((97.0, 0.004), (100.0, 0.004), (93.0, 0.03), (99.0, 0.08)):
            verdict = st.compare(runs(seed, 8, 100.0, noise), runs(900 + seed, 8, level, noise))
            low, high = verdict.ratio.low, verdict.ratio.high
            if verdict.sentence.startswith("no difference"):
                assert 0.95 <= low <= 1.0 <= high <= 1.05
            elif verdict.sentence.startswith("less than 5%"):
                assert 0.95 <= low <= high <= 1.05
                assert verdict.ratio.excludes(1.0)
            elif verdict.change == "regression":
                assert high < 1.0
            else:
                assert verdict.change in ("inconclusive", "improvement")


def test_few_runs_cannot_tell() -> None:
    verdict = st.compare([100.0] * 5, [50.0] * 5)
    assert verdict.change == "too few runs"
    assert "6 are the least" in verdict.sentence


def test_pairs_see_through_what_slowed_both() -> None:
    weather = np.linspace(1.0, 0.5, 12)
    noise = np.random.default_rng(0).standard_normal((2, 12)) * 0.005
    before, after = 100 * weather * (1 + noise[0]), 92 * weather * (1 + noise[1])
    assert st.compare(before.tolist(), after.tolist()).change == "inconclusive"
    assert st.compare(before.tolist(), after.tolist(), paired=True).change == "regression"
    with pytest.raises(UsageError, match="no pairs"):
        st.ratio([1.0, 2.0], [1.0], paired=True)


def test_a_quantile_is_a_sample() -> None:
    values = [float(n) for n in range(1, 101)]
    assert st.quantile(values, 0.99) == 100.0
    assert st.quantile(values, 0.5) == 51.0
    assert st.quantile([4.0], 0.99) == 4.0


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")], [float("inf")]])
def test_what_is_no_number_is_refused(samples: list[float]) -> None:
    for ask in (st.interval, st.median, st.warm_up):
        with pytest.raises(UsageError):
            ask(samples)
    with pytest.raises(UsageError, match="above 0"):
        st.ratio([1.0], [0.0])


# ---- warm-up --------------------------------------------------------------------------------------------------------


def test_slow_first_runs_are_left_out() -> None:
    samples = [40.0, 70.0, 90.0, *runs(5, 12, 100.0, noise=0.005)]
    found = st.warm_up(samples)
    assert found.skipped == 3
    assert found.settled
    assert found.rest(samples) == samples[3:]


def test_steady_runs_keep_nearly_all() -> None:
    skipped = [st.warm_up(runs(seed, 12, 100.0)).skipped for seed in range(100)]
    assert np.mean(skipped) < 0.1
    assert all(st.warm_up([5.0] * n).skipped == 0 for n in (1, 2, 7))


def test_an_outlier_in_the_middle_is_noise_and_stays() -> None:
    samples = runs(7, 12, 100.0, noise=0.005)
    samples[3] = 60.0
    assert st.warm_up(samples).skipped == 0


def test_what_never_settles_says_so() -> None:
    assert not st.warm_up(np.linspace(10.0, 100.0, 16).tolist()).settled
    assert not st.warm_up([100.0] * 8 + [50.0] * 2 + [50.0] * 2 + [25.0] * 4).settled
    assert st.warm_up(runs(9, 16, 100.0)).settled
