"""Seeded conversations for the harmony tests, in our types and in those of OpenAI's package."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import openai_harmony as oh

from halfbyte.harmony.messages import (
    DeveloperContent,
    Message,
    Role,
    SystemContent,
    Tool,
    ToolNamespace,
)

# fmt: off
WORDS = (
    "the", "a", "weather", "in", "Paris", "lookup", "é", "漢字", "👩\u200d👩\u200d👧", "ñandú", "<|start|>", "<|end|>",
    "<|message|>json", "<|constrain|>", "to=functions.x", "assistant", "analysis", "12345", "3.14", "{}", '"quoted"',
    "'single'", "\\back", "//", "comment", "null", "{", "}", ",", ";", "\t", "tab\n", "new\r\n", "bare\r", "line", "",
    "wide  gap", "\u3000", "٣٤", "ﬁ", "İstanbul", "I'll", "DON'T", "<|reserved_200017|>", "<|endofprompt|>", 
    "🏳️\u200d🌈", "\u200b", "\x00", "\x7f", "e\u0301", "🧑\u200d💻", "\x85", "\u2028", "\x0b",
)
# fmt: on


def from_package(namespace: oh.ToolNamespaceConfig) -> ToolNamespace:
    tools = tuple(Tool(t.name, t.description, t.parameters) for t in namespace.tools)
    return ToolNamespace(namespace.name, tools, namespace.description)


# The two tools gpt-oss was trained with, in the package's own words.
BROWSER = from_package(oh.ToolNamespaceConfig.browser())
PYTHON = from_package(oh.ToolNamespaceConfig.python())
NAMES = ("get_weather", "x", "lookup-2", "search_web", "f", "runShell", "名前")
FORMATS = ("<|constrain|>json", "json", "code", "<|constrain|>", None)


class Writer:
    """Writes one random thing after another; the same seed gives the same conversation."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    def text(self, longest: int = 12) -> str:
        words = self.random.choices(WORDS, k=self.random.randint(0, longest))
        return self.random.choice(("", " ", "\n")).join(words) if self.chance(0.3) else " ".join(words)

    # ---- JSON schemas -------------------------------------------------------------------------

    def value(self, depth: int = 2) -> Any:
        r = self.random
        kinds = ["text", "int", "float", "bool", "null"] + (["list", "dict"] if depth else [])
        match r.choice(kinds):
            case "text":
                return self.text(3)
            case "int":
                return r.choice((0, -1, 7, 2**53, 2**63, 2**64, -(2**63), -(2**70), 10**25))
            case "float":
                return r.choice((0.5, 1e-5, -1.5e-5, 1e-7, 1e15, 1e16, 1.25e22, -0.0, 3.0, 123456.789, 1e300, 5e-324))
            case "bool":
                return self.chance(0.5)
            case "list":
                return [self.value(depth - 1) for _ in range(r.randint(0, 3))]
            case "dict":
                return {self.text(1): self.value(depth - 1) for _ in range(r.randint(0, 3))}
        return None

    def schema(self, depth: int) -> Any:
        r = self.random
        if self.chance(0.03):
            return r.choice((True, {}, [], "string", None, 3))
        kinds = ["string", "number", "integer", "boolean", "null", "enum", "union", "odd"]
        kinds += ["object", "object", "array", "oneOf", "anyOf"] if depth else []
        match r.choice(kinds):
            case "enum":
                out: dict[str, Any] = {"type": "string", "enum": [self.value(0) for _ in range(r.randint(0, 4))]}
            case "union":
                out = {"type": r.choices(["string", "integer", "number", "null", "object", 3], k=r.randint(0, 3))}
            case "odd":
                out = r.choice(
                    ({"type": "file"}, {"$ref": "#/$defs/x"}, {"enum": [1, 2]}, {"type": None}, {"const": 1})
                )
                out = dict(out)
            case "object":
                out = self.object(depth - 1)
            case "array":
                out = {"type": "array"} | ({"items": self.schema(depth - 1)} if self.chance(0.8) else {})
            case "oneOf":
                out = {"oneOf": [self.schema(depth - 1) for _ in range(r.randint(0, 3))]}
                if self.chance(0.1):
                    out["oneOf"] = r.choice(({}, "x", None))
                if self.chance(0.2):
                    out["type"] = r.choice(("string", "object"))
            case "anyOf":
                out = {"anyOf": [self.schema(depth - 1)]}
            case kind:
                out = {"type": kind}
        for key, p in (("description", 0.4), ("title", 0.15), ("default", 0.3), ("examples", 0.15), ("nullable", 0.15)):
            if self.chance(p):
                out[key] = self.keyword(key)
        variants = out.get("oneOf")
        if isinstance(variants, list) and variants and isinstance(variants[0], dict) and self.chance(0.3):
            variants[0]["description"] = out.get("description", "")
        return out

    def keyword(self, key: str) -> Any:
        if self.chance(0.05):
            return self.value()
        if key in ("description", "title"):
            return self.text(5)
        if key == "examples":
            return [self.value(0) for _ in range(self.random.randint(0, 3))]
        return self.chance(0.8) if key == "nullable" else self.value()

    def object(self, depth: int) -> dict[str, Any]:
        names = self.random.sample(("a", "b", "city", "Zeta", "unit", "naïve", "x y", "0"), self.random.randint(0, 4))
        out: dict[str, Any] = {"type": "object", "properties": {name: self.schema(depth) for name in names}}
        if self.chance(0.7):
            out["required"] = [name for name in names if self.chance(0.5)]
        if self.chance(0.1):
            del out["properties"]
        return out

    def tool(self) -> Tool:
        parameters = None if self.chance(0.2) else self.object(3) if self.chance(0.8) else self.schema(3)
        if not isinstance(parameters, dict):
            parameters = None
        return Tool(self.random.choice(NAMES), self.text(8), parameters)

    def namespace(self, name: str) -> ToolNamespace:
        description = self.text(6) if self.chance(0.3) else None
        return ToolNamespace(name, tuple(self.tool() for _ in range(self.random.randint(0, 3))), description)

    # ---- conversations ------------------------------------------------------------------------

    def system(self) -> Message:
        content = SystemContent(
            model_identity=self.random.choice((None, self.text(), SystemContent.model_identity)),
            reasoning_effort=self.random.choice((None, "low", "medium", "high")),
            knowledge_cutoff=self.random.choice((None, "2024-06", self.text(2))),
            conversation_start_date=self.random.choice((None, "2026-01-31")),
            channels=self.random.choice(((), ("analysis", "commentary", "final"), ("final",))),
            channel_required=self.chance(0.8),
            tools=tuple(
                self.random.sample((BROWSER, PYTHON, self.namespace("extra")), self.random.choice((0, 0, 1, 2)))
            ),
        )
        return Message.system(content)

    def developer(self) -> Message:
        tools = [self.namespace(n) for n in self.random.sample(("functions", "apps", "Zoo"), self.random.randint(0, 3))]
        return Message.developer(DeveloperContent(self.text() if self.chance(0.8) else None, tuple(tools)))

    def turn(self, *, finished: bool = True) -> list[Message]:
        out = [Message.user(self.text())]
        for _ in range(self.random.choice((0, 0, 1, 3))):
            if self.chance(0.7):
                out.append(Message.analysis(self.text()))
            if self.chance(0.2):
                out.append(Message.preamble(self.text()))
            out += self.exchange()
        if self.chance(0.8):
            out.append(Message.analysis(self.text()))
        return [*out, Message.final(self.text())] if finished else out

    def exchange(self) -> list[Message]:
        """A call and its result."""
        name = (
            f"functions.{self.random.choice(NAMES)}"
            if self.chance(0.8)
            else self.random.choice(("python", "browser.open"))
        )
        channel = "analysis" if "functions" not in name else "commentary"
        call = Message(Role.ASSISTANT, self.text(), channel, name, self.random.choice(FORMATS))
        return [call, Message(Role.TOOL, self.text(), self.random.choice((channel, None)), "assistant", name=name)]

    def conversation(self) -> list[Message]:
        out = [self.system()] if self.chance(0.8) else []
        out += [self.developer()] if self.chance(0.7) else []
        for _ in range(self.random.choice((0, 1, 1, 2, 3))):
            out += self.turn()
        if self.chance(0.7):
            out += self.turn(finished=False)
        if self.chance(0.1):
            out.append(Message(self.random.choice((Role.USER, Role.ASSISTANT)), ("two ", "parts"), name=self.text(1)))
        if self.chance(0.05):
            out.append(Message(Role.ASSISTANT, self.text(), "final", "all"))
        return out


def conversation(seed: int) -> list[Message]:
    return Writer(seed).conversation()


# ---- the package's types ----------------------------------------------------------------------


def to_package(messages: Sequence[Message]) -> Any:
    def namespaces(ours: Sequence[ToolNamespace]) -> Any:
        return {
            ns.name: oh.ToolNamespaceConfig(
                name=ns.name,
                description=ns.description,
                tools=[
                    oh.ToolDescription(name=t.name, description=t.description, parameters=t.parameters)
                    for t in ns.tools
                ],
            )
            for ns in ours
        } or None

    def content(part: Any) -> Any:
        if isinstance(part, str):
            return oh.TextContent(text=part)
        if isinstance(part, SystemContent):
            return oh.SystemContent(
                model_identity=part.model_identity,
                reasoning_effort=part.reasoning_effort and part.reasoning_effort.capitalize(),
                conversation_start_date=part.conversation_start_date,
                knowledge_cutoff=part.knowledge_cutoff,
                channel_config=oh.ChannelConfig(
                    valid_channels=list(part.channels), channel_required=part.channel_required
                ),
                tools=namespaces(part.tools),
            )
        return oh.DeveloperContent(instructions=part.instructions, tools=namespaces(part.tools))

    return oh.Conversation.from_messages(
        [
            oh.Message(
                author=oh.Author(role=oh.Role(m.role.value), name=m.name),
                content=[content(part) for part in m.parts],
                channel=m.channel,
                recipient=m.recipient,
                content_type=m.content_type,
            )
            for m in messages
        ]
    )
