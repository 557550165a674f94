"""Level 2: are the answers right? Accuracy, token counts, log probabilities, determinism, and a stored reference.

An engine answers a suite of problems greedily. Its answers are judged, and held against those of a reference token by
token: where the first difference lies, how sure the reference was there (its margin between the two best tokens), and
whether the answers have the same length, because a broken kernel often shows as rambling. Beside that: exact counts,
log probabilities that are numbers and fit together, the same seed twice. Needs an engine that takes token ids.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from halfbyte.errors import AskError, UsageError
from halfbyte.evals.suite import Suite
from halfbyte.lab import receipts
from halfbyte.lab.levels.subject import Subject
from halfbyte.lab.peers.asker import Asker, Question, Reply
from halfbyte.lab.peers.process import PeerProcess
from halfbyte.lab.result import Check, Result, figure
from halfbyte.model import load
from halfbyte.model.tokenizer import Tokenizer

SCHEMA = "halfbyte.reference/1"
REFERENCES = Path(__file__).parent / "references"
MOST = 320  # tokens of an answer
COUNTS = (1, 7, 33)
SEEDS = (1, 2, 3)
LENGTH = 0.10  # by which the mean length may differ
MARGIN = 1.0  # nats: where the reference is surer than this, its token is the only right one
MATCH = 0.7  # of the tokens, at least, come before the first difference
LOST = 2  # right answers that may be lost: one in fourteen, where two near ties fall the other way
AT_ONCE = 8


@dataclass(frozen=True)
class ReferenceAnswer:
    tokens: tuple[int, ...]
    margins: tuple[float, ...]  # at each token, between the best and the next


@dataclass(frozen=True)
class Reference:
    """Answers to compare with, and by whom."""

    model: str
    weights: dict[str, str]  # file -> hash; empty for weights that are not files
    suite: str
    seed: int
    per_task: int
    gates: dict[str, str]
    right: int
    answers: tuple[ReferenceAnswer, ...]
    schema: str = SCHEMA

    @property
    def mean_length(self) -> float:
        return statistics.mean(len(a.tokens) for a in self.answers)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Reference:
        try:
            raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if raw["schema"] != SCHEMA:
                raise UsageError(
                    f"{path.name} is of schema {raw['schema']!r}, and only {SCHEMA!r} is read; write it anew."
                )
            answers = tuple(ReferenceAnswer(tuple(a["tokens"]), tuple(a["margins"])) for a in raw.pop("answers"))
            return cls(answers=answers, **raw)
        except (OSError, ValueError, LookupError, TypeError) as e:
            raise UsageError(f"{path} is no reference of answers ({type(e).__name__}: {e}).") from None


@dataclass(frozen=True)
class Answers:
    """What an engine said to a suite."""

    replies: tuple[Reply, ...]
    right: int
    well_formed: float
    accuracy: float
    report: dict[str, Any]


def find_reference(subject: Subject) -> Path | None:
    """The one that comes with halfbyte, for a model that has one."""
    path = REFERENCES / f"{subject.model.label}.json"
    return path if subject.model.path == load.EMBEDDED and path.is_file() else None


def ask_suite(asker: Asker, suite: Suite, tokenizer: Tokenizer, logprobs: int | None = None) -> Answers:
    prompts = [item.prompt for item in suite.items(tokenizer)]
    replies: list[Reply] = []
    for reply in asker.ask_all([Question(p, tokens=MOST, logprobs=logprobs) for p in prompts], AT_ONCE):
        if isinstance(reply, AskError):
            raise reply
        if reply.tokens is None:
            raise AskError("this engine gives no token ids, without which answers cannot be compared token by token")
        replies.append(reply)
    given = iter(replies)
    report = suite.run(tokenizer, lambda some, _: [list(next(given).tokens or ()) for _ in some])
    right = sum(t.right for t in report.tasks.values())
    return Answers(tuple(replies), right, report.well_formed, report.accuracy, report.to_json())


def make_reference(subject: Subject, asker: Asker, suite: Suite) -> Reference:
    """From an engine that is trusted: halfbyte's reference plan, or the one that a new feature is held against."""
    answers = ask_suite(asker, suite, load.tokenizer_of(subject.model), logprobs=2)
    kept = []
    for reply in answers.replies:
        margins = tuple(round(_margin(top), 3) for top in reply.top)
        assert reply.tokens is not None
        kept.append(ReferenceAnswer(reply.tokens, margins))
    name = subject.model
    hashes = {} if name.path is None or not name.path.is_dir() else _hashes(name.path)
    return Reference(
        name.label, hashes, suite.name, suite.seed, suite.per_task, subject.gates.changes(), answers.right, tuple(kept)
    )


def _hashes(folder: Path) -> dict[str, str]:
    return {p.name: receipts.file_hash(p) for p in sorted(folder.glob("*.safetensors")) if p.stat().st_size < 1 << 30}


def _margin(top: Any) -> float:
    values = sorted(top.values(), reverse=True)
    return values[0] - values[1] if len(values) > 1 else math.inf


# ---- the level -------------------------------------------------------------------------------------------------------


def check_answers(
    subject: Subject, engine: PeerProcess, reference: Reference | None, suite: Suite | None = None
) -> Result:
    """Of an engine that runs. Without a suite: that of the reference; without both, counts and numbers alone."""
    if suite is None and reference is not None:
        suite = Suite(reference.suite, reference.seed, reference.per_task)
    cell = subject.cell("correctness", suite=suite.name if suite else "none")
    checks: list[Check] = []
    detail: dict[str, Any] = {}
    figures = []
    try:
        checks += count_checks(engine.asker)
        checks += logprob_checks(engine.asker)
        checks += seed_checks(engine.asker)
        if suite is not None:
            answers = ask_suite(engine.asker, suite, load.tokenizer_of(subject.model))
            detail["report"] = {k: answers.report[k] for k in ("accuracy", "worst", "well_formed", "tasks", "wrong")}
            figures.append(figure("accuracy", "%", 100 * answers.accuracy))
            figures.append(
                figure("mean_length", "tokens", statistics.mean(r.completion_tokens for r in answers.replies))
            )
            if reference is None:
                detail["note"] = "no reference for this model: accuracy is reported and not judged"
            else:
                checks += reference_checks(subject, answers, reference, detail)
        else:
            detail["note"] = "no suite and no reference for this model: its answers were not judged"
    except AskError as e:
        return subject.failed(cell, engine, engine.failure(f"{subject.peer.name} did not answer: {e}"), checks)
    return subject.judged(cell, engine, checks, figures, detail)


def count_checks(asker: Asker) -> list[Check]:
    wrong = []
    for count in COUNTS:
        reply = asker.ask(Question("Count: 1, 2, 3,", tokens=count, exactly=True))
        sent = len(reply.tokens) if reply.tokens is not None else reply.completion_tokens
        if reply.completion_tokens != count or sent != count:
            wrong.append(f"{count} asked for, {reply.completion_tokens} counted, {sent} sent")
    return [Check("as many tokens as asked for", not wrong, note="; ".join(wrong))]


def logprob_checks(asker: Asker) -> list[Check]:
    reply = asker.ask(Question("The weather today is", tokens=16, logprobs=3, exactly=True))
    if not reply.logprobs:
        return [Check("log probabilities", False, note="the engine sent none")]
    broken = [v for v in reply.logprobs if not math.isfinite(v)]
    checks = [Check("no NaN or infinity in log probabilities", not broken, len(broken), 0)]
    if broken:
        return checks
    too_much = [sum(map(math.exp, top.values())) for top in reply.top]
    not_best = [p for p, v, top in zip(reply.pieces, reply.logprobs, reply.top) if top and v < max(top.values()) - 1e-3]
    largest = max([*too_much, 0.0])
    checks.append(Check("log probabilities are at most 0", max(reply.logprobs) <= 1e-6, max(reply.logprobs), 0.0))
    checks.append(Check("they add up to at most 1", largest <= 1.001, round(largest, 6), 1.001))
    checks.append(Check("greedy takes the best", not not_best, len(not_best), 0))
    return checks


def seed_checks(asker: Asker) -> list[Check]:
    def said(seed: int, temperature: float) -> tuple[object, ...]:
        reply = asker.ask(Question("Once upon a time", tokens=24, temperature=temperature, seed=seed, exactly=True))
        return reply.tokens or (reply.text,)

    first, again = said(SEEDS[0], 1.0), said(SEEDS[0], 1.0)
    others = [said(seed, 1.0) for seed in SEEDS[1:]]
    greedy = said(SEEDS[0], 0.0), said(SEEDS[1], 0.0)
    return [
        Check("the same seed gives the same tokens", first == again),
        Check("other seeds give others", any(o != first for o in others)),
        Check("greedy gives the same tokens twice", greedy[0] == greedy[1]),
    ]


def reference_checks(subject: Subject, answers: Answers, reference: Reference, detail: dict[str, Any]) -> list[Check]:
    if len(answers.replies) != len(reference.answers):
        raise UsageError(
            f"the reference has {len(reference.answers)} answers, the suite {len(answers.replies)} problems."
        )
    if reference.weights and subject.model.path is not None and _hashes(subject.model.path) != reference.weights:
        raise UsageError("the reference was written for other weights of this model; write it anew.")
    matched = total = 0
    differences = []
    for i, (reply, other) in enumerate(zip(answers.replies, reference.answers)):
        at = first_difference(reply.tokens or (), other.tokens)
        total += len(other.tokens)
        matched += len(other.tokens) if at is None else min(at, len(other.tokens))
        if at is not None:
            margin = other.margins[at] if at < len(other.margins) else math.inf
            differences.append({"answer": i, "at": at, "of": len(other.tokens), "margin": margin})
    worst = max((d["margin"] for d in differences), default=0.0)
    rate = matched / max(1, total)
    mean = statistics.mean(r.completion_tokens for r in answers.replies)
    off = mean / reference.mean_length - 1
    detail["differences"] = sorted(differences, key=lambda d: -d["margin"])[:20]
    detail["match_rate"] = rate
    return [
        Check("right answers", answers.right >= reference.right - LOST, answers.right, reference.right - LOST,
              f"the reference has {reference.right} of {len(reference.answers)}"),
        Check("tokens before the first difference", rate >= MATCH, round(rate, 4), MATCH, f"{len(differences)} differ"),
        Check("margin at the first difference", worst <= MARGIN, round(worst, 3), MARGIN,
              "nats by which the reference preferred its own token"),
        Check("mean length", abs(off) <= LENGTH, round(off, 4), LENGTH,
              f"{mean:.1f} tokens, the reference {reference.mean_length:.1f}"),
    ]  # fmt: skip


def first_difference(tokens: Sequence[int], other: Sequence[int]) -> int | None:
    for at, (x, y) in enumerate(zip(tokens, other)):
        if x != y:
            return at
    return None if len(tokens) == len(other) else min(len(tokens), len(other))
