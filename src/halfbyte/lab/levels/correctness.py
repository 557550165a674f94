"""Level 2: are the answers right? Log probabilities, sampling, accuracy, token counts, determinism, texts and streams.

Log probabilities of fixed prompts are compared with a table of the reference's, and samples with their distribution
(`scores.py`). An engine also answers a suite of problems greedily. Its answers are judged, and compared with those of a
reference token by token: where the first difference lies, how sure the reference was there (its margin between the two
best tokens), and whether the answers have the same length, because a broken kernel often shows as rambling. Further
checks are of exact counts, of log probabilities that fit together, of seeds, of texts and of streams. What cannot be
judged is NOT PROVEN.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import eq
from pathlib import Path
from typing import Any

from halfbyte.errors import AskError, UsageError
from halfbyte.evals.suite import Suite
from halfbyte.lab import receipts
from halfbyte.lab.levels.conversations import conversation_checks
from halfbyte.lab.levels.kernel_path import UNPROVEN
from halfbyte.lab.levels.own_answers import TEXTS, own_answer_checks
from halfbyte.lab.levels.sampling import sampling_checks
from halfbyte.lab.levels.scores import (
    bound_of,
    decode_checks,
    exact_checks,
    find_table,
    make_prompts,
    margin_of,
    preemption_check,
    score,
    table_checks,
)
from halfbyte.lab.levels.subject import Subject
from halfbyte.lab.peers.asker import Asker, Question, Reply, drawable
from halfbyte.lab.peers.process import PeerProcess
from halfbyte.lab.result import Check, Result, figure, worst_check
from halfbyte.model import load
from halfbyte.model.tokenizer import Tokenizer

SCHEMA = "halfbyte.reference/1"
REFERENCES = Path(__file__).parent / "references"
MOST = 320  # tokens of an answer
COUNTS, LENGTHS = (1, 7, 33), (7, 65, 300)  # tokens of answers, and of prompts
SEEDS = (1, 2, 3, 4, 5, 6)
NEIGHBOURS, DRAWN = 12, 6  # requests with seeds at once, and tokens of each
LENGTH = 0.10  # by which the mean length may differ
MARGIN = 1.0  # nats: where the reference is surer than this, its token is the only right one
MATCH = 0.7  # of the tokens, at least, come before the first difference
LOST = 2  # right answers that may be lost: one in fourteen, where two near ties fall the other way
AT_ONCE, STREAMS = 16, 8
ENDED = 1  # answers that may end by themselves at the very limit
DISTINCT = 0.25  # share of runs of four tokens, at least; a loop of ten tokens has 0.16 of 64
SURE = -3.0  # nats: the mean log probability of greedy tokens, which random weights do not reach


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
class SuiteAnswers:
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


def ask_suite(asker: Asker, suite: Suite, tokenizer: Tokenizer, logprobs: int | None = None) -> SuiteAnswers:
    prompts = [item.prompt for item in suite.items(tokenizer)]
    replies: list[Reply] = []
    for reply in map(_answered, asker.ask_all([Question(p, tokens=MOST, logprobs=logprobs) for p in prompts], AT_ONCE)):
        if reply.tokens is None:
            raise AskError("this engine gives no token ids, without which answers cannot be compared token by token")
        replies.append(reply)
    remaining = iter(replies)
    report = suite.run(tokenizer, lambda some, _: [list(next(remaining).tokens or ()) for _ in some])
    right = sum(t.right for t in report.tasks.values())
    return SuiteAnswers(tuple(replies), right, report.well_formed, report.accuracy, report.to_json())


def make_reference(subject: Subject, asker: Asker, suite: Suite) -> Reference:
    """From an engine that is trusted: halfbyte's reference plan, or the one that a new feature is held against."""
    answers = ask_suite(asker, suite, load.tokenizer_of(subject.model), logprobs=2)
    reference_answers = []
    for reply in answers.replies:
        margins = tuple(round(margin_of(top), 3) for top in reply.top)
        assert reply.tokens is not None
        reference_answers.append(ReferenceAnswer(reply.tokens, margins))
    name = subject.model
    hashes = {} if name.path is None or not name.path.is_dir() else _hashes(name.path)
    return Reference(
        name.label,
        hashes,
        suite.name,
        suite.seed,
        suite.per_task,
        subject.gates.changes(),
        answers.right,
        tuple(reference_answers),
    )


def _hashes(folder: Path) -> dict[str, str]:
    return {p.name: receipts.file_hash(p) for p in sorted(folder.glob("*.safetensors")) if p.stat().st_size < 1 << 30}


# ---- the level -------------------------------------------------------------------------------------------------------


def check_correctness(
    subject: Subject, engine: PeerProcess, reference: Reference | None, suite: Suite | None = None
) -> Result:
    """The result of an engine that runs. Without a suite: that of the reference; without both, counts and numbers
    alone."""
    if suite is None and reference is not None:
        suite = Suite(reference.suite, reference.seed, reference.per_task)
    cell = subject.cell("correctness", suite=suite.name if suite else "none")
    tokenizer = load.tokenizer_of(subject.model)
    checks: list[Check] = []
    detail: dict[str, Any] = {}
    figures = []
    try:
        checks += count_checks(engine.asker)
        checks += logprob_checks(engine.asker)
        checks += seed_checks(engine.asker)
        bound = 2 * bound_of(subject)
        checks += own_answer_checks(engine.asker, tokenizer.encode, make_prompts(subject, (300,))[1], bound)
        gaps: list[str] = []
        checks += sampling_checks(engine.asker, make_prompts(subject, (65, 129)), gaps, lambda t: tokenizer.decode([t]))
        subject.progress("correctness: conversations")
        if engine.launch.renders_chat:
            checks += conversation_checks(
                engine.asker, gaps, lambda text: len(tokenizer.encode(text)), judged=subject.model.path is not None
            )
        else:
            gaps.append("This engine cannot render conversations of this model, so that they were not judged.")
        for sentence in gaps:
            unproven(detail, sentence)
        checks += score_checks(subject, engine, detail)
        if suite is not None:
            answers = ask_suite(engine.asker, suite, tokenizer)
            checks.append(text_check(answers.replies, tokenizer))
            checks.append(end_check(answers.replies))
            checks.append(stream_check(engine.asker, suite, tokenizer, bound))
            detail["report"] = {k: answers.report[k] for k in ("accuracy", "worst", "well_formed", "tasks", "wrong")}
            figures.append(figure("accuracy", "%", 100 * answers.accuracy))
            figures.append(
                figure("mean_length", "tokens", statistics.mean(r.completion_tokens for r in answers.replies))
            )
            if reference is None:
                unproven(detail, "No reference for this model: accuracy is reported and not judged.")
            else:
                checks += reference_checks(subject, answers, reference, detail)
        else:
            unproven(detail, "No suite and no reference for this model: its answers were not judged.")
    except AskError as e:
        wrong = worst_check(checks)
        before = f"; and what it answered before was wrong: {wrong.sentence}" if wrong is not None else ""
        return subject.failed(cell, engine, engine.failure(f"{subject.peer.name} did not answer: {e}{before}"), checks)
    return subject.judged(cell, engine, checks, figures, detail)


def unproven(detail: dict[str, Any], sentence: str) -> None:
    detail[UNPROVEN] = [*detail.get(UNPROVEN, ()), sentence]


def score_checks(subject: Subject, engine: PeerProcess, detail: dict[str, Any]) -> list[Check]:
    """Answers at once against the same ones alone; and, where the engine scores prompts and a reference is to be had,
    log probabilities against the reference's."""
    scores = True
    try:
        score(engine.asker, [5, 6, 7, 8])
    except AskError as e:
        unproven(detail, f"This engine scores no prompts, so that its log probabilities were not measured ({e}).")
        scores = False
    gaps: list[str] = []
    checks = decode_checks(subject, engine.asker, gaps, scores=scores)
    for sentence in gaps:
        unproven(detail, sentence)
    if (preempted := preemption_check(subject)) is not None:
        checks.append(preempted)
    if not scores:
        return checks
    if subject.gates.sinks == "off":
        unproven(detail, "Without sinks the log probabilities are wrong, and were not measured.")
        return checks
    table = find_table(subject, REFERENCES)
    if table is None:
        unproven(detail, "There is no reference of this model's log probabilities, or no room to compute it.")
        return [*checks, coherence_check(engine.asker)] if subject.model.path is not None else checks
    gaps.clear()
    checks += table_checks(subject, engine.asker, table, detail, gaps)
    for sentence in gaps:
        unproven(detail, sentence)
    return [*checks, *exact_checks(subject, table, detail)]


def coherence_check(asker: Asker) -> Check:
    """Without a reference: answers that neither repeat themselves nor guess. Finds a broken model, not a wrong one."""
    replies = [asker.ask(Question(text, tokens=64, logprobs=1, exactly=True)) for text in TEXTS]
    problems = [problem for reply in replies if (problem := incoherence(reply))]
    allowed = len(TEXTS) // 2
    return Check("coherent answers", len(problems) <= allowed, len(problems), allowed, "; ".join(problems[:2]))


def incoherence(reply: Reply) -> str:
    """Why an answer is no text that a trained model writes; empty if nothing speaks against it."""
    tokens: Sequence[object] = reply.tokens or reply.text.split()
    runs = [tuple(tokens[i : i + 4]) for i in range(len(tokens) - 3)]
    if runs and len(set(runs)) < DISTINCT * len(runs):
        return f"{reply.text[:40]!r} repeats itself: {len(set(runs))} of {len(runs)} runs of four tokens are distinct"
    if reply.logprobs and (mean := statistics.fmean(reply.logprobs)) < SURE:
        return f"{reply.text[:40]!r} is a guess: its best tokens have {mean:.1f} nats on average"
    return ""


def text_check(replies: Sequence[Reply], tokenizer: Tokenizer) -> Check:
    """The text of an answer is its tokens, decoded here; control tokens may stand in it or not."""
    wrong = [problem for reply in replies if (problem := text_problem(reply, tokenizer))]
    return Check("texts are their tokens", not wrong, len(replies) - len(wrong), len(replies), "; ".join(wrong[:2]))


def end_check(replies: Sequence[Reply]) -> Check:
    """Answers that are shorter than their limit have ended by themselves, and only these."""
    wrong = [r for r in replies if r.finish != ("stop" if r.completion_tokens < MOST else "length")]
    note = (
        f"an answer of {wrong[0].completion_tokens} tokens, of {MOST} at most, ended with {wrong[0].finish!r}"
        if wrong
        else ""
    )
    return Check("an answer that ends by itself says so", len(wrong) <= ENDED, len(wrong), ENDED, note)


def text_problem(reply: Reply, tokenizer: Tokenizer) -> str:
    """How a text is not its tokens; empty where it is, or where no ids were sent. The token that ended it may be left
    out."""
    if reply.tokens is None:
        return ""
    ids = list(reply.tokens)
    plain = [t for t in ids if tokenizer.special_name(t) is None]
    ended = ids[:-1] if ids and ids[-1] not in plain[-1:] else ids
    if _bare(reply.text) in (_bare(tokenizer.decode(part)) for part in (ids, plain, ended)):
        return ""
    return f"{tokenizer.decode(plain)[:40]!r} came as {reply.text[:40]!r}"


def _bare(text: str) -> str:
    """Without what may be missing at its ends: space, and a letter of which only some bytes came."""
    return text.strip().rstrip("\ufffd").rstrip()


def stream_check(asker: Asker, suite: Suite, tokenizer: Tokenizer, bound: float) -> Check:
    """Streamed answers against the same ones in one piece: token by token as far as a margin decides, and each text
    against its tokens. Every second one has log probabilities: engines take plain requests by a shorter path."""
    prompts = [item.prompt for item in suite.items(tokenizer)][:STREAMS]
    wrong = []
    for number, prompt in enumerate(prompts):
        complete = asker.ask(Question(prompt, tokens=MOST, logprobs=2))
        try:
            stream = asker.ask(Question(prompt, tokens=MOST, logprobs=2 if number % 2 else None, stream=True))
        except AskError as e:
            wrong.append(str(e))
            continue
        if problem := stream_problem(stream, complete, bound) or text_problem(stream, tokenizer):
            wrong.append(problem)
    return Check("streams are their answers", not wrong, len(prompts) - len(wrong), len(prompts), "; ".join(wrong[:2]))


def stream_problem(stream: Reply, complete: Reply, bound: float) -> str:
    """How a stream is not the answer in one piece; empty where it is."""
    at = None if stream.tokens is None else first_difference(stream.tokens, complete.tokens or ())
    margin = 0.0 if at is None else math.inf if at >= len(complete.top) else margin_of(complete.top[at])
    if margin > MARGIN or not stream.text:
        return f"{stream.text[:40]!r} instead of {complete.text[:40]!r}, from token {at} on"
    if at is None and stream.finish != complete.finish:
        return f"a stream ended with {stream.finish!r} instead of {complete.finish!r}"
    if not stream.logprobs:
        return ""
    if stream.tokens is not None and len(stream.logprobs) != len(stream.tokens):
        return f"a stream of {len(stream.tokens)} tokens has {len(stream.logprobs)} log probabilities"
    nats = [abs(a - b) for a, b in zip(stream.logprobs[:at], complete.logprobs)]
    mean = statistics.fmean(nats or [0.0])
    return "" if mean <= bound else f"log probabilities of a stream differ by {mean:.2f} nats a token"


def count_checks(asker: Asker) -> list[Check]:
    """Tokens of answers and prompts, and the reason why an answer of a fixed length ends."""
    wrong, ends, read = [], [], []
    for count in COUNTS:
        reply = asker.ask(Question("Count: 1, 2, 3,", tokens=count, exactly=True))
        sent = len(reply.tokens) if reply.tokens is not None else reply.completion_tokens
        if reply.completion_tokens != count or sent != count:
            wrong.append(f"{count} asked for, {reply.completion_tokens} counted, {sent} sent")
        if reply.finish != "length":
            ends.append(f"an answer of {count} tokens ended with {reply.finish!r}")
    for length in LENGTHS:
        counted = asker.ask(Question([5 + j % 190 for j in range(length)], tokens=1, exactly=True)).prompt_tokens
        if counted != length:
            read.append(f"a prompt of {length} tokens counts as {counted}")
    return [
        Check("as many tokens as asked for", not wrong, note="; ".join(wrong)),
        Check("an answer that is cut off says so", not ends, note="; ".join(ends)),
        Check("prompts have as many tokens as were sent", not read, note="; ".join(read)),
    ]


def logprob_checks(asker: Asker) -> list[Check]:
    reply = asker.ask(Question("The weather today is", tokens=16, logprobs=3, exactly=True))
    if not reply.logprobs:
        return [Check("log probabilities", False, note="the engine sent none")]
    broken = [v for v in reply.logprobs if not math.isfinite(v)]
    checks = [Check("no NaN or infinity in log probabilities", not broken, len(broken), 0)]
    if broken:
        return checks
    too_much = [sum(map(math.exp, top.values())) for top in reply.top]
    best = [max(drawable(top).values(), default=-math.inf) for top in reply.top]
    not_best = [p for p, v, other in zip(reply.pieces, reply.logprobs, best) if v < other - 1e-3]
    largest = max([*too_much, 0.0])
    checks.append(Check("log probabilities are at most 0", max(reply.logprobs) <= 1e-6, max(reply.logprobs), 0.0))
    checks.append(Check("they add up to at most 1", largest <= 1.001, round(largest, 6), 1.001))
    checks.append(Check("greedy takes the best", not not_best, len(not_best), 0))
    return checks


def seed_checks(asker: Asker) -> list[Check]:
    def tokens_for(seed: int, temperature: float) -> tuple[object, ...]:
        reply = asker.ask(Question("Once upon a time", tokens=24, temperature=temperature, seed=seed, exactly=True))
        return reply.tokens or (reply.text,)

    first, again = ([tokens_for(seed, 1.0) for seed in SEEDS] for _ in range(2))
    greedy = tokens_for(SEEDS[0], 0.0), tokens_for(SEEDS[1], 0.0)
    return [
        Check("the same seed gives the same tokens", first == again, sum(map(eq, first, again)), len(SEEDS)),
        Check("other seeds give others", len(set(first)) > 1),
        Check("greedy gives the same tokens twice", greedy[0] == greedy[1]),
        neighbour_check(asker),
    ]


def neighbour_check(asker: Asker) -> Check:
    """Sampled answers alone and beside others. A draw close to an edge may fall otherwise where a batch rounds
    otherwise, which half of the answers are forgiven for."""
    questions = [
        Question("Once upon a time", tokens=DRAWN, temperature=1.0, seed=seed, exactly=True)
        for seed in range(NEIGHBOURS)
    ]
    sides = []
    for at_once in (1, NEIGHBOURS):
        replies = asker.ask_all(questions, at_once)
        sides.append([reply.tokens or (reply.text,) for reply in map(_answered, replies)])
    other = sum(a != b for a, b in zip(*sides))
    return Check(
        "a seed gives the same tokens among others", other <= NEIGHBOURS // 2, other, NEIGHBOURS // 2,
        f"of {NEIGHBOURS} answers, which others ran beside",
    )  # fmt: skip


def _answered(reply: Reply | AskError) -> Reply:
    if isinstance(reply, AskError):
        raise reply
    return reply


def reference_checks(
    subject: Subject, answers: SuiteAnswers, reference: Reference, detail: dict[str, Any]
) -> list[Check]:
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
