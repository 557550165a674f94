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
from halfbyte.evals.grading import refuses
from halfbyte.evals.natural import QUESTIONS
from halfbyte.evals.problem import Problem
from halfbyte.evals.tasks import TASKS, problem
from halfbyte.harmony.messages import FUNCTIONS
from halfbyte.harmony.render import render_prompt, render_training_example
from halfbyte.harmony.vocabulary import Controls, Vocabulary

Generate = Callable[[list[list[int]], int], list[list[int]]]
Predict = Callable[[list[int]], Sequence[int]]  # tokens -> the greedy next token after each of them
MAX_TOKENS = 320  # the longest worked reply is well under this
# Name -> problems per task unless said; quick ones have short haystacks, natural ones were written by hand.
SUITES = {"tiny": 8, "quick": 2, "natural": len(QUESTIONS)}
LEAST = 5  # problems of a subtype before its share can be the headline
TOGETHER = 64  # prompts given to `generate` at once, whole tasks
_CHANNELS = ("analysis", "commentary", "final")


class Decoder(Vocabulary, Protocol):
    def decode(self, ids: Sequence[int], /) -> str: ...


@dataclass(frozen=True)
class ParsedReply:
    """What a completion says. `fault` says why it is not well-formed harmony, None if it is."""

    analysis: str | None = None
    final: str | None = None
    call: tuple[str, str] | None = None
    fault: str | None = None


def read_reply(tokenizer: Decoder, tokens: Sequence[int]) -> ParsedReply:
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

    def fault(why: str) -> ParsedReply:
        return ParsedReply(analysis, fault=f"{why} at token {at}")

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
            return ParsedReply(analysis, call=(name, body))
        if channel == "final":
            return (
                ParsedReply(analysis, final=body)
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
class SuiteItem:
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
class SuiteReport:
    suite: str
    seed: int
    per_task: int
    tasks: dict[str, TaskScore] = field(default_factory=dict)
    wrong: list[dict[str, str]] = field(default_factory=list)  # every miss: task, question, expected, got
    subtypes: dict[str, TaskScore] = field(default_factory=dict)
    answerable: int = 0  # problems whose right answer is not a refusal
    false_refusals: int = 0  # refusals of these

    @property
    def accuracy(self) -> float:
        """The mean over tasks."""
        return sum(t.accuracy for t in self.tasks.values()) / max(1, len(self.tasks))

    @property
    def worst(self) -> float:
        return min((t.accuracy for t in self.tasks.values()), default=0.0)

    @property
    def worst_subtype(self) -> tuple[str, TaskScore] | None:
        """The subtype with the lowest share of right answers, of those with enough problems to say so."""
        judged = [(name, score) for name, score in self.subtypes.items() if score.problems >= LEAST]
        return min(judged, key=lambda entry: (entry[1].accuracy, -entry[1].problems, entry[0]), default=None)

    @property
    def well_formed(self) -> float:
        return sum(t.well_formed for t in self.tasks.values()) / max(1, sum(t.problems for t in self.tasks.values()))

    def to_json(self) -> dict[str, Any]:
        tasks = {name: asdict(t) | {"accuracy": t.accuracy} for name, t in self.tasks.items()}
        return {
            "suite": self.suite,
            "seed": self.seed,
            "per_task": self.per_task,
            "accuracy": self.accuracy,
            "worst": self.worst,
            "well_formed": self.well_formed,
            "tasks": tasks,
            "worst_subtype": None if self.worst_subtype is None else self.worst_subtype[0],
            "subtypes": {name: asdict(t) | {"accuracy": t.accuracy} for name, t in sorted(self.subtypes.items())},
            "answerable": self.answerable,
            "false_refusals": self.false_refusals,
            "wrong": self.wrong,
        }

    def table(self) -> str:
        """The worst subtype first, then every task, the mean, and the subtypes that are not all right."""
        rows = [_row(name, t) for name, t in self.tasks.items()]
        rows.append(f"mean {100 * self.accuracy:.1f} %, well-formed harmony {100 * self.well_formed:.1f} %")
        if self.false_refusals:
            rows.append(f"refused although the answer was known: {self.false_refusals} of {self.answerable}")
        if self.worst_subtype is not None:
            name, score = self.worst_subtype
            rows.insert(0, f"worst subtype: {name} {100 * score.accuracy:.1f} % ({score.right} of {score.problems})")
        missed = [(name, t) for name, t in self.subtypes.items() if t.right < t.problems]
        if missed:
            rows += ["", "subtypes with misses:"]
            rows += [_row(name, t, 36) for name, t in sorted(missed, key=lambda entry: (entry[1].accuracy, entry[0]))]
        return "\n".join(rows)


def _row(name: str, score: TaskScore, width: int = 12) -> str:
    return f"{name:{width}} {score.right:4}/{score.problems:<4} {100 * score.accuracy:6.1f} %"


class Suite:
    """`per_task` held-out problems of each task: "tiny", or "quick" for under a minute on two cores. "natural" has a
    hundred questions that were written by hand."""

    def __init__(
        self, name: str = "tiny", seed: int = 0, per_task: int | None = None, tasks: Sequence[str] | None = None
    ) -> None:
        if name not in SUITES:
            raise UsageError(f"there is no suite {name!r}; the suites are: {', '.join(SUITES)}.")
        per_task = SUITES[name] if per_task is None else per_task
        if per_task < 1:
            raise UsageError("a suite needs at least one problem per task.")
        self.name, self.seed, self.per_task = name, seed, per_task
        if name == "natural":
            if tasks:
                raise UsageError("the natural suite has no tasks to choose from; leave --tasks out.")
            self.per_task = min(per_task, len(QUESTIONS))
            self.tasks: tuple[str, ...] = (name,)
            self.problems = {name: list(QUESTIONS[: self.per_task])}
            return
        self.tasks = tuple(tasks) if tasks else tuple(TASKS)
        self.problems = {
            task: [problem(task, seed, i, quick=name == "quick") for i in range(per_task)] for task in self.tasks
        }

    def items(self, tokenizer: Decoder) -> list[SuiteItem]:
        return [SuiteItem(p, render_prompt(tokenizer, p.prompt())) for ps in self.problems.values() for p in ps]

    def run(
        self,
        tokenizer: Decoder,
        generate: Generate,
        *,
        max_tokens: int = MAX_TOKENS,
        progress: Callable[[str, TaskScore], None] | None = None,
    ) -> SuiteReport:
        """`generate` gets the prompts of several tasks at once, since batches are cheap; `progress` gets each score."""
        report = SuiteReport(self.name, self.seed, self.per_task)
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
                example, _ = render_training_example(tokenizer, p.worked())
                guesses = predict(example[:-1])
                right += list(guesses[len(prompt) - 1 :]) == example[len(prompt) :]
            shares[task] = right / len(problems)
        return shares


def _score(report: SuiteReport, score: TaskScore, tokenizer: Decoder, p: Problem, tokens: list[int]) -> None:
    reply = read_reply(tokenizer, tokens)
    right = reply.fault is None and p.judge(reply.final, reply.call)
    for part in (score, *(report.subtypes.setdefault(name, TaskScore()) for name in p.subtypes)):
        part.problems += 1
        part.tokens += len(tokens)
        part.well_formed += reply.fault is None
        part.right += right
    if not p.wants_refusal:
        report.answerable += 1
        report.false_refusals += reply.final is not None and refuses(reply.final)
    if right:
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
