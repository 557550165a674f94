"""A harmony conversation as plain values: who says what, on which channel, to whom.

Nothing here knows tokens. Field names follow OpenAI's harmony package, so that one can be read beside the other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

ReasoningEffort = Literal["low", "medium", "high"]

ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
FUNCTIONS = "functions"  # the namespace of the caller's own tools
FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")
JSON = "<|constrain|>json"  # the content type of a tool call's arguments


class Role(StrEnum):
    SYSTEM = "system"
    DEVELOPER = "developer"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True)
class Tool:
    """A function the model may call. `parameters` is a JSON schema; None means it takes no arguments."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ToolNamespace:
    name: str
    tools: tuple[Tool, ...] = ()
    description: str | None = None


@dataclass(frozen=True)
class SystemContent:
    """What the format keeps for the system message; a caller's own instructions belong in DeveloperContent."""

    model_identity: str | None = "You are ChatGPT, a large language model trained by OpenAI."
    reasoning_effort: ReasoningEffort | None = "medium"
    knowledge_cutoff: str | None = "2024-06"
    conversation_start_date: str | None = None  # YYYY-MM-DD
    channels: tuple[str, ...] = (ANALYSIS, COMMENTARY, FINAL)
    channel_required: bool = True
    tools: tuple[ToolNamespace, ...] = ()  # the tools the model was trained with, a browser and a notebook


@dataclass(frozen=True)
class DeveloperContent:
    instructions: str | None = None
    tools: tuple[ToolNamespace, ...] = ()

    @classmethod
    def with_functions(cls, instructions: str | None, functions: Sequence[Tool]) -> DeveloperContent:
        return cls(instructions, (ToolNamespace(FUNCTIONS, tuple(functions)),) if functions else ())


Content = str | SystemContent | DeveloperContent


@dataclass(frozen=True)
class Message:
    """One message. `content` may be several parts, which are tokenized apart; `name` is a tool's full name."""

    role: Role
    content: Content | tuple[Content, ...] = ""
    channel: str | None = None
    recipient: str | None = None
    content_type: str | None = None
    name: str | None = None

    @property
    def parts(self) -> tuple[Content, ...]:
        return self.content if isinstance(self.content, tuple) else (self.content,)

    @property
    def text(self) -> str:
        """The plain text of a message; structured system and developer parts have none."""
        return "".join(part for part in self.parts if isinstance(part, str))

    # ---- the messages a server writes ---------------------------------------------------------

    @classmethod
    def system(cls, content: SystemContent | str | None = None) -> Message:
        return cls(Role.SYSTEM, SystemContent() if content is None else content)

    @classmethod
    def developer(cls, content: DeveloperContent | str) -> Message:
        return cls(Role.DEVELOPER, DeveloperContent(content) if isinstance(content, str) else content)

    @classmethod
    def user(cls, text: str) -> Message:
        return cls(Role.USER, text)

    @classmethod
    def analysis(cls, text: str) -> Message:
        return cls(Role.ASSISTANT, text, channel=ANALYSIS)

    @classmethod
    def preamble(cls, text: str) -> Message:
        """What the assistant tells the user between tool calls."""
        return cls(Role.ASSISTANT, text, channel=COMMENTARY)

    @classmethod
    def final(cls, text: str) -> Message:
        return cls(Role.ASSISTANT, text, channel=FINAL)

    @classmethod
    def call(cls, function: str, arguments: str) -> Message:
        """The assistant calls one of the caller's functions; `arguments` is JSON text."""
        recipient = f"{FUNCTIONS}.{function}"
        return cls(Role.ASSISTANT, arguments, channel=COMMENTARY, recipient=recipient, content_type=JSON)

    @classmethod
    def result(cls, function: str, output: str) -> Message:
        """What one of the caller's functions answered."""
        return cls(Role.TOOL, output, channel=COMMENTARY, recipient=Role.ASSISTANT, name=f"{FUNCTIONS}.{function}")


def opening(
    effort: ReasoningEffort | None = "medium", instructions: str | None = None, functions: Sequence[Tool] = ()
) -> list[Message]:
    """The messages that a conversation begins with."""
    system = Message.system(SystemContent(reasoning_effort=effort))
    if not instructions and not functions:
        return [system]
    return [system, Message.developer(DeveloperContent.with_functions(instructions or None, functions))]


def assistant_turn(text: str, reasoning: str | None = None, calls: Sequence[tuple[str, str]] = ()) -> list[Message]:
    """One answer of the assistant as the messages it consisted of. `calls` are pairs of name and JSON arguments."""
    out = [Message.analysis(reasoning)] if reasoning else []
    if text:
        out.append(Message.preamble(text) if calls else Message.final(text))
    return out + [Message.call(name, arguments) for name, arguments in calls]
