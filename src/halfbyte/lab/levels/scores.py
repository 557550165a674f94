"""Teacher-forced log probabilities: what a model gives to every token of fixed prompts, engine against reference.

Answers to easy problems are blind: the best token wins by nats. Here each position of a prompt is compared, around the
edges of pages (64), the window (128) and chunks (2048), on random and on natural tokens. Sampling is judged in
`sampling.py`. The reference is a table: the
one that comes with halfbyte for the embedded model, or one that our reference kernels compute once for a checkpoint
(`make_table`) and that is kept. Bounds are means over a prompt: a router that takes another of two nearly equal experts
moves single tokens by nats, and means hardly. Needs an engine that scores prompts (`echo` with `logprobs`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from halfbyte.errors import AskError, UsageError
from halfbyte.evals.suite import Suite
from halfbyte.gates import ACTIVATION_REGIMES, cache_folder, layers_on, parse
from halfbyte.lab.levels.sampling import TOP, walk_check
from halfbyte.lab.levels.subject import Subject
from halfbyte.lab.peers.asker import Asker, Question, Reply, drawable
from halfbyte.lab.peers.halfbyte import HalfbytePeer
from halfbyte.lab.result import Check
from halfbyte.model import load

SCHEMA = "halfbyte.scores/1"
LENGTHS = (65, 129, 193, 300, 513, 1000, 2049, 2112, 4000)  # tokens; around pages, window and chunks
FAR = 20_000  # tokens of one more prompt, a random one
OFFERED = 4096  # tokens of a prompt that every engine must score
ALWAYS = 12  # prompts of another checkpoint whose scores are always computed; longer ones while TABLE_S lasts
TABLE_S = 600.0
STRIDE, TAIL = 4, 32  # every fourth position is kept, and the last ones all
SHORT = 1000  # tokens of a prompt below which single tokens weigh too much for it to be judged alone
LONGEST_EXACT = 2112  # tokens of a prompt that is scored without rounding, which takes longer
TOGETHER = 0.75  # of the bound holds for the mean of all short ones
# Nats a token, the mean over a prompt, by format. Measured on the embedded model against the table, prompts of 300 to
# 2049 tokens, random ones being the worst: activations f32 with a cache in f32 differ by 0.0002 (the table's own
# rounding), with a cache in bf16 by 0.08, in fp8 by 0.64; bf16 by 0.08; int8 by 0.17; fp8 by 0.32; mxfp8 by 0.41. A
# window that is off by one differs by 0.23 and more with int8. All layers in q8 differ by 0.17 with f32 activations
# (qkv alone by 0.12) and by 0.26 with int8, in mxfp4 by 1.26 with either: errors of activations, cache and layers add
# up as squares. Engines that keep a layer's sums in bf16, too, differ by more: transformers by 0.31, vLLM by 0.29 (and
# transformers in f32 by 0.0003, which the table is confirmed by).
ACTIVATION_BOUNDS: Mapping[str, float] = {
    "f32": 0.01, "bf16": 0.12, "int8": 0.2, "fp8": 0.4, "mxfp8": 0.5, "mxfp4": 0.8,
}  # fmt: skip
OTHER_ENGINE = 0.35
CACHE_BOUNDS: Mapping[str, float] = {"f32": 0.01, "bf16": 0.12, "fp8": 0.8}
LAYER_BOUNDS: Mapping[str, float] = {"checkpoint": 0.0, "auto": 0.0, "q8": 0.25, "mxfp4": 1.6}
REFERENCE = parse(
    {
        "moe_kernel": "reference", "linear_kernel": "reference", "attention": "reference", "activation": "f32",
        "kv_dtype": "f32",
    },
    env={},
)  # fmt: skip
DECODED, AT_ONCE, SIMILAR = 12, 16, 6
SAMPLED = 640  # tokens of a sampled answer, which is long so that what changes on the way shows
FREE = 64  # tokens of one that may end, at most
PART = 64  # tokens of an answer that are judged together
TOGETHER_COUNTS = (8, 16, 64)
# Nats a token between what an engine on a CPU gives to its own answers while it decodes them and when it reads them.
# Measured: halfbyte 0.000, vLLM 0.32 0.009. Three experts instead of four while it decodes: 0.11 to 0.75.
OWN_ON_CPU = 0.05
TIED = 10  # bounds: a router's near tie moves an answer by less, and a larger difference is never forgiven


@dataclass(frozen=True)
class Table:
    """The scores of the reference, position by position as `kept_positions` has them."""

    model: str
    prompts: tuple[tuple[int, ...], ...]
    scores: tuple[tuple[float, ...], ...]
    schema: str = SCHEMA

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.part")
        part.write_text(json.dumps(asdict(self), separators=(",", ":")) + "\n", encoding="utf-8")
        part.replace(path)

    @classmethod
    def read(cls, path: Path) -> Table:
        try:
            raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if raw["schema"] != SCHEMA:
                raise UsageError(f"{path.name} is of schema {raw['schema']!r}, and only {SCHEMA!r} is read.")
            return cls(raw["model"], tuple(map(tuple, raw["prompts"])), tuple(map(tuple, raw["scores"])))
        except (OSError, ValueError, LookupError, TypeError) as e:
            raise UsageError(f"{path} is no table of scores ({type(e).__name__}: {e}).") from None


def kept_positions(length: int) -> list[int]:
    """The positions whose scores a table has; the first token of a prompt has no score."""
    return [i for i in range(length - 1) if i % STRIDE == 0 or i >= length - 1 - TAIL]


def make_prompts(subject: Subject, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """A random and a natural one of each length that the context holds, the same every time."""
    tokenizer, config = load.tokenizer_of(subject.model), load.config_of(subject.model)
    draw = random.Random(5)
    ordinary = config.vocab - 48 if config.vocab < 4096 else min(config.vocab, 199_000)  # control tokens are the last
    natural = [token for item in Suite("tiny", 3, 8).items(tokenizer) for token in item.prompt]
    prompts = []
    for length in (n for n in lengths if n < config.max_context):
        prompts.append([draw.randrange(ordinary) for _ in range(length)])
        at = draw.randrange(max(1, len(natural) - length))
        prompts.append([*natural[at:], *natural][:length])
    return prompts


def table_prompts(subject: Subject) -> list[list[int]]:
    """The prompts of a table, the far one last."""
    return [*make_prompts(subject), *make_prompts(subject, (FAR,))[:1]]


def score(asker: Asker, prompt: Sequence[int]) -> list[float]:
    """The log probability of every token but the first. AskError where the engine scores no prompts. Every second
    prompt, by its length and first token, is asked as users ask, who let an answer end."""
    exactly = (len(prompt) + prompt[0]) % 2 == 0
    reply = asker.ask(Question(list(prompt), tokens=1, logprobs=0, echo=True, exactly=exactly))
    if len(reply.logprobs) < len(prompt):
        raise AskError(f"{len(reply.logprobs)} log probabilities for a prompt of {len(prompt)} tokens")
    return list(reply.logprobs[1 : len(prompt)])


def greedy_gaps(asker: Asker, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
    """Nats by which every token of an answer lies under the best one when it is read as a prompt. AskError where the
    engine scores no prompts."""
    begin, end = len(prompt), len(prompt) + len(answer)
    reply = asker.ask(Question([*prompt, *answer], tokens=1, logprobs=1, echo=True, exactly=True))
    if min(len(reply.logprobs), len(reply.top)) < end:
        raise AskError(f"{len(reply.logprobs)} log probabilities for a prompt of {end} tokens")
    scored = zip(reply.logprobs[begin:end], reply.top[begin:end])
    return [max([value, *top.values()]) - value for value, top in scored]


def margin_of(top: Mapping[str, float]) -> float:
    """Nats between the best token and the next; infinite where only one is known."""
    values = sorted(drawable(top).values(), reverse=True)
    return values[0] - values[1] if len(values) > 1 else math.inf


def score_table(subject: Subject, asker: Asker, prompts: Sequence[Sequence[int]], seconds: float = math.inf) -> Table:
    """The scores of all prompts, or of as many as `seconds` allow."""
    rows: list[tuple[float, ...]] = []
    begin = time.monotonic()
    for prompt in prompts:
        if len(rows) >= ALWAYS and time.monotonic() - begin > seconds:
            break
        subject.progress(f"scores of {len(prompt)} tokens")
        values = score(asker, prompt)
        rows.append(tuple(round(values[i], 3) for i in kept_positions(len(prompt))))
    return Table(subject.model.label, tuple(map(tuple, prompts[: len(rows)])), tuple(rows))


def find_table(subject: Subject, references: Path) -> Table | None:
    """The stored one of the embedded model; of another checkpoint in a folder the one that is kept, computed now by our
    reference kernels if there is none; None where weights are random, or the machine has no room for two copies."""
    name = subject.model
    if name.path == load.EMBEDDED:
        return Table.read(references / f"{name.label}.scores.json")
    if name.path is None or not name.path.is_dir():
        return None
    files = sorted(name.path.glob("*.safetensors"))
    facts = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    stored = cache_folder("scores") / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.json"
    if stored.is_file():
        return Table.read(stored)
    import psutil

    if not files or 2 * sum(size for _, size, _ in facts) > psutil.virtual_memory().available:
        return None
    own = replace(subject, peer=HalfbytePeer(), setup=replace(subject.setup, gates=REFERENCE, flags=(), environment={}))
    with own.process("scores of the reference") as engine:
        table = score_table(own, engine.asker, table_prompts(own), TABLE_S)
    table.write(stored)
    return table


# ---- checks ----------------------------------------------------------------------------------------------------------


def bound_of(subject: Subject) -> float:
    """What the formats that the gates name, or that `auto` stands for, explain together. Bounds of activations hold
    with a cache in bf16."""
    gates, own = subject.gates, subject.peer.name == "halfbyte"
    on_cpu = own and load.resolve_device(subject.setup.device).type == "cpu"
    auto, exact = ("int8" if on_cpu else "bf16"), ("f32" if on_cpu else "bf16")
    names = {gates.activation_in(regime) for regime in ACTIVATION_REGIMES}
    activations = {{"auto": auto, "float": exact}.get(name, name) for name in names}
    cache = gates.kv_dtype
    if cache == "auto":
        cache = "f32" if on_cpu and activations == {"f32"} else "bf16"
    computed = max([*(ACTIVATION_BOUNDS[name] for name in activations), *(() if own else (OTHER_ENGINE,))])
    formats = replace(gates, layers=layers_on(gates, gpu=own and not on_cpu)).layer_formats.values()
    layers = max(LAYER_BOUNDS[form] for form in formats)
    if cache == "fp8":
        return round(math.hypot(computed, CACHE_BOUNDS[cache], layers), 3)
    return round(math.hypot(max(computed, CACHE_BOUNDS[cache]), layers), 3)


def own_bound_of(subject: Subject) -> float:
    """How far an engine may be from itself. Elsewhere than on this machine's CPU nothing is known but what its formats
    explain twice; and what was just computed may be read before an fp8 cache rounds it."""
    started = bool(subject.peer.launch(subject.setup).command)
    if started and load.resolve_device(subject.setup.device).type == "cpu" and subject.gates.kv_dtype != "fp8":
        return OWN_ON_CPU
    return 2 * bound_of(subject)


def table_checks(
    subject: Subject, asker: Asker, table: Table, detail: dict[str, Any], gaps: list[str], condition: str = ""
) -> list[Check]:
    """The mean difference of every prompt but the shortest, which are judged together. `gaps` gets a sentence for a
    long prompt that the engine does not score."""
    bound = bound_of(subject)
    means: list[tuple[float, int]] = []
    for prompt, expected in zip(table.prompts, table.scores):
        subject.progress(f"correctness: scores of {len(prompt)} tokens")
        try:
            values = score(asker, prompt)
        except AskError as e:
            if len(prompt) <= OFFERED:
                raise
            gaps.append(f"This engine did not score a prompt of {len(prompt)} tokens, which was not judged ({e}).")
            continue
        off = [abs(values[i] - e) for i, e in zip(kept_positions(len(prompt)), expected)]
        means.append((statistics.fmean(off) if all(map(math.isfinite, off)) else math.inf, len(prompt)))
    detail["score_differences"] = [{"tokens": n, "mean_nats": m if math.isfinite(m) else None} for m, n in means]
    long = [(m, n) for m, n in means if n >= SHORT]
    short = statistics.fmean([m for m, n in means if n < SHORT] or [0.0])
    worst, length = max(long, default=(math.inf, 0))
    wrong = sum(m > bound for m, _ in long)
    return [
        Check(f"log probabilities of long prompts{condition}", worst <= bound, _finite(worst), bound,
              f"{wrong} of {len(long)} prompts differ by more than {bound} nats a token; {length} tokens differ most"),
        Check(f"log probabilities of short prompts{condition}", short <= TOGETHER * bound, _finite(short),
              TOGETHER * bound, "nats a token, all of them together"),
    ]  # fmt: skip


def exact_checks(subject: Subject, table: Table, detail: dict[str, Any]) -> list[Check]:
    """The table's prompts, scored on an engine of its own that rounds neither activations nor cache: a fault that is
    smaller than the rounding of the formats that were asked for shows only there. Empty where these round no more, and
    for another engine."""
    gates = replace(subject.gates, activation="float", kv_dtype="auto")
    exact = replace(subject, setup=replace(subject.setup, gates=gates))
    if subject.peer.name != "halfbyte" or load.resolve_device(subject.setup.device).type != "cpu":
        return []
    launch = subject.peer.launch(exact.setup)
    if launch.refusals or not launch.command or bound_of(exact) >= bound_of(subject):
        return []
    rows = [(p, s) for p, s in zip(table.prompts, table.scores) if len(p) <= LONGEST_EXACT]
    part = replace(table, prompts=tuple(p for p, _ in rows), scores=tuple(s for _, s in rows))
    own: dict[str, Any] = {}
    with exact.process("scores without rounding") as engine:
        checks = table_checks(exact, engine.asker, part, own, [], " without rounding")
    detail["score_differences_without_rounding"] = own["score_differences"]
    return checks


def _finite(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None


def shared_prompts(subject: Subject) -> list[list[int]]:
    """Prompts with pages in common behind different beginnings, so that a wrong prefix hit shows."""
    natural = make_prompts(subject, (1000,))[1]
    parts = [natural[i : i + 64] for i in range(0, 960, 64)]
    orders = list(itertools.islice(itertools.permutations(range(len(parts)), 5), 0, 300_000, 18_000))[:AT_ONCE]
    return [[t for k in order for t in parts[k]] + natural[960 : 960 + 8] for order in orders]


def similar_prompts(subject: Subject) -> list[list[int]]:
    """Prompts that differ in their last token alone, so that an answer to another of them shows."""
    natural = make_prompts(subject, (300,))[1]
    others = list(dict.fromkeys(t for t in natural if t != natural[-1]))[:SIMILAR]
    return [[*natural[:-1], token] for token in others]


def long_prompts(subject: Subject) -> list[list[int]]:
    """Random ones: every token of a prompt moves what follows it, so that one which was cut short shows."""
    return make_prompts(subject, (1000, 2112, 4000))[::2]


def decode_checks(subject: Subject, asker: Asker, gaps: list[str], *, scores: bool = True) -> list[Check]:
    """Answers alone, scored again as prompts (`scores`): what a token got while it was decoded, it must get when it is
    read. So it is with long sampled answers, whose tokens must be drawn by these probabilities as well. Then the same
    questions 8, 16 and 64 at once, with prefix hits: each token as alone, as far as a margin decides. They are asked
    with log probabilities and without: engines take greedy tokens of plain requests by a shorter path."""
    bound, own = 2 * bound_of(subject), own_bound_of(subject)
    questions = [Question(p, tokens=DECODED, logprobs=2, exactly=True) for p in shared_prompts(subject)]
    subject.progress("correctness: answers alone")
    alone = _replies(asker, questions, 1)
    sampled = [
        Question(p, tokens=SAMPLED, temperature=1.0, seed=seed, logprobs=TOP, exactly=True)
        for seed, p in enumerate(make_prompts(subject, LENGTHS[:1]))
    ]
    subject.progress("correctness: sampled answers")
    walks = _replies(asker, sampled, len(sampled))
    checks = [check for check in (walk_check(walks),) if check is not None]
    if not checks:
        gaps.append("Sampled answers were not judged: the model is too sure of its tokens.")
    if scores:
        checks.append(again_check(asker, "sampled answers scored again", sampled, walks, own))
        checks.append(again_check(asker, "answers scored again as prompts", questions, alone, own))
        for name, prompts in (
            ("answers to similar prompts scored again", similar_prompts(subject)),
            ("answers to long prompts scored again", long_prompts(subject)),
        ):
            subject.progress(f"correctness: {name}")
            others = [Question(p, tokens=DECODED, logprobs=2, exactly=True) for p in prompts]
            checks.append(again_check(asker, name, others, _replies(asker, others, 1), own))
        for name, stream in (("answers that may end scored again", False), ("streams that may end scored again", True)):
            subject.progress(f"correctness: {name}")
            free = [
                Question(p, tokens=FREE, temperature=1.0, seed=seed, logprobs=2, stream=stream)
                for seed, p in enumerate(make_prompts(subject, LENGTHS[:2]))
            ]
            checks.append(again_check(asker, name, free, _replies(asker, free, 1), own))
    plain = [replace(q, logprobs=None) for q in questions]
    for count in TOGETHER_COUNTS:
        subject.progress(f"correctness: {count} requests at once")
        checks.append(together_check(asker, questions, alone, count, bound))
        checks.append(together_check(asker, plain, alone, count, bound, "without log probabilities "))
    return checks


def again_check(
    asker: Asker, name: str, questions: Sequence[Question], replies: Sequence[Reply], bound: float
) -> Check:
    """The log probabilities of answers against those that the same tokens get as a prompt."""
    off: list[float] = []
    for question, reply in zip(questions, replies):
        again = score(asker, [*_ids(question), *(reply.tokens or ())])[len(question.prompt) - 1 :]
        nats = [abs(a - b) for a, b in zip(reply.logprobs, again)]
        off += [statistics.fmean(nats[at : at + PART]) for at in range(0, len(nats), PART)]
    # Of one part a router's near tie may decide; what is no number is never forgiven.
    worst = sorted([0.0, *off])[-2] if all(map(math.isfinite, off)) else math.inf
    note = f"{sum(not o <= bound for o in off)} of {len(off)} answers, or parts of {PART} tokens, differ"
    return Check(name, worst <= bound, _finite(worst), bound, note)


def _ids(question: Question) -> Sequence[int]:
    assert not isinstance(question.prompt, str)
    return question.prompt


def together_check(
    asker: Asker, questions: Sequence[Question], alone: Sequence[Reply], count: int, bound: float, condition: str = ""
) -> Check:
    """So many requests at once against the same ones alone, up to the first token that differs."""
    many = [questions[i % len(questions)] for i in range(count)]
    replies = _replies(asker, many, count)
    wrong = [d for i, r in enumerate(replies) if (d := difference(alone[i % len(questions)], r, bound))]
    wrong.sort(key=lambda d: -d.nats)
    allowed = 1 + count // 32  # a router's near tie decides an answer now and then
    ok = len(wrong) <= allowed and all(d.nats <= TIED * bound for d in wrong)
    note = "; ".join(d.text for d in wrong[:2])
    return Check(f"{count} at once {condition}answer as alone", ok, len(wrong), allowed, note)


@dataclass(frozen=True)
class AnswerDifference:
    """How two greedy answers differ first."""

    nats: float
    text: str


def difference(alone: Reply, other: Reply, bound: float) -> AnswerDifference | None:
    """Where two greedy answers differ by more than `bound` nats; `other` may have no log probabilities."""
    off = []
    for at, (a, b) in enumerate(zip(alone.tokens or (), other.tokens or ())):
        if a != b:
            margin = margin_of(alone.top[at])
            if margin > bound:
                return AnswerDifference(margin, f"token {at} differs, where the margin was {margin:.2f} nats")
            break
        if other.logprobs:
            off.append(abs(alone.logprobs[at] - other.logprobs[at]))
    mean = statistics.fmean(off or [0.0])
    if not mean <= bound:  # or no number
        return AnswerDifference(mean, f"log probabilities differ by {mean:.2f} nats a token")
    return None


def _replies(asker: Asker, questions: Sequence[Question], at_once: int) -> list[Reply]:
    """Every reply with ids and log probabilities, or the first AskError."""
    replies = []
    for question, reply in zip(questions, asker.ask_all(questions, at_once)):
        if isinstance(reply, AskError):
            raise reply
        if reply.tokens is None or (question.logprobs is not None and len(reply.logprobs) != len(reply.tokens)):
            raise AskError("this engine gives no token ids with log probabilities")
        replies.append(reply)
    return replies


PREEMPTED = 160  # tokens of an answer: every sequence takes two or three more pages while it decodes
FEW_PAGES = 12  # sequences whose prompts fit


def preemption_check(subject: Subject) -> Check | None:
    """64 requests at once on an engine of its own with too few pages, against the same ones alone. None for an engine
    whose pages cannot be limited here."""
    if subject.peer.name != "halfbyte" or not subject.peer.launch(subject.setup).command:
        return None
    config, prompts = load.config_of(subject.model), shared_prompts(subject)
    pages = FEW_PAGES * (len(prompts[0]) // 64 + config.window // 64 + 2)
    gib = pages * config.layers_per_page * 2 * config.kv_dim * 2 * 64 / 2**30
    flags = (*subject.setup.flags, "--kv-memory", f"{gib:.6f}")
    small = replace(subject, setup=replace(subject.setup, flags=flags))
    questions = [Question([*p, i % 50 + 5], tokens=PREEMPTED, logprobs=2, exactly=True) for i, p in enumerate(prompts)]
    with small.process("too few pages") as engine:
        alone = _replies(engine.asker, questions, 1)
        check = together_check(engine.asker, questions, alone, 64, 2 * bound_of(subject), "with preemptions ")
        count = engine.asker.metric("halfbyte_preemptions")
    note = f"{count:.0f} preemptions; {check.note}" if count else f"no request was preempted; {check.note}"
    return replace(check, ok=check.ok and count > 0, note=note)
