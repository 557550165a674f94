"""Sequence: one choice of one request while the engine works on it. Plain values and the state machines attached to it.

Who sets what: the scheduler owns `state`, `num_scheduled_tokens`, `num_steps_in_flight`, `slot`, `client` and
`tables`; the engine's commit appends to `tokens` and sets `finish_reason`; a proposer sets `draft` between a commit and
the next schedule.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from halfbyte.engine.request import FinishReason, Request, SamplingParams
from halfbyte.kv.pages import Tables

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from halfbyte.engine.clients import Client
    from halfbyte.engine.grammar_work import GrammarPace
    from halfbyte.engine.reasoning import ReasoningState
    from halfbyte.engine.sampling.row import RowSampler
    from halfbyte.engine.speculative.controller import Pace
    from halfbyte.engine.stops import ByteStopMatcher


class State(IntEnum):
    WAITING = 0  # holds nothing: new, or preempted and to be recomputed
    RUNNING = 1  # holds a slot and pages
    FINISHED = 2  # will not be scheduled again; may still hold pages that a launched step writes


class Sequence:
    __slots__ = (
        "admission", "arrival_time", "blocked_at", "client", "draft", "finish_reason", "first_unscored", "grammar",
        "index", "leader", "max_length", "may_run_ahead", "num_accepted_tokens", "num_cached_tokens",
        "num_disk_tokens", "num_drafted_tokens", "num_memory_tokens", "num_pending_tokens", "num_prompt_tokens",
        "num_scheduled_tokens", "num_steps_in_flight", "order", "pace", "page_capacity", "params", "prefilled",
        "proposal", "reasoning", "request", "runs_ahead", "sampler", "scorer", "slot", "state", "stop_ids",
        "stop_matcher", "tables", "tokens", "waits_for_grammar", "waits_for_pages",
    )  # fmt: skip

    def __init__(self, request: Request, index: int, max_length: int, *, salt: bytes = b"") -> None:
        self.request = request
        self.index = index
        self.params: SamplingParams = request.sampling
        self.tokens: list[int] = list(request.prompt)  # prompt and committed output
        self.num_prompt_tokens = len(request.prompt)
        self.max_length = max_length  # tokens, prompt included, at which it ends
        self.tables = Tables(salt=salt)
        self.state = State.WAITING
        self.client: Client  # set when it is queued
        self.order = 0  # of arrival; of one client's sequences the lower goes first and is preempted last
        self.arrival_time: float | None = None  # when it was submitted; None once it has been scheduled
        self.num_scheduled_tokens = 0  # tokens whose keys and values are computed or in flight
        self.num_pending_tokens = 0  # sampled by a launched step whose result has not been read yet
        self.num_steps_in_flight = 0  # launched steps that compute this sequence
        self.slot = -1
        self.admission = 0  # a new number each time it gets a slot
        self.blocked_at: int | None = None  # the last admission before it began to wait for pages
        self.page_capacity = 0  # tokens that fit in the pages it holds
        self.leader: Sequence | None = None  # the choice of the same request whose prompt pages this one waits for
        self.prefilled = False
        self.first_unscored = self.num_prompt_tokens  # first prompt token whose requested logprob is still missing
        self.draft: list[int] = []
        self.num_cached_tokens = 0  # prompt tokens taken from the prefix cache when first admitted
        self.num_memory_tokens = 0  # of those, read from host memory before
        self.num_disk_tokens = 0  # of those, read from the disk before
        self.num_drafted_tokens = 0
        self.num_accepted_tokens = 0
        self.finish_reason: FinishReason | None = None
        # Attached by the engine; None where a request does not use it.
        self.sampler: RowSampler | None = None
        self.scorer: RowSampler | None = None  # samples nothing: computes the logprobs of the prompt's own tokens
        self.stop_matcher: ByteStopMatcher | None = None
        self.grammar: GrammarPace | None = None
        self.reasoning: ReasoningState | None = None
        self.waits_for_pages = False  # its prefix is being read from a lower tier (`prefix_tiers.py`)
        self.waits_for_grammar = False  # its mask is not ready, so it sits the step out
        self.pace: Pace | None = None
        self.stop_ids: frozenset[int] = frozenset()
        self.proposal: list[NDArray[np.float64]] | None = None  # the distributions `draft` was drawn from
        # True if the next token can be sampled without the host having seen the last one: never with penalties, not
        # while a proposer is trying, and not while a grammar is awake or about to be, or reasoning is near its limit.
        self.may_run_ahead = True
        self.runs_ahead = True

    def update_run_ahead(self) -> None:
        resting = self.pace is None or self.pace.resting
        asleep = self.grammar is None or self.grammar.allows_run_ahead(self.tokens)
        far = self.reasoning is None or self.reasoning.allows_run_ahead()
        self.runs_ahead = self.may_run_ahead and resting and asleep and far

    def count_restored(self, tokens: int, *, from_disk: bool) -> None:
        """Count tokens of its prefix that were read from a lower tier, until it is admitted for the first time."""
        if self.admission == 0 and from_disk:
            self.num_disk_tokens += tokens
        elif self.admission == 0:
            self.num_memory_tokens += tokens

    @property
    def num_generated_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    def unscored(self, start: int, end: int) -> range:
        """Positions among start..end-1 whose next token is a prompt token that still needs its logprob."""
        return range(max(start, self.first_unscored - 1), min(end, self.num_prompt_tokens - 1))

    def __repr__(self) -> str:
        return (
            f"<{self.request.id}/{self.index} {self.state.name} {len(self.tokens)}+{self.num_pending_tokens} tokens, "
            f"{self.num_scheduled_tokens} scheduled, {self.num_steps_in_flight} steps in flight>"
        )
