"""How one choice of one request samples its tokens: its parameters, checked, and what follows from them.

The randomness of a token is a function of (seed, choice, position) and nothing else. Refuses parameters that can never
be served before the request is queued.
"""

from __future__ import annotations

import math
from hashlib import blake2b

from halfbyte.engine.request import SamplingParams
from halfbyte.errors import RequestError

SAMPLE, ACCEPT, PROPOSE = 0, 1, 2  # streams of randomness at one position


def check_params(params: SamplingParams, vocab: int) -> None:
    """Refuses what can never be served, before the request is queued."""
    problems = []
    if not 0.0 <= params.temperature <= 100.0:
        problems.append(f"temperature is {params.temperature}, not between 0 and 100")
    if params.top_k < 0:
        problems.append(f"top_k is {params.top_k}; 0 means no limit")
    if not 0.0 < params.top_p <= 1.0:
        problems.append(f"top_p is {params.top_p}, not in (0, 1]")
    if not 0.0 <= params.min_p <= 1.0:
        problems.append(f"min_p is {params.min_p}, not in [0, 1]")
    if not 0.0 < params.repetition_penalty <= 100.0:
        problems.append(f"repetition_penalty is {params.repetition_penalty}, not in (0, 100]")
    for name in ("presence_penalty", "frequency_penalty"):
        if not -100.0 <= getattr(params, name) <= 100.0:
            problems.append(f"{name} is {getattr(params, name)}, not between -100 and 100")
    if params.max_tokens is not None and params.max_tokens < (1 if params.prompt_logprobs is None else 0):
        problems.append(f"max_tokens is {params.max_tokens}; ask for at least 1, or for prompt_logprobs")
    if params.min_tokens < 0 or (params.max_tokens is not None and params.min_tokens > params.max_tokens):
        problems.append(f"min_tokens is {params.min_tokens}, not between 0 and max_tokens")
    if params.n < 1:
        problems.append(f"n is {params.n}; ask for at least 1")
    for name in ("logprobs", "prompt_logprobs"):
        if (count := getattr(params, name)) is not None and not 0 <= count <= vocab:
            problems.append(f"{name} is {count}, not between 0 and the vocabulary's {vocab}")
    if params.prompt_logprobs_from < 1:
        problems.append(f"prompt_logprobs_from is {params.prompt_logprobs_from}; the first token has none")
    for what, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        outside = [t for t in ids if not 0 <= t < vocab]
        if outside:
            problems.append(f"{what} names token {outside[0]}, but the vocabulary has {vocab}")
    if any(not math.isfinite(b) and b != -math.inf for b in params.logit_bias.values()):
        problems.append("a logit_bias is not a number")
    if "" in params.stop:
        problems.append("a stop string is empty")
    if problems:
        raise RequestError(f"this request cannot be served: {'; '.join(problems)}.")


class RowSampler:
    """Made once for each choice of a request; read at every step."""

    __slots__ = (
        "adjusted", "bias", "forced_until", "greedy", "key", "params", "penalised", "prompt", "simple", "stops",
    )  # fmt: skip

    def __init__(self, params: SamplingParams, index: int, prompt: int, seed: int, stop_ids: frozenset[int]) -> None:
        self.params = params
        self.prompt = prompt
        self.key = f"{seed & 0xFFFFFFFFFFFFFFFF}/{index}/".encode()
        self.greedy = params.temperature == 0.0
        self.penalised = bool(params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty)
        self.bias = tuple(params.logit_bias.items())
        self.forced_until = prompt + params.min_tokens if params.min_tokens and stop_ids else 0
        self.stops = sorted(stop_ids)
        self.adjusted = bool(self.penalised or self.bias or self.forced_until)
        # Nothing but the highest logit is asked for.
        self.simple = self.greedy and not self.adjusted and params.logprobs is None

    def uniform(self, position: int, stream: int = SAMPLE) -> float:
        """In [0, 1), fixed by seed, choice, position and stream."""
        digest = blake2b(self.key + position.to_bytes(8, "little") + bytes((stream,)), digest_size=8).digest()
        return (int.from_bytes(digest, "little") >> 11) * 2.0**-53
