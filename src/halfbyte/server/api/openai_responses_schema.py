"""The body of /v1/responses, its items and its tools.

Tools that run at OpenAI cannot run here. Web search is taken and left out of the prompt, because agents send it whether
they need it or not, and the answer says so in a header; the others are refused by name. A search for tools is the
client's own (Codex runs it) and reaches the model as a function; one that OpenAI would run is left out as well, because
every tool is shown from the start.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from halfbyte.harmony.messages import FUNCTIONS
from halfbyte.server.answer.tools import CUSTOM_FIELD, Function, Toolbox, ToolChoice, check_choice, check_name
from halfbyte.server.api.openai_chat_schema import EffortName, JsonObjectFormat, TextFormat
from halfbyte.server.api.shared_schema import (
    RESPONSES_HARMLESS,
    Count,
    Items,
    Limit,
    Messages,
    OpenAISamplerFields,
    RefusalPart,
    Strict,
    Table,
    Verbosity,
)


def _only(value: Any, values: tuple[str, ...], name: str) -> Any:
    """Refuses by name what no part of this server could serve; a list of all that it could helps nobody."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in values:
        raise ValueError(f"{name} of type {kind[:64]!r} needs a service or a model that is not here")
    return value


# ---- tools --------------------------------------------------------------------------------------------------------


_VISIBLE = {
    "defer_loading": "every tool is shown to the model from the start",
    "async": "a call is answered when the client answers it",
}


class FunctionTool(Strict):
    harmless: ClassVar[dict[str, str]] = {
        **_VISIBLE,
        "output_schema": "what the tool returns; the model is shown what it takes",
    }
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: Items[Literal["direct"]] | None = None


class CustomTool(Strict):
    harmless: ClassVar[dict[str, str]] = _VISIBLE
    type: Literal["custom"]
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None
    allowed_callers: Items[Literal["direct"]] | None = None


class NamespaceTool(Strict):
    harmless: ClassVar[dict[str, str]] = _VISIBLE
    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: Items[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]]


class WebSearchTool(Strict):
    harmless: ClassVar[dict[str, str]] = dict.fromkeys(
        (
            "external_web_access",
            "filters",
            "search_context_size",
            "user_location",
            "search_content_types",
            "return_token_budget",
            "indexed_web_access",
            "index_gated_web_access",
        ),
        "web search is left out",
    )
    type: Literal["web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"]


class ToolSearchTool(Strict):
    type: Literal["tool_search"]
    execution: Literal["client", "server"] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class LocalShellTool(Strict):
    type: Literal["local_shell"]


WEB_SEARCH = ("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11")
_TOOLS = ("function", "custom", "namespace", "tool_search", "local_shell", *WEB_SEARCH)


def _known_tool(value: Any) -> Any:
    return _only(value, _TOOLS, "a tool")


ResponseTool = Annotated[
    Annotated[
        FunctionTool | CustomTool | NamespaceTool | WebSearchTool | ToolSearchTool | LocalShellTool,
        Field(discriminator="type"),
    ],
    BeforeValidator(_known_tool),
]
Tools = Annotated[Items[ResponseTool], Field(max_length=1024)]

# ---- input --------------------------------------------------------------------------------------------------------


class InputText(Strict):
    harmless: ClassVar[dict[str, str]] = {
        "annotations": "citations of hosted tools",
        "logprobs": "of an earlier answer",
        "prompt_cache_breakpoint": "the prefix cache finds prompts by their tokens",
    }
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


def _text_only(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") in ("input_image", "input_file", "input_audio", "image", "file"):
        raise ValueError(f"gpt-oss reads text only, and this part is of type {value['type']!r}")
    return value


Part = Annotated[Annotated[InputText | RefusalPart, Field(discriminator="type")], BeforeValidator(_text_only)]


def text_of(content: str | list[Any] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(p.refusal if isinstance(p, RefusalPart) else p.text for p in content)


_ITEMS = (
    "message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
    "tool_search_call", "tool_search_output", "additional_tools", "web_search_call", "local_shell_call",
    "local_shell_call_output",
)  # fmt: skip


def _known_item(value: Any) -> Any:
    """A message may leave out its type."""
    if isinstance(value, dict) and "type" not in value and "role" in value:
        return {**value, "type": "message"}
    return _only(value, _ITEMS, "an item")


class _Item(Strict):
    # Left over from an answer that is sent back.
    harmless: ClassVar[dict[str, str]] = {
        "status": "of an earlier answer",
        "internal_chat_message_metadata_passthrough": "an agent's own note",
        "metadata": "an agent's own note",
        "caller": "who ran the tool",
        "async": "how the tool was run",
    }
    id: str | None = None


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Items[Part]
    phase: Literal["commentary", "final_answer"] | None = None


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    summary: Items[InputText] | None = None
    content: Items[InputText] | None = None
    encrypted_content: str | None = None


class FunctionCallItem(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class _OutputItem(_Item):
    call_id: str
    output: str | Items[Part]
    name: str | None = None
    namespace: str | None = None


class FunctionOutputItem(_OutputItem):
    type: Literal["function_call_output"]


class CustomCallItem(_Item):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str
    namespace: str | None = None


class CustomOutputItem(_OutputItem):
    type: Literal["custom_tool_call_output"]


class ToolSearchCallItem(_Item):
    type: Literal["tool_search_call"]
    call_id: str | None = None
    execution: Literal["client", "server"] | None = None
    arguments: Any = None


class ToolSearchOutputItem(_Item):
    type: Literal["tool_search_output"]
    call_id: str | None = None
    execution: Literal["client", "server"] | None = None
    tools: Tools


class AdditionalToolsItem(_Item):
    type: Literal["additional_tools"]
    role: str | None = None
    tools: Tools


class WebSearchCallItem(_Item):
    """Another service searched; what it found is in what the model then said."""

    type: Literal["web_search_call"]
    action: dict[str, Any] | None = None


class LocalShellCallItem(_Item):
    type: Literal["local_shell_call"]
    call_id: str | None = None
    action: dict[str, Any]


class LocalShellOutputItem(_Item):
    type: Literal["local_shell_call_output"]
    call_id: str | None = None
    output: str


InputItem = Annotated[
    Annotated[
        MessageItem
        | ReasoningItem
        | FunctionCallItem
        | FunctionOutputItem
        | CustomCallItem
        | CustomOutputItem
        | ToolSearchCallItem
        | ToolSearchOutputItem
        | AdditionalToolsItem
        | WebSearchCallItem
        | LocalShellCallItem
        | LocalShellOutputItem,
        Field(discriminator="type"),
    ],
    BeforeValidator(_known_item),
]


class ResponsesNamedTool(Strict):
    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class ResponsesAllowedTools(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Items[ResponsesNamedTool]


class FunctionChoice(Strict):
    type: Literal["function"]
    name: str
    namespace: str | None = None


class CustomChoice(Strict):
    type: Literal["custom"]
    name: str
    namespace: str | None = None


NamedChoice = Annotated[FunctionChoice | CustomChoice | ResponsesAllowedTools, Field(discriminator="type")]

# ---- the body -----------------------------------------------------------------------------------------------------


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    name: Annotated[str, Field(min_length=1, max_length=128)]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class TextOptions(Strict):
    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Verbosity | None = None


class Reasoning(Strict):
    effort: EffortName | None = None
    max_tokens: Limit | None = None  # an extension
    # The reasoning itself is in the answer; nothing here writes summaries of it.
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None


class ResponsesRequest(OpenAISamplerFields):
    harmless: ClassVar[dict[str, str]] = {**RESPONSES_HARMLESS, "max_tool_calls": "it counts hosted tools only"}
    model: str
    input: str | Messages[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    metadata: Table[str] | None = None
    include: Items[str] | None = None
    max_output_tokens: Count | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    text: TextOptions | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None

    @property
    def left_out(self) -> list[str]:
        """gpt-oss has no switch for verbosity, and was trained to see no reasoning of earlier turns."""
        verbose = self.text is not None and self.text.verbosity in ("low", "high")
        earlier = self.reasoning is not None and self.reasoning.context == "all_turns"
        return ["text.verbosity"] * verbose + ["reasoning.context"] * earlier


# What Codex's older agents and OpenAI's own `local_shell` take.
_SHELL_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."},
        "working_directory": {"type": "string"},
        "timeout_ms": {"type": "number"},
    },
    "required": ["command"],
}


def toolbox(tools: Iterable[Any], more: Iterable[Any] = ()) -> tuple[Toolbox, list[str]]:
    """The tools, and the types of those left out. `more` came with the input, where a tool may come again: the last
    definition counts."""
    descriptions: dict[str, str] = {}
    left_out: list[str] = []
    functions = [f for tool in tools for f in _functions(tool, descriptions, left_out)]
    later = {f.recipient: f for tool in more for f in _functions(tool, descriptions, left_out)}
    earlier = [f for f in functions if f.recipient not in later]
    return Toolbox([*earlier, *later.values()], descriptions), list(dict.fromkeys(left_out))


def _functions(tool: Any, descriptions: dict[str, str], left_out: list[str]) -> list[Function]:
    if isinstance(tool, NamespaceTool):
        name = check_name(tool.name, "tools")
        if tool.description:
            descriptions[name] = tool.description
        return [_function(member, name) for member in tool.tools]
    if isinstance(tool, WebSearchTool) or (isinstance(tool, ToolSearchTool) and tool.execution != "client"):
        left_out.append(f"tools.{tool.type}")
        return []
    if isinstance(tool, ToolSearchTool):
        return [Function(tool.type, FUNCTIONS, tool.description or "", tool.parameters, form="tool_search")]
    if isinstance(tool, LocalShellTool):
        return [Function(tool.type, FUNCTIONS, "Runs a command on this machine.", _SHELL_SCHEMA, form="local_shell")]
    return [_function(tool, FUNCTIONS)]


def _function(tool: FunctionTool | CustomTool, namespace: str) -> Function:
    name = check_name(tool.name, "tools")
    if isinstance(tool, FunctionTool):
        return Function(name, namespace, tool.description or "", tool.parameters, bool(tool.strict))
    description = tool.description or ""
    syntax = tool.format or {}
    if syntax.get("type") == "grammar" and isinstance(syntax.get("definition"), str):
        description += f"\n\n`{CUSTOM_FIELD}` must follow this {syntax.get('syntax')} grammar:\n{syntax['definition']}"
    return Function(name, namespace, description.strip(), form="custom")


def tool_choice_of(body: ResponsesRequest, tools: Toolbox) -> ToolChoice:
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return check_choice(ToolChoice(choice or "auto"), tools)
    if isinstance(choice, ResponsesAllowedTools):
        return check_choice(ToolChoice(choice.mode, tuple(_recipient(tools, t) for t in choice.tools)), tools)
    return ToolChoice("required", (_recipient(tools, choice),))


def _recipient(tools: Toolbox, tool: ResponsesNamedTool | FunctionChoice | CustomChoice) -> str:
    return tools.require(tool.name, "tool_choice", tool.namespace).recipient
