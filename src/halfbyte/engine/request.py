"""What travels between a client and the engine: plain values, no tensors, no tokenizer.

`TokenSource` is the only thing the server knows of an engine. The engine process, an in-process engine and the
scripted source of the tests all implement it.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from halfbyte.ops.sampling_settings import SETTINGS as SETTINGS
from halfbyte.ops.sampling_settings import SamplingSettings

FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]
_ids = itertools.count()


@dataclass(frozen=True)
class SamplingParams(SamplingSettings):
    """How tokens are chosen: the table of `ops/sampling_settings.py`, and what a request says besides."""

    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # None: none; 0: the chosen token's; k: also the top k
    prompt_logprobs: int | None = None  # the same of the prompt's own tokens, from `prompt_logprobs_from` on
    prompt_logprobs_from: int = 1  # nothing stands before the token at 0, so it has none
    seed: int | None = None
    max_tokens: int | None = None  # None: until the context ends; 0, with `prompt_logprobs`: nothing is generated
    min_tokens: int = 0
    stop: tuple[str, ...] = ()  # matched on the raw text, across token boundaries; the match is not emitted
    stop_token_ids: tuple[int, ...] = ()  # in addition to the model's own end tokens
    ignore_eos: bool = False
    n: int = 1


@dataclass(frozen=True)
class Constraint:
    """A grammar the output must follow. Once a value is complete only `end_tokens` are allowed.

    `triggers` are runs of token ids: the constraint is asleep until the tokens so far (the prompt's tail included) end
    with one of them, so a harmony model may reason first. None of them means from the first token.
    """

    kind: Literal["json_object", "json_schema", "regex", "ebnf"]
    source: str  # the schema as JSON text, the expression, or the grammar
    triggers: tuple[tuple[int, ...], ...] = ()
    end_tokens: tuple[int, ...] = ()  # what may follow a complete value; empty: the model's end tokens


@dataclass(frozen=True)
class ReasoningLimit:
    """How many tokens the reasoning messages of an answer may have together.

    At the limit the engine forces one of `closings`: runs of token ids, none of which begins another. Where they
    differ the model chooses. The tokens count as generated ones.
    """

    tokens: int
    closings: tuple[tuple[int, ...], ...]


@dataclass
class Request:
    prompt: list[int]
    sampling: SamplingParams = SamplingParams()
    constraint: Constraint | None = None
    timeout: float | None = None  # seconds from submission
    id: str = field(default_factory=lambda: f"r{next(_ids)}")
    scope: str = ""  # requests of different scopes find none of each other's prefixes
    client: str = ""  # whose request it is; the engine shares its steps and pages among clients (`clients.py`)
    reasoning: ReasoningLimit | None = None  # only for prompts in the harmony format


@dataclass(frozen=True)
class Logprob:
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, taken from the prefix cache
    completion_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    memory_tokens: int = 0  # of the cached ones, brought up from host memory
    disk_tokens: int = 0  # of the cached ones, brought up from the disk


@dataclass(frozen=True)
class Delta:
    """What one step added to one choice of one request. The last has `finish` set, and the first and the last have
    `usage`, so far."""

    tokens: list[int]
    index: int = 0  # which of n
    logprobs: list[Logprob] | None = None
    finish: FinishReason | None = None
    stop_match: str | None = None  # the stop string that ended it
    # With stop strings: how many bytes of the choice's whole text, so far, may be shown. None: all of them.
    visible_bytes: int | None = None
    error: str | None = None
    usage: Usage | None = None
    prompt_logprobs: list[Logprob] | None = None  # of the next tokens of the prompt, in order; in the first choice only
    reasoning_cut: bool = False  # the request's limit has ended the reasoning, in this delta or before


Output = tuple[str, Delta]  # request id, what one choice gained


@dataclass(frozen=True)
class SourceInfo:
    model: str
    max_context: int
    vocab: int
    eos_tokens: tuple[int, ...]
    details: dict[str, Any] = field(default_factory=dict)  # plan, gates, memory: for /version and `env`


# Upper ends of the buckets of queue time, in seconds; one more bucket holds the rest.
QUEUE_BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)


@dataclass(frozen=True)
class EngineStats:
    running: int = 0
    waiting: int = 0
    kv_pages_total: int = 0
    kv_pages_used: int = 0
    kv_pages_cached: int = 0
    prefix_hit_tokens: int = 0
    prefix_query_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    queue_seconds: float = 0.0  # from arrival to first being scheduled, summed over choices
    queue_counts: tuple[int, ...] = (0,) * (len(QUEUE_BUCKETS) + 1)  # choices by bucket of that time
    prefix_memory_tokens: int = 0  # brought up into pages from host memory
    prefix_disk_tokens: int = 0  # brought up into pages from the disk
    prefix_memory_bytes: int = 0  # held in host memory
    prefix_disk_bytes: int = 0  # in the prefix folder, other models' included
    prefix_skipped_pages: int = 0  # not stored, for want of time
    prefix_damaged: int = 0  # pages and segments on the disk that could not be read
    kv_checked_values: int = 0  # of an fp8 cache, in pages that were filled
    kv_saturated_values: int = 0  # of these, at the end of the format's range


@dataclass(frozen=True)
class SourceHealth:
    """The health of a source. Nothing is wrong while `trouble` is empty."""

    trouble: str = ""  # why it accepts no request now, as a part of a sentence
    gone: bool = False  # for good: the server should exit
    since_step: float | None = None  # seconds since its last step; None while it has no requests


class TokenSource(Protocol):
    """An engine as the server sees it."""

    @property
    def info(self) -> SourceInfo: ...

    @property
    def ready(self) -> bool:
        """False while loading, draining or restarting."""
        ...

    def stream(self, request: Request) -> AsyncIterator[Delta]:
        """Deltas of all n choices, interleaved, until each has finished. Closing the iterator cancels the request.

        Raises RequestError before the first delta if the request can never be served, CapacityError if not now.
        """
        ...

    def stats(self) -> EngineStats: ...

    def health(self) -> SourceHealth: ...

    async def close(self) -> None: ...
