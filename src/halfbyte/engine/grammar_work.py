"""Grammars beside the steps: compiled and asked for masks on threads of their own, within a budget for each request.

A step never waits for a grammar longer than GRACE_S, and not at all for one that was slow before: a sequence whose mask
is not there sits the step out. A request whose grammar takes more than its budget ends with RequestError, and the same
grammar is refused at once from then on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from halfbyte.engine.grammar import Bits, GrammarCompiler, GrammarState, Vocabulary, too_costly
from halfbyte.engine.grammar_trial import Trials
from halfbyte.engine.request import Constraint
from halfbyte.engine.sequence import Sequence as Seq
from halfbyte.errors import HalfbyteError, RequestError, StepError

log = logging.getLogger("halfbyte")

GRACE_S = 0.002
THREADS = 2  # of each kind
SLOW_NICENESS = 10  # of the threads for grammars that were slow before: the steps of others go first
BUDGET_S, BUDGET_PER_TOKEN_S = 5.0, 0.005  # processor time of all masks of a request
REMEMBERED = 256  # grammars that were refused


class Budget:
    """What the masks of one request may still cost, over all of its choices."""

    def __init__(self, constraint: Constraint) -> None:
        self.constraint = constraint
        self.spent = 0.0
        self.tokens = 0

    @property
    def exceeded(self) -> bool:
        return self.spent > BUDGET_S + BUDGET_PER_TOKEN_S * self.tokens


Turn = tuple[list[int], list[Bits | None]]  # as much of a draft as the grammar allows, and the masks


class GrammarPace:
    """One sequence's grammar and where its next masks are: not due, under way, or there."""

    __slots__ = ("_behind", "_draft", "_job", "_masks", "budget", "slow", "state")

    def __init__(self, state: GrammarState, budget: Budget) -> None:
        self.state, self.budget = state, budget
        self.slow = False
        self._behind: list[list[int]] = []  # for each token that the state has not seen: what a trigger may end with
        self._draft: list[int] = []  # what the masks are for
        self._masks: list[Bits | None] | None = None  # None: not computed
        self._job: Future[Turn] | None = None

    def copy(self) -> GrammarPace:
        return GrammarPace(self.state.copy(), self.budget)

    def observe(self, tokens: Sequence[int]) -> None:
        """`tokens` ends with one newly committed token. Costs nothing: the parser sees it when its turn comes."""
        self.budget.tokens += 1
        if self.state.awake or self._behind or self.state.wakes(tokens):
            self._behind.append(list(tokens[-self.state.longest_trigger :]))
            self._masks = None

    def due(self, draft: list[int]) -> bool:
        """Whether masks are needed that are neither there nor under way."""
        if self._job is not None or self.asleep:
            return False
        return self._masks is None or (bool(draft) and draft != self._draft)

    @property
    def asleep(self) -> bool:
        return not (self.state.awake or self._behind)

    @property
    def job(self) -> Future[Turn] | None:
        return self._job

    def start(self, quick: ThreadPoolExecutor, slow: ThreadPoolExecutor, draft: list[int]) -> None:
        self._job = (slow if self.slow else quick).submit(self._turn, draft)

    def take(self) -> list[int]:
        """What the job has found; the draft as far as it holds. Raises what ends the request."""
        job, self._job = self._job, None
        assert job is not None
        self._draft, self._masks = job.result()
        return self._draft

    def trim(self, tokens: Sequence[int], draft: list[int]) -> list[int]:
        """A draft of a constraint that sleeps; else it is the job's to trim."""
        return self.state.trim(tokens, draft) if self.asleep else draft

    def masks(self, count: int) -> list[Bits | None]:
        """Of the next token and of those after `count` drafted ones."""
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
            raise StepError("the grammar of this request failed.") from None
        finally:
            took = time.thread_time() - began
            self.budget.spent += took
            self.slow = took > GRACE_S


class GrammarWork:
    """The threads, the trials and what is known of grammars so far."""

    def __init__(self, vocabulary: Vocabulary, end_tokens: Sequence[int]) -> None:
        self.compiler = GrammarCompiler(vocabulary, end_tokens)
        self._masks = ThreadPoolExecutor(THREADS, "halfbyte-masks")
        self._slow_masks = ThreadPoolExecutor(THREADS, "halfbyte-slow-masks", step_back)
        self._compiling = ThreadPoolExecutor(THREADS, "halfbyte-grammar", step_back)
        self._refused: OrderedDict[Constraint, str] = OrderedDict()
        self._own = threading.local()
        self._trials: list[Trials] = []
        self._lock = threading.Lock()
        self.close = weakref.finalize(self, _close, (self._masks, self._slow_masks, self._compiling), self._trials)

    def prepare(self, constraint: Constraint, prompt: Sequence[int]) -> Future[GrammarPace]:
        """The grammar at its start; done already where it is known, or known to be refused."""
        known: Future[GrammarPace] = Future()
        with self._lock:
            refused = self._refused.get(_bare(constraint))
        if refused is not None:
            known.set_exception(RequestError(refused))
            return known
        if not self.compiler.known(constraint):
            return self._compiling.submit(self._prepare, constraint, prompt)
        try:
            known.set_result(self._pace(constraint, prompt))
        except HalfbyteError as e:
            known.set_exception(e)
        return known

    def _pace(self, constraint: Constraint, prompt: Sequence[int]) -> GrammarPace:
        return GrammarPace(self.compiler.compile(constraint, prompt), Budget(constraint))

    def _prepare(self, constraint: Constraint, prompt: Sequence[int]) -> GrammarPace:
        try:
            if not hasattr(self._own, "trials"):
                self._own.trials = Trials(self.compiler.vocabulary, self.compiler.end_tokens)
                self._trials.append(self._own.trials)
            if not self.compiler.known(constraint):
                self._own.trials.check(_bare(constraint))
            return self._pace(constraint, prompt)
        except HalfbyteError as e:
            if isinstance(e, RequestError):
                self.refuse(constraint, e)
            raise
        except BaseException as e:  # native code panics past Exception
            log.error("a grammar failed", exc_info=e)
            raise RequestError(f"the {constraint.kind} of this request cannot be used.") from None

    def refuse(self, constraint: Constraint, error: RequestError) -> None:
        """From now on."""
        with self._lock:
            self._refused[_bare(constraint)] = str(error)
            if len(self._refused) > REMEMBERED:
                self._refused.popitem(last=False)

    def turn(self, seqs: Iterable[Seq]) -> list[tuple[Seq, BaseException]]:
        """Sees to the masks of every sequence whose last token is known: asks for those that are due, takes what is
        there, and holds back who has to wait. Returns those that cannot go on."""
        pending = []
        for seq in seqs:
            if seq.grammar is None or seq.inflight:
                continue
            if seq.grammar.due(seq.draft):
                seq.grammar.start(self._masks, self._slow_masks, seq.draft)
            if seq.grammar.job is not None:
                pending.append((seq, seq.grammar, seq.grammar.job))
        wait([job for _, grammar, job in pending if not grammar.slow], GRACE_S)
        failed: list[tuple[Seq, BaseException]] = []
        for seq, grammar, job in pending:
            seq.held = not job.done()
            if seq.held:
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
    """This thread lets others go first. On other systems than Linux that would be said of the whole process."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            me = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, me, os.getpriority(os.PRIO_PROCESS, me) + SLOW_NICENESS)


def _close(pools: Iterable[ThreadPoolExecutor], trials: list[Trials]) -> None:
    for pool in pools:
        pool.shutdown(wait=False, cancel_futures=True)
    for each in trials:
        each.close()


def _bare(constraint: Constraint) -> Constraint:
    """The grammar alone."""
    return Constraint(constraint.kind, "" if constraint.kind == "json_object" else constraint.source)
