"""The test protocol: levels run one after another on one subject, each with a verdict, and what they leave behind.

    1 smoke   1.5 kernel path   2 correctness   3 stress   4 benchmark   5 regression   6 matrix

A level that fails does not stop the next: one run says all that is wrong. Levels 4 to 6 look at the kernel path of
every engine that they start themselves. This file orders and judges; what a level does stands in its own file.

    PASS           every check of the level was made and holds
    FAIL           a check shows that the engine is wrong, falls, or became slower
    INVALID        it ran, and what was measured cannot be believed
    REFUSED        the engine does not run these gates, and says so
    INCONCLUSIVE   the samples waver too much to tell a regression from none
    NOT PROVEN     nothing shows whether it holds: no witness, no reference
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from halfbyte.errors import HalfbyteError, UsageError
from halfbyte.evals.suite import Suite
from halfbyte.lab import environment
from halfbyte.lab.levels.benchmark import check_benchmark
from halfbyte.lab.levels.correctness import Reference, check_correctness, find_reference
from halfbyte.lab.levels.kernel_path import UNPROVEN, check_path
from halfbyte.lab.levels.matrix import check_matrix, counted
from halfbyte.lab.levels.regression import Rounds, check_regression, compare_stored, pairs_of, sentences
from halfbyte.lab.levels.smoke import check_smoke
from halfbyte.lab.levels.stress import check_stress
from halfbyte.lab.levels.subject import Subject
from halfbyte.lab.measure.rounds import RunLog
from halfbyte.lab.options import CheckOptions, StressCounts, run_log
from halfbyte.lab.peers.process import PeerProcess
from halfbyte.lab.result import Result, ResultFile
from halfbyte.lab.store import read_file

LEVELS = {
    "1": "smoke", "1.5": "kernel path", "2": "correctness", "3": "stress", "4": "benchmark", "5": "regression",
    "6": "matrix",
}  # fmt: skip
PASS, FAIL, INVALID, REFUSED = "PASS", "FAIL", "INVALID", "REFUSED"
INCONCLUSIVE, NOT_PROVEN = "INCONCLUSIVE", "NOT PROVEN"


ADVICE = {
    FAIL: "Read the diagnostics, or run this level alone.",
    INVALID: "Remove the cause, and measure again.",
    REFUSED: "Choose other gates.",
    INCONCLUSIVE: "Measure again on a quieter machine, or with more --repeats.",
    NOT_PROVEN: "Give a witness (--engine-log, --trace), if there is one.",
}


@dataclass
class Outcome:
    """One level's results, and its verdict."""

    level: str
    results: list[Result] = field(default_factory=list)
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)  # beside what the results say themselves
    inconclusive: list[str] = field(default_factory=list)  # comparisons that no number of samples has decided
    not_proven: list[str] = field(default_factory=list)  # what nothing shows
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return LEVELS[self.level]

    @property
    def verdict(self) -> str:
        """The worst that its results say."""
        if any(r.invalid and not (self.level == "6" and UNPROVEN in r.detail) for r in self.results):
            return INVALID if self.level in ("1.5", "4", "5") else FAIL
        if self.failures or not self.results:
            return FAIL
        if any(r.refused for r in self.results) and self.level != "6":  # a matrix is there to find refusals
            return REFUSED
        return INCONCLUSIVE if self.inconclusive else NOT_PROVEN if self.not_proven else PASS

    @property
    def reasons(self) -> list[str]:
        """Why it is not a PASS, one sentence each, with the cell where a level has several."""
        refused = [
            f"{name_of(r, self.level)}{r.refused}"
            for r in self.results
            if r.refused and (r.invalid or self.level != "6") and not (self.level == "6" and UNPROVEN in r.detail)
        ]
        return [as_sentence(s) for s in (*self.failures, *refused, *self.inconclusive, *self.not_proven)]

    @property
    def sentence(self) -> str:
        """The verdict in one line: the worst check, how many of how many, and what to do."""
        count = self.count[:1].upper() + self.count[1:]
        if self.verdict == PASS:
            return f"{count}."
        return f"{count}. {(self.reasons or ['Nothing was measured.'])[0]} {self.advice}"

    @property
    def count(self) -> str:
        """How many of how many hold."""
        checks = [c for r in self.results for c in (*r.checks, *r.targets)]
        if self.level == "6":
            return f"cells: {counted(self.results)}"
        if checks:
            return f"{sum(c.ok for c in checks)} of {len(checks)} checks hold"
        if self.level == "4":
            return f"{sum(bool(r.figures) for r in self.results)} of {len(self.results)} cells have figures"
        return "no gate was asked for, so that none was checked" if self.level == "1.5" else "no check was made"

    @property
    def advice(self) -> str:
        """What to do; empty for a PASS."""
        if (self.level, self.verdict) == ("2", NOT_PROVEN):
            return "Give a reference (--reference) if one is missing; what an engine does not offer cannot be judged."
        return "" if self.verdict == PASS else ADVICE[self.verdict]

    def as_dict(self) -> dict[str, Any]:
        return {
            "level": self.level, "name": self.name, "verdict": self.verdict, "seconds": round(self.seconds, 1),
            "sentence": self.sentence, "reasons": self.reasons, "notes": self.notes,
            "results": [asdict(r) for r in self.results],
        }  # fmt: skip


def as_sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


def name_of(result: Result, level: str) -> str:
    """A cell's name in front of its reason, where a level has several cells."""
    if level == "6":
        gates = ", ".join(f"{k}={v}" for k, v in result.cell.gates.items())
        return f"{result.cell.preset or gates or 'no gates'}: "
    return f"{result.cell.label}: " if level in ("4", "5") else ""


@dataclass
class ProtocolReport:
    subject: Subject
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def results(self) -> list[Result]:
        return [r for o in self.outcomes for r in o.results]

    @property
    def ok(self) -> bool:
        """Every level that ran is a PASS, and one did."""
        return {o.verdict for o in self.outcomes} == {PASS}

    def outcome(self, level: str) -> Outcome | None:
        return next((o for o in self.outcomes if o.level == level), None)


def level_numbers(names: Sequence[str]) -> list[str]:
    """Levels by number or name, in their order; `all`, or nothing, is every one."""
    by_name = {name.replace(" ", "-"): number for number, name in LEVELS.items()} | {n: n for n in LEVELS}
    chosen = set()
    for word in names or ("all",):
        if word == "all":
            chosen |= set(LEVELS)
        elif word in by_name:
            chosen.add(by_name[word])
        else:
            choices = ", ".join(f"{number} ({name})" for number, name in LEVELS.items())
            raise UsageError(f"there is no level {word!r}; use {choices}, or all.")
    return [number for number in LEVELS if number in chosen]


def run_levels(
    subject: Subject,
    levels: Sequence[str],
    options: CheckOptions,
    done: Callable[[Outcome], None] = lambda _: None,
    rounds: Rounds | None = None,
) -> ProtocolReport:
    """Runs the levels in order; `done` gets each outcome as its level ends. Every file is read before a start."""
    report = ProtocolReport(subject)
    reference = _reference(subject, options) if {"2", "6"} & set(levels) else None
    suite = Suite(options.suite) if options.suite else None
    before = None if options.against is None else _earlier(options.against)
    log = run_log(options.out and options.out / "matrix.runs", options.resume, "FOLDER")

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
        run("1.5", lambda o: _path(subject, o))
    shared = _Shared(subject)
    try:
        if "2" in levels:
            run("2", lambda o: _correctness(shared, o, reference, suite))
        if "3" in levels:
            run("3", lambda o: _stress(shared, o, options.counts))
    finally:
        shared.close()
    if "4" in levels:
        run("4", lambda o: _benchmark(subject, o, options))
    if "5" in levels:
        chosen = rounds or Rounds.of(options.works)
        run("5", lambda o: _regression(subject, o, report.outcome("4"), options.prior, before, chosen))
    if "6" in levels:
        run("6", lambda o: _matrix(subject, o, reference, options, log))
    return report


def _path(subject: Subject, o: Outcome) -> None:
    o.results.append(check_path(subject))
    o.not_proven += o.results[-1].detail.get(UNPROVEN, ())


def _benchmark(subject: Subject, o: Outcome, options: CheckOptions) -> None:
    o.results, o.failures = check_benchmark(subject, options.works, options.targets)


def _regression(
    subject: Subject,
    o: Outcome,
    measured: Outcome | None,
    prior: Sequence[str],
    before: ResultFile | None,
    rounds: Rounds,
) -> None:
    """Pairs in turn; and what level 4 measured against an earlier run."""
    o.results = check_regression(subject, pairs_of(subject.gates, subject.baseline, prior), rounds)
    if before is not None:
        if measured is None:
            raise UsageError("an earlier run is compared with level 4; run that, too.")
        compared = compare_stored(measured.results, before)
        o.results += compared
        if not compared:
            o.failures.append(f"none of level 4's cells is in the run of {before.date}: nothing was compared.")
        o.notes.append(f"compared with a run of {before.date}: {len(compared)} cells")
    o.failures += sentences(o.results, "regression")
    o.inconclusive += sentences(o.results, INCONCLUSIVE.lower())


def _matrix(
    subject: Subject, o: Outcome, reference: Reference | None, options: CheckOptions, path: Path | None
) -> None:
    log = None if path is None else RunLog(path, identity(subject, options))
    o.results = check_matrix(subject, reference=reference, full=options.full, log=log)
    o.not_proven += [f"{name_of(r, '6')}{r.refused}" for r in o.results if UNPROVEN in r.detail]
    if path is not None:
        path.unlink(missing_ok=True)  # all of it is in the results now


def _earlier(path: Path) -> ResultFile:
    """The results of an earlier run."""
    try:
        return read_file(path)
    except UsageError as e:
        raise UsageError(f"{path} holds no results ({e}).") from None


def identity(subject: Subject, options: CheckOptions) -> dict[str, Any]:
    """What must be the same for cells before an interruption to count."""
    setup = subject.setup
    machine = [g.get("name") for g in environment.gpus()] or environment.cpu_name()
    return {
        "engine": subject.peer.name, "model": setup.model, "device": setup.device, "flags": setup.flags,
        "full": options.full, "reference": options.reference, "machine": machine,
        "kernels": environment.source_hash(), "sources": environment.source_hash("engine"),
    }  # fmt: skip


def _reference(subject: Subject, options: CheckOptions) -> Reference | None:
    path = options.reference or find_reference(subject)
    return None if path is None else Reference.read(path)


def _correctness(shared: _Shared, o: Outcome, reference: Reference | None, suite: Suite | None) -> None:
    engine = shared.engine(o)
    if engine is not None:
        o.results.append(check_correctness(shared.subject, engine, reference, suite))
        o.not_proven += o.results[-1].detail.get(UNPROVEN, ())


def _stress(shared: _Shared, o: Outcome, counts: StressCounts) -> None:
    engine = shared.engine(o)
    if engine is not None:
        o.results.append(check_stress(shared.subject, engine, counts))


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
        if failure := self.subject.attempt(self.subject.cell(outcome.name), engine, engine.__enter__):
            outcome.results.append(failure)
            return None
        self._engine = engine
        return engine

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.stop()
