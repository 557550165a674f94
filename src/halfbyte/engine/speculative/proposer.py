"""Proposer: guesses the next tokens of a sequence. This is the interface that the engine uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from halfbyte.engine.sequence import Sequence
    from halfbyte.engine.speculative.controller import Controller, Pace


@dataclass(slots=True)
class Proposal:
    """A draft. `probabilities[i]` is the distribution token i was drawn from; None: the draft is a plain guess.

    `cost` is the cost of making it, as a share of the cost of one token without speculation.
    """

    tokens: list[int]
    probabilities: list[NDArray[np.float64]] | None = None
    cost: float = 0.0


class Proposer(Protocol):
    @property
    def controller(self) -> Controller:
        """What all its sequences share."""
        ...

    def propose(self, wants: list[tuple[Sequence, int]]) -> list[Proposal]:
        """A draft for each sequence of at most that many tokens, possibly empty. All their tokens are known."""
        ...

    def observe(self, seq: Sequence, new: int) -> None:
        """The last `new` tokens of `seq` are committed."""
        ...

    def forget(self, seq: Sequence) -> None:
        """`seq` has ended."""
        ...

    def pace(self, seq: Sequence) -> Pace:
        """The object that decides how far ahead to guess for this sequence, for all its life."""
        ...
