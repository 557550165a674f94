"""/v1/chat/completions: one JSON object, or chunks as OpenAI's clients read them.

Reasoning travels in fields of its own, under both names in use (`reasoning_content` and `reasoning`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from halfbyte.server.answer.answer import SEPARATOR, AnswerPiece, ChoiceAnswer, TokenLogprob, Update
from halfbyte.server.answer.conversation import (
    EFFORTS,
    AnswerFormat,
    Conversation,
    check_stop_strings,
    json_answer,
    reasoning_limit,
)
from halfbyte.server.answer.generate import Generation, generate
from halfbyte.server.answer.prompt import make_prompt
from halfbyte.server.answer.service import Service
from halfbyte.server.answer.tools import Function, Toolbox, ToolChoice, check_choice, check_name
from halfbyte.server.api.answer_schemas import ChatCompletion
from halfbyte.server.api.guidance import guided_format
from halfbyte.server.api.openai_chat_schema import (
    AllowedToolsChoice,
    ChatRequest,
    ChatTool,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedTool,
    read_opening,
    to_harmony,
)
from halfbyte.server.api.openai_chunks import ChunkFrame, error_chunk, finish_json, finite
from halfbyte.server.api.openai_sampling import completion_sampling
from halfbyte.server.http import sse
from halfbyte.server.http.admission import RequestSlot
from halfbyte.server.http.connection import auto_close
from halfbyte.server.http.errors import ApiError, bad_request
from halfbyte.server.http.json_body import Route
from halfbyte.server.http.middleware import owner_of
from halfbyte.server.http.openapi import EVENTS, answers
from halfbyte.server.http.respond import EventWriter, respond

API = "chat"  # in metrics


def router(service: Service) -> APIRouter:
    api = APIRouter(route_class=Route, tags=["OpenAI"])

    @api.post(
        "/v1/chat/completions", summary="Chat completion", responses=answers(ChatCompletion, "The answer.", EVENTS)
    )
    async def chat_completions(body: ChatRequest, http: Request) -> Response:
        name = service.names.check(body.model)
        streaming = bool(body.stream)

        def writer(slot: RequestSlot) -> ChatWriter:
            prompt = make_prompt(service, to_conversation(service, body, owner_of(http)))
            return ChatWriter(generate(service, prompt, slot, streaming=streaming), name, body)

        return await respond(http, service.admission, service.settings, writer, streaming=streaming)

    return api


# ---- request ------------------------------------------------------------------------------------------------------


def to_conversation(service: Service, body: ChatRequest, owner: str) -> Conversation:
    opening = read_opening(body)
    instructions, messages = to_harmony(body.messages[:-1] if opening else body.messages, service.calls.of(owner))
    format = guided_format(body, _format(body))
    if opening and format:
        raise bad_request(f"'continue_final_message' cannot be combined with '{format.field}'.", format.field)
    tools = to_toolbox(body.tools or [])
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
    if body.options is not None:
        body = body.options.as_defaults(body)
    return Conversation(
        api=API,
        messages=messages + opening.messages if opening else messages,
        instructions=instructions,
        tools=tools,
        tool_choice=_tool_choice(body, tools),
        parallel_calls=body.parallel_tool_calls is not False,
        effort=EFFORTS[body.effort or service.settings.default_effort],
        max_reasoning_tokens=reasoning_limit(service.settings, *body.reasoning_limits),
        format=format,
        sampling=completion_sampling(
            service,
            body,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            max_tokens=body.max_completion_tokens or body.max_tokens,
        ),
        stop_strings=check_stop_strings(body.stop),
        opening=opening.text if opening else None,
        opens_with_reasoning=bool(opening and opening.is_reasoning),
        identity=None if body.chat_template_kwargs is None else body.chat_template_kwargs.model_identity,
        owner=owner,
    )


def to_toolbox(tools: list[ChatTool]) -> Toolbox:
    return Toolbox(
        Function(
            check_name(t.function.name, "tools"),
            description=t.function.description or "",
            parameters=t.function.parameters,
            strict=bool(t.function.strict),
        )
        for t in tools
    )


def _tool_choice(body: ChatRequest, tools: Toolbox) -> ToolChoice:
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return check_choice(ToolChoice(choice or "auto"), tools)
    if isinstance(choice, NamedTool):
        return ToolChoice("required", (_recipient(tools, choice),))
    assert isinstance(choice, AllowedToolsChoice)
    allowed = tuple(_recipient(tools, tool) for tool in choice.allowed_tools.tools)
    return check_choice(ToolChoice(choice.allowed_tools.mode, allowed), tools)


def _recipient(tools: Toolbox, tool: NamedTool) -> str:
    return tools.require(tool.function.name, "tool_choice").recipient


def _format(body: ChatRequest) -> AnswerFormat | None:
    format = body.response_format
    if isinstance(format, JsonObjectFormat):
        return json_answer(None if format.schema_ is None else sse.compact(format.schema_))
    if isinstance(format, JsonSchemaFormat):
        schema = format.json_schema
        return json_answer(
            None if schema.schema_ is None else sse.compact(schema.schema_), schema.name, schema.description
        )
    return None


# ---- answer -------------------------------------------------------------------------------------------------------


class ChatWriter(EventWriter):
    """The answer to one request, in either form."""

    def __init__(self, generation: Generation[ChoiceAnswer], model: str, body: ChatRequest) -> None:
        self.generation = generation
        self.frame = ChunkFrame(
            "chatcmpl-", "chat.completion", "chat.completion.chunk", model, body, generation.service.source.info
        )
        self.headers = self.frame.headers
        self.logprobs = bool(body.logprobs)
        hide = body.include_reasoning is False or bool(body.reasoning and body.reasoning.exclude)
        self.show_reasoning = not hide
        # Token ids that no chunk has carried yet; None if they were not asked for.
        self._ids: list[list[int]] | None = [[] for _ in generation.answers] if body.return_token_ids else None
        self._last: dict[tuple[int, str], int] = {}  # the message each choice's text last came from

    def failure(self, error: ApiError) -> bytes:
        return error_chunk(error)

    def _chunk(self, index: int, delta: bytes, finish: str | None = None, logprobs: bytes = b"null") -> bytes:
        fields = (index, delta, logprobs, finish_json(finish))
        choice = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b' % fields
        if self._ids is not None:
            choice += b',"token_ids":' + sse.dumps(self._ids[index])
            self._ids[index] = []
        return self.frame.chunk(choice + b"}", self.generation.totals)

    async def stream(self) -> AsyncIterator[bytes]:
        opened: set[int] = set()
        async for updates in self.generation.batches():
            out = []
            for update in updates:
                if update.index not in opened:
                    opened.add(update.index)
                    out.append(self._chunk(update.index, b'{"role":"assistant","content":""}'))
                self._keep_ids(update)
                out += self._pieces(update)
                if update.finish:
                    out.append(self._chunk(update.index, b"{}", update.finish))
            if out:
                yield b"".join(out)
        yield self.frame.end(self.generation.totals)

    def _keep_ids(self, update: Update) -> None:
        if self._ids is not None:
            self._ids[update.index] += update.tokens

    def _pieces(self, update: Update) -> list[bytes]:
        out = []
        for piece in update.pieces:
            logprobs = b"null"
            if self.logprobs and piece.logprobs:
                logprobs = sse.dumps({"content": [_entry(lp) for lp in piece.logprobs], "refusal": None})
            if piece.kind == "reasoning" and not self.show_reasoning:
                continue
            if piece.kind in ("reasoning", "content"):
                last = self._last.get((update.index, piece.kind))
                if last != piece.item:
                    self._last[update.index, piece.kind] = piece.item
                    if last is not None:
                        piece.text = SEPARATOR + piece.text
            out.append(self._chunk(update.index, _delta(piece), None, logprobs))
        return out

    async def body(self) -> dict[str, Any]:
        async with auto_close(self.generation.batches()) as batches:
            async for updates in batches:
                for update in updates:
                    self._keep_ids(update)
        choices = [self._choice(i, answer) for i, answer in enumerate(self.generation.answers)]
        return self.frame.body(choices, self.generation.totals)

    def _choice(self, index: int, answer: ChoiceAnswer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
        if answer.calls:
            message["content"] = answer.content or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.arguments},
                }
                for call in answer.calls
            ]
        if answer.reasoning and self.show_reasoning:
            message["reasoning_content"] = message["reasoning"] = answer.reasoning
        logprobs = None
        if self.logprobs:
            logprobs = {"content": [_entry(lp) for lp in answer.content_logprobs], "refusal": None}
        out = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": answer.finish}
        return out if self._ids is None else {**out, "token_ids": self._ids[index]}


def _delta(piece: AnswerPiece) -> bytes:
    text = sse.quote(piece.text)
    if piece.kind == "content":
        return b'{"content":' + text + b"}"
    if piece.kind == "reasoning":
        return b'{"reasoning_content":' + text + b',"reasoning":' + text + b"}"
    assert piece.call is not None
    if piece.kind == "call":
        return b'{"tool_calls":[{"index":%d,"id":%b,"type":"function","function":{"name":%b,"arguments":""}}]}' % (
            piece.call.index,
            sse.quote(piece.call.id),
            sse.quote(piece.call.function.name),
        )
    return b'{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]}' % (piece.call.index, text)


def _entry(lp: TokenLogprob) -> dict[str, Any]:
    return {**_token(lp.data, lp.logprob), "top_logprobs": [_token(text, value) for text, value in lp.top]}


def _token(text: bytes, logprob: float) -> dict[str, Any]:
    return {"token": text.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(text)}
