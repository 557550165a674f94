"""The endpoints around the model: which it is, under which names, whether it is well.

`/health` and `/health/ready` are 200 only while new work is taken; `/health/live` is 200 as long as the process
answers, so that an orchestrator restarts it only when it is really gone.
"""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import RootModel
from starlette.responses import PlainTextResponse, Response

from halfbyte import __version__
from halfbyte.engine.request import SourceInfo
from halfbyte.server.http import sse
from halfbyte.server.http.admission import Admission
from halfbyte.server.http.errors import ApiError, wants_anthropic
from halfbyte.server.http.json_body import Route
from halfbyte.server.http.metrics import Metrics
from halfbyte.server.http.model_names import ModelNames
from halfbyte.server.http.openapi import Described, answers


class ModelCard(Described):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class AnthropicCard(Described):
    type: Literal["model"]
    id: str
    display_name: str
    created_at: str


class ModelList(Described):
    object: Literal["list"]
    data: list[ModelCard]


class AnthropicList(Described):
    data: list[AnthropicCard]
    has_more: Literal[False]
    first_id: str
    last_id: str


class AnyList(RootModel[ModelList | AnthropicList]):
    """OpenAI's list; Anthropic's for its clients."""


class AnyCard(RootModel[ModelCard | AnthropicCard]):
    """OpenAI's card; Anthropic's for its clients."""


class Health(Described):
    status: Literal["ready", "alive"]
    seconds_since_step: float = 0.0


class Version(Described):
    version: str
    model: str
    max_context: int
    vocab: int
    tokenizer: str
    details: dict[str, Any]


class Props(Described):
    default_generation_settings: dict[str, Any]
    total_slots: int
    model_alias: str
    model_path: str
    modalities: dict[str, bool]
    chat_template: str
    chat_template_caps: dict[str, bool]
    build_info: str


def router(info: SourceInfo, tokenizer: str, names: ModelNames, admission: Admission, counts: Metrics) -> APIRouter:
    api = APIRouter(route_class=Route, tags=["server"])

    def model_card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": int(counts.started),
            "owned_by": "halfbyte",
            "root": info.model,
            "max_model_len": info.max_context,
        }

    def anthropic_card(name: str) -> dict[str, Any]:
        return {"type": "model", "id": name, "display_name": name, "created_at": "2025-08-05T00:00:00Z"}

    @api.get("/v1/models", summary="The model under each of its names", responses=answers(AnyList, "The names."))
    async def models(request: Request) -> dict[str, Any]:
        if wants_anthropic(request.headers):
            cards = [anthropic_card(name) for name in names.all]
            return {"data": cards, "has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
        return {"object": "list", "data": [model_card(name) for name in names.all]}

    @api.get("/v1/models/{name:path}", summary="One model", responses=answers(AnyCard, "Its card."))
    async def model(name: str, request: Request) -> dict[str, Any]:
        names.check(name)
        card = anthropic_card if wants_anthropic(request.headers) else model_card
        return card(name)

    def health() -> Response:
        reasons = admission.reasons_against()
        if reasons:
            raise ApiError(503, f"Not ready: {'; '.join(reasons)}.", code="not_ready", retry_after=5)
        body: dict[str, Any] = {"status": "ready"}
        if (since := admission.source.health().since_step) is not None:  # somebody waits for the engine
            body["seconds_since_step"] = round(since, 3)
        return Response(sse.dumps(body), media_type="application/json")

    @api.get("/health", summary="200 while new requests are taken", responses=answers(Health, "Ready.") | {503: {}})
    async def health_any() -> Response:
        return health()

    @api.get(
        "/health/ready", summary="200 while new requests are taken", responses=answers(Health, "Ready.") | {503: {}}
    )
    async def health_ready() -> Response:
        return health()

    @api.get("/health/live", summary="200 while the process answers", responses=answers(Health, "Alive."))
    async def health_live() -> dict[str, Literal["alive"]]:
        return {"status": "alive"}

    @api.get(
        "/metrics",
        summary="Prometheus metrics, or OpenMetrics where they are asked for",
        response_class=PlainTextResponse,
    )
    async def metrics(request: Request) -> Response:
        page, content_type = counts.render(request.headers.get("accept", ""))
        return Response(page, headers={"content-type": content_type})

    @api.get("/props", summary="What runs here, as llama.cpp's clients ask", responses=answers(Props, "Its facts."))
    async def props() -> dict[str, Any]:
        return {
            "default_generation_settings": {"n_ctx": info.max_context, "params": {"n_predict": -1}},
            "total_slots": info.details.get("max_seqs", 1),
            "model_alias": names.main,
            "model_path": info.model,
            "modalities": {"vision": False, "audio": False},
            "chat_template": "",  # harmony is written by this server, not by a template
            "chat_template_caps": {"supports_tools": True, "supports_tool_calls": True, "supports_system_role": True},
            "build_info": f"halfbyte {__version__}",
        }

    @api.get("/version", summary="What runs here", responses=answers(Version, "Its facts."))
    async def version() -> dict[str, Any]:
        return {
            "version": __version__,
            "model": info.model,
            "max_context": info.max_context,
            "vocab": info.vocab,
            "tokenizer": tokenizer,
            "details": info.details,
        }

    return api
