"""vLLM's engine with the interface of EngineCore, so that one loop, one process and one server serve both.

vLLM schedules, keeps pages and samples; stop strings, deadlines and end tokens are handled here, as in EngineCore. A
request that vLLM cannot serve as written is refused before it begins. Structured output uses halfbyte's grammars
(`vllm_grammar.py`); an answer that left its grammar ends with an error. Uses vLLM only through
`halfbyte.vllm_plugin.compat` and `compat_engine`. Refuses to start unless halfbyte's plugin is active in vLLM and has
run a kernel.
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
from halfbyte.engine.reasoning import ReasoningState, check_limit
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
from halfbyte.engine.stops import ByteStopMatcher
from halfbyte.errors import ContextError, EngineDiedError, HalfbyteError, PlanError, QueueFullError, RequestError
from halfbyte.model import load
from halfbyte.ops.sampling_settings import SETTINGS
from halfbyte.vllm_plugin import compat
from halfbyte.vllm_plugin.compat_engine import Gained, VllmEngine
from halfbyte.vllm_plugin.launch import PLUGIN

log = logging.getLogger("halfbyte")

FACTORY = "halfbyte.engine.vllm_core:build"
MAX_WAITING = 4096
FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "cancelled"}


@dataclass(frozen=True)
class VllmOptions:
    """The options of such an engine; sent to its process."""

    model: str  # a folder
    label: str
    arguments: tuple[str, ...]  # vLLM's command line, from `launch.py`
    gates: Mapping[str, str]
    environment: Mapping[str, str] = field(default_factory=dict)
    record: str | None = None  # file in which the plugin records the kernels that ran


def build(argument: Any, report: Any) -> tuple[VllmCore, SourceInfo]:
    """Build the core; returns once vLLM has loaded the model and halfbyte's kernels have run in it."""
    options = msgspec.convert(argument, VllmOptions)
    gates_.export({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **options.environment})
    report("starting vLLM")
    engine = VllmEngine(options.model, options.arguments, vllm_grammar.PROCESSOR)
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
    stops: ByteStopMatcher | None
    grammar: GrammarState | None = None  # at its start; None without a constraint
    reasoning: ReasoningState | None = None  # None without a limit
    tokens: list[int] = field(default_factory=list)  # only with a grammar
    generated: int = 0
    ended: bool = False

    @property
    def reasoning_cut(self) -> bool:
        return self.reasoning is not None and self.reasoning.cut


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
        self.unmasked = "" if engine.masks else "it uses a draft model"  # why there is no structured output
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
        if request.reasoning is not None:
            check_limit(request.reasoning, self.vocabulary, engine.vocab)
            if self.unmasked and request.reasoning.tokens:  # a limit of 0 is in the prompt, which begins the answer
                raise RequestError(
                    f"reasoning cannot be limited by this vLLM ({self.unmasked}); leave the limit out, or use "
                    "--engine halfbyte."
                )
        if params.prompt_logprobs is not None:
            raise RequestError(
                "logprobs of the prompt are not served with --engine vllm yet; leave out echo or logprobs, or use "
                "--engine halfbyte."
            )
        for name, setting in SETTINGS.items():
            if not setting.vllm and getattr(params, name) != setting.default:
                raise RequestError(
                    f"{name} is {getattr(params, name)}, and vLLM's engine has no such setting; leave it out, or use "
                    "--engine halfbyte."
                )
        room = engine.max_context - len(request.prompt)
        if room < 1 or (params.max_tokens or 0) > room:
            output = f" and {params.max_tokens} to generate" if params.max_tokens else ""
            raise ContextError(
                f"the prompt has {len(request.prompt)} tokens{output}, but the context is {engine.max_context}; "
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
        extra = None if self.unmasked else vllm_grammar.request_record(request, self.eos)
        self.engine.add(
            request.id, list(request.prompt), n=params.n,
            **{name: getattr(params, name) for name, setting in SETTINGS.items() if setting.vllm},
            logit_bias=dict(params.logit_bias) or None, logprobs=params.logprobs, seed=params.seed,
            max_tokens=params.max_tokens or room, min_tokens=min(params.min_tokens, params.max_tokens or room),
            stop_token_ids=sorted(stop_ids), ignore_eos=True, extra=extra,
        )  # fmt: skip
        choices = [_Choice(self._matcher(request), grammar, self._reasoning(request)) for _ in range(params.n)]
        self._open[request.id] = _Open(request, choices, deadline)
        self._prompt += len(request.prompt)

    def _begin_prepared(self) -> None:
        """Begin the requests whose grammar has been compiled, refuse those whose grammar was refused."""
        for id, prepared in [(id, p) for id, p in self._preparing.items() if p.grammar.done()]:
            del self._preparing[id]
            try:
                self._begin(prepared.request, prepared.grammar.result().state, prepared.deadline)
            except HalfbyteError as e:
                self._refusals.append((id, e))
        if self._preparing and not self.engine.has_work:  # briefly, so that a new request is not delayed
            wait([p.grammar for p in self._preparing.values()], 0.01, FIRST_COMPLETED)

    def _reasoning(self, request: Request) -> ReasoningState | None:
        limit = None if self.unmasked else request.reasoning
        return None if limit is None else ReasoningState(limit, self.vocabulary, request.prompt, self.engine.vocab)

    def _matcher(self, request: Request) -> ByteStopMatcher | None:
        stop = request.sampling.stop
        return ByteStopMatcher(stop, self.vocabulary.token_bytes) if stop else None

    def cancel(self, id: str, reason: FinishReason = "cancelled", error: str | None = None) -> bool:
        if (preparing := self._preparing.pop(id, None)) is not None:
            preparing.grammar.cancel()
            usage = Usage(len(preparing.request.prompt))
            for index in range(preparing.request.sampling.n):
                self._outputs.append((id, Delta([], index, finish=reason, error=error, usage=usage)))
            return True
        open_request = self._open.pop(id, None)
        if open_request is None:
            return False
        self.engine.abort(id)
        for index, choice in enumerate(open_request.choices):
            if not choice.ended:
                self._outputs.append((id, self._last(open_request, index, [], None, reason, error)))
        return True

    # ---- one step -----------------------------------------------------------------------------

    def step(self) -> list[Output]:
        now = time.monotonic()
        waiting: dict[str, _Open | _Preparing] = {**self._open, **self._preparing}
        for id in [id for id, w in waiting.items() if w.deadline is not None and w.deadline <= now]:
            self.cancel(id, "timeout")
        if self._preparing:
            self._begin_prepared()
        self.working = True
        try:
            gained = self.engine.step() if self.engine.has_work else []
        except Exception as e:  # vLLM does not recover an engine
            raise EngineDiedError(f"vLLM's engine died of {type(e).__name__}: {str(e)[:300]}.") from e
        finally:
            self.working = False
        self._steps += 1
        for progress in gained:
            self._take(progress)
        if not gained and not self.engine.has_work:
            for id in list(self._open):  # vLLM has lost it: no caller may wait for it
                self.cancel(id, "error", "vLLM dropped this request.")
        outputs, self._outputs = self._outputs, []
        return outputs

    def _take(self, gained: Gained) -> None:
        open_request = self._open.get(gained.id)
        if open_request is None or open_request.choices[gained.index].ended:
            return
        choice, tokens = open_request.choices[gained.index], gained.tokens
        if gained.cached and not open_request.cached:
            open_request.cached = gained.cached
            self._cached += gained.cached
        finish = FINISH.get(gained.finish, "error") if gained.finish else None
        stopped = False
        if choice.stops is not None:
            for i, token in enumerate(tokens):
                ends = finish == "stop" and i == len(tokens) - 1  # an end token matches nothing
                armed = not ends and choice.generated + i + 1 > open_request.request.sampling.min_tokens
                if choice.stops.add(token, armed=armed):
                    tokens, finish, stopped = tokens[: i + 1], "stop", True
                    break
        choice.generated += len(tokens)
        self._generated += len(tokens)
        if choice.reasoning is not None:
            for token in tokens:
                choice.reasoning.observe(token)
        error = None
        if choice.grammar is not None:
            choice.tokens += tokens
            if finish == "stop" and not stopped:
                error = left_the_grammar(choice.grammar, open_request.request.prompt, choice.tokens)
                finish = finish if error is None else "error"
        logprobs = None
        if gained.logprobs is not None and open_request.request.sampling.logprobs is not None:
            top = open_request.request.sampling.logprobs
            logprobs = [
                Logprob(entries[0][0], entries[0][1], tuple(entries[1 : 1 + top]))
                for entries in gained.logprobs[: len(tokens)]
            ]
        if finish is None:
            if tokens:
                visible = None if choice.stops is None else choice.stops.visible
                usage = self._usage(open_request, choice) if choice.generated == len(tokens) else None
                cut = choice.reasoning_cut
                delta = Delta(tokens, gained.index, logprobs, visible_bytes=visible, usage=usage, reasoning_cut=cut)
                self._outputs.append((gained.id, delta))
            return
        self._outputs.append((gained.id, self._last(open_request, gained.index, tokens, logprobs, finish, error)))
        if open_request.left == 0:
            del self._open[gained.id]
            if stopped:
                self.engine.abort(gained.id)

    def _last(
        self, open_request: _Open, index: int, tokens: list[int], logprobs: list[Logprob] | None, finish: FinishReason,
        error: str | None = None,
    ) -> Delta:  # fmt: skip
        choice = open_request.choices[index]
        choice.ended = True
        if choice.stops is not None:
            choice.stops.finish()
        return Delta(
            tokens, index, logprobs, finish, None if choice.stops is None else choice.stops.matched,
            None if choice.stops is None else choice.stops.visible, error,
            self._usage(open_request, choice), reasoning_cut=choice.reasoning_cut,
        )  # fmt: skip

    @staticmethod
    def _usage(open_request: _Open, choice: _Choice) -> Usage:
        num_prompt_tokens = len(open_request.request.prompt)
        return Usage(num_prompt_tokens, min(open_request.cached, num_prompt_tokens), choice.generated)

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
        """Generate two tokens, then require the plugin's record: which halfbyte kernels ran, and that none is missing.

        Needed because vLLM only logs that a plugin could not be loaded."""
        self.engine.add("halfbyte-proof", [0], max_tokens=2, temperature=0.0, ignore_eos=True)
        while self.engine.has_work:
            self.engine.step()
        here = compat.active()
        report: dict[str, Any] | None = here.report() if here is not None else None
        if report is None and record is not None and Path(record).exists():  # its workers are other processes
            report = json.loads(Path(record).read_text(encoding="utf-8"))
        if report is None:
            raise PlanError(
                f"vLLM did not load halfbyte's plugin. Install halfbyte in vLLM's environment and set VLLM_PLUGINS to "
                f"{PLUGIN}."
            )
        if report["differences"]:
            raise PlanError("inside vLLM " + "; ".join(report["differences"]) + ".")
        log.info("inside vLLM: %s", ", ".join(dict.fromkeys(report["plan"]["decode"])))
        plan: dict[str, list[str]] = report["plan"]
        return plan

    def prove_masks(self) -> None:
        """Check that masks work: one prompt with two grammars that have no value in common must follow each of them.
        Otherwise structured output is refused, and everything else is served."""
        if self.unmasked:
            return
        for kind in ("[0-9]{4}", "[A-Z]{4}"):
            constraint = Constraint("regex", kind)
            state = self.grammars.compiler.compile(constraint, [0])
            extra = vllm_grammar.constraint_record(constraint, self.eos)
            self.engine.add(
                "halfbyte-masks", [0], max_tokens=8, temperature=0.0, ignore_eos=True, stop_token_ids=list(self.eos),
                extra=extra,
            )  # fmt: skip
            tokens: list[int] = []
            while self.engine.has_work:
                tokens += [token for gained in self.engine.step() for token in gained.tokens]
            if left_the_grammar(state, [0], tokens) is not None:
                self.unmasked = "its logits cannot be masked"
                log.warning("inside vLLM logits cannot be masked: structured output is refused")
                return


def left_the_grammar(fresh: GrammarState, prompt: Sequence[int], tokens: Sequence[int]) -> str | None:
    """Why a complete answer does not follow its grammar; None if it does."""
    state, tail = fresh.copy(), list(prompt[-fresh.longest_trigger :])
    try:
        for token in tokens:
            tail = [*tail, token][-fresh.longest_trigger :]
            state.observe(tail)
    except HalfbyteError as e:
        return f"the answer left the grammar of this request: {e}"
    return None
