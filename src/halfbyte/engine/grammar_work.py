"""Grammars in parallel with the steps: threads compile them and compute masks, within a budget for each request.

A step never waits for a grammar longer than GRACE_S, and not at all for one that was slow before: a sequence whose mask
is not ready sits the step out. A request whose grammar exceeds its budget ends with RequestError, and that grammar is
refused at once from then on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait

from halfbyte.byte_cache import ByteCache
from halfbyte.engine.grammar import Bits, GrammarCompiler, GrammarState, GrammarVocabulary, grammar_key, too_costly
from halfbyte.engine.grammar_trial import Trials
from halfbyte.engine.request import Constraint
from halfbyte.engine.sequence import Sequence as Seq
from halfbyte.engine.worker_threads import WorkerThreads
from halfbyte.errors import HalfbyteError, RequestError

log = logging.getLogger("halfbyte")

GRACE_S = 0.002
THREADS = 2  # in each pool
SLOW_NICENESS = 10  # of the threads for grammars that were slow before: steps go first
BUDGET_S, BUDGET_PER_TOKEN_S = 5.0, 0.005  # processor time for all masks of a request
REFUSED_BYTES = 1 << 20  # for the digests and reasons of refused grammars


class Budget:
    """The processor time of the masks of one request, over all of its choices."""

    def __init__(self, constraint: Constraint) -> None:
        self.constraint = constraint
        self.spent = 0.0
        self.tokens = 0

    @property
    def exceeded(self) -> bool:
        return self.spent > BUDGET_S + BUDGET_PER_TOKEN_S * self.tokens


Turn = tuple[list[int], list[Bits | None]]  # the part of a draft that the grammar allows, and the masks


class GrammarPace:
    """The grammar of one sequence and the state of its next masks: not due, under way, or ready."""

    __slots__ = ("_behind", "_draft", "_job", "_masks", "asleep", "budget", "slow", "state")

    def __init__(self, state: GrammarState, budget: Budget) -> None:
        self.state, self.budget = state, budget
        self.slow = False
        self.asleep = not state.awake  # no mask is due
        self._behind: list[list[int]] = []  # for each unread token: the tokens that may complete a trigger
        self._draft: list[int] = []  # the draft that the masks are for
        self._masks: list[Bits | None] | None = None  # None: not computed
        self._job: Future[Turn] | None = None

    def copy(self) -> GrammarPace:
        return GrammarPace(self.state.copy(), self.budget)

    def observe(self, tokens: Sequence[int]) -> None:
        """Note one committed token, the last of `tokens`. Cheap: the parser reads it in the next job."""
        self.budget.tokens += 1
        if not self.asleep or self.state.wakes(tokens):
            self._behind.append(list(tokens[-self.state.longest_trigger :]))
            self._masks = None
            self.asleep = False

    def due(self, draft: list[int]) -> bool:
        """True if masks are needed that are neither ready nor under way."""
        if self._job is not None or self.asleep:
            return False
        return self._masks is None or (bool(draft) and draft != self._draft)

    def allows_run_ahead(self, tokens: Sequence[int]) -> bool:
        """True if the next step may be scheduled before the last token is known: no mask can be due by then."""
        return self.asleep and not self.state.may_wake_soon(tokens)

    @property
    def job(self) -> Future[Turn] | None:
        return self._job

    def start(self, quick: WorkerThreads, slow: WorkerThreads, draft: list[int]) -> None:
        self._job = (slow if self.slow else quick).submit(self._turn, draft)

    def take(self) -> list[int]:
        """Take the masks of the finished job and return the draft as far as the grammar allows it. Raises an error that
        ends the request."""
        job, self._job = self._job, None
        assert job is not None
        self._draft, self._masks = job.result()
        self.asleep = not self.state.awake
        return self._draft

    def trim(self, tokens: Sequence[int], draft: list[int]) -> list[int]:
        """Cut a draft where a sleeping constraint would wake up. An awake one leaves that to its job."""
        return self.state.trim(tokens, draft) if self.asleep else draft

    def masks(self, count: int) -> list[Bits | None]:
        """Masks for the next token and for those after `count` drafted ones."""
        if self.asleep:
            return [None] * (count + 1)
        assert self._masks is not None, "a sequence was scheduled before its masks were there"
        return self._masks[: count + 1]

    def _turn(self, draft: list[int]) -> Turn:
        began = time.thread_time()
        try:
            if self.budget.exceeded:
                raise too_costly(self.budget.constraint.kind)
            last: list[int] = []
            while self._behind:
                last = self._behind.pop(0)
                self.state.observe(last)
            draft = self.state.trim(last, draft)
            return draft, self.state.masks(draft)
        except HalfbyteError:
            raise
        except BaseException as e:  # native code panics past Exception
            log.error("a grammar failed", exc_info=e)
            raise RequestError(f"the {self.budget.constraint.kind} of this request cannot be used.") from None
        finally:
            took = time.thread_time() - began
            self.budget.spent += took
            self.slow = took > GRACE_S


class GrammarWork:
    """The threads, the trial processes and the list of refused grammars."""

    def __init__(self, vocabulary: GrammarVocabulary, end_tokens: Sequence[int]) -> None:
        self.compiler = GrammarCompiler(vocabulary, end_tokens)
        self._masks = WorkerThreads(THREADS, "halfbyte-masks")
        self._slow_masks = WorkerThreads(THREADS, "halfbyte-slow-masks", step_back)
        self._compiling = WorkerThreads(THREADS, "halfbyte-grammar", step_back)
        self._refused: ByteCache[bytes, str] = ByteCache(REFUSED_BYTES)  # why, by the grammar's key
        self._own = threading.local()
        self._trials: list[Trials] = []
        self._lock = threading.Lock()
        self._threads = self._masks, self._slow_masks, self._compiling
        self._end = weakref.finalize(self, _end, self._threads, self._trials)

    def close(self) -> None:
        """Returns once no thread of it runs any more."""
        self._end()
        for threads in self._threads:
            threads.join()

    def prepare(self, constraint: Constraint, prompt: Sequence[int]) -> Future[GrammarPace]:
        """The grammar at its start. The future is done already if the grammar is compiled or was refused before."""
        future: Future[GrammarPace] = Future()
        with self._lock:
            refused = self._refused.get(grammar_key(constraint))
        if refused is not None:
            future.set_exception(RequestError(refused))
            return future
        if not self.compiler.has(constraint):
            return self._compiling.submit(self._prepare, constraint, prompt)
        try:
            future.set_result(self._pace(constraint, prompt))
        except HalfbyteError as e:
            future.set_exception(e)
        return future

    def _pace(self, constraint: Constraint, prompt: Sequence[int], size: int | None = None) -> GrammarPace:
        return GrammarPace(self.compiler.compile(constraint, prompt, size), Budget(constraint))

    def _prepare(self, constraint: Constraint, prompt: Sequence[int]) -> GrammarPace:
        try:
            if not hasattr(self._own, "trials"):
                self._own.trials = Trials(self.compiler.vocabulary, self.compiler.end_tokens)
                self._trials.append(self._own.trials)
            compiled = self.compiler.has(constraint)
            size = None if compiled else self._own.trials.check(Constraint(constraint.kind, constraint.source))
            return self._pace(constraint, prompt, size)
        except HalfbyteError as e:
            if isinstance(e, RequestError):
                self.refuse(constraint, e)
            raise
        except BaseException as e:  # native code panics past Exception
            log.error("a grammar failed", exc_info=e)
            raise RequestError(f"the {constraint.kind} of this request cannot be used.") from None

    def refuse(self, constraint: Constraint, error: RequestError) -> None:
        """Refuse this grammar from now on."""
        with self._lock:
            key, text = grammar_key(constraint), str(error)
            self._refused.put(key, text, len(key) + 4 * len(text))

    def turn(self, seqs: Iterable[Seq]) -> list[tuple[Seq, BaseException]]:
        """Start the masks that are due, take those that are ready and hold back the sequences that have to wait. Skips
        sequences whose last token is not known yet. Returns the sequences that failed, with their errors."""
        pending = []
        for seq in seqs:
            if seq.grammar is None or seq.grammar.asleep or seq.num_steps_in_flight:
                continue
            if seq.grammar.due(seq.draft):
                seq.grammar.start(self._masks, self._slow_masks, seq.draft)
            if seq.grammar.job is not None:
                pending.append((seq, seq.grammar, seq.grammar.job))
        if not pending:
            return []
        wait([job for _, grammar, job in pending if not grammar.slow], GRACE_S)
        failed: list[tuple[Seq, BaseException]] = []
        for seq, grammar, job in pending:
            seq.waits_for_grammar = not job.done()
            if seq.waits_for_grammar:
                continue
            drafted = bool(seq.draft)
            try:
                draft = grammar.take()
                seq.draft = draft if drafted else []  # it may have been preempted meanwhile
            except Exception as e:
                if isinstance(e, RequestError):
                    self.refuse(grammar.budget.constraint, e)
                failed.append((seq, e))
                continue
            if drafted and not draft and seq.pace is not None:
                seq.pace.nothing()
        return failed


def step_back() -> None:
    """Lower the priority of this thread. Only on Linux: elsewhere that would lower the whole process."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            me = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, me, os.getpriority(os.PRIO_PROCESS, me) + SLOW_NICENESS)


def _end(pools: Iterable[WorkerThreads], trials: list[Trials]) -> None:
    for pool in pools:
        pool.end()
    for trial in trials:
        trial.close()
