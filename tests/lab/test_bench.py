"""Results of `bench` carry the record, and have no number where another kernel ran than the chosen one."""

from __future__ import annotations

import json
from dataclasses import replace

from halfbyte.lab.bench import disturbed, with_record
from halfbyte.lab.result import Cell, Result, figure
from halfbyte.model import synthetic
from halfbyte.model.config import NAMED
from halfbyte.model.gpt_oss import GptOss
from halfbyte.model.single_sequence import SingleSequence
from halfbyte.plan import reference
from tests.reference import REFERENCE


class OtherMoe(reference.Moe):
    name = "test.other_moe"


def test_a_result_says_which_kernels_ran() -> None:
    model = GptOss(synthetic.make(NAMED["small"], seed=0), REFERENCE)
    SingleSequence(model, 64).feed([5])
    (result,) = with_record([Result(Cell("decode"), (figure("speed", "tok/s", 5.0),))], model)
    assert not result.refused
    assert result.record is not None
    (way,) = json.loads(json.dumps(result.record))["regimes"]["decode"]
    moe = next(phase for phase in way["phases"] if phase["phase"] == "reference.moe")
    assert [(k["name"], k["launches"]) for k in moe["kernels"]] == [("torch: reference.moe", model.config.layers)]


def test_figures_beside_other_work_say_so() -> None:
    result = Result(Cell("decode"), (figure("speed", "tok/s", 5.0),))
    assert disturbed([result], "") == [result]
    (marked,) = disturbed([result], "other processes used 79% of this machine's 2 cores")
    assert marked.figures == result.figures
    assert not marked.targets[-1].ok
    assert "used 79%" in marked.targets[-1].note


def test_a_result_of_other_kernels_has_no_number() -> None:
    model = GptOss(synthetic.make(NAMED["small"], seed=0), REFERENCE)
    other = OtherMoe().bind(model.binding(0))
    model.plan.bound["decode"] = [
        replace(b, launch=other) if b.phase.name == "reference.moe" else b for b in model.plan.bound["decode"]
    ]
    SingleSequence(model, 64).feed([5])
    (result,) = with_record([Result(Cell("decode"), (figure("speed", "tok/s", 5.0),))], model)
    assert result.figures == ()
    assert "the chosen kernels ran" in result.refused
    assert "test.other_moe" in result.checks[-1].note
