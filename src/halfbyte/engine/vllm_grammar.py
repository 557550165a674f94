"""Structured output and limits on reasoning inside vLLM: a logits processor masks its rows in the process that samples.

The grammars are those of halfbyte's own engine, compiled again where they are used. `vllm_core.py` has tried each of
them before, and checks every complete answer against its grammar once more. A grammar that fails or becomes too costly
allows only end tokens from then on, and that last check reports it. Unlike in halfbyte's own engine, the step waits
while a mask is computed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from halfbyte.engine.grammar import Bits, GrammarCompiler, GrammarState, GrammarVocabulary, token_bits, too_costly
from halfbyte.engine.grammar_work import Budget
from halfbyte.engine.reasoning import ReasoningState
from halfbyte.engine.request import Constraint, ReasoningLimit, Request
from halfbyte.model import load
from halfbyte.vllm_plugin import compat_engine
from halfbyte.vllm_plugin.compat_engine import Follower

log = logging.getLogger("vllm.halfbyte")

PROCESSOR = f"{__name__}:Processor"


def __getattr__(name: str) -> Any:
    """Make the processor when vLLM imports it by name, in its own processes."""
    if name == "Processor":
        return compat_engine.processor_class(Grammars)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def request_record(request: Request, ends: Sequence[int]) -> dict[str, Any] | None:
    """What a request's masks need, as a plain dict to send with it. `ends`: the model's end tokens."""
    record: dict[str, Any] = {}
    if request.constraint is not None:
        record = constraint_record(request.constraint, ends)
    if request.reasoning is not None:
        record["reasoning"] = [request.reasoning.tokens, [list(c) for c in request.reasoning.closings]]
    return record or None


def constraint_record(constraint: Constraint, ends: Sequence[int]) -> dict[str, Any]:
    """A constraint as a plain dict to send with a request. `ends`: the model's end tokens."""
    return {
        "kind": constraint.kind, "source": constraint.source, "triggers": [list(t) for t in constraint.triggers],
        "end_tokens": list(constraint.end_tokens), "ends": list(ends),
    }  # fmt: skip


class Grammars:
    """The grammars of one process."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._compiler: GrammarCompiler | None = None
        self._vocabulary: GrammarVocabulary | None = None

    def follow(self, extra: Mapping[str, Any], prompt: Sequence[int]) -> Follower:
        if self._vocabulary is None:  # only when needed
            self._vocabulary = load.tokenizer_of(load.resolve_model(self._model))
        grammar = self._grammar(self._vocabulary, extra, prompt) if "kind" in extra else None
        if "reasoning" not in extra:
            assert grammar is not None
            return grammar
        tokens, closings = extra["reasoning"]
        limit = ReasoningLimit(tokens, tuple(tuple(c) for c in closings))
        return FollowedReasoning(limit, self._vocabulary, prompt, grammar)

    def _grammar(self, vocabulary: GrammarVocabulary, extra: Mapping[str, Any], prompt: Sequence[int]) -> Followed:
        constraint = Constraint(
            extra["kind"], extra["source"], tuple(tuple(t) for t in extra["triggers"]), tuple(extra["end_tokens"])
        )
        if self._compiler is None:
            self._compiler = GrammarCompiler(vocabulary, extra["ends"])
        return Followed(constraint, self._compiler, prompt)


class FollowedReasoning:
    """The reasoning of one choice, and the grammar of its answer, which sleeps meanwhile."""

    def __init__(
        self, limit: ReasoningLimit, vocabulary: GrammarVocabulary, prompt: Sequence[int], grammar: Followed | None
    ) -> None:
        self._state = ReasoningState(limit, vocabulary, prompt, vocabulary.vocab_size)
        self._grammar = grammar
        self._seen = 0

    def allowed(self, tokens: Sequence[int]) -> Bits | None:
        for token in tokens[self._seen :]:
            self._state.observe(token)
        self._seen = len(tokens)
        mask = self._state.mask()
        return self._grammar.allowed(tokens) if mask is None and self._grammar is not None else mask


class Followed:
    """The position of one choice in its grammar, brought up to date when its mask is needed."""

    def __init__(self, constraint: Constraint, compiler: GrammarCompiler, prompt: Sequence[int]) -> None:
        self._budget = Budget(constraint)
        self._tail: list[int] = []  # the tokens that may complete a trigger
        self._seen = 0
        self._state: GrammarState | None = None  # None: it failed
        width = -(-compiler.vocabulary.vocab_size // 32)
        self._ends = token_bits(constraint.end_tokens or compiler.end_tokens, width)
        try:
            self._state = compiler.compile(constraint, prompt)
            self._tail = list(prompt[-self._state.longest_trigger :])
        except BaseException as e:  # native code panics past Exception
            self._fail(e)

    def allowed(self, tokens: Sequence[int]) -> Bits | None:
        if self._state is None:
            return self._ends
        began = time.thread_time()
        try:
            for token in tokens[self._seen :]:
                self._tail = [*self._tail, token][-self._state.longest_trigger :]
                self._state.observe(self._tail)
            self._seen = self._budget.tokens = len(tokens)
            if self._budget.exceeded:
                raise too_costly(self._budget.constraint.kind)
            return self._state.mask()
        except BaseException as e:
            self._fail(e)
            return self._ends
        finally:
            self._budget.spent += time.thread_time() - began

    def _fail(self, why: BaseException) -> None:
        if isinstance(why, KeyboardInterrupt | SystemExit):
            raise why
        log.error("a grammar failed: %s", why)
        self._state = None
