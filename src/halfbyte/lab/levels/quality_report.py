"""What the level `quality` reports: each candidate against `exact`, its checks, its verdict, and what is stored of it.

A candidate passes where the whole interval of every measure lies within its bound, fails where one lies outside, and is
INCONCLUSIVE otherwise, also where no text could be judged.
"""

from __future__ import annotations

import datetime
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from halfbyte.gates import Gates
from halfbyte.lab.result import Cell, Check, Figure, Result
from halfbyte.lab.statistics import Estimate
from halfbyte.model.quality_record import Measure, QualityEntry

PASS, FAIL, INCONCLUSIVE = "PASS", "FAIL", "INCONCLUSIVE"
# What a candidate may cost; docs/quality.md says why.
MOST_KL = 0.05  # nats a token
LEAST_SAME = 0.95
MOST_PERPLEXITY = 1.02  # over exact's
MOST_LOST = 1  # needles, and answers, that exact has right and the candidate has not
OWN = "own answers"


@dataclass(frozen=True)
class Comparison:
    """One candidate on one section."""

    section: str
    positions: int
    kl: Estimate
    same: Estimate
    perplexity: Estimate  # over exact's
    exact_perplexity: float
    judged: bool  # False: exact does not know such text


@dataclass
class CandidateReport:
    label: str
    gates: Gates
    comparisons: list[Comparison] = field(default_factory=list)
    needles: tuple[int, int, int] = (0, 0, 0)  # right, right of exact, problems
    answers: tuple[int, int, int, int] = (0, 0, 0, 0)  # the same tokens, right, right of exact, problems
    refused: str = ""
    seconds: float = 0.0

    @property
    def checks(self) -> list[tuple[Check, str]]:
        """Every check with its state."""
        graded = [
            pair
            for c in self.comparisons
            if c.judged
            for pair in (
                _grade(f"KL on {c.section}", c.kl, MOST_KL),
                _grade(f"other token on {c.section}", _complement(c.same), 1 - LEAST_SAME),
                _grade(f"perplexity lost on {c.section}", _less_one(c.perplexity), MOST_PERPLEXITY - 1),
            )
        ]
        lost = {"needles": self.needles[1] - self.needles[0], OWN: self.answers[2] - self.answers[1]}
        if not any(c.judged for c in self.comparisons):
            graded.append((Check("texts that exact can predict", False, 0.0, 1.0), INCONCLUSIVE))
        for name, count in lost.items():
            ok = count <= MOST_LOST
            graded.append((Check(f"{name} lost", ok, float(count), float(MOST_LOST)), PASS if ok else FAIL))
        return graded

    @property
    def verdict(self) -> str:
        states = {state for _, state in self.checks}
        return FAIL if self.refused or FAIL in states else INCONCLUSIVE if INCONCLUSIVE in states else PASS

    @property
    def worst(self) -> str:
        """The check that takes the largest part of its bound, among those of the verdict's state."""
        if self.refused:
            return self.refused
        own = [check for check, state in self.checks if state == self.verdict]
        return _sentence(max(own, key=lambda c: (c.value or 0.0) / (c.bound or 1.0)))

    @property
    def hardest(self) -> Comparison:
        """The judged text with the largest KL."""
        return max(self.comparisons, key=lambda c: (c.judged, c.kl.value))

    def entry(self, machine: str) -> QualityEntry:
        c = self.hardest
        date = f"{datetime.date.today():%Y-%m-%d}"
        kl, agreement, perplexity = (Measure(e.value, e.low, e.high) for e in (c.kl, c.same, c.perplexity))
        same, right, _, problems = self.answers
        return QualityEntry(
            self.label, self.verdict, self.worst, kl, agreement, perplexity, self.needles, (same, right, problems),
            date, machine,
        )  # fmt: skip

    def results(self, model: str) -> list[Result]:
        results = []
        for c in self.comparisons:
            shape = {"on": c.section, "tokens": c.positions}
            cell = Cell("quality", model, self.label, self.gates.changes(), "plan", shape)
            figures = (
                _figure("kl", "nats", c.kl), _figure("same", "%", _times(c.same, 100.0)),
                _figure("perplexity", "ratio", c.perplexity),
            )  # fmt: skip
            targets = tuple(check for check, _ in self.checks if check.what.endswith(f"on {c.section}"))
            results.append(Result(cell, figures, targets=targets))
        if self.refused:
            cell = Cell("quality", model, self.label, self.gates.changes(), "plan")
            results.append(Result(cell, refused=self.refused))
        return results

    def as_dict(self) -> dict[str, Any]:
        return {
            "label": self.label, "gates": self.gates.changes(), "verdict": self.verdict, "worst": self.worst,
            "comparisons": [asdict(c) for c in self.comparisons], "needles": list(self.needles),
            "answers": list(self.answers), "seconds": round(self.seconds, 1),
        }  # fmt: skip


@dataclass
class QualityReport:
    model: str
    machine: str
    candidates: list[CandidateReport]
    seconds: float = 0.0
    reused: int = 0  # parts that an earlier run had done
    record: Path | None = None  # where the verdict is stored

    @property
    def verdict(self) -> str:
        states = [c.verdict for c in self.candidates]
        return FAIL if FAIL in states or not states else INCONCLUSIVE if INCONCLUSIVE in states else PASS

    @property
    def ok(self) -> bool:
        return self.verdict == PASS

    def as_dict(self) -> dict[str, Any]:
        """In the form of the other levels of `check`."""
        bad = [f"{c.label}: {c.worst}" for c in self.candidates if c.verdict != PASS]
        results = [asdict(r) for c in self.candidates for r in c.results(self.model)]
        return {
            "level": "quality", "name": "quality", "verdict": self.verdict, "seconds": round(self.seconds, 1),
            "reasons": bad, "notes": [f"{self.reused} parts are from an earlier run"] if self.reused else [],
            "model": self.model, "machine": self.machine, "candidates": [c.as_dict() for c in self.candidates],
            "results": results,
        }  # fmt: skip


def _grade(title: str, e: Estimate, bound: float) -> tuple[Check, str]:
    state = PASS if e.high <= bound else FAIL if e.low > bound else INCONCLUSIVE
    return Check(title, state == PASS, e.value, bound, f"95 % interval {e.low:.3g} to {e.high:.3g}"), state


def _complement(e: Estimate) -> Estimate:
    return Estimate(1 - e.value, 1 - e.high, 1 - e.low, e.samples, e.level)


def _less_one(e: Estimate) -> Estimate:
    return Estimate(e.value - 1, e.low - 1, e.high - 1, e.samples, e.level)


def _times(e: Estimate, factor: float) -> Estimate:
    return Estimate(e.value * factor, e.low * factor, e.high * factor, e.samples, e.level)


def _figure(name: str, unit: str, e: Estimate) -> Figure:
    return Figure(name, unit, e.value, e.low, e.high, e.samples)


def _sentence(check: Check) -> str:
    note = f" ({check.note})" if check.note else ""
    return f"{check.what}: {check.value:.3g}, bound {check.bound:.3g}{note}"
