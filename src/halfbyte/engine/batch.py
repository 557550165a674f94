"""From a scheduled step to arrays: the ragged batch that a model runs.

Block tables live in two arrays with a row per slot and are changed only where a page came or went; a batch copies the
rows it needs. Where a step has run before the next is built (`in_place`, on a CPU), a batch of decodes is views of
memory that stays: what numpy costs counts for a small model. Rows whose token is still being sampled by the step before
name it by `token_from`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from halfbyte.engine.config import EngineConfig
from halfbyte.engine.scheduler import ScheduledStep
from halfbyte.errors import StepError

if TYPE_CHECKING:
    from halfbyte.engine.sampling.row import RowSampler

Ints = NDArray[np.int32]


@dataclass(slots=True)
class Batch:
    """Who sets what: BatchBuilder everything but `masks` and `proposals`, which the engine adds before the launch."""

    tokens: Ints  # [R]; meaningless where token_from is not -1
    positions: Ints  # [R]
    query_start: Ints  # [S + 1]
    kv_lens: Ints  # [S]
    row_sequence: Ints  # [R]
    full: Ints  # [S, B]
    sliding: Ints  # [S, B]
    logit_rows: Ints  # [L]
    token_from: Ints | None  # [R]: index among the last launch's sampled tokens, or -1; None: all are known
    max_kv_len: int
    # For each of the L sampled rows: how it is sampled, and the position its token will have.
    samplers: list[RowSampler]
    sample_positions: list[int]
    slots: list[int]  # [S]
    drafts: list[list[int]] = field(default_factory=list)  # [S]
    following: dict[int, int] = field(default_factory=dict)  # sequence whose last row is not sampled -> its next token
    histories: dict[int, list[int]] = field(default_factory=dict)  # sampled row -> tokens so far, for penalties
    # Sequence -> rows before its sampled ones; sampled row -> the token that is known to follow it.
    scores: dict[int, int] = field(default_factory=dict)
    targets: dict[int, int] = field(default_factory=dict)
    masks: dict[int, Ints] = field(default_factory=dict)  # sampled row -> allowed tokens, one bit each
    proposals: dict[int, tuple[int, NDArray[np.float64]]] = field(default_factory=dict)  # row -> draft, its q

    @property
    def rows(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def singles(self) -> int:
        """Sequences in front of all others that have one row each."""
        several = np.flatnonzero(np.diff(self.query_start) != 1)
        return int(several[0]) if several.size else len(self.slots)

    def check(self, config: EngineConfig) -> None:
        """Kernels trust these numbers and would read past the end of a table: once a step, all of them. A negative one
        counts as large."""
        bounds = (
            ("token", self.tokens, config.vocab), ("position", self.positions, config.max_context),
            ("page", self.full, config.pages), ("page", self.sliding, config.pages),
            ("sequence", self.row_sequence, len(self.slots)),
            ("length", self.kv_lens, self.full.shape[1] * config.page_size + 1),
        )  # fmt: skip
        for what, values, end in bounds:
            if values.size and int(values.view(np.uint32).max()) >= end:
                wrong = values[(values < 0) | (values >= end)].flat[0]
                raise StepError(f"a step has the {what} {wrong}, which is not below {end}.")


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

    def build(self, step: ScheduledStep, previous: dict[int, int]) -> Batch:
        """`previous`: id of a sequence -> its sampled row in the launch that is still in flight."""
        tokens: list[int] = []
        froms: list[int] = []
        slots: list[int] = []
        samplers: list[RowSampler] = []
        sample_positions: list[int] = []
        histories: dict[int, list[int]] = {}
        following: dict[int, int] = {}
        scores: dict[int, int] = {}
        targets: dict[int, int] = {}
        counts_of, owners = self._counts, self._owners
        waits = False
        for i, seq in enumerate(step.seqs):
            slot, start = seq.slot, step.starts[i]
            slots.append(slot)
            if (
                owners[slot] != seq.admission
                or counts_of[slot] != len(seq.tables.full)
                or self._firsts[slot] != seq.tables.first
            ):
                self._mirror(slot, seq.admission, seq.tables.full, seq.tables.sliding, seq.tables.first)
            if start < len(seq.tokens):
                count = step.counts[i]
                if count == 1:
                    tokens.append(seq.tokens[start])
                    froms.append(-1)
                else:
                    draft = step.drafts[i]
                    tokens += seq.tokens[start : start + count - len(draft)]
                    tokens += draft
                    froms += [-1] * count
            else:
                waits = True
                tokens.append(0)
                froms.append(previous[id(seq)])
            if step.scores[i]:
                scorer, scores[i] = seq.scorer, step.scores[i]
                assert scorer is not None
                for row in seq.unscored(start, start + step.counts[i]):
                    targets[len(samplers)] = seq.tokens[row + 1]
                    samplers.append(scorer)
                    sample_positions.append(row + 1)
            if step.samples[i]:
                sampler = seq.sampler
                assert sampler is not None
                draft = step.drafts[i]
                position = start + step.counts[i] - len(draft)
                for j in range(len(draft) + 1):
                    if sampler.penalised:
                        histories[len(samplers)] = seq.tokens + draft[:j]
                    samplers.append(sampler)
                    sample_positions.append(position + j)
            else:
                end = start + step.counts[i]
                following[i] = seq.tokens[end] if end < len(seq.tokens) else 0  # nothing follows: it ends here
        batch = self._pack(step, tokens, froms if waits else None, slots, samplers, sample_positions)
        batch.histories, batch.following, batch.drafts = histories, following, step.drafts
        batch.scores, batch.targets = scores, targets
        return batch

    def _pack(
        self, step: ScheduledStep, tokens: list[int], froms: list[int] | None, slots: list[int],
        samplers: list[RowSampler], sample_positions: list[int],
    ) -> Batch:  # fmt: skip
        if self._in_place and step.decode_only:
            assert froms is None, "every token is known where steps do not overlap"
            return self._view(step, tokens, slots, samplers, sample_positions)
        n = len(slots)
        starts = np.array(step.starts, np.int32)
        if step.decode_only:
            query_start, row_sequence = self._arange[: n + 1], self._arange[:n]
            positions, kv_lens, logit_rows = starts, starts + 1, self._arange[:n]
            longest = max(step.starts) + 1
        else:
            counts = np.array(step.counts, np.int32)
            query_start = np.zeros(n + 1, np.int32)
            np.cumsum(counts, out=query_start[1:])
            row_sequence = np.repeat(np.arange(n, dtype=np.int32), counts)
            positions = np.arange(step.rows, dtype=np.int32) + np.repeat(starts - query_start[:-1], counts)
            kv_lens = starts + counts
            wanted: list[int] = []
            for i, samples in enumerate(step.samples):
                end = int(query_start[i + 1])
                if step.scores[i]:
                    rows = step.seqs[i].unscored(step.starts[i], step.starts[i] + step.counts[i])
                    first = int(query_start[i]) - step.starts[i]
                    wanted += range(rows.start + first, rows.stop + first)
                if samples:
                    wanted += range(end - 1 - len(step.drafts[i]), end)
            logit_rows = np.array(wanted, np.int32)
            longest = int(kv_lens.max())
        blocks = -(-longest // self._page)
        return Batch(
            tokens=np.array(tokens, np.int32), positions=positions, query_start=query_start, kv_lens=kv_lens,
            row_sequence=row_sequence, full=self._full[slots, :blocks], sliding=self._sliding[slots, :blocks],
            logit_rows=logit_rows, token_from=None if froms is None else np.array(froms, np.int32),
            max_kv_len=longest, samplers=samplers, sample_positions=sample_positions, slots=slots,
        )  # fmt: skip

    def _view(
        self, step: ScheduledStep, tokens: list[int], slots: list[int], samplers: list[RowSampler],
        sample_positions: list[int],
    ) -> Batch:  # fmt: skip
        """A batch of decodes as views of memory that the next one overwrites."""
        n, numbers, longest = len(slots), self._numbers, 0
        for i, start in enumerate(step.starts):
            end = start + 1
            numbers[0, i], numbers[1, i], numbers[2, i] = tokens[i], start, end
            if end > longest:
                longest = end
        blocks = -(-longest // self._page)
        first = slots[0]
        rows = slice(first, first + n) if slots == list(range(first, first + n)) else slots
        each, arange = self._rows[:, :n], self._arange[:n]
        return Batch(
            each[0], each[1], self._arange[: n + 1], each[2], arange, self._full[rows, :blocks],
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
