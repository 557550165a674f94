"""The order of levels, their verdicts, and the log that a run leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripted_peer import ScriptedPeer

from halfbyte.errors import UsageError
from halfbyte.lab.levels.correctness import Reference, first_difference
from halfbyte.lab.levels.kernel_path import UNPROVEN
from halfbyte.lab.levels.log_page import TITLES, log_markdown, write_files
from halfbyte.lab.levels.matrix import NOT_TIMED
from halfbyte.lab.levels.protocol import LEVELS, Outcome, ProtocolReport, level_numbers
from halfbyte.lab.levels.subject import Subject
from halfbyte.lab.options import StressCounts
from halfbyte.lab.peers.launch import Setup
from halfbyte.lab.result import Cell, Check, Result, figure, from_json, worst_check

CELL = Cell("smoke", "tiny")
GOOD = Result(CELL, (figure("start", "s", 2.0),), (Check("ready in time", True, 2.0, 300.0),))
BAD = Result(CELL, checks=(Check("ready in time", False, 400.0, 300.0, "a pipe | in a note"),))
COMPARED = Result(
    Cell("regression", "tiny", shape={"against": "baseline", "tg": 64, "depth": 0, "concurrency": 1}),
    (figure("speed", "tok/s", 94.0), figure("before", "tok/s", 100.0), figure("ratio", "ratio", [0.93, 0.94, 0.95])),
    targets=(Check("at most 5% slower than baseline", False, 0.06, 0.05, "a regression"),),
)
REFUSED = Result(CELL, refused="the script has no tiles")


def test_levels_by_number_and_name() -> None:
    assert level_numbers(["3", "smoke", "kernel-path"]) == ["1", "1.5", "3"]
    assert level_numbers([]) == level_numbers(["all"]) == list(LEVELS) == list(TITLES)
    with pytest.raises(UsageError, match="no level '7'"):
        level_numbers(["7"])


def test_verdicts() -> None:
    assert Outcome("1", [GOOD]).verdict == "PASS"
    assert Outcome("1", [GOOD, BAD]).verdict == "FAIL"
    assert Outcome("1.5", [BAD]).verdict == Outcome("4", [GOOD, BAD]).verdict == "INVALID"
    assert Outcome("1", [REFUSED]).verdict == "REFUSED"
    assert Outcome("6", [GOOD, REFUSED]).verdict == "PASS"  # what a matrix is there to find
    assert Outcome("6", [GOOD, BAD]).verdict == "FAIL"
    assert Outcome("2").verdict == "FAIL"  # a level without a result has shown nothing
    assert Outcome("4", [GOOD], failures=["slower"]).verdict == "FAIL"
    assert Outcome("5", [GOOD], inconclusive=["wavers"]).verdict == "INCONCLUSIVE"
    assert Outcome("1.5", [GOOD], not_proven=["no witness"]).verdict == "NOT PROVEN"
    assert Outcome("5", [BAD], inconclusive=["wavers"]).verdict == "INVALID"  # the worst is said
    assert "1 of 2 checks hold" in Outcome("1", [GOOD, BAD]).sentence


def test_a_matrix_fails_by_its_engine_alone() -> None:
    """Nothing shows a kernel: NOT PROVEN. The machine did other work: the cell ran, and has no figures."""
    cell = Cell("matrix", "tiny", gates={"speculate": "ngram"})
    unproven = Result(cell, refused="kernel path not proven: x", invalid=True, detail={UNPROVEN: ["x"]})
    busy = Result(cell, detail={NOT_TIMED: "4 of 4 runs were disturbed"})
    assert Outcome("6", [GOOD, busy]).verdict == "PASS"
    assert "2 run, 0 refused, 0 INVALID; 1 were not timed" in Outcome("6", [GOOD, busy]).sentence
    assert Outcome("6", [GOOD, unproven], not_proven=["x"]).verdict == "NOT PROVEN"
    assert Outcome("6", [GOOD, unproven, BAD], not_proven=["x"]).verdict == "FAIL"
    assert Outcome("4", [GOOD, unproven]).verdict == "INVALID"


def test_the_sentence_names_the_worst_check() -> None:
    near, far = Check("near", False, 0.3, 0.2), Check("far", False, 5.0, 0.2)
    assert worst_check([near, far, Check("fine", True, 9.0, 1.0)]) is far
    assert worst_check([Check("none is right", False, 0.0, 7.0), near]).what == "none is right"
    assert worst_check([Check("first", False), Check("second", False)]).what == "first"
    assert worst_check([Check("fine", True)]) is None


def test_reasons_are_sentences_with_their_cells() -> None:
    cell = Cell("decode", "tiny", shape={"tg": 32})
    outcome = Outcome("4", [GOOD, Result(cell, refused="it was throttled", invalid=True)])
    assert outcome.reasons == ["tg32: it was throttled."]
    assert outcome.sentence == "1 of 1 checks hold. tg32: it was throttled. Remove the cause, and measure again."


def report_of(folder: Path, *outcomes: Outcome) -> ProtocolReport:
    return ProtocolReport(Subject(ScriptedPeer(), Setup(None), folder), list(outcomes))


def test_only_a_whole_run_is_ready(tmp_path: Path) -> None:
    whole = report_of(tmp_path, *(Outcome(level, [COMPARED if level == "5" else GOOD]) for level in LEVELS))
    assert whole.ok
    assert "- [x] READY TO MERGE\n" in log_markdown(whole, {})
    part = report_of(tmp_path, Outcome("1", [GOOD]), Outcome("5", [COMPARED]))
    assert part.ok
    assert "- [ ] READY TO MERGE (not yet: level 1.5, 2, 3, 4, 6 did not run)" in log_markdown(part, {})
    for outcome in (Outcome("5", [GOOD], inconclusive=["wavers"]), Outcome("2", [GOOD], not_proven=["no reference"])):
        assert not report_of(tmp_path, outcome).ok
    broken = report_of(tmp_path, Outcome("1", [BAD]))
    assert not broken.ok
    assert "- [x] NEEDS FIXES (level 1 FAIL" in log_markdown(broken, {})
    assert "- [x] BLOCKED (level 1 REFUSED" in log_markdown(report_of(tmp_path, Outcome("1", [REFUSED])), {})


def test_what_a_run_leaves(tmp_path: Path) -> None:
    report = report_of(tmp_path, Outcome("1", [GOOD, BAD], 75.0))
    files = write_files(report, tmp_path / "out")
    assert [f.name for f in files] == ["results.json", "levels.json", "test_log.md"]
    assert from_json(json.loads(files[0].read_text())).results[0].cell == CELL
    assert json.loads(files[1].read_text())["levels"][0]["verdict"] == "FAIL"
    page = files[2].read_text()
    assert "- [ ] FAIL: 1 of 2 checks hold. failed in front of the timing: ready in time. Read the diagnostics" in page
    assert "- Duration: 1m 15s\n" in page
    assert "| ready in time | FAIL | 400 | 300 | a pipe \\| in a note |" in page
    assert "## Level 6: Combinatorial Test\n\n- [ ] not run" in page


def test_the_log_has_both_sides_of_a_comparison(tmp_path: Path) -> None:
    page = log_markdown(report_of(tmp_path, Outcome("5", [COMPARED, REFUSED])), {})
    row = next(line for line in page.splitlines() if "a regression" in line)
    assert row.endswith("| baseline | 100 | 94 tok/s | -6.0% (-7.0% to -5.0%) | FAIL | a regression |")
    assert "| REFUSED | the script has no tiles |" in page


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 9, 3], [1, 2, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == first_difference([1, 2, 3], [1, 2]) == 2


def test_bad_input_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        StressCounts(load=0)
    path = tmp_path / "reference.json"
    for text in ("{", '{"schema": "other/1"}', '{"schema": "halfbyte.reference/1", "answers": [{}]}'):
        path.write_text(text)
        with pytest.raises(UsageError):
            Reference.read(path)
