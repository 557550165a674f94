"""The body of /v1/chat/completions, and its messages as harmony messages."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from halfbyte.harmony.messages import Message, assistant_turn
from halfbyte.server.answer.call_memory import OwnCalls
from halfbyte.server.api.guidance import GuidanceFields
from halfbyte.server.api.ollama_options import OllamaOptions
from halfbyte.server.api.shared_schema import (
    CHAT_HARMLESS,
    Items,
    Limit,
    Messages,
    RefusalPart,
    SamplingFields,
    SomeTokens,
    Strict,
    TextPart,
    Verbosity,
    text_of,
)
from halfbyte.server.http.errors import bad_request

EffortName = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _text_only(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") in ("image_url", "input_audio", "file"):
        raise ValueError(f"gpt-oss reads text only, and this part is of type {value['type']!r}")
    return value


class SpokenText(TextPart):
    """Text of an earlier answer. @openai/agents sends it back with the other fields of its message."""

    harmless: ClassVar[dict[str, str]] = {
        **TextPart.harmless,
        **dict.fromkeys(
            (
                "role", "refusal", "tool_calls", "reasoning", "reasoning_content", "annotations", "audio",
                "function_call", "logprobs",
            ),
            "a field of the message, which has its own place",
        ),
    }  # fmt: skip


UserPart = Annotated[TextPart, BeforeValidator(_text_only)]
SpokenPart = Annotated[SpokenText | RefusalPart, Field(discriminator="type")]


class ChatCalledFunction(Strict):
    name: str
    arguments: str


class ChatToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: ChatCalledFunction
    index: int | None = None  # left over from a stream


class InstructionMessage(Strict):
    role: Literal["system", "developer"]
    content: str | Items[TextPart]
    name: str | None = None


class ChatUserMessage(Strict):
    role: Literal["user"]
    content: str | Items[UserPart]
    name: str | None = None


class ChatAssistantMessage(Strict):
    # What the official client returns is accepted back as it is; these say nothing to the model.
    harmless: ClassVar[dict[str, str]] = {
        "annotations": "citations of hosted tools",
        "audio": "gpt-oss does not speak",
        "function_call": "the deprecated form of tool_calls, null in every answer",
        "reasoning_details": "the same reasoning in another router's form",
        "provider_specific_fields": "LiteLLM's copy of the fields that it does not know, the reasoning among them",
    }
    role: Literal["assistant"]
    content: str | Items[SpokenPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: Items[ChatToolCall] | None = None
    name: str | None = None


class ToolMessage(Strict):
    role: Literal["tool"]
    content: str | Items[TextPart]
    tool_call_id: str
    name: str | None = None


ChatMessage = Annotated[
    InstructionMessage | ChatUserMessage | ChatAssistantMessage | ToolMessage, Field(discriminator="role")
]


class FunctionDefinition(Strict):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(Strict):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(Strict):
    mode: Literal["auto", "required"]
    tools: Items[NamedTool]


class AllowedToolsChoice(Strict):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


NamedChoice = Annotated[NamedTool | AllowedToolsChoice, Field(discriminator="type")]


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None  # as llama.cpp and others take it


class JsonSchema(Strict):
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class ReasoningOptions(Strict):
    harmless: ClassVar[dict[str, str]] = {"summary": "the reasoning itself is in the answer"}
    effort: EffortName | None = None
    max_tokens: Limit | None = None
    enabled: bool | None = None
    exclude: bool | None = None


class TemplateOptions(Strict):
    """What servers that render a template give to gpt-oss's own, and to templates with a switch for reasoning."""

    reasoning_effort: EffortName | None = None
    enable_thinking: bool | None = None
    thinking: bool | None = None
    thinking_budget: Limit | None = None
    model_identity: Annotated[str, Field(min_length=1, max_length=4096)] | None = None

    @property
    def effort(self) -> EffortName | None:
        return "none" if False in (self.enable_thinking, self.thinking) else self.reasoning_effort


class ChatRequest(SamplingFields, GuidanceFields):
    harmless: ClassVar[dict[str, str]] = CHAT_HARMLESS
    model: str
    messages: Annotated[Messages[ChatMessage], Field(min_length=1)]
    max_completion_tokens: SomeTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[Items[ChatTool], Field(max_length=1024)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: EffortName | None = None
    modalities: Items[Literal["text"]] | None = None
    verbosity: Verbosity | None = None
    # extensions
    reasoning: ReasoningOptions | None = None
    # Other servers' names of reasoning.max_tokens.
    thinking_token_budget: Limit | None = None
    thinking_budget_tokens: Limit | None = None
    thinking_budget: Limit | None = None
    reasoning_budget: Limit | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    options: OllamaOptions | None = None
    continue_final_message: bool | None = None  # vLLM's name: go on with the assistant message that stands last
    add_generation_prompt: bool | None = None  # its opposite, which vLLM's clients send along

    @property
    def effort(self) -> EffortName | None:
        reasoning, template = self.reasoning or ReasoningOptions(), self.chat_template_kwargs or TemplateOptions()
        off: EffortName | None = "none" if reasoning.enabled is False else None
        return self.reasoning_effort or reasoning.effort or off or template.effort

    @property
    def reasoning_limits(self) -> tuple[int | None, ...]:
        """Each field that may hold the limit, in order of precedence."""
        return (
            None if self.reasoning is None else self.reasoning.max_tokens,
            self.thinking_token_budget,
            self.thinking_budget_tokens,
            self.thinking_budget,
            self.reasoning_budget,
            None if self.chat_template_kwargs is None else self.chat_template_kwargs.thinking_budget,
        )

    @property
    def left_out(self) -> list[str]:
        return super().left_out + (["verbosity"] if self.verbosity in ("low", "high") else [])


def to_harmony(messages: list[Any], memory: OwnCalls) -> tuple[str | None, list[Message]]:
    """(instructions, messages): the instructions that open the conversation, and everything after them."""
    opening: list[str] = []
    out: list[Message] = []
    call_names: dict[str, str] = {}
    for position, m in enumerate(messages):
        where = f"messages.{position}"
        if isinstance(m, InstructionMessage):
            text = text_of(m.content)
            if out:
                out.append(Message.developer(text))
            else:
                opening.append(text)
        elif isinstance(m, ChatUserMessage):
            out.append(Message.user(text_of(m.content)))
        elif isinstance(m, ChatAssistantMessage):
            out += _assistant(m, call_names, memory)
        else:
            name = call_names.get(m.tool_call_id)
            if name is None:
                raise bad_request(
                    f"'{where}.tool_call_id' is {m.tool_call_id!r}, but no earlier assistant message made that call.",
                    f"{where}.tool_call_id",
                )
            out.append(Message.result(name, text_of(m.content)))
    return "\n\n".join(opening) or None, out


class Opening(NamedTuple):
    """An unfinished answer that the model continues."""

    messages: list[Message]  # what stands between the conversation and the text
    text: str
    is_reasoning: bool


def read_opening(body: ChatRequest) -> Opening | None:
    """The last message, where the request asks to continue it."""
    if not body.continue_final_message:
        if body.add_generation_prompt is False:
            text = "'add_generation_prompt' may be false only where 'continue_final_message' is true."
            raise bad_request(text, "add_generation_prompt")
        return None
    if body.add_generation_prompt:
        text = "'add_generation_prompt' and 'continue_final_message' exclude each other; send one of them."
        raise bad_request(text, "add_generation_prompt")
    last = body.messages[-1]
    if not isinstance(last, ChatAssistantMessage) or last.tool_calls:
        text = "'continue_final_message' needs an assistant message without tool calls at the end of 'messages'."
        raise bad_request(text, "messages")
    reasoning, content = last.reasoning_content or last.reasoning, text_of(last.content)
    if not content and not reasoning:
        raise bad_request("'continue_final_message' needs text or reasoning to continue.", "messages")
    if content:
        return Opening(assistant_turn("", reasoning), content, is_reasoning=False)
    return Opening([], reasoning or "", is_reasoning=True)


def _assistant(m: ChatAssistantMessage, call_names: dict[str, str], memory: OwnCalls) -> list[Message]:
    reasoning = m.reasoning_content or m.reasoning
    text = text_of(m.content) or (m.refusal or "")
    calls = m.tool_calls or []
    if not reasoning and calls:
        reasoning = memory.recall(calls[0].id)
    call_names |= {call.id: call.function.name for call in calls}
    return assistant_turn(text, reasoning, [(call.function.name, call.function.arguments) for call in calls])
