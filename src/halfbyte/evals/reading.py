"""Problems that are answered from a given text: facts, facts that are not there, needles in long haystacks, extraction.

A `Scene` is the text with its facts, so that training can ask many questions about one text; evaluation asks one.
"""

# ruff: noqa: E501  (a table of sentences reads best with one per line)
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from halfbyte.evals import words
from halfbyte.evals.problem import Frame, Problem, answered, final, name_tag, think, user


@dataclass(frozen=True)
class Relation:
    fact: str  # {n}, {v}
    ask: tuple[str, ...]
    who: str  # asks for the person, {v}
    missing: str  # completes "The text does not say ..."
    value: Callable[[Random], str]


def _of(pool: list[str]) -> Callable[[Random], str]:
    return lambda rng: rng.choice(pool)


RELATIONS: dict[str, Relation] = {
    "city": Relation("{n} lives in {v}.", ("Where does {n} live?", "In which city does {n} live?"), "Who lives in {v}?", "where {n} lives", words.city),
    "job": Relation("{n} works as {v}.", ("What is {n}'s job?", "What does {n} work as?"), "Who works as {v}?", "what {n} works as", lambda r: words.a(r.choice(words.JOBS))),
    "food": Relation("{n} likes to eat {v}.", ("What does {n} like to eat?",), "Who likes to eat {v}?", "what {n} likes to eat", _of(words.FOODS)),
    "color": Relation("{n}'s favorite color is {v}.", ("What is {n}'s favorite color?", "Which color does {n} like best?"), "Whose favorite color is {v}?", "what {n}'s favorite color is", _of(words.COLORS)),
    "pet": Relation("{n} has a pet {v}.", ("What pet does {n} have?", "Which animal does {n} have?"), "Who has a pet {v}?", "what pet {n} has", _of(words.PETS)),
    "age": Relation("{n} is {v} years old.", ("How old is {n}?", "What is {n}'s age?"), "Who is {v} years old?", "how old {n} is", lambda r: str(r.randint(5, 99))),
    "month": Relation("{n} was born in {v}.", ("In which month was {n} born?", "When was {n} born?"), "Who was born in {v}?", "when {n} was born", _of(words.MONTHS)),
    "sport": Relation("{n} plays {v}.", ("Which sport does {n} play?", "What does {n} play?"), "Who plays {v}?", "what {n} plays", _of(words.SPORTS)),
    "ride": Relation("{n} goes to work by {v}.", ("How does {n} go to work?",), "Who goes to work by {v}?", "how {n} goes to work", _of(words.VEHICLES)),
}  # fmt: skip
CODE = Relation("The secret code of {n} is {v}.", ("What is the secret code of {n}?", "What is {n}'s secret code?", "Tell me the secret code of {n}."), "Whose secret code is {v}?", "what the secret code of {n} is", lambda r: words.digits(r, 4, 6))  # fmt: skip

_FILLERS = (
    "The {a} stands near the {b}.", "A {c} {a} was seen behind the {b}.", "Nobody knows who built the {b}.",
    "On {d} the {a} was very quiet.", "The road to the {a} passes the {b}.", "In {m} the {a} is closed.",
    "The old {a} has a {c} {b}.", "It rained on the {a} all {d}.",
)  # fmt: skip


def _filler(rng: Random) -> str:
    a, b = rng.sample(words.THINGS, 2)
    return rng.choice(_FILLERS).format(
        a=a, b=b, c=rng.choice(words.COLORS), d=rng.choice(words.DAYS), m=rng.choice(words.MONTHS)
    )


@dataclass
class Scene:
    """Sentences in order, and the facts among them by (person, relation)."""

    sentences: list[str] = field(default_factory=list)
    facts: dict[tuple[str, str], str] = field(default_factory=dict)
    people: list[str] = field(default_factory=list)
    opening: str = ""
    closing: str = ""

    @property
    def text(self) -> str:
        return self.opening + " ".join(self.sentences) + self.closing


_WRAPS = (
    ("Context: ", "\n\nQuestion: "), ("Read this text.\n\n", "\n\n"), ("Here are some facts.\n\n", "\n\nNow answer: "),
    ("", "\n\n"), ("Text: ", "\n\nAnswer from the text: "),
)  # fmt: skip


def scene(rng: Random, facts: int) -> Scene:
    """A short text of `facts` facts about a few people, with some filler."""
    s = Scene(people=words.people(rng, max(2, rng.randint(facts // 3, facts))))
    while len(s.facts) < facts:
        key = rng.choice(s.people), rng.choice(list(RELATIONS))
        if key not in s.facts:
            relation = RELATIONS[key[1]]
            s.facts[key] = relation.value(rng)
            s.sentences.append(relation.fact.format(n=key[0], v=s.facts[key]))
            if rng.random() < 0.15:
                s.sentences.append(_filler(rng))
    s.opening, s.closing = rng.choice(_WRAPS)
    return s


def haystack(rng: Random, sentences: int, needles: int) -> Scene:
    """A long text of filler and facts with `needles` secret codes anywhere in it."""
    s = Scene(people=words.people(rng, needles + 12))
    holders, others = s.people[:needles], s.people[needles:]
    for _ in range(sentences):
        key = rng.choice(others), rng.choice(list(RELATIONS))
        if rng.random() < 0.3 and key not in s.facts:
            s.facts[key] = RELATIONS[key[1]].value(rng)
            s.sentences.append(RELATIONS[key[1]].fact.format(n=key[0], v=s.facts[key]))
        else:
            s.sentences.append(_filler(rng))
    for n in holders:
        s.facts[n, "code"] = CODE.value(rng)
        s.sentences.insert(rng.randint(0, len(s.sentences)), CODE.fact.format(n=n, v=s.facts[n, "code"]))
    s.opening, s.closing = rng.choice(_WRAPS)
    return s


def ask(rng: Random, s: Scene, key: tuple[str, str], frame: Frame, task: str) -> Problem:
    """Ask for the value of a fact that is there."""
    n, kind = key
    relation = CODE if kind == "code" else RELATIONS[kind]
    v = s.facts[key]
    sentence = relation.fact.format(n=n, v=v)
    question = rng.choice(relation.ask).format(n=n)
    bare = v.split(" ", 1)[1] if kind == "job" else v
    thoughts = (
        f"It says {v}.",
        f"The text says: {sentence}",
        f"I look for {n} in the text. The text says: {sentence} So it is {v}.",
    )
    tags = ("value", name_tag([n], words.NAMES))
    return answered(task, s.text + question, frame, thoughts, sentence, bare, tags)


def ask_who(rng: Random, s: Scene, key: tuple[str, str], frame: Frame, task: str) -> Problem:
    """Ask for the person of a fact whose value no one else shares."""
    n, kind = key
    v = s.facts[key]
    sentence = RELATIONS[kind].fact.format(n=n, v=v)
    question = RELATIONS[kind].who.format(v=v)
    # A name stands before its value, so a small network cannot look it up: it reads along until the value comes by.
    index = s.sentences.index(sentence)
    read = " ".join(s.sentences[: index + 1])
    thoughts = (
        f"Read: {read} It is {n}.",
        f"I read the text: {read} It is {n}.",
        f"I read the text until I find {v}: {read} It is {n}. So the answer is {n}.",
    )
    return answered(task, s.text + question, frame, thoughts, sentence, n, ("person", name_tag([n], words.NAMES)))


def ask_missing(rng: Random, s: Scene, key: tuple[str, str], frame: Frame) -> Problem:
    """Ask for a fact that is not there."""
    n, kind = key
    relation = CODE if kind == "code" else RELATIONS[kind]
    topic = relation.missing.format(n=n)
    question = rng.choice(relation.ask).format(n=n)
    thoughts = (
        "It does not say.",
        f"The text does not say {topic}.",
        f"I look for {n} in the text. The text does not say {topic}. I must not guess.",
    )
    tags = (name_tag([n], words.NAMES),)
    return answered("unknown", s.text + question, frame, thoughts, f"The text does not say {topic}.", "unknown", tags)


def questions(
    rng: Random, s: Scene, frame: Frame, count: int, missing: float = 0.35, who: float = 0.3
) -> list[Problem]:
    """Up to `count` questions about one scene: the share `missing` has no answer in it, `who` asks for the person."""
    problems = []
    shared: dict[tuple[str, str], int] = {}
    for (_, kind), v in s.facts.items():
        shared[kind, v] = shared.get((kind, v), 0) + 1
    keys = list(s.facts)
    rng.shuffle(keys)
    for key in keys[:count]:
        unique = key[1] != "code" and shared[key[1], s.facts[key]] == 1
        if rng.random() < missing:
            absent = missing_key(rng, s)
            problems.append(ask_missing(rng, s, absent, frame))
        elif unique and rng.random() < who:
            problems.append(ask_who(rng, s, key, frame, "reading"))
        else:
            problems.append(ask(rng, s, key, frame, "needle" if key[1] == "code" else "reading"))
    return problems


def missing_key(rng: Random, s: Scene) -> tuple[str, str]:
    """A person and a relation the scene does not join: mostly someone it mentions, sometimes a stranger."""
    kinds = list(RELATIONS) + (["code"] if any(k == "code" for _, k in s.facts) else [])
    people = sorted({n for n, _ in s.facts})
    while True:
        n = rng.choice(people) if rng.random() < 0.7 else words.person(rng)
        kind = rng.choice(kinds)
        if (n, kind) not in s.facts:
            return n, kind


def reading(rng: Random, frame: Frame) -> Problem:
    s = scene(rng, rng.randint(3, 14))
    return questions(rng, s, frame, 1, missing=0.0)[0]


def unknown(rng: Random, frame: Frame) -> Problem:
    s = scene(rng, rng.randint(3, 14))
    return ask_missing(rng, s, missing_key(rng, s), frame)


def needle(rng: Random, frame: Frame, sentences: tuple[int, int] = (100, 640)) -> Problem:
    """One of a few secret codes in a haystack; 500 sentences are a little over 4000 tokens."""
    s = haystack(rng, rng.randint(*sentences), rng.randint(2, 6))
    key = rng.choice([k for k in s.facts if k[1] == "code"])
    return ask(rng, s, key, frame, "needle")


_ORDERS = (
    "{name} from {city} ordered {quantity} {item}s for {price} coins. Delivery is on {day}.",
    "New order: {quantity} {item}s, {price} coins, customer {name}, to {city}, on {day}.",
    "Hello, my name is {name}. On {day} please send {quantity} {item}s to {city}. I will pay {price} coins.",
    "On {day} a customer called {name} bought {quantity} {item}s in {city} and paid {price} coins.",
    "{name} would like {quantity} {item}s. The price is {price} coins. Send them to {city} on {day}.",
)
_TYPES = {
    "name": "string",
    "city": "string",
    "quantity": "integer",
    "item": "string",
    "price": "integer",
    "day": "string",
}


def order_schema(rng: Random) -> tuple[str, str]:
    """(name, schema) of a response format that wants some of an order's fields, in some order."""
    fields = rng.sample(list(_TYPES), rng.randint(2, 5))
    schema = {"type": "object", "properties": {f: {"type": _TYPES[f]} for f in fields}, "required": fields}
    return rng.choice(("order", "record", "purchase", "entry")), json.dumps(schema, separators=(",", ":"))


def extract(rng: Random, frame: Frame) -> Problem:
    """Fill the frame's response format from an order in prose."""
    assert frame.response_format is not None
    names = list(json.loads(frame.response_format[1])["properties"])
    values: dict[str, str | int] = {
        "name": words.person(rng),
        "city": words.city(rng),
        "quantity": rng.randint(2, 60),
        "item": rng.choice(words.ITEMS[:18]),
        "price": rng.randint(5, 999),
        "day": rng.choice(words.DAYS),
    }
    lead = rng.choice(("Extract the data: ", "Fill in the format from this text: ", "", "Turn this into JSON: "))
    question = lead + rng.choice(_ORDERS).format(**values)
    value = {f: values[f] for f in names}
    text = json.dumps(value)
    fields = ", ".join(names)
    thought = {
        "low": "Fill the fields.",
        "medium": f"The fields are {fields}.",
        "high": f"The fields are {fields}. " + " ".join(f"The {f} is {values[f]}." for f in names),
    }[frame.effort or "medium"]
    tags = (f"{len(names)} fields", name_tag([str(values["name"]), str(values["city"])], words.NAMES + words.CITIES))
    return Problem(
        "extract", (user(question),), (think(thought), final(text)), "json", (text,), value, frame, tags=tags
    )
