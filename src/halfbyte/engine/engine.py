"""The engine's core: requests in, deltas out, one step at a time. `step()` is the whole story.

Runs in one thread and knows neither sockets nor models: a ModelRunner runs the batches, a Proposer drafts. Nothing a
request does takes it down: what fails for one sequence ends that request with a typed error; a step that fails as a
whole is undone and its sequences run one by one until the one to blame has failed alone; a step without memory sheds
load. Only a runner that fails every step is given up, by raising EngineDiedError.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from halfbyte.engine.arrivals import Arrivals, Group
from halfbyte.engine.batch import Batch, BatchBuilder
from halfbyte.engine.config import EngineConfig
from halfbyte.engine.counters import Counters
from halfbyte.engine.grammar import Vocabulary
from halfbyte.engine.grammar_work import GrammarWork
from halfbyte.engine.request import Delta, EngineStats, FinishReason, Logprob, Output, Request, Usage
from halfbyte.engine.runner import KeepsValues, ModelRunner, StepHandle, StepResult
from halfbyte.engine.sampling.host import NOT_NUMBERS
from halfbyte.engine.scheduler import ScheduledStep, Scheduler
from halfbyte.engine.sequence import Sequence, State
from halfbyte.engine.speculative.drafting import learn, propose
from halfbyte.engine.speculative.proposer import Proposer
from halfbyte.errors import EngineDiedError, HalfbyteError, NotEnoughMemoryError, RequestError, StepError
from halfbyte.kv.pages import PagePool

log = logging.getLogger("halfbyte")

FAILURES_IN_A_ROW = 16  # after so many failed steps without a good one, the runner is beyond help
LEAST_ROWS = 64  # shedding load stops here
RECOVERY_STEPS = 256  # good steps before the row budget grows again


@dataclass(slots=True)
class LaunchedStep:
    """A launched step."""

    step: ScheduledStep
    handle: StepHandle
    rows: dict[int, int]  # id of a sequence -> its sampled row, for the step that follows


class EngineCore:
    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        vocabulary: Vocabulary | None = None,
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
        self.launched: LaunchedStep | None = None
        self.working = False  # this process is busy with a step; not while it waits for a GPU's
        self._clock = clock
        self._deadlines: list[tuple[float, str]] = []
        self._count = Counters()
        self._outputs: list[Output] = []

    @property
    def grammars(self) -> GrammarWork | None:
        return self.arrivals.grammars

    # ---- one step -----------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """schedule -> launch -> commit the step before. Returns what the commits added, while the new step runs."""
        self.working = self.config.host_steps
        self._expire()
        if self.arrivals.preparing:
            self._queue_prepared()
        previous, self.launched = self.launched, None
        if previous is not None and not previous.step.ahead:
            self._commit(previous)  # its result decides what comes next
            previous = None
        if self.proposer is not None and previous is None:
            propose(self.proposer, self.scheduler.running)
        step = self._schedule(ahead=previous is not None)
        if step is None and previous is not None:
            self._commit(previous)
            previous, step = None, self._schedule()
        if step is None and not self._outputs:
            self._wait_for_grammars()
        if step is not None:
            if self._count.unscheduled:
                self._count.first_scheduled(step.seqs, self._clock())
            self.launched = self._launch(step, previous)
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
        return self.scheduler.schedule(ahead=ahead)

    def _launch(self, step: ScheduledStep, previous: LaunchedStep | None) -> LaunchedStep | None:
        seq: Sequence | None = None
        try:
            batch = self.builder.build(step, previous.rows if previous is not None else {})
            row = 0
            rows: dict[int, int] = {}
            for seq, draft, samples, scores in zip(step.seqs, step.drafts, step.samples, step.scores):
                row += scores
                if samples:
                    rows[id(seq)] = row
                    _constrain(batch, seq, draft, row)
                    row += len(draft) + 1
            seq = None
            if not self.config.host_steps:  # what computes on the host looks at every number itself
                batch.check(self.config)
            self.working = True  # a first launch may compile and capture
            return LaunchedStep(step, self.runner.launch(batch), rows)
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
            obsolete = self.config.host_steps and all(s.state is State.FINISHED for s in launched.step.seqs)
            result = StepResult([]) if obsolete else launched.handle.result()
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
        step, row = launched.step, 0
        for i, seq in enumerate(step.seqs):
            samples, draft, scores = step.samples[i], step.drafts[i], step.scores[i]
            first = row = row + scores
            if samples:
                row += len(draft) + 1
            if not self.scheduler.step_done(seq, samples):
                continue  # it ended meanwhile: what was computed for it is obsolete
            computed = step.starts[i] + step.counts[i] - len(draft)
            try:
                if scores:
                    self._score(seq, seq.unscored(step.starts[i], computed), result, first - scores)
                if samples:
                    self._accept(seq, draft, result, first, computed)
                    continue
                self.scheduler.advance(seq, computed)
                if computed >= seq.limit:  # no token was asked for
                    self._emit(seq, [], None, "length")
            except Exception as e:
                self._fail(seq, e)
        self._good_step()

    def _accept(self, seq: Sequence, draft: list[int], result: StepResult, row: int, computed: int) -> None:
        """Append the tokens of one sequence: drafts while they equal what was sampled, and the token after them."""
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
            seq.runs_ahead = seq.may_run_ahead and seq.pace.resting
        if self.proposer is not None:
            self.proposer.observe(seq, len(new))
        if error is not None:
            if new:
                self._emit(seq, new, logprobs, None)
            if error.startswith(NOT_NUMBERS):
                error = self._broken(seq, error)
            raise StepError(f"a token could not be sampled: {error}.")
        self._emit(seq, new, logprobs, reason)

    def _score(self, seq: Sequence, rows: range, result: StepResult, first: int) -> None:
        """Hand out the logprobs of the prompt's tokens after these rows; their results begin at `first`."""
        for i in range(first, first + len(rows)):
            if (error := result.errors.get(i)) is not None:
                raise StepError(f"the prompt could not be scored: {self._broken(seq, error)}.")
        logprobs = [result.logprobs[i] for i in range(first, first + len(rows))]
        seq.scored = rows.stop + 1
        self._outputs.append((seq.request.id, Delta([], seq.index, prompt_logprobs=logprobs)))

    def _ended(self, seq: Sequence, token: int) -> FinishReason | None:
        if token in seq.stop_ids:
            if seq.stops is not None:
                seq.stops.add(token, armed=False)
            return "stop"
        length = len(seq.tokens)
        if seq.stops is not None and seq.stops.add(token, armed=length - seq.prompt > seq.params.min_tokens):
            return "stop"
        if seq.grammar is not None:
            seq.grammar.observe(seq.tokens)
        return "length" if length >= seq.limit else None

    def _emit(
        self, seq: Sequence, new: list[int], logprobs: list[Logprob] | None, reason: FinishReason | None,
        error: str | None = None,
    ) -> None:  # fmt: skip
        stops = seq.stops
        if reason is None:
            visible = None if stops is None else stops.visible
            self._outputs.append((seq.request.id, Delta(new, seq.index, logprobs, visible_bytes=visible)))
            return
        if stops is not None:
            stops.finish()
        self._close(seq, reason)
        delta = Delta(
            new, seq.index, logprobs, reason, None if stops is None else stops.matched,
            None if stops is None else stops.visible, error,
            Usage(seq.prompt, min(seq.cached, seq.prompt), seq.generated, seq.drafted, seq.accepted),
        )  # fmt: skip
        self._outputs.append((seq.request.id, delta))

    def _close(self, seq: Sequence, reason: FinishReason) -> None:
        """It is over: everything it holds is given back, now or when a launched step is committed."""
        if seq.arrived is not None:  # it ends without ever having run
            seq.arrived = None
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
        seq.finish = reason

    # ---- requests -----------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError if it can never be served, CapacityError if not now; what it raises
        leaves the core as it was."""
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
        """Queue those whose grammar is there; tell those whose grammar was refused."""
        for each in self.arrivals.prepared():
            try:
                self._queue(self.arrivals.group_of(each.request, each.grammar.result(), each.deadline))
            except HalfbyteError as e:
                self._refusals.append((each.request.id, e))

    def _queue(self, group: Group) -> None:
        if self.proposer is not None:
            for seq in group.seqs:
                seq.pace = self.proposer.pace(seq)
        self.scheduler.add(group.seqs)  # from here on nothing raises
        now = self._clock()
        for seq in group.seqs:
            seq.arrived = now
            if seq.grammar is not None:
                self._constrained.append(seq)
        self._count.unscheduled += len(group.seqs)
        self._count.prompt += len(group.request.prompt)
        self.groups[group.request.id] = group

    def cancel(self, id: str, reason: FinishReason = "cancelled", error: str | None = None) -> bool:
        """End a request; everything it holds is given back now, or when the running step is committed."""
        if (each := self.arrivals.preparing.pop(id, None)) is not None:
            each.grammar.cancel()
            usage = Usage(len(each.request.prompt))
            for index in range(each.request.sampling.n):
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
        return bool(self.arrivals.preparing) or any(s.held for s in self._constrained)

    def _wait_for_grammars(self) -> None:
        """Nothing can run but what waits for a grammar: not longer than a newcomer would notice."""
        futures: list[Future[Any]] = [p.grammar for p in self.arrivals.preparing.values()]
        futures += [s.grammar.job for s in self._constrained if s.grammar is not None and s.grammar.job is not None]
        if futures:
            wait(futures, 0.01, FIRST_COMPLETED)

    def refusals(self) -> list[tuple[str, HalfbyteError]]:
        """Requests that were taken and turned out to be such as can never be served; nothing more comes of them."""
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
        """A request that has begun turns out to be one that cannot be served: all of it ends, with the reason."""
        group = self.groups.get(id)
        if group is None:
            return  # another of its choices said so first
        for seq in group.seqs:
            if seq.state is not State.FINISHED:
                self._close(seq, "error")
        self._refusals.append((id, error))

    def _fail(self, seq: Sequence, error: BaseException) -> None:
        """One sequence cannot go on. Its request's other choices can."""
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
        """Its values are no numbers: say where, and leave none of them to others."""
        if not isinstance(self.runner, KeepsValues):
            return error
        tables = seq.tables
        try:
            if error == NOT_NUMBERS:  # the kernel could not tell
                error += " since " + self.runner.find_broken(tables.full, tables.sliding, tables.length)
            self.runner.clear(self.pages.forget(tables))
        except EngineDiedError:
            raise
        except Exception:
            log.exception("where a request's values stopped being numbers could not be found out")
        return error

    def _step_failed(self, steps: list[ScheduledStep], error: BaseException) -> None:
        """Undo the step (and the one launched on top of it, first in `steps`) and find out who is to blame."""
        count, scheduler = self._count, self.scheduler
        count.failed_steps += 1
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
        if len(failed.seqs) == 1:
            what = "ran out of memory" if memory else f"failed ({_describe(error)})"
            self._fail(failed.seqs[0], StepError(f"the step that computed this request {what}."))

    def _good_step(self) -> None:
        count = self._count
        count.steps += 1
        count.failures = 0
        count.good_steps += 1
        if count.good_steps % RECOVERY_STEPS == 0 and self.scheduler.row_budget < self.scheduler.most_rows:
            self.scheduler.row_budget = min(self.scheduler.most_rows, self.scheduler.row_budget * 2)

    # ---- looking in ---------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        pages, count = self.pages.stats(), self._count
        return EngineStats(
            running=len(self.scheduler.running), waiting=len(self.scheduler.waiting) + len(self.arrivals.preparing),
            kv_pages_total=pages.total,
            kv_pages_used=pages.used, kv_pages_cached=pages.cached, prefix_hit_tokens=pages.hit_tokens,
            prefix_query_tokens=pages.query_tokens, preemptions=self.scheduler.preemptions, steps=count.steps,
            generated_tokens=count.generated, prompt_tokens=count.prompt, drafted_tokens=count.drafted,
            accepted_tokens=count.accepted, queue_seconds=count.queue_seconds, queue_counts=tuple(count.queue),
        )  # fmt: skip

    def check(self) -> None:
        """Every invariant of scheduler and pages, and that every open request has somebody working on it."""
        self.scheduler.check([self.launched.step] if self.launched is not None else [])
        alive = {id(s) for s in self.scheduler.waiting + self.scheduler.running}
        for group in self.groups.values():
            unfinished = [s for s in group.seqs if s.state is not State.FINISHED]
            assert len(unfinished) == group.open > 0
            assert all(id(s) in alive for s in unfinished)
        assert len(alive) == sum(g.open for g in self.groups.values())
        unscheduled = [s for g in self.groups.values() for s in g.seqs if s.arrived is not None]
        assert len(unscheduled) == self._count.unscheduled

    def anew(self) -> EngineCore:
        """A core that has served nobody, on the same runner; this one is not used any more."""
        assert not self.has_work
        core = EngineCore(self.runner, self.config, self.vocabulary, self.proposer, self._clock)
        core.arrivals.grammars = self.grammars
        return core

    def close(self) -> None:
        if self.launched is not None:
            if not self.config.host_steps:  # there it runs when it is committed: nothing is under way
                _wait(self.launched.handle)
            self.scheduler.step_failed(self.launched.step, suspect=False)
            self.launched = None
        if self.grammars is not None:
            self.grammars.close()
        self.runner.close()


def _constrain(batch: Batch, seq: Sequence, draft: list[int], row: int) -> None:
    """What the batch's builder cannot know: the grammar's masks and the draft's distributions, from `row` on."""
    if seq.grammar is not None:
        for j, mask in enumerate(seq.grammar.masks(len(draft))):
            if mask is not None:
                batch.masks[row + j] = mask
    if seq.proposal is not None:
        for j, token in enumerate(draft):
            batch.proposals[row + j] = (token, seq.proposal[j])


def _wait(handle: StepHandle) -> None:
    try:
        handle.result()
    except Exception:
        log.debug("a discarded step failed too", exc_info=True)


def _describe(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
