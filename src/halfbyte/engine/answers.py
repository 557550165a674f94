"""Answers of a conversation: text, reasoning and tool calls, whole or piece by piece.

A reader turns the engine's deltas into pieces and builds the answer from them; the two streams differ only in who
waits for a delta. Closing a stream, or leaving a `with` block around it, cancels the request.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Generator, Iterator
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal, NamedTuple

from halfbyte.engine.request import Delta, FinishReason, Usage
from halfbyte.engine.stops import TextStopMatcher
from halfbyte.errors import StepError
from halfbyte.harmony.messages import FUNCTIONS
from halfbyte.harmony.parse import Event, Parser
from halfbyte.harmony.vocabulary import Vocabulary

SEPARATOR = "\n\n"  # between messages of one kind


@dataclass(frozen=True)
class ToolCall:
    """A function that the model calls. `json` is what the model wrote; `arguments` reads it."""

    id: str
    name: str
    json: str

    @property
    def arguments(self) -> dict[str, Any]:
        try:
            value = json.loads(self.json or "{}", strict=False)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise StepError(
                f"the model called {self.name} with {self.json!r:.200}, which is no JSON object; ask again."
            )
        return value


class Piece(NamedTuple):
    """What an answer gained: some reasoning, some text, or one complete tool call."""

    kind: Literal["reasoning", "content", "call"]
    text: str
    call: ToolCall | None = None


@dataclass(frozen=True)
class Answer:
    """A model's answer, and the reasoning that came before it. `finish` is "stop", "length" or "timeout"."""

    text: str
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish: FinishReason = "stop"
    tokens: list[int] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    reasoning_tokens: int = 0
    reasoning_cut: bool = False  # `max_reasoning_tokens` has ended the reasoning
    stop_match: str | None = None  # the stop string that ended the text

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a chat message, to append to the conversation before the next question or a tool's result."""
        out: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            out["reasoning_content"] = self.reasoning
        if self.tool_calls:
            out["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.json}}
                for c in self.tool_calls
            ]
        return out


class AnswerReader:
    """Deltas in, pieces out. A call of a function that was not offered is text: no client could answer it.

    A stop string ends the answer where its text has it; reasoning and calls may have it."""

    def __init__(self, vocabulary: Vocabulary, *, functions: Collection[str] = (), stop: tuple[str, ...] = ()) -> None:
        self._parser = Parser(vocabulary)
        self._functions = functions
        self._stop = TextStopMatcher(stop)
        self._usage = Usage()
        self._cut = False
        self._texts: dict[str, str] = {"reasoning": "", "content": ""}
        self._message: dict[str, int] = {}  # the message that each kind of text last came from
        self._arguments = ""
        self._calls: list[ToolCall] = []
        self._tokens: list[int] = []
        self._end: Delta | None = None

    def read(self, delta: Delta) -> list[Piece]:
        if delta.finish == "error":
            raise StepError(delta.error or "the engine failed on this request.")
        self._usage = delta.usage or self._usage
        self._cut = delta.reasoning_cut
        pieces: list[Piece] = []
        # With stop strings one token at a time, so that none is counted behind the match.
        steps = [[token] for token in delta.tokens] if self._stop.stops else [delta.tokens]
        for tokens in steps:
            self._tokens += tokens
            pieces += self._read(self._parser.feed(tokens))
            if self.done:
                return pieces
        if delta.finish is not None:
            self._end = delta
            pieces += self._read(self._parser.finish())
        return pieces

    @property
    def done(self) -> bool:
        """Whether a stop string has ended the answer."""
        return self._stop.matched is not None

    def _read(self, events: list[Event]) -> list[Piece]:
        pieces: list[Piece] = []
        for event in events:
            pieces += self._pieces(event)
            if self.done:
                usage = replace(self._usage, completion_tokens=len(self._tokens))
                self._end = Delta([], finish="stop", usage=usage, reasoning_cut=self._cut)
                break
        return pieces

    def _pieces(self, event: Event) -> Iterator[Piece]:
        name = (event.header.recipient or "").removeprefix(f"{FUNCTIONS}.")
        if event.header.kind == "call" and name in self._functions:
            self._arguments += event.text
            if event.type == "end":
                call = ToolCall(f"call_{secrets.token_hex(12)}", name, self._arguments)
                self._arguments = ""
                self._calls.append(call)
                yield Piece("call", "", call)
            return
        kind: Literal["reasoning", "content"] = "reasoning" if event.header.kind == "reasoning" else "content"
        text = event.text
        if kind == "content":
            text = self._stop.feed(text)
            if event.type == "end":
                text += self._stop.flush()  # a stop string does not span two messages
        if text:
            if self._message.setdefault(kind, event.message) != event.message:
                text = SEPARATOR + text
                self._message[kind] = event.message
            self._texts[kind] += text
            yield Piece(kind, text)

    @property
    def answer(self) -> Answer:
        """What has arrived so far; a finished stream's answer is complete."""
        end = self._end or Delta([], finish="cancelled")
        assert end.finish is not None
        return Answer(
            self._texts["content"], self._texts["reasoning"], list(self._calls), end.finish, list(self._tokens),
            end.usage or Usage(), self._parser.account.reasoning_tokens, end.reasoning_cut, self._stop.matched,
        )  # fmt: skip


class AnswerStream:
    """The pieces of an answer as they arrive; `answer` is what they add up to."""

    def __init__(self, deltas: Iterator[Delta], reader: AnswerReader) -> None:
        self._reader = reader
        self._deltas = deltas
        self._pieces = self._read()

    def _read(self) -> Generator[Piece, None, None]:
        for delta in self._deltas:
            yield from self._reader.read(delta)
            if self._reader.done:
                self._close_deltas()

    @property
    def answer(self) -> Answer:
        return self._reader.answer

    def __iter__(self) -> AnswerStream:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        self._pieces.close()
        self._close_deltas()

    def _close_deltas(self) -> None:
        if isinstance(self._deltas, Generator):
            self._deltas.close()

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncAnswerStream:
    """AnswerStream for an event loop."""

    def __init__(self, deltas: AsyncIterator[Delta], reader: AnswerReader) -> None:
        self._reader = reader
        self._deltas = deltas
        self._pieces = self._read()

    async def _read(self) -> AsyncGenerator[Piece, None]:
        async for delta in self._deltas:
            for piece in self._reader.read(delta):
                yield piece
            if self._reader.done:
                await self._close_deltas()

    @property
    def answer(self) -> Answer:
        return self._reader.answer

    def __aiter__(self) -> AsyncAnswerStream:
        return self

    async def __anext__(self) -> Piece:
        return await anext(self._pieces)

    async def close(self) -> None:
        await self._pieces.aclose()
        await self._close_deltas()

    async def _close_deltas(self) -> None:
        if isinstance(self._deltas, AsyncGenerator):
            await self._deltas.aclose()

    async def __aenter__(self) -> AsyncAnswerStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
