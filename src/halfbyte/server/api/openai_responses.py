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

from halfbyte.engine.request import SamplingParams
from halfbyte.harmony.messages import Message
from halfbyte.server.answer.answer import ChoiceState
from halfbyte.server.answer.conversation import EFFORTS, Format, Prepared, Turn, check_logit_bias, prepare, stops
from halfbyte.server.answer.generate import Run, Totals, chat_run
from halfbyte.server.answer.respond import deliver
from halfbyte.server.api.openai_chat_schema import JsonObjectFormat
from halfbyte.server.api.openai_responses_events import ItemWriter
from halfbyte.server.api.openai_responses_schema import (
    History,
    ResponsesRequest,
    SchemaFormat,
    choice_of,
    toolbox,
)
from halfbyte.server.api.response_store import Stored
from halfbyte.server.api.schema import LEFT_OUT_HEADER
from halfbyte.server.http import sse
from halfbyte.server.http.errors import ApiError, bad, from_error
from halfbyte.server.http.json_body import Route
from halfbyte.server.service import Service


def router(service: Service) -> APIRouter:
    api = APIRouter(route_class=Route, tags=["OpenAI"])

    @api.post("/v1/responses", summary="Response")
    async def create(body: ResponsesRequest, http: Request) -> Response:
        return await answer(service, body, http)

    @api.post("/v1/responses/input_tokens", summary="How many tokens a request would send to the model")
    async def input_tokens(body: ResponsesRequest) -> dict[str, Any]:
        prepared, _, _ = _prepare(service, body)
        return {"object": "response.input_tokens", "input_tokens": len(prepared.prompt) + len(prepared.prefill)}

    @api.get("/v1/responses/{response_id}", summary="A stored response")
    async def get(response_id: str) -> dict[str, Any]:
        return _stored(service, response_id).body

    @api.delete("/v1/responses/{response_id}", summary="Forget a stored response")
    async def delete(response_id: str) -> dict[str, Any]:
        _stored(service, response_id)
        service.responses.remove(response_id)
        return {"id": response_id, "object": "response.deleted", "deleted": True}

    @api.get("/v1/responses/{response_id}/input_items", summary="What a stored response was asked")
    async def input_items(response_id: str) -> dict[str, Any]:
        items = _stored(service, response_id).input_items
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": "", "last_id": ""}
        return {"object": "list", "data": list(reversed(items)), "has_more": False, **ends}

    return api


def _stored(service: Service, id: str, param: str | None = None) -> Stored:
    found = service.responses.get(id)
    if found is None:
        raise ApiError(
            400 if param else 404,
            f"There is no response {id!r} here: it was not stored, or it has made room for later ones.",
            param=param,
            code="previous_response_not_found" if param else "not_found",
        )
    return found


def _prepare(service: Service, body: ResponsesRequest) -> tuple[Prepared, History, list[str]]:
    settings, info = service.settings, service.source.info
    tools, left_out = toolbox(body.tools or [])
    history = History()
    if body.previous_response_id is not None:
        history = _stored(service, body.previous_response_id, "previous_response_id").history.copy()
    history.add(body.input, tools)
    if not history.messages and not history.opening:
        raise bad("'input' is empty; give a text or a list of items.", "input", "missing_required_parameter")
    opening = [*([body.instructions] if body.instructions else []), *history.opening]
    include = body.include or []
    logprobs = body.top_logprobs
    if logprobs is None and "message.output_text.logprobs" in include:
        logprobs = 0
    effort = (body.reasoning and body.reasoning.effort) or settings.default_effort
    top_p = settings.top_p if body.top_p is None else body.top_p
    turn = Turn(
        api="responses",
        messages=history.messages,
        instructions="\n\n".join(opening) or None,
        tools=tools,
        choice=choice_of(body, tools, left_out),
        parallel=body.parallel_tool_calls is not False,
        effort=EFFORTS[effort],
        format=_format(body),
        sampling=SamplingParams(
            temperature=settings.temperature if body.temperature is None else body.temperature,
            top_k=1 if top_p == 0 else max(0, body.top_k or 0),
            top_p=top_p or 1.0,
            min_p=body.min_p or 0.0,
            repetition_penalty=body.repetition_penalty or 1.0,
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=check_logit_bias(body.logit_bias, info),
            logprobs=logprobs,
            seed=body.seed,
            max_tokens=body.max_output_tokens or settings.default_max_tokens,
        ),
        stop=stops(body.stop),
    )
    return prepare(turn, service.dialect, info, settings), history, left_out


def _format(body: ResponsesRequest) -> Format | None:
    wanted = body.text.format if body.text else None
    if isinstance(wanted, JsonObjectFormat):
        return Format()
    if isinstance(wanted, SchemaFormat):
        return Format(wanted.name, sse.compact(wanted.schema_), wanted.description)
    return None


async def answer(service: Service, body: ResponsesRequest, http: Request) -> Response:
    name = service.check_model(body.model)
    prepared, history, left_out = _prepare(service, body)
    run = chat_run(service, prepared, streaming=bool(body.stream))
    shape = ResponseShape(service, run, name, body, history)
    headers = {LEFT_OUT_HEADER: ",".join(f"tools.{t}" for t in left_out)} if left_out else None
    return await deliver(
        service, http, stream=shape.stream() if body.stream else None, whole=shape.whole, headers=headers
    )


class ResponseShape:
    def __init__(
        self, service: Service, run: Run[ChoiceState], model: str, body: ResponsesRequest, history: History
    ) -> None:
        self.service = service
        self.run = run
        self.request = body
        self.history = history
        self.choice = run.choices[0]
        include = body.include or []
        logprobs = body.top_logprobs is not None or "message.output_text.logprobs" in include
        self.writer = ItemWriter(self.choice, sealed="reasoning.encrypted_content" in include, logprobs=logprobs)
        self.id = sse.new_id("resp_")
        self.created = int(time.time())
        self.model = model

    def body(self, status: str, error: dict[str, Any] | None = None) -> dict[str, Any]:
        b, settings = self.request, self.service.settings
        dump: dict[str, Any] = b.model_dump(include={"tools", "text", "tool_choice"}, by_alias=True, exclude_none=True)
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
            "truncation": "disabled",
            "usage": usage(self.run.totals) if status in ("completed", "incomplete") else None,
            "metadata": b.metadata or {},
        }

    async def stream(self) -> AsyncIterator[bytes]:
        writer = self.writer
        opened = False
        try:
            async for updates in self.run.batches():
                out = []
                if not opened:
                    opened = True
                    body = self.body("in_progress")
                    out.append(writer.event("response.created", response=body))
                    out.append(writer.event("response.in_progress", response=body))
                out += [writer.add(piece) for update in updates for piece in update.pieces]
                if out:
                    yield b"".join(out)
        except Exception as e:
            if not opened:
                raise  # it can still be a status code
            error = from_error(e)
            code = "rate_limit_exceeded" if error.status == 429 else "server_error"
            tail = writer.close(failed=True)
            failed = self.body("failed", {"code": code, "message": error.message})
            yield tail + writer.event("response.failed", response=failed)
            return
        tail = writer.close()
        status = self._finish()
        yield tail + writer.event(f"response.{status}", response=self.body(status))

    async def whole(self) -> dict[str, Any]:
        async for updates in self.run.batches():
            for update in updates:
                for piece in update.pieces:
                    self.writer.add(piece)
        self.writer.close()
        return self.body(self._finish())

    def _finish(self) -> str:
        status = "incomplete" if self.choice.finish == "length" else "completed"
        if self.request.store is not False:
            self._keep(status)
        return status

    def _keep(self, status: str) -> None:
        history = self.history
        for item in self.choice.items:
            if item.call is not None:
                history.call(item.call.function.recipient, item.call.id, item.call.arguments)
            elif item.text:
                write = Message.analysis if item.kind == "reasoning" else Message.final
                history.messages.append(Message.preamble(item.text) if item.preamble else write(item.text))
        body = self.body(status)
        given = self.request.input
        items: list[dict[str, Any]] = []
        if isinstance(given, str):
            part = {"type": "input_text", "text": given}
            items = [{"type": "message", "role": "user", "content": [part], "status": "completed"}]
        elif given:
            items = [item.model_dump(exclude_none=True) for item in given]
        for item_body in items:
            item_body.setdefault("id", sse.new_id("msg_"))
        size = len(sse.dumps(body)) + len(sse.dumps(items))
        self.service.responses.put(self.id, Stored(body, history, items, size))


def usage(t: Totals) -> dict[str, Any]:
    return {
        "input_tokens": t.prompt,
        "input_tokens_details": {"cached_tokens": t.cached, "cache_write_tokens": 0},
        "output_tokens": t.completion,
        "output_tokens_details": {"reasoning_tokens": t.reasoning},
        "total_tokens": t.prompt + t.completion,
    }
