"""Counters of a core: steps, tokens, and how long sequences waited before they first ran."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

from halfbyte.engine.request import QUEUE_BUCKETS
from halfbyte.engine.sequence import Sequence


@dataclass(slots=True)
class Counters:
    steps: int = 0
    generated: int = 0
    prompt: int = 0
    drafted: int = 0
    accepted: int = 0
    good_steps: int = 0  # since the last failure
    failures: int = 0  # since the last good step
    unscheduled: int = 0  # sequences that have never been scheduled
    queue_seconds: float = 0.0
    queue: list[int] = field(default_factory=lambda: [0] * (len(QUEUE_BUCKETS) + 1))

    def first_scheduled(self, seqs: Iterable[Sequence], now: float) -> None:
        """Count the queue time of sequences that are scheduled for the first time."""
        for seq in seqs:
            if seq.arrival_time is not None:
                waited = now - seq.arrival_time
                seq.arrival_time = None
                self.unscheduled -= 1
                self.queue_seconds += waited
                self.queue[bisect.bisect_left(QUEUE_BUCKETS, waited)] += 1
