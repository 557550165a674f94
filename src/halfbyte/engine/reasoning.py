"""A limit on reasoning: counts the tokens of a choice's reasoning messages and forces the tokens that end them.

The harmony parser decides what is reasoning, so malformed headers count as they are shown. It reads only headers and
control tokens; a token of plain text costs one comparison. At the limit the state masks all tokens but those of the
closings, and the model continues freely after one of them is complete. Reasoning that begins again is closed at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from halfbyte.engine.grammar import Bits, token_bits
from halfbyte.engine.request import ReasoningLimit
from halfbyte.errors import RequestError
from halfbyte.harmony.messages import Role
from halfbyte.harmony.parse import Parser
from halfbyte.harmony.vocabulary import START, Vocabulary


def check_limit(limit: ReasoningLimit, vocabulary: Vocabulary, vocab: int) -> None:
    """Raise RequestError if the limit cannot be kept."""
    if limit.tokens < 0:
        raise RequestError(f"the limit on reasoning is {limit.tokens} tokens; give 0 or more.")
    if START not in vocabulary.special:
        raise RequestError("reasoning can be limited only with a vocabulary of the harmony format.")
    closings = sorted(limit.closings)
    outside = [t for c in closings for t in c if not 0 <= t < vocab]
    if outside:
        raise RequestError(f"a closing of the reasoning has token {outside[0]}, but the vocabulary has {vocab}.")
    if not closings or () in closings or any(b[: len(a)] == a for a, b in pairwise(closings)):
        raise RequestError("the closings of the reasoning must be runs of tokens, none of which begins another.")


class ReasoningState:
    """The reasoning of one choice."""

    __slots__ = ("_body", "_closing", "_closings", "_inside", "_left", "_parser", "_special", "_text", "_width", "cut")

    def __init__(self, limit: ReasoningLimit, vocabulary: Vocabulary, prompt: Sequence[int], vocab: int) -> None:
        self._closings = limit.closings
        self._left = limit.tokens
        self._width = (vocab + 31) // 32
        self._special = frozenset(vocabulary.special.values())
        self._parser = Parser(vocabulary, prefix=_answer_start(prompt, vocabulary))
        self._closing: tuple[int, ...] | None = None  # the part of a closing that is written; None: nothing is forced
        self.cut = False  # the limit has ended a reasoning message
        self._read_state()
        if self._inside and self._left <= 0:
            self._force()

    def observe(self, token: int) -> None:
        """Note one committed token."""
        inside, plain = self._inside, token not in self._special
        if not (plain and self._body and self._closing is None):  # else neither the message nor its kind can change
            self._parser.feed((token,))
            self._read_state()
            if self._closing is not None:
                self._closing = (*self._closing, token)
                if self._closing in self._closings:
                    self._closing = None
        if self._inside and (inside or plain) and self._closing is None:
            self._left -= 1
        if self._inside and self._left <= 0 and self._closing is None:
            self._force()

    def _read_state(self) -> None:
        self._body, self._text = self._parser.open is not None, self._parser.in_text
        header = self._parser.header if self._text else None
        self._inside = header is not None and header.kind == "reasoning"

    def _force(self) -> None:
        self._closing, self.cut = (), True

    def mask(self) -> Bits | None:
        """One bit for each token that may come next; None if all may."""
        if self._closing is None:
            return None
        at = len(self._closing)
        return token_bits({c[at] for c in self._closings if c[:at] == self._closing}, self._width)

    def allows_run_ahead(self) -> bool:
        """True if the next step may be scheduled before the last two tokens are known: none of them can be masked."""
        return self._closing is None and (self._left > 2 or (self._text and not self._inside))

    def trim(self, draft: list[int]) -> list[int]:
        """Cut a draft before the first token whose successor may be masked."""
        if self._closing is not None:
            return []
        if len(draft) < self._left:
            return draft
        if self._inside:
            return draft[: self._left - 1]
        if not self._text:
            return []
        return draft[: next((at for at, token in enumerate(draft) if token in self._special), len(draft))]


def _answer_start(prompt: Sequence[int], vocabulary: Vocabulary) -> list[int]:
    """The tokens of the prompt that belong to the assistant's last message, without its start and role."""
    start, role = vocabulary.special[START], vocabulary.encode(Role.ASSISTANT.value)
    at = next((i for i in range(len(prompt) - 1, -1, -1) if prompt[i] == start), len(prompt))
    message = list(prompt[at + 1 :])
    return message[len(role) :] if message[: len(role)] == role else []
