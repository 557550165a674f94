"""Guess that what followed the last few tokens before follows them again (prompt lookup)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfbyte.engine.speculative.controller import Controller, Pace
from halfbyte.engine.speculative.proposer import Proposal

if TYPE_CHECKING:
    from halfbyte.engine.sequence import Sequence


class _Index:
    """Where each run of `sizes` tokens was last followed by something."""

    __slots__ = ("at", "done")

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.at: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in sizes}
        self.done = 0  # runs ending before this position are indexed


class NgramProposer:
    def __init__(self, controller: Controller, *, sizes: tuple[int, ...] = (4, 3, 2), reach: int = 32768) -> None:
        self.controller, self.sizes, self.reach = controller, tuple(sorted(sizes, reverse=True)), reach
        self._indexes: dict[int, _Index] = {}

    def propose(self, wants: list[tuple[Sequence, int]]) -> list[Proposal]:
        return [Proposal(self._guess(seq, most)) for seq, most in wants]

    def _guess(self, seq: Sequence, most: int) -> list[int]:
        tokens = seq.tokens
        index = self._indexes.get(id(seq))
        if index is None:
            index = self._indexes[id(seq)] = _Index(self.sizes)
            index.done = max(0, len(tokens) - self.reach)
        # A run ending at e (exclusive) is indexed once tokens[e] exists.
        for end in range(max(index.done, 1), len(tokens)):
            for n in self.sizes:
                if end >= n:
                    index.at[n][tuple(tokens[end - n : end])] = end
        index.done = len(tokens)
        for n in self.sizes:
            if len(tokens) >= n:
                start = index.at[n].get(tuple(tokens[-n:]))
                if start is not None:
                    return _follow(tokens, start, most)
        return []

    def observe(self, seq: Sequence, new: int) -> None:
        pass

    def forget(self, seq: Sequence) -> None:
        self._indexes.pop(id(seq), None)

    def pace(self, seq: Sequence) -> Pace:
        return self.controller.pace()


def _follow(tokens: list[int], start: int, most: int) -> list[int]:
    """The `most` tokens from `start` on; a run that reaches the end repeats itself."""
    period = len(tokens) - start
    return [tokens[start + i % period] for i in range(most)]
