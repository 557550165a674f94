"""Whether prompts come in a burst, so that a step which also decodes may read more of them. Holds no tensors.

A step has a large part that does not depend on its rows: 704 rows beside decoding are read at half the speed of 2816.
While a few prompts arrive among many answers, short steps are worth that, since every stream waits for every step. When
many come at once, what they wait for is the speed at which prompts are read. Such a burst is

- NEWCOMERS sequences more than have answered together in any of the last steps: the load grows. A client that asks
  again after each answer adds none, so that streams which go on as they do keep their short gaps;
- or UNREAD prompts, whoever sent them.

No clock has a part in this: the same requests in the same steps are scheduled alike.
"""

from __future__ import annotations

NEWCOMERS = 4
UNREAD = 28
REMEMBERED_STEPS = 128  # at least; twice as many at most


class Bursts:
    def __init__(self) -> None:
        self._most, self._most_before = 0, 0  # sequences that had a token in one step, in this period and the last one
        self._steps = 0

    def step_launched(self, answers: int) -> None:
        """A step was launched in which so many sequences get a token."""
        self._most = max(self._most, answers)
        self._steps += 1
        if self._steps == REMEMBERED_STEPS:
            self._most, self._most_before, self._steps = 0, self._most, 0

    def now(self, present: int, unread: int) -> bool:
        """`present`: sequences that run or could; `unread`: those of them whose prompt is not read."""
        return unread >= UNREAD or min(unread, present - max(self._most, self._most_before)) >= NEWCOMERS
