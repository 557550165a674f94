"""Proposer: whoever guesses the next tokens of a sequence, and what the engine asks of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from halfbyte.engine.sequence import Sequence
    from halfbyte.engine.speculative.controller import Pace


@dataclass(slots=True)
class Proposal:
    """A draft. `probabilities[i]` is the distribution token i was drawn from; None: the draft is a plain guess.

    `cost` is what making it cost, as a share of what one token costs without speculation.
    """

    tokens: list[int]
    probabilities: list[NDArray[np.float64]] | None = None
    cost: float = 0.0


class Proposer(Protocol):
    def propose(self, wants: list[tuple[Sequence, int]]) -> list[Proposal]:
        """A draft of at most that many tokens for each sequence, possibly empty. All their tokens are known."""
        ...

    def observe(self, seq: Sequence, new: int) -> None:
        """The last `new` tokens of `seq` are committed."""
        ...

    def forget(self, seq: Sequence) -> None:
        """`seq` has ended."""
        ...

    def pace(self, seq: Sequence) -> Pace:
        """How far ahead to guess for this sequence; one object for its life."""
        ...
