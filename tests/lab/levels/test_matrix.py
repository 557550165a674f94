"""Level 6: every pair of values that can run together stands in a cell, and what is refused is listed once."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from scripted_peer import LIMITS, ScriptedPeer

from halfbyte.errors import DisturbedError, UsageError
from halfbyte.gates import PRESETS, Gates
from halfbyte.lab.levels import matrix
from halfbyte.lab.levels.benchmark import EngineMeasurement
from halfbyte.lab.levels.kernel_path import UNPROVEN
from halfbyte.lab.levels.matrix import check_matrix, counts, covering, every, gates_of
from halfbyte.lab.levels.subject import Subject
from halfbyte.lab.measure.rounds import RunLog
from halfbyte.lab.options import Works
from halfbyte.lab.peers.launch import Launch, Setup
from halfbyte.lab.result import Cell, Result, failed_cell, read_result

AXES = {
    "moe_kernel": ("auto", "triton", "marlin", "cpu"),
    "attention": ("auto", "triton", "cpu"),
    "kv_dtype": ("auto", "bf16", "fp8"),
    "speculate": ("off", "ngram", "suffix", "draft"),
    "graphs": ("on", "off"),
}


def refuse(gates: Gates) -> str:
    """Marlin never; fp8 not with Triton's attention; and three things not together."""
    kernel = gates.moe_kernel.decode
    if kernel == "marlin":
        return "no Marlin here"
    if gates.kv_dtype == "fp8" and gates.attention == "triton":
        return "Triton's attention reads no fp8"
    if (kernel, gates.speculate, gates.graphs) == ("cpu", "draft", "off"):
        return "too much at once"
    return ""


def text_of(gates: Gates) -> dict[str, str]:
    values = gates.as_dict()
    return {axis: values[axis] for axis in AXES}


def test_every_pair_that_can_run_does() -> None:
    array = covering(refuse, AXES)
    assert not any(refuse(cell) for cell in array.cells)
    covered = {frozenset(two) for cell in array.cells for two in itertools.combinations(text_of(cell).items(), 2)}
    for (a, xs), (b, ys) in itertools.combinations(AXES.items(), 2):
        for x, y in itertools.product(xs, ys):
            allowed = not refuse(gates_of({a: x, b: y}))
            assert (frozenset([(a, x), (b, y)]) in covered) == allowed, (a, x, b, y)
    assert array.refused_values == {("moe_kernel", "marlin"): "no Marlin here"}
    assert array.refused_pairs == {(("attention", "triton"), ("kv_dtype", "fp8")): "Triton's attention reads no fp8"}
    assert len(array.cells) <= 18  # twelve is the least: kernels by speculation
    assert covering(refuse, AXES).cells == array.cells  # the same every time


def test_axes_in_full() -> None:
    assert len(every(refuse, ["graphs", "kv_dtype"]).cells) == 8
    with pytest.raises(UsageError, match="no axis 'colour'"):
        every(refuse, ["colour"])
    with pytest.raises(UsageError, match="every value of graphs"):
        covering(lambda g: "never", {"graphs": ("on", "off")})


class Picky(ScriptedPeer):
    """Refuses much, crashes in one cell, and shows another kernel than asked for in another."""

    def launch(self, setup: Setup) -> Launch:
        gates = setup.gates
        plain = gates.activation in ("auto", "float")
        if gates.moe_kernel.decode not in ("auto", "cutlass") or not plain or gates.speculate != "off":
            return Launch(refusals=("not here",))
        fault = "crash in request" if gates.graphs == "off" else "none"
        moe = "marlin" if gates.attention == "triton" else "cutlass"
        return ScriptedPeer.launch(ScriptedPeer(fault, after=1, moe=moe, pace=0.01), setup)


def test_cells_that_run_are_refused_or_are_invalid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "covering", lambda refuse: covering(refuse, {"graphs": ("on", "off")}))
    subject = Subject(Picky(), Setup(None), tmp_path, limits=LIMITS)
    results = check_matrix(subject, Works((8,), (32,), repeats=1))
    by_preset = {r.cell.preset: r for r in results}
    assert by_preset["baseline"].refused == by_preset["a"].refused == "not here"
    assert {f.name for f in by_preset["exact"].figures} == {"prompt", "decode"}
    crashed = next(r for r in results if r.cell.gates == {"graphs": "off"})
    assert crashed.invalid
    assert "outside of its memory" in crashed.refused
    assert set(PRESETS) <= set(by_preset)
    unproven = [r for r in results if r.invalid and r is not crashed]  # dense formats leave no line in a log
    assert {r.cell.preset for r in unproven} == {"balanced", "mixed", "fast"}
    assert all("kernel path not proven: layers" in r.refused for r in unproven)
    assert counts(results)["INVALID"] == 1 + len(unproven)
    assert counts(results)["run"] >= 1
    assert subject.diagnostics


def test_a_cell_that_ran_and_has_no_figure_is_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(*_: object) -> list[Result]:
        return [Result(Cell("decode", "tiny"), refused="the tokens came at once")]

    monkeypatch.setattr(matrix, "play_works", lambda works, subject: at_once)
    subject = Subject(ScriptedPeer(), Setup(None, device="cpu"), tmp_path, limits=LIMITS)
    (result,) = matrix.run_cells(subject, [(Gates(), "exact")], Works((8,), (4,), repeats=1), None)
    assert result.invalid
    assert result.refused == "the tokens came at once; it ran and could not be measured"


def test_a_cell_beside_other_work_ran_and_has_no_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disturbed(*_: object) -> list[Result]:
        return [failed_cell(Cell("decode", "tiny"), DisturbedError("4 of 4 runs were disturbed"))]

    monkeypatch.setattr(matrix, "play_works", lambda works, subject: disturbed)
    subject = Subject(ScriptedPeer(), Setup(None, device="cpu"), tmp_path, limits=LIMITS)
    works = Works((8,), (4,), repeats=1)
    log = RunLog(tmp_path / "x", {})
    (result,) = matrix.run_cells(subject, [(Gates(), "exact")], works, None, log)
    assert result.state == "measured"
    assert not result.figures
    assert "disturbed" in result.detail[matrix.NOT_TIMED]
    assert log.result(str([])) is None  # so that --resume times it
    wrong = replace(subject, setup=replace(subject.setup, gates=gates_of({"moe_kernel": "marlin"})))
    (result,) = matrix.run_cells(wrong, [(wrong.gates, "")], works, None)
    assert result.invalid
    assert "wrong kernel path" in result.refused
    assert UNPROVEN not in result.detail
    silent = replace(subject, setup=replace(subject.setup, gates=gates_of({"layers": "qkv=q8"})))
    (result,) = matrix.run_cells(silent, [(silent.gates, "")], works, None)
    assert "kernel path not proven" in result.detail[UNPROVEN][0]  # nothing speaks against it, so that it is no failure


def test_cells_of_an_interrupted_matrix_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [(gates_of({"sinks": value}), "") for value in ("auto", "on", "off")]
    identity = {"question": "x"}

    def run() -> list[Result]:
        subject = Subject(ScriptedPeer(pace=0.01), Setup(None, device="cpu"), tmp_path, limits=LIMITS)
        return matrix.run_cells(subject, cells, Works((8,), (32,), repeats=1), None, RunLog(tmp_path / "x", identity))

    timed: list[Gates] = []

    def time(self: EngineMeasurement) -> None:
        if len(timed) == 2:
            raise KeyboardInterrupt
        timed.append(self.gates)
        original(self)

    monkeypatch.setattr(matrix, "side_by_side", lambda subject: 2)
    original = EngineMeasurement.time
    with monkeypatch.context() as interrupted:
        interrupted.setattr(EngineMeasurement, "time", time)
        with pytest.raises(KeyboardInterrupt):
            run()
    before = RunLog(tmp_path / "x", identity)
    results = run()
    assert [r.cell.gates for r in results] == [{}, {"sinks": "on"}, {"sinks": "off"}]
    for gates in timed:
        told = before.result(str(sorted(gates.changes().items())))
        assert read_result(told) in results
    assert len(list(tmp_path.glob("*-matrix-cell"))) == 3  # two groups before, and the third cell again as the first
