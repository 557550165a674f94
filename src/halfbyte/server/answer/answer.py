"""An answer as a client gets it: items of reasoning, content and calls, grown from the updates of a reader.

Three APIs write these in three ways. A `ChoiceAnswer` holds what has been handed over so far and nothing beyond it, so
a writer may look at it at any time; it reads no tokens (`reader.py` does).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from halfbyte.engine.request import Logprob
from halfbyte.server.answer.tools import Function
from halfbyte.server.http import sse

SEPARATOR = "\n\n"  # between messages of one kind, where an API has only one field for them
PieceKind = Literal["reasoning", "content", "call", "arguments"]


@dataclass(slots=True)
class Call:
    function: Function
    index: int
    id: str = field(default_factory=lambda: sse.new_id("call_"))
    arguments: str = ""


@dataclass(slots=True)
class TokenLogprob:
    data: bytes
    logprob: float
    top: list[tuple[bytes, float]]


@dataclass(slots=True)
class AnswerItem:
    kind: Literal["reasoning", "content", "call"]
    preamble: bool = False  # content on the commentary channel: said between calls, not the answer
    call: Call | None = None
    text: str = ""
    complete: bool = False
    logprobs: list[TokenLogprob] = field(default_factory=list)


@dataclass(slots=True)
class AnswerPiece:
    """`item` numbers the parts of an answer: a new number is a new reasoning item, message or call."""

    kind: PieceKind
    text: str = ""
    item: int = 0
    call: Call | None = None
    logprobs: list[TokenLogprob] | None = None


@dataclass(slots=True)
class Update:
    """What one choice gained. `finish` is set once, at its end."""

    index: int
    pieces: list[AnswerPiece] = field(default_factory=list)
    new_items: list[AnswerItem] = field(default_factory=list)  # still empty; the pieces say what goes into them
    complete_items: list[int] = field(default_factory=list)
    finish: str | None = None
    stop_match: str | None = None  # the stop string that ended it
    tokens: list[int] = field(default_factory=list)  # as generated, structure included
    logprobs: list[Logprob] = field(default_factory=list)  # of these tokens, where they were asked for
    prompt_logprobs: list[Logprob] = field(default_factory=list)  # of the prompt's next tokens, the same
    reasoning_tokens: int = 0
    reasoning_cut: bool = False  # the request's limit has ended the reasoning
    dropped_tokens: int = 0  # generated beside `tokens`, but they stood only for structure
    cached_tokens: int = 0
    memory_tokens: int = 0  # of the cached ones, from host memory
    disk_tokens: int = 0  # of the cached ones, from the disk

    def add(self, later: Update) -> None:
        self.pieces += later.pieces
        self.new_items += later.new_items
        self.complete_items += later.complete_items
        self.finish = later.finish
        self.stop_match = later.stop_match
        self.tokens = self.tokens + later.tokens  # a new list: the old one is the engine's
        self.logprobs = self.logprobs + later.logprobs
        self.prompt_logprobs = self.prompt_logprobs + later.prompt_logprobs
        self.reasoning_tokens += later.reasoning_tokens
        self.reasoning_cut = self.reasoning_cut or later.reasoning_cut
        self.dropped_tokens += later.dropped_tokens
        self.cached_tokens = max(self.cached_tokens, later.cached_tokens)
        self.memory_tokens = max(self.memory_tokens, later.memory_tokens)
        self.disk_tokens = max(self.disk_tokens, later.disk_tokens)

    def __bool__(self) -> bool:
        """Whether it says anything to a client."""
        return bool(self.pieces or self.finish or self.tokens or self.prompt_logprobs)


class ChoiceAnswer:
    def __init__(self) -> None:
        self.items: list[AnswerItem] = []
        self.calls: list[Call] = []
        self.finish: str | None = None
        self.stop_match: str | None = None

    def add(self, update: Update) -> None:
        for item in update.new_items:
            self.items.append(item)
            if item.call is not None:
                self.calls.append(item.call)
        for piece in update.pieces:
            item = self.items[piece.item]
            item.text += piece.text
            if piece.kind == "arguments":
                assert piece.call is not None
                piece.call.arguments += piece.text
            if piece.logprobs:
                item.logprobs += piece.logprobs
        for number in update.complete_items:
            self.items[number].complete = True
        if update.finish is not None:
            self.finish, self.stop_match = update.finish, update.stop_match

    @property
    def reasoning(self) -> str:
        return SEPARATOR.join(item.text for item in self.items if item.kind == "reasoning" and item.text)

    @property
    def content(self) -> str:
        return SEPARATOR.join(item.text for item in self.items if item.kind == "content" and item.text)

    @property
    def content_logprobs(self) -> list[TokenLogprob]:
        return [lp for item in self.items if item.kind == "content" for lp in item.logprobs]
