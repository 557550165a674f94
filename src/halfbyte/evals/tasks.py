"""The tasks of the embedded model by name, and the mixture it was trained on.

Every problem is a function of (split, seed, task, index): `problem` makes one for evaluation, `group` makes several
that share their beginning for training. The two splits never share a seed; where a task's space is small (small talk,
one-digit sums) the same question can still occur in both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random

from halfbyte.errors import UsageError
from halfbyte.evals import calling, numbers, reading, talk
from halfbyte.evals.problem import Effort, Frame, Problem

_NEUTRAL = (
    "You are a helpful assistant.",
    "Be friendly and correct.",
    "Answer the user's questions.",
    "Help the user.",
    "You are a careful assistant. Answer in English.",
)
_BRIEF = (
    "Answer with the bare result, no sentence.",
    "Give only the answer and nothing else.",
    "Reply with the answer only.",
)
_IDENTITIES = ("You are a helpful assistant.", "You are halfbyte, a small language model.")


def frame(rng: Random) -> Frame:
    """What stands before the conversation: mostly harmony's default system message, sometimes none."""
    efforts: tuple[Effort | None, ...] = (None, "low", "medium", "high")
    effort = rng.choices(efforts, (15, 25, 35, 25))[0]
    identity = rng.choice(_IDENTITIES) if rng.random() < 0.15 else None
    date = f"20{rng.randint(24, 29)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}" if rng.random() < 0.85 else None
    style = rng.random()
    instructions = None if style < 0.5 else rng.choice(_NEUTRAL) if style < 0.72 else rng.choice(_BRIEF)
    return Frame(effort, identity, date, instructions, brief=instructions in _BRIEF)


def _plain(f: Frame) -> Frame:
    """Without a wish for bare answers, for tasks that have one form of answer."""
    return replace(f, instructions=None, brief=False) if f.brief else f


SHORT: dict[str, Callable[[Random, Frame], Problem]] = {
    "arithmetic": numbers.arithmetic,
    "story": numbers.story,
    "lists": numbers.lists,
    "letters": numbers.letters,
    "repeat": numbers.repeat,
    "chat": talk.chat,
}


def _memory(rng: Random, f: Frame) -> Problem:
    others = [SHORT[rng.choice(("arithmetic", "lists", "chat", "story"))](rng, f) for _ in range(rng.randint(0, 3))]
    return talk.memory(rng, f, others)


def _extract(rng: Random, f: Frame) -> Problem:
    f = replace(_plain(f), response_format=reading.order_schema(rng))
    return reading.extract(rng, f)


def _with_tools(make: Callable[[Random, Frame, list[calling.Offer]], Problem]) -> Callable[[Random, Frame], Problem]:
    def draw(rng: Random, f: Frame) -> Problem:
        offered = calling.offers(rng, rng.randint(1, 4))
        return make(rng, replace(_plain(f), tools=tuple(o.tool for o in offered)), offered)

    return draw


TASKS: dict[str, Callable[[Random, Frame], Problem]] = {
    **SHORT,
    "memory": _memory,
    "reading": reading.reading,
    "unknown": reading.unknown,
    "needle": reading.needle,
    "extract": _extract,
    "tool_call": _with_tools(calling.tool_call),
    "tool_answer": _with_tools(calling.tool_answer),
    "tool_none": _with_tools(calling.tool_none),
}


def problem(task: str, seed: int, index: int, *, quick: bool = False) -> Problem:
    """The held-out problem number `index` of a task; `quick` ones have haystacks of about a thousand tokens."""
    if task not in TASKS:
        raise UsageError(f"there is no task {task!r}; the tasks are {', '.join(TASKS)}.")
    rng = Random(f"held-out/{seed}/{task}/{index}")
    f = frame(rng)
    return reading.needle(rng, f, (100, 130)) if quick and task == "needle" else TASKS[task](rng, f)


# ---- training -----------------------------------------------------------------------------------

MIXTURE: Mapping[str, float] = {"short": 0.50, "scene": 0.14, "haystack": 0.04, "extract": 0.10, "tools": 0.22}
_SHORT_WEIGHTS = {
    "arithmetic": 6,
    "story": 3,
    "lists": 4,
    "sort": 2,
    "letters": 3,
    "repeat": 2,
    "echo": 1,
    "chat": 2,
    "remark": 0.7,
    "memory": 3,
}
# Short problems by the name training weighs them under: the tasks, and the hard parts of some on their own.
_DRAWN: dict[str, Callable[[Random, Frame], Problem]] = {
    **SHORT,
    "memory": _memory,
    "remark": talk.remark,
    "sort": lambda rng, f: numbers.lists(rng, f, "sort"),
    "echo": lambda rng, f: numbers.repeat(rng, f, 0.7),
}


def _short(rng: Random, f: Frame, weights: Mapping[str, float]) -> Problem:
    return _DRAWN[rng.choices(list(weights), list(weights.values()))[0]](rng, f)


def group(
    rng: Random,
    mixture: Mapping[str, float] = MIXTURE,
    *,
    short: Mapping[str, float] = _SHORT_WEIGHTS,
    sentences: tuple[int, int] = (20, 120),
    who: float = 0.3,
) -> list[Problem]:
    """Problems of one kind whose conversations begin alike, so that training computes the beginning once.

    `sentences` bounds the haystacks, whose length is drawn evenly in its logarithm; `who` is the share of questions
    about a short text that ask for the person.
    """
    kind = rng.choices(list(mixture), list(mixture.values()))[0]
    f = frame(rng)
    if kind == "short":
        return [_short(rng, f, short) for _ in range(rng.randint(3, 8))]
    if kind == "scene":
        return reading.questions(rng, reading.scene(rng, rng.randint(3, 14)), f, rng.randint(3, 8), who=who)
    if kind == "haystack":
        low, high = sentences
        size = int(low * (high / low) ** rng.random())
        s = reading.haystack(rng, size, rng.randint(2, 10))
        return reading.questions(rng, s, f, rng.randint(8, 16), missing=0.25, who=0.0)
    if kind == "extract":
        f = replace(_plain(f), response_format=reading.order_schema(rng))
        return [reading.extract(rng, f) for _ in range(rng.randint(2, 5))]
    if kind == "tools":
        offered = calling.offers(rng, rng.randint(1, 4))
        f = replace(_plain(f), tools=tuple(o.tool for o in offered))
        makes = rng.choices(
            (calling.tool_call, calling.tool_answer, calling.tool_none, None), (5, 2.5, 1.5, 1), k=rng.randint(4, 8)
        )
        return [make(rng, f, offered) if make else _short(rng, f, short) for make in makes]
    raise UsageError(f"there is no kind of training group {kind!r}; the kinds are {', '.join(MIXTURE)}.")
