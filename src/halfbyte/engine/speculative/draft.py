"""Guess with a smaller model of the same vocabulary.

The draft model has KV pages of its own, in a pool of its own, with its own prefix cache; it catches up with a
sequence when a draft is requested, so nothing is spent on a sequence whose drafts do not pay. Keys and values of
rejected tokens are overwritten. When its pages run out it forgets sequences that do not need a draft now.

Drafts are its likeliest tokens, so the output is token for token that of no speculation. With `sampled`, and for
requests that sample, it draws from its own distribution and hands that over for rejection sampling: more is accepted,
and the output keeps its distribution but not its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from halfbyte.engine.sampling.row import PROPOSE
from halfbyte.engine.speculative.controller import Controller, Pace, StepCost
from halfbyte.engine.speculative.proposer import Proposal
from halfbyte.kv.pages import PagePool, Tables
from halfbyte.model.gpt_oss import GptOss
from halfbyte.ops.sampling import distribution, sample
from halfbyte.plan.step import Step

if TYPE_CHECKING:
    from halfbyte.engine.sequence import Sequence


@dataclass
class _Progress:
    """How far the draft model is with one sequence."""

    tables: Tables
    computed: int = 0  # tokens whose keys and values are in its cache, drafted ones included
    guessed: list[int] = field(default_factory=list)  # the draft it computed last
    guessed_at: int = 0  # length of the sequence then


class DraftModelProposer:
    def __init__(
        self, model: GptOss, controller: Controller, pages: int, *, cost: StepCost, target_cost: StepCost,
        sampled: bool = False, chunk: int = 512,
    ) -> None:  # fmt: skip
        self.model, self.controller, self.sampled, self.chunk = model, controller, sampled, chunk
        self.pool = PagePool(pages, model.spec.page_size, model.config.window)
        self._cost, self._target_cost = cost, target_cost
        self._progress: dict[int, _Progress] = {}  # by id of the sequence; the least recently used first

    # ---- proposing ----------------------------------------------------------------------------

    def propose(self, wants: list[tuple[Sequence, int]]) -> list[Proposal]:
        proposals = [Proposal([], [] if self._samples(seq) else None) for seq, _ in wants]
        active = {id(seq) for seq, _ in wants}
        ready = []
        spent = 0.0
        for i, (seq, most) in enumerate(wants):
            progress = self._catch_up(seq, most, active)
            if progress is not None:
                ready.append((i, seq, most, progress))
        rows = [(seq.tokens[progress.computed :], progress.computed, progress.tables) for _, seq, _, progress in ready]
        step = 0
        while ready:
            logits = self._forward(rows)
            spent += self._cost(sum(len(tokens) for tokens, _, _ in rows), sum(start for _, start, _ in rows))
            following, rows = [], []
            for row, (i, seq, most, progress) in zip(logits, ready):
                token = self._choose(row, seq, len(seq.tokens) + step, proposals[i])
                proposals[i].tokens.append(token)
                progress.computed = len(seq.tokens) + step
                if step + 1 < most:
                    following.append((i, seq, most, progress))
                    rows.append(([token], progress.computed, progress.tables))
            ready = following
            step += 1
        for (seq, _), proposal in zip(wants, proposals):
            progress = self._progress.get(id(seq))
            if progress is not None and proposal.tokens:
                progress.guessed, progress.guessed_at = list(proposal.tokens), len(seq.tokens)
        share = spent / self._target_cost(1, 0) / max(1, len(wants))
        for proposal in proposals:
            proposal.cost = share
        return proposals

    def _samples(self, seq: Sequence) -> bool:
        return self.sampled and seq.params.temperature > 0

    def _choose(self, row: torch.Tensor, seq: Sequence, position: int, proposal: Proposal) -> int:
        if proposal.probabilities is None:
            return int(row.argmax())
        p, sampler = seq.params, seq.sampler
        assert sampler is not None
        q, ids = distribution(row.cpu(), p)
        dense: NDArray[np.float64] = np.zeros(row.shape[0])
        dense[ids.numpy()] = q.numpy()
        proposal.probabilities.append(dense)
        return sample(q, ids, sampler.uniform(position, PROPOSE))

    # ---- its own cache ------------------------------------------------------------------------

    def _catch_up(self, seq: Sequence, most: int, active: set[int]) -> _Progress | None:
        """Bring the cache to all but the last token of `seq`, with room for the draft; None if there is no room."""
        progress = self._progress.pop(id(seq), None)
        tokens = seq.tokens
        if progress is None:
            progress = _Progress(Tables(salt=seq.tables.salt))
            self.pool.hash_blocks(progress.tables, tokens, len(tokens) - 1)
            self.pool.attach(progress.tables, self.pool.match(progress.tables, len(tokens) - 1), seq.num_prompt_tokens)
            progress.computed = progress.tables.length
        self._progress[id(seq)] = progress
        right = 0
        for guess, token in zip(progress.guessed, tokens[progress.guessed_at :]):
            if guess != token:
                break
            right += 1
        if progress.guessed:
            progress.computed = min(progress.computed, progress.guessed_at + right)
        progress.computed = min(progress.computed, len(tokens) - 1)
        progress.guessed = []
        self.pool.commit(progress.tables, tokens, max(progress.tables.length, progress.computed))
        while progress.computed < len(tokens) - 1 - self.chunk:
            if not self._make_room(progress, progress.computed + self.chunk, active):
                return None
            self._forward(
                [(tokens[progress.computed : progress.computed + self.chunk], progress.computed, progress.tables)]
            )
            progress.computed += self.chunk
            self.pool.commit(progress.tables, tokens, progress.computed)
        return progress if self._make_room(progress, len(tokens) + most, active) else None

    def _make_room(self, progress: _Progress, length: int, active: set[int]) -> bool:
        while not self.pool.extend(progress.tables, length):
            victim = next((k for k in self._progress if k not in active), None)
            if victim is None:
                return False
            self.pool.release(self._progress.pop(victim).tables)
        return True

    def _forward(self, rows: list[tuple[list[int], int, Tables]]) -> torch.Tensor:
        """Logits of the last row of each sequence."""
        device, page = self.model.device, self.pool.page_size

        def ints(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        ends = np.cumsum([0] + [len(tokens) for tokens, _, _ in rows]).tolist()
        lens = [start + len(tokens) for tokens, start, _ in rows]
        blocks = -(-max(lens) // page)

        def table(pages: list[int]) -> list[int]:
            return (pages + [0] * blocks)[:blocks]

        step = Step(
            tokens=ints([t for tokens, _, _ in rows for t in tokens]),
            positions=ints([p for tokens, start, _ in rows for p in range(start, start + len(tokens))]),
            query_start=ints(ends),
            kv_lens=ints(lens),
            row_sequence=ints([i for i, (tokens, _, _) in enumerate(rows) for _ in tokens]),
            block_tables={
                "full": torch.tensor([table(t.full) for _, _, t in rows], dtype=torch.int32, device=device),
                "sliding": torch.tensor([table(t.sliding) for _, _, t in rows], dtype=torch.int32, device=device),
            },
            logit_rows=ints([e - 1 for e in ends[1:]]),
            max_kv_len=max(lens),
        )
        with torch.inference_mode():
            return self.model.forward(step)

    # ---- the rest of the protocol -------------------------------------------------------------

    def observe(self, seq: Sequence, new: int) -> None:
        pass

    def forget(self, seq: Sequence) -> None:
        progress = self._progress.pop(id(seq), None)
        if progress is not None:
            self.pool.release(progress.tables)

    def pace(self, seq: Sequence) -> Pace:
        return self.controller.pace()
