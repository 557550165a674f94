"""/v1/chat/completions: one JSON object, or chunks as OpenAI's clients read them.

Reasoning travels in fields of its own, under both names in use (`reasoning_content` and `reasoning`). Chunks are
written by hand: a stream encodes its text and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from halfbyte.engine.request import SamplingParams
from halfbyte.server.answer.answer import SEPARATOR, ChoiceState, Piece, TokenLogprob
from halfbyte.server.answer.conversation import EFFORTS, Format, Turn, check_logit_bias, prepare, stops
from halfbyte.server.answer.generate import Run, Totals, Update, chat_run
from halfbyte.server.answer.respond import deliver
from halfbyte.server.answer.stream import closing
from halfbyte.server.answer.tools import Choice, Function, Toolbox, check_choice, check_name
from halfbyte.server.api.openai_chat_schema import (
    AllowedToolsChoice,
    ChatRequest,
    ChatTool,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedTool,
    to_harmony,
)
from halfbyte.server.api.schema import SamplingFields
from halfbyte.server.http import sse
from halfbyte.server.http.errors import bad
from halfbyte.server.http.json_body import Route
from halfbyte.server.service import Service

FINGERPRINT = "halfbyte"


def router(service: Service) -> APIRouter:
    api = APIRouter(route_class=Route, tags=["OpenAI"])

    @api.post("/v1/chat/completions", summary="Chat completion")
    async def chat_completions(body: ChatRequest, http: Request) -> Response:
        return await answer(service, body, http)

    return api


async def answer(service: Service, body: ChatRequest, http: Request) -> Response:
    name = service.check_model(body.model)
    turn = to_turn(service, body)
    prepared = prepare(turn, service.dialect, service.source.info, service.settings)
    run = chat_run(service, prepared, streaming=bool(body.stream))
    shape = Chunks(run, name, body)
    stream = shape.stream() if body.stream else None
    return await deliver(service, http, stream=stream, whole=shape.whole, headers=body.left_out)


# ---- request ------------------------------------------------------------------------------------------------------


def to_turn(service: Service, body: ChatRequest) -> Turn:
    settings = service.settings
    instructions, messages = to_harmony(body.messages)
    tools = _toolbox(body.tools or [])
    if body.top_logprobs is not None and not body.logprobs:
        raise bad("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
    effort = body.reasoning_effort or (body.reasoning and body.reasoning.effort) or settings.default_effort
    return Turn(
        api="chat",
        messages=messages,
        instructions=instructions,
        tools=tools,
        choice=_choice(body, tools),
        parallel=body.parallel_tool_calls is not False,
        effort=EFFORTS[effort],
        format=_format(body),
        sampling=sampling(
            service, body, (body.top_logprobs or 0) if body.logprobs else None, body.max_completion_tokens
        ),
        stop=stops(body.stop),
    )


def _toolbox(tools: list[ChatTool]) -> Toolbox:
    return Toolbox(
        Function(
            check_name(t.function.name, "tools"),
            description=t.function.description or "",
            parameters=t.function.parameters,
            strict=bool(t.function.strict),
        )
        for t in tools
    )


def sampling(
    service: Service, body: SamplingFields, logprobs: int | None, max_tokens: int | None = None
) -> SamplingParams:
    settings, info = service.settings, service.source.info
    n = body.n or 1
    if n > settings.max_choices:
        raise bad(f"at most {settings.max_choices} choices are made at once.", "n")
    top_k = max(0, body.top_k or 0)
    top_p = settings.top_p if body.top_p is None else body.top_p
    if top_p == 0:  # "nothing but the likeliest"
        top_k, top_p = 1, 1.0
    if any(id >= info.vocab for id in body.stop_token_ids or ()):
        raise bad(f"a token id is outside this model's vocabulary of {info.vocab}.", "stop_token_ids")
    return SamplingParams(
        temperature=settings.temperature if body.temperature is None else body.temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=body.min_p or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=check_logit_bias(body.logit_bias, info),
        logprobs=logprobs,
        seed=body.seed,
        max_tokens=max_tokens or body.max_tokens or settings.default_max_tokens,
        min_tokens=body.min_tokens or 0,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        n=n,
    )


def _choice(body: ChatRequest, tools: Toolbox) -> Choice:
    wanted = body.tool_choice
    if wanted is None or isinstance(wanted, str):
        return check_choice(Choice(wanted or "auto"), tools)
    if isinstance(wanted, NamedTool):
        return Choice("required", (_known(tools, wanted.function.name),))
    assert isinstance(wanted, AllowedToolsChoice)
    allowed = tuple(_known(tools, t.function.name) for t in wanted.allowed_tools.tools)
    return check_choice(Choice(wanted.allowed_tools.mode, allowed), tools)


def _known(tools: Toolbox, name: str) -> str:
    function = tools.named(name)
    if function is None:
        raise bad(f"'tool_choice' names the tool {name!r}, which is not among 'tools'.", "tool_choice")
    return function.recipient


def _format(body: ChatRequest) -> Format | None:
    wanted = body.response_format
    if isinstance(wanted, JsonObjectFormat):
        return Format()
    if isinstance(wanted, JsonSchemaFormat):
        given = wanted.json_schema
        schema = None if given.schema_ is None else sse.compact(given.schema_)
        return Format(given.name, schema, given.description)
    return None


def chat_prompt(service: Service, messages: list[Any], tools: list[ChatTool], effort: str | None) -> list[int]:
    """The tokens that a conversation becomes, for /tokenize."""
    instructions, harmony = to_harmony(messages)
    turn = Turn(
        "tokenize",
        harmony,
        instructions,
        tools=_toolbox(tools),
        effort=EFFORTS[effort or service.settings.default_effort],
    )
    prepared = prepare(turn, service.dialect, service.source.info, service.settings)
    return prepared.prompt + prepared.prefill


# ---- answer -------------------------------------------------------------------------------------------------------


class Chunks:
    """The answer to one request, in either form."""

    def __init__(self, run: Run[ChoiceState], model: str, body: ChatRequest) -> None:
        self.run = run
        self.id = sse.new_id("chatcmpl-")
        self.created = int(time.time())
        self.model = model
        self.logprobs = bool(body.logprobs)
        options = body.stream_options
        self.usage = bool(options and options.include_usage)
        self.running_usage = bool(options and options.continuous_usage_stats)
        hide = body.include_reasoning is False or bool(body.reasoning and body.reasoning.exclude)
        self.show_reasoning = not hide
        # Token ids that no chunk has carried yet; None if they were not asked for.
        self._ids: list[list[int]] | None = [[] for _ in run.choices] if body.return_token_ids else None
        self._last: dict[tuple[int, str], int] = {}  # the message each choice's text last came from
        head = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        self._head = b"data: " + sse.dumps(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if self.usage else b"]}\n\n"

    def _chunk(self, index: int, delta: bytes, finish: str | None = None, logprobs: bytes = b"null") -> bytes:
        end = b'"%s"' % finish.encode() if finish else b"null"
        choice = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b' % (index, delta, logprobs, end)
        if self._ids is not None:
            choice += b',"token_ids":' + sse.dumps(self._ids[index])
            self._ids[index] = []
        choice += b"}"
        if self.running_usage:
            tail = b'],"usage":' + sse.dumps(usage(self.run.totals)) + b"}\n\n"
            return self._head + choice + tail
        return self._head + choice + self._tail

    async def stream(self) -> AsyncIterator[bytes]:
        opened: set[int] = set()
        async for updates in self.run.batches():
            out = []
            for update in updates:
                if update.index not in opened:
                    opened.add(update.index)
                    out.append(self._chunk(update.index, b'{"role":"assistant","content":""}'))
                if self._ids is not None:
                    self._ids[update.index] += update.tokens
                out += self._pieces(update)
                if update.finish:
                    out.append(self._chunk(update.index, b"{}", update.finish))
            if out:
                yield b"".join(out)
        end = b""
        if self.usage:
            end = self._head + b'],"usage":' + sse.dumps(usage(self.run.totals)) + b"}\n\n"
        yield end + sse.DONE

    def _pieces(self, update: Update) -> list[bytes]:
        out = []
        for piece in update.pieces:
            logprobs = b"null"
            if self.logprobs and piece.logprobs:
                logprobs = sse.dumps({"content": [entry(lp) for lp in piece.logprobs], "refusal": None})
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

    async def whole(self) -> dict[str, Any]:
        async with closing(self.run.batches()) as batches:
            async for updates in batches:
                for update in updates:
                    if self._ids is not None:
                        self._ids[update.index] += update.tokens
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": [self._choice(i, choice) for i, choice in enumerate(self.run.choices)],
            "usage": usage(self.run.totals),
        }

    def _choice(self, index: int, choice: ChoiceState) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.calls:
            message["content"] = choice.content or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.arguments},
                }
                for call in choice.calls
            ]
        if choice.reasoning and self.show_reasoning:
            message["reasoning_content"] = message["reasoning"] = choice.reasoning
        logprobs = None
        if self.logprobs:
            logprobs = {"content": [entry(lp) for lp in choice.content_logprobs], "refusal": None}
        out = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish}
        return out if self._ids is None else {**out, "token_ids": self._ids[index]}


def _delta(piece: Piece) -> bytes:
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


def entry(lp: TokenLogprob) -> dict[str, Any]:
    return {**_token(lp.data, lp.logprob), "top_logprobs": [_token(text, value) for text, value in lp.top]}


def _token(text: bytes, logprob: float) -> dict[str, Any]:
    # JSON has no minus infinity; OpenAI writes -9999 for a token that could not have been chosen.
    value = logprob if logprob > -9999.0 else -9999.0
    return {"token": text.decode("utf-8", "replace"), "logprob": value, "bytes": list(text)}


def usage(t: Totals) -> dict[str, Any]:
    return {
        "prompt_tokens": t.prompt,
        "completion_tokens": t.completion,
        "total_tokens": t.prompt + t.completion,
        "prompt_tokens_details": {"cached_tokens": t.cached},
        "completion_tokens_details": {"reasoning_tokens": t.reasoning},
    }
