"""Level 5: did something become slower? Two configurations, measured in turn on the same machine in the same minutes.

Both engines run at once; each round gives every work to one and then to the other, the order changing from round to
round, so that what drifts drifts for both. The median of the rounds' ratios has a bootstrap interval
(`lab/statistics.py`): flagged is an estimate of more than 5 % whose 95 % interval excludes no change. Rounds go on, up
to a limit, while the interval still holds the threshold itself. Pairs are the baseline with the feature, and each prior
feature without and with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from halfbyte.errors import HalfbyteError, PeerDiedError, PeerRefusedError, UsageError
from halfbyte.gates import PRESETS, Gates
from halfbyte.lab.levels.path_level import exercise, path_checks
from halfbyte.lab.levels.subject import Subject
from halfbyte.lab.measure.engine_timing import Client, Work, run_work
from halfbyte.lab.measure.http_client import HttpClient
from halfbyte.lab.peers.process import PeerProcess
from halfbyte.lab.result import Check, Figure, Result, ResultFile, figure
from halfbyte.lab.statistics import LEAST, THRESHOLD, Verdict, compare
from halfbyte.model import load


@dataclass(frozen=True)
class Rounds:
    """Of a comparison. More than the least are run only while they could change the verdict."""

    works: tuple[Work, ...] = (Work(prompt=512), Work(tokens=64))
    least: int = 12  # with runs that waver by 1.5 %, this and `most` flag a loss of 6 % in 99 of 100 comparisons
    most: int = 48

    def __post_init__(self) -> None:
        if not LEAST <= self.least <= self.most:
            raise UsageError(f"a comparison takes {LEAST} rounds at the least, and no more at least than at most.")


@dataclass(frozen=True)
class Pair:
    name: str
    before: Gates
    after: Gates


@dataclass
class Samples:
    """Speeds of both sides, by work, round by round."""

    before: dict[Work, list[float]] = field(default_factory=dict)
    after: dict[Work, list[float]] = field(default_factory=dict)

    def verdict(self, work: Work) -> Verdict:
        return compare(self.before[work], self.after[work], paired=True)


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


def compare_clients(before: Client, after: Client, rounds: Rounds, vocab: int, seed: int = 0) -> Samples:
    """Round after round, each work on both with the same prompts. The first round warms up and is left out."""
    samples = Samples({w: [] for w in rounds.works}, {w: [] for w in rounds.works})
    for number in range(-1, rounds.most):
        for work in rounds.works:
            sides = [(before, samples.before), (after, samples.after)]
            for client, into in sides if number % 2 == 0 else sides[::-1]:
                rate = run_work(client, work, vocab, 1000 * seed + number + 1).rate
                if number >= 0:
                    into[work].append(rate)
        if number + 1 >= rounds.least and all(decided(samples.verdict(w)) for w in rounds.works):
            break
    return samples


def decided(verdict: Verdict) -> bool:
    """Whether the interval lies on one side of the threshold: more rounds would hardly change what is said."""
    low, high = 1 - verdict.ratio.high, 1 - verdict.ratio.low  # of the loss
    return high < THRESHOLD or low > THRESHOLD


def check_regression(subject: Subject, pairs: Sequence[Pair], rounds: Rounds) -> tuple[list[Result], list[str]]:
    """A result for every pair and work, and a sentence for every regression."""
    results: list[Result] = []
    for pair in pairs:
        results += compare_pair(subject, pair, rounds)
    return results, [f"{r.cell.label}: {t.note}" for r in results for t in r.targets if not t.ok]


def compare_pair(subject: Subject, pair: Pair, rounds: Rounds) -> list[Result]:
    sides: dict[str, tuple[Gates, PeerProcess]] = {}
    vocab = load.config_of(subject.model).vocab
    cell = subject.cell("regression", pair.after, against=pair.name)
    for side, gates in (("before", pair.before), ("after", pair.after)):
        sides[side] = gates, subject.process(f"regression, {pair.name}, {side}", gates)
    running = sides["before"][1]
    try:
        with ExitStack() as stack:
            for _, engine in sides.values():
                running = stack.enter_context(engine)
                exercise(engine.asker)
            clients = [HttpClient(engine.url) for _, engine in sides.values()]
            subject.progress(f"comparing with {pair.name}")
            samples = compare_clients(clients[0], clients[1], rounds, vocab)
    except PeerRefusedError as e:
        return [Result(cell, refused=str(e))]
    except PeerDiedError as e:
        return [subject.failed(cell, running, e)]
    except HalfbyteError as e:
        dead = next((p for _, p in sides.values() if p.diagnostics or not p.alive), running)
        return [subject.failed(cell, dead, dead.failure(f"{subject.peer.name} could not be measured: {e}"))]
    wrong = []
    for side, (gates, engine) in sides.items():
        checks, _ = path_checks(subject, engine, gates)
        wrong += [f"{side}: {c.what} failed: {c.note}" for c in checks if not c.ok]
    results = [_result(subject, pair, work, samples) for work in rounds.works]
    return [r.invalidated(f"wrong kernel path: {'; '.join(wrong)}") for r in results] if wrong else results


def _result(subject: Subject, pair: Pair, work: Work, samples: Samples) -> Result:
    cell = subject.cell("regression", pair.after, against=pair.name, **work.shape)
    verdict = samples.verdict(work)
    figures = [figure("speed", "tok/s", samples.after[work]), figure("before", "tok/s", samples.before[work])]
    ratio = verdict.ratio
    figures.append(Figure("ratio", "ratio", ratio.value, ratio.low, ratio.high, ratio.samples))
    ok = verdict.change not in ("regression", "too few runs")
    target = Check(f"at most {THRESHOLD:.0%} slower than {pair.name}", ok, verdict.worse, THRESHOLD, verdict.sentence)
    return Result(cell, tuple(figures), targets=(target,), detail={"change": verdict.change})


# ---- against what was measured before --------------------------------------------------------------------------------


def compare_stored(results: Sequence[Result], before: ResultFile) -> tuple[list[Result], list[str]]:
    """The same cells in a file of an earlier run: unpaired, so that the machine must be the same and as quiet."""
    earlier: Mapping[str, Result] = {_key(r): r for r in before.results if r.figures}
    judged, flagged = [], []
    for r in results:
        old = earlier.get(_key(r))
        speed = next((f for f in r.figures if f.name == "speed"), None)
        was = next((f for f in old.figures if f.name == "speed"), None) if old else None
        if speed is None or was is None or not speed.values or not was.values:
            judged.append(r)
            continue
        verdict = compare(was.values, speed.values)
        what = f"at most {THRESHOLD:.0%} slower than on {before.date}"
        check = Check(what, verdict.change != "regression", verdict.worse, THRESHOLD, verdict.sentence)
        judged.append(replace(r, targets=(*r.targets, check)))
        if not check.ok:
            flagged.append(f"{r.cell.label}: {verdict.sentence}")
    return judged, flagged


def _key(r: Result) -> str:
    c = r.cell
    return f"{c.kind} {c.model} {sorted(c.gates.items())} {c.path} {sorted(c.shape.items())} {c.engine}"
