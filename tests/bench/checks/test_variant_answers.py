"""The workshop's comparison of variants: one that computes the same function holds, one that does not is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.checks import variant_answers
from bench.measurement import run_cases, write_records
from bench.variants import Checkpoint, scale_residual
from halfbyte import gates

EXACT = gates.PRESETS["exact"].gates
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def plain() -> variant_answers.PlainModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variant_answers, "AT_ONCE", {1: 1, 4: 4})
        patch.setattr(variant_answers, "MAX_TOKENS", 16)
        return variant_answers.PlainModel.ask_plain_model(EXACT, CPU, padded=False)


def compare(plain: variant_answers.PlainModel, folder: Path, name: str) -> variant_answers.Result:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variant_answers, "AT_ONCE", {1: 1, 4: 4})
        patch.setattr(variant_answers, "MAX_TOKENS", 16)
        record = variant_answers.compare_same(name, "exact", plain, EXACT, False, folder)
    return variant_answers.result_of(
        json.loads(json.dumps(record | {"preset": "exact", "padded": False, "kind": "same", "seconds": 1.0}))
    )


@pytest.mark.parametrize("name", ["residual x 2^20", "vocabulary permuted"])
def test_the_same_function_holds(plain: variant_answers.PlainModel, tmp_path: Path, name: str) -> None:
    result = compare(plain, tmp_path, name)
    assert result.state == "measured"
    assert result.figure("equal_answers").value == 100


def test_another_function_is_found(
    plain: variant_answers.PlainModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def louder_than_its_norms_expect(model: Checkpoint) -> None:
        scale_residual(model, 4)
        model.config["rms_norm_eps"] *= 4.0**8

    monkeypatch.setitem(variant_answers.SAME, "residual x 2^4", louder_than_its_norms_expect)
    result = compare(plain, tmp_path, "residual x 2^4")
    assert result.state == "INVALID"
    assert "answers are the plain model's" in result.refused
    assert any(d["margin"] is not None and d["margin"] > 0 for d in result.detail["differ"])


def test_a_function_without_a_plain_model_is_held_against_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant_answers.write_variant("sinks of 50", variant_answers.load.EMBEDDED, tmp_path)
    text = variant_answers.text_and_prompts()[0][: sum(map(sum, variant_answers.SHORT_ROWS.values()))]
    arguments = ("sinks of 50", EXACT, CPU, False, tmp_path, text)
    assert all(ok for _, ok, _, _ in variant_answers.compare_changed(*arguments)["checks"])
    logits = variant_answers.chunk_logits

    def off(model: object, *more: object) -> dict[str, torch.Tensor]:
        monkeypatch.setattr(variant_answers, "chunk_logits", logits)  # the first to be asked is the plan
        return {regime: 1.01 * x for regime, x in logits(model, *more).items()}  # type: ignore[arg-type]

    monkeypatch.setattr(variant_answers, "chunk_logits", off)
    assert not all(ok for _, ok, _, _ in variant_answers.compare_changed(*arguments)["checks"])


def one_case(name: str, out: str, more: int) -> None:
    write_records(out, [{"name": name, "more": more}])
    if name == "breaks":
        raise SystemExit(3)


def test_cases_in_processes_keep_what_they_wrote_and_say_how_they_ended() -> None:
    cases = [("holds",), ("breaks",)]
    outcomes = {o.case[0]: o for o in run_cases(one_case, cases, 5, jobs=2, seconds=120)}
    assert outcomes["holds"].records == [{"name": "holds", "more": 5}]
    assert (outcomes["holds"].failed, outcomes["breaks"].failed) == ("", "exit code 3")
    assert outcomes["breaks"].records == [{"name": "breaks", "more": 5}]
    late = list(run_cases(one_case, [("holds",), ("breaks",)], 5, jobs=1, seconds=0))
    assert [o.failed for o in late] == ["not begun, no time was left", "exit code -9"]
