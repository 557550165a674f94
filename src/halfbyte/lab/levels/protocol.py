"""The test protocol: levels run one after another on one subject, each with a verdict, and what they leave behind.

    1 smoke   1.5 kernel path   2 correctness   3 stress   4 benchmark   5 regression   6 matrix

A level that fails does not stop the next: one run says all that is wrong. Levels 4 to 6 look at the kernel path of
every engine that they start themselves. A level that cannot run says why. This file orders and judges; what a level
does stands in its own file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from halfbyte.errors import HalfbyteError, PeerDiedError, PeerRefusedError, UsageError
from halfbyte.evals.suite import Suite
from halfbyte.lab import environment
from halfbyte.lab.levels import answers as answers_
from halfbyte.lab.levels.benchmark import Works, check_benchmark
from halfbyte.lab.levels.matrix import check_matrix, counted
from halfbyte.lab.levels.path_level import check_path
from halfbyte.lab.levels.regression import Rounds, check_regression, compare_stored, pairs_of
from halfbyte.lab.levels.smoke import check_smoke
from halfbyte.lab.levels.subject import Subject
from halfbyte.lab.levels.under_load import Counts, check_load
from halfbyte.lab.measure.rounds import RunLog
from halfbyte.lab.peers.process import PeerProcess
from halfbyte.lab.result import Result, ResultFile

LEVELS = {
    "1": "smoke", "1.5": "kernel path", "2": "correctness", "3": "stress", "4": "benchmark", "5": "regression",
    "6": "matrix",
}  # fmt: skip
PASS, FAIL, INVALID, REFUSED, SKIPPED = "PASS", "FAIL", "INVALID", "REFUSED", "SKIPPED"


@dataclass(frozen=True)
class CheckOptions:
    counts: Counts = field(default_factory=Counts)
    suite: Suite | None = None  # None: the reference's
    reference: Path | None = None  # None: the one that comes with halfbyte, for a model that has one
    works: Works = field(default_factory=Works)
    targets: Path | None = None  # None: those of this machine's GPU, if there are any
    rounds: Rounds = field(default_factory=Rounds)
    prior: tuple[str, ...] = ()  # presets on top of which the feature is measured, too
    before: ResultFile | None = None  # an earlier run, to hold level 4 against
    full: tuple[str, ...] = ()  # axes of the matrix whose values are all combined; none: pairwise
    log: Path | None = None  # of the matrix, cell by cell: one that was interrupted goes on


@dataclass
class Outcome:
    """One level's results, and its verdict."""

    level: str
    results: list[Result] = field(default_factory=list)
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)  # beside what the results say themselves
    notes: list[str] = field(default_factory=list)
    skipped: str = ""

    @property
    def name(self) -> str:
        return LEVELS[self.level]

    @property
    def verdict(self) -> str:
        if self.skipped:
            return SKIPPED
        if self.level == "6":  # cells that an engine refuses are what a matrix is there to find
            return FAIL if self.failures or any(r.invalid for r in self.results) or not self.results else PASS
        if any(r.invalid for r in self.results):
            return INVALID if self.level in ("1.5", "4", "5") else FAIL
        if any(r.refused for r in self.results):
            return REFUSED
        return FAIL if self.failures or not self.results else PASS

    @property
    def reasons(self) -> list[str]:
        """Why it is not a PASS, one sentence each."""
        refused = [r.refused for r in self.results if r.refused and (r.invalid or self.level != "6")]
        return [*([self.skipped] if self.skipped else []), *self.failures, *refused]

    def as_dict(self) -> dict[str, Any]:
        return {
            "level": self.level, "name": self.name, "verdict": self.verdict, "seconds": round(self.seconds, 1),
            "reasons": self.reasons, "notes": self.notes, "results": [asdict(r) for r in self.results],
        }  # fmt: skip


@dataclass
class Report:
    subject: Subject
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def results(self) -> list[Result]:
        return [r for o in self.outcomes for r in o.results]

    @property
    def ok(self) -> bool:
        """Every level that ran is a PASS, and one did."""
        verdicts = [o.verdict for o in self.outcomes]
        return PASS in verdicts and set(verdicts) <= {PASS, SKIPPED}

    def outcome(self, level: str) -> Outcome | None:
        return next((o for o in self.outcomes if o.level == level), None)


def level_numbers(words: Sequence[str]) -> list[str]:
    """Levels by number or name, in their order; `all`, or nothing, is every one."""
    by_name = {name.replace(" ", "-"): number for number, name in LEVELS.items()} | {n: n for n in LEVELS}
    chosen = set()
    for word in words or ("all",):
        if word == "all":
            chosen |= set(LEVELS)
        elif word in by_name:
            chosen.add(by_name[word])
        else:
            known = ", ".join(f"{number} ({name})" for number, name in LEVELS.items())
            raise UsageError(f"there is no level {word!r}; use {known}, or all.")
    return [number for number in LEVELS if number in chosen]


def run_levels(
    subject: Subject, levels: Sequence[str], options: CheckOptions, done: Callable[[Outcome], None] = lambda _: None
) -> Report:
    """`done` is told of every level as it ends."""
    report = Report(subject)
    needs = {"2", "6"} & set(levels)
    reference = _reference(subject, options) if needs else None  # read before anything is started

    def run(level: str, work: Callable[[Outcome], None]) -> None:
        outcome = Outcome(level)
        begun = time.monotonic()
        try:
            work(outcome)
        except HalfbyteError as e:
            outcome.failures.append(str(e))
        outcome.seconds = time.monotonic() - begun
        report.outcomes.append(outcome)
        done(outcome)

    if "1" in levels:
        run("1", lambda o: o.results.extend(check_smoke(subject)))
    if "1.5" in levels:
        run("1.5", lambda o: o.results.append(check_path(subject)))
    shared = _Shared(subject)
    try:
        if "2" in levels:
            run("2", lambda o: _correctness(shared, o, reference, options.suite))
        if "3" in levels:
            run("3", lambda o: _stress(shared, o, options.counts))
    finally:
        shared.close()
    if "4" in levels:
        run("4", lambda o: _benchmark(subject, o, options))
    if "5" in levels:
        run("5", lambda o: _regression(subject, o, report.outcome("4"), options))
    if "6" in levels:
        run("6", lambda o: _matrix(subject, o, reference, options))
    return report


def _benchmark(subject: Subject, o: Outcome, options: CheckOptions) -> None:
    o.results, o.failures = check_benchmark(subject, options.works, options.targets)


def _regression(subject: Subject, o: Outcome, measured: Outcome | None, options: CheckOptions) -> None:
    """Pairs in turn; and what level 4 measured against an earlier run."""
    pairs = pairs_of(subject.gates, subject.baseline, options.prior)
    o.results, o.failures = check_regression(subject, pairs, options.rounds)
    if options.before is not None:
        if measured is None:
            raise UsageError("an earlier run is held against level 4; run that, too.")
        _, flagged = compare_stored(measured.results, options.before)
        o.failures += flagged
        o.notes.append(f"held against a run of {options.before.date}: {len(flagged)} regressions")


def _matrix(subject: Subject, o: Outcome, reference: answers_.Reference | None, options: CheckOptions) -> None:
    log = None if options.log is None else RunLog(options.log, identity(subject, options))
    o.results = check_matrix(subject, reference=reference, full=options.full, log=log)
    if options.log is not None:
        options.log.unlink(missing_ok=True)  # all of it is in the results now
    o.notes.append(counted(o.results))


def identity(subject: Subject, options: CheckOptions) -> dict[str, Any]:
    """What must be the same for cells before an interruption to count."""
    setup = subject.setup
    machine = [g.get("name") for g in environment.gpus()] or environment.cpu_name()
    return {
        "engine": subject.peer.name, "model": setup.model, "device": setup.device, "flags": setup.flags,
        "full": options.full, "reference": options.reference, "machine": machine,
        "kernels": environment.source_hash(), "sources": environment.source_hash("engine"),
    }  # fmt: skip


def _reference(subject: Subject, options: CheckOptions) -> answers_.Reference | None:
    path = options.reference or answers_.find_reference(subject)
    return None if path is None else answers_.Reference.read(path)


def _correctness(shared: _Shared, o: Outcome, reference: answers_.Reference | None, suite: Suite | None) -> None:
    engine = shared.engine(o)
    if engine is not None:
        o.results.append(answers_.check_answers(shared.subject, engine, reference, suite))
        if note := o.results[-1].detail.get("note"):
            o.notes.append(str(note))


def _stress(shared: _Shared, o: Outcome, counts: Counts) -> None:
    engine = shared.engine(o)
    if engine is not None:
        o.results.append(check_load(shared.subject, engine, counts))


class _Shared:
    """The engine that answers and load share: a large model takes long to load. One that failed is not used again."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._engine: PeerProcess | None = None

    def engine(self, outcome: Outcome) -> PeerProcess | None:
        """None, and a result that says why, if it does not start."""
        if self._engine is not None and self._engine.alive and not self._engine.diagnostics:
            return self._engine
        self.close()
        engine = self.subject.process(outcome.name)
        cell = self.subject.cell(outcome.name)
        try:
            self._engine = engine.__enter__()
        except PeerRefusedError as e:
            outcome.results.append(Result(cell, refused=str(e)))
        except PeerDiedError as e:
            outcome.results.append(self.subject.failed(cell, engine, e))
        return self._engine

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.stop()
