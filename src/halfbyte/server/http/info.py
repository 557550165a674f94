"""The endpoints around the model: which it is, its tokens, whether it is well.

`/health` and `/health/ready` are 200 only while new work is taken; `/health/live` is 200 as long as the process
answers, so that an orchestrator restarts it only when it is really gone.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from halfbyte import __version__
from halfbyte.server.api.openai_chat_schema import ChatMessage, ChatTool, EffortName
from halfbyte.server.api.schema import Strict
from halfbyte.server.http import sse
from halfbyte.server.http.errors import ApiError, bad, wants_anthropic
from halfbyte.server.http.json_body import Route
from halfbyte.server.http.metrics import CONTENT_TYPE
from halfbyte.server.service import Service

MAX_TEXT = 8 << 20


class TokenizeRequest(Strict):
    """Either a text or a conversation."""

    harmless: ClassVar[dict[str, str]] = {"add_special": "gpt-oss has no token that opens a text"}
    model: str | None = None
    prompt: Annotated[str, Field(max_length=MAX_TEXT)] | None = None
    content: Annotated[str, Field(max_length=MAX_TEXT)] | None = None  # llama.cpp's name for it
    messages: list[ChatMessage] | None = None
    tools: list[ChatTool] | None = None
    reasoning_effort: EffortName | None = None
    parse_special: bool | None = None  # read "<|start|>" and the like as control tokens
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=1 << 20)]


def router(service: Service) -> APIRouter:
    api = APIRouter(route_class=Route, tags=["server"])
    info = service.source.info

    def model_card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": int(service.metrics.started),
            "owned_by": "halfbyte",
            "root": info.model,
            "max_model_len": info.max_context,
        }

    def anthropic_card(name: str) -> dict[str, Any]:
        return {"type": "model", "id": name, "display_name": name, "created_at": "2025-08-05T00:00:00Z"}

    @api.get("/v1/models", summary="The model under each of its names")
    async def models(request: Request) -> dict[str, Any]:
        if wants_anthropic(request.url.path, request.headers):
            cards = [anthropic_card(name) for name in service.names]
            return {"data": cards, "has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
        return {"object": "list", "data": [model_card(name) for name in service.names]}

    @api.get("/v1/models/{name:path}", summary="One model")
    async def model(name: str, request: Request) -> dict[str, Any]:
        service.check_model(name)
        card = anthropic_card if wants_anthropic(request.url.path, request.headers) else model_card
        return card(name)

    @api.post("/tokenize", summary="Token ids of a text or a conversation")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        ids = _token_ids(service, body)
        out: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": info.max_context}
        if body.return_token_strs:
            out["token_strs"] = [service.tokenizer.decode([id]) for id in ids]
        return out

    @api.post("/detokenize", summary="The text of token ids")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        text = service.tokenizer.decode(body.tokens)
        return {"prompt": text, "content": text}

    def health() -> Response:
        problems = []
        if not service.source.ready:
            problems.append("the model is not ready")
        if service.draining:
            problems.append("the server is shutting down")
        if service.watchdog.shedding:
            problems.append(service.watchdog.reason)
        if problems:
            raise ApiError(503, f"Not ready: {'; '.join(problems)}.", code="not_ready", retry_after=5)
        return Response(sse.dumps({"status": "ready"}), media_type="application/json")

    @api.get("/health", summary="200 while new requests are taken")
    async def health_any() -> Response:
        return health()

    @api.get("/health/ready", summary="200 while new requests are taken")
    async def health_ready() -> Response:
        return health()

    @api.get("/health/live", summary="200 while the process answers")
    async def health_live() -> dict[str, Literal["alive"]]:
        return {"status": "alive"}

    @api.get("/metrics", summary="Prometheus metrics")
    async def metrics() -> Response:
        return Response(service.metrics.render(), headers={"content-type": CONTENT_TYPE})

    @api.get("/version", summary="What runs here")
    async def version() -> dict[str, Any]:
        return {
            "version": __version__,
            "model": info.model,
            "max_context": info.max_context,
            "vocab": info.vocab,
            "tokenizer": service.tokenizer.name.rpartition("/")[2],
            "details": info.details,
        }

    return api


def _token_ids(service: Service, body: TokenizeRequest) -> list[int]:
    given = [f for f in ("prompt", "content", "messages") if getattr(body, f) is not None]
    if len(given) != 1:
        raise bad("give exactly one of 'prompt', 'content' and 'messages'.", "prompt")
    if body.messages is not None:
        from halfbyte.server.api.openai_chat import chat_prompt

        return chat_prompt(service, body.messages, body.tools or [], body.reasoning_effort)
    text = body.prompt if body.prompt is not None else body.content
    assert text is not None
    return service.tokenizer.encode(text, allow_special=bool(body.parse_special))
