"""The level `quality`: what a preset costs on this model and this machine, against `exact`.

Each plan is loaded alone, one after the other. `exact` goes first: its greedy answers, its answers to questions about
long texts (needles), and its logits on several passages stay on disk (`kept_logits.py`). Every candidate then reads the
same passages: KL divergence and the likeliest token of each position, and perplexity. A text is fed as the final
message of an answer, the form that gpt-oss was trained on. Intervals are a bootstrap over blocks of `BLOCK` consecutive
positions, 95 %. A candidate passes where the whole interval of every measure lies within its bound, fails where one
lies outside, and is INCONCLUSIVE otherwise. A text that `exact` itself predicts worse than a uniform guess (the
embedded model and English prose) is shown and not judged: there every distribution is noise.

Every part is written when it is done, under a hash of all that it depends on; a run that was ended goes on there. Kept
logits of a user's own text are removed when the run is complete. Runs halfbyte's own plans; other engines have no part
in it.
"""

from __future__ import annotations

import gc
import hashlib
import json
import lzma
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from halfbyte.engine.placement import placed_gates
from halfbyte.errors import PlanError, UsageError
from halfbyte.evals.problem import Frame, Problem
from halfbyte.evals.reading import needle
from halfbyte.evals.suite import Suite, read_reply
from halfbyte.gates import PRESETS, Gates, cache_folder
from halfbyte.harmony.messages import Message
from halfbyte.harmony.render import render_prompt
from halfbyte.lab import environment, kept_logits
from halfbyte.lab.kept_logits import KeptLogits
from halfbyte.lab.levels.quality_report import OWN, CandidateReport, Comparison, QualityReport
from halfbyte.lab.machine import limit_threads
from halfbyte.lab.options import QualityOptions
from halfbyte.lab.statistics import Estimate, block_mean
from halfbyte.model import load, quality_record
from halfbyte.model.gpt_oss import GptOss, arch_of, choose
from halfbyte.model.plain_file import MIB, read_whole
from halfbyte.model.quality_record import numerics_key
from halfbyte.model.scales import write_json
from halfbyte.model.single_sequence import SingleSequence, generate
from halfbyte.model.tokenizer import Tokenizer
from halfbyte.plan.select import PlanChoice

TEXT = Path(__file__).parents[2] / "data" / "quality-text.txt.xz"
BLOCK = 64  # positions
ROWS = 256  # logits at once
SHORT_PASSAGES = 4  # of the shortest length, from all over the text
NEEDLES = 4  # of each length
ANSWER_TOKENS = 320
LARGEST_TEXT = 16 * MIB

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Passage:
    """Tokens to feed; positions count from `first` to the last but one, each with the token that follows it."""

    tokens: tuple[int, ...]
    first: int = 0

    @property
    def positions(self) -> int:
        return max(0, len(self.tokens) - 1 - self.first)


@dataclass(frozen=True)
class Section:
    """Passages that are judged together."""

    name: str
    passages: tuple[Passage, ...]
    private: bool = False  # from a user's own text

    @property
    def key(self) -> str:
        raw = json.dumps([self.name, [(p.tokens, p.first) for p in self.passages]])
        return hashlib.sha256(raw.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Candidate:
    label: str
    gates: Gates
    choice: PlanChoice
    key: str  # of its numerics


@dataclass(frozen=True)
class BlockSums:
    """Sums over the positions of each block."""

    counts: tuple[int, ...]
    kl: tuple[float, ...]
    same: tuple[float, ...]
    loss: tuple[float, ...]
    exact: tuple[float, ...]  # minus the log probability of the tokens that follow, by `exact`


def check_quality(
    model: str | None,
    gates: Gates,
    options: QualityOptions,
    device: str | None = None,
    progress: Progress = lambda _: None,
) -> QualityReport:
    """Compare the presets, and `gates` where they change numbers, with `exact`; store the verdicts with the model."""
    begun = time.monotonic()
    name, where = load.resolve_model(model), load.resolve_device(device)
    if name.path is None:
        raise UsageError(f"{name.text} has random weights, whose answers mean nothing; name a model with files.")
    limit_threads(where, load.weight_bytes(name, gates))
    with load.OpenCheckpoint(name) as opened:
        facts, tokenizer = opened.facts, opened.tokenizer()
    exact, candidates, refused = _candidates(facts, gates, options, where)
    work = _Work(name, where, tokenizer, exact, _folder(name.path, exact), progress)
    sections = text_sections(tokenizer, facts.config.max_context, options)
    reports = work.run(candidates, sections, [min(n, facts.config.max_context) for n in options.lengths])
    report = QualityReport(name.label, _machine(where), [*reports, *refused], time.monotonic() - begun, work.reused)
    keyed = {c.key: r.entry(report.machine) for c, r in zip(candidates, reports)}
    report.record = quality_record.store(name.path, keyed)
    work.forget([s for s in sections if s.private])
    return report


def _candidates(
    facts: load.CheckpointFacts, gates: Gates, options: QualityOptions, device: torch.device
) -> tuple[Candidate, list[Candidate], list[CandidateReport]]:
    """`exact`, those to compare with it, and those that cannot run here. Two with the same numerics are one."""
    arch = arch_of(device)
    formats = [n for n, p in PRESETS.items() if p.gates == Gates(layers=p.gates.layers)]
    named = {name: PRESETS[name].gates for name in options.presets or formats}
    if gates.changes():
        named.setdefault(", ".join(f"{axis} {value}" for axis, value in gates.changes().items()), gates)
    refused: list[CandidateReport] = []
    candidates: dict[str, Candidate] = {}
    for label, own in {"exact": PRESETS["exact"].gates, **named}.items():
        try:
            choice = choose(facts.config, own, arch, facts.formats)
        except PlanError as e:
            if label == "exact":
                raise
            refused.append(CandidateReport(label, own, refused=str(e)))
            continue
        key = numerics_key(choice.spec, arch)
        candidates.setdefault(key, Candidate(label, own, choice, key))
    exact, *others = candidates.values()
    return exact, others, refused


def text_sections(tokenizer: Tokenizer, context: int, options: QualityOptions) -> list[Section]:
    """The bundled text at every length that the context holds, and each of the user's."""
    frame = render_prompt(tokenizer, [Message.user("Continue the text.")])
    frame += [tokenizer.special["<|channel|>"], *tokenizer.encode("final"), tokenizer.special["<|message|>"]]
    tokens = tokenizer.encode(lzma.decompress(TEXT.read_bytes()).decode())
    sections = []
    lengths = sorted({min(n, context, len(tokens)) - len(frame) for n in options.lengths})
    for length in lengths:
        count = SHORT_PASSAGES if length == lengths[0] else 1
        starts = {int(i * (len(tokens) - length) / max(1, count - 1)) for i in range(count)}
        passages = tuple(Passage((*frame, *tokens[at : at + length]), len(frame) - 1) for at in sorted(starts))
        sections.append(Section(f"text at {length + len(frame)}", passages))
    for number, path in enumerate(options.texts, 1):
        own = tokenizer.encode(_text_of(Path(path)))[: min(max(options.lengths), context) - len(frame)]
        if len(own) < 2 * BLOCK:
            raise UsageError(f"{path} has {len(own)} tokens; give a text of at least {2 * BLOCK}.")
        sections.append(Section(f"your text {number}", (Passage((*frame, *own), len(frame) - 1),), private=True))
    return sections


def _text_of(path: Path) -> str:
    try:
        return read_whole(path.expanduser(), LARGEST_TEXT).decode()
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not UTF-8 text; convert it first.") from None


def _folder(model: Path, exact: Candidate) -> Path:
    """Where parts stay: other weights, sources or numerics of `exact` have another folder."""
    sources = [environment.source_hash(room) for room in ("formats", "ops", "kernels", "model")]
    parts = [quality_record.content_id(model), exact.key, *sources]
    return cache_folder(quality_record.KIND) / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _machine(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else environment.cpu_name()


# ---- the work --------------------------------------------------------------------------------------------------------


@dataclass
class _Work:
    """One run over its folder of finished parts."""

    name: load.ModelName
    device: torch.device
    tokenizer: Tokenizer
    exact: Candidate
    folder: Path
    progress: Progress
    reused: int = 0
    _loaded: tuple[str, GptOss] | None = None

    def run(
        self, candidates: Sequence[Candidate], sections: Sequence[Section], lengths: Sequence[int]
    ) -> list[CandidateReport]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UsageError(
                f"{self.folder} cannot be made ({e.strerror}); set HALFBYTE_CACHE_DIR to a folder with room."
            ) from None
        quick_problems = Suite("quick", per_task=1).problems
        problems = [p for task, own in quick_problems.items() if task != "needle" for p in own]
        hidden = needles(self.tokenizer, lengths)
        own_answers = self.answers(self.exact, "answers", problems)
        exact_needles = self.answers(self.exact, "needles", hidden)
        everything = [*sections, self.own_section(problems, own_answers)]
        for section in everything:
            self.keep(section)
        vocab = candidates[0].choice.spec.vocab if candidates else 0
        reports = []
        for candidate in candidates:
            begun = time.monotonic()
            report = CandidateReport(candidate.label, candidate.gates)
            for section in everything:
                report.comparisons.append(estimate(section, self.compare(candidate, section), vocab))
            replies = self.answers(candidate, "needles", hidden)
            report.needles = self.right(hidden, replies), self.right(hidden, exact_needles), len(hidden)
            replies = self.answers(candidate, "answers", problems)
            same = sum(a == b for a, b in zip(replies, own_answers))
            right = (self.right(problems, replies), self.right(problems, own_answers))
            report.answers = (same, *right, len(problems))
            report.seconds = time.monotonic() - begun
            reports.append(report)
        self.unload()
        return reports

    def own_section(self, problems: Sequence[Problem], answers: Sequence[Sequence[int]]) -> Section:
        prompts = [render_prompt(self.tokenizer, p.prompt()) for p in problems]
        passages = (Passage((*p, *a), len(p) - 1) for p, a in zip(prompts, answers))
        return Section(OWN, tuple(p for p in passages if p.positions))

    def answers(self, candidate: Candidate, kind: str, problems: Sequence[Problem]) -> list[list[int]]:
        """Greedy replies, each kept as it ends."""
        prompts = [render_prompt(self.tokenizer, p.prompt()) for p in problems]
        digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]
        path = self.folder / f"{candidate.key}-{kind}-{digest}.json"
        replies: list[list[int]] = _read_json(path).get("replies", [])[: len(prompts)]
        self.reused += len(replies) == len(prompts)
        for number in range(len(replies), len(prompts)):
            self.progress(f"{candidate.label}: {kind} {number + 1} of {len(prompts)}")
            network = self.load(candidate)
            replies.append(list(generate(network, prompts[number], ANSWER_TOKENS, stop=self.stops(network))))
            write_json(path, {"replies": replies})
        return replies

    def stops(self, network: GptOss) -> list[int]:
        special = self.tokenizer.special
        named = [special[n] for n in ("<|return|>", "<|call|>", "<|endoftext|>") if n in special]
        return [*network.config.eos_tokens, *named]

    def right(self, problems: Sequence[Problem], replies: Sequence[Sequence[int]]) -> int:
        read = [read_reply(self.tokenizer, tokens) for tokens in replies]
        return sum(r.fault is None and p.judge(r.final, r.call) for p, r in zip(problems, read))

    def keep(self, section: Section) -> None:
        """The logits of `exact`, unless they are kept already."""
        path = self.logits_path(section)
        stored = KeptLogits.read(path)
        if stored is not None and stored.next.shape[0] == sum(p.positions for p in section.passages):
            self.reused += 1
            return
        parts: list[KeptLogits] = []

        def collect(logits: torch.Tensor, following: torch.Tensor) -> None:
            parts.append(kept_logits.keep(logits, following))

        self.feed(self.exact, section, collect)
        kept_logits.join(parts).write(path)

    def compare(self, candidate: Candidate, section: Section) -> BlockSums:
        path = self.folder / f"{candidate.key}-{section.key}.json"
        done = _read_json(path)
        if done:
            self.reused += 1
            return BlockSums(**{name: tuple(values) for name, values in done.items()})
        reference = KeptLogits.read(self.logits_path(section))
        assert reference is not None, "`keep` comes first"
        parts: list[kept_logits.Divergence] = []
        at = 0

        def collect(logits: torch.Tensor, following: torch.Tensor) -> None:
            nonlocal at
            parts.append(kept_logits.compare(reference.rows(at, at + len(following)), logits, following))
            at += len(following)

        self.feed(candidate, section, collect)
        columns = [torch.cat([getattr(p, n) for p in parts]) for n in ("kl", "same", "loss")]
        sums = block_sums(section, *columns, -reference.next.double())
        if not all(map(math.isfinite, (*sums.kl, *sums.loss))):
            raise UsageError(f"{candidate.label} gives logits that are not finite on {section.name}.")
        write_json(path, asdict(sums))
        return sums

    def feed(
        self, candidate: Candidate, section: Section, collect: Callable[[torch.Tensor, torch.Tensor], None]
    ) -> None:
        """Call `collect` with the logits of every position that counts, ROWS at a time, and the tokens that follow."""
        for number, passage in enumerate(section.passages, 1):
            network, tokens = self.load(candidate), passage.tokens
            sequence = SingleSequence(network, len(tokens))
            for start in range(0, len(tokens) - 1, ROWS):
                self.progress(f"{candidate.label}: {section.name}, passage {number}, token {start} of {len(tokens)}")
                end = min(start + ROWS, len(tokens) - 1)
                skipped = min(max(0, passage.first - start), end - start)
                logits = sequence.feed(tokens[start:end], all_logits=True)[skipped:]
                if len(logits):
                    collect(logits, torch.tensor(tokens[start + skipped + 1 : end + 1]))

    def logits_path(self, section: Section) -> Path:
        return self.folder / f"exact-{section.key}.safetensors"

    def load(self, candidate: Candidate) -> GptOss:
        """One model at a time."""
        if self._loaded is None or self._loaded[0] != candidate.key:
            self.unload()
            self.progress(f"{candidate.label}: loading")
            with load.OpenCheckpoint(self.name) as opened:
                gates = placed_gates(opened.facts, candidate.gates, self.device)
                self._loaded = candidate.key, load.load_model(opened, gates, device=self.device)
        return self._loaded[1]

    def unload(self) -> None:
        self._loaded = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def forget(self, sections: Sequence[Section]) -> None:
        for section in sections:
            self.logits_path(section).unlink(missing_ok=True)


def needles(tokenizer: Tokenizer, lengths: Sequence[int]) -> list[Problem]:
    """Questions about texts of about nine tenths of each length, or of as few sentences as the generator has."""

    def draw(sentences: int, seed: str) -> Problem:
        return needle(Random(seed), Frame("low"), (sentences, sentences))

    def size(p: Problem) -> int:
        return len(render_prompt(tokenizer, p.prompt()))

    per_sentence = (size(draw(120, "size")) - size(draw(20, "size"))) / 100
    counts = sorted({max(20, int(0.9 * (n - ANSWER_TOKENS) / per_sentence)) for n in lengths})
    drawn = [draw(count, f"quality/{count}/{i}") for count in counts for i in range(NEEDLES)]
    return [p for p in drawn if size(p) + ANSWER_TOKENS <= max(lengths)]


def block_sums(section: Section, *columns: torch.Tensor) -> BlockSums:
    """Blocks do not reach from one passage into the next."""
    counts: list[int] = []
    for passage in section.passages:
        full, rest = divmod(passage.positions, BLOCK)
        counts += [BLOCK] * full + ([rest] if rest else [])
    return BlockSums(
        tuple(counts), *(tuple(float(part.sum()) for part in torch.split(values, counts)) for values in columns)
    )


def estimate(section: Section, sums: BlockSums, vocab: int) -> Comparison:
    loss = block_mean(sums.loss, sums.counts)
    ratio = Estimate(math.exp(loss.value), math.exp(loss.low), math.exp(loss.high), loss.samples)
    means = block_mean(sums.kl, sums.counts), block_mean(sums.same, sums.counts)
    perplexity = math.exp(min(700.0, sum(sums.exact) / sum(sums.counts)))
    return Comparison(section.name, sum(sums.counts), *means, ratio, perplexity, perplexity <= vocab)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}
