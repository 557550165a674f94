"""The scheduler: which sequences compute how many tokens in the next step. Holds no tensors and launches nothing.

Every step serves every sequence that decodes, then spends what is left of its token budget on prompts, so a long
prompt slows the others down but never stops them; while no sequence decodes, and no short prompt of another client
waits for the step, the budget may be larger, and somewhat larger while prompts come in a burst (`bursts.py`). Prompts
go in turn: first those of the client that has had least (`clients.py`), the oldest of them first. The first in turn is
finished if it can be, else it gets at least half; the rest goes to prompts that it finishes, the shortest first and
waiting ones included, then to longer ones in turn. So a short prompt waits for no long one, however many there are, and
a long one always gets its half in its turn.

Slots and pages are shared among clients, too. The client that holds least is admitted first, and a sequence that
finds no room takes that of a client which then still holds as much. Sequences of one client are admitted in order; one
of another client may overtake a sequence that waits for pages, in pages that the waiting one will not need. With one
client all of this is first come, first served.

A step may be scheduled while the last one still runs ("ahead"): a token that is not known yet is a placeholder which
the runner fills from the running step. That is done only where the answer cannot change what is scheduled: never for
a sequence with drafts, penalties or a grammar that is awake or about to wake, and never when pages are short. Otherwise
`schedule` returns None and the caller commits first. So preemption meets no running step, and pages are released at
commit only. Chunks of one prompt in two steps in flight are together no larger than the one whose sliding pages were
promised when it was admitted.

Where generated tokens and prompts take different kernels and --deterministic is on (`answer_rows`), a step holds rows
of one kind. While both wait, prompts have one step after ANSWER_STEPS of answers, and so many times the rows: kernels
of prompts read the same experts for more rows, which costs less for each. The kind of a row follows from its position
and the length of the prompt alone. So a preempted sequence has its prompt read as a prompt again, and then its
generated tokens computed by the kernels that computed them before.

Preempted sequences lose their pages, go back to their place in their client's queue and are computed again; the prefix
cache usually still has most of it, in pages or in a lower tier (`prefix_tiers.py`). A client with several sequences
yields before another's only one. The oldest running sequence is never preempted, and a request that would not fit alone
is refused on arrival, so some sequence always makes progress.
"""

from __future__ import annotations

from bisect import insort
from typing import Protocol

from halfbyte.engine.bursts import Bursts
from halfbyte.engine.clients import Clients, held_pages
from halfbyte.engine.config import EngineConfig
from halfbyte.engine.request import Request
from halfbyte.engine.scheduled_step import SCORED_ROWS, ScheduledChunk, ScheduledStep
from halfbyte.engine.sequence import Sequence, State
from halfbyte.errors import ContextError, QueueFullError
from halfbyte.kv.pages import Hit, PagePool

# A step that is full of decoding sequences is larger by one part in so many, so that prompts are read in it, too.
PROMPT_PART = 4

# Steps of answers for each step of prompts, where a step holds one kind.
ANSWER_STEPS = 3

# Clients whose next sequence finds no room, after which a step looks no further.
MOST_BLOCKED = 16

_NO_DRAFT: list[int] = []
_NO_ROWS = range(0)


class LowerTiers(Protocol):
    """Where prefixes are that the pages have not (`prefix_tiers.py`)."""

    @property
    def promised_pages(self) -> int: ...

    def bring_up(self, seq: Sequence, hit: Hit, limit: int, need: int) -> bool: ...


class Scheduler:
    def __init__(self, pages: PagePool, config: EngineConfig) -> None:
        self.pages, self.config = pages, config
        self.clients = Clients(pages, config.max_seqs)
        self.num_waiting = 0
        self.running: list[Sequence] = []  # by order
        self.leaving: list[Sequence] = []  # finished while in flight: pages are released at commit
        self.suspects: list[Sequence] = []  # sequences of a failed step, run alone until each has passed or failed
        # Rows in one step, which must have room for every running sequence.
        self.max_rows = max(config.max_rows_per_step, config.max_seqs)
        turns = ANSWER_STEPS if config.answer_rows else 1
        self.max_rows_with_decode = max(turns * config.max_rows_with_decode, config.max_seqs)
        self.max_rows_in_burst = max(self.max_rows_with_decode, config.max_rows_in_burst)
        self._bursts = Bursts()
        self._pages_short = False  # of those that wait, one has found no pages
        # Prompts that are read in several steps wait for slots in front of which others may pass.
        self.most_unfinished = max(4, config.max_seqs // 4)
        self.row_budget = self.max_rows  # shrinks while memory is short
        self.preemptions = 0
        self.tiers: LowerTiers | None = None
        self._answer_steps = 0  # since the last step of prompts, where a step holds one kind
        self._slots = list(range(config.max_seqs - 1, -1, -1))
        self._order = self._admissions = 0
        # The most tokens one sequence can ever hold, found by bisection over the exact page count.
        low, high = 0, config.max_context
        while low < high:
            mid = (low + high + 1) // 2
            if pages.peak_pages(mid, 2) <= pages.capacity:
                low = mid
            else:
                high = mid - 1
        self.longest = low

    @property
    def waiting(self) -> list[Sequence]:
        """Sequences without slot and pages, by order."""
        return sorted((s for client in self.clients.present.values() for s in client.waiting), key=_order)

    # ---- arrivals and departures --------------------------------------------------------------

    def max_length_of(self, request: Request) -> int:
        """The length at which a request ends at the latest. Refuses a request that can never be served."""
        prompt, most = len(request.prompt), request.sampling.max_tokens
        context = self.config.max_context
        length = prompt + (1 if most is None else most)
        if length > context:
            parts = f"{prompt} prompt tokens" + ("" if most is None else f" + max_tokens {most}")
            raise ContextError(
                f"{parts} = {length - (most is None)} tokens, but the context is {context}; shorten the prompt"
                f"{'' if most is None else ' or lower max_tokens'}."
            )
        if length > self.longest:
            need, have = self.pages.peak_pages(length, 2), self.pages.capacity
            raise ContextError(
                f"{length} tokens need {need} KV pages of {self.pages.page_size} tokens at once, but the cache has "
                f"{have} and can hold at most {self.longest} tokens of one request; shorten it, or give the cache "
                f"more memory."
            )
        return min(context, self.longest) if most is None else length

    def add(self, seqs: list[Sequence]) -> None:
        """Queue the choices of one request; the first leads, the others reuse its prompt pages."""
        if self.num_waiting + len(seqs) > self.config.max_waiting:
            raise QueueFullError(
                f"{self.num_waiting} requests wait already (the limit is {self.config.max_waiting}); try again later."
            )
        if not self.num_waiting:
            self._pages_short = False
            if not self.running:
                self._bursts = Bursts()
        client = self.clients.arrive(seqs[0].request.client)
        for seq in seqs:
            self._order += 1
            seq.order = self._order
            if seq is not seqs[0]:
                seq.leader = seqs[0]
            seq.client = client
            if self.config.answer_rows:
                seq.tables.boundary = seq.num_prompt_tokens
            self.pages.hash_blocks(seq.tables, seq.tokens, seq.num_prompt_tokens)
            client.waiting.append(seq)
        self.num_waiting += len(seqs)

    def finish(self, seq: Sequence) -> None:
        """End a sequence. It gives everything back now, or at commit if a launched step still uses it."""
        if seq.state is State.FINISHED:
            return
        client = seq.client
        if seq.state is State.WAITING:
            client.waiting.remove(seq)
            self.num_waiting -= 1
        else:
            self.running.remove(seq)
            client.running.remove(seq)
        if not client.running and not client.waiting:
            self.clients.leave(client)
        if seq in self.suspects:
            self.suspects.remove(seq)
        seq.state = State.FINISHED
        seq.draft = _NO_DRAFT
        if seq.num_steps_in_flight:
            self.leaving.append(seq)
        else:
            self._release(seq)

    def preempt(self, seq: Sequence) -> None:
        assert seq.num_steps_in_flight == 0, "a launched step still writes its pages"
        self.running.remove(seq)
        seq.client.running.remove(seq)
        self._release(seq, preempted=True)
        seq.state = State.WAITING
        seq.draft = _NO_DRAFT
        insort(seq.client.waiting, seq, key=_order)
        self.num_waiting += 1
        self.preemptions += 1

    def _release(self, seq: Sequence, *, preempted: bool = False) -> None:
        self.pages.release(seq.tables, preempted=preempted)
        if seq.slot >= 0:
            self._slots.append(seq.slot)
            seq.slot = -1
        seq.num_scheduled_tokens = seq.num_pending_tokens = seq.page_capacity = 0

    # ---- one step -----------------------------------------------------------------------------

    def schedule(self, *, ahead: bool = False) -> ScheduledStep | None:
        """The next step; None if there is nothing to do or, ahead, if the last step has to be committed first."""
        if self.suspects:
            return None if ahead else self._one_suspect()
        may_exchange = True
        while True:
            step = ScheduledStep()
            yielding = self._fill(step, may_exchange)
            if yielding is not None and not yielding:
                if step.chunks:
                    return self._mark_launched(step)
                if ahead or not self.running or any(s.waits_for_grammar for s in self.running):
                    return None
            if ahead:
                return None
            may_exchange = may_exchange and not yielding  # once a step, so that it ends
            yielding = yielding or []
            if not yielding:  # pages are short, or there are only prompts and none of them fits
                assert len(self.running) > 1, "a sequence that was admitted does not fit alone"
                yielding.append(self.clients.youngest_to_yield(self.running))
            for seq in yielding:
                self.preempt(seq)

    def _fill(self, step: ScheduledStep, may_exchange: bool) -> list[Sequence] | None:
        """Every sequence that decodes, then prompts. Returns the sequences that must yield before the step is scheduled
        again; None if pages are short."""
        if self.config.answer_rows:
            return self._fill_apart(step, may_exchange)
        prompts = self._add_decodes(step)
        return None if prompts is None else self._add_prompts(step, prompts, may_exchange)

    def _fill_apart(self, step: ScheduledStep, may_exchange: bool) -> list[Sequence] | None:
        """Fill a step like `_fill`, with rows of answers or of prompts, in turn."""
        first = self._answer_steps < ANSWER_STEPS
        # A sequence that the second of these turns admits may have a place in the third.
        for answers_turn in (first, not first, first):
            ready = [s for s in self.running if not s.waits_for_grammar]
            answers = [s for s in ready if not _in_prompt(s) and _unscheduled(s)]
            if answers_turn:
                step.regime = "batch"
                if not self._add_answers(step, answers):
                    return None
            else:
                step.regime = "prefill"
                prompts = [s for s in ready if _in_prompt(s)]
                yielding = self._add_prompts(step, prompts, may_exchange, short=bool(answers))
                if yielding:
                    return yielding
            if step.chunks:
                break
        return []

    def _add_answers(self, step: ScheduledStep, answers: list[Sequence]) -> bool:
        """Add the generated tokens that are not computed yet: one for each sequence that decodes and its draft, more
        for one that was preempted. False if pages are short."""
        spare = self.config.answer_rows - len(answers)
        for seq in answers:
            start, count = seq.num_scheduled_tokens, _unscheduled(seq)
            if start + 1 >= seq.max_length and seq.num_pending_tokens:
                continue  # the token in flight is its last
            draft = seq.draft[: max(0, min(seq.max_length - start - 2, spare))] if count == 1 else _NO_DRAFT
            most = min(count, 1 + spare, seq.tables.length + self.row_budget - start)
            if most <= 0:
                continue  # its last chunk is still in flight
            if draft and not self._has_room(seq, start + 1 + len(draft)):
                draft = _NO_DRAFT
            if not self._has_room(seq, start + most):
                return False
            last = most == count
            spare -= most - 1 + len(draft)
            step.decode_only = step.decode_only and most == 1 and last and not draft
            step.ahead = step.ahead and not draft and (seq.runs_ahead or not last)
            step.add(seq, start, most + len(draft), draft, last, _NO_ROWS)
        return True

    def _has_room(self, seq: Sequence, length: int) -> bool:
        return length <= seq.page_capacity or self._extend(seq, length)

    def _add_decodes(self, step: ScheduledStep) -> list[Sequence] | None:
        """Add every sequence that has one token to compute; returns the others, or None if pages are short."""
        prompts: list[Sequence] = []
        for seq in self.running:
            if seq.waits_for_grammar:
                continue
            start = seq.num_scheduled_tokens
            uncomputed = len(seq.tokens) + seq.num_pending_tokens - start
            if (
                uncomputed != 1 or seq.num_prompt_tokens == seq.max_length
            ):  # nothing is sampled of what generates nothing
                if uncomputed:
                    prompts.append(seq)
                continue
            if start + 1 >= seq.max_length and seq.num_pending_tokens:
                continue  # the token in flight is its last
            draft = seq.draft
            if draft:
                draft = draft[: max(0, seq.max_length - start - 2)]
                if start + 1 + len(draft) > seq.page_capacity and not self._extend(seq, start + 1 + len(draft)):
                    draft = _NO_DRAFT
                elif draft:
                    step.decode_only = False
            if start + 1 > seq.page_capacity and not self._extend(seq, start + 1):
                return None
            if draft or not seq.runs_ahead:
                step.ahead = False
            step.add(seq, start, 1 + len(draft), draft, True, _NO_ROWS)
        return prompts

    def _add_prompts(
        self, step: ScheduledStep, prompts: list[Sequence], may_exchange: bool, *, short: bool = False
    ) -> list[Sequence]:
        """Spend the rest of the budget on prompts. Returns the sequences that must yield before the step is scheduled
        again, so that a client which holds less has room. `short`: other sequences wait for this step to decode."""
        limit = self.row_budget
        if step.rows or short or self._must_be_short(prompts):
            least = step.rows + self.max_rows_with_decode // PROMPT_PART
            burst = step.rows and self._in_burst(prompts)
            limit = min(limit, max(self.max_rows_in_burst if burst else self.max_rows_with_decode, least))
        budget = limit - step.rows
        if budget <= 0 or not (prompts or self.num_waiting):
            return []
        first: Sequence | None = None
        share = 0
        longer: list[Sequence] = []
        if prompts:
            prompts.sort(key=_turn)
            first, *others = prompts
            halved = (others or self.num_waiting) and _uncomputed(first) > budget
            share = self._chunk(first, budget // 2 if halved else budget, SCORED_ROWS)
            budget -= share
            if first.first_unscored < first.num_prompt_tokens:  # half of the scored rows are reserved for it
                step.score_room -= SCORED_ROWS // 2
            for seq in sorted(others, key=_uncomputed):
                if _uncomputed(seq) > budget:
                    longer.append(seq)
                else:
                    budget -= self._add_chunk(step, seq, budget)
        budget, yielding = self._admit(step, budget, longer, may_exchange)
        longer.sort(key=_turn)
        for seq in longer:
            budget -= self._add_chunk(step, seq, budget)
        if first is not None:
            if first.first_unscored < first.num_prompt_tokens:
                step.score_room += SCORED_ROWS // 2
            self._add_chunk(step, first, share + budget)
        return yielding

    def _in_burst(self, prompts: list[Sequence]) -> bool:
        """Whether many prompts are to be read beside what decodes. Those count that have room: if the others were the
        reason for larger steps, a full engine would never have short ones."""
        coming = 0 if self._pages_short else min(self.num_waiting, len(self._slots))
        return self._bursts.now(len(self.running) + coming, len(prompts) + coming)

    def _must_be_short(self, prompts: list[Sequence]) -> bool:
        """Whether a short prompt would wait for a step that is large for the sake of another client's long one. On a
        host, where large steps save little, every step among several clients is short: the next prompt may be."""
        present = self.clients.present.values()
        if len(present) < 2:
            return False
        if self.config.host_steps:
            return True
        short = self.max_rows_with_decode
        lengths = [_uncomputed(s) for s in prompts] + [len(c.waiting[0].tokens) for c in present if c.waiting]
        return bool(lengths) and min(lengths) <= short < max(lengths)

    def _admit(
        self, step: ScheduledStep, budget: int, longer: list[Sequence], may_exchange: bool
    ) -> tuple[int, list[Sequence]]:
        """Give slots and pages to waiting sequences. `longer` are running prompts that the budget does not finish: a
        new one that it does not finish either waits for them, unless its client has had less than theirs.

        Returns what is left of the budget, and the sequences that must yield to one that finds no room.
        """
        if not self.num_waiting or budget <= 0 or (not self._slots and len(self.clients.present) == 1):
            return budget, []
        promised = self._promised_pages()
        coming = 0 if self.tiers is None else self.tiers.promised_pages  # to sequences that wait for their prefix
        least_served = min((s.client.served for s in longer), default=None)
        reserved = 0  # pages that sequences which overtake must leave to the first one that waits for pages
        num_blocked = 0
        num_unfinished = len(longer)
        for client in self.clients.in_turn():
            i = 0
            while i < len(client.waiting) and budget > 0:
                seq = client.waiting[i]
                led = seq.leader is not None and not seq.leader.prefilled and seq.leader.state is not State.FINISHED
                if led or seq.waits_for_grammar or seq.waits_for_pages:
                    i += 1  # its prompt is being computed by its leader, or its first mask is, or pages are being read
                    continue
                # A row whose logits are used has to be computed, even if its page is cached.
                first_needed = seq.first_unscored if seq.first_unscored < seq.num_prompt_tokens else len(seq.tokens)
                hit = self.pages.match(seq.tables, first_needed - 1)
                rows = len(seq.tokens) - hit.blocks * self.pages.page_size
                if rows > budget and (
                    num_unfinished >= self.most_unfinished
                    or (least_served is not None and client.served >= least_served)
                ):
                    num_blocked += 1
                    break
                need = self.pages.cost(seq.tables, hit, len(seq.tokens) + 1, self.row_budget)
                if reserved and need + reserved > self.pages.capacity:
                    num_blocked += 1
                    self._pages_short = True
                    break
                lack = need + max(0, promised) + len(self.running) + coming - self.pages.available
                if not self.running and not coming:
                    lack = 0
                if lack > 0 or not self._slots:
                    self._pages_short = self._pages_short or lack > 0
                    if may_exchange:
                        yielding = self.clients.room_for(client, need, lack, slot=not self._slots)
                        if yielding:
                            return budget, yielding
                    num_blocked += 1
                    if lack > 0 and not reserved:
                        reserved = need + self._held_since(seq)
                    break  # no sequence overtakes one of its own client
                if self.tiers is not None and self.tiers.bring_up(seq, hit, first_needed - 1, need):
                    coming += need
                    i += 1
                    continue
                del client.waiting[i]
                self.num_waiting -= 1
                self.pages.attach(seq.tables, hit, len(seq.tokens))
                seq.state = State.RUNNING
                seq.slot = self._slots.pop()
                self._admissions += 1
                self.clients.admitted(seq)
                num_unfinished += rows > budget
                seq.admission = self._admissions
                seq.blocked_at = None
                seq.num_scheduled_tokens = seq.tables.length
                seq.page_capacity = len(seq.tables.full) * self.pages.page_size
                if seq.num_generated_tokens == 0:
                    seq.num_cached_tokens = seq.tables.length
                insort(self.running, seq, key=_order)
                insort(client.running, seq, key=_order)
                budget -= self._add_chunk(step, seq, budget)
                promised += need
                if reserved:
                    reserved += need
            if budget <= 0 or num_blocked >= MOST_BLOCKED:
                break
        return budget, []

    def _promised_pages(self) -> int:
        """Pages that running sequences will still take for their prompts."""
        return sum(
            self.pages.peak_pages(len(s.tokens) + 1, self.row_budget) - held_pages(s)
            for s in self.running if _uncomputed(s) > 1
        )  # fmt: skip

    def _held_since(self, blocked: Sequence) -> int:
        """Pages of sequences that were admitted since this one began to wait for pages."""
        if blocked.blocked_at is None:
            blocked.blocked_at = self._admissions
        return sum(held_pages(s) for s in self.running if s.admission > blocked.blocked_at)

    def _chunk(self, seq: Sequence, most: int, score_room: int) -> int:
        """How many further tokens of a prompt fit in `most` rows, with at most `score_room` of them scored, and in the
        pages that are left; takes the pages."""
        start = seq.num_scheduled_tokens
        end = seq.num_prompt_tokens if self.config.answer_rows else len(seq.tokens)
        count = min(end - start, most, seq.tables.length + self.row_budget - start)
        if count <= 0:
            return 0
        scored = seq.unscored(start, start + count)
        if len(scored) > score_room:
            count = scored.start + score_room - start
        if start + count > seq.page_capacity and not self._extend(seq, start + count):
            size = self.pages.page_size
            count = min(count, seq.page_capacity + self.pages.available // 2 * size - start)
            if count <= 0 or not self._extend(seq, start + count):
                return 0
        return max(0, count)

    def _add_chunk(self, step: ScheduledStep, seq: Sequence, most: int) -> int:
        count = self._chunk(seq, most, step.score_room)
        if count:
            start = seq.num_scheduled_tokens
            last = start + count == len(seq.tokens) and seq.num_prompt_tokens < seq.max_length
            scored = seq.unscored(start, start + count)
            step.add(seq, start, count, _NO_DRAFT, last, scored)
            step.score_room -= len(scored)
            step.decode_only = step.decode_only and count == 1 and last
            step.ahead = step.ahead and (seq.runs_ahead or not last)
        return count

    def _mark_launched(self, step: ScheduledStep) -> ScheduledStep:
        answers = 0
        for chunk in step.chunks:
            seq = chunk.sequence
            seq.num_scheduled_tokens = chunk.start + chunk.count
            seq.num_steps_in_flight += 1
            seq.client.served += chunk.count
            if chunk.samples:
                seq.num_pending_tokens += 1
                answers += 1
        self._bursts.step_launched(answers)
        self._answer_steps = self._answer_steps + 1 if step.regime == "batch" else 0
        step.ahead = step.ahead and self.config.run_ahead
        return step

    def _one_suspect(self) -> ScheduledStep | None:
        while self.suspects:
            seq = self.suspects[0]
            if seq.state is not State.RUNNING:
                self.suspects.pop(0)
                continue
            if seq.waits_for_grammar:
                return None
            seq.draft = _NO_DRAFT
            step = ScheduledStep(ahead=False)
            while not self._add_alone(step, seq):
                if self.running[-1] is seq:
                    break
                self.preempt(self.running[-1])
            if step.chunks:
                step.ahead = False
                return self._mark_launched(step)
            self.suspects.pop(0)
            self.preempt(seq)
        return self.schedule()

    def _add_alone(self, step: ScheduledStep, seq: Sequence) -> bool:
        if not self.config.answer_rows or _in_prompt(seq):
            step.regime = "prefill" if self.config.answer_rows else None
            return self._add_chunk(step, seq, self.row_budget) > 0
        step.regime = "batch"
        return self._add_answers(step, [seq])

    # ---- pages --------------------------------------------------------------------------------

    def _extend(self, seq: Sequence, length: int) -> bool:
        if not self.pages.extend(seq.tables, length):
            return False
        seq.page_capacity = len(seq.tables.full) * self.pages.page_size
        return True

    # ---- after a step -------------------------------------------------------------------------

    def step_done(self, chunk: ScheduledChunk) -> bool:
        """A launched step with this chunk is over. False if its result is to be discarded: the sequence has ended."""
        seq = chunk.sequence
        seq.num_steps_in_flight -= 1
        if chunk.samples:
            seq.num_pending_tokens -= 1
        if seq.state is not State.RUNNING:
            if seq.state is State.FINISHED and seq.num_steps_in_flight == 0 and seq in self.leaving:
                self.leaving.remove(seq)
                self._release(seq)
            return False
        return True

    def advance(self, seq: Sequence, computed: int) -> None:
        """The first `computed` tokens are final: publish their pages. Rejected drafts are computed again."""
        self.pages.commit(seq.tables, seq.tokens, computed)
        if seq.num_steps_in_flight == 0:
            seq.num_scheduled_tokens = computed
        if computed >= seq.num_prompt_tokens:
            seq.prefilled = True
        if self.suspects and seq in self.suspects:
            self.suspects.remove(seq)

    def step_failed(self, step: ScheduledStep, *, suspect: bool = True) -> None:
        """Undo a launched step that did not happen. Where two are in flight, undo the later one first.

        `suspect`: any of its sequences may be to blame, so they run one by one until the one that fails is found.
        """
        for chunk in step.chunks:
            if self.step_done(chunk):
                seq = chunk.sequence
                seq.num_scheduled_tokens = chunk.start
                seq.draft = _NO_DRAFT
                if suspect and seq not in self.suspects:
                    self.suspects.append(seq)

    # ---- invariants ---------------------------------------------------------------------------

    def check(self, launched: list[ScheduledStep] | None = None) -> None:
        """Check every invariant from scratch; `launched` are the steps in flight."""
        self.pages.check()
        orders = [s.order for s in self.running]
        assert orders == sorted(orders)
        self.clients.check(self.running)
        assert len(self.waiting) == self.num_waiting
        slots = [s.slot for s in self.running + self.leaving]
        assert sorted(slots + self._slots) == list(range(self.config.max_seqs)), "a slot is lost or held twice"
        flying: dict[int, int] = {}
        for step in launched or []:
            for chunk in step.chunks:
                seq = chunk.sequence
                flying[id(seq)] = flying.get(id(seq), 0) + 1
                assert seq.tables.attached, "pages were given back that a launched step still writes"
        for seq in self.waiting:
            assert seq.state is State.WAITING
            assert not seq.tables.attached
            assert (seq.num_scheduled_tokens, seq.num_pending_tokens, seq.num_steps_in_flight, seq.slot) == (
                0,
                0,
                0,
                -1,
            )
        for seq in self.running:
            assert seq.state is State.RUNNING
            assert seq.tables.attached
            assert (
                seq.tables.length
                <= seq.num_scheduled_tokens
                <= len(seq.tokens) + seq.num_pending_tokens + len(seq.draft)
            )
            assert seq.num_scheduled_tokens <= seq.page_capacity == len(seq.tables.full) * self.pages.page_size
            assert len(seq.tokens) < seq.max_length or seq.params.max_tokens == 0, "a sequence at its limit still runs"
            if launched is not None:
                assert seq.num_steps_in_flight == flying.get(id(seq), 0)
            if seq.num_steps_in_flight == 0:
                assert seq.num_pending_tokens == 0
                assert seq.tables.length == seq.num_scheduled_tokens
        for seq in self.leaving:
            assert seq.state is State.FINISHED
            assert seq.num_steps_in_flight > 0
        owned = {id(s.tables) for s in self.running + self.leaving}
        assert owned == self.pages.attached, "a table holds pages but has no sequence"


def _order(seq: Sequence) -> int:
    return seq.order


def _turn(seq: Sequence) -> tuple[int, int]:
    return seq.client.served, seq.order


def _in_prompt(seq: Sequence) -> bool:
    """Whether its next row to compute is one of its prompt."""
    return seq.num_scheduled_tokens < seq.num_prompt_tokens


def _unscheduled(seq: Sequence) -> int:
    return len(seq.tokens) + seq.num_pending_tokens - seq.num_scheduled_tokens


def _uncomputed(seq: Sequence) -> int:
    return len(seq.tokens) - seq.num_scheduled_tokens
