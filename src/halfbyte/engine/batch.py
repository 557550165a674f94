"""From a scheduled step to arrays: the ragged batch that a model runs.

Block tables live in two arrays with a row per slot and are changed only where a page came or went; a batch copies the
rows it needs. Where a step has run before the next is built (`in_place`, on a CPU), a batch of decodes consists of
views of reused memory, because numpy's allocations are noticeable with a small model. A row whose token is still being
sampled by the previous step refers to it by `token_from`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from halfbyte.engine.config import EngineConfig
from halfbyte.engine.scheduled_step import FixedRegime, ScheduledChunk, ScheduledStep
from halfbyte.errors import StepError

if TYPE_CHECKING:
    from halfbyte.engine.sampling.row import RowSampler

Ints = NDArray[np.int32]


@dataclass(slots=True)
class Batch:
    """R rows of S sequences, L of them with logits. BatchBuilder sets everything but `masks` and `proposals`, which
    `constrain` adds before the launch."""

    tokens: Ints  # [R]; meaningless where token_from is not -1
    positions: Ints  # [R]
    query_start: Ints  # [S + 1]
    kv_lens: Ints  # [S]
    row_sequence: Ints  # [R]
    full_table: Ints  # [S, B]
    sliding_table: Ints  # [S, B]
    logit_rows: Ints  # [L]
    token_from: Ints | None  # [R]: index among the last launch's sampled tokens, or -1; None: all are known
    max_kv_len: int
    # For each of the L rows: how it is sampled, and the position its token will have.
    samplers: list[RowSampler]
    sample_positions: list[int]
    slots: list[int]  # [S]
    regime: FixedRegime | None = None  # whose kernels run it; None: by the number of rows
    chunks: list[ScheduledChunk] = field(default_factory=list)  # [S]
    following: dict[int, int] = field(default_factory=dict)  # sequence whose last row is not sampled -> its next token
    histories: dict[int, list[int]] = field(default_factory=dict)  # sampled row -> tokens so far, for penalties
    targets: dict[int, int] = field(default_factory=dict)  # sampled row -> the prompt token that follows it
    masks: dict[int, Ints] = field(default_factory=dict)  # sampled row -> allowed tokens, one bit each
    proposals: dict[int, tuple[int, NDArray[np.float64]]] = field(default_factory=dict)  # row -> draft, its q

    @property
    def rows(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def singles(self) -> int:
        """How many sequences at the front have one row each."""
        several = np.flatnonzero(np.diff(self.query_start) != 1)
        return int(several[0]) if several.size else len(self.slots)

    def constrain(self, chunk: ScheduledChunk) -> None:
        """Add the masks of a sequence's grammar and reasoning limit and the distributions of its draft."""
        seq = chunk.sequence
        if seq.grammar is not None and not seq.grammar.asleep:
            for row, mask in enumerate(seq.grammar.masks(len(chunk.draft)), chunk.first_sampled):
                if mask is not None:
                    self.masks[row] = mask
        if seq.reasoning is not None and (mask := seq.reasoning.mask()) is not None:
            assert not chunk.draft
            self.masks[chunk.first_sampled] = mask  # a grammar sleeps during reasoning
        if seq.proposal is not None:
            for row, (token, distribution) in enumerate(zip(chunk.draft, seq.proposal), chunk.first_sampled):
                self.proposals[row] = (token, distribution)

    def check(self, config: EngineConfig) -> None:
        """Raise StepError for a number outside its range, because kernels would read past the end of a table. A
        negative number counts as large."""
        bounds = (
            ("token", self.tokens, config.vocab), ("position", self.positions, config.max_context),
            ("page", self.full_table, config.pages), ("page", self.sliding_table, config.pages),
            ("sequence", self.row_sequence, len(self.slots)),
            ("length", self.kv_lens, self.full_table.shape[1] * config.page_size + 1),
        )  # fmt: skip
        for name, values, end in bounds:
            if values.size and int(values.view(np.uint32).max()) >= end:
                wrong = values[(values < 0) | (values >= end)].flat[0]
                raise StepError(f"a step has the {name} {wrong}, which is not below {end}.")


class BatchBuilder:
    def __init__(self, max_seqs: int, max_blocks: int, page_size: int, *, in_place: bool = False) -> None:
        self._full = np.zeros((max_seqs, max_blocks), np.int32)
        self._sliding = np.zeros((max_seqs, max_blocks), np.int32)
        self._counts = [0] * max_seqs  # blocks of each slot that are mirrored
        self._firsts = [0] * max_seqs  # sliding blocks of each slot that are given back
        self._owners = [0] * max_seqs  # admission of the sequence in each slot
        self._page = page_size
        self._arange = np.arange(max_seqs + 1, dtype=np.int32)
        self._in_place = in_place
        self._rows = np.zeros((3, max_seqs), np.int32)  # tokens, positions, lengths of a batch of decodes
        self._numbers = self._rows.data

    def build(self, step: ScheduledStep, previous: ScheduledStep | None = None) -> Batch:
        """`previous` is the step that is still in flight."""
        tokens: list[int] = []
        token_from: list[int] = []
        slots: list[int] = []
        samplers: list[RowSampler] = []
        sample_positions: list[int] = []
        histories: dict[int, list[int]] = {}
        following: dict[int, int] = {}
        targets: dict[int, int] = {}
        counts_of, owners = self._counts, self._owners
        pending: dict[int, int] = {}
        if previous is not None:
            pending = {id(c.sequence): c.first_sampled for c in previous.chunks if c.samples}
        waits = False
        for i, chunk in enumerate(step.chunks):
            seq, start, count, draft = chunk.sequence, chunk.start, chunk.count, chunk.draft
            slot = seq.slot
            slots.append(slot)
            if (
                owners[slot] != seq.admission
                or counts_of[slot] != len(seq.tables.full)
                or self._firsts[slot] != seq.tables.first
            ):
                self._mirror(slot, seq.admission, seq.tables.full, seq.tables.sliding, seq.tables.first)
            if start >= len(seq.tokens):
                waits = True
                tokens.append(0)
                token_from.append(pending[id(seq)])
            elif count == 1:
                tokens.append(seq.tokens[start])
                token_from.append(-1)
            else:
                tokens += seq.tokens[start : chunk.known_end]
                tokens += draft
                token_from += [-1] * count
            if chunk.scored:
                scorer = seq.scorer
                assert scorer is not None
                for position in chunk.scored:
                    targets[len(samplers)] = seq.tokens[position + 1]
                    samplers.append(scorer)
                    sample_positions.append(position + 1)
            if chunk.samples:
                sampler = seq.sampler
                assert sampler is not None
                position = chunk.known_end
                for j in range(len(draft) + 1):
                    if sampler.penalised:
                        histories[len(samplers)] = seq.tokens + draft[:j]
                    samplers.append(sampler)
                    sample_positions.append(position + j)
            else:
                following[i] = seq.tokens[chunk.end] if chunk.end < len(seq.tokens) else 0  # nothing follows: it ends
        batch = self._pack(step, tokens, token_from if waits else None, slots, samplers, sample_positions)
        batch.histories, batch.following, batch.targets, batch.chunks = histories, following, targets, step.chunks
        batch.regime = step.regime
        return batch

    def _pack(
        self, step: ScheduledStep, tokens: list[int], token_from: list[int] | None, slots: list[int],
        samplers: list[RowSampler], sample_positions: list[int],
    ) -> Batch:  # fmt: skip
        if self._in_place and step.decode_only:
            assert token_from is None, "every token is known where steps do not overlap"
            return self._view(step, tokens, slots, samplers, sample_positions)
        n = len(slots)
        starts = np.array([c.start for c in step.chunks], np.int32)
        if step.decode_only:
            query_start, row_sequence = self._arange[: n + 1], self._arange[:n]
            positions, kv_lens, logit_rows = starts, starts + 1, self._arange[:n]
        else:
            counts = np.array([c.count for c in step.chunks], np.int32)
            query_start = np.zeros(n + 1, np.int32)
            np.cumsum(counts, out=query_start[1:])
            row_sequence = np.repeat(np.arange(n, dtype=np.int32), counts)
            positions = np.arange(step.rows, dtype=np.int32) + np.repeat(starts - query_start[:-1], counts)
            kv_lens = starts + counts
            rows: list[int] = []
            for chunk, first_row in zip(step.chunks, query_start.tolist()):
                offset = first_row - chunk.start
                rows += range(chunk.scored.start + offset, chunk.scored.stop + offset)
                if chunk.samples:
                    rows += range(chunk.known_end - 1 + offset, chunk.end + offset)
            logit_rows = np.array(rows, np.int32)
        longest = int(kv_lens.max())
        blocks = -(-longest // self._page)
        return Batch(
            tokens=np.array(tokens, np.int32), positions=positions, query_start=query_start, kv_lens=kv_lens,
            row_sequence=row_sequence, full_table=self._full[slots, :blocks],
            sliding_table=self._sliding[slots, :blocks], logit_rows=logit_rows,
            token_from=None if token_from is None else np.array(token_from, np.int32),
            max_kv_len=longest, samplers=samplers, sample_positions=sample_positions, slots=slots,
        )  # fmt: skip

    def _view(
        self, step: ScheduledStep, tokens: list[int], slots: list[int], samplers: list[RowSampler],
        sample_positions: list[int],
    ) -> Batch:  # fmt: skip
        """A batch of decodes as views of memory that the next one overwrites."""
        n, numbers, longest = len(slots), self._numbers, 0
        for i, chunk in enumerate(step.chunks):
            start = chunk.start
            end = start + 1
            numbers[0, i], numbers[1, i], numbers[2, i] = tokens[i], start, end
            if end > longest:
                longest = end
        blocks = -(-longest // self._page)
        first = slots[0]
        rows = slice(first, first + n) if slots == list(range(first, first + n)) else slots
        (row_tokens, positions, kv_lens), arange = self._rows[:, :n], self._arange[:n]
        return Batch(
            row_tokens, positions, self._arange[: n + 1], kv_lens, arange, self._full[rows, :blocks],
            self._sliding[rows, :blocks], arange, None, longest, samplers, sample_positions, slots,
        )  # fmt: skip

    def _mirror(self, slot: int, admission: int, full: list[int], sliding: list[int], first: int) -> None:
        have = self._counts[slot]
        if self._owners[slot] != admission:
            self._owners[slot] = admission
            self._full[slot].fill(0)
            self._sliding[slot].fill(0)
            have = self._firsts[slot] = 0
        self._full[slot, have : len(full)] = full[have:]
        self._sliding[slot, have : len(full)] = sliding[have:]
        self._sliding[slot, self._firsts[slot] : first] = 0
        self._counts[slot], self._firsts[slot] = len(full), first
