"""What the endpoints answer, as /openapi.json publishes it.

Answers are written by hand, not from these classes: they describe, and a test holds real answers against them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from halfbyte.server.http.openapi import Described

# ---- chat completions, completions ----------------------------------------------------------------------------------

Finish = Literal["stop", "length", "tool_calls"]


class CachedTokensByTier(Described):
    pages: int
    memory: int
    disk: int


class CachedTokens(Described):
    cached_tokens: int


class ReasoningTokens(Described):
    reasoning_tokens: int


class UsageExtensions(Described):
    """What OpenAI's usage has no field for. Its details hold numbers alone: clients refuse anything else in them."""

    cached_tokens_by_tier: CachedTokensByTier
    reasoning_cut: Literal[True] | None = None  # there only where the request's limit has ended the reasoning


class CompletionUsage(UsageExtensions):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class CalledFunction(Described):
    name: str
    arguments: str


class AnswerToolCall(Described):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatAnswer(Described):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[AnswerToolCall] = []
    reasoning_content: str = ""
    reasoning: str = ""


class LogprobEntry(Described):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(LogprobEntry):
    top_logprobs: list[LogprobEntry]


class ChatLogprobs(Described):
    content: list[ContentLogprob]
    refusal: None


class ChatChoice(Described):
    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    token_ids: list[int] = []


class ChatCompletion(Described):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: CompletionUsage


class TextLogprobs(Described):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Described):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] = []


class TextCompletion(Described):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: CompletionUsage


# ---- responses ------------------------------------------------------------------------------------------------------


class OutputItem(BaseModel):
    """message, reasoning, function_call, custom_tool_call, tool_search_call or local_shell_call."""

    model_config = ConfigDict(extra="allow")
    type: Literal["message", "reasoning", "function_call", "custom_tool_call", "tool_search_call", "local_shell_call"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]


class InputDetails(Described):
    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(UsageExtensions):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseError(Described):
    code: str
    message: str


class ResponseObject(Described):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseError | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, str | None]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    max_tool_calls: None
    service_tier: str
    safety_identifier: None
    prompt_cache_key: None
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    metadata: dict[str, str]


class InputTokens(Described):
    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(Described):
    id: str
    object: Literal["response.deleted"]
    deleted: Literal[True]


class InputItems(Described):
    object: Literal["list"]
    data: list[dict[str, Any]]
    has_more: Literal[False]
    first_id: str
    last_id: str


# ---- messages -------------------------------------------------------------------------------------------------------


class TextBlock(Described):
    type: Literal["text"]
    text: str
    citations: None


class ThinkingBlock(Described):
    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(Described):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, str]


class ThinkingTokens(Described):
    thinking_tokens: int


class MessageUsage(Described):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_creation: None
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens
    server_tool_use: None
    service_tier: str
    inference_geo: None
    thinking_cut: Literal[True] | None = None  # there only where the request's limit has ended the thinking


class AnthropicMessage(Described):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    stop_details: None
    container: None
    usage: MessageUsage


class TokenCount(Described):
    input_tokens: int


# ---- tokens ---------------------------------------------------------------------------------------------------------


class Tokens(Described):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] = []


class Detokenized(Described):
    prompt: str
    content: str


# ---- Ollama ---------------------------------------------------------------------------------------------------------


class OllamaFunction(Described):
    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(Described):
    id: str
    function: OllamaFunction


class OllamaAnswer(Described):
    role: Literal["assistant"]
    content: str
    thinking: str = ""
    tool_calls: list[OllamaCall] = []


class OllamaEnd(Described):
    model: str
    created_at: str
    done: Literal[True]
    done_reason: Literal["stop", "length", "load"]
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0
    prompt_eval_duration: int = 0
    eval_count: int = 0
    eval_duration: int = 0


class OllamaChat(OllamaEnd):
    message: OllamaAnswer


class OllamaGenerated(OllamaEnd):
    response: str
    thinking: str = ""


class OllamaDetails(Described):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(Described):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str = ""
    size_vram: int = 0
    context_length: int = 0


class OllamaModels(Described):
    models: list[OllamaModel]


class OllamaShow(Described):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(Described):
    version: str
    halfbyte: str
