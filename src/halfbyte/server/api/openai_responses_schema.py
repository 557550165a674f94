"""The body of /v1/responses, its items and its tools.

Tools that run at OpenAI cannot run here. Web search is taken and left out of the prompt, because agents send it whether
they need it or not, and the answer says so in a header; the others are refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from halfbyte.harmony.messages import FUNCTIONS
from halfbyte.server.answer.tools import CUSTOM_FIELD, Function, Toolbox, ToolChoice, check_choice, check_name
from halfbyte.server.api.openai_chat_schema import EffortName, JsonObjectFormat, TextFormat
from halfbyte.server.api.shared_schema import (
    RESPONSES_HARMLESS,
    Bias,
    Count,
    Items,
    Messages,
    Penalty,
    Seed,
    Share,
    Strict,
    Table,
    Temperature,
)

# ---- input --------------------------------------------------------------------------------------------------------


class InputText(Strict):
    harmless: ClassVar[dict[str, str]] = {
        "annotations": "citations of hosted tools",
        "logprobs": "of an earlier answer",
        "prompt_cache_breakpoint": "the prefix cache finds prompts by their tokens",
    }
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


class Refusal(Strict):
    type: Literal["refusal"]
    refusal: str


def _text_only(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") in ("input_image", "input_file", "input_audio", "image", "file"):
        raise ValueError(f"gpt-oss reads text only, and this part is of type {value['type']!r}")
    return value


Part = Annotated[Annotated[InputText | Refusal, Field(discriminator="type")], BeforeValidator(_text_only)]


def text_of(content: str | list[Any] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(p.refusal if isinstance(p, Refusal) else p.text for p in content)


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


def _message_by_default(value: Any) -> Any:
    """A message may leave out its type."""
    if isinstance(value, dict) and "type" not in value and "role" in value:
        return {**value, "type": "message"}
    return value


InputItem = Annotated[
    Annotated[
        MessageItem | ReasoningItem | FunctionCallItem | FunctionOutputItem | CustomCallItem | CustomOutputItem,
        Field(discriminator="type"),
    ],
    BeforeValidator(_message_by_default),
]

# ---- tools --------------------------------------------------------------------------------------------------------


class FunctionTool(Strict):
    harmless: ClassVar[dict[str, str]] = {"output_schema": "what the tool returns; the model is shown what it takes"}
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: Items[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None


class CustomTool(Strict):
    type: Literal["custom"]
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None
    allowed_callers: Items[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None


class NamespaceTool(Strict):
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
        ),
        "web search is left out",
    )
    type: Literal["web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"]


ResponseTool = Annotated[FunctionTool | CustomTool | NamespaceTool | WebSearchTool, Field(discriminator="type")]


class NamedTool(Strict):
    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class AllowedTools(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Items[NamedTool]


class FunctionChoice(Strict):
    type: Literal["function"]
    name: str
    namespace: str | None = None


class CustomChoice(Strict):
    type: Literal["custom"]
    name: str
    namespace: str | None = None


NamedChoice = Annotated[FunctionChoice | CustomChoice | AllowedTools, Field(discriminator="type")]

# ---- the body -----------------------------------------------------------------------------------------------------


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    name: Annotated[str, Field(min_length=1, max_length=128)]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class TextOptions(Strict):
    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Strict):
    effort: EffortName | None = None
    # The reasoning itself is in the answer; nothing here writes summaries of it.
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn"] | None = None


class ResponsesRequest(Strict):
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
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    text: TextOptions | None = None
    tools: Annotated[Items[ResponseTool], Field(max_length=1024)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    # extensions
    seed: Seed | None = None
    stop: str | Items[str] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Table[Bias] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    min_p: Share | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] | None = None


def toolbox(tools: list[Any]) -> tuple[Toolbox, list[str]]:
    """The tools, and the types of those left out."""
    functions: list[Function] = []
    descriptions: dict[str, str] = {}
    left_out: list[str] = []
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            name = check_name(tool.name, "tools")
            if tool.description:
                descriptions[name] = tool.description
            functions += [_function(member, name) for member in tool.tools]
        elif isinstance(tool, WebSearchTool):
            left_out.append(tool.type)
        else:
            functions.append(_function(tool, FUNCTIONS))
    return Toolbox(functions, descriptions), left_out


def _function(tool: FunctionTool | CustomTool, namespace: str) -> Function:
    name = check_name(tool.name, "tools")
    if isinstance(tool, FunctionTool):
        return Function(name, namespace, tool.description or "", tool.parameters, bool(tool.strict))
    description = tool.description or ""
    syntax = tool.format or {}
    if syntax.get("type") == "grammar" and isinstance(syntax.get("definition"), str):
        description += f"\n\n`{CUSTOM_FIELD}` must follow this {syntax.get('syntax')} grammar:\n{syntax['definition']}"
    return Function(name, namespace, description.strip(), custom=True)


def tool_choice_of(body: ResponsesRequest, tools: Toolbox) -> ToolChoice:
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return check_choice(ToolChoice(choice or "auto"), tools)
    if isinstance(choice, AllowedTools):
        return check_choice(ToolChoice(choice.mode, tuple(_recipient(tools, t) for t in choice.tools)), tools)
    return ToolChoice("required", (_recipient(tools, choice),))


def _recipient(tools: Toolbox, tool: NamedTool | FunctionChoice | CustomChoice) -> str:
    return tools.require(tool.name, "tool_choice", tool.namespace).recipient
