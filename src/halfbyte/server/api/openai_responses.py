"""/v1/responses: items and events as OpenAI's clients and the Codex CLI read them.

Responses are kept in memory for `previous_response_id`, unless the client says `store: false`. Background runs,
conversations and hosted tools are refused by name.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from halfbyte.harmony.messages import Message
from halfbyte.server.answer.answer import ChoiceAnswer
from halfbyte.server.answer.conversation import (
    EFFORTS,
    AnswerFormat,
    Conversation,
    check_stop_strings,
    json_answer,
    reasoning_limit,
)
from halfbyte.server.answer.generate import Generation, Totals, generate
from halfbyte.server.answer.prompt import Prompt, make_prompt
from halfbyte.server.answer.service import Service
from halfbyte.server.api.answer_schemas import DeletedResponse, InputItems, InputTokens, ResponseObject
from halfbyte.server.api.openai_chat_schema import JsonObjectFormat, TextFormat
from halfbyte.server.api.openai_chunks import error_chunk, usage_extensions
from halfbyte.server.api.openai_responses_events import ItemWriter
from halfbyte.server.api.openai_responses_history import ResponseHistory
from halfbyte.server.api.openai_responses_schema import (
    ResponsesRequest,
    tool_choice_of,
    toolbox,
)
from halfbyte.server.api.openai_sampling import common_sampling
from halfbyte.server.api.response_store import ResponseStore, StoredResponse
from halfbyte.server.api.shared_schema import left_out_header
from halfbyte.server.http import sse
from halfbyte.server.http.admission import RequestSlot
from halfbyte.server.http.errors import ApiError, bad_request, from_error, is_cancellation
from halfbyte.server.http.json_body import Route
from halfbyte.server.http.middleware import owner_of
from halfbyte.server.http.openapi import EVENTS, answers
from halfbyte.server.http.respond import EventWriter, compute, respond
from halfbyte.server.settings import ServerSettings

API = "responses"  # in metrics


def router(service: Service) -> APIRouter:
    api = APIRouter(route_class=Route, tags=["OpenAI"])
    store = ResponseStore(service.settings.stored_responses, service.settings.stored_bytes)

    @api.post("/v1/responses", summary="Response", responses=answers(ResponseObject, "The response.", EVENTS))
    async def create(body: ResponsesRequest, http: Request) -> Response:
        name = service.names.check(body.model)
        streaming = bool(body.stream)
        owner = owner_of(http)
        earlier = _earlier(store, body, owner)

        def writer(slot: RequestSlot) -> ResponseBodyWriter:
            prompt, history, left_out = _prompt(service, earlier, body, owner)
            generation = generate(service, prompt, slot, streaming=streaming)
            return ResponseBodyWriter(service.settings, store, owner, generation, name, body, history, left_out)

        return await respond(
            http, service.admission, service.settings, writer, streaming=streaming, more_bytes=earlier.size
        )

    @api.post(
        "/v1/responses/input_tokens",
        summary="How many tokens a request would send to the model",
        responses=answers(InputTokens, "The count."),
    )
    async def input_tokens(body: ResponsesRequest, http: Request) -> Response:
        owner = owner_of(http)
        earlier = _earlier(store, body, owner)

        def answer() -> dict[str, Any]:
            return {"object": "response.input_tokens", "input_tokens": _prompt(service, earlier, body, owner)[0].length}

        return await compute(http, service.admission, answer, more_bytes=earlier.size)

    @api.get(
        "/v1/responses/{response_id}",
        summary="A stored response",
        responses=answers(ResponseObject, "As it was answered."),
    )
    async def get(response_id: str, http: Request) -> dict[str, Any]:
        return _stored(store, response_id, owner_of(http)).body

    @api.post("/v1/responses/{action}", include_in_schema=False)
    async def unknown(action: str) -> None:
        raise ApiError(404, f"There is nothing at POST /v1/responses/{action}.", code="unknown_url")

    @api.delete(
        "/v1/responses/{response_id}",
        summary="Forget a stored response",
        responses=answers(DeletedResponse, "It is gone."),
    )
    async def delete(response_id: str, http: Request) -> dict[str, Any]:
        _stored(store, response_id, owner_of(http))
        store.remove(response_id)
        return {"id": response_id, "object": "response.deleted", "deleted": True}

    @api.get(
        "/v1/responses/{response_id}/input_items",
        summary="What a stored response was asked",
        responses=answers(InputItems, "The items, the last first."),
    )
    async def input_items(response_id: str, http: Request) -> dict[str, Any]:
        items = _stored(store, response_id, owner_of(http)).input_items
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": "", "last_id": ""}
        return {"object": "list", "data": list(reversed(items)), "has_more": False, **ends}

    return api


def _stored(store: ResponseStore, id: str, owner: str, param: str | None = None) -> StoredResponse:
    response = store.get(id, owner)
    if response is None:
        raise ApiError(
            400 if param else 404,
            f"There is no response {id!r} here: it was not stored, or it has made room for later ones.",
            param=param,
            code="previous_response_not_found" if param else "not_found",
        )
    return response


def _earlier(store: ResponseStore, body: ResponsesRequest, owner: str) -> ResponseHistory:
    """The conversation that a request continues."""
    if body.previous_response_id is None:
        return ResponseHistory()
    return _stored(store, body.previous_response_id, owner, "previous_response_id").history


def _prompt(
    service: Service, earlier: ResponseHistory, body: ResponsesRequest, owner: str
) -> tuple[Prompt, ResponseHistory, list[str]]:
    """The prompt, the conversation it is part of, and the types of the tools that were left out of it."""
    history = earlier.copy()
    history.add_tools(body.input)
    tools, left_out = toolbox(body.tools or [], history.tools)
    history.add(body.input, tools)
    if not history.messages and not history.opening:
        raise bad_request("'input' is empty; give a text or a list of items.", "input", "missing_required_parameter")
    opening = [*([body.instructions] if body.instructions else []), *history.opening]
    include = body.include or []
    logprobs = body.top_logprobs
    if logprobs is None and "message.output_text.logprobs" in include:
        logprobs = 0
    effort = (body.reasoning and body.reasoning.effort) or service.settings.default_effort
    limit = None if body.reasoning is None else body.reasoning.max_tokens
    conversation = Conversation(
        api=API,
        owner=owner,
        messages=history.messages,
        instructions="\n\n".join(opening) or None,
        tools=tools,
        tool_choice=tool_choice_of(body, tools),
        parallel_calls=body.parallel_tool_calls is not False,
        effort=EFFORTS[effort],
        max_reasoning_tokens=reasoning_limit(service.settings, limit),
        format=_format(body),
        sampling=common_sampling(service, body, logprobs=logprobs, max_tokens=body.max_output_tokens),
        stop_strings=check_stop_strings(body.stop),
        input_field="input",
    )
    return make_prompt(service, conversation), history, left_out + body.left_out


def _format(body: ResponsesRequest) -> AnswerFormat | None:
    format = body.text.format if body.text else None
    if isinstance(format, TextFormat) or format is None:
        return None
    if isinstance(format, JsonObjectFormat):
        return json_answer(None if format.schema_ is None else sse.compact(format.schema_), field="text.format")
    return json_answer(sse.compact(format.schema_), format.name, format.description, field="text.format")


class ResponseBodyWriter(EventWriter):
    """The answer to one request, in either form; it is stored when it is complete."""

    def __init__(
        self,
        settings: ServerSettings,
        store: ResponseStore,
        owner: str,
        generation: Generation[ChoiceAnswer],
        model: str,
        body: ResponsesRequest,
        history: ResponseHistory,
        left_out: list[str],
    ) -> None:
        self.settings = settings
        self.store = store
        self.owner = owner
        self.generation = generation
        self.request = body
        self.history = history
        self.headers = left_out_header(left_out)
        self.answer = generation.answers[0]
        include = body.include or []
        logprobs = body.top_logprobs is not None or "message.output_text.logprobs" in include
        self.writer = ItemWriter(
            self.answer, carry_reasoning="reasoning.encrypted_content" in include, logprobs=logprobs
        )
        self.id = sse.new_id("resp_")
        self.created = int(time.time())
        self.model = model

    def failure(self, error: ApiError) -> bytes:
        return error_chunk(error)

    def response(self, status: str, error: dict[str, Any] | None = None) -> dict[str, Any]:
        b, settings = self.request, self.settings
        dump: dict[str, Any] = b.model_dump(include={"tools", "text", "tool_choice"}, by_alias=True, exclude_none=True)
        for tool in dump.get("tools", ()):
            if tool["type"] == "function":  # all of its fields are always there
                tool |= {k: tool.get(k) for k in ("description", "parameters")} | {"strict": bool(tool.get("strict"))}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": b.instructions,
            "max_output_tokens": b.max_output_tokens,
            "model": self.model,
            "output": self.writer.output,
            "parallel_tool_calls": b.parallel_tool_calls is not False,
            "previous_response_id": b.previous_response_id,
            "reasoning": {"effort": (b.reasoning and b.reasoning.effort) or settings.default_effort, "summary": None},
            "store": b.store is not False,
            "temperature": settings.temperature if b.temperature is None else b.temperature,
            "text": dump.get("text") or {"format": {"type": "text"}},
            "tool_choice": dump.get("tool_choice", "auto"),
            "tools": dump.get("tools", []),
            "top_logprobs": b.top_logprobs or 0,
            "top_p": settings.top_p if b.top_p is None else b.top_p,
            "presence_penalty": b.presence_penalty or 0.0,
            "frequency_penalty": b.frequency_penalty or 0.0,
            "max_tool_calls": None,
            "service_tier": "default",
            "safety_identifier": None,
            "prompt_cache_key": None,
            "truncation": "disabled",
            "usage": usage(self.generation.totals) if status in ("completed", "incomplete") else None,
            "metadata": b.metadata or {},
        }

    async def stream(self) -> AsyncIterator[bytes]:
        writer = self.writer
        opened = False
        try:
            async for updates in self.generation.batches():
                out = []
                if not opened:
                    opened = True
                    body = self.response("in_progress")
                    out.append(writer.event("response.created", response=body))
                    out.append(writer.event("response.in_progress", response=body))
                out += [writer.add(piece) for update in updates for piece in update.pieces]
                if out:
                    yield b"".join(out)
        except BaseException as e:
            if is_cancellation(e) or not opened:
                raise  # it can still be a status code
            error = from_error(e)
            code = "rate_limit_exceeded" if error.status == 429 else "server_error"
            tail = writer.close(failed=True)
            failed = self.response("failed", {"code": code, "message": error.message})
            yield tail + writer.event("response.failed", response=failed)
            return
        tail = writer.close()
        status = self._finish()
        yield tail + writer.event(f"response.{status}", response=self.response(status))

    async def body(self) -> dict[str, Any]:
        async for updates in self.generation.batches():
            for update in updates:
                for piece in update.pieces:
                    self.writer.add(piece)
        self.writer.close()
        return self.response(self._finish())

    def _finish(self) -> str:
        status = "incomplete" if self.answer.finish == "length" else "completed"
        if self.request.store is not False:
            self._keep(status)
        return status

    def _keep(self, status: str) -> None:
        history = self.history
        for item in self.answer.items:
            if item.call is not None:
                history.call(item.call.function.recipient, item.call.id, item.call.arguments)
            elif item.text:
                write = Message.analysis if item.kind == "reasoning" else Message.final
                history.messages.append(Message.preamble(item.text) if item.preamble else write(item.text))
        body = self.response(status)
        input = self.request.input
        items: list[dict[str, Any]] = []
        if isinstance(input, str):
            part = {"type": "input_text", "text": input}
            items = [{"type": "message", "role": "user", "content": [part], "status": "completed"}]
        elif input:
            items = [item.model_dump(exclude_none=True) for item in input]
        for item_body in items:
            item_body.setdefault("id", sse.new_id("msg_"))
        size = len(sse.dumps(body)) + len(sse.dumps(items))
        self.store.put(self.id, StoredResponse(body, history, items, size, self.owner))


def usage(t: Totals) -> dict[str, Any]:
    return {
        "input_tokens": t.prompt,
        "input_tokens_details": {"cached_tokens": t.cached, "cache_write_tokens": 0},
        "output_tokens": t.completion,
        "output_tokens_details": {"reasoning_tokens": t.reasoning},
        "total_tokens": t.prompt + t.completion,
        **usage_extensions(t),
    }
