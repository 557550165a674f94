"""How a body of OpenAI's APIs says that tokens are chosen, as what the engine takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from halfbyte.engine.request import SamplingParams
from halfbyte.server.answer.conversation import check_logit_bias
from halfbyte.server.answer.service import Service
from halfbyte.server.api.shared_schema import SamplingFields
from halfbyte.server.http.errors import bad_request


class SamplingBody(Protocol):
    """What chat completions, completions and responses have in common."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: dict[str, float] | None
    seed: int | None


def common_sampling(
    service: Service, body: SamplingBody, *, logprobs: int | None, max_tokens: int | None
) -> SamplingParams:
    settings = service.settings
    if max_tokens is None:
        max_tokens = settings.default_max_tokens
    elif max_tokens < 0:  # as many as fit
        max_tokens = None
    top_k = max(0, body.top_k or 0)
    top_p = settings.top_p if body.top_p is None else body.top_p
    if top_p == 0:  # "nothing but the likeliest"
        top_k, top_p = 1, 1.0
    return SamplingParams(
        temperature=settings.temperature if body.temperature is None else body.temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=body.min_p or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=check_logit_bias(body.logit_bias, service.source.info),
        logprobs=logprobs,
        seed=body.seed,
        max_tokens=max_tokens,
    )


def completion_sampling(
    service: Service, body: SamplingFields, *, logprobs: int | None, max_tokens: int | None
) -> SamplingParams:
    """With the fields that only the completion APIs have."""
    vocab, most = service.source.info.vocab, service.settings.max_choices
    n = body.n or 1
    if n > most:
        raise bad_request(f"at most {most} choices are made at once.", "n")
    if any(id >= vocab for id in body.stop_token_ids or ()):
        raise bad_request(f"a token id is outside this model's vocabulary of {vocab}.", "stop_token_ids")
    return replace(
        common_sampling(service, body, logprobs=logprobs, max_tokens=max_tokens),
        min_tokens=body.min_tokens or 0,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        n=n,
    )
