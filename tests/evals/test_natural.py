"""The natural questions are a hundred and frozen; their graders accept right answers in free wording, and no others."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from halfbyte.errors import UsageError
from halfbyte.evals.grading import Grade, numbers_in, refuses
from halfbyte.evals.natural import QUESTIONS
from halfbyte.evals.numbers import arithmetic_tag
from halfbyte.evals.problem import Problem
from halfbyte.evals.suite import LEAST, Suite
from halfbyte.evals.tasks import problem
from halfbyte.harmony.render import render_prompt, render_training_example
from halfbyte.model.tokenizer import Tokenizer

TINY = Path(__file__).parents[2] / "models" / "tiny"
DIGEST = "ebe92b53f0883088e727459fbf4453f8"


def digest() -> str:
    text = "\n".join(
        f"{[s.text for s in p.turns]} {p.kind} {p.grade} {p.value} {p.accept} {p.frame}" for p in QUESTIONS
    )
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def judge(p: Problem, text: str) -> bool:
    return p.judge(text, None)


def find(question: str) -> Problem:
    return next(p for p in QUESTIONS if p.turns[-1].text == question)


def test_there_are_a_hundred_and_they_stay_as_they_were_written() -> None:
    assert len(QUESTIONS) == 100
    assert len({tuple(s.text for s in p.turns) for p in QUESTIONS}) == 100
    assert 10 <= sum(p.wants_refusal for p in QUESTIONS) <= 25
    assert digest() == DIGEST, "the natural questions are frozen: results with others cannot be compared"


def test_each_accepts_its_own_answer_and_not_the_answers_of_the_others() -> None:
    texts = [p for p in QUESTIONS if p.kind in ("free", "json")]
    for p in texts:
        assert judge(p, p.reply[-1].text), p.turns[-1].text
        assert not judge(p, "")
        others = sum(judge(p, other.reply[-1].text) for other in texts if other.tags != p.tags)
        assert others <= 6, p.turns[-1].text  # two sums may have the same value
    for p in QUESTIONS:
        if p.kind == "call":
            say = p.reply[-1]
            assert p.judge(None, (say.function, say.text))
            assert not p.judge(None, (say.function, "{}"))
            assert not judge(p, say.text)


@pytest.mark.parametrize(
    ("question", "right", "wrong"),
    [
        (
            "What is 17 + 25?",
            ["42", "17 + 25 = 42.", "It is forty-two!", "The sum of 17 and 25 is 42", "25 plus 17 makes **42**."],
            ["17 + 25 = 43.", "41 or 42", "17", "I do not know.", "forty"],
        ),
        (
            "what do you get when you add 999 to 1",
            ["1,000", "1000.", "One thousand", "999 + 1 = 1000"],
            ["999", "100", "10000"],
        ),
        (
            "sort these from big to small: 5 88 41 2",
            ["88, 41, 5, 2", "You gave 5 88 41 2. Sorted: 88 > 41 > 5 > 2."],
            ["2, 5, 41, 88", "88, 41, 2, 5", "88, 41, 5"],
        ),
        (
            "What's my name?",
            ["Your name is Oluwaseun.", "oluwaseun", "You said you are \u201cOluwaseun\u201d."],
            ["Your name is Olu.", "You have not told me your name."],
        ),
        (
            "And what was my favourite number?",
            ["613", "It was 613.", "Your favourite number is six hundred and thirteen."],
            ["4", "613 or 4", "2 + 2 = 4."],
        ),
        (
            "Are you a person?",
            ["No, I am a small language model.", "No.", "I'm not, I am a model"],
            ["Yes.", "I do not know."],
        ),
        (
            "Why is the sky blue?",
            [
                "I am a small demonstration model, I only know simple things.",
                "I don\u2019t know.",
                "Sorry, I can't answer that.",
            ],
            ["Because of light.", "42", "I am well, thank you. What can I do for you?"],
        ),
        (
            "Spell banana for me",
            ["b-a-n-a-n-a", "B, A, N, A, N, A", "banana is spelled b a n a n a."],
            ["b-a-n-a-n", "banana"],
        ),
    ],
)
def test_graders_judge_free_wording(question: str, right: list[str], wrong: list[str]) -> None:
    p = find(question)
    for text in right:
        assert judge(p, text), text
    for text in wrong:
        assert not judge(p, text), text


def test_numbers_are_read_as_digits_and_words() -> None:
    assert numbers_in("1,234 and 5") == [1234, 5]
    assert numbers_in("Twenty-one, thirty five, nineteen, two hundred and six") == [21, 35, 19, 206]
    assert numbers_in("three thousand; one two; ninety") == [3000, 1, 2, 90]
    assert numbers_in("room B12 at 14:30") == [12, 14, 30]
    assert numbers_in("nobody, someone, tension") == []
    assert not refuses("The garden is small. The model is red.")


def test_a_grade_accepts_nothing_beside_the_number() -> None:
    grade = Grade(number=4)
    assert grade.accepts("2 + 2", "2 + 2 = 4")
    assert not grade.accepts("2 + 2", "4 or 5")
    assert not grade.accepts("2 + 2", "2 + 2 = 22")


@pytest.mark.parametrize(
    ("op", "a", "b", "tag"),
    [
        ("+", 12, 34, "+ 2 digits, no carry"), ("+", 17, 25, "+ 2 digits, carry"), ("+", 999, 1, "+ 3 digits, carry"),
        ("+", 4, 5, "+ 1 digit, no carry"), ("+", 5, 5, "+ 1 digit, carry"),
        ("-", 712, 358, "- 3 digits, borrow"), ("-", 758, 312, "- 3 digits, no borrow"),
        ("-", 100, 1, "- 3 digits, borrow"),
        ("*", 12, 3, "* 2 digits, no carry"), ("*", 46, 9, "* 2 digits, carry"),
    ],
)  # fmt: skip
def test_arithmetic_is_told_apart_by_digits_and_carries(op: str, a: int, b: int, tag: str) -> None:
    assert arithmetic_tag(op, a, b) == tag


def test_the_report_names_its_worst_subtype() -> None:
    tokenizer = Tokenizer.from_file(TINY / "tokenizer.json")
    suite = Suite("tiny", 5, 40, ["arithmetic", "memory"])
    answers = {}
    for p in [p for problems in suite.problems.values() for p in problems]:
        prompt = render_prompt(tokenizer, p.prompt())
        reply = render_training_example(tokenizer, p.worked())[0][len(prompt) :]
        hard = any("borrow" in tag and "no" not in tag for tag in p.tags)
        answers[tuple(prompt)] = reply[:-1] if hard else reply  # cut: not well-formed, so wrong
    report = suite.run(tokenizer, lambda prompts, _: [answers[tuple(p)] for p in prompts])
    assert report.worst_subtype is not None
    name, score = report.worst_subtype
    assert name.startswith("arithmetic: - ")
    assert name.endswith(", borrow")
    assert score.right == 0
    assert score.problems >= LEAST
    assert report.table().splitlines()[0].startswith(f"worst subtype: {name} 0.0 %")
    assert report.accuracy > 0.8  # the mean hides it
    body = report.to_json()
    assert body["worst_subtype"] == name
    assert sum(s["problems"] for key, s in body["subtypes"].items() if key.startswith("memory: turn")) == 40
    assert any(key.endswith("new names") for key in body["subtypes"])


def test_the_suite_of_natural_questions_counts_false_refusals() -> None:
    tokenizer = Tokenizer.from_file(TINY / "tokenizer.json")
    suite = Suite("natural")
    refusal = tokenizer.encode(
        "<|channel|>analysis<|message|>No.<|end|><|start|>assistant<|channel|>final<|message|>I do not know.<|return|>",
        allow_special=True,
    )
    report = suite.run(tokenizer, lambda prompts, _: [refusal] * len(prompts))
    outside = sum(p.wants_refusal for p in QUESTIONS)
    assert report.tasks["natural"].right == outside
    assert (report.false_refusals, report.answerable) == (100 - outside, 100 - outside)
    assert report.subtypes["natural: outside"].accuracy == 1.0
    with pytest.raises(UsageError, match="tasks"):
        Suite("natural", tasks=["arithmetic"])


def test_tags_change_no_problem() -> None:
    """The problems of a seed are what receipts and earlier results refer to."""
    text = "".join(
        f"{[s.text for s in p.turns]}{[s.text for s in p.reply]}{p.accept}{p.value}"
        for task in (
            "arithmetic",
            "story",
            "lists",
            "letters",
            "memory",
            "reading",
            "extract",
            "tool_call",
            "tool_none",
        )
        for p in (problem(task, 31415, i) for i in range(20))
    )
    assert hashlib.blake2b(text.encode(), digest_size=16).hexdigest() == "a9cbd3df90b0c2302ead72266183b68d"
