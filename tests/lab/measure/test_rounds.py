"""Rounds: forwards and backwards, warm-ups by detection, one failure costs one cell, an interruption costs one run."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfbyte.errors import DisturbedError, InvalidFigureError, UsageError
from halfbyte.lab.measure.disturbance import DisturbanceMeter, MachineReading
from halfbyte.lab.measure.rounds import Measured, RunLog, in_rounds, most_runs
from halfbyte.lab.result import Cell, Result, figure


def measured(rate: float) -> Measured:
    return Measured(rate, 1.0, (0.5,), (0,), [[1, 2]])


def test_cells_take_turns_forwards_and_backwards() -> None:
    order: list[str] = []

    def run(i: int, number: int) -> Measured:
        order.append(f"{'abc'[i]}{number}")
        return measured(10.0)

    found = in_rounds("abc", run, 3)
    assert order[:6] == ["a0", "b0", "c0", "c1", "b1", "a1"]
    assert [len(r.timed) for r in found] == [3, 3, 3]
    assert [r.skipped for r in found] == [1, 1, 1]


def test_a_long_warm_up_is_found_and_made_up_for() -> None:
    slow = [10.0, 50.0, 80.0]
    (runs,) = in_rounds("a", lambda _, n: measured(slow[n] if n < 3 else 100.0 + 0.1 * (n % 2)), 4)
    assert runs.skipped == 3
    assert len(runs.timed) >= 4
    assert all(m.rate >= 100 for m in runs.timed)
    assert runs.settled


def test_what_never_settles_ends_and_says_so() -> None:
    (runs,) = in_rounds("a", lambda _, n: measured(10.0 * 1.3**n), 4)
    assert len(runs.all) <= most_runs(4)
    assert not runs.settled


def test_a_cell_that_fails_costs_no_other() -> None:
    def run(i: int, number: int) -> Measured:
        if i == 1 and number == 1:
            raise RuntimeError("out of pages")
        return measured(10.0)

    good, bad = in_rounds("ab", run, 2)
    assert len(good.timed) == 2
    assert str(bad.error) == "out of pages"


def test_an_interruption_costs_one_run(tmp_path: Path) -> None:
    path, ran = tmp_path / "x.runs", list[tuple[int, int]]()

    def run(i: int, number: int) -> Measured:
        if len(ran) == 5:
            raise KeyboardInterrupt
        ran.append((i, number))
        return measured(10.0 + i)

    with pytest.raises(KeyboardInterrupt):
        in_rounds("ab", run, 4, RunLog(path, {"question": "x"}))
    text = path.read_text()
    path.write_text(text + '{"cell": "a", "run": {"ra')  # the line that was being written
    again: list[tuple[int, int]] = []

    def resumed(i: int, number: int) -> Measured:
        again.append((i, number))
        return measured(10.0 + i)

    a, b = in_rounds("ab", resumed, 4, RunLog(path, {"question": "x"}))
    assert len(a.timed) == len(b.timed) == 4
    assert sorted(ran + again) == [(i, n) for i in (0, 1) for n in range(5)]
    assert a.all[-1].sequences


def test_runs_of_another_measurement_are_refused_and_results_are_kept(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "x.runs", {"question": "x", "machine": "H200"})
    log.keep("cell", Result(Cell("serving"), (figure("speed", "tok/s", 5.0),)))
    with pytest.raises(UsageError, match="machine differ"):
        RunLog(tmp_path / "x.runs", {"question": "x", "machine": "GB10"})
    kept = RunLog(tmp_path / "x.runs", {"question": "x", "machine": "H200"}).result("cell")
    assert kept["figures"][0]["value"] == 5.0
    (tmp_path / "x.runs").write_text('{"measurement": {}}\nbroken\n{}\n')
    with pytest.raises(UsageError, match="line 2 is damaged"):
        RunLog(tmp_path / "x.runs", {})


class ScriptedMeter(DisturbanceMeter):
    """Two cores; `others` are the CPU seconds of other processes during each run. The first reading and the last
    belong to all runs together."""

    def __init__(self, others: list[float], seconds: float = 1.0, **more: float) -> None:
        self.others, self.seconds, self.more, self.reads, self.busy = iter(others), seconds, more, 0, 0.0

    def read(self) -> MachineReading:
        self.reads += 1
        ended = self.reads > 1 and self.reads % 2 == 1
        self.busy += next(self.others, 0.0) if ended else 0.0
        at = self.seconds * ((self.reads - 1) // 2)
        sums = {"stolen": 0.0, "throttled": 0.0} | {k: v * self.reads for k, v in self.more.items()}
        return MachineReading(at, 2, self.busy, own=0.0, mhz=None, **sums)


def test_a_run_beside_other_work_is_repeated() -> None:
    (runs,) = in_rounds("a", lambda _, n: measured(100.0), 4, meter=ScriptedMeter([0.0, 1.0, 0.0, 1.9]))
    assert len(runs.disturbed) == 2
    assert len(runs.timed) >= 4
    assert runs.error is None
    assert max(d.share for d in runs.load) < 0.15


@pytest.mark.parametrize(
    ("meter", "reason"),
    [
        (ScriptedMeter([1.0] * 99), "other processes used 50% of this machine's 2 cores"),
        (ScriptedMeter([], stolen=0.2), "a hypervisor took"),
        (ScriptedMeter([], throttled=1.0), "throttled"),
    ],
    ids=["busy", "stolen", "throttled"],
)
def test_a_machine_that_stays_busy_has_no_figure(meter: ScriptedMeter, reason: str) -> None:
    (runs,) = in_rounds("a", lambda _, n: measured(100.0), 8, meter=meter)
    assert isinstance(runs.error, InvalidFigureError)
    assert reason in str(runs.error)
    assert not runs.all


@pytest.mark.parametrize(("others", "quiet"), [(0.01, False), (0.0, True)])
def test_runs_too_short_for_the_ticks_are_judged_together(others: float, quiet: bool) -> None:
    """One core of two is busy otherwise: 10 ms of it in a run of 10 ms is within one tick."""
    meter = ScriptedMeter([others] * 99, seconds=0.01)
    (runs,) = in_rounds("a", lambda _, n: measured(100.0), 8, meter=meter)
    assert len(runs.timed) >= 8
    assert not runs.disturbed
    assert (runs.error is None) == quiet
    assert quiet or "runs of 0.01 s are too short" in str(runs.error)


def test_what_contradicts_itself_beside_other_work_is_repeated() -> None:
    """A burst may be the machine's doing; where it is quiet, it is the engine's."""

    def run(_: int, number: int) -> Measured:
        if number == 1:
            raise InvalidFigureError("sent in a burst")
        return measured(100.0)

    (excused,) = in_rounds("a", run, 4, meter=ScriptedMeter([0.0, 1.0, 0.0]))
    assert excused.error is None
    assert len(excused.disturbed) == 1
    (liar,) = in_rounds("a", run, 4, meter=ScriptedMeter([]))
    assert "burst" in str(liar.error)


def test_what_contradicts_itself_between_other_work_is_disturbed() -> None:
    """The run itself was quiet by chance, and all the others were not."""

    def run(cell: int, _: int) -> Measured:
        if cell == 0:
            raise InvalidFigureError("sent in a burst.")
        return measured(100.0)

    burst, _ = in_rounds("ab", run, 4, meter=ScriptedMeter([0.0, *[1.0] * 20]))
    assert isinstance(burst.error, DisturbedError)
    assert str(burst.error).startswith("sent in a burst. Around it other processes used")


def test_own_work_is_no_disturbance() -> None:
    meter = DisturbanceMeter()
    before = meter.read()
    sum(i * i for i in range(2_000_000))
    disturbance = meter.read().since(before)
    assert disturbance.seconds > 0
    own = meter.read().own - before.own
    assert own > 0
    busy = MachineReading(1.0, 2, 5.0, 0.0, 3.0, 0.0, None).since(MachineReading(0.0, 2, 4.0, 0.0, 2.0, 0.0, None))
    assert busy.others == 0.0
