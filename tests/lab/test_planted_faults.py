"""Faults planted into a real `halfbyte serve`: its level finds each, and says what is wrong; the control passes.

These are the runs of `python -m bench run faults`; they take up to a minute each."""

from __future__ import annotations

import pytest

from bench.checks.faults import CONTROL, FAULTS, REASONS, expected_verdict, has_reason, outcomes_of


def test_every_fault_has_its_reason() -> None:
    assert set(FAULTS) == {CONTROL, *REASONS}


@pytest.mark.slow
def test_the_control_passes() -> None:
    for outcome in outcomes_of(CONTROL):
        assert outcome.verdict == "PASS", (outcome.level, outcome.reasons)


@pytest.mark.slow
@pytest.mark.parametrize("fault", REASONS)
def test_a_planted_fault_is_found(fault: str) -> None:
    (outcome,) = outcomes_of(fault)
    assert outcome.verdict == expected_verdict(fault)
    assert has_reason(fault, outcome), outcome.reasons
