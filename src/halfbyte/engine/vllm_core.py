"""vLLM's engine behind the calls of our own core, so that one loop, one process and one server serve both.

vLLM schedules, keeps pages and samples; stop strings, deadlines and end tokens are matched here, as our own core does.
A request that vLLM cannot serve as written is refused before it begins. Structured output follows our own grammars
(`vllm_grammar.py`), and an answer that left its grammar is an error, not an answer. Reaches vLLM through
`halfbyte.vllm_plugin.compat` and `compat_engine` only. Does not run unless our plugin is active in vLLM and has run a
kernel.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from halfbyte import gates as gates_
from halfbyte.engine import vllm_grammar
from halfbyte.engine.grammar import GrammarState
from halfbyte.engine.grammar_work import GrammarPace, GrammarWork
from halfbyte.engine.request import (
    Constraint,
    Delta,
    EngineStats,
    FinishReason,
    Logprob,
    Output,
    Request,
    SourceInfo,
    Usage,
)
from halfbyte.engine.sampling.row import check_params
from halfbyte.engine.stops import StopMatcher
from halfbyte.errors import ContextError, EngineDiedError, HalfbyteError, PlanError, QueueFullError, RequestError
from halfbyte.model import load
from halfbyte.vllm_plugin import compat
from halfbyte.vllm_plugin.compat_engine import Gained, VllmEngine
from halfbyte.vllm_plugin.launch import PLUGIN

log = logging.getLogger("halfbyte")

FACTORY = "halfbyte.engine.vllm_core:build"
MAX_WAITING = 4096
FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "cancelled"}


@dataclass(frozen=True)
class VllmOptions:
    """Everything such an engine is made from; travels into its process."""

    model: str  # a folder
    label: str
    words: tuple[str, ...]  # for vLLM, as `launch.py` made them
    gates: Mapping[str, str]
    environment: Mapping[str, str] = field(default_factory=dict)
    record: str | None = None  # where the plugin writes what ran


def build(argument: Any, report: Any) -> tuple[VllmCore, SourceInfo]:
    """The core, once vLLM has loaded the model and our kernels have run in it."""
    options = msgspec.convert(argument, VllmOptions)
    gates_.export({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **options.environment})
    report("starting vLLM")
    engine = VllmEngine(options.model, options.words, vllm_grammar.PROCESSOR)
    vocabulary = load.tokenizer_of(load.resolve_model(options.model))
    core = VllmCore(engine, vocabulary)
    report("proving that the plugin runs")
    plan = core.prove(options.record)
    core.prove_masks()
    details = {"engine": f"vllm {compat.vllm_version()}", "gates": dict(options.gates), "plan": plan,
               "max_seqs": engine.max_seqs}  # fmt: skip
    return core, SourceInfo(options.label, engine.max_context, engine.vocab, core.eos, details)


@dataclass
class _Choice:
    stops: StopMatcher | None
    grammar: GrammarState | None = None  # of a constrained request: at its start
    tokens: list[int] = field(default_factory=list)  # of a constrained request
    generated: int = 0
    ended: bool = False


@dataclass
class _Open:
    request: Request
    choices: list[_Choice]
    deadline: float | None
    cached: int = 0

    @property
    def left(self) -> int:
        return sum(not choice.ended for choice in self.choices)


@dataclass
class _Preparing:
    request: Request
    grammar: Future[GrammarPace]
    deadline: float | None


class VllmCore:
    def __init__(self, engine: VllmEngine, vocabulary: Any) -> None:
        self.engine, self.vocabulary = engine, vocabulary
        tokens = (*engine.eos, *(t for t in vocabulary.eos_tokens if t < engine.vocab))
        self.eos: tuple[int, ...] = tuple(dict.fromkeys(tokens))
        self.grammars = GrammarWork(vocabulary, self.eos)
        self.working = False
        self.unmasked = "" if engine.masks else "a drafting model runs"  # why there is no structured output
        self._open: dict[str, _Open] = {}
        self._preparing: dict[str, _Preparing] = {}  # requests whose grammar is being compiled
        self._refusals: list[tuple[str, HalfbyteError]] = []
        self._outputs: list[Output] = []
        self._steps = self._generated = self._prompt = self._cached = 0

    # ---- requests -----------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._open or self._preparing or self._outputs) or self.engine.has_work

    @property
    def waits_for_grammars(self) -> bool:
        return bool(self._preparing)

    def submit(self, request: Request) -> None:
        params, engine = request.sampling, self.engine
        if not request.prompt:
            raise RequestError("the prompt is empty; give at least one token.")
        outside = [t for t in request.prompt if not 0 <= t < engine.vocab]
        if outside:
            raise RequestError(f"the prompt has token {outside[0]}, but the vocabulary has {engine.vocab}.")
        if request.id in self._open or request.id in self._preparing:
            raise RequestError(f"a request with the id {request.id!r} is already running; ids must differ.")
        check_params(params, engine.vocab)
        if request.constraint is not None and self.unmasked:
            raise RequestError(
                f"structured output is not served by this vLLM ({self.unmasked}); leave response_format and forced "
                "tools out, or use --engine halfbyte."
            )
        if params.prompt_logprobs is not None:
            raise RequestError(
                "logprobs of the prompt are not served with --engine vllm yet; leave out echo or logprobs, or use "
                "--engine halfbyte."
            )
        room = engine.max_context - len(request.prompt)
        if room < 1 or (params.max_tokens or 0) > room:
            wanted = f" and {params.max_tokens} to generate" if params.max_tokens else ""
            raise ContextError(
                f"the prompt has {len(request.prompt)} tokens{wanted}, but the context is {engine.max_context}; "
                "shorten it, or serve with a larger --max-context."
            )
        if len(self._open) + len(self._preparing) >= MAX_WAITING:
            raise QueueFullError(f"{MAX_WAITING} requests wait already; try again later.")
        deadline = None if request.timeout is None else time.monotonic() + request.timeout
        grammar = None
        if request.constraint is not None:
            prepared = self.grammars.prepare(request.constraint, request.prompt)
            if not prepared.done():
                self._preparing[request.id] = _Preparing(request, prepared, deadline)
                return
            grammar = prepared.result().state
        self._begin(request, grammar, deadline)

    def _begin(self, request: Request, grammar: GrammarState | None, deadline: float | None) -> None:
        params, room = request.sampling, self.engine.max_context - len(request.prompt)
        stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.eos))
        extra = None if request.constraint is None else vllm_grammar.told(request.constraint, self.eos)
        self.engine.add(
            request.id, list(request.prompt), n=params.n, temperature=params.temperature, top_k=params.top_k,
            top_p=params.top_p, min_p=params.min_p, repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty, frequency_penalty=params.frequency_penalty,
            logit_bias=dict(params.logit_bias) or None, logprobs=params.logprobs, seed=params.seed,
            max_tokens=params.max_tokens or room, min_tokens=min(params.min_tokens, params.max_tokens or room),
            stop_token_ids=sorted(stop_ids), ignore_eos=True, extra=extra,
        )  # fmt: skip
        choices = [_Choice(self._matcher(request), grammar) for _ in range(params.n)]
        self._open[request.id] = _Open(request, choices, deadline)
        self._prompt += len(request.prompt)

    def _begin_prepared(self) -> None:
        """Those whose grammar is there; those whose grammar was refused are told."""
        for id, each in [(id, p) for id, p in self._preparing.items() if p.grammar.done()]:
            del self._preparing[id]
            try:
                self._begin(each.request, each.grammar.result().state, each.deadline)
            except HalfbyteError as e:
                self._refusals.append((id, e))
        if self._preparing and not self.engine.has_work:  # not longer than a newcomer would notice
            wait([p.grammar for p in self._preparing.values()], 0.01, FIRST_COMPLETED)

    def _matcher(self, request: Request) -> StopMatcher | None:
        stop = request.sampling.stop
        return StopMatcher(stop, self.vocabulary.token_bytes) if stop else None

    def cancel(self, id: str, reason: FinishReason = "cancelled", error: str | None = None) -> bool:
        if (each := self._preparing.pop(id, None)) is not None:
            each.grammar.cancel()
            usage = Usage(len(each.request.prompt))
            for index in range(each.request.sampling.n):
                self._outputs.append((id, Delta([], index, finish=reason, error=error, usage=usage)))
            return True
        found = self._open.pop(id, None)
        if found is None:
            return False
        self.engine.abort(id)
        for index, choice in enumerate(found.choices):
            if not choice.ended:
                self._outputs.append((id, self._last(found, index, [], None, reason, error)))
        return True

    # ---- one step -----------------------------------------------------------------------------

    def step(self) -> list[Output]:
        now = time.monotonic()
        waiting: dict[str, _Open | _Preparing] = {**self._open, **self._preparing}
        for id in [id for id, each in waiting.items() if each.deadline is not None and each.deadline <= now]:
            self.cancel(id, "timeout")
        if self._preparing:
            self._begin_prepared()
        self.working = True
        try:
            gained = self.engine.step() if self.engine.has_work else []
        except Exception as e:  # vLLM gives an engine up as a whole
            raise EngineDiedError(f"vLLM's engine died of {type(e).__name__}: {str(e)[:300]}.") from e
        finally:
            self.working = False
        self._steps += 1
        for each in gained:
            self._take(each)
        if not gained and not self.engine.has_work:
            for id in list(self._open):  # vLLM knows nothing of it any more: nobody may wait for it
                self.cancel(id, "error", "vLLM dropped this request.")
        outputs, self._outputs = self._outputs, []
        return outputs

    def _take(self, gained: Gained) -> None:
        found = self._open.get(gained.id)
        if found is None or found.choices[gained.index].ended:
            return
        choice, tokens = found.choices[gained.index], gained.tokens
        if gained.cached and not found.cached:
            found.cached = gained.cached
            self._cached += gained.cached
        finish = FINISH.get(gained.finish, "error") if gained.finish else None
        stopped = False
        if choice.stops is not None:
            for i, token in enumerate(tokens):
                ends = finish == "stop" and i == len(tokens) - 1  # an end token matches nothing
                armed = not ends and choice.generated + i + 1 > found.request.sampling.min_tokens
                if choice.stops.add(token, armed=armed):
                    tokens, finish, stopped = tokens[: i + 1], "stop", True
                    break
        choice.generated += len(tokens)
        self._generated += len(tokens)
        error = None
        if choice.grammar is not None:
            choice.tokens += tokens
            if finish == "stop" and not stopped:
                error = left_the_grammar(choice.grammar, found.request.prompt, choice.tokens)
                finish = finish if error is None else "error"
        logprobs = None
        if gained.logprobs is not None and found.request.sampling.logprobs is not None:
            top = found.request.sampling.logprobs
            logprobs = [
                Logprob(entries[0][0], entries[0][1], tuple(entries[1 : 1 + top]))
                for entries in gained.logprobs[: len(tokens)]
            ]
        if finish is None:
            if tokens:
                visible = None if choice.stops is None else choice.stops.visible
                self._outputs.append((gained.id, Delta(tokens, gained.index, logprobs, visible_bytes=visible)))
            return
        self._outputs.append((gained.id, self._last(found, gained.index, tokens, logprobs, finish, error)))
        if found.left == 0:
            del self._open[gained.id]
            if stopped:
                self.engine.abort(gained.id)

    def _last(
        self, found: _Open, index: int, tokens: list[int], logprobs: list[Logprob] | None, finish: FinishReason,
        error: str | None = None,
    ) -> Delta:  # fmt: skip
        choice = found.choices[index]
        choice.ended = True
        if choice.stops is not None:
            choice.stops.finish()
        return Delta(
            tokens, index, logprobs, finish, None if choice.stops is None else choice.stops.matched,
            None if choice.stops is None else choice.stops.visible, error,
            Usage(len(found.request.prompt), min(found.cached, len(found.request.prompt)), choice.generated),
        )  # fmt: skip

    def refusals(self) -> list[tuple[str, HalfbyteError]]:
        refused, self._refusals = self._refusals, []
        return refused

    def stats(self) -> EngineStats:
        load = self.engine.load()
        return EngineStats(
            running=load.running, waiting=load.waiting + len(self._preparing), kv_pages_total=load.pages,
            kv_pages_used=load.pages_used, prefix_hit_tokens=self._cached, prefix_query_tokens=self._prompt,
            steps=self._steps, generated_tokens=self._generated, prompt_tokens=self._prompt,
        )  # fmt: skip

    def close(self) -> None:
        self.grammars.close()
        self.engine.close()

    # ---- proof --------------------------------------------------------------------------------

    def prove(self, record: str | None) -> dict[str, list[str]]:
        """Two tokens through the model; then the plugin must say which kernels of ours ran, and that none is missing.

        vLLM only logs a plugin that cannot be loaded, so nothing is believed before."""
        self.engine.add("halfbyte-proof", [0], max_tokens=2, temperature=0.0, ignore_eos=True)
        while self.engine.has_work:
            self.engine.step()
        here = compat.active()
        report: dict[str, Any] | None = here.report() if here is not None else None
        if report is None and record is not None and Path(record).exists():  # its workers are other processes
            report = json.loads(Path(record).read_text(encoding="utf-8"))
        if report is None:
            raise PlanError(
                f"vLLM runs without halfbyte's plugin: it was not loaded. Install halfbyte beside vLLM, and let "
                f"VLLM_PLUGINS name {PLUGIN}."
            )
        if report["differences"]:
            raise PlanError("inside vLLM " + "; ".join(report["differences"]) + ".")
        log.info("inside vLLM: %s", ", ".join(dict.fromkeys(report["plan"]["decode"])))
        plan: dict[str, list[str]] = report["plan"]
        return plan

    def prove_masks(self) -> None:
        """Two grammars that have no value in common, and the same prompt: answers that follow both were held to them.
        Without that structured output is refused, and the rest is served."""
        if self.unmasked:
            return
        for kind in ("[0-9]{4}", "[A-Z]{4}"):
            constraint = Constraint("regex", kind)
            state = self.grammars.compiler.compile(constraint, [0])
            extra = vllm_grammar.told(constraint, self.eos)
            self.engine.add(
                "halfbyte-masks", [0], max_tokens=8, temperature=0.0, ignore_eos=True, stop_token_ids=list(self.eos),
                extra=extra,
            )  # fmt: skip
            tokens: list[int] = []
            while self.engine.has_work:
                tokens += [token for gained in self.engine.step() for token in gained.tokens]
            if left_the_grammar(state, [0], tokens) is not None:
                self.unmasked = "its logits cannot be held to a grammar"
                log.warning("inside vLLM logits cannot be masked: structured output is refused")
                return


def left_the_grammar(fresh: GrammarState, prompt: Sequence[int], tokens: Sequence[int]) -> str | None:
    """Why an answer that has ended is none of its grammar's; None: it is one."""
    state, tail = fresh.copy(), list(prompt[-fresh.longest_trigger :])
    try:
        for token in tokens:
            tail = [*tail, token][-fresh.longest_trigger :]
            state.observe(tail)
    except HalfbyteError as e:
        return f"the answer left the grammar of this request: {e}"
    return None
