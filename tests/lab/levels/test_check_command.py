"""`halfbyte check` as it is typed: exit codes, what it leaves, and that a mistake is one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from scripted_peer import LIMITS, ScriptedPeer

from halfbyte.cli.check import show
from halfbyte.lab.levels.protocol import Outcome
from halfbyte.lab.peers.launch import Setup
from halfbyte.lab.peers.process import PeerProcess
from halfbyte.lab.result import Cell, Check, Result, figure, from_json

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(run: Run) -> Run:
    return partial(run, "check")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["7"], "there is no level '7'"),
        (["1", "--engine", "ollama"], "there is no engine 'ollama'"),
        (["1", "--baseline", "quick"], "there is no preset 'quick'"),
        (["1", "--engine", "ftp://x"], "no address of an engine"),
        (["1", "--start-limit", "0"], "more than no seconds"),
        (["1", "--request-limit", "nan"], "not a number"),
        (["2", "--suite", "huge"], "there is no suite 'huge'"),
        (["2", "--reference", "/nowhere.json"], "is no reference of answers"),
        (["5", "--against", "/nowhere.json"], "holds no results"),
        (["4", "--pp", "many"], "--pp takes numbers"),
        (["--kit", "kit.rar"], "writes a .zip archive"),
        (["1", "--model", "/nowhere"], "does not exist"),
    ],
)
def test_mistakes_are_one_sentence(run: Run, tmp_path: Path, args: list[str], said: str) -> None:
    code, _, err = run(*args, "--device", "cpu", "--out", str(tmp_path / "out"))
    assert code == 2
    assert said in err
    assert "Traceback" not in err


def test_a_level_is_shown_with_its_reasons_and_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    cells = [Cell("decode", "tiny", shape={"tg": n}) for n in range(1, 8)]
    bad = [Result(cell, refused="it was throttled", invalid=True) for cell in cells]
    show(Outcome("4", bad, 1.5), json=False)
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[0].split()) == "level 4 benchmark INVALID 1.5 s 0 of 7 cells have figures."
    assert [line.strip() for line in lines[1:6]] == [
        *(f"tg{n}: it was throttled." for n in range(1, 5)), "… and 3 more, in test_log.md.",
    ]  # fmt: skip
    assert lines[6].strip() == "What to do: Remove the cause, and measure again."
    fast = Result(cells[0], (figure("speed", "tok/s", 812.0),), detail={"acceptance": 0.62})
    show(Outcome("4", [fast]), json=False)
    assert capsys.readouterr().out.splitlines()[1].strip() == "tg1: speed 812 tok/s, 62% of drafts accepted"
    show(Outcome("1", [Result(cells[0], checks=(Check("it answers", True),))], 2.0), json=False)
    assert " ".join(capsys.readouterr().out.split()) == "level 1 smoke PASS 2.0 s 1 of 1 checks hold."


def test_an_engine_that_runs_already(run: Run, tmp_path: Path) -> None:
    """Levels 1, 1.5 and 3 over HTTP; its log is the witness, and the engine is still there afterwards."""
    stress = ("--sequential", "3", "--prefill", "30", "--generation", "12", "--load", "5", "--at-once", "2")
    with PeerProcess(ScriptedPeer(), Setup(None), tmp_path / "engine", LIMITS) as engine:
        asked = ("--engine", engine.url, "--engine-log", str(engine.log), "--moe-kernel", "cutlass", *stress)
        code, out, err = run("1", "1.5", "3", *asked, "--out", str(tmp_path / "good"), "--json")
        assert code == 0, err
        said = json.loads(out)
        assert [(level["level"], level["verdict"]) for level in said["levels"]] == [
            ("1", "PASS"), ("1.5", "PASS"), ("3", "PASS"),
        ]  # fmt: skip
        code, out, _ = run("1.5", *asked, "--moe-kernel", "marlin", "--out", str(tmp_path / "bad"))
        assert code == 1
        assert "INVALID" in out
        assert "must not be seen: Using cutlass" in out
        assert engine.alive
    file = from_json(json.loads((tmp_path / "good" / "results.json").read_text()))
    assert file.tool == "halfbyte check"
    assert {r.cell.kind for r in file.results} == {"smoke", "kernel path", "stress"}
    assert "- [x] PASS" in (tmp_path / "good" / "test_log.md").read_text()


@pytest.mark.slow
def test_halfbyte_itself(run: Run, tmp_path: Path) -> None:
    """The embedded model on a CPU: the record is the witness, the stored reference the judge."""
    code, out, err = run("1", "1.5", "2", "--layers", "qkv=q8", "--device", "cpu", "--out", str(tmp_path), "--json")
    assert code == 0, (out, err)
    levels = {level["level"]: level for level in json.loads(out)["levels"]}
    (path,) = levels["1.5"]["results"]
    assert path["detail"]["witness"] == "record"
    assert {c["what"] for c in path["checks"]} >= {"the chosen kernels ran", "layers qkv=q8 ran"}
    assert len(levels["1"]["results"]) == 2  # with the feature, and the baseline
    (answers,) = levels["2"]["results"]
    assert {c["what"] for c in answers["checks"]} >= {"right answers", "mean length", "margin at the first difference"}
