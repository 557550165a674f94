"""/v1/messages and token counting, as Anthropic's clients read them.

Thinking is shown to clients that ask for it. One that does not mention `thinking` gets the model's best answer, made
with reasoning, but no block it did not ask for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from halfbyte.engine.request import SamplingParams
from halfbyte.server.answer.answer import AnswerItem, AnswerPiece, ChoiceAnswer
from halfbyte.server.answer.conversation import (
    EFFORTS,
    Conversation,
    check_stop_strings,
    json_answer,
    reasoning_limit,
)
from halfbyte.server.answer.generate import Generation, Totals, generate
from halfbyte.server.answer.prompt import Prompt, make_prompt
from halfbyte.server.answer.service import Service
from halfbyte.server.answer.tools import arguments_object
from halfbyte.server.api.answer_schemas import AnthropicMessage, TokenCount
from halfbyte.server.api.anthropic_messages_schema import (
    CountRequest,
    MessageHistory,
    MessagesRequest,
    tool_choice_of,
    toolbox,
)
from halfbyte.server.api.carried_reasoning import encode_reasoning
from halfbyte.server.http import sse
from halfbyte.server.http.admission import RequestSlot
from halfbyte.server.http.errors import ApiError
from halfbyte.server.http.json_body import Route
from halfbyte.server.http.middleware import owner_of
from halfbyte.server.http.openapi import EVENTS, answers
from halfbyte.server.http.respond import EventWriter, compute, respond
from halfbyte.server.settings import Effort

API = "messages"  # in metrics

# A thinking budget as the effort that usually stays within it.
BUDGETS: tuple[tuple[int, Effort], ...] = ((4096, "low"), (16384, "medium"))


def router(service: Service) -> APIRouter:
    api = APIRouter(route_class=Route, tags=["Anthropic"])

    @api.post("/v1/messages", summary="Message", responses=answers(AnthropicMessage, "The message.", EVENTS))
    async def messages(body: MessagesRequest, http: Request) -> Response:
        name = service.names.check(body.model)
        streaming = bool(body.stream)

        def writer(slot: RequestSlot) -> MessageWriter:
            generation = generate(service, _prompt(service, body, owner_of(http)), slot, streaming=streaming)
            return MessageWriter(generation, name, show_thinking=_shows_thinking(body))

        return await respond(http, service.admission, service.settings, writer, streaming=streaming)

    @api.post(
        "/v1/messages/count_tokens",
        summary="How many tokens a message would send to the model",
        responses=answers(TokenCount, "The count."),
    )
    async def count_tokens(body: CountRequest, http: Request) -> Response:
        service.names.check(body.model)
        owner = owner_of(http)
        return await compute(http, service.admission, lambda: {"input_tokens": _prompt(service, body, owner).length})

    return api


def _shows_thinking(body: MessagesRequest) -> bool:
    thinking = body.thinking
    return thinking is not None and thinking.type != "disabled" and thinking.display != "omitted"


def _effort(service: Service, body: CountRequest) -> Effort:
    thinking = body.thinking
    if thinking is not None and thinking.type == "disabled":
        return "none"
    if body.output_config is not None and body.output_config.effort is not None:
        return EFFORTS[body.output_config.effort]
    if thinking is not None and thinking.budget_tokens is not None:
        budget = thinking.budget_tokens
        return next((effort for most, effort in BUDGETS if budget <= most), "high")
    return service.settings.default_effort


def _prompt(service: Service, body: CountRequest, owner: str) -> Prompt:
    settings = service.settings
    history = MessageHistory.read(body, service.calls.of(owner))
    tools = toolbox(body)
    sampling = SamplingParams()
    stop: tuple[str, ...] = ()
    if isinstance(body, MessagesRequest):
        top_p = settings.top_p if body.top_p is None else body.top_p
        sampling = SamplingParams(
            temperature=settings.temperature if body.temperature is None else body.temperature,
            top_k=1 if top_p == 0 else body.top_k or 0,
            top_p=top_p or 1.0,
            max_tokens=body.max_tokens,
        )
        stop = check_stop_strings(body.stop_sequences, "stop_sequences")
    format = body.output_config.format if body.output_config else None
    conversation = Conversation(
        api=API,
        owner=owner,
        messages=history.messages,
        instructions=history.instructions,
        tools=tools,
        tool_choice=tool_choice_of(body, tools),
        parallel_calls=not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        effort=_effort(service, body),
        max_reasoning_tokens=reasoning_limit(settings, None if body.thinking is None else body.thinking.budget_tokens),
        format=json_answer(sse.compact(format.schema_), "answer", field="output_config.format") if format else None,
        sampling=sampling,
        stop_strings=stop,
        opening=history.opening,
    )
    return make_prompt(service, conversation)


class MessageWriter(EventWriter):
    """The answer as content blocks, in either form."""

    def __init__(self, generation: Generation[ChoiceAnswer], model: str, *, show_thinking: bool) -> None:
        self.generation = generation
        self.answer = generation.answers[0]
        self.id = sse.new_id("msg_")
        self.model = model
        self.show_thinking = show_thinking
        self._current = -1  # the answer's item that is open
        self._index = -1  # the block's number

    def failure(self, error: ApiError) -> bytes:
        return sse.event("error", error.anthropic())

    # ---- one object ---------------------------------------------------------------------------

    def _message(self, content: list[dict[str, Any]], used: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "container": None,
            "usage": used,
        }

    async def body(self) -> dict[str, Any]:
        await self.generation.finish_all()
        content = [_block(item) for item in self.answer.items if self._is_visible(item)]
        return {**self._message(content, usage(self.generation.totals)), **self._stop()}

    def _is_visible(self, item: AnswerItem) -> bool:
        return item.kind != "reasoning" or self.show_thinking

    def _stop(self) -> dict[str, Any]:
        matched = self.answer.stop_match
        if matched is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": matched}
        reasons = {"tool_calls": "tool_use", "length": "max_tokens"}
        return {"stop_reason": reasons.get(self.answer.finish or "", "end_turn"), "stop_sequence": None}

    # ---- a stream -----------------------------------------------------------------------------

    async def stream(self) -> AsyncIterator[bytes]:
        opened = False
        async for updates in self.generation.batches():
            out = []
            if not opened:
                opened = True
                first = Totals(prompt=self.generation.totals.prompt)
                out.append(_event("message_start", message=self._message([], usage(first))))
                out.append(_event("ping"))
            for update in updates:
                for piece in update.pieces:
                    if self._is_visible(self.answer.items[piece.item]):
                        out.append(self._piece(piece))
            if out:
                yield b"".join(out)
        end = self._close()
        end += _event("message_delta", delta=self._stop(), usage=usage(self.generation.totals))
        yield end + _event("message_stop")

    def _piece(self, piece: AnswerPiece) -> bytes:
        out = b""
        if piece.item != self._current:
            out = self._close()
            self._current = piece.item
            self._index += 1
            block = _block(self.answer.items[piece.item], empty=True)
            out += _event("content_block_start", index=self._index, content_block=block)
        if not piece.text:
            return out
        kind, field = _DELTAS[piece.kind]
        text = sse.quote(piece.text)
        head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":' % self._index
        return out + head + b'{"type":"%b","%b":%b}}\n\n' % (kind, field, text)

    def _close(self) -> bytes:
        if self._current < 0:
            return b""
        item = self.answer.items[self._current]
        self._current = -1
        out = b""
        if item.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": encode_reasoning(item.text)}
            out = _event("content_block_delta", index=self._index, delta=delta)
        return out + _event("content_block_stop", index=self._index)


_DELTAS = {
    "reasoning": (b"thinking_delta", b"thinking"),
    "content": (b"text_delta", b"text"),
    "arguments": (b"input_json_delta", b"partial_json"),
}


def _event(type: str, **fields: Any) -> bytes:
    return sse.event(type, {"type": type, **fields})


def _block(item: AnswerItem, *, empty: bool = False) -> dict[str, Any]:
    text = "" if empty else item.text
    if item.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": "" if empty else encode_reasoning(text)}
    if item.kind == "content":
        return {"type": "text", "text": text, "citations": None}
    assert item.call is not None
    arguments = {} if empty else arguments_object(item.call.arguments)
    name, caller = item.call.function.name, {"type": "direct"}
    return {"type": "tool_use", "id": item.call.id, "name": name, "input": arguments, "caller": caller}


def usage(t: Totals) -> dict[str, Any]:
    cut = {"thinking_cut": True} if t.reasoning_cut else {}
    return {
        "input_tokens": t.prompt - t.cached,
        "cache_creation_input_tokens": 0,
        "cache_creation": None,
        "cache_read_input_tokens": t.cached,
        "output_tokens": t.completion,
        "output_tokens_details": {"thinking_tokens": t.reasoning},
        "server_tool_use": None,
        "service_tier": "standard",
        "inference_geo": None,
        **cut,
    }
