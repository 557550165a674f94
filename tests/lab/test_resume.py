"""A measurement that was killed goes on where it was: the same cells, and what was measured before counts."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from halfbyte.lab.result import from_json
from tests.lab.measure.test_http_client import PacedServer, running

pytestmark = pytest.mark.slow
WAIT_S = 300.0


def lines_of(log: Path) -> list[dict[str, object]]:
    """The whole lines of a log that somebody may be writing."""
    text = log.read_text(encoding="utf-8") if log.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def killed_after(command: list[str], log: Path, lines: int) -> list[dict[str, object]]:
    """Runs it until its log has so many lines, and kills it; what the log has then."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + WAIT_S
    try:
        while len(lines_of(log)) < lines:
            assert process.poll() is None, f"it ended with {process.returncode} before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    return lines_of(log)


def test_a_killed_bench(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    log = tmp_path / "r.json.runs"
    with running(PacedServer(0.02, 0.05)) as url:
        command = [sys.executable, "-m", "halfbyte", "bench", "--url", url, "--pp", "16", "--tg", "4,8"]
        command += ["--repeats", "4", "--out", str(out)]
        before = killed_after(command, log, 6)
        assert not out.exists()
        subprocess.run([*command, "--resume"], check=True, stdout=subprocess.DEVNULL)
    file = from_json(json.loads(out.read_text()))
    assert [r.cell.label for r in file.results] == ["pp16", "tg4", "tg8"]
    assert not log.exists()
    runs: dict[str, list[float]] = {}
    for line in before[1:]:
        run = line["run"]
        assert isinstance(run, dict)
        runs.setdefault(str(line["cell"]), []).append(run["rate"])
    assert len(runs) == 3
    for result, rates in zip(file.results, runs.values()):
        speed = result.figure("speed")
        assert speed.samples >= 4
        assert set(rates[result.detail["warm_up_runs"] :]) <= set(speed.values)


def test_a_killed_matrix(tmp_path: Path) -> None:
    """halfbyte itself, some cells: those that were measured are not started again."""
    command = [sys.executable, "-m", "halfbyte", "matrix", "--full", "graphs"]
    command += ["--device", "cpu", "--out", str(tmp_path)]
    before = killed_after(command, tmp_path / "matrix.runs", 3)[1:]
    starts = len(list(tmp_path.glob("*-matrix-*")))
    assert not (tmp_path / "results.json").exists()
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = from_json(json.loads((tmp_path / "results.json").read_text())).results
    ran = [r for r in results if not r.refused]
    kept = [line["result"] for line in before]
    assert [r.figure("decode").value for r in ran[: len(kept)]] == [
        next(f["value"] for f in k["figures"] if f["name"] == "decode")  # type: ignore[index]
        for k in kept
    ]
    assert len(list(tmp_path.glob("*-matrix-*"))) <= starts + len(ran)
    assert {r.cell.gates.get("graphs") for r in ran} == {None, "off"}
