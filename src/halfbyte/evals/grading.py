"""Graders for answers in free wording: what an answer must say, whatever sentence it says it in.

A grader reads the final text alone. It accepts digits and number words, any case, quotes and punctuation; it does not
accept an answer that says two things at once, one of them right.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_UNITS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_REFUSAL = re.compile(
    r"\b(demonstration model|demo model|(do not|don't) know|cannot|can't|can not|not able|unable|too small|know only"
    r"|only know|no function|no tool|beyond what i|outside (of )?what i)\b"
)


def _plain(text: str) -> str:
    """Lower case, one kind of apostrophe."""
    return text.lower().replace("\N{RIGHT SINGLE QUOTATION MARK}", "'")


def numbers_in(text: str) -> list[int]:
    """The whole numbers of a text in order, as digits (1,234 is one number) or in words up to nine hundred and more."""
    out: list[int] = []
    value: int | None = None  # of the number words so far

    def close() -> None:
        nonlocal value
        if value is not None:
            out.append(value)
            value = None

    for match in re.finditer(r"-?\d{1,3}(?:,\d{3})+(?!\d)|-?\d+|[a-z]+|[;:,.!?()]", _plain(text).replace("-", " -")):
        word = match[0].lstrip("-") if not match[0].lstrip("-").isalpha() else match[0]
        if word.replace(",", "").isdigit():
            close()
            out.append(int(word.replace(",", "")))
        elif word in _UNITS:
            small = _UNITS.index(word)
            if value is None or value % 10 or (small > 9 and value % 100):
                close()
                value = small
            else:
                value += small
        elif word in _TENS:
            ten = 10 * (_TENS.index(word) + 2)
            if value is not None and value % 100 == 0 and value:
                value += ten
            else:
                close()
                value = ten
        elif word == "hundred":
            value = 100 * (value or 1)
        elif word == "thousand":
            value = 1000 * (value or 1)
        elif word != "and":
            close()
    close()
    return out


def says(text: str, phrase: str) -> bool:
    """True if the phrase stands in the text as whole words."""
    return re.search(rf"(?<!\w){re.escape(_plain(phrase))}(?!\w)", _plain(text)) is not None


def refuses(text: str) -> bool:
    """True if an answer says that it cannot answer."""
    return _REFUSAL.search(_plain(text)) is not None


@dataclass(frozen=True)
class Grade:
    """What an answer must say; every part that is set must hold.

    number: it is the only number in the answer that is not in the question. phrases: of each group one phrase occurs.
    order: these items, in this order, are the last of their kind that occur. avoid: none of these occurs. refusal: it
    says honestly that it cannot answer; otherwise such an answer is wrong.
    """

    number: int | None = None
    phrases: tuple[tuple[str, ...], ...] = ()
    order: tuple[str, ...] = ()
    avoid: tuple[str, ...] = ()
    refusal: bool = False

    def accepts(self, question: str, answer: str) -> bool:
        if not answer.strip() or refuses(answer) != self.refusal or any(says(answer, word) for word in self.avoid):
            return False
        return (
            (self.number is None or self._has_number(question, answer))
            and all(any(says(answer, phrase) for phrase in group) for group in self.phrases)
            and (not self.order or in_order(answer, self.order))
        )

    def _has_number(self, question: str, answer: str) -> bool:
        numbers = numbers_in(answer)
        question_numbers = set(numbers_in(question))
        if self.number in question_numbers:  # then it has to be what the answer ends with
            return bool(numbers) and numbers[-1] == self.number and set(numbers) <= question_numbers
        return self.number in numbers and set(numbers) - question_numbers == {self.number}


def in_order(answer: str, items: Sequence[str]) -> bool:
    """True if the last items that occur in the answer are these, in this order."""
    pattern = "|".join(re.escape(_plain(item)) for item in sorted(set(items), key=len, reverse=True))
    heard = re.findall(rf"(?<!\w)(?:{pattern})(?!\w)", _plain(answer))
    return heard[-len(items) :] == [_plain(item) for item in items]
