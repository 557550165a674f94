"""Level 4: how fast is it? The bench's one measuring path, over HTTP, on an engine that this run started.

A figure counts only if the kernels ran that were asked for, which is known when the engine has ended; if the answers
had their length, which the client sees to; if nothing held the card's clocks down, which the bench's power meter says;
and if it is no more than the card can do. Otherwise it is INVALID, with the reason. Targets of this GPU give verdicts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from halfbyte.errors import AskError
from halfbyte.gates import Gates, as_stored
from halfbyte.lab import environment
from halfbyte.lab.ceilings import Ceilings, beside, ceilings_here
from halfbyte.lab.levels.correctness import first_difference
from halfbyte.lab.levels.kernel_path import (
    UNPROVEN,
    PathEvidence,
    exercise,
    path_checks,
    path_problem,
    path_unproven,
)
from halfbyte.lab.levels.scores import bound_of, greedy_gaps, margin_of
from halfbyte.lab.levels.subject import Subject
from halfbyte.lab.levels.targets import targets_for
from halfbyte.lab.measure.engine_timing import measure_client
from halfbyte.lab.measure.rounds import CellRuns
from halfbyte.lab.options import Works
from halfbyte.lab.peers.asker import Asker, Question
from halfbyte.lab.peers.process import PeerProcess
from halfbyte.lab.result import DISTURBED, Cell, Check, Result
from halfbyte.lab.statistics import compare
from halfbyte.model import load

SCORED, SCORED_TOKENS = 3, 16  # runs of a cell that are looked at, at most, and tokens that are enough
Play = Callable[[PeerProcess, Cell], Sequence[Result]]  # what is timed on an engine, in cells made from this one


def play_works(works: Works, subject: Subject) -> Play:
    vocab = load.config_of(subject.model).vocab
    return lambda engine, cell: measure_client(
        subject.client(engine.url), works.all, works.repeats, cell, vocab, subject.progress, seed=subject.seed,
        meter=subject.meter, judge=partial(answer_problem, engine.asker, 2 * bound_of(subject)),
    )  # fmt: skip


def answer_problem(asker: Asker, bound: float, runs: CellRuns) -> str:
    """Why the answers that were timed last are not the engine's own; empty where they are. The engine is asked again
    while nothing is timed: where two answers part, neither token may be better by more than `bound` nats. What was
    timed is scored, too, if the engine scores prompts: its tokens must be nearly the best ones. An answer of one token
    says little, so that several of these are looked at."""
    gaps: list[float] = []
    for run in [run for run in runs.all if run.sequences][-SCORED:]:
        at = len(run.sequences[0]) - run.answer_tokens
        prompt, timed = list(run.sequences[0][:at]), tuple(run.sequences[0][at:])
        reply = asker.ask(Question(prompt, tokens=run.answer_tokens, logprobs=2, exactly=True))
        if timed[0] >= 0 and reply.tokens is not None:
            other = first_difference(timed, reply.tokens)
        else:
            other = first_other_piece(run.texts[0] if run.texts else "", reply.pieces)
        margin = 0.0 if other is None or other >= len(reply.top) else margin_of(reply.top[other])
        if margin > bound:
            return (
                f"the timed answer is not the engine's own: asked again without a stream, its token {other} is "
                f"another, by a margin of {margin:.2f} nats."
            )
        with contextlib.suppress(AskError):  # it scores no prompts
            gaps += greedy_gaps(asker, prompt, timed) if timed[0] >= 0 else []
        if len(gaps) >= SCORED_TOKENS:
            break
    mean = fmean(gaps or [0.0])
    if mean > bound:
        return f"timed answers are not greedy: scored as prompts, their tokens lie {mean:.2f} nats under the best ones."
    return ""


def first_other_piece(text: str, pieces: Sequence[str]) -> int | None:
    """The first piece that a text does not go on with; None where it holds them all."""
    for at, piece in enumerate(pieces):
        if not text.startswith(piece):
            return at
        text = text[len(piece) :]
    return None


@dataclass
class EngineMeasurement:
    """An engine of some gates: started and asked, timed, ended, and its figures as far as they can be believed.

    Its steps are separate, so that several engines can be started together and timed one at a time. After a step that
    failed the next ones do nothing. `first` is checked before anything is timed."""

    subject: Subject
    gates: Gates
    play: Play
    engine: PeerProcess
    first: Callable[[PeerProcess], list[Check]] = lambda _: []
    kind: str = "benchmark"
    seen: list[Check] = field(default_factory=list)
    timed: list[Result] = field(default_factory=list)
    peak_bytes: int | None = None
    failed: Result | None = None

    @property
    def cell(self) -> Cell:
        return self.subject.cell(self.kind, self.gates)

    def start(self) -> None:
        self.attempt(self._start)

    def _start(self) -> None:
        self.engine.__enter__()
        self.engine.drafted = exercise(self.engine.asker, self.gates)  # so that the record has every regime
        self.seen = self.first(self.engine)

    def time(self) -> None:
        self.attempt(self._time)

    def _time(self) -> None:
        self.timed = list(self.play(self.engine, self.cell))
        self.peak_bytes = self.engine.peak_bytes()
        if any(r.refused for r in self.timed) and self.engine.dies():
            raise self.engine.failure(f"{self.subject.peer.name} died while it was measured")

    def attempt(self, work: Callable[[], object]) -> None:
        if self.failed is None:
            self.failed = self.subject.attempt(self.cell, self.engine, work, trouble="could not be measured")

    def end(self) -> None:
        self.engine.stop()

    def ceilings(self) -> Ceilings | None:
        """The ceilings of an engine that computes on this machine's GPU."""
        if self.engine.launch.url:
            return None
        gates = self.gates if self.subject.peer.name == "halfbyte" else as_stored(self.gates)
        return ceilings_here(self.subject.model, gates, self.subject.setup.device)

    def facts(self, result: Result, evidence: PathEvidence) -> dict[str, Any]:
        """What a reader needs to repeat a cell, and to judge it: engine, command, memory, first tokens, drafts."""
        facts: dict[str, Any] = {
            "start_s": self.engine.startup.first_token_s,
            "version": self.engine.version,
            "command": list(self.engine.launch.command),
            "flags": list(self.subject.setup.flags),
            "peak_bytes": self.peak_bytes,
        }
        if first := next((f.values for f in result.figures if f.name == "ttft" and f.values), None):
            ordered = sorted(first)
            facts["ttft_ms"] = {"p50": median(ordered), "p99": ordered[math.ceil(0.99 * len(ordered)) - 1]}
        if (drafts := (evidence.record or {}).get("values", {}).get("speculate")) and drafts["drafted"]:
            facts["acceptance"] = drafts["accepted"] / drafts["drafted"]
        return facts

    def results(self) -> list[Result]:
        """The results of an engine that has ended."""
        if self.failed is not None:
            return [self.failed]
        engine, subject = self.engine, self.subject
        checks, evidence = path_checks(subject, engine, self.gates)
        bad = [c.sentence for c in self.seen if not c.ok]
        record = (evidence.record or {}).get("record")
        results = [replace(r, record=record, detail={**r.detail, **self.facts(r, evidence)}) for r in self.timed]
        if ceilings := self.ceilings():
            results = [beside(r, ceilings) for r in results]
        if problem := path_problem(checks):
            results = [blamed(r, problem, unproven=path_unproven(checks)) for r in results]
        if bad:
            results = [blamed(r, f"wrong answers: {'; '.join(bad)}") for r in results]
        if any(r.invalid for r in results):
            engine.failure(next(r.refused for r in results if r.invalid))
            subject.diagnostics += engine.diagnostics
        return results


def blamed(result: Result, reason: str, *, unproven: bool = False) -> Result:
    """INVALID for a reason of the engine's own, which weighs more than a busy machine. `unproven`: nothing shows
    whether it is one."""
    detail = {k: v for k, v in result.detail.items() if k not in (DISTURBED, UNPROVEN)}
    if unproven and (not result.refused or DISTURBED in result.detail):
        detail[UNPROVEN] = [reason]
    return replace(result, detail=detail).invalidated(reason)


def measure(subject: Subject, gates: Gates, play: Play, title: str = "benchmark") -> list[Result]:
    """An engine of these gates, started for this."""
    measurement = EngineMeasurement(subject, gates, play, subject.process(title, gates))
    try:
        measurement.start()
        measurement.time()
    finally:
        measurement.end()
    return measurement.results()


def check_benchmark(subject: Subject, works: Works, targets: Path | None = None) -> tuple[list[Result], list[str]]:
    """The results with their targets and, where the gates are not the baseline's, with the baseline beside them; and
    why the level fails although it measured."""
    results = measure(subject, subject.gates, play_works(works, subject))
    if subject.gates != subject.baseline and subject.peer.launch(subject.setup).command:
        baseline = measure(subject, subject.baseline, play_works(works, subject), "benchmark, baseline")
        results = [with_baseline(r, baseline) for r in results]
    gpus = environment.gpus()
    criteria = targets_for(str(gpus[0]["name"]) if gpus else "", targets)
    judged, missed = criteria.judge(results) if criteria is not None else (results, [])
    unmeasured = [f"{r.cell.label}: {r.refused}" for r in judged if r.refused and not r.invalid]
    return judged, [*missed, *unmeasured]


def with_baseline(result: Result, baseline: Sequence[Result]) -> Result:
    """The result with the same work of the baseline in its detail: speed, ratio, interval."""
    other = next((b for b in baseline if (b.cell.kind, b.cell.shape) == (result.cell.kind, result.cell.shape)), None)
    speeds = [next((f for f in r.figures if f.name == "speed"), None) for r in (result, other) if r is not None]
    if len(speeds) < 2 or speeds[0] is None or speeds[1] is None:
        reason = baseline[0].refused if baseline else ""
        return replace(result, detail={**result.detail, "baseline": {"refused": reason}})
    after, before = speeds[0], speeds[1]
    verdict = compare(before.values or (before.value,), after.values or (after.value,))
    ratio = verdict.ratio
    beside = {"speed": before.value, "ratio": ratio.value, "low": ratio.low, "high": ratio.high}
    return replace(result, detail={**result.detail, "baseline": beside})
