"""The builds that one-stream times: each is a right decode step, in the emulator, and the choice of trials."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench.checks import decode_case
from bench.checks.decode_case import DecodeCase
from bench.checks.decode_check import check_decode
from bench.experiments import one_stream
from bench.experiments.one_stream import TODAY, TRIALS, StepTrial
from halfbyte.errors import UsageError
from halfbyte.kernels.cuda.decode.shape import StepShape
from tests.kernels.cuda.emulator import Emulator

SMALL = StepShape(192, 128, 2, 32, 16, 2, 512)
CONTEXT = 600  # pages for four parts of three
NEW_CODE = [t for t in TRIALS if t.defines or {"acquire", "keep_shared", "digits"} & set(t.changes)]


@pytest.mark.parametrize(
    "trial",
    [
        pytest.param(t, id=t.name, marks=[] if t.name in ("these four", "experts by digits") else pytest.mark.slow)
        for t in NEW_CODE
    ],
)
def test_a_trial_is_a_right_step(trial: StepTrial) -> None:
    torch.manual_seed(5)
    shape = replace(SMALL, rows=trial.rows, **trial.changes, defines=trial.defines)
    case = DecodeCase.make(shape, decode_case.random_weights(shape, "cpu"), CONTEXT, trial.rows)
    verdict = check_decode(shape, case, CONTEXT, machine=Emulator(blocks=5, seed=11))
    assert verdict.ok, "; ".join(verdict.wrong)


def test_todays_builds_are_always_there() -> None:
    names = [t.name for t in one_stream.chosen(("2 rows, ring", "nap 60"))]
    assert TODAY in names
    assert f"2 rows, {TODAY}" in names
    assert "nap 60" in names
    assert "nap 100" not in names
    with pytest.raises(UsageError, match="no trial with 'nup'"):
        one_stream.chosen(("nup",))


def test_every_trial_differs_from_todays_build() -> None:
    programs = {t.name: t.shape(0).program() for t in TRIALS}
    assert len(set(programs.values())) == len(programs)
    for trial in TRIALS:
        assert trial.shape(0).refuse() is None
