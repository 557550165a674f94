"""Cells measured in rounds: each once a round, forwards and backwards in turn, so that what drifts drifts for all
alike.

The one warm-up policy of every measurement over a client, in process or HTTP, is `Runs.skipped`: the first run never
counts, and how many more belong to the warm-up is detected (`statistics.warm_up`). Rounds go on until enough runs are
left, within bounds; a cell that never settles says so. Given a `RunLog`, every run is written
down as it ends, and a measurement that was interrupted goes on where it was. A cell that fails is not tried again.
Given a `DisturbanceMeter`, a run beside other work does not count and is repeated; where most runs are disturbed, the
cell is INVALID. What a run does is the caller's; nothing here knows engines."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from halfbyte.errors import DisturbedError, InvalidFigureError, UsageError
from halfbyte.gpu_sensor import Sample, Sensor, nvml_sensor
from halfbyte.lab.measure.disturbance import Disturbance, DisturbanceMeter
from halfbyte.lab.measure.power import PowerMeter
from halfbyte.lab.result import Result
from halfbyte.lab.statistics import warm_up

DISTURBED = 4  # runs that may be disturbed before it matters whether most of them are


def most_runs(repeats: int) -> int:
    return 3 * repeats + 3


@dataclass(frozen=True)
class Measured:
    """One run of one cell."""

    rate: float
    seconds: float
    first: tuple[float, ...] = ()  # seconds to the first token, of every request
    cached: tuple[int, ...] = ()  # prompt tokens of every request that a cache held
    sequences: Sequence[Sequence[int]] = ()  # prompts and answers; not written down
    last: tuple[float, ...] = ()  # seconds to the last token, of every request
    counted_by: str = ""  # what the number of tokens rests on
    texts: Sequence[str] = ()  # of every answer; not written down
    spelled: int | None = None  # tokens that these have when they are encoded again; None where ids were sent
    answer_tokens: int = 1  # of every answer

    def as_dict(self) -> dict[str, Any]:
        return {
            "rate": self.rate, "seconds": self.seconds, "first": self.first, "cached": self.cached, "last": self.last,
            "counted_by": self.counted_by, "spelled": self.spelled,
        }  # fmt: skip


@dataclass
class CellRuns:
    """Every run of one cell so far."""

    all: list[Measured] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)  # of the power meter
    limit: float | None = None  # watts
    error: Exception | None = None
    disturbed: list[Disturbance] = field(default_factory=list)  # of runs that do not count
    load: list[Disturbance] = field(default_factory=list)  # of runs that count

    @property
    def skipped(self) -> int:
        """The first run fills caches and compiles, so it never counts; more where they differ from what follows."""
        if len(self.all) < 2:
            return len(self.all)
        return max(1, warm_up([m.rate for m in self.all]).skipped)

    @property
    def settled(self) -> bool:
        return len(self.all) < 4 or warm_up([m.rate for m in self.all]).settled

    @property
    def timed(self) -> list[Measured]:
        return self.all[self.skipped :]

    @property
    def rates(self) -> list[float]:
        return [m.rate for m in self.timed]

    @property
    def first(self) -> list[float]:
        """Seconds to the first token, of every request."""
        return [s for m in self.timed for s in m.first]

    @property
    def cached(self) -> list[int]:
        return [n for m in self.timed for n in m.cached]

    @property
    def counted_by(self) -> str:
        return ", ".join(sorted({m.counted_by for m in self.timed if m.counted_by}))

    @property
    def seconds(self) -> float:
        """The timed part of all runs."""
        return sum(m.seconds for m in self.timed)

    @property
    def sequences(self) -> Sequence[Sequence[int]]:
        """Prompts and answers of the last run, whose experts can be counted."""
        return self.all[-1].sequences

    def enough(self, repeats: int) -> bool:
        if self.error is not None or len(self.all) >= most_runs(repeats):
            return True
        return len(self.timed) >= repeats and self.settled and bool(self.all[-1].sequences)

    @property
    def power(self) -> PowerMeter:
        meter = PowerMeter(lambda: None, self.limit)
        meter.samples = self.samples
        return meter


def in_rounds(
    keys: Sequence[str],
    run: Callable[[int, int], Measured],
    repeats: int,
    log: RunLog | None = None,
    progress: Callable[[int], None] = lambda _: None,
    meter: DisturbanceMeter | None = None,
) -> list[CellRuns]:
    """`run(cell, number)` for every cell, round by round. An error ends its cell and no other."""
    cells = [CellRuns(log.runs(key) if log else []) for key in keys]
    sensor, limit = nvml_sensor() or (None, None)
    begin = None if meter is None else meter.read()
    number = 0
    while any(not r.enough(repeats) for r in cells):
        order = range(len(keys)) if number % 2 == 0 else range(len(keys) - 1, -1, -1)
        for i in order:
            if cells[i].enough(repeats):
                continue
            progress(i)
            before, count = None if meter is None else meter.read(), len(cells[i].all)
            attempt = count + len(cells[i].disturbed)
            _run(cells[i], sensor, limit, lambda i=i, n=attempt: run(i, n))  # type: ignore[misc]
            if meter is not None and before is not None:
                _leave_disturbed(cells[i], meter.read().since(before), repeats)
            if log and cells[i].error is None and len(cells[i].all) > count:
                log.add(keys[i], cells[i].all[-1])
        number += 1
    if meter is not None and begin is not None:
        _judge_short(cells, meter.read().since(begin).problem)
    return cells


def _judge_short(cells: Sequence[CellRuns], problem: str) -> None:
    """Runs that are too short to show other work are disturbed where all rounds together were, and so is one that
    contradicts itself."""
    for runs in cells:
        if problem and isinstance(runs.error, InvalidFigureError) and not isinstance(runs.error, DisturbedError):
            runs.error = DisturbedError(f"{runs.error} Around it {problem}; measure again on a quiet machine.")
        elif problem and runs.error is None and runs.load and not all(d.tells for d in runs.load):
            longest = max(d.seconds for d in runs.load)
            runs.error = DisturbedError(
                f"runs of {longest:.2g} s are too short to tell what else the machine did, and "
                f"around them {problem}; measure again on a quiet machine."
            )


def _leave_disturbed(runs: CellRuns, disturbance: Disturbance, repeats: int) -> None:
    """Take back the last run if the machine did other work meanwhile; too many of these make the cell INVALID. What
    contradicts itself beside other work, such as tokens that come in bursts, may be that work's doing, too."""
    if runs.error is not None and not isinstance(runs.error, InvalidFigureError):
        return
    if not disturbance.problem:
        if runs.error is None:
            runs.load.append(disturbance)
        return
    if runs.error is None:
        runs.all.pop()
    runs.error = None
    runs.disturbed.append(disturbance)
    if len(runs.disturbed) >= max(DISTURBED, repeats // 2) and len(runs.disturbed) > len(runs.all):
        count = len(runs.disturbed) + len(runs.all)
        runs.error = DisturbedError(
            f"{len(runs.disturbed)} of {count} runs were disturbed, the last one: {disturbance.problem}; measure again "
            "on a quiet machine."
        )


def _run(runs: CellRuns, sensor: Sensor | None, limit: float | None, work: Callable[[], Measured]) -> None:
    try:
        with PowerMeter(sensor or (lambda: None), limit) as meter:
            runs.all.append(work())
    except Exception as e:
        runs.error = e
        return
    if len(runs.all) > 1:
        runs.samples += meter.samples
        runs.limit = limit


# ---- what survives an interruption ----------------------------------------------------------------------------------


class RunLog:
    """A file of JSON lines beside a receipt: what is measured, then every run and every result as it is made.

    `identity` is all that must be the same for old runs to count: the question, the machine, the sources. A log of
    something else is refused, not mixed in.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path = path
        self._runs: dict[str, list[Measured]] = {}
        self._results: dict[str, Any] = {}
        head = {"measurement": json.loads(json.dumps(identity, default=str))}
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        if lines:
            self._read(lines, head)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(head) + "\n", encoding="utf-8")

    def _read(self, lines: Sequence[str], head: Mapping[str, Any]) -> None:
        for number, text in enumerate(lines):
            try:
                line = json.loads(text)
            except ValueError:
                if number == len(lines) - 1:  # cut off by the interruption
                    self.path.write_text("".join(f"{complete}\n" for complete in lines[:-1]), encoding="utf-8")
                    break
                raise UsageError(f"{self.path}, line {number + 1} is damaged; remove the file to begin anew.") from None
            if number == 0:
                if line != head:
                    was, now = line.get("measurement", {}), head["measurement"]
                    differs = sorted(k for k in was.keys() | now.keys() if was.get(k) != now.get(k))
                    raise UsageError(
                        f"{self.path} is of another measurement ({', '.join(differs)} differ); remove it to begin anew."
                    )
            elif "result" in line:
                self._results[line["cell"]] = line["result"]
            else:
                fields = line["run"]
                self._runs.setdefault(line["cell"], []).append(
                    Measured(
                        fields["rate"],
                        fields["seconds"],
                        tuple(fields["first"]),
                        tuple(fields["cached"]),
                        last=tuple(fields.get("last", ())),
                        counted_by=fields.get("counted_by", ""),
                        spelled=fields.get("spelled"),
                    )
                )

    def runs(self, key: str) -> list[Measured]:
        return list(self._runs.get(key, ()))

    def add(self, key: str, measured: Measured) -> None:
        self._write({"cell": key, "run": measured.as_dict()})

    def result(self, key: str) -> Any | None:
        """A result as JSON, or None."""
        return self._results.get(key)

    def keep(self, key: str, result: Result) -> None:
        self._write({"cell": key, "result": asdict(result)})

    def _write(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=str) + "\n")
