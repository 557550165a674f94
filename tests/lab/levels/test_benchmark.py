"""Level 4: figures of an engine, INVALID where they cannot be believed, and their targets."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted_peer import LIMITS, ScriptedPeer

from halfbyte.errors import UsageError
from halfbyte.gates import Gates, parse
from halfbyte.gpu_sensor import Sample
from halfbyte.lab import receipts
from halfbyte.lab.levels.benchmark import check_benchmark
from halfbyte.lab.levels.protocol import run_levels
from halfbyte.lab.levels.subject import Subject
from halfbyte.lab.levels.targets import FOLDER, Target, Targets, read_targets, targets_for
from halfbyte.lab.measure import rounds
from halfbyte.lab.options import CheckOptions, Works
from halfbyte.lab.peers.launch import Setup
from halfbyte.lab.result import Cell, Result, figure

WORKS = Works((8,), (4,), repeats=2)
CUTLASS = parse({"moe_kernel": "cutlass"}, env={})


def subject_of(peer: ScriptedPeer, folder: Path, gates: Gates | None = None) -> Subject:
    return Subject(peer, Setup(None, gates or Gates()), folder, limits=LIMITS)


def test_figures_of_an_engine(tmp_path: Path) -> None:
    subject = subject_of(ScriptedPeer(pace=0.002), tmp_path, CUTLASS)
    (outcome,) = run_levels(subject, ["4"], CheckOptions(works=WORKS)).outcomes
    assert outcome.verdict == "PASS", outcome.reasons
    assert [r.cell.label for r in outcome.results] == ["pp8", "tg4"]
    assert all(r.figure("speed").value > 0 for r in outcome.results)
    assert {r.cell.engine for r in outcome.results} == {"scripted"}


def test_the_wrong_kernel_leaves_no_figure(tmp_path: Path) -> None:
    subject = subject_of(ScriptedPeer("wrong kernel"), tmp_path, CUTLASS)
    results, _ = check_benchmark(subject, WORKS)
    assert all(r.invalid and not r.figures for r in results)
    assert "wrong kernel path: moe_kernel cutlass: must not be seen: Using marlin" in results[0].refused
    assert results[0].detail["not_believed"]
    assert subject.diagnostics


def test_canned_streams_leave_no_figure(tmp_path: Path) -> None:
    """Asked again without a stream, the engine gives its own answer, and another one than was timed."""
    subject = subject_of(ScriptedPeer("canned streams", pace=0.02), tmp_path)
    (outcome,) = run_levels(subject, ["4"], CheckOptions(works=WORKS)).outcomes
    assert outcome.verdict == "INVALID"
    assert [r.refused[:46] for r in outcome.results] == ["the timed answer is not the engine's own: asked"[:46]] * 2


def test_a_throttled_clock_leaves_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The card's sensor is read from the engine's own log: it says 600 of 2100 MHz once it is held down."""
    subject = subject_of(ScriptedPeer("throttled", pace=0.001), tmp_path)

    def sensor() -> Sample:
        (log,) = tmp_path.glob("*/server.log")
        mhz = int(log.read_text().split("clock: ")[1].split()[0])
        return Sample(0.0, 100.0, mhz, 90, 0x40 if mhz < 1000 else 0)

    monkeypatch.setattr(rounds, "nvml_sensor", lambda: (sensor, 200.0))
    (outcome,) = run_levels(subject, ["4"], CheckOptions(works=WORKS)).outcomes
    assert outcome.verdict == "INVALID"
    assert all("throttled: heat (hardware)" in r.refused for r in outcome.results)
    assert subject.diagnostics


@pytest.mark.slow
def test_an_engine_that_dies_in_mid_answer(tmp_path: Path) -> None:
    subject = subject_of(ScriptedPeer("half answer", after=3), tmp_path)
    (outcome,) = run_levels(subject, ["4"], CheckOptions(works=WORKS)).outcomes
    assert outcome.verdict == "INVALID"
    assert "died while it was measured" in outcome.reasons[0]
    assert subject.diagnostics


# ---- targets ---------------------------------------------------------------------------------------------------------


def measured(tg32: float, pp2048: float, ttft: float, model: str = "120b") -> list[Result]:
    tg = Cell("decode", model, shape={"tg": 32, "depth": 0, "concurrency": 1})
    pp = Cell("prompt", model, shape={"pp": 2048, "depth": 0, "concurrency": 1})
    return [
        Result(tg, (figure("speed", "tok/s", tg32),)),
        Result(pp, (figure("speed", "tok/s", pp2048), figure("ttft", "ms", [ttft / 2, ttft]))),
    ]


def test_the_ladder_of_a_gb10() -> None:
    found = targets_for("NVIDIA GB10")
    assert found is not None
    (tg, pp), missed = found.judge(measured(59.0, 4600.0, 800.0))
    assert [t.ok for t in tg.targets] == [True, True, False, False]  # minimum, target, best published, stretch
    assert [t.ok for t in pp.targets] == [True, True]
    assert not missed
    _, missed = found.judge(measured(50.0, 4000.0, 1200.0))
    assert len(missed) == 3
    assert "SGLang" in missed[0]
    (other, _), missed = found.judge(measured(10.0, 10.0, 10.0, model="20b"))
    assert not other.targets
    assert not missed


def test_an_h200_is_held_against_our_receipts() -> None:
    found = targets_for("NVIDIA H200")
    assert found is not None
    assert (len(found.targets) > 0) == receipts.RESULTS.is_dir()
    assert targets_for("GeForce 256") is None
    assert targets_for("") is None


def test_files_of_targets(tmp_path: Path) -> None:
    assert sorted(p.stem for p in FOLDER.glob("*.toml")) == ["gb10", "h200"]
    path = tmp_path / "mine.toml"
    for text in ("gpus = [", "gpus = ['x']\n[[target]]\nmodel = 'm'", "[[target]]"):
        path.write_text(text)
        with pytest.raises(UsageError, match="no file of targets"):
            read_targets(path)
    with pytest.raises(UsageError, match="either least or most"):
        Target("m", {"tg": 1}, "speed", "r", "s")
    assert Targets(("x",)).judge(measured(1, 1, 1)) == (measured(1, 1, 1), [])
