"""One answer in the making: tokens in, pieces of reasoning, content and calls out.

Three APIs write these pieces in three ways. Nothing the model emits is lost: text that belongs to no part of an answer
is content, and where content must be JSON it is reasoning.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from halfbyte.engine.request import Logprob
from halfbyte.harmony.header import Header
from halfbyte.harmony.messages import COMMENTARY
from halfbyte.harmony.parse import Event, Parser
from halfbyte.server.answer.conversation import Dialect, Prepared
from halfbyte.server.answer.stream import StopMatcher
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
class Piece:
    """`item` numbers the parts of an answer: a new number is a new reasoning item, message or call."""

    kind: PieceKind
    text: str = ""
    item: int = 0
    call: Call | None = None
    logprobs: list[TokenLogprob] | None = None


@dataclass(slots=True)
class Item:
    kind: Literal["reasoning", "content", "call"]
    preamble: bool = False  # content on the commentary channel: said between calls, not the answer
    call: Call | None = None
    text: str = ""
    complete: bool = False
    logprobs: list[TokenLogprob] = field(default_factory=list)


class ChoiceState:
    def __init__(self, dialect: Dialect, prepared: Prepared) -> None:
        turn = prepared.turn
        self.dialect = dialect
        self.tools = prepared.tools
        self.parallel = turn.parallel
        self.items: list[Item] = []
        self.calls: list[Call] = []
        self.done = False
        self.finish: str | None = None
        self.reasoning_tokens = 0
        self._parser = Parser(dialect.tokenizer, prefix=prepared.prefill)
        self._stop = StopMatcher(turn.stop)
        self._open: tuple[int, Item] | None = None  # the parser's message and the item its text goes to
        # A JSON answer begins only where the grammar was awake; anything else the model says is thinking aloud.
        self._triggers = prepared.constraint.triggers if prepared.constraint else ()
        self._tail = tuple(prepared.prefill)
        self._armed = self._awake()
        self.answered = False
        self._marks: list[tuple[int, TokenLogprob]] = []  # log probabilities not yet shown, with where they begin
        self._content_bytes = self._shown_bytes = 0

    # ---- tokens -------------------------------------------------------------------------------

    def feed(self, tokens: list[int], logprobs: list[Logprob] | None, *, forced: bool = False) -> list[Piece]:
        if self.done:
            return []
        pieces: list[Piece] = []
        structural, parser = self.dialect.structural, self._parser
        if logprobs is None and structural.isdisjoint(tokens):
            self._run(tokens, pieces, forced)
            return pieces
        start = 0
        for at, token in enumerate(tokens):
            # With log probabilities every token travels alone, so that it is known which message it was for.
            if token in structural or logprobs is not None:
                if at > start:
                    self._run(tokens[start:at], pieces, forced)
                if token in structural:
                    if self._triggers:
                        self._tail = (*self._tail[-8:], token)
                        self._armed = self._armed or self._awake()
                    self._take(parser.feed((token,)), pieces)
                else:
                    self._run([token], pieces, forced, logprobs[at] if logprobs else None)
                start = at + 1
            if self.done:
                return pieces
        if start < len(tokens):
            self._run(tokens[start:], pieces, forced)
        return pieces

    def _run(self, tokens: list[int], pieces: list[Piece], forced: bool, logprob: Logprob | None = None) -> None:
        """Tokens without structure: they all belong to one message, or to a header."""
        if self._triggers:
            self._tail = (*self._tail, *tokens)[-9:]
        events = self._parser.feed(tokens)
        header = self._parser.open
        if header is not None:
            if header.kind == "reasoning" and not forced:
                self.reasoning_tokens += len(tokens)
            elif header.kind == "content" and logprob is not None and (self._armed or not self._triggers):
                self._mark(logprob)
        if events:
            self._take(events, pieces)

    def _awake(self) -> bool:
        return any(self._tail[-len(trigger) :] == trigger for trigger in self._triggers)

    def end(self, reason: str) -> list[Piece]:
        """The model has stopped, or there was no more room."""
        pieces: list[Piece] = []
        if not self.done:
            self._take(self._parser.finish(), pieces)
            self._flush_stop(pieces)
        for call in self.calls:
            if not call.arguments.strip() and reason != "length":
                # A call without arguments is a call with none; clients parse this field.
                self._extend(Piece("arguments", "{}", self._item_of(call), call), pieces)
        if self._stop.matched is not None or reason != "length":
            self.finish = "tool_calls" if self.calls and self._stop.matched is None else "stop"
            for item in self.items:
                item.complete = True
        else:
            self.finish = "length"
        return pieces

    # ---- events -------------------------------------------------------------------------------

    def _take(self, events: list[Event], pieces: list[Piece]) -> None:
        for event in events:
            if self.done:
                return
            if event.type == "delta":
                self._delta(event, pieces)
            elif event.type == "start":
                if self._shows_call(event.header):
                    self._begin_call(event, pieces)
            else:
                self._ended(event, pieces)

    def _shows_call(self, header: Header) -> bool:
        # Without tools there is nobody to call, so what the model wrote is shown.
        return header.kind == "call" and bool(self.tools)

    def _begin_call(self, event: Event, pieces: list[Piece]) -> None:
        assert event.header.recipient is not None
        call = Call(self.tools.find(event.header.recipient), len(self.calls))
        self.calls.append(call)
        item = Item("call", call=call)
        self.items.append(item)
        self._open = (event.message, item)
        pieces.append(Piece("call", item=len(self.items) - 1, call=call))

    def _delta(self, event: Event, pieces: list[Piece]) -> None:
        item = self._item(event)
        if item.kind == "call":
            self._extend(Piece("arguments", event.text, len(self.items) - 1, item.call), pieces)
            return
        text = event.text
        if item.kind == "content":
            text = self._stop.feed(text)
        if text:
            self._show(item, text, pieces)
        if self._stop.matched is not None:
            self.done = True

    def _item(self, event: Event) -> Item:
        if self._open is not None and self._open[0] == event.message:
            return self._open[1]
        header = event.header
        visible = header.kind != "reasoning" and (not self._triggers or self._armed)
        item = Item("content" if visible else "reasoning", preamble=header.channel == COMMENTARY)
        self.items.append(item)
        self._open = (event.message, item)
        return item

    def _ended(self, event: Event, pieces: list[Piece]) -> None:
        if self._open is None or self._open[0] != event.message:
            return
        item = self._open[1]
        if item.kind == "content":
            self._flush_stop(pieces)
        item.complete = event.end != "cut"
        self._open = None
        if item.kind == "call" and not self.parallel and item.complete:
            self.done = True

    def _flush_stop(self, pieces: list[Piece]) -> None:
        """A stop string does not span two messages: what was held back belongs to the one that ends."""
        held = self._stop.flush()
        if held and self._open is not None:
            self._show(self._open[1], held, pieces)

    # ---- pieces -------------------------------------------------------------------------------

    def _show(self, item: Item, text: str, pieces: list[Piece]) -> None:
        piece = Piece("content" if item.kind == "content" else "reasoning", text, len(self.items) - 1)
        if item.kind == "content":
            self.answered = self.answered or bool(text.strip())
            if self._marks:
                piece.logprobs = self._due(text)
                item.logprobs += piece.logprobs
        self._extend(piece, pieces)

    def _extend(self, piece: Piece, pieces: list[Piece]) -> None:
        item = self.items[piece.item]
        if piece.kind == "arguments":
            assert piece.call is not None
            piece.call.arguments += piece.text
        item.text += piece.text
        last = pieces[-1] if pieces else None
        if last is not None and last.kind == piece.kind and last.item == piece.item:
            last.text += piece.text
            if piece.logprobs:
                last.logprobs = (last.logprobs or []) + piece.logprobs
        else:
            pieces.append(piece)

    def _item_of(self, call: Call) -> int:
        return next(i for i, item in enumerate(self.items) if item.call is call)

    def _mark(self, lp: Logprob) -> None:
        data = self.dialect.tokenizer.token_bytes
        entry = TokenLogprob(data(lp.token), lp.logprob, [(data(t), value) for t, value in lp.top])
        self._marks.append((self._content_bytes, entry))
        self._content_bytes += len(entry.data)

    def _due(self, text: str) -> list[TokenLogprob]:
        """Those of the tokens that are at least partly shown; a stop string takes its own with it."""
        self._shown_bytes += len(text.encode("utf-8", "replace"))
        count = sum(1 for start, _ in self._marks if start < self._shown_bytes)
        due, self._marks = self._marks[:count], self._marks[count:]
        return [entry for _, entry in due]

    # ---- the whole ----------------------------------------------------------------------------

    @property
    def repairs(self) -> dict[str, int]:
        return dict(self._parser.repairs)

    @property
    def stop_match(self) -> str | None:
        return self._stop.matched

    @property
    def reasoning(self) -> str:
        return SEPARATOR.join(item.text for item in self.items if item.kind == "reasoning" and item.text)

    @property
    def content(self) -> str:
        return SEPARATOR.join(item.text for item in self.items if item.kind == "content" and item.text)

    @property
    def content_logprobs(self) -> list[TokenLogprob]:
        return [lp for item in self.items if item.kind == "content" for lp in item.logprobs]
