"""How a body of OpenAI's APIs says that tokens are chosen, as what the engine takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from halfbyte.engine.request import SETTINGS, SamplingParams
from halfbyte.server.answer.conversation import check_logit_bias
from halfbyte.server.answer.service import Service
from halfbyte.server.api.shared_schema import OpenAISamplerFields, SamplingFields
from halfbyte.server.http.errors import bad_request


def common_sampling(
    service: Service, body: OpenAISamplerFields, *, logprobs: int | None, max_tokens: int | None
) -> SamplingParams:
    """What chat completions, completions and responses have in common: every setting of the table, by its name."""
    settings = service.settings
    if max_tokens is None:
        max_tokens = settings.default_max_tokens
    elif max_tokens < 0:  # as many as fit
        max_tokens = None
    values: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        value: Any = getattr(body, name, None)
        if value is None:
            value = getattr(settings, name, setting.default)
        values[name] = max(value, setting.least)  # other servers take -1 for "off", which is the least here
    if values["top_p"] == 0:  # "nothing but the likeliest"
        values |= {"top_k": 1, "top_p": 1.0}
    return SamplingParams(
        **values,
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
