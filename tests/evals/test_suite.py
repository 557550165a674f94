"""Problems are deterministic and solvable as shown; the judge accepts the worked replies and nothing near them."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from halfbyte.errors import UsageError
from halfbyte.evals.numbers import add_steps, multiply_steps, subtract_steps
from halfbyte.evals.suite import Suite, read_reply
from halfbyte.evals.tasks import TASKS, problem
from halfbyte.harmony.render import render_prompt, render_training_example
from halfbyte.model.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tok() -> Tokenizer:
    return Tokenizer.from_file(ROOT / "models" / "tiny" / "tokenizer.json")


def worked(tok: Tokenizer, p: object) -> tuple[list[int], list[int]]:
    """(prompt, the worked reply) in tokens."""
    prompt = render_prompt(tok, p.prompt())  # type: ignore[attr-defined]
    ids, _ = render_training_example(tok, p.worked())  # type: ignore[attr-defined]
    assert ids[: len(prompt)] == prompt
    return prompt, ids[len(prompt) :]


@pytest.mark.parametrize("task", TASKS)
def test_the_worked_reply_is_right_and_well_formed(tok: Tokenizer, task: str) -> None:
    for i in range(12):
        p = problem(task, 7, i)
        assert p == problem(task, 7, i)
        assert p.task == task
        _, reply = worked(tok, p)
        read = read_reply(tok, reply)
        assert read.fault is None
        assert read.analysis
        assert p.judge(read.final, read.call)
        assert len(reply) < 300


def test_a_perfect_engine_scores_everything_and_a_broken_one_nothing(tok: Tokenizer) -> None:
    suite = Suite("tiny", 3, 2)
    answers = {tuple(worked(tok, p)[0]): worked(tok, p)[1] for ps in suite.problems.values() for p in ps}
    perfect = suite.run(tok, lambda prompts, _: [answers[tuple(p)] for p in prompts])
    assert perfect.accuracy == perfect.well_formed == perfect.worst == 1.0
    assert not perfect.wrong
    cut = suite.run(tok, lambda prompts, _: [answers[tuple(p)][:-1] for p in prompts])
    assert cut.accuracy == cut.well_formed == 0.0
    shifted = suite.run(tok, lambda prompts, _: [answers[tuple(p)] for p in prompts[1:] + prompts[:1]])
    assert shifted.well_formed == 1.0
    assert shifted.accuracy < 0.4
    json.dumps(perfect.to_json())


def test_a_suite_refuses_what_it_does_not_have() -> None:
    with pytest.raises(UsageError, match="tiny"):
        Suite("huge")
    with pytest.raises(UsageError, match="arithmetic"):
        problem("poetry", 0, 0)
    with pytest.raises(UsageError, match="at least one"):
        Suite("tiny", 0, 0)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("<|channel|>final<|message|>4<|return|>", None),
        ("<|channel|>analysis<|message|>2<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>", None),
        (" to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}<|call|>", None),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>", None),
        ("<|channel|>final<|message|>4", "no end"),
        ("<|channel|>final<|message|>4<|end|>", "does not end"),
        ("<|channel|>finale<|message|>4<|return|>", "unknown channel"),
        ("<|message|>4<|return|>", "no channel"),
        ("<|channel|>analysis<|message|>4<|return|>", "no next message"),
        ("<|channel|>analysis<|message|>4<|end|><|start|>user<|channel|>final<|message|>4<|return|>", "a message from"),
        ("<|channel|>commentary to=functions.f<|message|>{}<|end|>", "malformed call"),
        ("<|channel|>final<|message|>4<|return|>4", "does not end"),
    ],
)
def test_the_judge_is_strict_about_harmony(tok: Tokenizer, text: str, fault: str | None) -> None:
    read = read_reply(tok, tok.encode(text, allow_special=True))
    assert (read.fault is None) if fault is None else fault in (read.fault or "")


def test_worked_steps_end_in_the_right_number() -> None:
    rng = Random(0)
    for _ in range(300):
        a, b = sorted((rng.randrange(2000), rng.randrange(2000)), reverse=True)
        assert all(s.endswith(f"{a + b}.") for s in add_steps(a, b))
        assert all(s.endswith(f"{a - b}.") for s in subtract_steps(a, b))
        assert all(s.endswith(f"{a * (b % 10)}.") for s in multiply_steps(a, b % 10))
    assert subtract_steps(203, 57)[0] == "10 + 3 - 7 = 6, 10 + 0 - 1 - 5 = 4, 2 - 1 - 0 = 1, so 146."


def test_digits_are_single_tokens(tok: Tokenizer) -> None:
    assert [tok.decode([t]) for t in tok.encode("1234567")] == list("1234567")


def test_effort_lengthens_the_analysis(tok: Tokenizer) -> None:
    from dataclasses import replace

    from halfbyte.evals.problem import EFFORTS
    from halfbyte.evals.tasks import SHORT, frame

    for make in SHORT.values():
        lengths = []
        for effort in EFFORTS:
            rng = Random("effort")
            f = replace(frame(rng), effort=effort)
            lengths.append(sum(len(make(Random(f"effort/{i}"), f).reply[0].text) for i in range(20)))
        assert lengths == sorted(lengths)
        assert lengths[0] < lengths[2]
