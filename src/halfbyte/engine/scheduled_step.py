"""What a step computes, sequence by sequence: filled by the scheduler, read by everything that runs the step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from halfbyte.engine.sequence import Sequence

# The regimes that a step can be fixed to: that of generated tokens, and that of prompts.
FixedRegime = Literal["batch", "prefill"]

# Prompt rows scored in one step: the logits of each row take nearly a megabyte.
SCORED_ROWS = 64


@dataclass(slots=True)
class ScheduledChunk:
    """What one sequence computes in a step: `count` tokens from `start` on, one row each. The scheduler fills it.

    Its rows follow those of the chunk before. Results are the rows whose logits are used: the scored ones, whose next
    token is known, then the sampled ones, which are the last known token's row and those of the draft.
    """

    sequence: Sequence
    start: int
    count: int
    draft: list[int]  # the last of the tokens, guessed
    samples: bool
    scored: range  # positions of the scored rows
    first_sampled: int  # where its sampled rows begin among the results of the step; the scored rows end there

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def known_end(self) -> int:
        """Position after the last token that is not a guess: the first one to be sampled."""
        return self.start + self.count - len(self.draft)

    @property
    def scored_results(self) -> range:
        """The scored rows among the results of the step."""
        return range(self.first_sampled - len(self.scored), self.first_sampled)


@dataclass(slots=True)
class ScheduledStep:
    chunks: list[ScheduledChunk] = field(default_factory=list)
    rows: int = 0
    results: int = 0  # rows whose logits are used
    score_room: int = SCORED_ROWS  # rows that may still be scored
    ahead: bool = True  # whether the next step may be scheduled before this one is committed
    decode_only: bool = True  # one row each, no drafts
    regime: FixedRegime | None = None  # whose kernels run it; None: by the number of rows

    def add(self, seq: Sequence, start: int, count: int, draft: list[int], samples: bool, scored: range) -> None:
        first_sampled = self.results + len(scored)
        self.chunks.append(ScheduledChunk(seq, start, count, draft, samples, scored, first_sampled))
        self.rows += count
        self.results = first_sampled + (1 + len(draft) if samples else 0)
