"""/tokenize and /detokenize: a text or a conversation as token ids, and back."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from halfbyte.server.answer.conversation import EFFORTS, Conversation, reasoning_limit
from halfbyte.server.answer.prompt import make_prompt
from halfbyte.server.answer.service import MAX_TEXT, Service
from halfbyte.server.answer.token_budget import TokenBudget
from halfbyte.server.api.answer_schemas import Detokenized, Tokens
from halfbyte.server.api.openai_chat import to_toolbox
from halfbyte.server.api.openai_chat_schema import ChatMessage, ChatTool, EffortName, to_harmony
from halfbyte.server.api.shared_schema import Items, Messages, Strict
from halfbyte.server.http.errors import bad_request
from halfbyte.server.http.json_body import Route
from halfbyte.server.http.middleware import owner_of
from halfbyte.server.http.openapi import answers
from halfbyte.server.http.respond import compute

MAX_TOKENS = 1 << 20


class TokenizeRequest(Strict):
    """Either a text or a conversation."""

    harmless: ClassVar[dict[str, str]] = {"add_special": "gpt-oss has no token that opens a text"}
    model: str | None = None
    prompt: Annotated[str, Field(max_length=MAX_TEXT)] | None = None
    content: Annotated[str, Field(max_length=MAX_TEXT)] | None = None  # llama.cpp's name for it
    messages: Messages[ChatMessage] | None = None
    tools: Items[ChatTool] | None = None
    reasoning_effort: EffortName | None = None
    parse_special: bool | None = None  # read "<|start|>" and the like as control tokens
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Annotated[Items[Annotated[int, Field(ge=0)]], Field(max_length=MAX_TOKENS)]


def router(service: Service) -> APIRouter:
    api = APIRouter(route_class=Route, tags=["server"])

    @api.post("/tokenize", summary="Token ids of a text or a conversation", responses=answers(Tokens, "The ids."))
    async def tokenize(body: TokenizeRequest, http: Request) -> Response:
        owner = owner_of(http)

        def answer() -> dict[str, Any]:
            ids = _token_ids(service, body, owner)
            out: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": service.source.info.max_context}
            if body.return_token_strs:
                out["token_strs"] = [service.tokenizer.decode([id]) for id in ids]
            return out

        return await compute(http, service.admission, answer)

    @api.post("/detokenize", summary="The text of token ids", responses=answers(Detokenized, "The text."))
    async def detokenize(body: DetokenizeRequest, http: Request) -> Response:
        def answer() -> dict[str, Any]:
            text = service.tokenizer.decode(body.tokens)
            return {"prompt": text, "content": text}

        return await compute(http, service.admission, answer)

    return api


def _token_ids(service: Service, body: TokenizeRequest, owner: str) -> list[int]:
    sources = [f for f in ("prompt", "content", "messages") if getattr(body, f) is not None]
    if len(sources) != 1:
        raise bad_request("give exactly one of 'prompt', 'content' and 'messages'.", "prompt")
    if body.messages is not None:
        instructions, messages = to_harmony(body.messages, service.calls.of(owner))
        effort = EFFORTS[body.reasoning_effort or service.settings.default_effort]
        tools = to_toolbox(body.tools or [])
        conversation = Conversation("tokenize", messages, instructions, tools, effort=effort)
        conversation.max_reasoning_tokens = reasoning_limit(service.settings)
        return make_prompt(service, conversation).tokens
    text = body.prompt if body.prompt is not None else body.content
    assert text is not None
    budget = TokenBudget(service.tokenizer, MAX_TOKENS, "prompt")
    return budget.encode(text, allow_special=bool(body.parse_special))
