"""Ollama's API over the same turn: chat, generate, and what its clients ask about models.

There is one model, loaded already: nothing is pulled, created or unloaded, so those endpoints are not here. Answers are
streamed as lines of JSON unless a client says otherwise, as Ollama does.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from hashlib import sha256
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from halfbyte import __version__
from halfbyte.harmony.messages import Message
from halfbyte.server.answer.answer import SEPARATOR, Call, Update
from halfbyte.server.answer.conversation import (
    AnswerFormat,
    Conversation,
    check_stop_strings,
    json_answer,
    reasoning_limit,
)
from halfbyte.server.answer.generate import Generation, generate
from halfbyte.server.answer.prompt import make_prompt
from halfbyte.server.answer.service import Service
from halfbyte.server.answer.tools import Toolbox, arguments_object
from halfbyte.server.api.answer_schemas import (
    OllamaChat,
    OllamaGenerated,
    OllamaModels,
    OllamaShow,
    OllamaVersion,
)
from halfbyte.server.api.ollama_options import OllamaOptions
from halfbyte.server.api.ollama_schema import ChatBody, GenerateBody, ShowBody, Think, to_harmony
from halfbyte.server.api.openai_chat import to_toolbox
from halfbyte.server.api.openai_completions import CompletionRequest, generate_text
from halfbyte.server.api.openai_sampling import completion_sampling
from halfbyte.server.api.shared_schema import SamplingFields
from halfbyte.server.http import sse
from halfbyte.server.http.admission import RequestSlot
from halfbyte.server.http.errors import ApiError, bad_request
from halfbyte.server.http.json_body import Route
from halfbyte.server.http.middleware import owner_of
from halfbyte.server.http.openapi import JSON_LINES, answers
from halfbyte.server.http.respond import respond
from halfbyte.server.settings import Effort

API = "ollama"  # in metrics

# Of the Ollama whose API this follows: clients look at it before they use what came with a version.
API_VERSION = "0.12.6"
DETAILS = {
    "parent_model": "",
    "format": "",
    "family": "gptoss",
    "families": ["gptoss"],
    "parameter_size": "",
    "quantization_level": "MXFP4",
}
CAPABILITIES = ["completion", "tools", "thinking"]


def router(service: Service) -> APIRouter:
    api = APIRouter(route_class=Route, tags=["Ollama"])

    async def answer(
        http: Request, body: ChatBody | GenerateBody, start: Callable[[RequestSlot, bool], Generation[Any]], field: str
    ) -> Response:
        name = service.names.check_tagged(body.model)
        if not (body.messages if isinstance(body, ChatBody) else body.prompt):
            return _loaded(name, field)
        streaming = body.stream is not False

        def writer(slot: RequestSlot) -> LineWriter:
            return LineWriter(start(slot, streaming), name, field, show_thinking=body.think is not False)

        return await respond(http, service.admission, service.settings, writer, streaming=streaming)

    @api.post(
        "/api/chat", summary="Chat, as Ollama's clients ask", responses=answers(OllamaChat, "The answer.", JSON_LINES)
    )
    async def chat(body: ChatBody, http: Request) -> Response:
        owner = owner_of(http)

        def start(slot: RequestSlot, streaming: bool) -> Generation[Any]:
            instructions, messages = to_harmony(body.messages, service.calls.of(owner))
            tools = to_toolbox(body.tools or [])
            conversation = replace(_conversation(service, body, messages, instructions, tools), owner=owner)
            return generate(service, make_prompt(service, conversation), slot, streaming=streaming)

        return await answer(http, body, start, "message")

    @api.post(
        "/api/generate",
        summary="One prompt, as Ollama's clients ask",
        responses=answers(OllamaGenerated, "The answer.", JSON_LINES),
    )
    async def generate_(body: GenerateBody, http: Request) -> Response:
        def start(slot: RequestSlot, streaming: bool) -> Generation[Any]:
            if body.raw:
                return generate_text(service, _raw(body, streaming), slot, api=API)
            messages = [Message.user(body.prompt or "")]
            conversation = _conversation(service, body, messages, body.system or None, Toolbox())
            return generate(service, make_prompt(service, conversation), slot, streaming=streaming)

        return await answer(http, body, start, "response")

    @api.get(
        "/api/tags",
        summary="The model under each of its names, as Ollama lists them",
        responses=answers(OllamaModels, "The names."),
    )
    async def tags() -> dict[str, Any]:
        return {"models": [_card(service, name) for name in service.names.all]}

    @api.get("/api/ps", summary="The model that is loaded", responses=answers(OllamaModels, "The one there is."))
    async def ps() -> dict[str, Any]:
        card = _card(service, service.names.main)
        card |= {"expires_at": "9999-12-31T00:00:00Z", "size_vram": 0}  # it stays
        return {"models": [{**card, "context_length": service.source.info.max_context}]}

    @api.post("/api/show", summary="About the model", responses=answers(OllamaShow, "What is known of it."))
    async def show(body: ShowBody) -> dict[str, Any]:
        if (name := body.model or body.name) is None:
            raise bad_request("Missing required parameter: 'model'.", "model", "missing_required_parameter")
        service.names.check_tagged(name)
        return {
            "modelfile": "",
            "parameters": "",
            "template": "",
            "details": DETAILS,
            "model_info": {
                "general.architecture": "gptoss",
                "general.basename": service.source.info.model,
                "gptoss.context_length": service.source.info.max_context,
                "gptoss.vocab_size": service.source.info.vocab,
            },
            "capabilities": CAPABILITIES,
            "modified_at": _stamp(service.metrics.started),
        }

    @api.get(
        "/api/version",
        summary="The version of Ollama's API that these endpoints follow",
        responses=answers(OllamaVersion, "Its version and ours."),
    )
    async def version() -> dict[str, str]:
        return {"version": API_VERSION, "halfbyte": __version__}

    return api


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": _stamp(service.metrics.started),
        "size": 0,  # nothing of it lies in Ollama's store
        "digest": sha256(name.encode()).hexdigest(),  # tells names apart, and no more
        "details": DETAILS,
    }


def _stamp(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.UTC).isoformat().replace("+00:00", "Z")


def _loaded(name: str, field: str) -> Response:
    """A request without a prompt only asks that the model be loaded, which it is."""
    body = _frame(name, field, "", "", []) | {"done": True, "done_reason": "load"}
    return Response(sse.dumps(body), media_type="application/json")


def _frame(model: str, field: str, content: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """What is around every piece of an answer, in the form of the endpoint whose answers are in `field`."""
    out: dict[str, Any] = {"model": model, "created_at": _stamp(time.time())}
    thought = {"thinking": thinking} if thinking else {}
    if field == "response":
        return out | {"response": content} | thought
    message: dict[str, Any] = {"role": "assistant", "content": content} | thought
    return out | {"message": message | ({"tool_calls": calls} if calls else {})}


# ---- request ------------------------------------------------------------------------------------------------------


def _effort(service: Service, think: Think | None) -> Effort:
    if think is False:
        return "none"
    if think is None or think is True:
        return service.settings.default_effort
    return "high" if think == "max" else think


def _conversation(
    service: Service,
    body: ChatBody | GenerateBody,
    messages: list[Message],
    instructions: str | None,
    tools: Toolbox,
) -> Conversation:
    options = body.options or OllamaOptions()
    fields = options.as_defaults(SamplingFields())
    return Conversation(
        api=API,
        messages=messages,
        instructions=instructions,
        tools=tools,
        effort=_effort(service, body.think),
        max_reasoning_tokens=reasoning_limit(service.settings),
        format=_format(body),
        sampling=completion_sampling(service, fields, logprobs=None, max_tokens=fields.max_tokens),
        stop_strings=check_stop_strings(fields.stop, "options.stop"),
        input_field="messages" if isinstance(body, ChatBody) else "prompt",
    )


def _format(body: ChatBody | GenerateBody) -> AnswerFormat | None:
    if not body.format:
        return None
    return json_answer(None if isinstance(body.format, str) else sse.compact(body.format), field="format")


def _raw(body: GenerateBody, streaming: bool) -> CompletionRequest:
    """A prompt that is the model's input as it stands."""
    for field in ("system", "format"):
        if getattr(body, field):
            raise bad_request(f"'{field}' cannot be used with 'raw'; leave one of the two out.", field)
    options = body.options or OllamaOptions()
    request = CompletionRequest(model=body.model, prompt=body.prompt or "", stream=streaming)
    filled = options.as_defaults(request)
    return filled if filled.max_tokens is not None else filled.model_copy(update={"max_tokens": -1})


# ---- answer -------------------------------------------------------------------------------------------------------


Part = tuple[str, str, list[dict[str, Any]]]  # content, thinking, calls


class LineWriter:
    """The answer as lines of JSON, or as the one object they add up to. `field` is what holds the text."""

    media_type = JSON_LINES
    headers: dict[str, str] | None = None

    def __init__(self, generation: Generation[Any], model: str, field: str, *, show_thinking: bool) -> None:
        self.generation = generation
        self.model = model
        self.field = field
        self.show_thinking = show_thinking
        self.content = self.thinking = ""
        self.calls: list[dict[str, Any]] = []
        self._last: dict[str, int] = {}  # the message that content and thinking last came from
        self._sent: set[int] = set()  # calls
        self._begun = time.perf_counter_ns()
        self._first: int | None = None

    @property
    def keepalive(self) -> bytes:
        return self._line("", "", [])

    def failure(self, error: ApiError) -> bytes:
        return sse.dumps(error.ollama()) + b"\n"

    async def stream(self) -> AsyncIterator[bytes]:
        async for updates in self.generation.batches():
            if lines := [self._line(*part) for update in updates for part in self._parts(update)]:
                yield b"".join(lines)
        rest = [self._line("", "", [call]) for call in self._unsent()]
        yield b"".join(rest) + sse.dumps(self._frame("", "", []) | self._end()) + b"\n"

    async def body(self) -> dict[str, Any]:
        async for updates in self.generation.batches():
            for update in updates:
                self._parts(update)
        self._unsent()
        return self._frame(self.content, self.thinking, self.calls) | self._end()

    def _parts(self, update: Update) -> list[Part]:
        """The parts of each line that an update makes."""
        if self._first is None and update.tokens:
            self._first = time.perf_counter_ns()
        out: list[Part] = []
        for piece in update.pieces:
            if piece.kind not in ("content", "reasoning") or (piece.kind == "reasoning" and not self.show_thinking):
                continue
            last, self._last[piece.kind] = self._last.get(piece.kind), piece.item
            text = piece.text if last in (None, piece.item) else SEPARATOR + piece.text
            content, thinking = (text, "") if piece.kind == "content" else ("", text)
            self.content += content
            self.thinking += thinking
            out.append((content, thinking, []))
        for number in update.complete_items:
            call = self.generation.answers[0].items[number].call
            if call is not None and call.index not in self._sent:
                out.append(("", "", [self._call(call)]))
        return out

    def _call(self, call: Call) -> dict[str, Any]:
        """Ollama sends a call when it is whole, its arguments as an object."""
        self._sent.add(call.index)
        function = {
            "index": call.index,
            "name": call.function.name,
            "arguments": arguments_object(call.arguments),
        }
        self.calls.append({"id": call.id, "function": function})
        return self.calls[-1]

    def _unsent(self) -> list[dict[str, Any]]:
        """Calls that the answer was cut off in."""
        calls = getattr(self.generation.answers[0], "calls", [])
        return [self._call(call) for call in calls if call.index not in self._sent]

    def _frame(self, content: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        return _frame(self.model, self.field, content, thinking, calls)

    def _line(self, content: str, thinking: str, calls: list[dict[str, Any]]) -> bytes:
        return sse.dumps(self._frame(content, thinking, calls) | {"done": False}) + b"\n"

    def _end(self) -> dict[str, Any]:
        now, totals = time.perf_counter_ns(), self.generation.totals
        first = self._first or now
        return {
            "done": True,
            "done_reason": "length" if self.generation.finish[0] == "length" else "stop",
            "total_duration": now - self._begun,
            "load_duration": 0,
            "prompt_eval_count": totals.prompt,
            "prompt_eval_duration": first - self._begun,
            "eval_count": totals.completion,
            "eval_duration": now - first,
        }
