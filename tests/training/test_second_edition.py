"""The second edition's conversations: right by another solver, equal for a seed, with nothing held out in training."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from phrasings import MORE, PHRASINGS, SEEN, Split
from second_edition import MOST_TURNS, conversation, problem
from turns import Turn, held_out
from wordings import WORDINGS, plain

from halfbyte.evals.natural import QUESTIONS
from halfbyte.evals.suite import read_reply
from halfbyte.harmony.render import render_prompt, render_training_example
from halfbyte.model.tokenizer import Tokenizer

TINY = Path(__file__).parents[2] / "models" / "tiny"
COUNT = 1200
BETWEEN = "(?:, and |, | and |; )"
ORDINALS = ("first", "second", "third")
SMALL = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


@pytest.fixture(scope="module")
def drawn() -> dict[Split, list[list[Turn]]]:
    return {split: [conversation(split, 3, i) for i in range(COUNT)] for split in ("train", "held-out")}


def digits(text: str) -> list[int]:
    """The numbers of a text; a word for a number counts only below a hundred."""
    text = re.sub(r"[A-Za-z]+[-_]?\d+", "", text)  # names with digits
    plain = re.sub(r"[A-Za-z]+(?:-(?=[a-z]))?[a-z]*", lambda m: number_word(m[0].lower()), text)
    return [int(n) for n in re.findall(r"\d+", plain)]


def number_word(word: str) -> str:
    tens, _, units = word.partition("-")
    if tens in TENS and (not units or units in SMALL[1:10]):
        return str(10 * TENS.index(tens) + 20 + (SMALL.index(units) if units else 0))
    return str(SMALL.index(word)) if word in SMALL else word


def items(text: str) -> list[str]:
    """The longest run of things between commas, semicolons or "and"."""
    runs = [re.split(BETWEEN, run[0]) for run in re.finditer(rf"[\w-]+(?:{BETWEEN}[\w-]+)+", text)]
    return max(runs, key=len)


def solve(turns: list[Turn], at: int) -> Any:
    """What the reply to a turn must say, from the words of the conversation alone."""
    turn, question = turns[at], turns[at].says[0].text
    before = turns[at - 1] if at else None
    if turn.task in ("add", "subtract", "multiply"):
        a, b = digits(question)
        return {"add": a + b, "subtract": abs(a - b), "multiply": a * b}[turn.task]
    if turn.task == "sort":
        return sorted(digits(question))
    if turn.task == "largest":
        return max(digits(question))
    if turn.task == "reverse":
        return items(question)[::-1]
    if turn.task == "count":
        return len(items(question))
    if turn.task in ("spell", "letters"):
        (word,) = [w for w in re.findall(r"[a-z]+", question.lower()) if w == turn.facts["word"]][:1]
        return list(word) if turn.task == "spell" else sum(c == turn.facts["letter"] for c in word)
    if turn.task == "read":
        pairs = re.findall(r"The (\w+) of ([\w-]+) is ([\w-]+)(?:\.|$)", question)
        (value,) = [v for k, n, v in pairs if (k, n) == (turn.facts["key"], turn.facts["person"])]
        return value
    if turn.task == "recall":
        said = [re.fullmatch(r"My (\w+) is ([\w-]+)\.", t.says[0].text) for t in turns[:at]]
        (key,) = {m[1] for m in said if m and re.search(rf"\b{m[1]}\b", question)}
        return next(m[2] for m in said if m and m[1] == key)
    if turn.task == "follow_up":
        assert before is not None
        if "one in my list" in question:
            return items(before.says[0].text)[next(i for i, o in enumerate(ORDINALS) if o in question)]
        if "Sorry, " in question:
            return sum(digits(question))
        last = digits(before.reply[-1].text)[-1]
        return last + digits(question)[0]
    return None


def says(turn: Turn, value: Any) -> bool:
    text = turn.reply[-1].text
    if isinstance(value, list) and value and isinstance(value[0], int):
        return digits(text) == value
    if isinstance(value, list):
        return [part for part in re.split(r"[,. ]+|(?<=\b\w)-(?=\w\b)", text) if part] == value
    if isinstance(value, int):
        return digits(text)[-1] == value
    return re.search(rf"(?<![\w-]){re.escape(value)}(?![\w-])", text) is not None


def test_every_answer_is_right_by_another_solver(drawn: dict[Split, list[list[Turn]]]) -> None:
    solved: dict[str, int] = {}
    for turns in [*drawn["train"], *drawn["held-out"]]:
        for at, turn in enumerate(turns):
            if (value := solve(turns, at)) is not None:
                assert says(turn, value), (turn.says[0].text, turn.reply[-1].text, value)
            elif turn.task == "tool":
                check_call(turn)
            elif turn.task == "json":
                check_record(turn)
            elif turn.task == "outside":
                assert "do not know" in turn.reply[-1].text
            else:
                check_grade(turns[: at + 1])
            solved[turn.task] = solved.get(turn.task, 0) + 1
    assert set(PHRASINGS) <= set(solved)
    assert min(solved.values()) >= 20


def check_grade(turns: list[Turn]) -> None:
    """The last of some turns is one of the everyday tables: the grader accepts its reply and no foreign one."""
    turn, p = turns[-1], problem(turns, "train")
    last = turn.reply[-1]
    if last.kind == "call":
        assert last.function in {tool.name for tool in turn.tools}
        (tool,) = [tool for tool in turn.tools if tool.name == last.function]
        check_arguments(json.loads(last.text), tool.parameters)
        if turn.task == "described":
            question, arguments = turn.says[0].text, json.loads(last.text)
            values = [v for value in arguments.values() for v in (value if isinstance(value, list) else [value])]
            assert all(str(v) in question for v in values if not isinstance(v, bool)), (question, arguments)
        return
    if turn.task == "tell":
        assert turn.facts["value"] in turn.says[0].text
        return
    question = "\n".join(say.text for say in turn.says)
    assert p.judge(last.text, None), (question, last.text)
    assert not p.judge("Bananas.", None)
    if turn.task in CALCULATED:
        assert digits(last.text)[-1] == CALCULATED[turn.task](turn), (question, last.text)
    if turn.task in ("fact", "nth", "last", "persona", "memory") and turn.bare != "unknown":
        told = " ".join(say.text for t in turns for say in t.says)
        assert turn.bare in told or turn.bare == last.text.removesuffix(".").split()[-1], (told, turn.bare)
    if turn.task == "note":
        assert set(turn.facts["value"]) == set(json.loads(turn.response_format[1])["required"])  # type: ignore[index]


def check_arguments(arguments: dict[str, Any], schema: dict[str, Any]) -> None:
    assert set(schema["required"]) <= set(arguments) <= set(schema["properties"])
    kinds = {
        "string": str, "integer": int, "number": (int, float), "boolean": bool, "object": dict, "array": list,
    }  # fmt: skip
    for name, value in arguments.items():
        kind = schema["properties"][name]
        assert isinstance(value, kinds[kind["type"]])
        assert value in kind.get("enum", [value])
        if kind["type"] == "object":
            check_arguments(value, kind)


# The value of a calculation, from the words of its question alone.
CALCULATED = {
    "story": lambda t: {"+": sum, "-": difference, "*": math.prod}[t.facts["op"]](digits(t.says[0].text)),
    "smallest": lambda t: min(digits(t.says[0].text)),
    "total": lambda t: sum(digits(t.says[0].text)),
    "length": lambda t: len(t.facts["word"]),
}  # fmt: skip


def difference(values: list[int]) -> int:
    return max(values) - min(values)


def check_call(turn: Turn) -> None:
    """The one function whose description names the deed, with the thing as its only argument; else none."""
    question = turn.says[0].text.lower()
    fitting = []
    for tool in turn.tools:
        match = re.fullmatch(r"Use this to (\w+) the (\w+) of something\.", tool.description)
        assert match
        if re.search(rf"\b{match[1]}\b", question) and re.search(rf"(\bthe|'s) {match[2]}\b", question):
            fitting.append(tool)
    calls = [say for say in (*turn.says, *turn.reply) if say.kind == "call"]
    if not fitting:
        assert not calls
        assert "no function" in turn.reply[-1].text
        return
    (tool,), (made,) = fitting, calls
    assert made.function == tool.name
    (argument,) = json.loads(made.text).items()
    assert argument[0] in tool.parameters["required"]
    assert argument[1].lower() in question
    results = [say for say in turn.says if say.kind == "result"]
    if results:
        outcome = next(iter(json.loads(results[0].text).values()))
        assert outcome.split()[0] in turn.reply[-1].text
        assert ("error" in results[0].text) == ("failed" in turn.reply[-1].text)


def check_record(turn: Turn) -> None:
    """Every field of the schema with a value of its type that stands behind its name in the text; nothing else."""
    assert turn.response_format is not None
    schema, value = json.loads(turn.response_format[1]), json.loads(turn.reply[-1].text)
    assert set(value) == set(schema["required"]) == set(schema["properties"])
    parts = {re.split(r" (?:is|are|has) ", part)[0].split()[-1]: part for part in turn.facts["text"].split(";")}
    for name, kind in schema["properties"].items():
        leaves = value[name] if isinstance(value[name], list) else [value[name]]
        if kind["type"] == "object":
            assert set(value[name]) == set(kind["required"])
            leaves = list(value[name].values())
        assert all(re.search(rf"(?<![\w-]){re.escape(str(leaf))}(?![\w-])", parts[name]) for leaf in leaves)
        python = {"string": str, "integer": int, "array": list, "object": dict}[kind["type"]]
        assert isinstance(value[name], python)
        assert "enum" not in kind or value[name] in kind["enum"]


def test_a_conversation_is_a_function_of_split_seed_and_index(drawn: dict[Split, list[list[Turn]]]) -> None:
    assert [conversation("train", 3, i) for i in range(40)] == drawn["train"][:40]
    assert [conversation("train", 4, i) for i in range(40)] != drawn["train"][:40]
    assert [conversation("held-out", 3, i) for i in range(40)] != drawn["train"][:40]


def test_conversations_have_up_to_eight_turns_and_every_task_comes_later_too(
    drawn: dict[Split, list[list[Turn]]],
) -> None:
    for conversations in drawn.values():
        sizes = [len(turns) for turns in conversations]
        assert set(sizes) == set(range(1, MOST_TURNS + 1))
        assert sum(size > 1 for size in sizes) > 0.8 * COUNT
        later = {turn.task for turns in conversations for turn in turns[1:]}
        assert set(PHRASINGS) <= later
        offered = {len(turns[-1].tools) for turns in conversations}
        assert offered == set(range(9))


FIELD = {
    "a": r"\w+", "b": r"\w+", "w": r"[\w-]+", "c": r"\w", "k": r"\w+", "n": r"[\w-]+", "v": r"\w+", "o": r"\w+",
    "x": r"[\w-]+", "l": rf"[\w-]+(?:{BETWEEN}[\w-]+)+", "t": r".+",
}  # fmt: skip


def pattern(template: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w)\}", template)
    text = "".join(re.escape(p) if i % 2 == 0 else FIELD[p] for i, p in enumerate(parts))
    return re.compile(text, re.IGNORECASE)


def test_training_has_no_phrasing_that_is_held_out(drawn: dict[Split, list[list[Turn]]]) -> None:
    for task, table in PHRASINGS.items():
        assert len(set(table)) == 2 * SEEN == 20, task
        unseen = [pattern(template) for template in table[SEEN:]]
        texts = [t.says[0].text for turns in drawn["train"] for t in turns if t.task == task]
        phrasings = {t.phrasing for turns in drawn["train"] for t in turns if t.task == task}
        allowed = {*table[:SEEN], *MORE[task]}
        made = phrasings - allowed  # by the grammar of wordings
        assert 2 * len(phrasings & allowed) > len(allowed), task
        assert not {plain(template) for template in made} & {plain(template) for template in table[SEEN:]}
        assert (len(made) > 20) == (task in WORDINGS), (task, len(made))
        for text in texts:
            assert not any(p.fullmatch(text) for p in unseen), text
        assert {t.phrasing for turns in drawn["held-out"] for t in turns if t.task == task} == set(table[SEEN:])


def test_training_has_no_name_that_is_held_out(drawn: dict[Split, list[list[Turn]]]) -> None:
    unseen = {name for turns in drawn["held-out"] for turn in turns for name in turn.names}
    assert len(unseen) > 1000
    assert all(held_out(name) for name in unseen if "_" not in name)
    seen: set[str] = set()
    for turns in drawn["train"]:
        for turn in turns:
            texts = [say.text for say in (*turn.says, *turn.reply)]
            texts += [json.dumps([t.name, t.parameters]) for t in turn.tools]
            texts += list(turn.response_format or ())
            seen |= {word.lower() for text in texts for word in re.findall(r"[\w-]+", text)}
    assert not seen & {name.lower() for name in unseen}


def test_training_has_none_of_the_natural_questions(drawn: dict[Split, list[list[Turn]]]) -> None:
    natural = {say.text.lower() for p in QUESTIONS for say in p.turns if say.kind == "user"}
    for conversations in drawn.values():
        assert not natural & {turn.says[0].text.lower() for turns in conversations for turn in turns}


def test_the_problems_render_and_their_own_replies_are_judged_right(drawn: dict[Split, list[list[Turn]]]) -> None:
    tokenizer = Tokenizer.from_file(TINY / "tokenizer.json")
    for split, conversations in drawn.items():
        for turns in conversations[:120]:
            p = problem(turns, split)
            prompt = render_prompt(tokenizer, p.prompt())
            ids, _ = render_training_example(tokenizer, p.worked())
            assert ids[: len(prompt)] == prompt
            reply = read_reply(tokenizer, ids[len(prompt) :])
            assert reply.fault is None
            assert p.judge(reply.final, reply.call), p.turns[-1].text
            assert f"{p.task}: turn {sum(say.kind == 'user' for say in p.turns)}" in p.subtypes
            assert f"{p.task}: {'new' if split == 'held-out' else 'seen'} names" in p.subtypes
