"""Comparisons and their bounds: a verdict holds if every error is within its bound, and if there was one.

Nothing here runs a kernel. A figure that is not a number never holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from halfbyte.lab.result import Check


@dataclass
class Verdict:
    """The comparisons of one case; `Check.value` is an error and `bound` the largest that holds."""

    case: str
    checks: list[Check] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)  # beside the point, but worth a line in a receipt

    def compare(self, name: str, actual: Tensor, expected: Tensor, bound: float) -> None:
        self.add(name, relative_error(actual, expected), bound)

    def require(self, name: str, holds: bool) -> None:
        """A comparison that has no degrees."""
        self.checks.append(Check(name, holds))

    def add(self, name: str, error: float, bound: float) -> None:
        number = math.isfinite(error)
        note = "" if number else "not a number"
        self.checks.append(Check(name, number and error <= bound, error if number else None, bound, note))

    @property
    def ok(self) -> bool:
        """A verdict that compared nothing does not hold."""
        return bool(self.checks) and all(c.ok for c in self.checks)

    @property
    def wrong(self) -> list[str]:
        return [_sentence(c) for c in self.checks if not c.ok]

    @property
    def closest(self) -> Check | None:
        """The comparison whose error is the largest part of its bound."""
        graded = [c for c in self.checks if c.value is not None and c.bound]
        return max(graded, key=_part, default=None)

    def __str__(self) -> str:
        if not self.ok:
            return f"{self.case}: WRONG: " + ("; ".join(self.wrong) or "nothing was compared")
        text = f"{self.case}: {len(self.checks)} comparisons hold"
        return text if self.closest is None else f"{text}; the closest to its bound: {_sentence(self.closest)}"

    def as_check(self) -> Check:
        """All of it as one line of a receipt: the largest part of a bound that an error takes, and where."""
        if not self.ok:
            return Check(self.case, False, note="; ".join(self.wrong)[:400] or "nothing was compared")
        value = None if self.closest is None else _part(self.closest)
        note = f"{len(self.checks)} comparisons" + ("" if self.closest is None else f"; {_sentence(self.closest)}")
        return Check(self.case, True, value, None if value is None else 1.0, note)


def _part(check: Check) -> float:
    return (check.value or 0.0) / (check.bound or 1.0)


def _sentence(check: Check) -> str:
    if check.value is None or check.bound is None:
        return check.what + (f" ({check.note})" if check.note else "")
    return f"{check.what}: {check.value:.2e}, bound {check.bound:.2e}"


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖, in pieces: a cache in double precision may not fit beside the weights."""
    if actual.shape != expected.shape:
        raise AssertionError(f"compared {tuple(actual.shape)} with {tuple(expected.shape)}")
    off = own = 0.0
    for x, y in zip(torch.split(actual, 1024), torch.split(expected, 1024)):
        off += float((x.double() - y.double()).square().sum())
        own += float(y.double().square().sum())
    if own == 0.0:
        return 0.0 if off == 0.0 else float("inf")
    return float((off / own) ** 0.5)


def choice_gap(logits: Tensor, chosen: Tensor) -> float:
    """How much the best expert that was left out exceeds the worst that was chosen, over all rows: a choice is a
    valid top-k of these logits if this is not positive, and a near tie of them if it is small. Infinite where a row
    chose an expert twice."""
    ids = chosen.long()
    ordered = ids.sort(-1).values
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        return float("inf")
    worst = logits.gather(1, ids).min(-1).values
    others = logits.scatter(1, ids, -torch.inf).max(-1).values
    return float((others - worst).max())


def token_gap(logits: Tensor, tokens: Tensor) -> float:
    """How much the highest logit exceeds that of the token taken, over all rows: zero where both are the same."""
    return float((logits.max(-1).values - logits.gather(1, tokens.long()[:, None])[:, 0]).max())


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())
