"""When sessions begin: some at a time, each followed by the next (closed loop), by themselves at a rate (Poisson), or
with a number under way that goes up and down (staircase).

An open arrival does not wait for a server, so a server that is too slow has a queue that grows for as long as anybody
measures, and its latencies say how long that was. `saturation` notices it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from halfbyte.errors import UsageError

KEEPS_UP = 0.9  # of the offered rate
GROWS = 1.5  # times as many under way at the end as in the middle


@dataclass(frozen=True)
class ClosedLoop:
    """So many sessions at once."""

    streams: int
    sessions: int

    def __post_init__(self) -> None:
        if self.streams < 1 or self.sessions < 1:
            raise UsageError("a closed loop needs a stream and a session at least.")

    @property
    def shape(self) -> dict[str, float]:
        return {"concurrency": self.streams}


@dataclass(frozen=True)
class Poisson:
    """Sessions that begin at random, `rate` a second on average, whatever the server does."""

    rate: float
    sessions: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.rate < float("inf") or self.sessions < 1:
            raise UsageError("arrivals need a rate above 0 and a session at least.")

    @property
    def shape(self) -> dict[str, float]:
        return {"rate": self.rate}

    def times(self) -> list[float]:
        draw, at, times = random.Random(f"arrivals {self.seed}"), 0.0, []
        for _ in range(self.sessions):
            at += draw.expovariate(self.rate)
            times.append(at)
        return times


@dataclass(frozen=True)
class Staircase:
    """So many sessions at once as each of `levels` says in turn, for `seconds` in all."""

    levels: tuple[int, ...]
    seconds: float

    def __post_init__(self) -> None:
        if not self.levels or min(self.levels) < 1 or not 0 < self.seconds < float("inf"):
            raise UsageError("a staircase needs levels of at least one session and a time above 0 seconds.")

    @property
    def shape(self) -> dict[str, float]:
        return {"seconds": self.seconds}

    def level(self, at: float) -> int:
        """Sessions at once, `at` seconds after the beginning."""
        return self.levels[min(int(at / self.seconds * len(self.levels)), len(self.levels) - 1)]


Arrivals = ClosedLoop | Poisson  # of a known number of sessions


def saturation(begins: Sequence[float], ends: Sequence[float]) -> str:
    """Why these open arrivals came faster than they were served; empty where the server kept up."""
    if len(begins) < 8:
        return ""
    begins, ends = sorted(begins), sorted(ends)
    last = begins[-1]
    middle = begins[0] + (last - begins[0]) / 2

    def under_way(at: float) -> int:
        return sum(b <= at for b in begins) - sum(e <= at for e in ends)

    served, offered = sum(e <= last for e in ends), len(begins)
    now, before = under_way(last), under_way(middle)
    if served < KEEPS_UP * offered and now >= GROWS * max(1, before):
        return (
            f"over-saturated: {offered} sessions came in {last - begins[0]:.3g} s and {served} had ended by then; "
            f"{before} were under way in the middle and {now} at the end, so latencies are those of a growing queue"
        )
    return ""
