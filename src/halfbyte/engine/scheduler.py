"""The scheduler: which sequences compute how many tokens in the next step. Holds no tensors and launches nothing.

Every step serves every sequence that decodes, then spends what is left of its token budget on prompts, so a long
prompt slows the others down but never stops them; while nobody decodes, the budget may be larger. Of the prompts, the
oldest is finished if it can be, else gets at least half; the others share the rest in their order, so that a short
prompt does not wait for a long one before it either.

A step may be scheduled while the last one still runs ("ahead"): a token that is not known yet is a placeholder which
the runner fills from the running step. That is done only where the answer cannot change what is scheduled: never for
a sequence with drafts, grammar or penalties, and never when pages are short. Otherwise `schedule` returns None and the
caller commits first. So preemption meets no running step, and pages are released at commit only. Chunks of one prompt
in two steps in flight are together no larger than the one whose sliding pages were promised when it was admitted.

Preempted sequences lose their pages, go back to their place in the queue and are computed again; the prefix cache
usually still has most of it. The oldest running sequence is never preempted, and a request that would not fit alone
is refused on arrival, so some sequence always makes progress.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from halfbyte.engine.config import EngineConfig
from halfbyte.engine.request import Request
from halfbyte.engine.sequence import Sequence, State
from halfbyte.errors import ContextError, QueueFullError
from halfbyte.kv.pages import PagePool

# Of a prompt whose logprobs are wanted, in one step: each row's logits are nearly a megabyte.
SCORED_ROWS = 64


@dataclass(slots=True)
class ScheduledStep:
    """One step: for each sequence, `counts` tokens from `starts`. `drafts` are the last of them where not empty."""

    seqs: list[Sequence] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)  # whether the last row's logits are wanted
    scores: list[int] = field(default_factory=list)  # rows before the sampled ones whose logits are wanted, too
    score_room: int = SCORED_ROWS
    rows: int = 0
    ahead: bool = True  # whether the next step may be scheduled before this one is committed
    decode_only: bool = True  # one row each, no drafts


_NO_DRAFT: list[int] = []


class Scheduler:
    def __init__(self, pages: PagePool, config: EngineConfig) -> None:
        self.pages, self.config = pages, config
        self.waiting: list[Sequence] = []  # by order
        self.running: list[Sequence] = []  # by order
        self.leaving: list[Sequence] = []  # finished while in flight: pages are released at commit
        self.suspects: list[Sequence] = []  # of a failed step: run one at a time until each has passed or failed alone
        # Rows in one step, in which every running sequence must fit.
        self.most_rows = max(config.max_tokens, config.max_seqs)
        self.most_rows_beside_decode = max(config.beside_decode, config.max_seqs)
        self.row_budget = self.most_rows  # shrinks while memory is short
        self.preemptions = 0
        self._slots = list(range(config.max_seqs - 1, -1, -1))
        self._order = self._admissions = 0
        # The most tokens one sequence can ever hold: found once, by bisection over the exact accounting.
        low, high = 0, config.max_context
        while low < high:
            mid = (low + high + 1) // 2
            if pages.peak_pages(mid, 2) <= pages.capacity:
                low = mid
            else:
                high = mid - 1
        self.longest = low

    # ---- arrivals and departures --------------------------------------------------------------

    def limit_of(self, request: Request) -> int:
        """At which length a request ends at the latest; refuses one that can never be served."""
        prompt, most = len(request.prompt), request.sampling.max_tokens
        context = self.config.max_context
        wanted = prompt + (1 if most is None else most)
        if wanted > context:
            parts = f"{prompt} prompt tokens" + ("" if most is None else f" + max_tokens {most}")
            raise ContextError(
                f"{parts} = {wanted - (most is None)} tokens, but the context is {context}; shorten the prompt"
                f"{'' if most is None else ' or lower max_tokens'}."
            )
        if wanted > self.longest:
            need, have = self.pages.peak_pages(wanted, 2), self.pages.capacity
            raise ContextError(
                f"{wanted} tokens need {need} KV pages of {self.pages.page_size} tokens at once, but the cache has "
                f"{have} and can hold at most {self.longest} tokens of one request; shorten it, or give the cache "
                f"more memory."
            )
        return min(context, self.longest) if most is None else wanted

    def add(self, seqs: list[Sequence]) -> None:
        """Queue the choices of one request; the first leads, the others reuse its prompt pages."""
        if len(self.waiting) + len(seqs) > self.config.max_waiting:
            raise QueueFullError(
                f"{len(self.waiting)} requests wait already (the limit is {self.config.max_waiting}); try again later."
            )
        for seq in seqs:
            self._order += 1
            seq.order = self._order
            if seq is not seqs[0]:
                seq.leader = seqs[0]
            self.pages.hash_blocks(seq.tables, seq.tokens, seq.prompt)
            self.waiting.append(seq)

    def finish(self, seq: Sequence) -> None:
        """Ended, cancelled or failed: gives everything back now, or at commit if a launched step still holds it."""
        if seq.state is State.FINISHED:
            return
        if seq.state is State.WAITING:
            self.waiting.remove(seq)
        else:
            self.running.remove(seq)
        if seq in self.suspects:
            self.suspects.remove(seq)
        seq.state = State.FINISHED
        seq.draft = _NO_DRAFT
        if seq.inflight:
            self.leaving.append(seq)
        else:
            self._release(seq)

    def preempt(self, seq: Sequence) -> None:
        assert seq.inflight == 0, "a launched step still writes its pages"
        self.running.remove(seq)
        self._release(seq)
        seq.state = State.WAITING
        seq.draft = _NO_DRAFT
        insort(self.waiting, seq, key=_order)
        self.preemptions += 1

    def _release(self, seq: Sequence) -> None:
        self.pages.release(seq.tables)
        if seq.slot >= 0:
            self._slots.append(seq.slot)
            seq.slot = -1
        seq.scheduled = seq.pending = seq.capacity = 0

    # ---- one step -----------------------------------------------------------------------------

    def schedule(self, *, ahead: bool = False) -> ScheduledStep | None:
        """The next step, or None: nothing to do, or (ahead) nothing that can be decided before the last commit."""
        if self.suspects:
            return None if ahead else self._one_suspect()
        while True:
            step = ScheduledStep()
            prompts = self._add_decodes(step, ahead)
            if prompts is None:
                return None
            self._add_prompts(step, prompts)
            if step.seqs:
                return self._mark_launched(step)
            if ahead or not self.running or any(s.held for s in self.running):
                return None
            # Only prompts, and none of them fits: the youngest yields.
            assert len(self.running) > 1, "a sequence that was admitted does not fit alone"
            self.preempt(self.running[-1])

    def _add_decodes(self, step: ScheduledStep, ahead: bool) -> list[Sequence] | None:
        """Add every sequence that has one token to compute; returns the others, or None if pages are short ahead."""
        prompts: list[Sequence] = []
        seqs, starts, counts, drafts, samples = step.seqs, step.starts, step.counts, step.drafts, step.samples
        i = 0
        while i < len(self.running):  # preemption takes from the end, so an index stays right
            seq = self.running[i]
            i += 1
            if seq.held:
                continue
            start = seq.scheduled
            uncomputed = len(seq.tokens) + seq.pending - start
            if uncomputed != 1 or seq.prompt == seq.limit:  # nothing is sampled of what generates nothing
                if uncomputed:
                    prompts.append(seq)
                continue
            if start + 1 >= seq.limit and seq.pending:
                continue  # the token in flight is its last
            draft = seq.draft
            if draft:
                draft = draft[: max(0, seq.limit - start - 2)]
                if start + 1 + len(draft) > seq.capacity and not self._extend(seq, start + 1 + len(draft)):
                    draft = _NO_DRAFT
                elif draft:
                    step.decode_only = False
            if start + 1 > seq.capacity and not self._extend(seq, start + 1):
                if ahead:
                    return None
                if not self._preempt_for(seq, start + 1):
                    break  # it was the youngest itself, so nobody is left behind it
            if draft or not seq.runs_ahead:
                step.ahead = False
            seqs.append(seq)
            starts.append(start)
            counts.append(1 + len(draft))
            drafts.append(draft)
            samples.append(True)
            step.scores.append(0)
            step.rows += 1 + len(draft)
        return prompts

    def _add_prompts(self, step: ScheduledStep, prompts: list[Sequence]) -> None:
        """Spend the rest of the budget: what ends the oldest prompt, or half; then on the others, as they arrived."""
        budget = (min(self.row_budget, self.most_rows_beside_decode) if step.rows else self.row_budget) - step.rows
        if budget <= 0 or not (prompts or self.waiting):
            return
        oldest: Sequence | None = None
        share = 0
        if prompts:
            oldest = prompts[0]
            halved = (len(prompts) > 1 or self.waiting) and len(oldest.tokens) - oldest.scheduled > budget
            share = self._chunk(oldest, budget // 2 if halved else budget, SCORED_ROWS)
            budget -= share
            if oldest.scored < oldest.prompt:  # half is its own
                step.score_room -= SCORED_ROWS // 2
            for seq in prompts[1:]:
                budget -= self._add_chunk(step, seq, budget)
        budget = self._admit(step, budget)
        if oldest is not None:
            if oldest.scored < oldest.prompt:
                step.score_room += SCORED_ROWS // 2
            self._add_chunk(step, oldest, share + budget)

    def _admit(self, step: ScheduledStep, budget: int) -> int:
        if not self.waiting or not self._slots or budget <= 0:
            return budget
        promised = sum(
            self.pages.peak_pages(len(s.tokens) + 1, self.row_budget) - len(s.tables.full) - len(s.tables.sliding)
            + s.tables.first
            for s in self.running if len(s.tokens) - s.scheduled > 1
        )  # fmt: skip
        i = 0
        while i < len(self.waiting) and self._slots and budget > 0:
            seq = self.waiting[i]
            led = seq.leader is not None and not seq.leader.prefilled and seq.leader.state is not State.FINISHED
            if led or seq.held:
                i += 1  # its prompt is being computed by its leader, or its first mask is
                continue
            # A row whose logits are wanted is computed, whatever is cached.
            wanted = seq.scored if seq.scored < seq.prompt else len(seq.tokens)
            hit = self.pages.match(seq.tables, wanted - 1)
            need = self.pages.cost(seq.tables, hit, len(seq.tokens) + 1, self.row_budget)
            if self.running and need + max(0, promised) + len(self.running) > self.pages.available:
                return budget  # strictly in order: nobody overtakes the one that waits for pages
            del self.waiting[i]
            self.pages.attach(seq.tables, hit, len(seq.tokens))
            seq.state = State.RUNNING
            seq.slot = self._slots.pop()
            self._admissions += 1
            seq.admission = self._admissions
            seq.scheduled = seq.tables.length
            seq.capacity = len(seq.tables.full) * self.pages.page_size
            if seq.generated == 0:
                seq.cached = seq.tables.length
            insort(self.running, seq, key=_order)
            budget -= self._add_chunk(step, seq, budget)
            promised += need
        return budget

    def _chunk(self, seq: Sequence, most: int, score_room: int) -> int:
        """How many tokens of a prompt fit in `most` rows, `score_room` of them with logits, beside those of it that are
        still in flight, and in the pages that are left; takes the pages."""
        start = seq.scheduled
        count = min(len(seq.tokens) - start, most, seq.tables.length + self.row_budget - start)
        wanted = seq.unscored(start, start + count)
        if len(wanted) > score_room:
            count = wanted.start + score_room - start
        if start + count > seq.capacity and not self._extend(seq, start + count):
            size = self.pages.page_size
            count = min(count, seq.capacity + self.pages.available // 2 * size - start)
            if count <= 0 or not self._extend(seq, start + count):
                return 0
        return max(0, count)

    def _add_chunk(self, step: ScheduledStep, seq: Sequence, most: int) -> int:
        count = self._chunk(seq, most, step.score_room)
        if count:
            start, generates = seq.scheduled, seq.prompt < seq.limit
            last = start + count == len(seq.tokens) and generates
            scores = len(seq.unscored(start, start + count))
            step.seqs.append(seq)
            step.starts.append(seq.scheduled)
            step.counts.append(count)
            step.drafts.append(_NO_DRAFT)
            step.samples.append(last)
            step.scores.append(scores)
            step.score_room -= scores
            step.rows += count
            step.decode_only = step.decode_only and count == 1 and last
            step.ahead = step.ahead and (seq.runs_ahead or not last)
        return count

    def _mark_launched(self, step: ScheduledStep) -> ScheduledStep:
        for seq, start, count, samples in zip(step.seqs, step.starts, step.counts, step.samples):
            seq.scheduled = start + count
            seq.inflight += 1
            if samples:
                seq.pending += 1
        step.ahead = step.ahead and self.config.run_ahead
        return step

    def _one_suspect(self) -> ScheduledStep | None:
        while self.suspects:
            seq = self.suspects[0]
            if seq.state is not State.RUNNING:
                self.suspects.pop(0)
                continue
            if seq.held:
                return None
            seq.draft = _NO_DRAFT
            step = ScheduledStep(ahead=False)
            while not self._add_chunk(step, seq, self.row_budget):
                if self.running[-1] is seq:
                    break
                self.preempt(self.running[-1])
            if step.seqs:
                step.ahead = False
                return self._mark_launched(step)
            self.suspects.pop(0)
            self.preempt(seq)
        return self.schedule()

    # ---- pages --------------------------------------------------------------------------------

    def _extend(self, seq: Sequence, length: int) -> bool:
        if not self.pages.extend(seq.tables, length):
            return False
        seq.capacity = len(seq.tables.full) * self.pages.page_size
        return True

    def _preempt_for(self, seq: Sequence, length: int) -> bool:
        """Preempt from the youngest until `length` fits; False if that was the sequence itself."""
        while not self._extend(seq, length):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is seq:
                return False
        return True

    # ---- after a step -------------------------------------------------------------------------

    def step_done(self, seq: Sequence, samples: bool) -> bool:
        """A launched step of `seq` is over. False if its result is to be discarded: the sequence ended meanwhile."""
        seq.inflight -= 1
        if samples:
            seq.pending -= 1
        if seq.state is not State.RUNNING:
            if seq.state is State.FINISHED and seq.inflight == 0 and seq in self.leaving:
                self.leaving.remove(seq)
                self._release(seq)
            return False
        return True

    def advance(self, seq: Sequence, computed: int) -> None:
        """`computed` tokens are there for good: publish their pages; rejected drafts are computed over again."""
        self.pages.commit(seq.tables, seq.tokens, computed)
        if seq.inflight == 0:
            seq.scheduled = computed
        if computed >= seq.prompt:
            seq.prefilled = True
        if self.suspects and seq in self.suspects:
            self.suspects.remove(seq)

    def step_failed(self, step: ScheduledStep, *, suspect: bool = True) -> None:
        """A launched step did not happen: as if it had not been scheduled. Of two in flight, the later fails first.

        `suspect`: nobody knows which sequence is to blame, so they are run one by one until it is found.
        """
        for seq, start, samples in zip(step.seqs, step.starts, step.samples):
            if self.step_done(seq, samples):
                seq.scheduled = start
                seq.draft = _NO_DRAFT
                if suspect and seq not in self.suspects:
                    self.suspects.append(seq)

    # ---- invariants ---------------------------------------------------------------------------

    def check(self, launched: list[ScheduledStep] | None = None) -> None:
        """Every invariant, from scratch; `launched` are the steps in flight."""
        self.pages.check()
        orders = [s.order for s in self.running]
        assert orders == sorted(orders)
        assert [s.order for s in self.waiting] == sorted(s.order for s in self.waiting)
        slots = [s.slot for s in self.running + self.leaving]
        assert sorted(slots + self._slots) == list(range(self.config.max_seqs)), "a slot is lost or held twice"
        flying: dict[int, int] = {}
        for step in launched or []:
            for seq in step.seqs:
                flying[id(seq)] = flying.get(id(seq), 0) + 1
                assert seq.tables.attached, "pages were given back that a launched step still writes"
        for seq in self.waiting:
            assert seq.state is State.WAITING
            assert not seq.tables.attached
            assert (seq.scheduled, seq.pending, seq.inflight, seq.slot) == (0, 0, 0, -1)
        for seq in self.running:
            assert seq.state is State.RUNNING
            assert seq.tables.attached
            assert seq.tables.length <= seq.scheduled <= len(seq.tokens) + seq.pending + len(seq.draft)
            assert seq.scheduled <= seq.capacity == len(seq.tables.full) * self.pages.page_size
            assert len(seq.tokens) < seq.limit or seq.params.max_tokens == 0, "a sequence at its limit still runs"
            if launched is not None:
                assert seq.inflight == flying.get(id(seq), 0)
            if seq.inflight == 0:
                assert seq.pending == 0
                assert seq.tables.length == seq.scheduled
        for seq in self.leaving:
            assert seq.state is State.FINISHED
            assert seq.inflight > 0
        owned = {id(s.tables) for s in self.running + self.leaving}
        assert owned == self.pages.attached, "a table is held by nobody"


def _order(seq: Sequence) -> int:
    return seq.order
