"""Sequence: one choice of one request while the engine works on it. Plain values and the state machines beside them.

Who sets what: the scheduler owns `state`, `scheduled`, `inflight`, `slot` and `tables`; the engine's commit appends
to `tokens` and sets `finish`; a proposer sets `draft` between a commit and the next schedule.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from halfbyte.engine.request import FinishReason, Request, SamplingParams
from halfbyte.kv.pages import Tables

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from halfbyte.engine.grammar_work import GrammarPace
    from halfbyte.engine.sampling.row import RowSampler
    from halfbyte.engine.speculative.controller import Pace
    from halfbyte.engine.stops import StopMatcher


class State(IntEnum):
    WAITING = 0  # holds nothing: new, or preempted and to be recomputed
    RUNNING = 1  # holds a slot and pages
    FINISHED = 2  # will not be scheduled again; may still hold pages that a launched step writes


class Sequence:
    __slots__ = (
        "accepted", "admission", "arrived", "cached", "capacity", "draft", "drafted", "finish", "grammar", "held",
        "index", "inflight", "leader", "limit", "may_run_ahead", "order", "pace", "params", "pending", "prefilled",
        "prompt", "proposal", "request", "runs_ahead", "sampler", "scheduled", "scored", "scorer", "slot", "state",
        "stop_ids", "stops", "tables", "tokens",
    )  # fmt: skip

    def __init__(self, request: Request, index: int, limit: int, *, salt: bytes = b"") -> None:
        self.request = request
        self.index = index
        self.params: SamplingParams = request.sampling
        self.tokens: list[int] = list(request.prompt)  # prompt and committed output
        self.prompt = len(request.prompt)
        self.limit = limit  # tokens, prompt included, at which it ends
        self.tables = Tables(salt=salt)
        self.state = State.WAITING
        self.order = 0  # arrival; the lower goes first and is preempted last
        self.arrived: float | None = None  # when it was submitted, until it is first scheduled
        self.scheduled = 0  # tokens whose keys and values are computed or in flight
        self.pending = 0  # tokens sampled by a launched step, not known here yet
        self.inflight = 0  # launched steps that hold this sequence
        self.slot = -1
        self.admission = 0  # differs each time it is given a slot
        self.capacity = 0  # tokens that fit in the pages held
        self.leader: Sequence | None = None  # of n choices, the one whose prompt pages the others wait for
        self.prefilled = False
        self.scored = self.prompt  # the prompt's first token whose logprob is wanted and not there yet
        self.draft: list[int] = []
        self.cached = 0  # prompt tokens taken from the prefix cache when first admitted
        self.drafted = 0
        self.accepted = 0
        self.finish: FinishReason | None = None
        # Attached by the engine; None where a request does not use it.
        self.sampler: RowSampler | None = None
        self.scorer: RowSampler | None = None  # of rows whose next token is known
        self.stops: StopMatcher | None = None
        self.grammar: GrammarPace | None = None
        self.held = False  # its grammar is not ready: it sits the step out
        self.pace: Pace | None = None
        self.stop_ids: frozenset[int] = frozenset()
        self.proposal: list[NDArray[np.float64]] | None = None  # the distributions `draft` was drawn from
        # True if the next token can be sampled without the host having seen the last one: never with grammar or
        # penalties (naturally), and not while a proposer is trying.
        self.may_run_ahead = True
        self.runs_ahead = True

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt

    def unscored(self, start: int, end: int) -> range:
        """Rows among start..end-1 whose next token is the prompt's and wants its logprob: the last of those that are
        not sampled."""
        return range(max(start, self.scored - 1), min(end, self.prompt - 1))

    def __repr__(self) -> str:
        return (
            f"<{self.request.id}/{self.index} {self.state.name} {len(self.tokens)}+{self.pending} tokens, "
            f"{self.scheduled} scheduled, {self.inflight} in flight>"
        )
