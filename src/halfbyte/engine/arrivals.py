"""Requests before they are queued: validate them, have their grammars compiled and make their sequences.

A refused request leaves nothing behind. The scheduler does not know a request that waits here for its grammar.
"""

from __future__ import annotations

import math
import secrets
from concurrent.futures import Future
from dataclasses import dataclass, replace
from hashlib import blake2b

from halfbyte.engine.config import EngineConfig
from halfbyte.engine.grammar import GrammarVocabulary
from halfbyte.engine.grammar_work import GrammarPace, GrammarWork
from halfbyte.engine.reasoning import ReasoningState, check_limit
from halfbyte.engine.request import Request, SamplingParams
from halfbyte.engine.sampling.row import RowSampler, check_params
from halfbyte.engine.scheduler import Scheduler
from halfbyte.engine.sequence import Sequence
from halfbyte.engine.stops import ByteStopMatcher
from halfbyte.errors import QueueFullError, RequestError


@dataclass(slots=True)
class Group:
    """The choices of one request."""

    request: Request
    seqs: list[Sequence]
    open: int  # choices that have not ended
    deadline: float | None = None


@dataclass(slots=True)
class Preparing:
    """A request whose grammar is being compiled."""

    request: Request
    grammar: Future[GrammarPace]
    deadline: float | None


class Arrivals:
    def __init__(self, config: EngineConfig, scheduler: Scheduler, vocabulary: GrammarVocabulary | None) -> None:
        self.config, self.scheduler, self.vocabulary = config, scheduler, vocabulary
        self.grammars = None if vocabulary is None else GrammarWork(vocabulary, config.eos_tokens)
        self.preparing: dict[str, Preparing] = {}

    def check(self, request: Request) -> None:
        """Raise RequestError if the request can never be served, whatever its grammar is."""
        params, config = request.sampling, self.config
        if request.timeout is not None and not 0 < request.timeout < math.inf:
            raise RequestError(f"the timeout is {request.timeout}; give seconds above 0, or none.")
        if not request.prompt:
            raise RequestError("the prompt is empty; give at least one token.")
        outside = [t for t in request.prompt if not 0 <= t < config.vocab]
        if outside:
            raise RequestError(f"the prompt has token {outside[0]}, but the vocabulary has {config.vocab}.")
        check_params(params, config.vocab)
        self.scheduler.max_length_of(request)
        if params.n > config.max_waiting:
            raise RequestError(f"n is {params.n}, but at most {config.max_waiting} sequences may wait.")
        if (params.stop or request.constraint or request.reasoning) and self.vocabulary is None:
            raise RequestError(
                "stop strings, grammars and limits on reasoning need the model's vocabulary, which this engine lacks."
            )
        if request.reasoning is not None:
            assert self.vocabulary is not None
            check_limit(request.reasoning, self.vocabulary, config.vocab)

    def take(self, request: Request, deadline: float | None) -> Group | None:
        """Make the sequences of a request; None if its grammar has to be compiled first (see `prepared`)."""
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
        """Remove and return the requests whose grammar has been compiled or refused."""
        done = [request for request in self.preparing.values() if request.grammar.done()]
        for preparing in done:
            del self.preparing[preparing.request.id]
        return done

    def group_of(self, request: Request, grammar: GrammarPace | None, deadline: float | None) -> Group:
        params, config = request.sampling, self.config
        max_length = self.scheduler.max_length_of(request)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        salt = blake2b(request.scope.encode(), digest_size=16).digest() if request.scope else b""
        if not config.prefix_cache:
            salt = request.id.encode() + secrets.token_bytes(8)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else set(config.eos_tokens))
        limit = request.reasoning
        if limit is not None and any(not stop_ids.isdisjoint(c) for c in limit.closings):
            limit = replace(limit, tokens=max(limit.tokens, params.min_tokens))  # its end would be the answer's
        seqs = []
        for index in range(params.n):
            seq = Sequence(request, index, max_length, salt=salt)
            seq.stop_ids = stop_ids
            seq.sampler = RowSampler(params, index, seq.num_prompt_tokens, seed, stop_ids)
            if params.prompt_logprobs is not None and index == 0:
                scoring = SamplingParams(temperature=0.0, logprobs=params.prompt_logprobs)
                seq.scorer = RowSampler(scoring, index, seq.num_prompt_tokens, seed, stop_ids)
                seq.first_unscored = min(params.prompt_logprobs_from, seq.num_prompt_tokens)
            if params.stop:
                assert self.vocabulary is not None
                seq.stop_matcher = ByteStopMatcher(params.stop, self.vocabulary.token_bytes)
            seq.may_run_ahead = not seq.sampler.penalised
            if grammar is not None:
                seq.grammar = grammar.copy()
            if limit is not None:
                assert self.vocabulary is not None
                seq.reasoning = ReasoningState(limit, self.vocabulary, request.prompt, config.vocab)
            seq.update_run_ahead()
            seqs.append(seq)
        return Group(request, seqs, len(seqs), deadline)
