"""Run a suite of held-out problems against anything that turns prompts into tokens, and score it.

The same code judges every engine: give it a `generate` that maps prompts (token ids) to completions (token ids, the
end token included). Decoding is expected to be greedy; then the whole report is deterministic. Judging is strict: a
reply that is not well-formed harmony is wrong, and nothing is repaired first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from halfbyte.errors import UsageError
from halfbyte.evals.problem import Problem
from halfbyte.evals.tasks import TASKS, problem
from halfbyte.harmony.messages import FUNCTIONS
from halfbyte.harmony.render import render_prompt, render_training_example
from halfbyte.harmony.vocabulary import Controls, Vocabulary

Generate = Callable[[list[list[int]], int], list[list[int]]]
Predict = Callable[[list[int]], Sequence[int]]  # tokens -> the greedy next token after each of them
MAX_TOKENS = 320  # the longest worked reply is well under this
SUITES = {"tiny": 8, "quick": 2}  # name -> problems per task unless said; quick ones have short haystacks
TOGETHER = 64  # prompts given to `generate` at once, whole tasks
_CHANNELS = ("analysis", "commentary", "final")


class Decoder(Vocabulary, Protocol):
    def decode(self, ids: Sequence[int], /) -> str: ...


@dataclass(frozen=True)
class Reply:
    """What a completion says. `fault` says why it is not well-formed harmony, None if it is."""

    analysis: str | None = None
    final: str | None = None
    call: tuple[str, str] | None = None
    fault: str | None = None


def read_reply(tokenizer: Decoder, tokens: Sequence[int]) -> Reply:
    """Read a completion that follows `<|start|>assistant`, strictly."""
    c = Controls.of(tokenizer)
    structure = {c.start, c.channel, c.constrain, c.message, c.end, c.return_, c.call}
    specials = set(tokenizer.special.values())
    analysis: str | None = None
    at, n = 0, len(tokens)

    def text() -> str:
        nonlocal at
        begin = at
        while at < n and tokens[at] not in specials:
            at += 1
        return tokenizer.decode(tokens[begin:at])

    def fault(why: str) -> Reply:
        return Reply(analysis, fault=f"{why} at token {at}")

    header = text()
    while True:
        recipient = header.strip()
        if at >= n or tokens[at] != c.channel:
            return fault("no channel")
        at += 1
        channel, _, after = text().strip().partition(" ")
        recipient = recipient or after.strip()
        if channel not in _CHANNELS:
            return fault(f"unknown channel {channel!r}")
        if at < n and tokens[at] == c.constrain:
            at += 1
            if text().strip() != "json":
                return fault("unknown constraint")
        if at >= n or tokens[at] != c.message:
            return fault("no message")
        at += 1
        body = text()
        if at >= n:
            return fault("no end")
        stop = tokens[at]
        at += 1
        if stop not in structure:
            return fault("a stray special token")
        if recipient:
            name = recipient.removeprefix(f"to={FUNCTIONS}.")
            if stop != c.call or at != n or channel != "commentary" or name == recipient:
                return fault("a malformed call")
            return Reply(analysis, call=(name, body))
        if channel == "final":
            return (
                Reply(analysis, final=body)
                if stop == c.return_ and at == n
                else fault("a final message that does not end the turn")
            )
        if stop != c.end or at >= n or tokens[at] != c.start:
            return fault("no next message")
        at += 1
        analysis = body if channel == "analysis" else analysis
        header = text()
        if not header.startswith("assistant"):
            return fault(f"a message from {header!r}")
        header = header.removeprefix("assistant")


@dataclass(frozen=True)
class Item:
    problem: Problem
    prompt: list[int]


@dataclass
class TaskScore:
    problems: int = 0
    right: int = 0
    well_formed: int = 0
    tokens: int = 0

    @property
    def accuracy(self) -> float:
        return self.right / self.problems if self.problems else 0.0


@dataclass
class Report:
    suite: str
    seed: int
    per_task: int
    tasks: dict[str, TaskScore] = field(default_factory=dict)
    wrong: list[dict[str, str]] = field(default_factory=list)  # every miss: task, question, expected, got

    @property
    def accuracy(self) -> float:
        """The mean over tasks."""
        return sum(t.accuracy for t in self.tasks.values()) / max(1, len(self.tasks))

    @property
    def worst(self) -> float:
        return min((t.accuracy for t in self.tasks.values()), default=0.0)

    @property
    def well_formed(self) -> float:
        return sum(t.well_formed for t in self.tasks.values()) / max(1, sum(t.problems for t in self.tasks.values()))

    def to_json(self) -> dict[str, Any]:
        tasks = {name: asdict(t) | {"accuracy": t.accuracy} for name, t in self.tasks.items()}
        return {
            "suite": self.suite, "seed": self.seed, "per_task": self.per_task, "accuracy": self.accuracy,
            "worst": self.worst, "well_formed": self.well_formed, "tasks": tasks, "wrong": self.wrong,
        }  # fmt: skip

    def table(self) -> str:
        rows = [f"{name:12} {t.right:4}/{t.problems:<4} {100 * t.accuracy:6.1f} %" for name, t in self.tasks.items()]
        return "\n".join(
            [*rows, f"mean {100 * self.accuracy:.1f} %, well-formed harmony {100 * self.well_formed:.1f} %"]
        )


class Suite:
    """`per_task` held-out problems of each task: "tiny", or "quick" for under a minute on two cores."""

    def __init__(
        self, name: str = "tiny", seed: int = 0, per_task: int | None = None, tasks: Sequence[str] | None = None
    ) -> None:
        if name not in SUITES:
            raise UsageError(f"there is no suite {name!r}; the suites are: {', '.join(SUITES)}.")
        per_task = SUITES[name] if per_task is None else per_task
        if per_task < 1:
            raise UsageError("a suite needs at least one problem per task.")
        self.name, self.seed, self.per_task = name, seed, per_task
        self.tasks = tuple(tasks) if tasks else tuple(TASKS)
        self.problems = {
            task: [problem(task, seed, i, quick=name == "quick") for i in range(per_task)] for task in self.tasks
        }

    def items(self, tokenizer: Decoder) -> list[Item]:
        return [Item(p, render_prompt(tokenizer, p.prompt())) for ps in self.problems.values() for p in ps]

    def run(
        self,
        tokenizer: Decoder,
        generate: Generate,
        *,
        max_tokens: int = MAX_TOKENS,
        progress: Callable[[str, TaskScore], None] | None = None,
    ) -> Report:
        """`generate` gets the prompts of several tasks at once, since batches are cheap; `progress` gets each score."""
        report = Report(self.name, self.seed, self.per_task)
        waiting = list(self.problems)
        while waiting:
            some = waiting[: max(1, TOGETHER // self.per_task)]
            waiting = waiting[len(some) :]
            problems = [p for task in some for p in self.problems[task]]
            prompts = [render_prompt(tokenizer, p.prompt()) for p in problems]
            completions = generate(prompts, max_tokens)
            if len(completions) != len(prompts):
                raise UsageError(f"generate returned {len(completions)} completions for {len(prompts)} prompts.")
            answers = iter(completions)
            for task in some:
                score = report.tasks[task] = TaskScore()
                for p in self.problems[task]:
                    _score(report, score, tokenizer, p, next(answers))
                if progress:
                    progress(task, score)
        return report

    def forced(self, tokenizer: Decoder, predict: Predict) -> dict[str, float]:
        """Per task, the share of problems whose worked reply is, token for token, what the model would write.

        One pass over prompt and reply instead of one per token: the cheap form of `run`. It is a little stricter,
        since a right answer after other reasoning does not count.
        """
        shares = {}
        for task, problems in self.problems.items():
            right = 0
            for p in problems:
                prompt = render_prompt(tokenizer, p.prompt())
                whole, _ = render_training_example(tokenizer, p.worked())
                guesses = predict(whole[:-1])
                right += list(guesses[len(prompt) - 1 :]) == whole[len(prompt) :]
            shares[task] = right / len(problems)
        return shares


def _score(report: Report, score: TaskScore, tokenizer: Decoder, p: Problem, tokens: list[int]) -> None:
    reply = read_reply(tokenizer, tokens)
    score.problems += 1
    score.tokens += len(tokens)
    score.well_formed += reply.fault is None
    if reply.fault is None and p.judge(reply.final, reply.call):
        score.right += 1
        return
    report.wrong.append(
        {
            "task": p.task,
            "question": p.turns[-1].text[-200:],
            "expected": p.reply[-1].text,
            "got": reply.fault or (reply.final if reply.final is not None else str(reply.call)),
            "raw": tokenizer.decode(tokens),
        }
    )
