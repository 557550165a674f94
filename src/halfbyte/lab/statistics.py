"""What samples say: medians with bootstrap intervals, where a warm-up ends, and whether a difference is a regression.

Intervals are percentiles of resampled medians, with a seed of their own, so that the same samples always give the same
verdict. Nothing here assumes a shape of the noise. Fewer than `LEAST` samples have no 95 % interval of their median at
all (with five, the median lies outside of everything seen once in sixteen times), and `compare` says so instead of
guessing. Knows no units, no clocks and no files; samples that are no numbers are refused, not dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from halfbyte.errors import UsageError

LEVEL = 0.95
LEAST = 6  # samples: 1 - 2 * 0.5**6 is the first that reaches 95 %
RESAMPLES = 4000
THRESHOLD = 0.05  # of a change that counts
# A run belongs to the warm-up while it lies further from the later ones than their noise explains, and than this.
WARM_SIGMAS, WARM_SHARE = 4.0, 0.02
TREND_SIGMAS = 1.96  # 95 %
MAD_TO_SIGMA = 1.4826  # of a normal distribution

Change = Literal["regression", "improvement", "no difference", "inconclusive", "too few runs"]


@dataclass(frozen=True)
class Estimate:
    """An estimate and where the true value lies, at that level."""

    value: float
    low: float
    high: float
    samples: int
    level: float = LEVEL

    def excludes(self, number: float) -> bool:
        return not self.low <= number <= self.high


def _checked(samples: Sequence[float], name: str = "samples") -> np.ndarray:
    values = np.asarray(samples, dtype=float)
    if values.ndim != 1 or not len(values):
        raise UsageError(f"there are no {name} to judge.")
    if not np.isfinite(values).all():
        raise UsageError(f"the {name} hold {values[~np.isfinite(values)][0]}, which is no number.")
    return values


def median(samples: Sequence[float]) -> float:
    return float(np.median(_checked(samples)))


def quantile(samples: Sequence[float], share: float) -> float:
    """A quantile of the samples: a p99 of ten samples is the largest, never a number between two."""
    values = np.sort(_checked(samples))
    return float(values[min(len(values) - 1, int(share * len(values)))])


def _medians(values: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    chosen = generator.integers(0, len(values), (RESAMPLES, len(values)))
    return np.asarray(np.median(values[chosen], axis=1))


def _ends(value: float, resampled: np.ndarray, samples: int, level: float) -> Estimate:
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2])
    return Estimate(value, min(float(low), value), max(float(high), value), samples, level)


def interval(samples: Sequence[float], level: float = LEVEL, seed: int = 0) -> Estimate:
    """The interval of the median. One sample has an interval of no width; `samples` shows it."""
    values = _checked(samples)
    return _ends(float(np.median(values)), _medians(values, np.random.default_rng(seed)), len(values), level)


def block_mean(sums: Sequence[float], counts: Sequence[int], level: float = LEVEL, seed: int = 0) -> Estimate:
    """The mean over all positions of some blocks, with a bootstrap over blocks: positions of one block depend on each
    other. Each block is given as the sum over its positions and their number."""
    values, weights = _checked(sums, "blocks"), _checked(counts, "blocks")
    if len(values) != len(weights) or (weights <= 0).any():
        raise UsageError("every block has a sum and at least one position.")
    chosen = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    resampled = values[chosen].sum(axis=1) / weights[chosen].sum(axis=1)
    return _ends(float(values.sum() / weights.sum()), resampled, len(values), level)


def ratio(
    after: Sequence[float], before: Sequence[float], *, paired: bool = False, level: float = LEVEL, seed: int = 0
) -> Estimate:
    """The ratio of the medians, after / before. `paired`: the k-th of both ran one after the other, so
    that what slowed one slowed the other too, and the median of the ratios counts."""
    a, b = _checked(after), _checked(before)
    if (a <= 0).any() or (b <= 0).any():
        raise UsageError("a ratio of medians needs samples above 0.")
    generator = np.random.default_rng(seed)
    if paired:
        if len(a) != len(b):
            raise UsageError(f"{len(a)} and {len(b)} samples are no pairs.")
        factor = a / b
        return _ends(float(np.median(factor)), _medians(factor, generator), len(factor), level)
    value = float(np.median(a) / np.median(b))
    return _ends(value, _medians(a, generator) / _medians(b, generator), min(len(a), len(b)), level)


# ---- whether something became slower --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChangeVerdict:
    change: Change
    ratio: Estimate  # after / before, as measured
    worse: float  # share by which it became worse; below 0 it became better
    sentence: str


def compare(
    before: Sequence[float],
    after: Sequence[float],
    *,
    less_is_better: bool = False,
    paired: bool = False,
    threshold: float = THRESHOLD,
    seed: int = 0,
) -> ChangeVerdict:
    """A regression is an estimate more than `threshold` worse whose interval excludes no change; likewise better. No
    difference is an interval within the threshold on both sides; a wider one is inconclusive."""
    estimate = ratio(after, before, paired=paired, seed=seed)
    worse = estimate.value - 1 if less_is_better else 1 - estimate.value
    change: Change = "no difference"
    if estimate.samples < LEAST:
        change = "too few runs"
    elif abs(worse) > threshold and estimate.excludes(1.0):
        change = "regression" if worse > 0 else "improvement"
    elif not 1 - threshold <= estimate.low <= estimate.high <= 1 + threshold:
        change = "inconclusive"
    small = change == "no difference" and estimate.excludes(1.0)  # that word would contradict the interval
    interval_text = f"{estimate.level:.0%} interval {estimate.low - 1:+.1%} to {estimate.high - 1:+.1%}"
    label = f"less than {threshold:.0%}" if small else change
    text = f"{label}: {estimate.value - 1:+.1%} ({interval_text}, {estimate.samples} runs each)"
    if change == "too few runs":
        text += f"; {LEAST} are the least that can tell"
    return ChangeVerdict(change, estimate, worse, text)


# ---- where a warm-up ends -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WarmUp:
    """How many of the first samples belong to it; `settled` is False where even the middle of them still does."""

    skipped: int
    settled: bool
    level: float  # what the samples settled at: the median of the second half

    def rest(self, samples: Sequence[float]) -> list[float]:
        return list(samples[self.skipped :])


def warm_up(samples: Sequence[float]) -> WarmUp:
    """Leading samples that the second half's noise does not explain.

    Only the beginning is looked at: an outlier after a run that fits is noise, and stays. A series that still drifts
    behind its warm-up has not settled.
    """
    values = _checked(samples)
    late = values[len(values) // 2 :]
    level = float(np.median(late))
    band = max(WARM_SIGMAS * _sigma(late), WARM_SHARE * abs(level))
    skipped = 0
    while skipped < len(values) // 2 and abs(values[skipped] - level) > band:
        skipped += 1
    return WarmUp(skipped, not (skipped and skipped == len(values) // 2) and not _drifts(values[skipped:]), level)


def _sigma(values: np.ndarray) -> float:
    return MAD_TO_SIGMA * float(np.median(np.abs(values - np.median(values))))


def _drifts(values: np.ndarray) -> bool:
    """It moved by more than `2 * WARM_SHARE`, and not by chance: in a leap beyond the noise of both halves, or step by
    step (Mann and Kendall's count of pairs that rise less pairs that fall, beyond 95 % of what noise gives)."""
    half, n = len(values) // 2, len(values)
    if half < 2:
        return False
    first, second = values[:half], values[-half:]
    moved = abs(float(np.median(second) - np.median(first)))
    if moved <= 2 * WARM_SHARE * abs(float(np.median(values))):
        return False
    if half > 2 and moved > WARM_SIGMAS * math.hypot(_sigma(first), _sigma(second)):
        return True
    rising = float(np.sign(values[None, :] - values[:, None])[np.triu_indices(n, 1)].sum())
    return (abs(rising) - 1) / math.sqrt(n * (n - 1) * (2 * n + 5) / 18) > TREND_SIGMAS


def number(value: float) -> str:
    """19.9k, 844, 17.7, 0.067: three figures are what a person reads."""
    if value >= 10_000:
        return f"{value / 1000:.1f}k"
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.2f}" if 1 <= value < 10 else f"{value:.3g}"
