"""Conversations for a second edition of the embedded model: open vocabularies, tools, schemas, two to eight turns.

No model has been trained on them yet. A conversation is a function of (split, seed, index). The splits share neither
phrasings (`phrasings.py`) nor names: a name belongs to the held-out split if its digest says so. The questions of
`halfbyte.evals.natural` are left out of both. Each turn keeps the facts that it was made from, so that a checker can
solve it again without this file.
"""

# ruff: noqa: SIM905  (word lists are easier to read as text)
from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from phrasings import HONEST, PHRASINGS, Split, phrasings

from halfbyte.evals import words
from halfbyte.evals.grading import Grade
from halfbyte.evals.natural import QUESTIONS
from halfbyte.evals.numbers import add_steps, arithmetic_tag, insertion_steps, multiply_steps, subtract_steps
from halfbyte.evals.problem import Frame, Problem, Say, call, final, result, think, user
from halfbyte.harmony.messages import Tool

MOST_TURNS = 8
_NATURAL = frozenset(say.text.strip().lower() for p in QUESTIONS for say in p.turns if say.kind == "user")
_HELD_OUT_SHARE = 4  # one name in so many
_UNITS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
_VERBS = ("get", "find", "start", "stop", "send", "book", "count", "update", "delete", "open", "close", "print")
_OBJECTS = (
    "status report ticket balance schedule picture invoice backup meeting volume route permit locker playlist recipe "
    "contract parcel warranty badge forecast"
).split()
_KEYS = "code badge seat desk locker team plant drink hobby street planet tool shelf gate folder colour".split()


def held_out(name: str) -> bool:
    """True if a name may occur only in held-out conversations."""
    return hashlib.blake2b(name.lower().encode(), digest_size=2).digest()[0] % _HELD_OUT_SHARE == 0


@dataclass(frozen=True)
class Turn:
    """One question, its reply, and the facts that decide whether the reply is right."""

    task: str
    says: tuple[Say, ...]  # the question; with a function's result also the call and the result
    reply: tuple[Say, ...]
    phrasing: str = ""  # the template; empty: it refers to an earlier turn
    facts: dict[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] = ()  # drawn from the open vocabulary
    grade: Grade = Grade()
    tags: tuple[str, ...] = ()
    tools: tuple[Tool, ...] = ()
    response_format: tuple[str, str] | None = None


class Writer:
    """Draws everything that one conversation needs."""

    def __init__(self, rng: Random, split: Split) -> None:
        self.rng, self.split = rng, split

    # ---- vocabulary ---------------------------------------------------------------------------

    def name(self) -> str:
        """A name from syllables, a code-like identifier, or a pair of real words; of this split."""
        rng = self.rng
        while True:
            kind = rng.random()
            if kind < 0.5:
                name = words.invented(rng)
            elif kind < 0.75:
                name = f"{rng.choice('ABCDEFGHKLMNPRSTX')}{rng.choice('ABCDEFGHKLMNPRSTX')}-{rng.randint(10, 9999)}"
            else:
                name = f"{rng.choice(words.THINGS)}{rng.choice(words.ITEMS)}"
            if held_out(name) == (self.split == "held-out"):
                return name

    def names(self, count: int) -> list[str]:
        drawn: dict[str, None] = {}
        while len(drawn) < count:
            drawn[self.name()] = None
        return list(drawn)

    def number(self, most: int = 3) -> int:
        digits = self.rng.randint(1, most)
        return self.rng.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1)

    def ask(self, task: str, **fields: Any) -> tuple[str, str]:
        """(template, question), sometimes in lower case, with a number in words or with a typing error."""
        template = self.rng.choice(phrasings(task, self.split))
        for key, value in fields.items():
            if isinstance(value, int) and value < len(_UNITS) and self.rng.random() < 0.15:
                fields[key] = _UNITS[value]
        lower = self.rng.random() < 0.1
        text = self.typo(template) if self.rng.random() < 0.05 else template
        question = (text[0].lower() + text[1:] if lower else text).format(**fields)
        if template.startswith("{v}") and not lower:  # a verb; names stay as they are
            question = question[0].upper() + question[1:]
        return template, question

    def typo(self, template: str) -> str:
        """The template with two neighbouring letters of one longer word swapped."""
        spots = [m for m in re.finditer(r"(?<![\w{])[a-z]{5,}(?![\w}])", template) if "{" not in m[0]]
        if not spots:
            return template
        at = self.rng.choice(spots).start() + self.rng.randint(1, 3)
        return f"{template[:at]}{template[at + 1]}{template[at]}{template[at + 2 :]}"

    # ---- tasks --------------------------------------------------------------------------------

    def arithmetic(self) -> Turn:
        task = self.rng.choice(("add", "subtract", "multiply"))
        a, b = self.number(), self.number()
        if task == "subtract" and a < b:
            a, b = b, a
        if task == "multiply":
            b = self.rng.randint(0, 9)
        op, steps, value = {
            "add": ("+", add_steps, a + b),
            "subtract": ("-", subtract_steps, a - b),
            "multiply": ("*", multiply_steps, a * b),
        }[task]
        template, question = self.ask(task, a=a, b=b)
        reply = (think(steps(a, b)[1]), final(f"{a} {op} {b} = {value}."))
        facts = {"op": op, "a": a, "b": b}
        grade = Grade(number=value)
        return Turn(task, (user(question),), reply, template, facts, grade=grade, tags=(arithmetic_tag(op, a, b),))

    def numbers(self) -> Turn:
        task = self.rng.choice(("sort", "largest"))
        values = [str(v) for v in self.rng.sample(range(1, 1000), self.rng.randint(3, 6))]
        template, question = self.ask(task, l=", ".join(values))
        ordered = sorted(values, key=int)
        text = f"Sorted: {', '.join(ordered)}." if task == "sort" else f"The largest is {ordered[-1]}."
        grade = Grade(order=tuple(ordered)) if task == "sort" else Grade(order=(ordered[-1],))
        reply = (think(f"Insert one by one: {insertion_steps(values, False)}."), final(text))
        return Turn(task, (user(question),), reply, template, {"values": values}, grade=grade)

    def listing(self) -> Turn:
        task = self.rng.choice(("reverse", "count"))
        values = self.names(self.rng.randint(3, 7))
        template, question = self.ask(task, l=", ".join(values))
        text, thought = f"There are {len(values)}.", f"I count to {len(values)}."
        grade = Grade(number=len(values))
        if task == "reverse":
            text, thought = f"{', '.join(reversed(values))}.", f"The last is {values[-1]}."
            grade = Grade(order=tuple(reversed(values)))
        facts = {"values": values}
        return Turn(task, (user(question),), (think(thought), final(text)), template, facts, tuple(values), grade)

    def spelling(self) -> Turn:
        task = self.rng.choice(("spell", "letters"))
        word = self.name()
        while not word.isalpha():
            word = self.name()
        word = word.lower()
        facts: dict[str, Any] = {"word": word}
        if task == "spell":
            template, question = self.ask(task, w=word)
            text, thought, grade = f"{'-'.join(word)}.", f"The word is {word}.", Grade(order=tuple(word))
        else:
            facts["letter"] = letter = self.rng.choice(word)
            count = word.count(letter)
            template, question = self.ask(task, w=word, c=letter)
            trace = ", ".join(f"{c} {word[: i + 1].count(letter)}" for i, c in enumerate(word))
            text, thought, grade = f"It is there {count} times.", f"Counting {letter}: {trace}.", Grade(number=count)
        return Turn(task, (user(question),), (think(thought), final(text)), template, facts, (word,), grade)

    def reading(self) -> Turn:
        people, keys = self.names(self.rng.randint(2, 4)), self.rng.sample(_KEYS, 2)
        values = dict(zip([(n, k) for n in people for k in keys], self.names(2 * len(people)), strict=True))
        pairs = self.rng.sample(list(values), len(values))
        text = " ".join(f"The {k} of {n} is {values[n, k]}." for n, k in pairs)
        n, k = self.rng.choice(pairs)
        template, question = self.ask("read", t=text, n=n, k=k)
        sentence = f"The {k} of {n} is {values[n, k]}."
        facts = {"text": text, "person": n, "key": k}
        names = (*people, *values.values())
        reply = (think(f"The text says: {sentence}"), final(sentence))
        return Turn("read", (user(question),), reply, template, facts, names, Grade(phrases=((values[n, k],),)))

    def outside(self) -> Turn:
        template, question = self.ask("outside")
        return Turn(
            "outside", (user(question),), (think("I do not know that."), final(HONEST)), template,
            grade=Grade(refusal=True),
        )  # fmt: skip

    def remark(self, key: str, value: str) -> Turn:
        reply = (think("The user tells me something."), final("I will remember that."))
        return Turn("tell", (user(f"My {key} is {value}."),), reply, facts={"key": key, "value": value}, names=(value,))

    def recall(self, key: str, value: str) -> Turn:
        template, question = self.ask("recall", k=key)
        reply = (think(f"The user told me: {value}."), final(f"Your {key} is {value}."))
        facts = {"key": key, "value": value}
        return Turn("recall", (user(question),), reply, template, facts, (value,), Grade(phrases=((value,),)))

    def json_record(self) -> Turn:
        """Values of a text under a schema that no other conversation has."""
        fields = [n.lower().replace("-", "_") for n in self.names(self.rng.randint(1, 5))]
        schema: dict[str, Any] = {}
        value: dict[str, Any] = {}
        parts, names = [], list(fields)
        for name in fields:
            kind = self.rng.choice(("string", "integer", "enum", "array", "object"))
            if kind == "integer":
                schema[name], value[name] = {"type": "integer"}, self.number()
                parts.append(f"{name} is {value[name]}")
                continue
            options = self.names(3)
            names += options
            if kind == "enum":
                schema[name], value[name] = {"type": "string", "enum": options}, self.rng.choice(options)
            elif kind == "array":
                schema[name], value[name] = {"type": "array", "items": {"type": "string"}}, options
            elif kind == "object":
                properties = {"id": {"type": "string"}, "size": {"type": "integer"}}
                schema[name] = {"type": "object", "properties": properties, "required": ["id", "size"]}
                value[name] = {"id": options[0], "size": self.number(2)}
                parts.append(f"{name} has the id {options[0]} and the size {value[name]['size']}")
                continue
            else:
                schema[name], value[name] = {"type": "string"}, options[0]
            drawn = value[name]
            parts.append(f"{name} is {drawn}" if isinstance(drawn, str) else f"{name} are {', '.join(drawn)}")
        text = "; ".join(self.rng.sample(parts, len(parts))) + "."
        template, question = self.ask("json", t=text)
        body = {"type": "object", "properties": schema, "required": fields}
        reply = (think(f"The fields are {', '.join(fields)}."), final(json.dumps(value)))
        return Turn(
            "json", (user(question),), reply, template, {"value": value, "schema": body, "text": text}, tuple(names),
            response_format=(self.name().lower().replace("-", "_"), json.dumps(body, separators=(",", ":"))),
        )  # fmt: skip

    def tool_call(self) -> Turn:
        """One of one to eight functions, told apart by what their descriptions say; or none of them fits."""
        count = self.rng.randint(1, 8)
        deeds = self.rng.sample([(v, o) for v in _VERBS for o in _OBJECTS], count + 1)
        labels, parameters = self.names(count), self.names(count)
        tools, by_deed = [], {}
        for deed, label, parameter in zip(deeds, labels, parameters, strict=False):
            key = parameter.lower().replace("-", "_")
            properties: dict[str, Any] = {key: {"type": "string"}}
            if self.rng.random() < 0.3:
                properties["limit"] = {"type": "integer", "description": "Optional: how many at most."}
            name = f"{label.lower().replace('-', '_')}_{self.rng.choice(('run', 'do', 'call', 'v2'))}"
            schema = {"type": "object", "properties": properties, "required": [key]}
            tools.append(Tool(name, f"Use this to {deed[0]} the {deed[1]} of something.", schema))
            by_deed[deed] = name, key
        target = self.name()
        fits = self.rng.random() < 0.8
        deed = self.rng.choice(deeds[:count]) if fits else deeds[count]
        template, question = self.ask("tool", v=deed[0], o=deed[1], x=target)
        facts: dict[str, Any] = {"deed": deed, "target": target, "fits": fits}
        names = (*labels, *parameters, target)
        tags = (f"{count} function{'s' * (count > 1)}", "fits" if fits else "none fits")
        if not fits:
            reply = (think("No function fits."), final("I have no function for that."))
            return Turn(
                "tool", (user(question),), reply, template, facts, names, Grade(refusal=True), tags, tuple(tools)
            )
        name, key = by_deed[deed]
        invocation = call(name, {key: target})
        thought = think(f"The user wants to {deed[0]} the {deed[1]} of {target}. I call {name}.")
        if self.rng.random() < 0.6:
            return Turn(
                "tool", (user(question),), (thought, invocation), template, facts, names, tags=tags, tools=tuple(tools)
            )
        fails = self.rng.random() < 0.3
        value = self.name()
        outcome = {"error": f"{value} is locked"} if fails else {"answer": value}
        text = f"That failed: {value} is locked." if fails else f"The function says {value}."
        facts |= {"outcome": outcome}
        says = (user(question), thought, invocation, result(name, outcome))
        reply = (think(f"The function {name} gave a result."), final(text))
        grade, names = Grade(phrases=((value,),)), (*names, value)
        return Turn("tool", says, reply, template, facts, names, grade, (*tags, "result"), tuple(tools))

    # ---- turns that refer back ----------------------------------------------------------------

    def follow_up(self, before: Turn) -> Turn | None:
        """A turn that is understood only with the one before it; None if nothing follows from that one."""
        if before.task in ("add", "subtract", "multiply"):
            op, a, b = (before.facts[k] for k in ("op", "a", "b"))
            value, c = {"+": a + b, "-": a - b, "*": a * b}[op], self.rng.randint(1, 99)
            if self.rng.random() < 0.7:
                text = self.rng.choice((f"And plus {c}?", f"Now add {c}.", f"Plus {c}?"))
                reply = (think(add_steps(value, c)[1]), final(f"{value} + {c} = {value + c}."))
                facts, answer = {"op": "+", "a": value, "b": c}, value + c
            else:
                text = f"Sorry, I meant {a} + {c}."
                reply = (think(add_steps(a, c)[1]), final(f"{a} + {c} = {a + c}."))
                facts, answer = {"op": "+", "a": a, "b": c}, a + c
            return Turn("follow_up", (user(text),), reply, facts=facts, grade=Grade(number=answer))
        if before.task in ("reverse", "count"):
            values = before.facts["values"]
            n = self.rng.randrange(min(len(values), 3))
            text = f"What was the {words.ORDINALS[n]} one in my list?"
            facts = {"values": values, "nth": n}
            reply = (think(f"The list was {', '.join(values)}."), final(f"It was {values[n]}."))
            grade = Grade(phrases=((values[n],),))
            return Turn("follow_up", (user(text),), reply, facts=facts, names=tuple(values), grade=grade)
        if self.rng.random() < 0.3:
            reply = (think("Thanks."), final("You are welcome!"))
            grade = Grade(phrases=(("welcome",),))
            return Turn("thanks", (user(self.rng.choice(("Thanks!", "Thank you."))),), reply, grade=grade)
        return None


def conversation(split: Split, seed: int, index: int) -> list[Turn]:
    """One to eight turns, two and more in most; at most one with functions or a schema, which is then the last."""
    rng = Random(f"second/{split}/{seed}/{index}")
    writer = Writer(rng, split)
    makers: tuple[Callable[[], Turn], ...] = (
        writer.arithmetic, writer.arithmetic, writer.numbers, writer.listing, writer.spelling, writer.reading,
        writer.outside,
    )  # fmt: skip
    size = rng.choice((1, *range(2, MOST_TURNS + 1)))
    facts = dict(zip(rng.sample(_KEYS, 2), writer.names(2), strict=True))
    turns: list[Turn] = []
    unsaid, topics = list(facts), []
    while len(turns) < size:
        last, kind = len(turns) == size - 1, rng.random()
        turn: Turn | None = None
        if last and kind < 0.35:
            turn = rng.choice((writer.tool_call, writer.json_record))()
        elif turns and kind < 0.55:
            turn = writer.follow_up(turns[-1])
        elif unsaid and not last and kind < 0.7:
            topics.append(unsaid.pop())
            turn = writer.remark(topics[-1], facts[topics[-1]])
        elif topics and kind < 0.85:
            key = rng.choice(topics)
            turn = writer.recall(key, facts[key])
        turn = turn or rng.choice(makers)()
        if turn.says[0].text.strip().lower() not in _NATURAL:
            turns.append(turn)
    return turns


def problem(turns: list[Turn], split: Split) -> Problem:
    """The last turn of a conversation as a problem; the turns before it are as they were answered."""
    *before, turn = turns
    says = tuple(say for t in before for say in (*t.says, t.reply[-1]))
    frame = Frame(tools=turn.tools, response_format=turn.response_format)
    reply = turn.reply[-1]
    unseen = split == "held-out"
    tags = (*turn.tags, f"{'new' if unseen else 'seen'} phrasing", f"{'new' if unseen else 'seen'} names")
    solved = Problem(turn.task, (*says, *turn.says), turn.reply, "free", frame=frame, grade=turn.grade, tags=tags)
    if reply.kind == "call":
        return replace(solved, kind="call", accept=(reply.function,), value=json.loads(reply.text), grade=None)
    if turn.task == "json":
        return replace(solved, kind="json", value=turn.facts["value"], grade=None)
    return solved


assert all(len(set(table)) == 20 for table in PHRASINGS.values())
