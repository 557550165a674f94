"""/v1/completions: plain text in, plain text out. No harmony: what the model writes is what the client gets.

`suffix` and prompt log probabilities (`echo` with `logprobs`) are refused: the engine has neither.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from halfbyte.engine.request import Delta, Logprob
from halfbyte.engine.request import Request as EngineRequest
from halfbyte.model.tokenizer import Detokenizer, Tokenizer
from halfbyte.server.answer.answer import Piece
from halfbyte.server.answer.conversation import room, stops
from halfbyte.server.answer.generate import Run
from halfbyte.server.answer.requests import merged
from halfbyte.server.answer.respond import deliver
from halfbyte.server.answer.stream import StopMatcher, closing
from halfbyte.server.api.openai_chat import FINGERPRINT, sampling, usage
from halfbyte.server.api.schema import CHAT_HARMLESS, SamplingFields
from halfbyte.server.http import sse
from halfbyte.server.http.errors import bad
from halfbyte.server.http.json_body import Route
from halfbyte.server.service import Service

MAX_PROMPTS = 256
TokenId = Annotated[int, Field(ge=0)]


class CompletionRequest(SamplingFields):
    harmless: ClassVar[dict[str, str]] = CHAT_HARMLESS
    model: str
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    # extension
    skip_special_tokens: bool | None = None


class TextChoice:
    """One completion: text as it comes, a stop string, log probabilities in the form of this endpoint."""

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...], echo: str, skip_special: bool) -> None:
        self.tokenizer = tokenizer
        self.text = ""
        self.finish: str | None = None
        self.done = False
        self.reasoning_tokens = 0
        self.ids: list[int] = []
        self.tokens: list[str] = []
        self.token_logprobs: list[float] = []
        self.top: list[dict[str, float]] = []
        self.offsets: list[int] = []
        self._echo = echo
        self._seen = len(echo)
        self._detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
        self._stop = StopMatcher(stop)

    @property
    def repairs(self) -> dict[str, int]:
        return {}

    def feed(self, tokens: list[int], logprobs: list[Logprob] | None, *, forced: bool = False) -> list[Piece]:
        self.ids += tokens
        for lp in logprobs or ():
            name = self.tokenizer.decode([lp.token])
            self.tokens.append(name)
            self.token_logprobs.append(_finite(lp.logprob))
            self.top.append({self.tokenizer.decode([t]): _finite(v) for t, v in lp.top})
            self.offsets.append(self._seen)
            self._seen += len(name)
        return self._show(self._stop.feed(self._detokenizer.add(tokens)))

    def end(self, reason: str) -> list[Piece]:
        tail = self._stop.feed(self._detokenizer.flush()) + self._stop.flush()
        self.finish = "stop" if self._stop.matched is not None else reason
        return self._show(tail)

    def _show(self, text: str) -> list[Piece]:
        text, self._echo = self._echo + text, ""
        self.done = self._stop.matched is not None
        self.text += text
        return [Piece("content", text)] if text else []

    def logprobs(self, start: int = 0) -> dict[str, Any]:
        return {
            "tokens": self.tokens[start:],
            "token_logprobs": self.token_logprobs[start:],
            "top_logprobs": self.top[start:],
            "text_offset": self.offsets[start:],
        }


def _finite(value: float) -> float:
    return max(value, -9999.0)


def router(service: Service) -> APIRouter:
    api = APIRouter(route_class=Route, tags=["OpenAI"])

    @api.post("/v1/completions", summary="Text completion")
    async def completions(body: CompletionRequest, http: Request) -> Response:
        return await answer(service, body, http)

    return api


async def answer(service: Service, body: CompletionRequest, http: Request) -> Response:
    name = service.check_model(body.model)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise bad("'best_of' other than 'n' is not supported; leave it out.", "best_of", "unsupported_parameter")
    if body.echo and body.logprobs is not None:
        raise bad("'logprobs' of an echoed prompt are not available; leave out one of the two.", "echo")
    prompts = _prompts(service, body)
    stop = stops(body.stop)
    base = sampling(service, body, body.logprobs)
    if base.max_tokens is None:
        base = replace(base, max_tokens=16)  # this endpoint's documented default
    skip = body.skip_special_tokens is not False
    choices: list[TextChoice] = []
    requests: list[EngineRequest] = []
    for ids in prompts:
        service.log_prompt(ids)
        limit = room(len(ids), base.max_tokens, service.source.info)
        requests.append(EngineRequest(ids, replace(base, max_tokens=limit), None, service.settings.request_timeout))
        echo = service.tokenizer.decode(ids) if body.echo else ""
        choices += [TextChoice(service.tokenizer, stop, echo, skip) for _ in range(base.n)]

    def deltas() -> AsyncIterator[Delta]:
        parts = [_numbered(service, request, i * base.n) for i, request in enumerate(requests)]
        return parts[0] if len(parts) == 1 else merged(parts)

    run = Run(
        service,
        "completions",
        choices,
        deltas,
        prompt_tokens=sum(len(ids) for ids in prompts),
        streaming=bool(body.stream),
    )
    shape = TextChunks(run, name, body)
    stream = shape.stream() if body.stream else None
    return await deliver(service, http, stream=stream, whole=shape.whole, headers=body.left_out)


async def _numbered(service: Service, request: EngineRequest, first: int) -> AsyncIterator[Delta]:
    stream = service.source.stream(request)
    async with closing(stream):
        async for delta in stream:
            yield replace(delta, index=first + delta.index) if first else delta


def _prompts(service: Service, body: CompletionRequest) -> list[list[int]]:
    given = body.prompt
    vocab = service.source.info.vocab
    texts: list[Any]
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        texts = [given]
    else:
        texts = list(given)
    if not texts or len(texts) > MAX_PROMPTS:
        raise bad(f"give between 1 and {MAX_PROMPTS} prompts.", "prompt")
    out = []
    for text in texts:
        ids = service.tokenizer.encode(text, allow_special=True) if isinstance(text, str) else list(text)
        if not ids:
            raise bad("a prompt is empty; there must be at least one token to continue.", "prompt")
        if max(ids) >= vocab:
            raise bad(f"the token id {max(ids)} is outside this model's vocabulary of {vocab}.", "prompt")
        out.append(ids)
    return out


class TextChunks:
    def __init__(self, run: Run[TextChoice], model: str, body: CompletionRequest) -> None:
        self.run = run
        self.id = sse.new_id("cmpl-")
        self.created = int(time.time())
        self.model = model
        self.logprobs = body.logprobs is not None
        options = body.stream_options
        self.usage = bool(options and options.include_usage)
        self.running_usage = bool(options and options.continuous_usage_stats)
        self._sent = [0] * len(run.choices)
        self._ids = bool(body.return_token_ids)
        head = {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        self._head = b"data: " + sse.dumps(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if self.usage else b"]}\n\n"

    def _chunk(self, index: int, text: str, finish: str | None, tokens: list[int]) -> bytes:
        logprobs = b"null"
        if self.logprobs:
            choice = self.run.choices[index]
            logprobs = sse.dumps(choice.logprobs(self._sent[index]))
            self._sent[index] = len(choice.tokens)
        end = b'"%s"' % finish.encode() if finish else b"null"
        tail = self._tail
        if self.running_usage:
            tail = b'],"usage":' + sse.dumps(usage(self.run.totals)) + b"}\n\n"
        ids = b',"token_ids":' + sse.dumps(tokens) if self._ids else b""
        fields = (index, sse.quote(text), logprobs, end, ids)
        body = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}' % fields
        return self._head + body + tail

    async def stream(self) -> AsyncIterator[bytes]:
        async for updates in self.run.batches():
            yield b"".join(self._chunk(u.index, "".join(p.text for p in u.pieces), u.finish, u.tokens) for u in updates)
        end = b""
        if self.usage:
            end = self._head + b'],"usage":' + sse.dumps(usage(self.run.totals)) + b"}\n\n"
        yield end + sse.DONE

    async def whole(self) -> dict[str, Any]:
        await self.run.all()
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": [
                {
                    "index": i,
                    "text": c.text,
                    "logprobs": c.logprobs() if self.logprobs else None,
                    "finish_reason": c.finish,
                    **({"token_ids": c.ids} if self._ids else {}),
                }
                for i, c in enumerate(self.run.choices)
            ],
            "usage": usage(self.run.totals),
        }
