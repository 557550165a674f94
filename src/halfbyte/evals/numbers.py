"""Problems with numbers and sequences: arithmetic with worked steps, word problems, lists, letters, repetition.

Each worked step looks only at digits already written nearby, so that a small network can learn it exactly. Low effort
writes the bare steps, medium names them, high also checks the result.
"""

# ruff: noqa: E501  (a table of sentences reads best with one per line)
from __future__ import annotations

from dataclasses import replace
from random import Random

from halfbyte.evals import words
from halfbyte.evals.problem import Frame, Problem, answered, name_tag

_PLACES = ("Ones", "Tens", "Hundreds", "Thousands", "Ten thousands")


def _columns(a: int, b: int) -> list[tuple[int, int]]:
    """Digit pairs from the right."""
    width = max(len(str(a)), len(str(b)))
    return [(int(x), int(y)) for x, y in zip(str(a).zfill(width)[::-1], str(b).zfill(width)[::-1], strict=True)]


def add_steps(a: int, b: int) -> tuple[str, str]:
    """(bare, named) steps of a + b, column by column with carries."""
    bare, named, carry = [], [], 0
    columns = _columns(a, b)
    for i, (x, y) in enumerate(columns):
        total = x + y + carry
        step = f"{x} + {y}" + (f" + {carry}" if carry else "") + f" = {total}"
        carry = total // 10 if i + 1 < len(columns) else 0
        bare.append(step)
        named.append(f"{_PLACES[i]}: {step}" + (f", write {total % 10}, carry 1." if carry else "."))
    return ", ".join(bare) + f", so {a + b}.", " ".join(named) + f" So {a} + {b} = {a + b}."


def subtract_steps(a: int, b: int) -> tuple[str, str]:
    """(bare, named) steps of a - b for a >= b, column by column with borrows."""
    bare, named, borrow = [], [], 0
    for i, (x, y) in enumerate(_columns(a, b)):
        top = x - borrow
        minuend = f"{x} - {borrow}" if borrow else f"{x}"
        needed = top < y
        value = top - y + (10 if needed else 0)
        step = f"{'10 + ' if needed else ''}{minuend} - {y} = {value}"
        borrow = 1 if needed else 0
        bare.append(step)
        named.append(f"{_PLACES[i]}: {step}" + (", borrow 1." if borrow else "."))
    return ", ".join(bare) + f", so {a - b}.", " ".join(named) + f" So {a} - {b} = {a - b}."


def multiply_steps(a: int, b: int) -> tuple[str, str]:
    """(bare, named) steps of a * b for a one-digit b."""
    bare, named, carry = [], [], 0
    digits = str(a)[::-1]
    for i, d in enumerate(digits):
        product = int(d) * b
        total = product + carry
        step = f"{d} * {b} = {product}" + (f", plus {carry} = {total}" if carry else "")
        carry = total // 10 if i + 1 < len(digits) else 0
        bare.append(step)
        named.append(f"{_PLACES[i]}: {step}" + (f", write {total % 10}, carry {carry}." if carry else "."))
    return ", ".join(bare) + f", so {a * b}.", " ".join(named) + f" So {a} * {b} = {a * b}."


_ADD = (
    "What is {a} + {b}?", "What is {a} plus {b}?", "{a} + {b}", "{a} + {b} = ?", "{a}+{b}", "what is {a}+{b}?",
    "Add {a} and {b}.", "Compute {a} + {b}.", "Calculate {a} plus {b}.", "How much is {a} + {b}?",
    "Please add {a} and {b}.", "Can you tell me what {a} + {b} is?", "What is the sum of {a} and {b}?",
)  # fmt: skip
_SUBTRACT = (
    "What is {a} - {b}?", "What is {a} minus {b}?", "{a} - {b}", "{a} - {b} = ?", "{a}-{b}", "what is {a}-{b}?",
    "Subtract {b} from {a}.", "Compute {a} - {b}.", "Calculate {a} minus {b}.", "How much is {a} - {b}?",
    "Please take {b} away from {a}.", "What is the difference of {a} and {b}?",
)  # fmt: skip
_MULTIPLY = (
    "What is {a} * {b}?", "What is {a} times {b}?", "{a} * {b}", "{a} x {b} = ?", "{a}*{b}", "what is {a}*{b}?",
    "Multiply {a} by {b}.", "Compute {a} * {b}.", "Calculate {a} times {b}.", "How much is {a} * {b}?",
    "What is the product of {a} and {b}?",
)  # fmt: skip


def _number(rng: Random, most: int = 3) -> int:
    width = rng.choice(range(1, most + 1)) if rng.random() < 0.5 else 2
    return rng.randint(10 ** (width - 1) if width > 1 else 0, 10**width - 1)


def _worked(op: str, a: int, b: int) -> tuple[tuple[str, str, str], int]:
    """The three analyses of one calculation, and its value."""
    if op == "+":
        (bare, named), value = add_steps(a, b), a + b
        check = f"Check: {value} - {b} = {a}."
    elif op == "-":
        (bare, named), value = subtract_steps(a, b), a - b
        check = f"Check: {value} + {b} = {a}."
    else:
        (bare, named), value = multiply_steps(a, b), a * b
        check = f"Check: the last digit of {a % 10} * {b} is {value % 10}."
    return (bare, named, f"{named} {check}"), value


def arithmetic_tag(op: str, a: int, b: int) -> str:
    """Operation, digits of the longer number, and whether a column carries or borrows."""
    digits = max(len(str(a)), len(str(b)))
    low, carry, moves = _columns(a, b), 0, False
    for x, y in low if op != "*" else [(int(d), b) for d in str(a)[::-1]]:
        column = {"+": x + y + carry, "-": x - y - carry, "*": x * y + carry}[op]
        carry = int(column < 0) if op == "-" else column // 10
        moves = moves or carry > 0
    return f"{op} {digits} digit{'s' * (digits > 1)}, {'' if moves else 'no '}{'borrow' if op == '-' else 'carry'}"


def arithmetic(rng: Random, frame: Frame) -> Problem:
    """Sums and differences of up to three digits, products with one digit."""
    op = rng.choice("++--*")
    a, b = _number(rng), _number(rng)
    if op == "-" and a < b:
        a, b = b, a
    if op == "*":
        b = rng.randint(0, 9)
    thoughts, value = _worked(op, a, b)
    templates = {"+": _ADD, "-": _SUBTRACT, "*": _MULTIPLY}[op]
    question = rng.choice(templates).format(a=a, b=b)
    tags = (arithmetic_tag(op, a, b),)
    return answered("arithmetic", question, frame, thoughts, f"{a} {op} {b} = {value}.", str(value), tags)


_STORIES = (
    ("+", "{n} has {a} {i}s and buys {b} more. How many {i}s does {n} have now?", "{n} now has {v} {i}s."),
    ("+", "{n} found {a} {i}s on {d} and {b} {i}s the day after. How many {i}s is that in all?", "That is {v} {i}s in all."),
    ("+", "There are {a} {i}s in the {r} and {b} {i}s in the other room. How many {i}s are there?", "There are {v} {i}s."),
    ("+", "{n} has {a} {i}s and {m} has {b} {i}s. How many {i}s do they have together?", "Together they have {v} {i}s."),
    ("-", "{n} has {a} {i}s and gives {b} to {m}. How many {i}s does {n} have left?", "{n} has {v} {i}s left."),
    ("-", "A shop had {a} {i}s and sold {b} of them. How many {i}s are left?", "There are {v} {i}s left."),
    ("-", "{n} needs {a} {i}s and already has {b}. How many {i}s are missing?", "{v} {i}s are missing."),
    ("*", "{n} has {a} bags with {b} {i}s in each bag. How many {i}s is that?", "That is {v} {i}s."),
    ("*", "One {i} costs {b} coins. How many coins do {a} {i}s cost?", "They cost {v} coins."),
)  # fmt: skip


def story(rng: Random, frame: Frame) -> Problem:
    """One calculation told as a story."""
    op, question, answer = rng.choice(_STORIES)
    a, b = rng.randint(2, 99), rng.randint(2, 99)
    if op == "-" and a < b:
        a, b = b, a
    if op == "*":
        b = rng.randint(2, 9)
    n, m = words.people(rng, 2)
    thoughts, value = _worked(op, a, b)
    item, day, room = rng.choice(words.ITEMS[:18]), rng.choice(words.DAYS), rng.choice(words.ROOMS)
    filled = {"n": n, "m": m, "a": a, "b": b, "v": value, "i": item, "d": day, "r": room}
    named = f"This is {a} {op} {b}."
    thoughts = (f"{named} {thoughts[0]}", f"{named} {thoughts[1]}", f"{named} {thoughts[2]}")
    tags = op, name_tag([name for key, name in (("{n}", n), ("{m}", m)) if key in question], words.NAMES)
    return answered("story", question.format(**filled), frame, thoughts, answer.format(**filled), str(value), tags)


def insertion_steps(values: list[str], down: bool) -> str:
    """Sorting by insertion: each number, then the sorted list with it. A step compares it with one neighbour at a time."""
    in_order, trail = values[:1], [f"start with {values[0]}"]
    for v in values[1:]:
        in_order = sorted([*in_order, v], key=int, reverse=down)
        trail.append(f"{v}: {' '.join(in_order)}")
    return ", ".join(trail)


def lists(rng: Random, frame: Frame, operation: str | None = None) -> Problem:
    """Sort, reverse, count, largest, smallest, the n-th item, running sum; `operation` names one of them."""
    operation = operation or rng.choice(("sort", "sort", "reverse", "count", "largest", "smallest", "nth", "sum"))
    return replace(_list(rng, frame, operation), tags=(operation,))


def _list(rng: Random, frame: Frame, operation: str) -> Problem:
    if operation in ("sort", "largest", "smallest"):
        values = [str(v) for v in rng.sample(range(1, 100), rng.randint(3, 7))]
    elif operation == "sum":
        values = [str(rng.randint(1, 20)) for _ in range(rng.randint(3, 5))]
    else:
        values = rng.sample(words.THINGS + words.ITEMS, rng.randint(3, 8))
    listing = ", ".join(values)
    if operation == "sort":
        down = rng.random() < 0.4
        ordered = sorted(values, key=int, reverse=down)
        order = "largest to smallest" if down else "smallest to largest"
        question = rng.choice(
            (f"Sort these numbers from {order}: {listing}", f"Put these numbers in order from {order}: {listing}.")
        )
        trace = insertion_steps(values, down)
        text = ", ".join(ordered)
        thoughts = (
            f"{trace}.",
            f"Insert one by one: {trace}.",
            f"Insert one by one: {trace}. That is {len(values)} numbers.",
        )
        return answered("lists", question, frame, thoughts, f"Sorted: {text}.", text)
    if operation == "reverse":
        text = ", ".join(reversed(values))
        question = rng.choice(
            (
                f"Reverse this list: {listing}",
                f"Give this list in reverse order: {listing}.",
                f"Say these words backwards, last first: {listing}.",
            )
        )
        thoughts = (
            "Start from the end.",
            f"The last is {values[-1]}, the first is {values[0]}.",
            f"The list is {listing}. The last is {values[-1]}, the first is {values[0]}.",
        )
        return answered("lists", question, frame, thoughts, f"Reversed: {text}.", text)
    if operation == "count":
        counted = ", ".join(f"{i} {v}" for i, v in enumerate(values, 1))
        question = rng.choice((f"How many words are in this list: {listing}?", f"Count the items: {listing}."))
        return answered(
            "lists",
            question,
            frame,
            (f"{counted}.", f"I count: {counted}.", f"The list is {listing}. I count: {counted}."),
            f"There are {len(values)} items.",
            str(len(values)),
        )
    if operation in ("largest", "smallest"):
        best = (max if operation == "largest" else min)(values, key=int)
        other = "biggest" if operation == "largest" else "lowest"
        question = rng.choice(
            (f"What is the {operation} of these numbers: {listing}?", f"Which number is the {other}: {listing}?")
        )
        running, trail = values[0], [f"start with {values[0]}"]
        for v in values[1:]:
            running = (max if operation == "largest" else min)(running, v, key=int)
            trail.append(f"{v}: {running}")
        trace = ", ".join(trail)
        return answered(
            "lists",
            question,
            frame,
            (f"{trace}.", f"Keep the {operation}: {trace}.", f"Keep the {operation}: {trace}. So it is {best}."),
            f"The {operation} number is {best}.",
            best,
        )
    if operation == "nth":
        n = rng.randrange(len(values))
        question = rng.choice(
            (
                f"What is the {words.ORDINALS[n]} item of this list: {listing}?",
                f"Which word comes {words.ORDINALS[n]} in this list: {listing}?",
            )
        )
        counted = ", ".join(f"{i} {v}" for i, v in enumerate(values[: n + 1], 1))
        return answered(
            "lists",
            question,
            frame,
            (f"{counted}.", f"I count: {counted}.", f"The list is {listing}. I count: {counted}."),
            f"The {words.ORDINALS[n]} item is {values[n]}.",
            values[n],
        )
    total, sums = int(values[0]), []
    for v in values[1:]:
        sums.append(f"{total} + {v} = {total + int(v)}")
        total += int(v)
    question = rng.choice((f"Add up these numbers: {listing}", f"What is the sum of this list: {listing}?"))
    trace = ", ".join(sums)
    return answered(
        "lists",
        question,
        frame,
        (f"{trace}.", f"Step by step: {trace}.", f"Step by step: {trace}. The total is {total}."),
        f"The sum is {total}.",
        str(total),
    )


def letters(rng: Random, frame: Frame) -> Problem:
    """Spell a word, reverse letters, count one letter."""
    exercise = rng.choice(("spell", "reverse", "reverse", "count", "count"))
    return replace(_letters(rng, frame, exercise), tags=(exercise,))


def _letters(rng: Random, frame: Frame, exercise: str) -> Problem:
    if exercise == "spell":
        word = rng.choice(words.THINGS + words.ITEMS)
        spelled = "-".join(word)
        question = rng.choice(
            (f"Spell the word {word}.", f"How do you spell {word}?", f"Spell {word} letter by letter.")
        )
        thoughts = ("Letter by letter.", f"The word is {word}.", f"The word is {word}, with {len(word)} letters.")
        return answered("letters", question, frame, thoughts, f"{word} is spelled {spelled}.", spelled)
    if exercise == "reverse":
        sequence = [rng.choice(words.ALPHABET) for _ in range(rng.randint(3, 9))]
        text, backwards = "-".join(sequence), "-".join(reversed(sequence))
        question = rng.choice(
            (f"Reverse the letters {text}.", f"Write {text} backwards.", f"What is {text} in reverse?")
        )
        thoughts = (
            "Start from the end.",
            f"The last letter is {sequence[-1]}.",
            f"The letters are {text}. The last letter is {sequence[-1]}.",
        )
        return answered("letters", question, frame, thoughts, f"Backwards it is {backwards}.", backwards)
    few = rng.sample(words.ALPHABET, rng.randint(2, 4))
    sequence = [rng.choice(few) for _ in range(rng.randint(3, 9))]
    target = rng.choice(few)
    text, count, steps = "-".join(sequence), 0, []
    for letter in sequence:
        count += letter == target
        steps.append(f"{letter} {count}")
    trace = ", ".join(steps)
    question = rng.choice(
        (
            f"How often does {target} appear in {text}?",
            f"Count the letter {target} in {text}.",
            f"How many times is the letter {target} in {text}?",
        )
    )
    times = "1 time" if count == 1 else f"{count} times"
    return answered(
        "letters",
        question,
        frame,
        (f"{trace}.", f"Counting {target}: {trace}.", f"Counting {target}: {trace}. That makes {count}."),
        f"The letter {target} appears {times}.",
        str(count),
    )


def repeat(rng: Random, frame: Frame, invented: float = 0.2) -> Problem:
    """Say the same words again: the plainest use of attention, and the best case of a drafter that looks back.

    `invented` is the share of words that nobody has seen before.
    """
    pool = words.THINGS + words.ITEMS + words.COLORS + words.NAMES
    size = rng.randint(2, 12) if rng.random() < 0.6 else rng.randint(12, 60)
    text = " ".join(words.invented(rng).lower() if rng.random() < invented else rng.choice(pool) for _ in range(size))
    question = rng.choice(
        ("Repeat after me: {t}", "Repeat these words: {t}", "Say this again: {t}", "Copy this text: {t}")
    )
    thoughts = (
        "Copy it.",
        "I copy the words one by one.",
        f"I copy the words one by one. They begin with {text.split()[0]}.",
    )
    return answered("repeat", question.format(t=text), frame, thoughts, text, text)
