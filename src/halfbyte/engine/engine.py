"""The engine's core: requests in, deltas out, one step at a time. `step()` is the whole story.

Runs in one thread and knows neither sockets nor models: a ModelRunner runs the batches, a Proposer drafts. No request
can take the core down. An error of one sequence ends its request with a typed error. A step that fails altogether is
undone, and its sequences run one by one until the one to blame has failed alone. A step that runs out of memory sheds
load. Only if every step fails does the core give up and raise EngineDiedError.
"""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from halfbyte.engine.arrivals import Arrivals, Group
from halfbyte.engine.batch import BatchBuilder
from halfbyte.engine.config import EngineConfig
from halfbyte.engine.counters import Counters
from halfbyte.engine.grammar import GrammarVocabulary
from halfbyte.engine.grammar_work import GrammarWork
from halfbyte.engine.observer import Stage, StepObserver
from halfbyte.engine.prefix_tiers import PrefixTiers, TierStats
from halfbyte.engine.request import Delta, EngineStats, FinishReason, Logprob, Output, Request, Usage
from halfbyte.engine.runner import KeepsValues, ModelRunner, StepHandle, StepResult
from halfbyte.engine.sampling.host import NOT_NUMBERS
from halfbyte.engine.saturation import SaturationCount
from halfbyte.engine.scheduled_step import ScheduledChunk, ScheduledStep
from halfbyte.engine.scheduler import Scheduler
from halfbyte.engine.sequence import Sequence, State
from halfbyte.engine.speculative.drafting import learn, propose, record_time
from halfbyte.engine.speculative.proposer import Proposer
from halfbyte.errors import EngineDiedError, HalfbyteError, NotEnoughMemoryError, RequestError, StepError
from halfbyte.kv.pages import PagePool

log = logging.getLogger("halfbyte")
P = ParamSpec("P")
R = TypeVar("R")

FAILURES_IN_A_ROW = 16  # failed steps without a good one between them, after which the core gives up
LEAST_ROWS = 64  # shedding load stops here
RECOVERY_STEPS = 256  # good steps before the row budget grows again


@dataclass(slots=True)
class LaunchedStep:
    step: ScheduledStep
    handle: StepHandle
    start: float = 0.0  # with a proposer: before its draft was requested
    suspended: bool = False  # speculation was suspended
    time: float = 0.0  # with tiers: when it was launched


class EngineCore:
    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        vocabulary: GrammarVocabulary | None = None,
        proposer: Proposer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner, self.config, self.vocabulary, self.proposer = runner, config, vocabulary, proposer
        self.pages = PagePool(config.pages, config.page_size, config.window, prefix_cache=config.prefix_cache)
        self.scheduler = Scheduler(self.pages, config)
        blocks = -(-self.scheduler.longest // config.page_size) + 1
        in_place = config.host_steps and not config.run_ahead
        self.builder = BatchBuilder(config.max_seqs, blocks, config.page_size, in_place=in_place)
        self.arrivals = Arrivals(config, self.scheduler, vocabulary)
        self.groups: dict[str, Group] = {}
        self._constrained: list[Sequence] = []
        self._refusals: list[tuple[str, HalfbyteError]] = []
        self.observer: StepObserver | None = None
        self.tiers: PrefixTiers | None = None
        self.saturation: SaturationCount | None = None
        self.launched: LaunchedStep | None = None
        self.working = False  # this process is busy with a step; False while it waits for a GPU
        self._clock = clock
        self._last_commit = self._last_result = self._untimed_since = -math.inf
        self._untimed_rows = 0  # of prompts, in steps without results
        self._untimed_depth = 0.0  # the sum of their positions
        self._deadlines: list[tuple[float, str]] = []
        self._count = Counters()
        self._outputs: list[Output] = []

    @property
    def grammars(self) -> GrammarWork | None:
        return self.arrivals.grammars

    # ---- one step -----------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """Schedule and launch a step, then commit the previous one while the new one runs. Returns the new outputs."""
        self.working = self.config.host_steps
        self._expire()
        if self.arrivals.preparing:
            self._queue_prepared()
        previous, self.launched = self.launched, None
        if previous is not None and not previous.step.ahead:
            self._commit(previous)  # its result decides what comes next
            previous = None
        start = 0.0
        if self.proposer is not None:
            start = self._clock()
            if previous is None:
                propose(self.proposer, self.scheduler.running)
        step = self._schedule(ahead=previous is not None)
        if step is None and previous is not None:
            self._commit(previous)
            previous, step = None, self._schedule()
        if step is None and not self._outputs:
            self._wait_for_grammars()
            if self.tiers is not None:
                self.tiers.wait(0.01)
        if step is not None:
            if self._count.unscheduled:
                self._count.first_scheduled((c.sequence for c in step.chunks), self._clock())
            self.launched = self._launch(step, previous)
            if self.launched is not None and self.proposer is not None:
                self.launched.start, self.launched.suspended = start, self.proposer.controller.suspended
        if previous is not None:
            self._commit(previous)
        self.working = False
        outputs, self._outputs = self._outputs, []
        return outputs

    def _schedule(self, *, ahead: bool = False) -> ScheduledStep | None:
        if self._constrained:
            assert self.grammars is not None
            for seq, error in self.grammars.turn(self._constrained):
                if isinstance(error, RequestError):
                    self._refuse(seq.request.id, error)
                else:
                    self._fail(seq, error)
        if self.tiers is not None:
            self.tiers.turn()
        return self._stage("schedule", self.scheduler.schedule, ahead=ahead)

    def _launch(self, step: ScheduledStep, previous: LaunchedStep | None) -> LaunchedStep | None:
        seq: Sequence | None = None
        try:
            batch = self._stage("build", self.builder.build, step, None if previous is None else previous.step)
            for chunk in step.chunks:
                if chunk.samples:
                    seq = chunk.sequence
                    batch.constrain(chunk)
            seq = None
            if not self.config.host_steps:  # kernels on the host check every number themselves
                batch.check(self.config)
            self.working = True  # a first launch may compile and capture
            handle = self._stage("launch", self.runner.launch, batch)
            if self.observer is not None:
                self.observer.launched(step, batch)
            return LaunchedStep(step, handle, time=0.0 if self.tiers is None else self._clock())
        except EngineDiedError:
            raise  # nothing can be undone, and no request is to blame
        except Exception as e:
            if seq is not None:  # one sequence's grammar failed; the others are scheduled again
                self.scheduler.step_failed(step, suspect=False)
                self._fail(seq, e)
            else:
                self._step_failed([step], e)
            return None
        finally:
            self.working = self.config.host_steps

    def _commit(self, launched: LaunchedStep) -> None:
        try:
            obsolete = self.config.host_steps and all(c.sequence.state is State.FINISHED for c in launched.step.chunks)
            result = StepResult([]) if obsolete else self._stage("wait", launched.handle.result)
        except EngineDiedError:
            raise
        except Exception as e:
            steps = [launched.step]
            if self.launched is not None:  # it was launched on top of the failed one
                steps.insert(0, self.launched.step)
                _wait(self.launched.handle)
                self.launched = None
            self._step_failed(steps, e)
            return
        generated = self._count.generated
        for chunk in launched.step.chunks:
            if not self.scheduler.step_done(chunk):
                continue  # it ended meanwhile: what was computed for it is obsolete
            seq = chunk.sequence
            try:
                if chunk.scored:
                    self._score(chunk, result)
                if chunk.samples:
                    self._accept(chunk, result)
                    continue
                self.scheduler.advance(seq, chunk.end)
                if chunk.end >= seq.max_length:  # no token was requested
                    self._emit(seq, [], None, "length")
            except Exception as e:
                self._fail(seq, e)
        if self.tiers is not None:
            self._time_prompts(launched, self.tiers)
        if self.proposer is not None:
            now = self._clock()
            seconds, self._last_commit = now - max(launched.start, self._last_commit), now
            tokens = self._count.generated - generated
            record_time(self.proposer, launched.step, tokens, seconds, suspended=launched.suspended)
        self._good_step()

    def _time_prompts(self, launched: LaunchedStep, tiers: PrefixTiers) -> None:
        """Tell the tiers how fast prompts are computed. A step without results is committed before a GPU has run it:
        its rows are timed with those of the next step that has some."""
        step = launched.step
        if not step.decode_only and step.regime != "batch":
            if not self._untimed_rows:
                self._untimed_since = max(launched.time, self._last_result)
            self._untimed_rows += step.rows
            self._untimed_depth += sum(chunk.count * (chunk.start + chunk.count / 2) for chunk in step.chunks)
        if step.results or self.config.host_steps:
            self._last_result = self._clock()
            if self._untimed_rows:
                depth = self._untimed_depth / self._untimed_rows
                tiers.computed(self._untimed_rows, depth, self._last_result - self._untimed_since)
            self._untimed_rows, self._untimed_depth = 0, 0.0

    def _stage(self, name: Stage, work: Callable[P, R], *args: P.args, **named: P.kwargs) -> R:
        if self.observer is None:
            return work(*args, **named)
        with self.observer.stage(name):
            return work(*args, **named)

    def _accept(self, chunk: ScheduledChunk, result: StepResult) -> None:
        """Append the tokens of one sequence: drafts while they equal what was sampled, and the token after them."""
        seq, draft, row, computed = chunk.sequence, chunk.draft, chunk.first_sampled, chunk.known_end
        before = len(seq.tokens)
        reason: FinishReason | None = None
        error: str | None = None
        for j in range(len(draft) + 1):
            if result.errors:
                error = result.errors.get(row + j)
            if error is not None:
                break
            token = result.tokens[row + j]
            seq.tokens.append(token)
            reason = self._ended(seq, token)
            if reason is not None or j == len(draft) or token != draft[j]:
                break
        new = seq.tokens[before:]
        self.scheduler.advance(seq, max(computed, computed + len(new) - 1))
        logprobs: list[Logprob] | None = None
        if seq.params.logprobs is not None:
            logprobs = [result.logprobs[row + j] for j in range(len(new))]
        self._count.generated += len(new)
        if draft:
            self._count.drafted += len(draft)
            self._count.accepted += learn(seq, draft, new, ended=reason is not None)
        elif seq.pace is not None:
            seq.pace.rested(len(new))
        if seq.pace is not None or seq.grammar is not None or seq.reasoning is not None:
            seq.update_run_ahead()
        if self.proposer is not None:
            self.proposer.observe(seq, len(new))
        if error is not None:
            if new:
                self._emit(seq, new, logprobs, None)
            if error.startswith(NOT_NUMBERS):
                error = self._broken(seq, error)
            raise StepError(f"a token could not be sampled: {error}.")
        self._emit(seq, new, logprobs, reason)

    def _score(self, chunk: ScheduledChunk, result: StepResult) -> None:
        """Hand out the logprobs of the prompt tokens that follow the scored rows."""
        seq, rows = chunk.sequence, chunk.scored_results
        for i in rows:
            if (error := result.errors.get(i)) is not None:
                raise StepError(f"the prompt could not be scored: {self._broken(seq, error)}.")
        logprobs = [result.logprobs[i] for i in rows]
        seq.first_unscored = chunk.scored.stop + 1
        self._outputs.append((seq.request.id, Delta([], seq.index, prompt_logprobs=logprobs)))

    def _ended(self, seq: Sequence, token: int) -> FinishReason | None:
        if token in seq.stop_ids:
            if seq.stop_matcher is not None:
                seq.stop_matcher.add(token, armed=False)
            return "stop"
        length = len(seq.tokens)
        if seq.stop_matcher is not None and seq.stop_matcher.add(
            token, armed=length - seq.num_prompt_tokens > seq.params.min_tokens
        ):
            return "stop"
        if seq.grammar is not None:
            seq.grammar.observe(seq.tokens)
        if seq.reasoning is not None:
            seq.reasoning.observe(token)
        return "length" if length >= seq.max_length else None

    def _emit(
        self, seq: Sequence, new: list[int], logprobs: list[Logprob] | None, reason: FinishReason | None,
        error: str | None = None,
    ) -> None:  # fmt: skip
        stops, cut = seq.stop_matcher, seq.reasoning is not None and seq.reasoning.cut
        if reason is None:
            visible = None if stops is None else stops.visible
            # A reader that ends the answer itself never sees the last delta.
            usage = _usage(seq) if len(seq.tokens) == seq.num_prompt_tokens + len(new) else None
            delta = Delta(new, seq.index, logprobs, visible_bytes=visible, usage=usage, reasoning_cut=cut)
            self._outputs.append((seq.request.id, delta))
            return
        if stops is not None:
            stops.finish()
        self._close(seq, reason)
        delta = Delta(
            new, seq.index, logprobs, reason, None if stops is None else stops.matched,
            None if stops is None else stops.visible, error, _usage(seq), reasoning_cut=cut,
        )  # fmt: skip
        self._outputs.append((seq.request.id, delta))

    def _close(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence. Everything it holds is given back now, or when its launched step is committed."""
        if seq.arrival_time is not None:  # it ends without ever having run
            seq.arrival_time = None
            self._count.unscheduled -= 1
        self.scheduler.finish(seq)
        if self.proposer is not None:
            self.proposer.forget(seq)
        if seq.grammar is not None:
            self._constrained.remove(seq)
        group = self.groups[seq.request.id]
        group.open -= 1
        if group.open == 0:
            del self.groups[seq.request.id]
        seq.finish_reason = reason

    # ---- requests -----------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it can never be served, CapacityError if not now; the core is then
        unchanged."""
        self.arrivals.check(request)
        if request.id in self.groups or request.id in self.arrivals.preparing:
            raise RequestError(f"a request with the id {request.id!r} is already running; ids must differ.")
        deadline = None if request.timeout is None else self._clock() + request.timeout
        group = self.arrivals.take(request, deadline)
        if group is not None:
            self._queue(group)
        if deadline is not None:
            heapq.heappush(self._deadlines, (deadline, request.id))

    def _queue_prepared(self) -> None:
        """Queue the requests whose grammar has been compiled, refuse those whose grammar was refused."""
        for prepared in self.arrivals.prepared():
            try:
                self._queue(self.arrivals.group_of(prepared.request, prepared.grammar.result(), prepared.deadline))
            except HalfbyteError as e:
                self._refusals.append((prepared.request.id, e))

    def _queue(self, group: Group) -> None:
        if self.proposer is not None:
            for seq in group.seqs:
                seq.pace = self.proposer.pace(seq)
        self.scheduler.add(group.seqs)  # from here on nothing raises
        now = self._clock()
        for seq in group.seqs:
            seq.arrival_time = now
            if seq.grammar is not None:
                self._constrained.append(seq)
        self._count.unscheduled += len(group.seqs)
        self._count.prompt += len(group.request.prompt)
        self.groups[group.request.id] = group

    def cancel(self, id: str, reason: FinishReason = "cancelled", error: str | None = None) -> bool:
        """End a request. Everything it holds is given back now, or when the running step is committed."""
        if (preparing := self.arrivals.preparing.pop(id, None)) is not None:
            preparing.grammar.cancel()
            usage = Usage(len(preparing.request.prompt))
            for index in range(preparing.request.sampling.n):
                self._outputs.append((id, Delta([], index, finish=reason, error=error, usage=usage)))
            return True
        group = self.groups.get(id)
        if group is None:
            return False
        for seq in group.seqs:
            if seq.state is not State.FINISHED:
                self._emit(seq, [], None, reason, error)
        return True

    @property
    def has_work(self) -> bool:
        return bool(self.groups or self.arrivals.preparing) or self.launched is not None

    @property
    def waits_for_grammars(self) -> bool:
        return bool(self.arrivals.preparing) or any(s.waits_for_grammar for s in self._constrained)

    def _wait_for_grammars(self) -> None:
        """Wait for a grammar, because nothing else can run; briefly, so that a new request is not delayed."""
        futures: list[Future[Any]] = [p.grammar for p in self.arrivals.preparing.values()]
        futures += [s.grammar.job for s in self._constrained if s.grammar is not None and s.grammar.job is not None]
        if futures:
            wait(futures, 0.01, FIRST_COMPLETED)

    def refusals(self) -> list[tuple[str, HalfbyteError]]:
        """Return requests that were accepted and then found impossible to serve. They produce no further output."""
        refused, self._refusals = self._refusals, []
        return refused

    def _expire(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= self._clock():
            deadline, id = heapq.heappop(self._deadlines)
            open_request = self.groups.get(id) or self.arrivals.preparing.get(id)
            if open_request is not None and open_request.deadline == deadline:
                self.cancel(id, "timeout")

    # ---- what goes wrong ----------------------------------------------------------------------

    def _refuse(self, id: str, error: HalfbyteError) -> None:
        """End all choices of a running request that turned out to be impossible to serve."""
        group = self.groups.get(id)
        if group is None:
            return  # already refused for another of its choices
        for seq in group.seqs:
            if seq.state is not State.FINISHED:
                self._close(seq, "error")
        self._refusals.append((id, error))

    def _fail(self, seq: Sequence, error: BaseException) -> None:
        """End one sequence with an error. The other choices of its request go on."""
        if seq.state is State.FINISHED:
            return
        text = (
            str(error)
            if isinstance(error, HalfbyteError)
            else f"the engine failed on this request ({_describe(error)})."
        )
        if not isinstance(error, HalfbyteError):
            log.error("a request failed", exc_info=error)
        self._emit(seq, [], None, "error", text)

    def _broken(self, seq: Sequence, error: str) -> str:
        """The sequence produced NaN or Inf: locate the layer and clear its pages, so no other request reads them."""
        if not isinstance(self.runner, KeepsValues):
            return error
        tables = seq.tables
        try:
            if error == NOT_NUMBERS:  # the kernel did not say where
                error += " since " + self.runner.find_broken(tables.full, tables.sliding, tables.length)
            if self.tiers is not None:
                self.tiers.forget(tables.hashes.copy())
            self.runner.clear(self.pages.forget(tables))
        except EngineDiedError:
            raise
        except Exception:
            log.exception("the layer in which a request's values became NaN or Inf could not be located")
        return error

    def _step_failed(self, steps: list[ScheduledStep], error: BaseException) -> None:
        """Undo a failed step, and the one launched after it, which is first in `steps`; find the sequence to blame."""
        count, scheduler = self._count, self.scheduler
        self._untimed_rows, self._untimed_depth = 0, 0.0
        count.failures += 1
        count.good_steps = 0
        memory = isinstance(error, MemoryError | NotEnoughMemoryError) or type(error).__name__ == "OutOfMemoryError"
        for step in steps:
            scheduler.step_failed(step, suspect=not memory)
        failed = steps[-1]
        log.warning("a step of %d rows failed (%s)", failed.rows, _describe(error))
        if count.failures >= FAILURES_IN_A_ROW:
            raise EngineDiedError(f"{count.failures} steps in a row failed, the last with: {_describe(error)}.")
        if memory and (len(scheduler.running) > 1 or scheduler.row_budget > LEAST_ROWS):
            scheduler.row_budget = max(LEAST_ROWS, self.config.max_seqs, scheduler.row_budget // 2)
            for seq in scheduler.running[max(1, len(scheduler.running) // 2) :]:
                scheduler.preempt(seq)
            if len(scheduler.running) > 1 or failed.rows > scheduler.row_budget:
                return
        if len(failed.chunks) == 1:
            problem = "ran out of memory" if memory else f"failed ({_describe(error)})"
            self._fail(failed.chunks[0].sequence, StepError(f"the step that computed this request {problem}."))

    def _good_step(self) -> None:
        count = self._count
        count.steps += 1
        count.failures = 0
        count.good_steps += 1
        if count.good_steps % RECOVERY_STEPS == 0 and self.scheduler.row_budget < self.scheduler.max_rows:
            self.scheduler.row_budget = min(self.scheduler.max_rows, self.scheduler.row_budget * 2)

    # ---- state --------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        pages, count = self.pages.stats(), self._count
        tiers = TierStats() if self.tiers is None else self.tiers.stats()
        saturation = self.saturation
        return EngineStats(
            running=len(self.scheduler.running), waiting=self.scheduler.num_waiting + len(self.arrivals.preparing),
            kv_pages_total=pages.total,
            kv_pages_used=pages.used, kv_pages_cached=pages.cached, prefix_hit_tokens=pages.hit_tokens,
            prefix_query_tokens=pages.query_tokens, preemptions=self.scheduler.preemptions, steps=count.steps,
            generated_tokens=count.generated, prompt_tokens=count.prompt, drafted_tokens=count.drafted,
            accepted_tokens=count.accepted, queue_seconds=count.queue_seconds, queue_counts=tuple(count.queue),
            prefix_memory_tokens=tiers.memory_tokens, prefix_disk_tokens=tiers.disk_tokens,
            prefix_memory_bytes=tiers.memory_bytes, prefix_disk_bytes=tiers.store.bytes,
            prefix_skipped_pages=tiers.skipped_pages, prefix_damaged=tiers.store.damaged,
            kv_checked_values=0 if saturation is None else saturation.values,
            kv_saturated_values=0 if saturation is None else saturation.saturated,
        )  # fmt: skip

    def check(self) -> None:
        """Check every invariant of scheduler and pages, and that every open request waits or runs."""
        self.scheduler.check([self.launched.step] if self.launched is not None else [])
        alive = {id(s) for s in self.scheduler.waiting + self.scheduler.running}
        for group in self.groups.values():
            unfinished = [s for s in group.seqs if s.state is not State.FINISHED]
            assert len(unfinished) == group.open > 0
            assert all(id(s) in alive for s in unfinished)
        assert len(alive) == sum(g.open for g in self.groups.values())
        unscheduled = [s for g in self.groups.values() for s in g.seqs if s.arrival_time is not None]
        assert len(unscheduled) == self._count.unscheduled

    def anew(self, config: EngineConfig | None = None) -> EngineCore:
        """A core with the same runner, an empty cache and new counters, to be used instead of this one."""
        assert not self.has_work
        core = EngineCore(self.runner, config or self.config, self.vocabulary, self.proposer, self._clock)
        core.arrivals.grammars = self.grammars
        if self.tiers is not None:
            core.attach(self.tiers)
        if self.saturation is not None:
            core.count_saturated(SaturationCount(self.saturation.pool))
        return core

    def count_saturated(self, count: SaturationCount) -> None:
        """Count the values of an fp8 cache that saturate."""
        self.saturation, self.pages.on_full = count, count.add

    def attach(self, tiers: PrefixTiers) -> None:
        """Find prefixes in these tiers, too, and store them there."""
        self.tiers = tiers
        tiers.attach(self.scheduler)

    def close(self) -> None:
        if self.launched is not None:
            if not self.config.host_steps:  # a step on the host runs at commit, so nothing is under way
                _wait(self.launched.handle)
            self.scheduler.step_failed(self.launched.step, suspect=False)
            self.launched = None
        if self.grammars is not None:
            self.grammars.close()
        if self.tiers is not None:
            self.tiers.close()
        self.runner.close()


def _usage(seq: Sequence) -> Usage:
    cached = min(seq.num_cached_tokens, seq.num_prompt_tokens)
    disk = min(seq.num_disk_tokens, cached)
    return Usage(
        seq.num_prompt_tokens, cached, seq.num_generated_tokens, seq.num_drafted_tokens, seq.num_accepted_tokens,
        min(seq.num_memory_tokens, cached - disk), disk,
    )  # fmt: skip


def _wait(handle: StepHandle) -> None:
    try:
        handle.result()
    except Exception:
        log.debug("a discarded step failed as well", exc_info=True)


def _describe(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
