"""Conversations for a second edition of the embedded model: open vocabularies, tools, schemas, one to eight turns.

A conversation is a function of (split, seed, index). The splits share neither phrasings (`phrasings.py`, and the last
quarter of each table in `everyday.py` and `errands.py`) nor names: a name belongs to the held-out split if its digest
says so. The questions of `halfbyte.evals.natural` are left out of both. Each turn keeps the facts that it was made
from, so that a checker can solve it again without this file.
"""

# ruff: noqa: E501, SIM905  (word lists are easier to read as text)
from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from described import Described
from everyday import NAMED, TOLD, running
from phrasings import HONEST, Split
from remarks import Told
from turns import Turn

from halfbyte.evals import words
from halfbyte.evals.grading import Grade
from halfbyte.evals.natural import QUESTIONS
from halfbyte.evals.numbers import add_steps, arithmetic_tag, insertion_steps, multiply_steps, subtract_steps
from halfbyte.evals.problem import Frame, Problem, call, final, result, think, user
from halfbyte.evals.tasks import frame
from halfbyte.harmony.messages import Tool

MOST_TURNS = 8
_NATURAL = frozenset(say.text.strip().lower() for p in QUESTIONS for say in p.turns if say.kind == "user")
_VERBS = (
    "get", "find", "start", "stop", "send", "book", "count", "update", "delete", "open", "close", "print", "check", "save",
    "share", "move", "copy", "show", "read", "change", "order", "pay", "sign", "test",
)  # fmt: skip
_OBJECTS = (
    "status report ticket balance schedule picture invoice backup meeting volume route permit locker playlist recipe "
    "contract parcel warranty badge forecast account folder server door lamp order address price room letter payment "
    "subscription camera budget profile review"
).split()
_KEYS = (
    "code badge seat desk locker team plant hobby street planet tool shelf gate folder colour phone teacher city song book "
    "game lamp train doctor food hotel floor ticket bank school"
).split()


class Writer(Described):
    """Draws everything that one conversation needs."""

    # ---- tasks --------------------------------------------------------------------------------

    def arithmetic(self) -> Turn:
        task = self.rng.choice(("add", "subtract", "subtract", "multiply"))
        a, b = (3 if self.rng.random() < 0.4 else None for _ in "ab")
        a, b = (self.rng.randint(100, 999) if n else self.number() for n in (a, b))
        if task == "subtract" and a < b:
            a, b = b, a
        if task == "multiply":
            b = self.rng.randint(0, 9)
        op, steps, value = {
            "add": ("+", add_steps, a + b),
            "subtract": ("-", subtract_steps, a - b),
            "multiply": ("*", multiply_steps, a * b),
        }[task]
        said = (b, a) if task == "multiply" and self.rng.random() < 0.3 else (a, b)
        template, question = self.ask(task, a=said[0], b=said[1])
        reply = (think(f"This is {a} {op} {b}. {steps(a, b)[1]}"), final(f"{a} {op} {b} = {value}."))
        facts = {"op": op, "a": a, "b": b}
        tags = (arithmetic_tag(op, a, b),)
        return Turn(
            task, (user(question),), reply, template, facts, grade=Grade(number=value), tags=tags, bare=str(value)
        )

    def numbers(self) -> Turn:
        task = self.rng.choice(("sort", "largest"))
        values = [str(v) for v in self.rng.sample(range(1, self.most()), self.rng.randint(3, 6))]
        template, question = self.ask(task, l=self.listed(values))
        ordered = sorted(values, key=int)
        text = f"Sorted: {', '.join(ordered)}." if task == "sort" else f"The largest is {ordered[-1]}."
        grade = Grade(order=tuple(ordered)) if task == "sort" else Grade(order=(ordered[-1],))
        thought = f"Insert one by one: {insertion_steps(values, False)}."
        if task == "largest":
            thought = f"Keep the largest: {running([int(v) for v in values], max)[0]}."
        bare = ", ".join(ordered) if task == "sort" else ordered[-1]
        reply = (think(thought), final(text))
        return Turn(task, (user(question),), reply, template, {"values": values}, grade=grade, bare=bare)

    def listing(self) -> Turn:
        task = self.rng.choice(("reverse", "count"))
        drawn = self.names(self.rng.randint(3, 7)) if self.rng.random() < 0.6 else []
        values = drawn or self.things()
        template, question = self.ask(task, l=self.listed(values))
        text, bare = f"There are {len(values)}.", str(len(values))
        thought = f"I count: {', '.join(f'{i} {v}' for i, v in enumerate(values, 1))}."
        grade = Grade(number=len(values))
        if task == "reverse":
            bare = ", ".join(reversed(values))
            text, thought = f"{bare}.", f"The last is {values[-1]}."
            grade = Grade(order=tuple(reversed(values)))
        facts = {"values": values}
        return Turn(
            task, (user(question),), (think(thought), final(text)), template, facts, tuple(drawn), grade, bare=bare
        )

    def spelling(self) -> Turn:
        task = self.rng.choice(("spell", "letters"))
        word = self.word()
        facts: dict[str, Any] = {"word": word}
        if task == "spell":
            template, question = self.ask(task, w=word)
            count, text, thought, grade = (
                0,
                f"{'-'.join(word)}.",
                f"{word} is {'-'.join(word)}.",
                Grade(order=tuple(word)),
            )
        else:
            facts["letter"] = letter = self.rng.choice(word)
            count = word.count(letter)
            template, question = self.ask(task, w=word, c=letter)
            trace = ", ".join(f"{c} {word[: i + 1].count(letter)}" for i, c in enumerate(word))
            text, thought, grade = f"It is there {count} times.", f"Counting {letter}: {trace}.", Grade(number=count)
        bare = str(count) if task == "letters" else "-".join(word)
        return Turn(task, (user(question),), (think(thought), final(text)), template, facts, (), grade, bare=bare)

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
        return Turn(
            "read",
            (user(question),),
            reply,
            template,
            facts,
            names,
            Grade(phrases=((values[n, k],),)),
            bare=values[n, k],
        )

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
        grade = Grade(phrases=((value,),))
        return Turn("recall", (user(question),), reply, template, facts, (value,), grade, bare=value)

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

    def tool_offer(self) -> tuple[tuple[Tool, ...], dict[tuple[str, str], tuple[str, str]], tuple[str, ...]]:
        """(one to eight functions told apart by what their descriptions say, deed -> (function, parameter), names)."""
        count = self.rng.randint(1, 8)
        deeds = self.rng.sample([(v, o) for v in _VERBS for o in _OBJECTS], count)
        if count > 2:  # two that differ in one word
            deeds[1] = deeds[0][0], self.rng.choice([o for o in _OBJECTS if o not in {d[1] for d in deeds}])
        labels, parameters = self.names(count), self.names(count)
        tools, by_deed = [], {}
        for deed, label, parameter in zip(deeds, labels, parameters, strict=True):
            key = self.rng.choice((parameter.lower().replace("-", "_"), *_KEYS))
            properties: dict[str, Any] = {key: {"type": "string"}}
            if self.rng.random() < 0.3:
                properties["limit"] = {"type": "integer", "description": "Optional: how many at most."}
            name = f"{label.lower().replace('-', '_')}_{self.rng.choice(('run', 'do', 'call', 'v2'))}"
            if self.rng.random() < 0.3:
                name = f"{deed[0]}_{deed[1]}"
            schema = {"type": "object", "properties": properties, "required": [key]}
            tools.append(Tool(name, f"Use this to {deed[0]} the {deed[1]} of something.", schema))
            by_deed[deed] = name, key
        return tuple(tools), by_deed, (*labels, *parameters)

    def tool_call(
        self, offer: tuple[tuple[Tool, ...], dict[tuple[str, str], tuple[str, str]], tuple[str, ...]] | None = None
    ) -> Turn:
        """One of the functions offered, or none of them fits."""
        tools, by_deed, names = offer or self.tool_offer()
        count = len(tools)
        target = self.name()
        fits = self.rng.random() < 0.8
        others = [(v, o) for v in _VERBS for o in _OBJECTS if (v, o) not in by_deed]
        deed = self.rng.choice(list(by_deed)) if fits else self.rng.choice(others)
        template, question = self.ask("tool", v=deed[0], o=deed[1], x=target)
        facts: dict[str, Any] = {"deed": deed, "target": target, "fits": fits}
        names = (*names, target)
        tags = (f"{count} function{'s' * (count > 1)}", "fits" if fits else "none fits")
        if not fits:
            reply = (think("No function fits."), final("I have no function for that."))
            return Turn("tool", (user(question),), reply, template, facts, names, Grade(refusal=True), tags, tools)
        name, key = by_deed[deed]
        invocation = call(name, {key: target})
        thought = think(f"The user wants to {deed[0]} the {deed[1]} of {target}. I call {name}.")
        if self.rng.random() < 0.6:
            return Turn(
                "tool", (user(question),), (thought, invocation), template, facts, names, tags=tags, tools=tools
            )
        fails = self.rng.random() < 0.3
        value = self.name()
        outcome = {"error": f"{value} is locked"} if fails else {"answer": value}
        text = f"That failed: {value} is locked." if fails else f"The function says {value}."
        facts |= {"outcome": outcome}
        says = (user(question), thought, invocation, result(name, outcome))
        reply = (think(f"The function {name} gave a result."), final(text))
        grade, names = Grade(phrases=((value,),)), (*names, value)
        return Turn("tool", says, reply, template, facts, names, grade, (*tags, "result"), tools)

    # ---- turns that refer back ----------------------------------------------------------------

    def follow_up(self, before: Turn) -> Turn | None:
        """A turn that is understood only with the one before it; None if nothing follows from that one."""
        rng = self.rng
        if rng.random() < 0.1:
            return replace(self.talk_of("thanks"), task="thanks")
        if before.task in ("tell", "of them") and "values" in before.facts:
            return self.list_asked(before.facts["values"])
        if before.task in ("add", "subtract", "multiply", "story"):
            op, a, b = (before.facts[k] for k in ("op", "a", "b"))
            return self.calculation_after(op, a, b, {"+": a + b, "-": a - b, "*": a * b}[op])
        if before.task in ("reverse", "count", "nth", "last"):
            values = before.facts["values"]
            n = rng.randrange(min(len(values), 3))
            text = self.pick(_NTH, "of list").format(o=words.ORDINALS[n])
            facts = {"values": values, "nth": n}
            reply = (think(f"The list was {', '.join(values)}."), final(f"It was {values[n]}."))
            grade = Grade(phrases=((values[n],),))
            return Turn("follow_up", (user(text),), reply, facts=facts, grade=grade, bare=values[n])
        if before.task in ("sort", "down"):
            values = [int(v) for v in before.facts["values"]]
            ordered = [str(v) for v in sorted(values, reverse=before.task == "sort")]
            listed = ", ".join(ordered)
            reply = (think(f"The other way round it is {listed}."), final(f"Sorted: {listed}."))
            return Turn(
                "turned", (user(self.pick(_TURNED, "turned")),), reply, grade=Grade(order=tuple(ordered)), bare=listed
            )
        if before.task in ("spell", "first letter", "last letter", "length", "backwards"):
            word = self.word()
            task = before.task
            text = self.pick(_AND, "again").format(w=word)
            if task == "spell":
                spelled = "-".join(word)
                reply = (think(f"{word} is {spelled}."), final(f"{spelled}."))
                return Turn("again", (user(text),), reply, grade=Grade(order=tuple(word)), bare=spelled)
            return replace(self.lettering(task, word), task="again", says=(user(text),), phrasing="")
        return None

    def calculation_after(self, op: str, a: int, b: int, value: int) -> Turn:
        """Something done with the value before, or the calculation corrected."""
        rng = self.rng
        c, kind = rng.randint(1, 99), rng.random()
        if kind < 0.15:
            return replace(self.comparing(value), task="compared")
        if kind < 0.3 and value < 1000:
            c = rng.randint(2, 9)
            return self.calculation("changed", self.pick(_TIMES, "times").format(c=c), "*", value, c)
        if kind < 0.5 and value > 1:
            c = rng.randint(1, min(value, 99))
            return self.calculation("changed", self.pick(_LESS, "less").format(c=c), "-", value, c)
        if kind < 0.8:
            return self.calculation("follow_up", self.pick(_PLUS, "more").format(c=c), "+", value, c)
        if kind < 0.9 and op == "+" and a >= b:
            return self.calculation("changed", self.pick(_MEANT).format(a=a, op="-", c=b), "-", a, b)
        return self.calculation("follow_up", self.pick(_MEANT).format(a=a, op="+", c=c), "+", a, c)

    def calculation(self, task: str, question: str, op: str, a: int, b: int) -> Turn:
        steps, value = {"+": (add_steps, a + b), "-": (subtract_steps, a - b), "*": (multiply_steps, a * b)}[op]
        reply = (think(f"This is {a} {op} {b}. {steps(a, b)[1]}"), final(f"{a} {op} {b} = {value}."))
        facts = {"op": op, "a": a, "b": b}
        return Turn(
            task, (user(self.around(question)),), reply, facts=facts, grade=Grade(number=value), bare=str(value)
        )


_PLUS = (
    "And plus {c}?", "Now add {c}.", "Plus {c}?", "And {c} more?", "Add {c} to that.", "What if I add {c}?",
    "And with {c} on top?", "Then plus {c}.", "Increase it by {c}.", "and {c} added?", "Put {c} on top of that.",
    "What is that plus {c}?", "Raise that by {c}.",
)  # fmt: skip
_LESS = (
    "And minus {c}?", "Now subtract {c}.", "Minus {c}?", "And without {c}?", "Subtract {c} from that.", "Less {c}?",
    "Then minus {c}.", "Lower it by {c}.", "and {c} less?", "What is that minus {c}?", "Take off {c}.", "Remove {c}.",
)  # fmt: skip
_TIMES = (
    "And times {c}?", "Now multiply by {c}.", "Times {c}?", "Multiply that by {c}.", "And {c} times that?",
    "Then times {c}.", "What is that times {c}?", "{c} times as much?",
)  # fmt: skip
_MEANT = (
    "Sorry, I meant {a} {op} {c}.", "Sorry, it should be {a} {op} {c}.", "Sorry, I wanted {a} {op} {c}.",
    "Sorry, that was wrong. I need {a} {op} {c}.", "Sorry, make it {a} {op} {c}.",
)  # fmt: skip
_NTH = (
    "What was the {o} one in my list?", "Which was the {o} one in my list?", "Tell me the {o} one in my list.",
    "And the {o} one in my list?", "Which is the {o} one in my list?", "the {o} one in my list?",
    "Do you know the {o} one in my list?", "Say the {o} one in my list.",
)  # fmt: skip
_TURNED = (
    "And in the other direction?", "And backwards?", "Now the other way.", "And the opposite order?", "Turn it around.",
    "Now in reverse.", "Reverse that.", "And from the other end?", "The reverse, please.", "Now backwards, please.",
)  # fmt: skip
_AND = ("And {w}?", "And the word {w}?", "Now {w}.", "What about {w}?", "The same for {w}.", "and {w}", "Do it with {w}.", "How about {w}?")  # fmt: skip


def conversation(split: Split, seed: int, index: int) -> list[Turn]:
    return conversations(split, seed, index)[0]


def conversations(
    split: Split, seed: int, index: int, endings: int = 1, wording: Split | None = None
) -> list[list[Turn]]:
    """One to eight turns, two and more in most, with up to `endings` different last turns.

    At most the last turn has functions or a schema. `wording` is the split of phrasings, if it is not that of names.
    """
    rng = Random(f"second/{split}/{seed}/{index}")
    writer = Writer(rng, split, wording)
    makers: dict[Callable[[], Turn], float] = {
        writer.arithmetic: 4, writer.numbers: 1.5, writer.listing: 1.5, writer.spelling: 1.6, writer.reading: 1.2,
        writer.outside: 0.5, writer.story: 3, writer.picking: 2, writer.lettering: 1.6, writer.repeating: 1.2,
        writer.comparing: 1, writer.fact: 2, writer.detail: 2, writer.talk: 1.2, writer.beyond: 3,
    }  # fmt: skip
    if writer.wording == "train":
        makers |= {writer.life: 2.2, writer.picking: 2.5, writer.numbers: 2, writer.listing: 2}
        makers |= {writer.comparing: 1.5, writer.detail: 2.6, writer.talk: 2.6}
    size = rng.choice((1, *range(2, MOST_TURNS + 1)))
    facts = dict(zip(rng.sample(_KEYS, 2), writer.names(2), strict=True))
    told = {key: writer.value(TOLD[key][3]) for key in rng.sample(list(TOLD), 2)}
    tellings = [Told(partial(writer.remark, k, v), partial(writer.recall, k, v)) for k, v in facts.items()]
    tellings += [Told(partial(writer.told, k, v), partial(writer.told_again, k, v)) for k, v in told.items()]
    tellings += [rng.choice((writer.relative, writer.relative, writer.stored, writer.favourite))()]
    if writer.wording == "train":
        tellings += [rng.choice((writer.attribute, writer.event))() for _ in range(rng.choice((0, 1, 1, 2)))]
    persona = writer.name() if rng.random() < 0.1 else ""
    instructions = writer.pick(NAMED, "named").format(v=persona) if persona else ""
    unsaid: list[Told] = rng.sample(tellings, len(tellings))
    topics: list[Told] = []

    def draw(before: Sequence[Turn], last: bool) -> Turn:
        kind = rng.random()
        turn: Turn | None = None
        if before and kind < (0.8 if before[-1].facts.get("key") == "" and "values" in before[-1].facts else 0.35):
            turn = writer.follow_up(before[-1])
        elif not last and 0.35 <= kind < 0.38:
            turn = writer.list_told()
        elif unsaid and not last and kind < 0.55:
            topics.append(unsaid.pop())
            turn = topics[-1].say()
        elif topics and kind < 0.7:
            turn = rng.choice(topics).ask()
        elif before and 0.7 <= kind < 0.74:
            turn = writer.not_told(rng.choice([key for key in TOLD if key not in told]))
        elif persona and kind < 0.85:
            turn = writer.persona(persona)
        return turn or rng.choices(list(makers), list(makers.values()))[0]()

    def fresh(make: Callable[[], Turn]) -> Turn:
        while True:
            turn = make()
            if turn.says[0].text.strip().lower() not in _NATURAL:
                return replace(turn, instructions=instructions)

    turns: list[Turn] = []
    while len(turns) < size - 1:
        turns.append(fresh(lambda: draw(turns, False)))
    kind = rng.random()
    makes: Callable[[], Turn]
    if kind < 0.16:
        offer = writer.tool_offer()
        makes = lambda: writer.tool_call(offer)  # noqa: E731
    elif kind < 0.36 and writer.wording == "train" and rng.random() < 0.5:
        functions = writer.described()
        makes = lambda: writer.described_call(functions)  # noqa: E731
    elif kind < 0.36:
        offered = writer.offered(rng.randint(1, 8))
        absent = [row for row in writer.errands() if row[:2] not in {e.row[:2] for e in offered}]
        if chain := writer.chain(offered) if rng.random() < 0.15 else []:
            return [[*turns, replace(turn, instructions=instructions)] for turn in chain[:endings]]
        makes = lambda: writer.errand(offered, absent)  # noqa: E731
    elif kind < 0.44:
        makes = writer.json_record
        endings = 1
    elif kind < 0.55:
        form = writer.form()
        makes = lambda: writer.note(*form)  # noqa: E731
    elif kind < 0.58:
        makes = writer.answer_form
        endings = 1
    else:
        makes = lambda: draw(turns, True)  # noqa: E731
    return [[*turns, fresh(makes)] for _ in range(endings)]


def problem(turns: list[Turn], split: Split, wording: Split | None = None, before: Frame | None = None) -> Problem:
    """The last turn of a conversation as a problem; the turns before it are as they were answered.

    `before` is what stands before the first user message but for functions, a schema and a name.
    """
    *earlier, turn = turns
    stands = replace(before or Frame(), tools=turn.tools, response_format=turn.response_format)
    if turn.instructions:
        stands = replace(stands, instructions=turn.instructions, brief=False)
    if turn.tools or turn.response_format:
        stands = replace(stands, instructions=None if stands.brief else stands.instructions, brief=False)
    says = tuple(say for t in earlier for say in (*t.says, _shown(t, stands)))
    reply = (*turn.reply[:-1], _shown(turn, stands))
    phrasing, names = ("new" if s == "held-out" else "seen" for s in (wording or split, split))
    tags = (*turn.tags, f"{phrasing} phrasing", f"{names} names")
    solved = Problem(turn.task, (*says, *turn.says), reply, "free", frame=stands, grade=turn.grade, tags=tags)
    if reply[-1].kind == "call":
        call_of = reply[-1]
        return replace(solved, kind="call", accept=(call_of.function,), value=json.loads(call_of.text), grade=None)
    if turn.response_format:
        return replace(solved, kind="json", value=turn.facts["value"], grade=None)
    return solved


def _shown(turn: Turn, stands: Frame) -> Any:
    """The reply's last message: the bare result where the frame asks for it and there is one."""
    last = turn.reply[-1]
    return final(turn.bare) if stands.brief and turn.bare and last.kind == "final" else last


def held_out_problems(wording: Split, seed: int, count: int) -> list[Problem]:
    """Every turn of `count` conversations with names that training never has."""
    problems = []
    for i in range(count):
        *earlier, last = conversations("held-out", seed, i, wording=wording)[0]
        for n, turn in enumerate(earlier, 1):
            tools = () if last.response_format else last.tools
            problems.append(problem([*earlier[: n - 1], replace(turn, tools=tools)], "held-out", wording))
        problems.append(problem([*earlier, last], "held-out", wording))
    return problems


def group(rng: Random, seed: int, index: int, endings: int = 4) -> list[Problem]:
    """What training shows of one conversation: every turn of it as a problem, with several last turns.

    They begin alike, so that training computes the beginning once.
    """
    drawn = conversations("train", seed, index, endings)
    stands = frame(rng)
    *earlier, last = drawn[0]
    problems: list[Problem] = []
    if not last.response_format:  # with a schema the earlier turns were other requests
        for i, turn in enumerate(earlier, 1):
            problems.append(problem([*earlier[: i - 1], replace(turn, tools=last.tools)], "train", before=stands))
    for turns in drawn:
        turn = turns[-1]
        calls = [i for i, say in enumerate(turn.says) if say.kind == "call"]
        if len(calls) == 1:  # a result is there: the call that led to it is a problem of its own
            asked = replace(turn, says=turn.says[:1], reply=turn.says[1:2] + turn.says[2:3])
            problems.append(problem([*turns[:-1], asked], "train", before=stands))
        problems.append(problem(turns, "train", before=stands))
    return problems
