"""/v1/completions: plain text in, plain text out. No harmony: what the model writes is what the client gets.

With `echo` the prompt comes first, with its own log probabilities where `logprobs` asks for them; `max_tokens` 0 then
adds nothing. `suffix` is refused: gpt-oss does not fill in the middle.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Discriminator, Field, Tag
from starlette.responses import Response

from halfbyte.engine.request import Constraint, Logprob
from halfbyte.engine.request import Request as EngineRequest
from halfbyte.engine.stops import TextStopMatcher
from halfbyte.model.tokenizer import Detokenizer, Tokenizer
from halfbyte.server.answer.answer import AnswerPiece, Update
from halfbyte.server.answer.conversation import check_stop_strings
from halfbyte.server.answer.generate import Generation
from halfbyte.server.answer.prompt import within_context
from halfbyte.server.answer.pump import merge
from halfbyte.server.answer.requests import single_request
from halfbyte.server.answer.service import Service
from halfbyte.server.answer.token_budget import TokenBudget
from halfbyte.server.api.answer_schemas import TextCompletion
from halfbyte.server.api.guidance import GuidanceFields, guided_format
from halfbyte.server.api.openai_chunks import ChunkFrame, error_chunk, finish_json, finite
from halfbyte.server.api.openai_sampling import completion_sampling
from halfbyte.server.api.shared_schema import CHAT_HARMLESS, Items, Limit, SamplingFields
from halfbyte.server.http import sse
from halfbyte.server.http.admission import RequestSlot
from halfbyte.server.http.errors import ApiError, bad_request
from halfbyte.server.http.json_body import Route
from halfbyte.server.http.openapi import EVENTS, answers
from halfbyte.server.http.respond import EventWriter, respond

API = "completions"  # in metrics

MAX_PROMPTS = 256
TokenId = Annotated[int, Field(ge=0)]


def _prompt_kind(value: Any) -> str:
    """The kind that the first item has. Trying every kind would note an error for each token id of a long prompt."""
    if not isinstance(value, list):
        return "text"
    first = value[0] if value else ""
    return "lists" if isinstance(first, list) else "ids" if isinstance(first, int) else "texts"


PromptInput = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Items[str], Tag("texts")]
    | Annotated[Items[TokenId], Tag("ids")]
    | Annotated[Items[Items[TokenId]], Tag("lists")],
    Discriminator(_prompt_kind),
]


class CompletionRequest(SamplingFields, GuidanceFields):
    harmless: ClassVar[dict[str, str]] = CHAT_HARMLESS
    model: str
    prompt: PromptInput
    max_tokens: Limit | None = None  # 0 with `echo`
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=128)] | None = None
    # extension
    skip_special_tokens: bool | None = None


def router(service: Service) -> APIRouter:
    api = APIRouter(route_class=Route, tags=["OpenAI"])

    @api.post("/v1/completions", summary="Text completion", responses=answers(TextCompletion, "The text.", EVENTS))
    async def completions(body: CompletionRequest, http: Request) -> Response:
        name = service.names.check(body.model)
        if body.best_of is not None and body.best_of != (body.n or 1):
            text = "'best_of' other than 'n' is not supported; leave it out."
            raise bad_request(text, "best_of", "unsupported_parameter")
        if body.max_tokens == 0 and not body.echo:
            raise bad_request("'max_tokens' of 0 asks for nothing; give at least 1, or 'echo'.", "max_tokens")
        return await respond(
            http,
            service.admission,
            service.settings,
            lambda slot: TextWriter(generate_text(service, body, slot), name, body),
            streaming=bool(body.stream),
        )

    return api


# ---- request ------------------------------------------------------------------------------------------------------


def generate_text(
    service: Service, body: CompletionRequest, slot: RequestSlot, *, api: str = API
) -> Generation[TextAnswer]:
    """One engine request for each prompt, all at once."""
    stop = check_stop_strings(body.stop)
    most = 16 if body.max_tokens is None else body.max_tokens  # this endpoint's documented default
    sampling = completion_sampling(service, body, logprobs=body.logprobs, max_tokens=most)
    prompts = _listed(body)
    slot.hold(len(prompts) * sampling.n, "prompt")
    scored = body.echo and body.logprobs is not None
    format = guided_format(body)
    constraint = Constraint(format.kind, format.source) if format else None
    skip = body.skip_special_tokens is not False
    answers: list[TextAnswer] = []
    readers: list[TextReader] = []
    requests: list[EngineRequest] = []
    all_ids = _encoded(service, prompts)
    for ids in all_ids:
        service.log_prompt(ids)
        of_prompt = within_context(sampling, len(ids), service.source.info, "prompt")
        if scored or of_prompt.max_tokens == 0:
            # An echo without log probabilities needs none, but the engine is asked for nothing else then.
            first = 1 if scored else len(ids)
            of_prompt = replace(of_prompt, prompt_logprobs=body.logprobs or 0, prompt_logprobs_from=first)
        requests.append(EngineRequest(ids, of_prompt, constraint, service.settings.request_timeout, client=slot.client))
        requests[-1].scope = service.settings.prefix_scope(slot.client)
        echo = service.tokenizer.decode(ids) if body.echo else ""
        for _ in range(sampling.n):
            readers.append(TextReader(service.tokenizer, len(readers), stop, echo, skip))
            answers.append(TextAnswer(service.tokenizer, ids[:1] if scored else [], 0 if scored else len(echo)))

    def updates() -> AsyncIterator[Update]:
        n = sampling.n
        field = format.field if format else None
        streams = [single_request(service, r, readers[i * n : (i + 1) * n], field) for i, r in enumerate(requests)]
        return streams[0] if len(streams) == 1 else merge(streams)

    return Generation(
        service,
        api,
        readers,
        answers,
        updates,
        slot=slot,
        prompt_tokens=sum(len(ids) for ids in all_ids),
        streaming=bool(body.stream),
    )


def _listed(body: CompletionRequest) -> list[Any]:
    """The prompts, as texts or token ids."""
    prompt = body.prompt
    single = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
    prompts: list[Any] = [prompt] if single else list(prompt)
    if not prompts or len(prompts) > MAX_PROMPTS:
        raise bad_request(f"give between 1 and {MAX_PROMPTS} prompts.", "prompt")
    return prompts


def _encoded(service: Service, prompts: list[Any]) -> list[list[int]]:
    vocab = service.source.info.vocab
    out = []
    for text in prompts:
        budget = TokenBudget(service.tokenizer, service.source.info.max_context, "prompt")
        ids = budget.encode(text, allow_special=True) if isinstance(text, str) else list(text)
        if not ids:
            raise bad_request("a prompt is empty; there must be at least one token to continue.", "prompt")
        if max(ids) >= vocab:
            raise bad_request(f"the token id {max(ids)} is outside this model's vocabulary of {vocab}.", "prompt")
        out.append(ids)
    return out


# ---- answer -------------------------------------------------------------------------------------------------------


class TextReader:
    """Tokens of one completion as text, up to a stop string."""

    def __init__(self, tokenizer: Tokenizer, index: int, stop: tuple[str, ...], echo: str, skip_special: bool) -> None:
        self.index = index
        self.done = False
        self._echo = echo
        self._detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
        self._stop = TextStopMatcher(stop)

    @property
    def repairs(self) -> dict[str, int]:
        return {}

    def read(self, tokens: list[int], logprobs: list[Logprob] | None, *, forced: bool = False) -> Update:
        assert not forced, "a completion has no structure to put in"
        text, count = "", len(tokens)
        if self._stop.stops:
            for at in range(count):  # one by one: what follows the token that ends the answer is not charged
                text += self._stop.feed(self._detokenizer.add(tokens[at : at + 1]))
                if self._stop.matched is not None:
                    count = at + 1
                    break
        elif tokens:
            text = self._detokenizer.add(tokens)
        update = self._show(text)
        update.tokens, update.logprobs = tokens[:count], (logprobs or [])[:count]
        return update

    def end(self, reason: str) -> Update:
        update = self._show(self._stop.feed(self._detokenizer.flush()) + self._stop.flush())
        update.finish = "stop" if self._stop.matched is not None else reason
        return update

    def _show(self, text: str) -> Update:
        text, self._echo = self._echo + text, ""
        self.done = self._stop.matched is not None
        return Update(self.index, [AnswerPiece("content", text)] if text else [])


class TextAnswer:
    """One completion so far: its text, its tokens, log probabilities in the form of this endpoint.

    `unscored` is the token that an echoed prompt begins with: nothing stands before it, so it has no probability.
    """

    def __init__(self, tokenizer: Tokenizer, unscored: list[int], offset: int) -> None:
        self.text = ""
        self.finish: str | None = None
        self.ids: list[int] = []
        self._tokenizer = tokenizer
        self._offset = offset
        self._tokens: list[str] = []
        self._token_logprobs: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._offsets: list[int] = []
        self._position = 0
        for token in unscored:
            self._add(token, None, None)

    def add(self, update: Update) -> None:
        self.text += "".join(piece.text for piece in update.pieces)
        self.ids += update.tokens
        self.finish = update.finish
        for lp in (*update.prompt_logprobs, *update.logprobs):
            top: dict[str, float] = {}
            for token, value in lp.top:  # of tokens that read the same, the likeliest
                top.setdefault(self._tokenizer.decode([token]), finite(value))
            self._add(lp.token, finite(lp.logprob), top)

    def _add(self, token: int, logprob: float | None, top: dict[str, float] | None) -> None:
        name = self._tokenizer.decode([token])
        self._tokens.append(name)
        self._token_logprobs.append(logprob)
        self._top.append(top)
        self._offsets.append(self._offset)
        self._offset += len(name)

    def take_logprobs(self) -> dict[str, Any]:
        """The logprobs since the last call."""
        start, self._position = self._position, len(self._tokens)
        return {
            "tokens": self._tokens[start:],
            "token_logprobs": self._token_logprobs[start:],
            "top_logprobs": self._top[start:],
            "text_offset": self._offsets[start:],
        }


class TextWriter(EventWriter):
    """The answer to one request, in either form."""

    def __init__(self, generation: Generation[TextAnswer], model: str, body: CompletionRequest) -> None:
        self.generation = generation
        self.frame = ChunkFrame(
            "cmpl-", "text_completion", "text_completion", model, body, generation.service.source.info
        )
        self.headers = self.frame.headers
        self.logprobs = body.logprobs is not None
        self._with_ids = bool(body.return_token_ids)

    def failure(self, error: ApiError) -> bytes:
        return error_chunk(error)

    def _chunk(self, update: Update) -> bytes:
        logprobs = b"null"
        if self.logprobs:
            answer = self.generation.answers[update.index]
            logprobs = sse.dumps(answer.take_logprobs())
        text = sse.quote("".join(piece.text for piece in update.pieces))
        ids = b',"token_ids":' + sse.dumps(update.tokens) if self._with_ids else b""
        fields = (update.index, text, logprobs, finish_json(update.finish), ids)
        choice = b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b%b}' % fields
        return self.frame.chunk(choice, self.generation.totals)

    async def stream(self) -> AsyncIterator[bytes]:
        async for updates in self.generation.batches():
            yield b"".join(self._chunk(update) for update in updates)
        yield self.frame.end(self.generation.totals)

    async def body(self) -> dict[str, Any]:
        await self.generation.finish_all()
        choices = [
            {
                "index": i,
                "text": answer.text,
                "logprobs": answer.take_logprobs() if self.logprobs else None,
                "finish_reason": answer.finish,
                **({"token_ids": answer.ids} if self._with_ids else {}),
            }
            for i, answer in enumerate(self.generation.answers)
        ]
        return self.frame.body(choices, self.generation.totals)
