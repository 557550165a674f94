"""What conversations of the second edition are made of: turns, and a source of names, numbers and wordings."""

# ruff: noqa: E501, SIM905  (word lists are easier to read as text)
from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from phrasings import Split, phrasings
from wordings import WORDINGS, worded

from halfbyte.evals import words
from halfbyte.evals.grading import Grade
from halfbyte.evals.problem import Say
from halfbyte.harmony.messages import Tool

_HELD_OUT_SHARE = 4  # one name in so many, and one wording of every table that is not split in half
_BY_GRAMMAR = 0.6  # share of training's wordings
_UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_CAPITALS = "ABCDEFGHKLMNPRSTX"
_CONSONANTS = "bcdfghjklmnpqrstvwxyz"
# Around a question in training; each ends so that no list or text behind it runs into it.
_OPENERS = (
    "Hi! ", "Hello! ", "Hey! ", "Please help me. ", "Quick question: ", "Next question. ", "Another thing: ", "Good day. ", "Okay. ", "Now this: ",
    "Please: ", "hey ", "ok ", "so ", "hi, ", "and ", "ok now ", "hey there, ", "quick: ", "I have a question. ", "So: ", "Something else: ", "Well then. ", "For my work: ", "My question: ", "Tell me: ", "Answer this: ",
)  # fmt: skip
_CLOSERS = (
    " Thanks!",
    " Thank you.",
    " Please.",
    " I am not sure.",
    " It matters to me.",
    " Be quick.",
    " quickly please",
    " Thanks in advance!",
)
# Common words: what a visitor writes, and the letters that invented words are put together from.
COMMON = (
    "absent active advice airport answer apartment autumn balance balcony barrel battle beach beauty bicycle biscuit blanket "
    "bottom branch breakfast brother bucket building butter button cabbage cactus camera captain carpet ceiling center chapter "
    "cherry chicken chimney circle citizen client coffee collar comfort corner cotton cousin cradle cricket curtain customer "
    "daughter december dentist dinner distance donkey dragon drawer elbow electric empty evening example factory family farmer "
    "father festival finger fisher flower foreign fountain freedom friend frozen furniture future gallery gentle giraffe glasses "
    "grammar grandma ground guitar handle harvest heaven helmet hidden history holiday honest hospital hungry husband island jacket "
    "jungle kangaroo kitchen ladder language laundry lawyer leather lecture lemonade library machine magazine marriage medicine "
    "member minute mirror mistake moment monster morning muscle museum narrow neighbor notebook ocean october onion orange oven "
    "package paper parent partner passenger pattern peanut pencil people pepper pilot planet plastic pocket police postcard potato "
    "present prince problem promise pumpkin puzzle quarter quiet rabbit rainbow reason record remember restaurant rocket sandwich "
    "school science scissors season secret shadow shoulder silence silver simple singer sister skeleton soldier special spider "
    "spring square station steamer stomach stranger student sudden sugar sunday surface sweater table teacher telephone temple "
    "theater thirsty tiger tomato tongue traffic travel treasure triangle trousers tunnel turtle uncle uniform universe valley "
    "vegetable village violin visitor volcano wagon wallet warning water weather whisper window winter wonder worker yellow"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def _letters() -> dict[str, str]:
    """Two letters -> what follows them in common words and names; two spaces begin a word, a space ends one."""
    after: dict[str, str] = {}
    for word in (*COMMON, *words.NAMES, *words.CITIES, *words.THINGS):
        spaced = f"  {word.lower()} "
        for i in range(len(spaced) - 2):
            after[spaced[i : i + 2]] = after.get(spaced[i : i + 2], "") + spaced[i + 2]
    return after


_AFTER = _letters()
_TABLED = frozenset(
    word.lower()
    for table in (
        words.NAMES, words.CITIES, words.JOBS, words.FOODS, words.COLORS, words.PETS, words.SPORTS, words.VEHICLES, words.MONTHS,
        words.DAYS, words.ITEMS, words.THINGS, words.LANGUAGES, words.ROOMS, COMMON,
    )
    for word in table
)  # fmt: skip
_SHORTENED = (
    ("What is", "What's", "what's", "whats", "Whats"), ("Who is", "Who's", "who's"), ("Where is", "Where's", "where's"),
    ("I am", "I'm", "im"), ("I have", "I've got", "i have"), ("do not", "don't", "dont"), ("Please ", "pls ", "plz ", "please "),
    ("Could you", "could u", "cld you"), ("Can you", "can u", "can you"), ("Do you", "do u", "d'you"), ("you", "u"),
    ("Tell me", "tell me", "Just tell me"),
)  # fmt: skip


def held_out(name: str) -> bool:
    """True if a name may occur only in held-out conversations."""
    return hashlib.blake2b(name.lower().encode(), digest_size=2).digest()[0] % _HELD_OUT_SHARE == 0


def in_words(value: int) -> str:
    """A number below a hundred as it is said."""
    if value < 20:
        return _UNITS[value]
    tens, units = _TENS[value // 10 - 2], value % 10
    return f"{tens}-{_UNITS[units]}" if units else tens


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
    instructions: str = ""  # of the whole conversation: a name for the model
    bare: str = ""  # the reply where only the result is wanted; empty: as it is


class Source:
    """Draws names, numbers and wordings that one split may use."""

    def __init__(self, rng: Random, split: Split, wording: Split | None = None) -> None:
        self.rng, self.split = rng, split
        self.wording = wording or split  # which split questions are worded as; names are those of `split`
        self.topics: set[tuple[str, ...]] = set()  # of what the user tells

    # ---- vocabulary ---------------------------------------------------------------------------

    def name(self) -> str:
        """A name from syllables, a code-like identifier, or a pair of real words; of this split."""
        rng = self.rng
        while True:
            kind = rng.random()
            if kind < 0.15:
                name = self.lookalike()
            elif kind < 0.35:
                name = words.invented(rng)
            elif kind < 0.55:
                pair = rng.choice(("aeiou", _CONSONANTS)), rng.choice((_CONSONANTS, "aeiou"))
                name = "".join(rng.choice(pair[i % 2]) for i in range(rng.randint(4, 9)))
                name = name.capitalize() if rng.random() < 0.7 else name
            elif kind < 0.75:
                letters = "".join(rng.choice(_CAPITALS) for _ in range(rng.randint(1, 3)))
                name = f"{letters}{rng.choice(('-', '', '_'))}{rng.randint(10, 9999)}"
            elif kind < 0.85:
                name = f"{rng.choice(words.THINGS)}-{rng.randint(10, 9999)}"
            else:
                name = f"{rng.choice(words.THINGS)}{rng.choice(words.ITEMS)}"
            if held_out(name) == (self.split == "held-out"):
                return name

    def lookalike(self) -> str:
        """A word of this split that is none, with the letters of real ones and an ending that few of them have."""
        rng = self.rng
        while True:
            word = "  "
            while len(word) < 11 and not (len(word) > 2 and word.endswith(" ")):
                word += rng.choice(_AFTER[word[-2:]])
            word = word.strip()
            word += rng.choice(("x", "z", "k", "v") if word[-1] in "aeiouy" else ("a", "o", "u", "i", "ov"))
            if word.lower() in _TABLED:
                continue
            if 5 <= len(word) <= 10 and held_out(word) == (self.split == "held-out"):
                return word.capitalize() if rng.random() < 0.7 else word

    def drawn(self, name: str) -> bool:
        """True if a value is a name of the open vocabulary, not a word of a table."""
        return re.fullmatch(r"[A-Za-z][\w-]*", name) is not None and name.lower() not in _TABLED

    def names(self, count: int) -> list[str]:
        drawn: dict[str, None] = {}
        while len(drawn) < count:
            drawn[self.name()] = None
        return list(drawn)

    def number(self, most: int = 3) -> int:
        digits = self.rng.randint(1, most)
        return self.rng.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1)

    def most(self) -> int:
        """The end of a range that numbers are drawn from: small numbers are as frequent as large ones."""
        return self.rng.choice((10, 20, 50, 100, 1000, 1000))

    def ask(self, task: str, **fields: Any) -> tuple[str, str]:
        """(template, question) of a task in `phrasings.py`."""
        if self.by_grammar(task):
            return self.fill(worded(self.rng, task, phrasings(task, "held-out")), **fields)
        return self.fill(self.rng.choice(phrasings(task, self.wording)), **fields)

    def pick(self, templates: Sequence[str], task: str = "") -> str:
        """A wording of a table whose last quarter is held out, or in training of the grammar for `task`."""
        held = len(templates) // _HELD_OUT_SHARE
        if self.by_grammar(task):
            return worded(self.rng, task, templates[len(templates) - held :])
        return self.rng.choice(
            templates[-held:] if self.wording == "held-out" and held else templates[: len(templates) - held]
        )

    def by_grammar(self, task: str) -> bool:
        """Whether the next wording of a task comes from the grammar; never where the held-out ones are wanted."""
        return self.wording == "train" and task in WORDINGS and self.rng.random() < _BY_GRAMMAR

    def listed(self, values: Sequence[object]) -> str:
        """Things in a row: with commas, in training also with "and", semicolons or, of numbers, spaces."""
        texts = [str(v) for v in values]
        chance = self.rng.random() if self.wording == "train" else 1.0
        if chance < 0.2:
            return f"{', '.join(texts[:-1])}{self.rng.choice((' and ', ', and '))}{texts[-1]}"
        if chance < 0.25:
            return "; ".join(texts)
        if chance < 0.33:
            return (" " if all(text.isdigit() for text in texts) else ", ").join(texts)
        return " and ".join(texts) if chance < 0.36 else ", ".join(texts)

    def fill(self, template: str, **fields: Any) -> tuple[str, str]:
        """(template, question), sometimes in lower case, with a number in words, with a typing error, or in training
        with something said around it."""
        for key, value in fields.items():
            joined = re.search(rf"[-+*]{{{key}}}|{{{key}}}[-+*]", template)  # without a space a word would run on
            if isinstance(value, int) and value < 100 and not joined and self.rng.random() < 0.15:
                fields[key] = in_words(value)
        lower = self.rng.random() < 0.15
        text = self.typo(template) if self.rng.random() < 0.07 else template
        if self.wording == "train" and self.rng.random() < 0.15:
            text = self.shortened(text)
        question = (text[0].lower() + text[1:] if lower else text).format(**fields)
        if template.startswith("{v}") and "o" in fields and not lower:  # a verb; names stay as they are
            question = question[0].upper() + question[1:]
        if self.wording == "train":
            question = self.around(question)
        return template, question

    def around(self, question: str) -> str:
        chance = self.rng.random()
        if chance < 0.15:
            return self.rng.choice(_OPENERS) + question
        if chance < 0.25 and question[-1] in ".?!":
            return question + self.rng.choice(_CLOSERS)
        return question[:-1] if chance < 0.35 and question[-1] in ".?" else question

    def typo(self, template: str) -> str:
        """The template with two neighbouring letters of one longer word swapped, one left out or one doubled."""
        spots = [m for m in re.finditer(r"(?<![\w{])[a-z]{5,}(?![\w}])", template) if "{" not in m[0]]
        if not spots:
            return template
        at = self.rng.choice(spots).start() + self.rng.randint(1, 3)
        wrong = (template[at + 1] + template[at], template[at], 2 * template[at] + template[at + 1])
        mistyped = f"{template[:at]}{self.rng.choice(wrong)}{template[at + 2 :]}"
        words_of = re.findall(r"[a-z]+", mistyped.lower())  # "there" must not become "three"
        return template if {*words_of} & {*_UNITS, *_TENS} - {*re.findall(r"[a-z]+", template.lower())} else mistyped

    def shortened(self, template: str) -> str:
        """The template as people type it: what's, I'm, don't, pls."""
        for long, *short in _SHORTENED:
            if long in template:
                template = template.replace(long, self.rng.choice(short), 1)
        return template
