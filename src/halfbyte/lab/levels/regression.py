"""Level 5: did something become slower? Two configurations, measured in turn on the same machine in the same minutes.

Both engines run at once; each round gives every work to one and then to the other, the order changing from round to
round, so that what drifts drifts for both. The median of the rounds' ratios has a bootstrap interval
(`lab/statistics.py`): flagged is an estimate of more than 5 % whose 95 % interval excludes no change. Rounds go on, up
to a limit, while the interval still holds the threshold itself; where it does at the end, the comparison is
inconclusive. Warm-up is left out as everywhere
(`measure/rounds.py`). Pairs are the baseline with the feature, and each prior feature without and with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from halfbyte.errors import DisturbedError, HalfbyteError, InvalidFigureError, UsageError
from halfbyte.gates import PRESETS, Gates
from halfbyte.lab.levels.benchmark import EngineMeasurement
from halfbyte.lab.levels.kernel_path import path_checks, path_problem
from halfbyte.lab.levels.subject import Subject
from halfbyte.lab.measure.engine_timing import TimedClient, TimedWork, check_texts, run_work
from halfbyte.lab.measure.rounds import CellRuns
from halfbyte.lab.options import Works
from halfbyte.lab.result import Cell, Check, Figure, Result, ResultFile, figure
from halfbyte.lab.statistics import LEAST, THRESHOLD, ChangeVerdict, compare
from halfbyte.model import load


@dataclass(frozen=True)
class Rounds:
    """The rounds of a comparison. More than the least are run only while they could change the verdict."""

    works: tuple[TimedWork, ...] = (TimedWork(prompt=512), TimedWork(tokens=64))
    least: int = 12  # with runs that waver by 1.5 %, this and `most` flag a loss of 6 % in 99 of 100 comparisons
    most: int = 48

    def __post_init__(self) -> None:
        if not LEAST <= self.least <= self.most:
            raise UsageError(f"the minimum number of rounds must be between {LEAST} and the maximum.")

    @classmethod
    def of(cls, works: Works) -> Rounds:
        """Lengths that were named for level 4 hold here, too: the shortest prompt, the longest answer."""
        own, default = cls(), Works()
        prompt, answer = own.works
        if works.prompts != default.prompts:
            prompt = TimedWork(prompt=min(works.prompts))
        if works.tokens != default.tokens:
            answer = TimedWork(tokens=max(works.tokens))
        return cls((prompt, answer))


@dataclass(frozen=True)
class Pair:
    name: str
    before: Gates
    after: Gates


@dataclass
class Samples:
    """Runs of both sides, by work, round by round."""

    before: dict[TimedWork, CellRuns]
    after: dict[TimedWork, CellRuns]

    def timed(self, work: TimedWork) -> tuple[list[float], list[float]]:
        """Speeds of the rounds in which neither side was still warming up."""
        runs = self.before[work], self.after[work]
        skipped = max(r.skipped for r in runs)
        before, after = ([m.rate for m in r.all[skipped:]] for r in runs)
        return before, after

    def verdict(self, work: TimedWork) -> ChangeVerdict:
        return compare(*self.timed(work), paired=True)


def pairs_of(gates: Gates, baseline: Gates, prior: Sequence[str]) -> list[Pair]:
    """The feature against the baseline, and on top of every prior preset against that preset alone. Without a feature
    the baseline against itself, where nothing may be found."""
    pairs = [Pair("baseline" if gates != baseline else "itself", baseline, gates)]
    changes = gates.changes(baseline)
    for name in prior:
        if name not in PRESETS:
            raise UsageError(f"there is no preset {name!r}; use {', '.join(PRESETS)}.")
        before = PRESETS[name].gates
        after = replace(before, **{axis: getattr(gates, axis) for axis in changes})
        if after != before and before != baseline:
            pairs.append(Pair(name, before, after))
    return pairs


# ---- measuring -------------------------------------------------------------------------------------------------------


def compare_clients(before: TimedClient, after: TimedClient, rounds: Rounds, vocab: int, seed: int = 0) -> Samples:
    """Round after round, each work on both with the same prompts, until every verdict is clear."""
    samples = Samples({w: CellRuns() for w in rounds.works}, {w: CellRuns() for w in rounds.works})
    for number in range(2 * rounds.most):
        for work in rounds.works:
            sides = [(before, samples.before), (after, samples.after)]
            for client, runs in sides if number % 2 else sides[::-1]:
                runs[work].all.append(run_work(client, work, vocab, 1000 * seed + number))
        count = min(len(samples.timed(w)[0]) for w in rounds.works)
        if count >= rounds.most or (count >= rounds.least and all(decided(samples.verdict(w)) for w in rounds.works)):
            break
    return samples


def decided(verdict: ChangeVerdict) -> bool:
    """Whether the interval lies on one side of the threshold: more rounds would hardly change what is said."""
    low, high = 1 - verdict.ratio.high, 1 - verdict.ratio.low  # of the loss
    return high < THRESHOLD or low > THRESHOLD


def conclusion(verdict: ChangeVerdict) -> str:
    """The change, or `inconclusive` where the samples neither show a regression nor exclude one."""
    if verdict.change == "inconclusive" and 1 - verdict.ratio.low <= THRESHOLD:  # a gain that nobody asked for
        return "no difference"
    return "inconclusive" if verdict.change == "too few runs" else verdict.change


def sentences(results: Sequence[Result], change: str) -> list[str]:
    """A sentence for every comparison that came to this."""
    return [f"{r.cell.label}: {r.targets[-1].note}" for r in results if r.detail.get("change") == change]


def check_regression(subject: Subject, pairs: Sequence[Pair], rounds: Rounds) -> list[Result]:
    """A result for every pair and work."""
    return [result for pair in pairs for result in compare_pair(subject, pair, rounds)]


def compare_pair(subject: Subject, pair: Pair, rounds: Rounds) -> list[Result]:
    cell, vocab = subject.cell("regression", pair.after, against=pair.name), load.config_of(subject.model).vocab
    sides: dict[str, EngineMeasurement] = {}
    samples: Samples | None = None
    problem = ""
    for side, gates in (("before", pair.before), ("after", pair.after)):
        engine = subject.process(f"regression, {pair.name}, {side}", gates)
        sides[side] = EngineMeasurement(subject, gates, lambda *_: (), engine, kind="regression")
    try:
        for measurement in sides.values():
            if not any(s.failed for s in sides.values()):
                measurement.start()
        if not any(s.failed for s in sides.values()):
            subject.progress(f"comparing with {pair.name}")
            begin = None if subject.meter is None else subject.meter.read()
            try:
                clients = [subject.client(s.engine.url) for s in sides.values()]
                samples = compare_clients(clients[0], clients[1], rounds, vocab, subject.seed)
                for work in rounds.works:
                    check_texts(work, samples.before[work])
                    check_texts(work, samples.after[work])
                if subject.meter is not None and begin is not None:
                    problem = subject.meter.read().since(begin).problem
            except HalfbyteError as e:
                dead = next((s for s in sides.values() if not s.engine.alive), sides["after"])
                if subject.meter is not None and begin is not None and isinstance(e, InvalidFigureError):
                    problem = subject.meter.read().since(begin).problem
                    e = DisturbedError(f"{problem} while it was measured, and {e}") if problem else e
                dead.attempt(partial(_raise, e))
    finally:
        for measurement in sides.values():
            measurement.end()
    if failed := next((s.failed for s in sides.values() if s.failed), None):
        return [replace(failed, cell=cell)]
    assert samples is not None
    paths = [
        path_problem(path_checks(subject, measurement.engine, measurement.gates)[0], f"{side}: ")
        for side, measurement in sides.items()
    ]
    results = [_result(subject, pair, work, samples) for work in rounds.works]
    if problem:  # drift concerns both sides, but a change that is found beside other work may be that work's
        changed = [r.detail.get("change") in ("regression", "improvement") for r in results]
        results = [r.invalidated(f"{problem} while it was measured") if c else r for r, c in zip(results, changed)]
    wrong = "; ".join(filter(None, paths))
    return [r.invalidated(wrong) for r in results] if wrong else results


def _raise(error: Exception) -> None:
    raise error


def _result(subject: Subject, pair: Pair, work: TimedWork, samples: Samples) -> Result:
    cell = subject.cell("regression", pair.after, against=pair.name, **work.shape)
    before, after = samples.timed(work)
    result = compared(cell, before, after, samples.verdict(work), pair.name)
    return replace(result, detail={**result.detail, "seed": subject.seed})


def compared(cell: Cell, before: Sequence[float], after: Sequence[float], verdict: ChangeVerdict, name: str) -> Result:
    figures = [figure("speed", "tok/s", after), figure("before", "tok/s", before)]
    ratio, change = verdict.ratio, conclusion(verdict)
    figures.append(Figure("ratio", "ratio", ratio.value, ratio.low, ratio.high, ratio.samples))
    label = f"no loss of {THRESHOLD:.0%}" if change == "no difference" else change
    sentence = verdict.sentence if change == verdict.change else verdict.sentence.replace(verdict.change, label, 1)
    ok = change not in ("regression", "inconclusive")
    target = Check(f"at most {THRESHOLD:.0%} slower than {name}", ok, verdict.worse, THRESHOLD, sentence)
    return Result(cell, tuple(figures), targets=(target,), detail={"change": change})


# ---- against what was measured before --------------------------------------------------------------------------------


def compare_stored(results: Sequence[Result], before: ResultFile) -> list[Result]:
    """A comparison for each cell that an earlier run has, too: unpaired, so that the machine must be the same and as
    quiet."""
    earlier: Mapping[str, Result] = {_key(r): r for r in before.results if r.figures}
    comparisons = []
    for r in results:
        old = earlier.get(_key(r))
        speed = next((f for f in r.figures if f.name == "speed"), None)
        was = next((f for f in old.figures if f.name == "speed"), None) if old else None
        if speed is None or was is None:
            continue
        old_speeds, speeds = was.values or (was.value,), speed.values or (speed.value,)
        cell = replace(r.cell, kind="regression", shape={**r.cell.shape, "against": before.date})
        comparisons.append(compared(cell, old_speeds, speeds, compare(old_speeds, speeds), f"on {before.date}"))
    return comparisons


_ADDRESS = re.compile(r"(https?://)?([\w.-]+|\[[0-9a-f:]+\]):\d+")


def _key(r: Result) -> str:
    """A cell's name; at which address a server answered is no part of it."""
    c, engine = r.cell, _ADDRESS.sub("server", r.cell.engine)
    return f"{c.kind} {c.model} {sorted(c.gates.items())} {c.path} {sorted(c.shape.items())} {engine}"
