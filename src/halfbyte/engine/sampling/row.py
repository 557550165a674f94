"""How one choice of one request samples its tokens: its parameters, checked, and what follows from them.

The randomness of a token is a function of (seed, choice, position) and nothing else. Refuses parameters that can never
be served before the request is queued.
"""

from __future__ import annotations

import math
from hashlib import blake2b

from halfbyte.engine.request import SamplingParams
from halfbyte.errors import RequestError
from halfbyte.ops.sampling_settings import SETTINGS, is_filtered, row_of

SAMPLE, ACCEPT, PROPOSE = 0, 1, 2  # streams of randomness at one position


def check_params(params: SamplingParams, vocab: int) -> None:
    """Refuses what can never be served, before the request is queued."""
    problems = []
    for name, setting in SETTINGS.items():
        if not setting.allows(value := getattr(params, name)):
            problems.append(f"{name} is {value}; it must be {setting.range}")
    if params.max_tokens is not None and params.max_tokens < (1 if params.prompt_logprobs is None else 0):
        problems.append(f"max_tokens is {params.max_tokens}; ask for at least 1, or for prompt_logprobs")
    elif params.min_tokens < 0 or (params.max_tokens is not None and params.min_tokens > params.max_tokens):
        problems.append(f"min_tokens is {params.min_tokens}, not between 0 and max_tokens")
    if params.n < 1:
        problems.append(f"n is {params.n}; ask for at least 1")
    for name in ("logprobs", "prompt_logprobs"):
        if (count := getattr(params, name)) is not None and not 0 <= count <= vocab:
            problems.append(f"{name} is {count}, not between 0 and the vocabulary's {vocab}")
    if params.prompt_logprobs_from < 1:
        problems.append(f"prompt_logprobs_from is {params.prompt_logprobs_from}; the first token has none")
    for field, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        outside = [t for t in ids if not 0 <= t < vocab]
        if outside:
            problems.append(f"{field} names token {outside[0]}, but the vocabulary has {vocab}")
    if any(not math.isfinite(b) and b != -math.inf for b in params.logit_bias.values()):
        problems.append("a logit_bias is not a number")
    if "" in params.stop:
        problems.append("a stop string is empty")
    if problems:
        raise RequestError(f"this request cannot be served: {'; '.join(problems)}.")


class RowSampler:
    """Made once for each choice of a request; read at every step."""

    __slots__ = (
        "adjusted", "bias", "filtered", "forced_until", "greedy", "key", "params", "penalised", "prompt", "settings",
        "simple", "stops",
    )  # fmt: skip

    def __init__(self, params: SamplingParams, index: int, prompt: int, seed: int, stop_ids: frozenset[int]) -> None:
        self.params = params
        self.prompt = prompt
        self.key = f"{seed & 0xFFFFFFFFFFFFFFFF}/{index}/".encode()
        self.settings = row_of(params)  # what a device reads
        self.filtered = is_filtered(params)
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
