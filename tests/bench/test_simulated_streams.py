"""Streams on a device of known costs: what comes out can be said beforehand."""

from __future__ import annotations

import pytest

from bench.experiments.simulated_streams import WAY_MS, Costs, simulate


def test_one_stream() -> None:
    """Its prompt in one step, then a token every ten milliseconds."""
    out = simulate(Costs({0: 10.0, 64: 10.0}, 20.0, 100.0), 2048, streams=1, rounds=4, prompt=300, tokens=50)
    assert out.gap_median == out.gap_p99 == pytest.approx(10.0)
    assert out.first_median == out.first_p99 == pytest.approx(20.0 + 300 * 0.1)
    assert out.rows == 300
    rest = 49 * 10.0 + WAY_MS  # of a turn after its first token
    assert out.speed == pytest.approx(1e3 * (49 + 50 + 50) / (rest + 2 * (50.0 + rest)))


def test_remainders_of_prompts_share_a_step() -> None:
    """Prompts that fill no whole number of steps: nearly every mixed step is full all the same, and none too large."""
    out = simulate(Costs({0: 10.0, 64: 10.0}, 12.0, 10.0), 120, streams=16, rounds=4, prompt=130, tokens=40)
    assert 0.95 * (120 - 16) < out.rows <= 120
    assert out.gap_p99 <= 12.0 + 0.01 * 120 + 0.01
