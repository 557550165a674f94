"""What changed between two results: the environment by name, figures beyond their noise, cells that are missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner

from halfbyte.cli.app import app
from halfbyte.lab.compare import compare_files
from halfbyte.lab.result import Cell, Result, ResultFile, figure

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
