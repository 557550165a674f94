"""The bodies of Ollama's API, and its messages as harmony messages.

Images, templates and adapters are refused by name: gpt-oss reads text, in its own format.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from halfbyte.harmony.messages import Message
from halfbyte.server.answer.call_memory import OwnCalls
from halfbyte.server.api.ollama_options import OllamaOptions
from halfbyte.server.api.openai_chat_schema import ChatTool
from halfbyte.server.api.shared_schema import Items, Messages, Strict
from halfbyte.server.http.errors import bad_request

_HARMLESS = {
    "keep_alive": "the model stays loaded",
    "truncate": "a conversation that does not fit is refused, never cut",
    "shift": "a conversation that does not fit is refused, never cut",
}


def _no_images(value: Any) -> Any:
    if value:
        raise ValueError("gpt-oss reads text only; leave images out")
    return None


Images = Annotated[None, BeforeValidator(_no_images)]


class OllamaCalledFunction(Strict):
    harmless: ClassVar[dict[str, str]] = {"index": "left over from a stream"}
    name: str
    arguments: dict[str, Any] | str = {}


class OllamaToolCall(Strict):
    harmless: ClassVar[dict[str, str]] = {"type": "they are all functions"}
    id: str | None = None
    function: OllamaCalledFunction


class OllamaMessage(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Images = None
    tool_calls: Items[OllamaToolCall] | None = None
    tool_name: str | None = None
    name: str | None = None  # what tool_name was called before
    tool_call_id: str | None = None


Think = bool | Literal["low", "medium", "high", "max"]


class ChatBody(Strict):
    harmless: ClassVar[dict[str, str]] = _HARMLESS
    model: str
    messages: Messages[OllamaMessage] = []
    tools: Annotated[Items[ChatTool], Field(max_length=1024)] | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    think: Think | None = None
    stream: bool | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None


class GenerateBody(Strict):
    harmless: ClassVar[dict[str, str]] = _HARMLESS
    model: str
    prompt: str | None = None
    system: str | None = None
    images: Images = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    think: Think | None = None
    stream: bool | None = None
    raw: bool | None = None
    suffix: Literal[""] | None = None
    template: Literal[""] | None = None
    context: Annotated[list[int], Field(max_length=0)] | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None


class ShowBody(Strict):
    model: str | None = None
    name: str | None = None  # what `model` was called before
    verbose: bool | None = None


def to_harmony(messages: list[OllamaMessage], memory: OwnCalls) -> tuple[str | None, list[Message]]:
    """(instructions, messages). A tool's result belongs to the call it names, or else to the first one unanswered."""
    opening: list[str] = []
    out: list[Message] = []
    waiting: list[tuple[str | None, str]] = []  # id and name of calls without a result
    for position, m in enumerate(messages):
        text = m.content or ""
        if m.role in ("system", "developer"):
            if out:
                out.append(Message.developer(text))
            else:
                opening.append(text)
        elif m.role == "user":
            out.append(Message.user(text))
        elif m.role == "tool":
            out.append(Message.result(_answered(m, waiting, position), text))
        else:
            calls = m.tool_calls or []
            thought = m.thinking or (memory.recall(calls[0].id or "") if calls else None)
            if thought:
                out.append(Message.analysis(thought))
            if text:
                out.append(Message.preamble(text) if calls else Message.final(text))
            for call in calls:
                arguments = call.function.arguments
                written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
                out.append(Message.call(call.function.name, written))
                waiting.append((call.id, call.function.name))
    return "\n\n".join(opening) or None, out


def _answered(m: OllamaMessage, waiting: list[tuple[str | None, str]], position: int) -> str:
    name = m.tool_name or m.name
    for call in waiting:
        if m.tool_call_id is not None and call[0] is not None:
            right = call[0] == m.tool_call_id
        else:
            right = name is None or call[1] == name
        if right:
            waiting.remove(call)
            return call[1]
    if name is not None:
        return name
    at = f"messages.{position}"
    raise bad_request(f"'{at}' is a tool's result, but no earlier message made that call.", f"{at}.tool_name")
