"""Level 3: does the engine stand? Many requests, one after another and at once, long prompts and long answers.

Every request must be answered, the engine must live and be healthy afterwards, its memory must not grow and it must
leave no zombies. Each kind of work runs once before memory is first looked at: what is made when it is first needed is
no leak. Nothing is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from halfbyte.errors import AskError, UsageError
from halfbyte.lab.levels.subject import Subject
from halfbyte.lab.peers.asker import Question, Reply
from halfbyte.lab.peers.process import PeerProcess
from halfbyte.lab.result import Check, Result, figure

GROWTH = 0.10
SLACK = 16 << 20  # bytes: an allocator's grain, which is more than a tenth of a very small engine


@dataclass(frozen=True)
class Counts:
    """How much; the defaults are the protocol's."""

    sequential: int = 100
    together: tuple[int, ...] = (4, 10)
    prefill: int = 4096  # tokens of a prompt
    generation: int = 1024  # tokens of an answer
    load: int = 200  # requests
    at_once: int = 8
    tokens: int = 16  # of an ordinary answer
    settle_s: float = 1.0  # before memory is looked at

    def __post_init__(self) -> None:
        numbers = (self.sequential, *self.together, self.prefill, self.generation, self.load, self.at_once, self.tokens)
        if min(numbers) < 1:
            raise UsageError("every count of the stress is at least 1.")


@dataclass
class Tally:
    """What became of the requests of one kind."""

    asked: int = 0
    errors: tuple[str, ...] = ()

    def check(self, what: str) -> Check:
        return Check(what, not self.errors, self.asked - len(self.errors), self.asked, "; ".join(self.errors[:3])[:400])


def ids(length: int, seed: int) -> list[int]:
    """A prompt that no other seed begins alike."""
    return [5 + (seed * 31 + j * 7 + (j * j + seed) % 11) % 190 for j in range(length)]


def check_load(subject: Subject, engine: PeerProcess, counts: Counts | None = None) -> Result:
    counts = counts or Counts()
    cell = subject.cell(
        "stress", sequential=counts.sequential, load=counts.load, at_once=counts.at_once, tokens=counts.tokens
    )
    seeds = iter(range(1_000_000))
    checks: list[Check] = []

    def ask(many: int, at_once: int, tokens: int, length: int = 24) -> Tally:
        questions = [Question(ids(length, next(seeds)), tokens=tokens, exactly=True) for _ in range(many)]
        replies = engine.asker.ask_all(questions, at_once)
        errors = [str(r) for r in replies if isinstance(r, AskError)]
        short = [r for r in replies if isinstance(r, Reply) and r.completion_tokens != tokens]
        errors += [f"{r.completion_tokens} tokens instead of {tokens}" for r in short]
        return Tally(many, tuple(errors))

    work: dict[str, Callable[[], Tally]] = {
        f"{counts.sequential} requests one after another": lambda: ask(counts.sequential, 1, counts.tokens),
        **{f"{n} requests at once": partial(ask, n, n, counts.tokens) for n in counts.together},
        f"a prompt of {counts.prefill} tokens": lambda: ask(1, 1, counts.tokens, counts.prefill),
        f"an answer of {counts.generation} tokens": lambda: ask(1, 1, counts.generation),
        f"{counts.load} requests, {counts.at_once} at once": lambda: ask(counts.load, counts.at_once, counts.tokens),
    }
    subject.progress("stress: every kind once")
    first = (
        ask(1, 1, counts.generation),
        ask(1, 1, counts.tokens, counts.prefill),
        ask(counts.at_once, counts.at_once, 4),
    )
    if any(t.errors for t in first):
        checks.append(next(t for t in first if t.errors).check("every kind of request once"))
        return subject.judged(cell, engine, checks)
    time.sleep(counts.settle_s)
    before = engine.memory_bytes()
    for what, job in work.items():
        subject.progress(f"stress: {what}")
        checks += [job().check(what), Check("it lives", engine.alive)]
        if not all(c.ok for c in checks[-2:]):
            return subject.judged(cell, engine, checks)
        checks.pop()
    time.sleep(counts.settle_s)
    after, zombies = engine.memory_bytes(), engine.zombies()
    checks.append(Check("healthy afterwards", engine.asker.healthy(engine.launch.health, subject.limits.request_s)))
    checks.append(Check("no zombies", not zombies, len(zombies), 0, "; ".join(zombies)[:300]))
    detail = {"memory_before": before, "memory_after": after}
    if before is not None and after is not None:
        grown = after / before - 1
        ok = grown <= GROWTH or after - before <= SLACK
        checks.append(Check("memory growth", ok, round(grown, 4), GROWTH, f"{before >> 20} to {after >> 20} MiB"))
    requests = figure("requests", "requests", counts.sequential + sum(counts.together) + counts.load + 2)
    return subject.judged(cell, engine, checks, [requests], detail)
