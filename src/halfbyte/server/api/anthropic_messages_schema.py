"""The body of /v1/messages, and its messages as harmony messages.

Tools that run at Anthropic, images and documents are refused by name. Thinking blocks come back as the reasoning they
were.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from halfbyte.harmony.messages import Message
from halfbyte.server.answer.call_memory import OwnCalls
from halfbyte.server.answer.tools import Function, Toolbox, ToolChoice, check_choice, check_name
from halfbyte.server.api.carried_reasoning import decode_reasoning
from halfbyte.server.api.shared_schema import MESSAGES_HARMLESS, Items, Messages, Share, Strict
from halfbyte.server.http.errors import bad_request

_CACHE = {"cache_control": "the prefix cache needs no marks"}


class TextBlockParam(Strict):
    harmless: ClassVar[dict[str, str]] = {**_CACHE, "citations": "of an earlier answer"}
    type: Literal["text"]
    text: str


class ThinkingBlockParam(Strict):
    harmless: ClassVar[dict[str, str]] = _CACHE
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Strict):
    harmless: ClassVar[dict[str, str]] = _CACHE
    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlockParam(Strict):
    harmless: ClassVar[dict[str, str]] = {**_CACHE, "caller": "who ran the tool", "toolset_name": "who ran the tool"}
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


def _text_only(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") in ("image", "document", "search_result", "container_upload"):
        raise ValueError(f"gpt-oss reads text only, and this block is of type {value['type']!r}")
    return value


class ToolReferenceBlock(Strict):
    """What a client's search for tools has found: one of those that were sent with `defer_loading`."""

    harmless: ClassVar[dict[str, str]] = _CACHE
    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        return f"The tool {self.tool_name} can be called now.\n"


ResultBlock = Annotated[
    Annotated[TextBlockParam | ToolReferenceBlock, Field(discriminator="type")], BeforeValidator(_text_only)
]


class ToolResultBlock(Strict):
    harmless: ClassVar[dict[str, str]] = {**_CACHE, "toolset_name": "who ran the tool"}
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Items[ResultBlock] | None = None
    is_error: bool | None = None


UserBlock = Annotated[
    Annotated[TextBlockParam | ToolResultBlock, Field(discriminator="type")], BeforeValidator(_text_only)
]
AssistantBlock = Annotated[
    TextBlockParam | ThinkingBlockParam | RedactedThinkingBlock | ToolUseBlockParam, Field(discriminator="type")
]


class UserMessage(Strict):
    role: Literal["user"]
    content: str | Items[UserBlock]


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: str | Items[AssistantBlock]


class SystemMessage(Strict):
    role: Literal["system"]
    content: str | Items[TextBlockParam]


MessageParam = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


def _no_hosted_tool(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in (None, "custom"):
        raise ValueError(f"tools of type {kind!r} run at Anthropic or need its models; describe it with 'input_schema'")
    return value


class ToolDefinition(Strict):
    harmless: ClassVar[dict[str, str]] = {
        **_CACHE,
        "eager_input_streaming": "arguments are always streamed as they come",
        "input_examples": "the model is shown the schema",
    }
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    allowed_callers: Items[Literal["direct"]] | None = None
    defer_loading: bool | None = None


class ToolChoiceParam(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Strict):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountRequest(Strict):
    harmless: ClassVar[dict[str, str]] = MESSAGES_HARMLESS
    model: str
    messages: Annotated[Messages[MessageParam], Field(min_length=1)]
    system: str | Items[TextBlockParam] | None = None
    tools: (
        Annotated[Items[Annotated[ToolDefinition, BeforeValidator(_no_hosted_tool)]], Field(max_length=1024)] | None
    ) = None
    tool_choice: ToolChoiceParam | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest):
    max_tokens: Annotated[int, Field(ge=1, le=2**31)]
    stop_sequences: Items[str] | None = None
    stream: bool | None = None
    temperature: Share | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=0, le=2**31)] | None = None


def toolbox(body: CountRequest) -> Toolbox:
    """Without those that a client's search has not found yet."""
    deferred = any(t.defer_loading for t in body.tools or ())
    loaded = set(_loaded_tools(body)) if deferred else set()
    return Toolbox(
        Function(
            check_name(t.name, "tools"),
            description=t.description or "",
            parameters=t.input_schema,
            strict=bool(t.strict),
        )
        for t in body.tools or ()
        if not t.defer_loading or t.name in loaded
    )


def _loaded_tools(body: CountRequest) -> Iterator[str]:
    """Names of tools that a search has found or that were called."""
    for message in body.messages:
        for block in message.content if isinstance(message.content, list) else ():
            if isinstance(block, ToolUseBlockParam):
                yield block.name
            elif isinstance(block, ToolResultBlock) and isinstance(block.content, list):
                yield from (part.tool_name for part in block.content if isinstance(part, ToolReferenceBlock))


def tool_choice_of(body: CountRequest, tools: Toolbox) -> ToolChoice:
    choice = body.tool_choice
    if choice is None or choice.type == "auto":
        return ToolChoice()
    if choice.type == "none":
        return ToolChoice("none")
    if choice.type == "any":
        return check_choice(ToolChoice("required"), tools)
    return ToolChoice("required", (tools.require(choice.name or "", "tool_choice.name").recipient,))


def _text(content: str | list[Any] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(block.text for block in content)


@dataclass
class MessageHistory:
    instructions: str | None = None
    messages: list[Message] = field(default_factory=list)
    opening: str | None = None  # what the answer must begin with
    _calls: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, body: CountRequest, memory: OwnCalls) -> MessageHistory:
        out = cls(_system(body.system))
        for position, m in enumerate(body.messages):
            where = f"messages.{position}"
            if isinstance(m, UserMessage):
                out._user(m, where)
            elif isinstance(m, SystemMessage):
                out.messages.append(Message.developer(_text(m.content)))
            else:
                out._assistant(m, memory, last=position == len(body.messages) - 1)
        return out

    def _user(self, m: UserMessage, where: str) -> None:
        if isinstance(m.content, str):
            self.messages.append(Message.user(m.content))
            return
        texts = []
        for position, block in enumerate(m.content):
            if isinstance(block, TextBlockParam):
                texts.append(block.text)
                continue
            name = self._calls.get(block.tool_use_id)
            if name is None:
                at = f"{where}.content.{position}.tool_use_id"
                raise bad_request(f"'{at}' is {block.tool_use_id!r}, but no earlier tool_use has that id.", at)
            text = _text(block.content)
            self.messages.append(Message.result(name, f"Error: {text}" if block.is_error else text))
        if texts:
            self.messages.append(Message.user("\n\n".join(texts)))

    def _assistant(self, m: AssistantMessage, memory: OwnCalls, *, last: bool) -> None:
        blocks = [TextBlockParam(type="text", text=m.content)] if isinstance(m.content, str) else m.content
        uses = [b for b in blocks if isinstance(b, ToolUseBlockParam)]
        if uses and not any(isinstance(b, ThinkingBlockParam) for b in blocks):
            thought = memory.recall(uses[0].id)
            if thought:
                self.messages.append(Message.analysis(thought))
        for position, block in enumerate(blocks):
            if isinstance(block, TextBlockParam):
                if last and position == len(blocks) - 1:
                    self.opening = block.text
                elif block.text:
                    self.messages.append(Message.preamble(block.text) if uses else Message.final(block.text))
            elif isinstance(block, ThinkingBlockParam):
                thought = block.thinking or decode_reasoning(block.signature)
                if thought:
                    self.messages.append(Message.analysis(thought))
            elif isinstance(block, ToolUseBlockParam):
                self._calls[block.id] = block.name
                self.messages.append(Message.call(block.name, json.dumps(block.input, ensure_ascii=False)))


def _system(system: str | list[Any] | None) -> str | None:
    if system is None or isinstance(system, str):
        return system or None
    return "\n\n".join(block.text for block in system) or None
