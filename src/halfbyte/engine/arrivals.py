"""Requests before they are queued: checked, their grammars compiled beside the steps, made into sequences.

What is refused leaves nothing behind. The scheduler has not seen yet what waits here for its grammar.
"""

from __future__ import annotations

import math
import secrets
from concurrent.futures import Future
from dataclasses import dataclass

from halfbyte.engine.config import EngineConfig
from halfbyte.engine.grammar import Vocabulary
from halfbyte.engine.grammar_work import GrammarPace, GrammarWork
from halfbyte.engine.request import Request, SamplingParams
from halfbyte.engine.sampling.row import RowSampler, check_params
from halfbyte.engine.scheduler import Scheduler
from halfbyte.engine.sequence import Sequence
from halfbyte.engine.stops import StopMatcher
from halfbyte.errors import QueueFullError, RequestError


@dataclass(slots=True)
class Group:
    """The choices of one request."""

    request: Request
    seqs: list[Sequence]
    open: int  # of them that have not ended
    deadline: float | None = None


@dataclass(slots=True)
class Preparing:
    """A request whose grammar is being compiled."""

    request: Request
    grammar: Future[GrammarPace]
    deadline: float | None


class Arrivals:
    def __init__(self, config: EngineConfig, scheduler: Scheduler, vocabulary: Vocabulary | None) -> None:
        self.config, self.scheduler, self.vocabulary = config, scheduler, vocabulary
        self.grammars = None if vocabulary is None else GrammarWork(vocabulary, config.eos_tokens)
        self.preparing: dict[str, Preparing] = {}

    def check(self, request: Request) -> None:
        """Raises RequestError if it can never be served, whatever its grammar is."""
        params, config = request.sampling, self.config
        if request.timeout is not None and not 0 < request.timeout < math.inf:
            raise RequestError(f"the timeout is {request.timeout}; give seconds above 0, or none.")
        if not request.prompt:
            raise RequestError("the prompt is empty; give at least one token.")
        outside = [t for t in request.prompt if not 0 <= t < config.vocab]
        if outside:
            raise RequestError(f"the prompt has token {outside[0]}, but the vocabulary has {config.vocab}.")
        check_params(params, config.vocab)
        self.scheduler.limit_of(request)
        if params.n > config.max_waiting:
            raise RequestError(f"n is {params.n}, but at most {config.max_waiting} sequences may wait.")
        if (params.stop or request.constraint) and self.vocabulary is None:
            raise RequestError("stop strings and grammars need the model's vocabulary, which this engine has not.")

    def take(self, request: Request, deadline: float | None) -> Group | None:
        """Its sequences, or None: they come with `prepared`, when its grammar is there."""
        grammar = None
        if request.constraint is not None:
            assert self.grammars is not None
            if len(self.preparing) >= self.config.max_waiting:
                raise QueueFullError(f"{len(self.preparing)} grammars wait to be compiled; try again later.")
            prepared = self.grammars.prepare(request.constraint, request.prompt)
            if not prepared.done():
                self.preparing[request.id] = Preparing(request, prepared, deadline)
                return None
            grammar = prepared.result()
        return self.group_of(request, grammar, deadline)

    def prepared(self) -> list[Preparing]:
        """Those whose grammar is there, or refused; they are no longer here."""
        done = [each for each in self.preparing.values() if each.grammar.done()]
        for each in done:
            del self.preparing[each.request.id]
        return done

    def group_of(self, request: Request, grammar: GrammarPace | None, deadline: float | None) -> Group:
        params, config = request.sampling, self.config
        limit = self.scheduler.limit_of(request)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        salt = b"" if config.prefix_cache else request.id.encode() + secrets.token_bytes(8)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else set(config.eos_tokens))
        seqs = []
        for index in range(params.n):
            seq = Sequence(request, index, limit, salt=salt)
            seq.stop_ids = stop_ids
            seq.sampler = RowSampler(params, index, seq.prompt, seed, stop_ids)
            if params.prompt_logprobs is not None and index == 0:
                scoring = SamplingParams(temperature=0.0, logprobs=params.prompt_logprobs)
                seq.scorer = RowSampler(scoring, index, seq.prompt, seed, stop_ids)
                seq.scored = min(params.prompt_logprobs_from, seq.prompt)
            if params.stop:
                assert self.vocabulary is not None
                seq.stops = StopMatcher(params.stop, self.vocabulary.token_bytes)
            if grammar is not None:
                seq.grammar = grammar.copy()
            seq.may_run_ahead = seq.runs_ahead = grammar is None and not seq.sampler.penalised
            seqs.append(seq)
        return Group(request, seqs, len(seqs), deadline)
