"""Which experts the GPU holds, by recent use: a policy. It moves no byte.

A weight exists once, so an expert comes to the GPU only in exchange for one that leaves it: two copies of an expert's
size over the wire. An exchange pays if the difference of the two rates of use, over the tokens for which the past is a
guide, is worth more than the copies. Rates are counts that halve every HALF_LIFE tokens. Counts of equal rates differ
by chance, and the best of thousands beside the worst of thousands differs much; so the difference must also exceed
DEVIATIONS of what chance makes of two such counts, and never takes more than SHARE of what host memory gives.

Judged by simulation (tests/bench/test_residency.py). Nothing in a step follows it yet: experts stay where the loader
put them (`engine/placement.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HALF_LIFE = 256.0  # tokens
WINDOW = HALF_LIFE / np.log(2)  # tokens that the counts stand for
DEVIATIONS = 2.5  # more: fewer exchanges under uniform routing, and less gain where use is skewed
COST = 2.0  # of an exchange, in reads of an expert: one is read from host memory, one is written there
SHARE = 0.05  # of the host's bandwidth, for exchanges


@dataclass(frozen=True)
class ExpertExchange:
    """Places are (layer, expert)."""

    promoted: tuple[int, int]
    demoted: tuple[int, int]


class Residency:
    """The experts that a GPU holds. `resident`: bool [layers, experts]; the number of them never changes."""

    def __init__(self, resident: NDArray[np.bool_]) -> None:
        self.resident = resident.copy()
        self.counts = np.zeros(resident.shape)
        self.hits = np.zeros(resident.shape[0], np.int64)
        self.misses = np.zeros(resident.shape[0], np.int64)
        self.exchanges = 0
        self._tokens = 0.0  # that the counts stand for, at most WINDOW
        self._budget = 0.0  # reads of an expert that exchanges may still take

    @classmethod
    def by_layers(cls, layers: int, experts: int, host_layers: int) -> Residency:
        """The start, as the loader leaves it: the experts of the first layers are in host memory."""
        return cls(np.repeat(np.arange(layers) >= host_layers, experts).reshape(layers, experts))

    def count(self, uses: NDArray[np.integer], tokens: int) -> None:
        """`uses`: rows that chose each expert, [layers, experts], in steps that decoded so many tokens."""
        self.hits += (uses * self.resident).sum(axis=1)
        missed = (uses * ~self.resident).sum(axis=1)
        self.misses += missed
        fade = 0.5 ** (tokens / HALF_LIFE)
        self.counts = self.counts * fade + uses
        self._tokens = self._tokens * fade + tokens
        # What host memory gives to exchanges is a share of what it gives in all; unused budget does not pile up.
        self._budget = min(self._budget + SHARE / (1 - SHARE) * float(missed.sum()), 16 * COST)

    def exchanges_due(self) -> list[ExpertExchange]:
        """The exchanges that pay and that the budget allows, best first. The caller says `settle` when one is done."""
        number = int(self._budget / COST)
        if number == 0 or self.resident.all() or not self.resident.any():
            return []
        flat, mask = self.counts.reshape(-1), self.resident.reshape(-1)
        inside, outside = np.flatnonzero(mask), np.flatnonzero(~mask)
        number = min(number, len(inside), len(outside))
        hot = outside[np.argsort(-flat[outside], kind="stable")[:number]]
        cold = inside[np.argsort(flat[inside], kind="stable")[:number]]
        experts, due = self.resident.shape[1], []
        for above, below in zip(hot, cold):
            gain = flat[above] - flat[below]
            chance = DEVIATIONS * np.sqrt(flat[above] + flat[below])
            if gain <= max(chance, COST * self._tokens / WINDOW):
                break
            due.append(ExpertExchange(divmod(int(above), experts), divmod(int(below), experts)))
        return due

    def settle(self, exchange: ExpertExchange) -> None:
        """An exchange is done: the two experts have changed places."""
        assert self.resident[exchange.demoted], "leaves a memory that it is in"
        assert not self.resident[exchange.promoted], "comes to a memory that it is not in"
        self.resident[exchange.promoted], self.resident[exchange.demoted] = True, False
        self.exchanges += 1
        self._budget -= COST

    @property
    def host_reads(self) -> float:
        """Reads and writes of host memory so far, in sizes of an expert, exchanges included."""
        return float(self.misses.sum()) + COST * self.exchanges
