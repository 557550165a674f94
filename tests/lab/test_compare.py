"""What changed between two results: the environment by name, figures beyond their noise, cells that are missing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner

from halfbyte.cli.app import app
from halfbyte.gates import PRESETS
from halfbyte.lab.compare import compare_files
from halfbyte.lab.result import Cell, Result, ResultFile, figure
from halfbyte.model import load

CELL = Cell("decode", "120b", "fast", path="engine", shape={"tg": 32})


def samples(level: float, seed: int, count: int = 10) -> list[float]:
    return (level * (1 + 0.005 * np.random.default_rng(seed).standard_normal(count))).tolist()


def file(*results: Result, **environment: Any) -> ResultFile:
    return ResultFile("halfbyte bench", (), {"time": "2026-01-01", "cpu": "Xeon"} | environment, {}, results)


def speeds(level: float, seed: int, unit: str = "tok/s", count: int = 10) -> Result:
    return Result(CELL, (figure("speed", unit, samples(level, seed, count)),))


def test_verdicts_of_figures() -> None:
    def verdict(after: float, unit: str = "tok/s", count: int = 10) -> str:
        (change,) = compare_files(file(speeds(100, 0, unit, count)), file(speeds(after, 1, unit, count))).changes
        return change.verdict

    assert verdict(92) == "regression"
    assert verdict(92, "ms") == "improvement"
    assert verdict(99) == "no difference"
    assert verdict(110) == "improvement"
    assert verdict(80, count=4) == "too few runs"
    assert verdict(80, count=1) == "no samples"
    assert verdict(80, "W") == "differs"


def test_the_environment_is_compared_by_name_and_what_always_differs_is_left_out() -> None:
    before = file(packages={"torch": "2.11"}, gpus=[{"name": "H200", "settings": {"limit_watts": 700}}], use={"s": 1})
    after = file(packages={"torch": "2.13"}, gpus=[{"name": "H200", "settings": {"limit_watts": 500}}], use={"s": 2})
    assert compare_files(before, after).environment == (
        ("gpus[0].settings.limit_watts", "700", "500"),
        ("packages.torch", "2.11", "2.13"),
    )
    assert not compare_files(before, before).environment


def test_cells_that_cannot_be_compared_are_said() -> None:
    other = Result(Cell("prompt"), (figure("speed", "tok/s", 1.0),))
    invalid = speeds(100, 0).invalidated("the card was throttled")
    found = compare_files(file(speeds(100, 0)), file(invalid, other))
    assert not found.changes
    assert "INVALID, the card was throttled" in found.only[0]
    assert found.only[1] == "prompt: only in the second"


def test_the_command_prints_it_and_can_fail(tmp_path: Path) -> None:
    file(speeds(100, 0)).write(tmp_path / "a.json")
    file(speeds(90, 1), cpu="Epyc").write(tmp_path / "b.json")
    runner = CliRunner()
    said = runner.invoke(app, ["compare", "a", "b", "--store", str(tmp_path)])
    assert said.exit_code == 0, said.output
    assert "regression" in said.stdout
    assert "Epyc" in said.stdout
    strict = runner.invoke(app, ["compare", "a", "b", "--store", str(tmp_path), "--strict", "--json"])
    assert strict.exit_code == 1
    assert json.loads(strict.stdout)["changes"][0]["verdict"] == "regression"
    assert runner.invoke(app, ["compare", "a", "a", "--store", str(tmp_path), "--strict"]).exit_code == 0


def test_only_what_changed_has_a_line(tmp_path: Path) -> None:
    def named(speed: float, **single: float) -> ResultFile:
        others = [
            Result(Cell("start", "120b", shape={"case": k}), (figure("start", "s", v),)) for k, v in single.items()
        ]
        return file(speeds(speed, 0), *others)

    named(100, cold=3.0, warm=1.0).write(tmp_path / "a.json")
    named(100, cold=3.01, warm=2.0).write(tmp_path / "b.json")
    lines = CliRunner().invoke(app, ["compare", "a", "b", "--store", str(tmp_path)]).stdout.splitlines()
    text = " ".join(" ".join(lines).split())
    assert "case warm, start: 1 → 2 s" in text
    assert "case cold" not in text
    assert "3 figures: 1 no samples, 2 as before" in text
    named(100, **{f"case{k}": 1.0 for k in range(12)}).write(tmp_path / "c.json")
    text = " ".join(CliRunner().invoke(app, ["compare", "a", "c", "--store", str(tmp_path)]).stdout.split())
    assert text.count("only in the") == 8
    assert "and 6 more cells that cannot be compared" in text


def test_a_preset_is_one_cell_however_a_file_spells_its_gates() -> None:
    def named(preset: str, **gates: str) -> ResultFile:
        return file(replace(speeds(100, 0), cell=replace(CELL, preset=preset, gates=gates)))

    layers = str(PRESETS["balanced"].gates.layers)
    for one, other in (
        (named("exact"), named("exact", activation="float", layers="checkpoint")),
        (named("balanced"), named("balanced", layers=layers)),
    ):
        assert not compare_files(one, other).only
    for one, other in (
        (named("exact"), named("balanced")),
        (named("balanced"), named("balanced", activation="int8")),
        (named("balanced"), named("balanced", layers=layers, kv_dtype="fp8")),
    ):
        assert len(compare_files(one, other).only) == 2


def test_random_weights_of_a_shape_are_one_model_however_a_file_names_them() -> None:
    def named(model: str) -> ResultFile:
        return file(replace(speeds(100, 0), cell=replace(CELL, model=model)))

    found = compare_files(named("random:120b"), named("120b"))
    assert not found.only
    assert [c.figure for c in found.changes] == ["speed"]
    assert load.resolve_model("random:20b").shape_name == Cell("decode", "random:20b").model == "20b"
