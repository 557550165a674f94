"""How far ahead to guess: acceptance weighed against the cost of verifying.

Verifying is not free on a mixture of experts: every further row touches further experts (on gpt-oss-120b four rows
read about three times the bytes of one). All costs are in tokens: with b sequences in a step that costs c(rows), an
extra of c(rows + k) / c(rows) - 1 delays b tokens. A draft of k is expected to win rate + rate^2 + .. + rate^k.

Three things keep it from losing. A draft longer than pays is never asked for; a request whose drafts do not pay rests,
longer each time, and is then tried again with a draft of one; and a ledger over all requests allows a draft only if,
should it be rejected whole, the loss so far stays below `allowance` of the tokens generated. The ledger starts empty,
so the first tokens of an engine are never speculated. Everything is counted, nothing is timed: the same requests give
the same drafts.
"""

from __future__ import annotations

from typing import Protocol

LONGEST_REST = 256


class StepCost(Protocol):
    def __call__(self, rows: int, context: int) -> float:
        """What one step costs, in any unit: `rows` tokens over sequences that hold `context` tokens in all."""
        ...


class Controller:
    """Shared by all requests of an engine: the ledger, and what is known about drafts in general."""

    def __init__(
        self, cost: StepCost, *, longest: int = 8, allowance: float = 0.02, draft_cost: float = 0.0, prior: float = 0.5
    ) -> None:
        self.cost, self.longest, self.allowance, self.draft_cost = cost, longest, allowance, draft_cost
        self.prior = prior
        self.tokens = 0  # generated, by all requests
        self.net = 0.0  # tokens won by accepted drafts less what verifying them cost
        self.drafted = self.accepted = 0

    def extra(self, batch: int, rows: int, context: int, k: int) -> float:
        """What verifying k more rows costs, in tokens."""
        if k <= 0:
            return 0.0
        base = self.cost(rows, context)
        return batch * (self.cost(rows + k, context) / base - 1.0) + self.draft_cost * k

    def affords(self, loss: float) -> bool:
        return loss - self.net <= self.allowance * self.tokens

    def pace(self) -> Pace:
        return Pace(self)


class Pace:
    """One request's acceptance, and how far ahead to guess for it now."""

    __slots__ = ("_asked", "_controller", "_fail", "_rest", "_rest_next", "_streak", "_success")

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._success = self._fail = 0.0
        self._rest = 0  # tokens to generate before the next try
        self._rest_next = 8
        self._streak = 0  # proposals in a row that had nothing to propose
        self._asked: tuple[int, int, int] = (1, 1, 0)

    @property
    def rate(self) -> float:
        """Chance that a drafted token is accepted, the ones before it having been; recent drafts count more."""
        c = self._controller
        common = (c.accepted + 4 * c.prior) / (c.drafted + 4)  # of all requests
        return (self._success + 2 * common) / (self._success + self._fail + 2)

    @property
    def resting(self) -> bool:
        return self._rest > 0

    def length(self, batch: int, rows: int, context: int) -> int:
        """Tokens to draft now; 0 for none."""
        if self._rest > 0:
            return 0
        c, rate = self._controller, self.rate
        self._asked = (batch, rows, context)
        best, best_net, win, power = 0, 0.0, 0.0, 1.0
        for k in range(1, c.longest + 1):
            power *= rate
            win += power
            net = win - c.extra(batch, rows, context, k)
            if net > best_net:
                best, best_net = k, net
        if best == 0:  # does not pay by what is known: find out with one token, then rest
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
        batch, rows, context = self._asked
        loss = c.extra(batch, rows, context, drafted)
        c.net += accepted - (loss - c.draft_cost * drafted)  # what drafting cost was paid when it was made
        c.tokens += 1 + accepted
        tried = min(drafted, accepted + 1)  # what follows a rejected token was not tried
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
        """Best expected win of a next draft, as things stand."""
        c, (batch, rows, context) = self._controller, self._asked
        win, power, best = 0.0, 1.0, 0.0
        for k in range(1, c.longest + 1):
            power *= self.rate
            win += power
            best = max(best, win - c.extra(batch, rows, context, k))
        return best

    def paid(self, cost: float) -> None:
        """A draft was made, at this cost in tokens."""
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
