"""Level 3: does the engine stand? Many requests, one after another and at once, long prompts and long answers.

Every request must be answered, with the text of its tokens, streams to their end and with the content of the same
answer in one piece; requests whose clients leave must end; the engine must live and be healthy afterwards, its memory
must not grow and it must leave no zombies. Each kind of work runs once before memory is first looked at: what is made
when it is first needed is no leak. Nothing is timed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from halfbyte.errors import AskError
from halfbyte.lab.levels.correctness import MARGIN, text_problem
from halfbyte.lab.levels.scores import margin_of
from halfbyte.lab.levels.subject import Subject
from halfbyte.lab.options import StressCounts
from halfbyte.lab.peers.asker import Asker, Question, Reply
from halfbyte.lab.peers.process import PeerProcess
from halfbyte.lab.result import Check, Result, figure
from halfbyte.model import load

GROWTH = 0.10
ORDINARY_TOKENS = range(300, 1500)  # token ids
MIXED = 0.1  # of the streams may begin otherwise than their answer in one piece, all by a near tie
LONG = 8  # times a long answer: one that nobody waits for would take more than LEAVE_S
LEAVE_S = 5.0  # for requests whose clients have left
RUNNING = "(?:halfbyte_requests_running|vllm:num_requests_running|sglang:num_running_reqs|llamacpp:requests_processing)"
SLACK = 16 << 20  # bytes: an allocator's grain, which is more than a tenth of a very small engine


@dataclass
class Tally:
    """What became of the requests of one kind."""

    requests: int = 0
    errors: tuple[str, ...] = ()
    mixed: tuple[str, ...] = ()  # streams whose content is not that of the same answer in one piece

    def check(self, title: str) -> Check:
        mixed = self.mixed if len(self.mixed) > MIXED * self.requests else ()
        wrong = (*self.errors, *mixed)
        return Check(title, not wrong, self.requests - len(wrong), self.requests, "; ".join(wrong[:3])[:400])


def ids(length: int, seed: int) -> list[int]:
    """A prompt of words that no other seed begins alike. The first 256 tokens of a vocabulary are bytes, and behind
    half a letter vLLM's answer begins with the rest of its prompt."""
    return [
        ORDINARY_TOKENS.start + (seed * 31 + j * 7 + (j * j + seed) % 11) % len(ORDINARY_TOKENS) for j in range(length)
    ]


def _alike(a: Reply, b: Reply) -> bool:
    """Whether two answers begin alike: a batch may move a near tie further on."""
    if a.tokens and b.tokens:
        return a.tokens[0] == b.tokens[0]
    return a.text[:4] == b.text[:4]


def first_margin(asker: Asker, prompt: list[int]) -> float:
    """Nats between the two best first tokens of an answer; 0 where the engine does not name them."""
    reply = asker.ask(Question(prompt, tokens=1, logprobs=2, exactly=True))
    return margin_of(reply.top[0]) if reply.top else 0.0


def leaving_check(asker: Asker, prompts: Sequence[list[int]], tokens: int) -> Check | None:
    """Clients that leave after the first bytes of long answers: their requests must end. None for an engine that does
    not say how many requests run."""
    with contextlib.ExitStack() as clients:
        for prompt in prompts:
            clients.enter_context(asker.opened(Question(prompt, tokens=tokens, exactly=True)))
        running = asker.metric(RUNNING)
    if not running:
        return None
    deadline = time.monotonic() + LEAVE_S
    while (left := asker.metric(RUNNING)) and time.monotonic() < deadline:
        time.sleep(0.05)
    note = f"{left:.0f} of {len(prompts)} still ran {LEAVE_S:g} s after their clients had left" if left else ""
    return Check("requests of clients that leave end", not left, int(left), 0, note)


def check_stress(subject: Subject, engine: PeerProcess, counts: StressCounts) -> Result:
    cell = subject.cell(
        "stress", sequential=counts.sequential, load=counts.load, at_once=counts.at_once, tokens=counts.tokens
    )
    seeds = iter(range(1_000_000))
    tokenizer = load.tokenizer_of(subject.model)
    checks: list[Check] = []

    def ask(many: int, at_once: int, tokens: int, length: int = 24) -> Tally:
        prompts = [ids(length, next(seeds)) for _ in range((many + 1) // 2)]
        pairs = [(prompt, stream) for prompt in prompts for stream in (False, True)][:many]
        questions = [Question(prompt, tokens=tokens, exactly=True, stream=stream) for prompt, stream in pairs]
        replies = engine.asker.ask_all(questions, at_once)
        errors = [str(r) for r in replies if isinstance(r, AskError)]
        short = [r for r in replies if isinstance(r, Reply) and r.completion_tokens != tokens]
        errors += [f"{r.completion_tokens} tokens instead of {tokens}" for r in short]
        errors += [problem for r in replies if isinstance(r, Reply) and (problem := text_problem(r, tokenizer))]
        mixed = []
        for prompt, a, b in zip(prompts, replies[::2], replies[1::2]):
            if isinstance(a, Reply) and isinstance(b, Reply) and not _alike(a, b):
                sentence = f"a stream began {b.text[:24]!r}, its answer in one piece {a.text[:24]!r}"
                if (margin := first_margin(engine.asker, prompt)) > MARGIN:
                    errors.append(f"{sentence}, by a margin of {margin:.2f} nats")
                else:
                    mixed.append(sentence)
        return Tally(many, tuple(errors), tuple(mixed))

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
    for title, job in work.items():
        subject.progress(f"stress: {title}")
        checks += [job().check(title), Check("it lives", engine.alive)]
        if not all(c.ok for c in checks[-2:]):
            return subject.judged(cell, engine, checks)
        checks.pop()
    subject.progress("stress: clients that leave")
    prompts = [ids(24, next(seeds)) for _ in range(counts.at_once)]
    longest = load.config_of(subject.model).max_context - len(prompts[0]) - 1
    if (left := leaving_check(engine.asker, prompts, min(longest, LONG * counts.generation))) is not None:
        checks.append(left)
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
