"""Structured output inside vLLM: its rows are held to our grammars by a logits processor, in whichever process samples.

The same grammars as our own engine's, compiled again where they are used; `vllm_core.py` has tried each before, and
holds every answer against its grammar once more when it ends. A grammar that fails or grows too costly under way allows
nothing but an end, and that second look says so. Unlike our own engine's, a mask is computed while the step waits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from halfbyte.engine.grammar import Bits, GrammarCompiler, GrammarState, too_costly
from halfbyte.engine.grammar_work import Budget
from halfbyte.engine.request import Constraint
from halfbyte.model import load
from halfbyte.vllm_plugin import compat_engine

log = logging.getLogger("vllm.halfbyte")

PROCESSOR = f"{__name__}:Processor"


def __getattr__(name: str) -> Any:
    """vLLM asks for the processor by name, in processes where it is imported."""
    if name == "Processor":
        return compat_engine.processor_class(Grammars)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def told(constraint: Constraint, ends: Sequence[int]) -> dict[str, Any]:
    """A constraint as it travels with a request. `ends`: the model's end tokens."""
    return {
        "kind": constraint.kind, "source": constraint.source, "triggers": [list(t) for t in constraint.triggers],
        "end_tokens": list(constraint.end_tokens), "ends": list(ends),
    }  # fmt: skip


class Grammars:
    """One process's."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._compiler: GrammarCompiler | None = None

    def follow(self, extra: Mapping[str, Any], prompt: Sequence[int]) -> Followed:
        constraint = Constraint(
            extra["kind"], extra["source"], tuple(tuple(t) for t in extra["triggers"]), tuple(extra["end_tokens"])
        )
        if self._compiler is None:  # only if somebody asks
            self._compiler = GrammarCompiler(load.tokenizer_of(load.resolve_model(self._model)), extra["ends"])
        return Followed(constraint, self._compiler, prompt)


class Followed:
    """One choice's place in its grammar, brought up to date when its mask is asked for."""

    def __init__(self, constraint: Constraint, compiler: GrammarCompiler, prompt: Sequence[int]) -> None:
        self._budget = Budget(constraint)
        self._tail: list[int] = []  # what a trigger may end with
        self._seen = 0
        self._state: GrammarState | None = None  # None: it failed
        ends = np.zeros(-(-compiler.vocabulary.vocab_size // 32) * 32, np.uint8)
        ends[list(constraint.end_tokens or compiler.end_tokens)] = 1
        self._ends: Bits = np.packbits(ends, bitorder="little").view(np.int32)
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
