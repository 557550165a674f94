"""How far ahead to guess: acceptance weighed against the cost of verifying.

Verifying is not free on a mixture of experts: every further row touches further experts (on gpt-oss-120b four rows
read about three times the bytes of one). All costs are in tokens: with b sequences in a step that costs c(rows), an
extra of c(rows + k) / c(rows) - 1 delays b tokens. A draft of k is expected to win rate + rate^2 + .. + rate^k.

Three things keep it from losing. It never requests a longer draft than pays; a request whose drafts do not pay rests,
longer each time, and is then tried again with a draft of one; and a ledger over all requests allows a draft only if,
should it be rejected whole, the loss so far stays below `allowance` of the tokens generated. The ledger starts empty,
so the first tokens of an engine are never speculated. These are counted, not timed: the same requests give the same
drafts.

Counted costs can be wrong by any factor: a head that is small in bytes may be slow on this machine, or for many
sequences. So a second ledger, `TimeLedger`, compares the seconds of decode steps with those of plain ones. It suspends
speculation, the work of following the target included, as soon as it has lost more than its allowance.
"""

from __future__ import annotations

import math
from typing import Protocol

LONGEST_REST = 256
PLAIN_STEPS = 3  # plain steps of about as many sequences that are timed before speculation may begin
RECENT_STEPS = 16  # over which the seconds of a plain step are averaged
LARGEST_CREDIT = 0.1  # seconds that speculation may lose at once


class StepCost(Protocol):
    def __call__(self, rows: int, context: int) -> float:
        """What one step costs, in any unit: `rows` tokens over sequences that hold `context` tokens in all."""
        ...


class TimeLedger:
    """The seconds that speculation has won or lost, in a credit that it may spend.

    Plain steps are averaged by the number of their sequences, in half octaves. A decode step that speculates, or that
    follows the target for a head (`follows`), gains what its tokens would have taken in plain steps, less what it took.
    Every second adds `allowance` of itself, and what is won is not saved up beyond LARGEST_CREDIT. However long it runs
    and however wrong its estimates are, all that is lost is `allowance` of the time, LARGEST_CREDIT and one step, and
    once for every number of sequences one step before plain ones are timed.
    """

    def __init__(self, *, allowance: float = 0.02, follows: bool = False) -> None:
        self.allowance, self.follows = allowance, follows
        self.suspended = True  # until a plain step is known
        self.credit = LARGEST_CREDIT
        self._plain: dict[int, tuple[int, float]] = {}  # half octave -> steps, mean seconds

    def add(self, sequences: int, tokens: int, seconds: float, *, drafted: bool, suspended: bool) -> None:
        """A decode step gave `tokens` tokens to `sequences` sequences; `suspended` as it was when it was launched."""
        size = round(2 * math.log2(sequences))
        steps, mean = self._plain.get(size, (0, 0.0))
        self.credit += self.allowance * seconds
        if suspended or not (drafted or self.follows):
            steps = min(steps + 1, RECENT_STEPS)
            mean += (seconds - mean) / steps
            self._plain[size] = steps, mean
        elif steps:
            self.credit += mean * tokens / sequences - seconds
        self.credit = min(self.credit, LARGEST_CREDIT)
        self.suspended = self.credit < 0.0 or steps < PLAIN_STEPS


class Controller:
    """Shared by all requests of an engine: the ledgers, and the acceptance of all drafts so far. Without a `ledger`
    nothing is timed."""

    def __init__(
        self, cost: StepCost, *, longest: int = 8, allowance: float = 0.02, draft_cost: float = 0.0, prior: float = 0.5,
        ledger: TimeLedger | None = None,
    ) -> None:  # fmt: skip
        self.cost, self.longest, self.allowance, self.draft_cost = cost, longest, allowance, draft_cost
        self.prior, self.ledger = prior, ledger
        self.tokens = 0  # generated, by all requests
        self.net = 0.0  # tokens won by accepted drafts less what verifying them cost
        self.drafted = self.accepted = 0

    def extra(self, batch: int, rows: int, context: int, k: int) -> float:
        """Cost of verifying k more rows, in tokens."""
        if k <= 0:
            return 0.0
        base = self.cost(rows, context)
        return batch * (self.cost(rows + k, context) / base - 1.0) + self.draft_cost * k

    def affords(self, loss: float) -> bool:
        return loss - self.net <= self.allowance * self.tokens

    @property
    def suspended(self) -> bool:
        return self.ledger is not None and self.ledger.suspended

    def pace(self) -> Pace:
        return Pace(self)


class Pace:
    """One request's acceptance, and how far ahead to guess for it now."""

    __slots__ = ("_controller", "_fail", "_load", "_rest", "_rest_next", "_streak", "_success")

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._success = self._fail = 0.0
        self._rest = 0  # tokens to generate before the next try
        self._rest_next = 8
        self._streak = 0  # proposals in a row that had nothing to propose
        self._load: tuple[int, int, int] = (1, 1, 0)  # batch, rows and context at the last draft

    @property
    def rate(self) -> float:
        """Chance that a drafted token is accepted, the ones before it having been; recent drafts count more."""
        c = self._controller
        common = (c.accepted + 4 * c.prior) / (c.drafted + 4)  # over all requests
        return (self._success + 2 * common) / (self._success + self._fail + 2)

    @property
    def resting(self) -> bool:
        return self._rest > 0 or self._controller.suspended

    def length(self, batch: int, rows: int, context: int) -> int:
        """Tokens to draft now; 0 for none."""
        if self.resting:
            return 0
        c, rate = self._controller, self.rate
        self._load = (batch, rows, context)
        best, best_net, win, power = 0, 0.0, 0.0, 1.0
        for k in range(1, c.longest + 1):
            power *= rate
            win += power
            net = win - c.extra(batch, rows, context, k)
            if net > best_net:
                best, best_net = k, net
        if best == 0:  # not expected to pay: try one token, then rest
            best = 1
            self._rest_next = min(LONGEST_REST, self._rest_next * 2)
        while best and not c.affords(c.extra(batch, rows, context, best)):
            best -= 1
        if best == 0:
            self._rest = self._rest_next
        return best

    def learned(self, drafted: int, accepted: int) -> None:
        """A draft was verified."""
        c = self._controller
        batch, rows, context = self._load
        loss = c.extra(batch, rows, context, drafted)
        c.net += accepted - (loss - c.draft_cost * drafted)  # the cost of drafting was subtracted in `paid`
        c.tokens += 1 + accepted
        tried = min(drafted, accepted + 1)  # tokens after a rejected one were not tried
        c.drafted += tried
        c.accepted += accepted
        if c.drafted > 4096:  # forget slowly
            c.drafted //= 2
            c.accepted //= 2
        keep = 0.9**tried
        self._success = self._success * keep + accepted
        self._fail = self._fail * keep + (tried - accepted)
        self._streak = 0
        if accepted < loss and self._expected() <= 0.0:
            self._rest = self._rest_next
        elif accepted >= loss:
            self._rest_next = 8

    def _expected(self) -> float:
        """Best expected gain of a next draft."""
        c, (batch, rows, context) = self._controller, self._load
        win, power, best = 0.0, 1.0, 0.0
        for k in range(1, c.longest + 1):
            power *= self.rate
            win += power
            best = max(best, win - c.extra(batch, rows, context, k))
        return best

    def paid(self, cost: float) -> None:
        """A draft was proposed, at this cost in tokens."""
        self._controller.net -= cost

    def nothing(self) -> None:
        """There was nothing to propose. No bytes are lost, but the step could not be launched ahead: pause."""
        self._streak += 1
        if self._streak >= 3:
            self._rest = min(8, self._streak - 2)

    def rested(self, tokens: int) -> None:
        """Tokens were generated without a draft."""
        self._controller.tokens += tokens
        self._rest = max(0, self._rest - tokens)
