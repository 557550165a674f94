"""What a problem is: a conversation up to the model's turn, the worked reply, and how a reply is judged.

A problem knows no tokens. `suite.py` renders it through `halfbyte.harmony` and judges what comes back. Judging reads
the final channel or the call alone; the analysis is free.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from halfbyte.evals.grading import Grade, refuses
from halfbyte.harmony.messages import DeveloperContent, Message, SystemContent, Tool

Effort = Literal["low", "medium", "high"]
EFFORTS: tuple[Effort, ...] = ("low", "medium", "high")


@dataclass(frozen=True)
class Say:
    """One message of a conversation. `function` is whom a call is for, or whose result this is."""

    kind: Literal["user", "analysis", "final", "call", "result"]
    text: str
    function: str = ""

    def message(self) -> Message:
        if self.kind == "call":
            return Message.call(self.function, self.text)
        if self.kind == "result":
            return Message.result(self.function, self.text)
        return {"user": Message.user, "analysis": Message.analysis, "final": Message.final}[self.kind](self.text)


@dataclass(frozen=True)
class Frame:
    """What stands before the first user message. `effort` None: no system message at all."""

    effort: Effort | None = "medium"
    identity: str | None = None  # None: the harmony default
    date: str | None = None
    instructions: str | None = None
    tools: tuple[Tool, ...] = ()
    response_format: tuple[str, str] | None = None  # (name, schema as JSON text)
    brief: bool = False  # the instructions ask for the bare answer

    def messages(self) -> list[Message]:
        messages = []
        if self.effort is not None:
            content = SystemContent(reasoning_effort=self.effort, conversation_start_date=self.date)
            if self.identity is not None:
                content = replace(content, model_identity=self.identity)
            messages.append(Message.system(content))
        instructions = self.instructions
        if self.response_format is not None:
            name, schema = self.response_format
            formats = f"# Response Formats\n\n## {name}\n\n{schema}"
            instructions = f"{instructions}\n\n{formats}" if instructions else formats
        if instructions is not None or self.tools:
            messages.append(Message.developer(DeveloperContent.with_functions(instructions, self.tools)))
        return messages


@dataclass(frozen=True)
class Problem:
    """`reply` is what training shows; `answer` is what judging wants.

    kind "text": the final message is one of `accept`. "free": `grade` accepts it. "json": it parses to `value`.
    "call": the reply ends in a call of the function `accept[0]` with the arguments `value`. `tags` name the subtypes
    of its task that it belongs to.
    """

    task: str
    turns: tuple[Say, ...]
    reply: tuple[Say, ...]
    kind: Literal["text", "free", "json", "call"] = "text"
    accept: tuple[str, ...] = ()
    value: Any = None
    frame: Frame = field(default_factory=Frame)
    grade: Grade | None = None
    tags: tuple[str, ...] = ()

    @property
    def subtypes(self) -> tuple[str, ...]:
        turn = sum(say.kind == "user" for say in self.turns)
        return tuple(f"{self.task}: {tag}" for tag in (*self.tags, f"turn {turn}"))

    @property
    def wants_refusal(self) -> bool:
        """True if the right answer says that the model cannot answer."""
        return refuses(self.reply[-1].text) if self.grade is None else self.grade.refusal

    def prompt(self) -> list[Message]:
        return [*self.frame.messages(), *(say.message() for say in self.turns)]

    def worked(self) -> list[Message]:
        """The conversation with its reply: what training shows."""
        return [*self.prompt(), *(say.message() for say in self.reply)]

    def judge(self, final: str | None, call: tuple[str, str] | None) -> bool:
        """`final` is the text of the final channel, `call` (function, argument text); None where there was none."""
        if self.kind == "call":
            return call is not None and call[0] == self.accept[0] and _parsed(call[1]) == self.value
        if final is None or call is not None:
            return False
        if self.kind == "free":
            assert self.grade is not None
            return self.grade.accepts("\n".join(say.text for say in self.turns), final)
        if self.kind == "json":
            return bool(_parsed(final) == self.value)
        return final.strip() in self.accept


_BROKEN = object()


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return _BROKEN


def user(text: str) -> Say:
    return Say("user", text)


def think(text: str) -> Say:
    return Say("analysis", text)


def final(text: str) -> Say:
    return Say("final", text)


def call(function: str, arguments: dict[str, Any]) -> Say:
    return Say("call", json.dumps(arguments), function)


def result(function: str, value: dict[str, Any]) -> Say:
    return Say("result", json.dumps(value), function)


def name_tag(names: Iterable[str], vocabulary: Iterable[str]) -> str:
    return "listed names" if set(names) <= set(vocabulary) else "new names"


def answered(
    task: str, question: str, frame: Frame, thoughts: tuple[str, str, str], full: str, bare: str,
    tags: tuple[str, ...] = (),
) -> Problem:  # fmt: skip
    """The common case: one question, one analysis per effort, a full or a bare answer as the frame asks."""
    answer = bare if frame.brief else full
    thought = thoughts[EFFORTS.index(frame.effort or "medium")]
    reply = (think(thought), final(answer))
    return Problem(task, (user(question),), reply, "text", (answer,), frame=frame, tags=tags)
